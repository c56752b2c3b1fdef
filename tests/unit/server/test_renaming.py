"""Plans on other devices than those that their client named, and the choice of these."""

from __future__ import annotations

from dataclasses import replace

from heliograph_proto.devices import DeviceType
from heliograph_proto.plans import PlanOptions, RowSplit
from heliograph_server.compile.renaming import Place, choices, renamed
from heliograph_server.resources.device_names import DeviceNames


def place(name: str, free_bytes: int = 100, backend: str = "cpu") -> Place:
    return Place(name, DeviceType.CPU, backend, free_bytes)


def test_every_name_of_a_device_in_options_is_replaced() -> None:
    split = RowSplit("a", (("a", 1.0), ("b", 3.0), ("c", 2.0)))
    options = PlanOptions(
        devices=("a", "b", "c"),
        pins=(("a", (0, 1)), ("b", (2,))),
        memory=(("a", 10), ("b", 20)),
        splits=((split, (4,)),),
        buffer_types=(("a", "huge"),),
    )
    found = renamed(options, {"a": "b"})
    assert found.devices == ("b", "c")
    assert found.pins == (("b", (0, 1, 2)),)
    assert dict(found.memory) == {"b": 20}, "the limit of the device itself holds"
    assert found.splits == ((RowSplit("b", (("b", 4.0), ("c", 2.0))), (4,)),)
    assert found.buffer_types == (("b", "huge"),)
    assert renamed(options, {"z": "b"}) is options


def test_a_device_that_plans_use_already_comes_first_then_the_one_with_most_room() -> None:
    others = [place("b", 50), place("c", 90), place("d", 200)]
    found = [one["a"] for one in choices([place("a")], others, [["a", "b"]], {"a": 40})]
    assert found == ["b", "d", "c"]


def test_only_devices_of_the_same_kind_with_room_that_do_not_leave_too_are_chosen() -> None:
    others = [place("small", 10), place("gpu", 900, "cuda"), replace(place("leaves", 900), is_avoided=True)]
    assert not list(choices([place("a")], others, [], {"a": 40}))


def test_devices_of_one_member_go_to_as_many_others() -> None:
    others = [place("c", 90), place("d", 200)]
    found = list(choices([place("a"), place("b")], others, [], {"a": 40, "b": 90}))
    assert found == [{"a": "d", "b": "c"}, {"a": "c", "b": "d"}]


def test_each_device_needs_room_for_its_own_bytes_alone() -> None:
    others = [place("c", 10), place("gpu", 90, "cuda")]
    leaving = [place("a"), place("b", backend="cuda")]
    assert list(choices(leaving, others, [], {"a": 10, "b": 90})) == [{"a": "c", "b": "gpu"}]


def test_a_name_stands_for_the_last_device_in_its_place_until_its_own_is_back() -> None:
    names = DeviceNames()
    names.replace({"a": "b"})
    names.replace({"b": "c"})
    assert [names.current(one) for one in "abcd"] == ["c", "c", "c", "d"]
    names.appeared(["a"])
    assert [names.current(one) for one in "ab"] == ["a", "c"]
