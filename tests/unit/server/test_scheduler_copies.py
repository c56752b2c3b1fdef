"""What is copied between devices: weights that pass through, copies ahead of their split, rows alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

import heliograph as hg
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_server.plans.split_copies import runs_of

SEED = int(os.environ.get("SEED", "20261121"))
SECONDS = 10.0
SIDE, LAYERS, EXPERTS = 256, 6, 16
#: Of a square weight: enough to be copied ahead.
WEIGHT_BYTES = SIDE * SIDE * 4


@pytest.fixture
def random() -> np.random.Generator:
    print(f"SEED={SEED}")
    return np.random.default_rng(SEED)


@pytest.fixture
def far() -> FakeDevice:
    """A device with memory of its own, which fetches weights from the host."""
    return FakeDevice("far", 2**24, is_host=False, offloads=True)


@pytest.fixture
def session(far: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[hg.Session]:
    registry = Registry.of(far, CpuDevice("cpu0", 1, native=False))
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: registry)
    with hg.connect("local:") as made:
        yield made


class Layers:
    """Layers whose weights lie on the host, and a plan that computes them on the other device."""

    def __init__(self, session: hg.Session, random: np.random.Generator, **options: object) -> None:
        self.session = session
        self.arrays = [random.standard_normal((SIDE, SIDE), np.float32) / 16 for _ in range(LAYERS)]
        g = hg.Graph()
        h = g.input("x", (4, SIDE), "f32")
        for number in range(LAYERS):
            h = hg.tanh(h @ g.bound_weight(f"w{number}", (SIDE, SIDE), "f32"))
        g.output("y", h)
        weights = {f"w{n}": session.put(array, device="cpu0") for n, array in enumerate(self.arrays)}
        self.plan = session.compile(g, ["far", "cpu0"], weights=weights, **options)  # type: ignore[arg-type]
        self.x = random.standard_normal((4, SIDE), np.float32)

    def expected(self) -> np.ndarray:
        found = self.session.compute(self._graph(), x=self.x, devices="cpu0")["y"]
        return found

    def _graph(self) -> hg.Graph:
        g = hg.Graph()
        h = g.input("x", (4, SIDE), "f32")
        for number, array in enumerate(self.arrays):
            h = hg.tanh(h @ g.weight(f"w{number}", array))
        g.output("y", h)
        return g


def test_weights_of_the_host_pass_through_a_device_in_the_memory_of_two(
    session: hg.Session, far: FakeDevice, random: np.random.Generator
) -> None:
    layers = Layers(session, random)
    taken = far.memory().total_bytes - far.memory().free_bytes
    assert 2 * WEIGHT_BYTES <= taken < 3 * WEIGHT_BYTES
    ways = [
        [copy.ahead for copy in split.copies if copy.size_bytes == WEIGHT_BYTES]
        for split in layers.plan.explain().splits
    ]
    assert ways == [[False], *[[True]] * (LAYERS - 1)]
    for _ in range(3):
        far.script.copied.clear()
        assert np.array_equal(layers.plan.run(x=layers.x)["y"], layers.expected())
        assert [size for size in far.script.copied if size == WEIGHT_BYTES] == [WEIGHT_BYTES] * LAYERS


def test_where_memory_holds_one_weight_alone_they_come_one_after_the_other(
    session: hg.Session, far: FakeDevice, random: np.random.Generator
) -> None:
    layers = Layers(session, random, memory={"far": WEIGHT_BYTES + 40_000})
    taken = far.memory().total_bytes - far.memory().free_bytes
    assert WEIGHT_BYTES <= taken < 2 * WEIGHT_BYTES
    assert {node.device for node in layers.plan.explain().nodes if node.op == "matmul"} == {"far"}
    assert np.array_equal(layers.plan.run(x=layers.x)["y"], layers.expected())


def test_a_weight_comes_while_the_split_before_the_one_that_needs_it_computes(
    session: hg.Session, far: FakeDevice, random: np.random.Generator
) -> None:
    layers = Layers(session, random)
    first, ahead = far.script.hold("copy"), far.script.hold("copy")
    computing = far.script.hold("compute")
    run = layers.plan.submit(x=layers.x)
    assert first.entered.wait(SECONDS)
    first.open()
    assert computing.entered.wait(SECONDS)
    assert ahead.entered.wait(SECONDS)
    ahead.open()
    computing.open()
    assert np.array_equal(run.result()["y"], layers.expected())


def test_a_run_that_is_cancelled_ends_when_the_copy_that_is_under_way_does(
    session: hg.Session, far: FakeDevice, random: np.random.Generator
) -> None:
    layers = Layers(session, random)
    first, ahead = far.script.hold("copy"), far.script.hold("copy")
    computing = far.script.hold("compute")
    run = layers.plan.submit(x=layers.x)
    first.open()
    assert computing.entered.wait(SECONDS)
    assert ahead.entered.wait(SECONDS)
    run.cancel()
    ahead.open()
    with pytest.raises(hg.CancelledError):
        run.result()
    assert np.array_equal(layers.plan.run(x=layers.x)["y"], layers.expected())


def test_a_copy_ahead_that_fails_fails_the_run(
    session: hg.Session, far: FakeDevice, random: np.random.Generator
) -> None:
    layers = Layers(session, random)
    far.script.hold("copy").open()
    far.script.fail("copy", hg.ComputeFailedError("the cable is out"))
    with pytest.raises(hg.ComputeFailedError, match="the cable is out"):
        layers.plan.run(x=layers.x)
    assert np.array_equal(layers.plan.run(x=layers.x)["y"], layers.expected())


def test_of_a_table_only_the_rows_that_are_read_are_copied(
    session: hg.Session, far: FakeDevice, random: np.random.Generator
) -> None:
    table = random.standard_normal((1000, 8), np.float32)
    g = hg.Graph()
    rows = g.input("rows", (6,), "i32")
    g.output("y", hg.ops.get_rows(g.bound_weight("table", (1000, 8), "f32"), rows) * 2.0)
    plan = session.compile(g, ["far", "cpu0"], weights={"table": session.put(table, device="cpu0")})
    first = plan.explain().splits[0]
    assert (first.device, [copy.label for copy in first.copies]) == ("far", ["table (rows)"])
    for wanted in ([5, 5, 5, 5, 5, 5], [0, 1, 2, 997, 998, 999], [7, 3, 500, 4, 3, 8]):
        far.script.copied.clear()
        found = plan.run(rows=np.array(wanted, np.int32))["y"]
        assert np.array_equal(found, table[wanted] * 2)
        assert sum(far.script.copied) == len(set(wanted)) * 32
    with pytest.raises(hg.OutOfRangeError):
        plan.run(rows=np.array([0, 1, 2, 3, 4, 1000], np.int32))


def test_of_experts_only_those_that_the_router_chose_are_copied(
    session: hg.Session, far: FakeDevice, random: np.random.Generator
) -> None:
    experts = random.standard_normal((EXPERTS, SIDE, 32), np.float32)
    router = random.standard_normal((32, EXPERTS), np.float32)
    x = random.standard_normal((3, 32), np.float32)

    def graph(bound: bool) -> hg.Graph:
        g = hg.Graph()
        tokens = g.input("x", (3, 32), "f32")
        ids = hg.ops.top_k(tokens @ g.weight("router", router), k=2)
        table = g.bound_weight("experts", experts.shape, "f32") if bound else g.weight("experts", experts)
        made = hg.ops.mul_mat_id(table, hg.reshape(tokens, (3, 1, 32)), ids)
        g.output("y", made)
        g.output("ids", ids)
        return g

    bound = {"experts": session.put(experts, device="cpu0")}
    plan = session.compile(graph(bound=True), ["far", "cpu0"], weights=bound)
    found = plan.run(x=x)
    expected = session.compute(graph(bound=False), x=x, devices="cpu0")
    assert np.array_equal(found["y"], expected["y"])
    chosen = len(np.unique(found["ids"]))
    assert chosen < EXPERTS
    assert sum(size for size in far.script.copied if size >= SIDE * 32 * 4) == chosen * SIDE * 32 * 4


def test_rows_become_as_few_ranges_as_can_be(random: np.random.Generator) -> None:
    for _ in range(200):
        rows = int(random.integers(1, 40))
        numbers = random.integers(-3, rows + 3, size=tuple(random.integers(0, 6, size=2)))
        found = runs_of(numbers, rows)
        covered = [row for first, behind in found for row in range(first, behind)]
        assert covered == sorted({int(n) for n in numbers.flat if 0 <= n < rows})
        assert all(one[1] < other[0] for one, other in zip(found, found[1:], strict=False))
