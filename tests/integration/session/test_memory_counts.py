"""The memory of plans: the estimate, the fit and the devices themselves give one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph_backends.contract import (
    Device,
    DeviceCompileOptions,
    LeafBindings,
    MemoryEstimate,
    Plan,
)
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto.graph import Graph

KIB = 2**10
CHANCE = np.random.default_rng(3)
Bytes = dict[str, int]


def normal(*shape: int) -> Any:
    return CHANCE.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5


def chain(layers: int = 14, width: int = 100) -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (4, width), "f32")
    for number in range(layers):
        x = x @ g.weight(f"w{number}", normal(width, width))
    g.output("y", x)
    return g


def cnn() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (2, 3, 16, 16), "f32")
    for number, (wide, deep) in enumerate(((8, 3), (16, 8))):
        kernel = g.weight(f"kernel{number}", normal(wide, deep, 3, 3))
        x = hg.ops.relu(hg.ops.conv_2d(kernel, x, padding=(1, 1)))
        x = hg.ops.pool_2d(x, kernel=(2, 2), stride=(2, 2))
    g.output("y", x.reshape((2, 256)) @ g.weight("head", normal(256, 10)))
    return g


def block(g: hg.Graph, x: hg.Value, name: str, width: int = 64) -> hg.Value:
    def linear(value: hg.Value, part: str, inner: int, outer: int) -> hg.Value:
        weight, bias = (
            g.weight(f"{name}.{part}.w", normal(outer, inner)),
            g.weight(f"{name}.{part}.b", normal(outer)),
        )
        return value @ weight.mT + bias

    query, key, value = (linear(x, part, width, width) for part in "qkv")
    x = x + linear(hg.ops.soft_max(query @ key.mT) @ value, "o", width, width)
    return x + linear(
        hg.ops.gelu(linear(hg.ops.norm(x, eps=1e-5), "up", width, 4 * width)), "down", 4 * width, width
    )


def transformer() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (8, 64), "f32")
    for number in range(4):
        x = block(g, x, f"layer{number}")
    g.output("y", x)
    return g


def embedder() -> hg.Graph:
    g = hg.Graph()
    x = hg.ops.get_rows(g.weight("words", normal(300, 64)), g.input("ids", (8,), "i32"))
    for number in range(3):
        x = block(g, x, f"layer{number}")
    g.output("y", hg.ops.norm(x, eps=1e-5))
    return g


def decoder() -> hg.Graph:
    """A step of a loop, with a table of words that is also its last product."""
    g = hg.Graph()
    words = g.weight("words", normal(300, 64))
    state = g.variable("state", (8, 64), "f32")
    x = block(g, hg.assign(state, state + hg.ops.get_rows(words, g.input("ids", (8,), "i32"))), "layer")
    g.output("y", hg.ops.mul_mat(words, x))
    return g


MODELS: tuple[Callable[[], hg.Graph], ...] = (chain, cnn, transformer, embedder, decoder)


def arguments_of(graph: hg.Graph) -> dict[str, Any]:
    inputs = [leaf for leaf in graph._freeze().leaves if leaf.kind.value == "input"]
    made = {leaf.name: np.arange(leaf.type.size).reshape(leaf.type.shape) % 7 for leaf in inputs}
    return {leaf.name: made[leaf.name].astype(leaf.type.dtype.storage) for leaf in inputs}


def used(session: hg.Session) -> Bytes:
    return {one.name: one.memory().total_bytes - one.memory().free_bytes for one in session.devices}


def estimated(session: hg.Session, graph: hg.Graph, *names: str) -> Bytes:
    found = session.estimate(graph, list(names))
    assert sum(one.total_bytes for one in found.devices) == found.total_bytes
    return dict.fromkeys(used(session), 0) | {one.name: one.total_bytes for one in found.devices}


KINDS: dict[str, Callable[[str, int], Device]] = {
    "native": lambda name, size: CpuDevice(name, 1, size),
    "definition": lambda name, size: CpuDevice(name, 1, size, native=False),
    "fake": lambda name, size: FakeDevice(name, size),
    "fake-far": lambda name, size: FakeDevice(name, size, is_host=False),
}


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def give(*devices: Device) -> None:
        monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*devices))

    return give


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_an_estimate_is_what_a_plan_takes_of_one_device(
    model: Callable[[], hg.Graph], kind: str, give: Callable[..., None]
) -> None:
    give(KINDS[kind]("one", 2**26))
    with hg.connect("local:") as session:
        graph = model()
        expected = estimated(session, graph, "one")
        plan = session.compile(graph, "one")
        assert used(session) == expected, repr(plan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_an_estimate_is_what_a_plan_takes_of_three_devices(
    model: Callable[[], hg.Graph], kind: str, give: Callable[..., None]
) -> None:
    names = ["one", "two", "three"]
    give(*(KINDS[kind](name, 2**26) for name in names))
    with hg.connect("local:") as session:
        graph = model()
        weights = session.estimate(graph, "one").weights_bytes
        memory = {"one": weights // 2 + 64 * KIB, "two": weights // 3 + 64 * KIB}
        found = session.estimate(graph, names, memory=memory)
        expected = dict.fromkeys(names, 0) | {one.name: one.total_bytes for one in found.devices}
        plan = session.compile(graph, names, memory=memory)
        assert used(session) == expected
        given = arguments_of(graph)
        outputs = plan.run(**given)
        alone = session.compile(graph, "three") if model is not decoder else None
        if alone is not None:
            # NumPy's products may round differently by the processor, the shape and the memory.
            close = 0.0 if kind == "native" else 1e-3
            np.testing.assert_allclose(outputs["y"], alone.run(**given)["y"], rtol=close, atol=close)


def test_a_model_that_fits_once_is_spread_and_computed(give: Callable[..., None]) -> None:
    graph, expected = chain(14), None
    for memory in (2**20, 250 * KIB):
        give(*(CpuDevice(name, 1, memory) for name in ("one", "two", "three")))
        with hg.connect("local:") as session:
            names = ["one", "two", "three"]
            needed = estimated(session, graph, *names)
            plan = session.compile(graph, names)
            assert used(session) == needed
            found = plan.run(**arguments_of(graph))["y"]
            expected = found if expected is None else expected
            np.testing.assert_array_equal(found, expected)
    assert len(plan.devices) == 3


def test_a_fit_that_fails_leaves_the_devices_as_they_were(give: Callable[..., None]) -> None:
    give(*(CpuDevice(name, 1, 150 * KIB) for name in ("one", "two", "three")))
    with hg.connect("local:") as session:
        small = session.compile(chain(2), "one")
        given = arguments_of(chain(2))
        expected = small.run(**given)["y"]
        before = used(session)
        with pytest.raises(hg.OutOfMemoryError):
            session.compile(chain(14), ["one", "two", "three"])
        assert used(session) == before
        np.testing.assert_array_equal(small.run(**given)["y"], expected)
        assert session.compile(chain(5), ["one", "two", "three"]).devices


@pytest.mark.parametrize("count", [1, 3])
def test_an_explanation_counts_weights_once_and_views_as_no_results(
    count: int, give: Callable[..., None]
) -> None:
    names = ["one", "two", "three"][:count]
    give(*(CpuDevice(name, 1, 2**24) for name in names))
    with hg.connect("local:") as session:
        graph = transformer()
        needed = session.estimate(graph, names)
        explanation = session.compile(graph, names, pins={"*": names[-1]}).explain()
    computed = sum(
        one.type.nbytes for one in explanation.nodes if one.op not in ("permute", "reshape", "transpose")
    )
    assert sum(one.weights_bytes for one in explanation.devices) == needed.weights_bytes
    assert needed.extra_bytes == 0
    assert sum(one.results_bytes for one in explanation.devices) == computed


def test_a_bound_tensor_for_weights_is_packed_in_place_and_read_in_its_own_order(
    give: Callable[..., None],
) -> None:
    give(CpuDevice("one", 1, 2**24))
    weight, given = normal(70, 100), normal(3, 70)
    g = hg.Graph()
    g.output("y", g.input("x", (3, 70), "f32") @ g.bound_weight("w", (70, 100), "f32"))
    doubled = hg.Graph()
    doubled.output("y", doubled.input("w", (70, 100), "f32") * 2.0)
    with hg.connect("local:") as session:
        tensor = session.buffer(weight.nbytes, usage="weights").place((70, 100), "f32")
        tensor.set(weight)
        np.testing.assert_array_equal(tensor.get(), weight)
        before = used(session)["one"]
        plan = session.compile(g, weights={"w": tensor})
        assert used(session)["one"] == before
        plain = session.empty((70, 100), "f32")
        plain.set(weight)
        expected = session.compile(g, weights={"w": plain}).run(x=given)["y"]
        np.testing.assert_array_equal(plan.run(x=given)["y"], expected)
        np.testing.assert_array_equal(tensor.get(), weight)
        np.testing.assert_array_equal(tensor[10:20].get(), weight[10:20])
        found = session.compile(doubled).run(w=tensor)["y"]
        np.testing.assert_array_equal(found, weight * 2)
        np.testing.assert_array_equal(plan.run(x=given)["y"], expected)


class Keeps(FakeDevice):
    """It keeps a second copy of each weight beside it."""

    def estimate(self, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
        found = super().estimate(graph, options)
        return MemoryEstimate(
            found.compute_bytes, sum(one.type.nbytes for one in graph.weights), found.arena_bytes
        )

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        plan = super().compile(graph, bindings, options)
        sizes = [one.type.nbytes for one in bindings.weights.values()]
        try:
            copy = self.buffer_type.allocate(sum(sizes))
        except BaseException:
            plan.free()
            raise
        free = plan.free

        def free_all() -> None:
            copy.free()
            free()

        plan.free = free_all  # type: ignore[method-assign]
        return plan


def test_a_model_is_spread_over_devices_that_keep_a_second_copy_of_weights(give: Callable[..., None]) -> None:
    names = ["one", "two", "three"]
    give(*(Keeps(name, 430 * KIB, is_host=False) for name in names))
    with hg.connect("local:") as session:
        graph = chain(14)
        expected = estimated(session, graph, *names)
        plan = session.compile(graph, names)
        assert used(session) == expected
        assert len(plan.devices) == 3
