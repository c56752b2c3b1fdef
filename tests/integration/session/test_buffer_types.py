"""Buffer types by choice: where on a device a plan has weights, variables, and values between splits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from forked_daemons import running_daemon

import heliograph as hg
from heliograph_backends.contract import Buffer, BufferType, Usage
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry

X = np.arange(64, dtype=np.float32).reshape(4, 16)
W = np.arange(16 * 48, dtype=np.float32).reshape(48, 16) % 5
NAMES = ["far0", "far1", "cpu0"]
EXTRAS = {"far0": "far0_extra0", "far1": "far1_extra0"}


class Taken:
    """What was allocated of a buffer type since it is watched."""

    def __init__(self, memory: BufferType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[tuple[int, Usage]] = []
        allocate = memory.allocate

        def noted(size_bytes: int, usage: Usage = Usage.ANY) -> Buffer:
            self.sizes.append((size_bytes, usage))
            return allocate(size_bytes, usage)

        monkeypatch.setattr(memory, "allocate", noted)

    @property
    def weights(self) -> list[int]:
        return [size for size, usage in self.sizes if usage is Usage.WEIGHTS]

    @property
    def others(self) -> list[int]:
        return [size for size, usage in self.sizes if usage is not Usage.WEIGHTS]


class Unread(FakeDevice):
    """It has another buffer type, in which it cannot compute."""

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        return super().supports_buffer_type(buffer_type) and buffer_type not in self.extra_buffer_types


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made = [FakeDevice(name, 2**20, extra=2, is_host=False) for name in EXTRAS]
    found = [*made, CpuDevice("cpu0", 1), Unread("unread", 2**20, extra=1, is_host=False)]
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*found))
    return found


@pytest.fixture
def extra(devices: list[Any], monkeypatch: pytest.MonkeyPatch) -> Taken:
    """What is taken of the first device's second buffer type."""
    return Taken(devices[0].extra_buffer_types[0], monkeypatch)


@pytest.fixture
def session(devices: list[Any]) -> Iterator[hg.Session]:
    with hg.connect("local:") as made:
        yield made


def counting(name: str = "count") -> hg.Graph:
    """A product, and how often there was one."""
    g = hg.Graph()
    count = g.variable(name, (5,), "f32")
    g.output("count", hg.assign(count, count + 1.0))
    y = hg.ops.mul_mat(g.weight("w", W), g.input("x", X.shape, "f32"), name="product")
    g.output("y", hg.ops.exp(hg.ops.neg(y, name="negative"), name="small"))
    return g


def test_weights_and_variables_lie_in_the_buffer_type_that_was_chosen(
    session: hg.Session, extra: Taken
) -> None:
    expected = session.compile(counting("other"), "cpu0").run(x=X)["y"]
    info = session.device("far0").buffer_types[1]
    plan = session.compile(counting(), "far0", buffer_types={session.device("far0"): info})
    for run in range(2):
        found = plan.run(x=X)
        np.testing.assert_allclose(found["y"], expected, rtol=1e-5)
        assert found["count"].tolist() == [run + 1] * 5
    assert (extra.weights, extra.others) == ([W.nbytes], [20])


def test_values_between_splits_lie_there_too(session: hg.Session, extra: Taken) -> None:
    plan = session.compile(counting(), NAMES, pins={"negative": "far1", "small": "far0"}, buffer_types=EXTRAS)
    taken = sum(extra.others)
    plan.run(x=X)
    assert plan.splits >= 3 and taken >= 20 + 2 * 4 * 48 * 4, "the variable, the product, and its negative"


def test_parts_of_weights_lie_there_too(session: hg.Session, extra: Taken) -> None:
    split = hg.SplitBufferType("far0", {"far0": 2, "far1": 1})
    plan = session.compile(counting(), NAMES, split={"w": split}, buffer_types=EXTRAS)
    assert extra.weights == [W.nbytes, W.nbytes * 2 // 3], "the whole until it is cut, and a part"
    whole = session.compile(counting("other"), "far0")
    np.testing.assert_array_equal(plan.run(x=X)["y"], whole.run(x=X)["y"])


def test_a_variable_lies_in_one_buffer_type(session: hg.Session) -> None:
    session.compile(counting(), "far0", buffer_types={"far0": "far0_extra0"}).run(x=X)
    with pytest.raises(hg.UnsupportedError, match=r"'count'.*far0_extra0, but the plan needs it in far0"):
        session.compile(counting(), "far0")
    again = session.compile(counting(), "far0", buffer_types={"far0": "far0_extra0"})
    assert again.run(x=X)["count"].tolist() == [2.0] * 5


def test_an_update_chooses_anew(session: hg.Session, extra: Taken) -> None:
    g = hg.Graph()
    g.output("y", hg.ops.mul_mat(g.weight("w", W), g.input("x", X.shape, "f32")))
    plan = session.compile(g, "far0")
    assert extra.weights == []
    expected = plan.run(x=X)["y"]
    plan.update(g, buffer_types={"far0": "far0_extra0"})
    assert extra.weights == [W.nbytes]
    np.testing.assert_array_equal(plan.run(x=X)["y"], expected)


def test_asyncio_has_the_same(devices: list[Any], extra: Taken) -> None:
    async def run() -> Any:
        async with hg.aio.connect("local:") as session:
            plan = await session.compile(counting(), "far0", buffer_types={"far0": "far0_extra0"})
            await plan.update(counting(), buffer_types={session.device("far0"): "far0_extra0"})
            return (await plan.run(x=X))["count"]

    assert asyncio.run(run()).tolist() == [1.0] * 5 and extra.weights == [W.nbytes]


def test_a_device_of_another_daemon_has_its_buffer_types() -> None:
    with ExitStack() as stack:
        member = stack.enter_context(running_daemon("--device", "fake:extra=1,memory=1MiB"))
        head = stack.enter_context(
            running_daemon("--device", f"remote:url={member}#fake0", "--device", "cpu:threads=1")
        )
        session = stack.enter_context(hg.connect(head))
        remote = session.devices[0]
        default, extra = remote.buffer_types
        plan = session.compile(counting(), remote, buffer_types={remote: extra})
        np.testing.assert_allclose(plan.run(x=X)["y"], np.exp(-(X @ W.T)), rtol=1e-5)
        with pytest.raises(hg.UnsupportedError, match=f"needs it in {default.name}"):
            session.compile(counting(), remote)


# What is refused


@pytest.mark.parametrize(
    ("buffer_types", "error", "words"),
    [
        ({"far0": "far0_extra9"}, hg.InvalidArgumentError, r"no buffer type 'far0_extra9'(.|\n)*far0_extra0"),
        ({"far0": "far1"}, hg.InvalidArgumentError, "device far0 has no buffer type 'far1'"),
        ({"far0": ""}, hg.InvalidArgumentError, r"buffer_types\['far0'\] is ''"),
        ({"far0": None}, hg.InvalidArgumentError, r"buffer_types\['far0'\] is None"),
        ({"cpu0": "cpu0"}, hg.InvalidArgumentError, "cpu0, which is not among"),
        ({"gpu7": "gpu7"}, hg.UnknownDeviceError, "gpu7"),
        ({0: "far0"}, hg.InvalidArgumentError, "a key of buffer_types is 0"),
        ("far0_extra0", hg.InvalidArgumentError, "buffer_types is str"),
        ({"unread": "unread_extra0"}, hg.UnsupportedError, "does not compute in memory of its buffer type"),
    ],
)
def test_buffer_types_that_do_not_fit(
    session: hg.Session, buffer_types: Any, error: type[hg.HeliographError], words: str
) -> None:
    with pytest.raises(error, match=words):
        session.compile(counting(), ["far0", "unread"], buffer_types=buffer_types)
    with pytest.raises(hg.InvalidArgumentError, match="names far0 twice"):
        session.compile(counting(), buffer_types={"far0": "far0", session.device("far0"): "far0"})
