"""Weights whose rows lie over several devices, over every transport: results, where rows lie, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import several_devices_fixtures
from forked_daemons import running_daemon
from several_devices_fixtures import give_local

import heliograph as hg
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.registry import Registry
from heliograph_proto.types import tensor_type
from heliograph_server.compile.plan_cache import MOST_IDLE

#: The last one has memory that no other device reaches.
DEVICES = ("cpu:threads=1", "cpu:threads=1", "fake:host=0,memory=1MiB")
NAMES = ["cpu0", "cpu1", "fake0"]
HALVES = hg.SplitBufferType("cpu0", {"cpu0": 0.5, "cpu1": 0.5})
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((8, 256)).astype(np.float32)
#: Products of these have the same bits on every device: no sum of them is rounded.
WHOLE = RANDOM.integers(-3, 4, (8, 256)).astype(np.float32)

daemon_of_several = several_devices_fixtures.daemon_of_several
url = several_devices_fixtures.url
session = several_devices_fixtures.session


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[hg.Session]:
    give_local(monkeypatch, DEVICES)
    with hg.connect("local:") as made:
        yield made


def stored(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Elements as a weight of a data type has them."""
    if dtype == "bf16":
        return (array.view(np.uint32) >> 16).astype(np.uint16)
    if dtype.endswith("_k"):
        # Any bytes are blocks; of these, none has a scale that is not finite.
        shape = tensor_type(dtype, array.shape).storage_shape
        return np.random.default_rng(array.shape[0]).integers(0, 0x30, shape).astype(np.uint8)
    return array.astype(dtype.replace("f", "float")) if dtype[0] == "f" else hg.quantize(array, dtype)


def layer(dtype: str = "f32", rows: int = 256) -> hg.Graph:
    """The sum of two products of x."""
    g, random = hg.Graph(), np.random.default_rng(5)

    def weight(name: str, *shape: int) -> hg.Value:
        array = random.integers(-3, 4, shape).astype(np.float32) / 4
        return g.weight(name, stored(array, dtype), dtype=dtype)

    x = g.input("x", (8, 256), "f32")
    with g.scope("layer"):
        gate = hg.ops.mul_mat(weight("gate", rows, 256), x, name="gated")
        up = hg.ops.mul_mat(weight("up", rows, 256), x, name="upped")
    g.output("y", hg.ops.add(gate, up, name="sum"))
    return g


def shares(plan: hg.Plan) -> list[tuple[str, str, int, int]]:
    return [(one.name, one.device, one.first, one.count) for one in plan.explain(10).weights]


# The results


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"])
def test_a_product_in_parts_has_the_bits_of_the_whole_one(local: hg.Session, dtype: str) -> None:
    expected = local.compute(layer(dtype), x=X)["y"]
    for fractions in ({"cpu0": 0.6, "cpu1": 0.4}, {"cpu1": 1, "cpu0": 9}, {"cpu0": 1e-9, "cpu1": 1}):
        plan = local.compile(layer(dtype), NAMES, split={"*": hg.SplitBufferType("cpu1", fractions)})
        np.testing.assert_array_equal(plan.run(x=X)["y"], expected, str(fractions))


@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("rows", [256, 250, 45, 3])
def test_parts_have_the_bits_of_the_whole_on_devices_that_compute_by_the_definition(
    monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int
) -> None:
    give_local(monkeypatch, ("fake", "fake", "fake"))
    random = np.random.default_rng(rows)
    g = hg.Graph()
    x = g.input("x", (tokens, 200), "f32")
    for dtype in ("f32", "f16"):
        weight = random.standard_normal((rows, 200)).astype(dtype.replace("f", "float"))
        g.output(f"rows {dtype}", hg.ops.mul_mat(g.weight(f"rows.{dtype}", weight), x))
    g.output("columns", x @ g.weight("columns", random.standard_normal((200, rows)).astype(np.float32)))
    batch = g.weight("batch", random.standard_normal((2, rows, 100)).astype(np.float32))
    g.output("batch", hg.ops.mul_mat(batch, hg.reshape(x, (2, tokens, 100))))
    given = random.standard_normal((tokens, 200)).astype(np.float32)
    with hg.connect("local:") as session:
        expected = session.compile(g, "fake0").run(x=given)
        for fractions in ({"fake0": 0.6, "fake1": 0.4}, {"fake0": 0.1, "fake1": 0.2, "fake2": 0.7}):
            split = {"*": hg.SplitBufferType("fake0", fractions)}
            plan = session.compile(g, ["fake0", "fake1", "fake2"], split=split)
            for name, found in plan.run(x=given).items():
                np.testing.assert_array_equal(found, expected[name], f"{name} {fractions}")


def test_the_parts_lie_in_memories_of_their_own(session: hg.Session) -> None:
    expected = session.compute(layer(), x=WHOLE)["y"]
    split = hg.SplitBufferType("fake0", {session.device("fake0"): 2, "cpu1": 1, "cpu0": 1})
    plan = session.compile(layer(), NAMES, split={"layer/*": split})
    for _ in range(2):
        np.testing.assert_array_equal(plan.run(x=WHOLE)["y"], expected)
    assert shares(plan)[:3] == [
        ("layer/gate", "fake0", 0, 128), ("layer/gate", "cpu1", 128, 64), ("layer/gate", "cpu0", 192, 64)
    ]  # fmt: skip
    assert plan.device == "fake0" and sorted(plan.devices) == NAMES


def test_parts_that_no_plan_uses_give_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    two_weights = 2 * 256 * 256 * 4
    devices = [CpuDevice(f"cpu{place}", 1, memory_bytes=20 * two_weights, native=False) for place in (0, 1)]
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*devices))
    with hg.connect("local:") as session:
        for tenths in range(1, 10):
            split = hg.SplitBufferType("cpu0", {"cpu0": tenths, "cpu1": 10 - tenths})
            plan = session.compile(layer(), NAMES[:2], split={"*": split})
            np.testing.assert_array_equal(plan.run(x=WHOLE)["y"].shape, (8, 256))
            plan.free()
            session.synchronize()
        taken = sum(one.memory().total_bytes - one.memory().free_bytes for one in devices)
        # Those of the plans that are kept for a while, and of one more.
        assert taken <= (MOST_IDLE + 1) * two_weights


def test_experts_batches_and_columns_are_divided_too(local: hg.Session) -> None:
    random = np.random.default_rng(8)
    g = hg.Graph()
    x, ids = g.input("x", (8, 256), "f32"), g.input("ids", (8, 2), "i32")
    rows = random.standard_normal((4, 70, 256)).astype(np.float32)
    experts = g.weight("experts", stored(rows, "q8_0"), dtype="q8_0")
    batch = g.weight("batch", random.standard_normal((2, 90, 256)).astype(np.float32))
    columns = g.weight("columns", random.standard_normal((256, 100)).astype(np.float32))
    tokens = hg.reshape(x, (8, 1, 256))
    g.output("chosen", hg.ops.mul_mat_id(experts, tokens, ids))
    g.output("both", hg.ops.mul_mat(batch, hg.reshape(x, (2, 4, 256))))
    g.output("plain", x @ columns)
    given = {"x": X, "ids": random.integers(0, 4, (8, 2)).astype(np.int32)}
    expected = local.compute(g, given)
    plan = local.compile(
        g, NAMES[:2], split={"*": hg.SplitBufferType("cpu0", {"cpu0": 1, "cpu1": 2})}, threads=1, fusion=False
    )
    for name, found in plan.run(given).items():
        np.testing.assert_array_equal(found, expected[name], name)
    columns_of = [one.rows for one in plan.explain().weights if one.are_columns]
    assert columns_of == ["columns 0 to 32", "columns 32 to 100"]


def test_rows_that_do_not_suffice_for_all_devices_lie_on_some(local: hg.Session) -> None:
    plan = local.compile(layer(rows=1), NAMES, split={"*": HALVES})
    assert [one[2:] for one in shares(plan)] == [(0, 1), (0, 1)]
    np.testing.assert_array_equal(plan.run(x=X)["y"], local.compute(layer(rows=1), x=X)["y"])
    three = hg.SplitBufferType("cpu0", {"cpu0": 1, "cpu1": 0, "fake0": 1})
    assert [one[1:] for one in shares(local.compile(layer(rows=7), NAMES, split={"layer/up": three}))] == [
        ("cpu0", 0, 4), ("fake0", 4, 3)
    ]  # fmt: skip


def test_empty_weights_are_not_divided(local: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (2, 0), "f32")
    g.output("y", hg.ops.mul_mat(g.weight("w", np.empty((6, 0), np.float32)), x))
    plan = local.compile(g, NAMES, split={"w": HALVES})
    np.testing.assert_array_equal(plan.run(x=np.empty((2, 0), np.float32))["y"], np.zeros((2, 6)))


def test_what_reads_a_weight_otherwise_reads_a_whole_copy(session: hg.Session) -> None:
    """As where words are looked up in the matrix that says how likely each is at the end."""
    g = hg.Graph()
    words = g.weight("words", RANDOM.integers(-2, 3, (64, 256)).astype(np.float32))
    found = hg.ops.get_rows(words, g.input("ids", (5,), "i32"), name="found")
    g.output("y", hg.ops.mul_mat(words, found, name="likely"))
    ids = np.array([1, 63, 0, 1, 7], np.int32)
    expected = session.compute(g, ids=ids)["y"]
    plan = session.compile(g, NAMES, split={"words": HALVES}, pins={"found": "fake0"})
    np.testing.assert_array_equal(plan.run(ids=ids)["y"], expected)
    assert shares(plan) == [
        ("words", "cpu0", 0, 32), ("words", "cpu1", 32, 32), ("words", "fake0", 0, 64)
    ]  # fmt: skip


def test_products_of_variables_are_not_moved_over_assignments(local: hg.Session) -> None:
    g = hg.Graph()
    state = g.variable("state", (8, 256), "f32")
    w = g.weight("w", RANDOM.integers(-1, 2, (64, 256)).astype(np.float32))
    before = hg.ops.mul_mat(w, state)
    g.output("now", hg.assign(state, state + 1.0))
    g.output("before", before)
    plan = local.compile(g, NAMES, split={"w": HALVES})
    sums = np.tile(plan_weight_sums(g), (8, 1))
    for run in range(3):
        np.testing.assert_array_equal(plan.run()["before"], run * sums)


def plan_weight_sums(g: hg.Graph) -> np.ndarray[Any, Any]:
    """The sum of each row of a graph's only weight."""
    (array,) = g._contents().values()
    return np.asarray(array).sum(axis=1)


def test_an_update_and_another_division_of_the_same_weights(session: hg.Session) -> None:
    expected = session.compute(layer(), x=WHOLE)["y"]
    plan = session.compile(layer(), NAMES, split={"*": HALVES})
    other = hg.SplitBufferType("cpu0", {"cpu0": 1, "fake0": 4})
    plan.update(layer(), split={"*/gate": other}, memory={"fake0": "512KiB"})
    np.testing.assert_array_equal(plan.run(x=WHOLE)["y"], expected)
    assert [one[:2] for one in shares(plan)] == [("layer/gate", "cpu0"), ("layer/gate", "fake0")]
    plan.update(layer())
    np.testing.assert_array_equal(plan.run(x=WHOLE)["y"], expected)
    assert shares(plan) == []


def test_devices_of_other_daemons_have_their_parts() -> None:
    with ExitStack() as stack:
        members = [stack.enter_context(running_daemon("--device", "cpu:threads=1")) for _ in range(2)]
        devices = [word for one in members for word in ("--device", f"remote:url={one}#cpu0")]
        head = stack.enter_context(running_daemon(*devices, "--device", "cpu:threads=1"))
        session = stack.enter_context(hg.connect(head))
        first, second, own = session.devices
        expected = session.compute(layer("q8_0"), devices=own, x=X)["y"]
        split = hg.SplitBufferType(own, {first: 2, second: 2, own: 1})
        plan = session.compile(layer("q8_0"), [own, first, second], split={"*": split})
        np.testing.assert_array_equal(plan.run(x=X)["y"], expected)
        assert [one[1] for one in shares(plan)] == [first.name, second.name, own.name] * 2


def test_asyncio_has_the_same(url: str) -> None:
    async def run() -> tuple[Any, hg.Explanation, Any]:
        async with hg.aio.connect(url) as session:
            split = hg.SplitBufferType(session.device("cpu0"), {session.device("cpu0"): 1, "fake0": 1})
            plan = await session.compile(
                layer(), NAMES, split={"*": split}, buffer_types={session.device("fake0"): "fake0"}
            )
            found = await plan.run(x=WHOLE)
            explained = await plan.explain()
            await plan.update(layer(), split={"*/up": split}, buffer_types={"fake0": "fake0"})
            return found["y"], explained, await plan.run(x=WHOLE)

    y, explained, again = asyncio.run(run())
    np.testing.assert_array_equal(again["y"], y)
    assert len(explained.weights) == 4


def test_several_runs_are_under_way_at_once(session: hg.Session) -> None:
    plan = session.compile(layer(), NAMES, split={"*": HALVES}, pipeline=2)
    runs = [plan.submit(x=WHOLE + number) for number in range(6)]
    for number, run in enumerate(runs):
        expected = session.compute(layer(), x=WHOLE + number)["y"]
        np.testing.assert_array_equal(run.result(30)["y"], expected)


def test_a_product_in_parts_is_observed_as_one(session: hg.Session) -> None:
    expected = session.compute(layer(), x=WHOLE)["y"]
    split = hg.SplitBufferType("cpu0", {"cpu0": 1, "fake0": 2})
    plan = session.compile(layer(), NAMES, split={"*": split}, buffer_types={"fake0": "fake0"})
    run = plan.submit(x=WHOLE, taps=["layer/*", "sum"])
    found = {tap.name: tap.value for tap in run.taps()}
    np.testing.assert_array_equal(run.result(30)["y"], expected)
    np.testing.assert_array_equal(found["sum"], expected)
    np.testing.assert_array_equal(found["layer/gated"] + found["layer/upped"], expected)


# Where it runs and lies


def test_parts_of_products_that_read_the_same_run_in_one_go(local: hg.Session) -> None:
    found = local.compile(layer(), NAMES, split={"*": HALVES}).explain()
    assert [(one.device, [part.name for part in one.parts], len(one.nodes)) for one in found.splits] == [
        ("cpu1", ["layer/gated", "layer/upped"], 0),
        ("cpu0", ["layer/gated", "layer/upped"], 0),
        ("cpu0", [], 3),
    ]
    first = found.nodes[0]
    assert (first.name, first.op, first.device) == ("layer/gated", "mul_mat", "cpu0")
    assert first.cause is hg.Cause.DIVIDED_WEIGHT and first.why == "divided weight of operand 0, layer/gate"
    assert [(one.name, one.weights_bytes) for one in found.devices] == [
        ("cpu0", 2 * 128 * 1024), ("cpu1", 2 * 128 * 1024), ("fake0", 0)
    ]  # fmt: skip


def test_explanations_show_the_parts(session: hg.Session) -> None:
    split = hg.SplitBufferType("cpu0", {"cpu0": 0.5, "fake0": 0.5})
    found = session.compile(layer(), NAMES, split={"*/gate": split}).explain()
    table = found.table()
    assert "0 + 1 part " in table and "rows 128 to 256" in table and "layer/gate" in table
    document = json.loads(found.json())
    assert document["weights"][1] == {
        "leaf": 1, "name": "layer/gate", "device": "fake0", "first": 128, "count": 128,
        "size_bytes": 128 * 1024, "are_columns": False,
    }  # fmt: skip
    assert {"node": 0, "first": 128, "count": 128} in [
        part for one in document["splits"] for part in one["parts"]
    ]
    (copy,) = (copy for one in found.splits for copy in one.copies if copy.name == "layer/gated")
    assert (copy.source, copy.size_bytes) == ("fake0", 8 * 128 * 4)
    dot = found.dot()
    assert 'label="layer/gated\\nmul_mat rows 128 to 256"' in dot
    assert 'p0_128 -> v3 [label="4.0 KiB\\nfake0 to cpu0"' in dot and "p0_0 -> v3;" in dot


def test_a_pin_says_where_a_product_is_joined(local: hg.Session) -> None:
    plan = local.compile(layer(), NAMES, split={"*/gate": HALVES}, pins={"layer/gated": "fake0"})
    assert plan.explain().nodes[0].device == "fake0" and len(shares(plan)) == 2
    alone = hg.SplitBufferType("cpu0", {"cpu0": 1, "cpu1": 0})
    with pytest.raises(
        hg.InvalidArgumentError, match=r"'layer/gated' is pinned to cpu1, but all rows(.|\n)*cpu0"
    ):
        local.compile(layer(), NAMES, split={"*/gate": alone}, pins={"layer/gated": "cpu1"})


def test_a_whole_that_was_cut_takes_no_memory(session: hg.Session) -> None:
    before = session.device("cpu0").memory().free_bytes, session.device("fake0").memory().free_bytes
    split = hg.SplitBufferType("cpu0", {"cpu0": 1, "fake0": 4})
    plan = session.compile(layer(), NAMES, split={"*": split})
    session.synchronize()
    took = [
        was - session.device(name).memory().free_bytes
        for was, name in zip(before, ("cpu0", "fake0"), strict=True)
    ]
    weights = {one.name: one.weights_bytes for one in plan.explain().devices}
    assert weights["cpu0"] + weights["fake0"] == 2 * 256 * 1024
    # Packed panels and intermediate results come on top.
    assert weights["fake0"] <= took[1] < weights["fake0"] + 20_000
    assert took[0] < 2 * 256 * 1024


def test_limits_of_memory_hold_for_parts(local: hg.Session) -> None:
    split = hg.SplitBufferType("cpu0", {"cpu0": 1, "cpu1": 4})
    with pytest.raises(hg.OutOfMemoryError, match="cpu1"):
        local.compile(layer(), NAMES, split={"*": split}, memory={"cpu1": "100KiB"})
    plan = local.compile(layer(), NAMES, split={"*": split}, memory={"cpu0": "400KiB"})
    np.testing.assert_array_equal(plan.run(x=X)["y"], local.compute(layer(), x=X)["y"])


# What is refused


@pytest.mark.parametrize(
    ("fractions", "words"),
    [
        ({"cpu0": -0.5, "cpu1": 1}, "'cpu0' has the fraction -0.5"),
        ({"cpu0": float("nan")}, "fraction nan"),
        ({"cpu0": 1, "cpu1": float("inf")}, "fraction inf"),
        ({"cpu0": 1e308, "cpu1": 1e308}, "the sum of the fractions .* is 0 or not finite"),
        ({"cpu0": 0, "cpu1": 0.0}, "the sum of the fractions .* is 0 or not finite"),
        ({}, "the sum of the fractions .* is 0 or not finite"),
        ({"cpu0": "half"}, "the fraction of cpu0 is 'half'"),
        ({"cpu0": None}, "the fraction of cpu0 is None"),
        ([("cpu0", 1)], "fractions is list"),
    ],
)
def test_fractions_that_say_nothing(fractions: Any, words: str) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=words):
        hg.SplitBufferType("cpu0", fractions)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"layer/gat": HALVES}, r"no weight matches 'layer/gat'(.|\n)*near names: 'layer/gate'"),
        ({"layer/gated": HALVES}, r"no weight matches 'layer/gated'(.|\n)*only other values"),
        ({"*": HALVES, "*/up": HALVES}, r"'layer/up' is split over devices by '\*' and by '\*/up'"),
        (
            {"*": hg.SplitBufferType("fake0", {"cpu0": 1})},
            r"the main device of split\['\*'\] is fake0, which",
        ),
        (
            {"*": hg.SplitBufferType("cpu0", {"fake0": 1})},
            r"a device of split\['\*'\] is fake0, which is not",
        ),
        ({"*": {"cpu0": 1}}, r"split\['\*'\] is {'cpu0': 1}"),
        ({3: HALVES}, "a key of split is a pattern, not 3"),
        (HALVES, "split is SplitBufferType"),
    ],
)
def test_splits_that_do_not_fit(local: hg.Session, split: Any, words: str) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=words):
        local.compile(layer(), ["cpu0", "cpu1"], split=split)


def test_a_device_has_one_fraction(local: hg.Session) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="'cpu1' has two fractions"):
        hg.SplitBufferType("cpu0", {"cpu1": 1, local.device("cpu1"): 2})


def test_a_device_that_the_server_lacks_is_an_unknown_device(local: hg.Session) -> None:
    with pytest.raises(hg.UnknownDeviceError, match="no device is named 'gpu7'"):
        local.compile(layer(), NAMES, split={"*": hg.SplitBufferType("cpu0", {"gpu7": 1})})


def test_a_weight_that_no_product_reads_cannot_be_divided(session: hg.Session) -> None:
    g = hg.Graph()
    g.output("y", hg.ops.add(g.input("x", (4,), "f32"), g.weight("bias", np.ones(4, np.float32)), name="sum"))
    with pytest.raises(
        hg.InvalidArgumentError, match="'bias' is to lie over devices, but node 'sum'"
    ) as caught:
        session.compile(g, NAMES, split={"bias": HALVES})
    assert caught.value.origin.op == "add" and "test_divided.py" in caught.value.origin.source


def test_a_weight_that_is_bound_to_a_tensor_cannot_be_divided(session: hg.Session) -> None:
    g = hg.Graph()
    w = g.bound_weight("w", (64, 256), "f32")
    g.output("y", hg.ops.mul_mat(w, g.input("x", (8, 256), "f32")))
    tensor = session.put(np.zeros((64, 256), np.float32))
    with pytest.raises(hg.InvalidArgumentError, match="'w' is split over devices, but is bound to a tensor"):
        session.compile(g, NAMES, weights={"w": tensor}, split={"w": HALVES})


def test_an_error_of_a_part_names_the_product(session: hg.Session) -> None:
    g = hg.Graph()
    x, ids = g.input("x", (3, 1, 32), "f32"), g.input("ids", (3, 1), "i32")
    experts = g.weight("experts", np.ones((2, 64, 32), np.float32))
    g.output("y", hg.ops.mul_mat_id(experts, x, ids, name="chosen") + 1.0)
    plan = session.compile(g, NAMES, split={"experts": HALVES})
    with pytest.raises(hg.OutOfRangeError) as caught:
        plan.run(x=np.ones((3, 1, 32), np.float32), ids=np.array([[0], [2], [1]], np.int32))
    origin = caught.value.origin
    assert (origin.op, origin.node, origin.node_name) == ("mul_mat_id", 0, "chosen")
    assert str(origin.operands[0]) == "f32[2, 64, 32]" and "test_divided.py" in origin.source
