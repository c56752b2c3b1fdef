"""Convolutions and pools in plans: one step with what follows, the same bits however they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph_backends.cpu.lowering.lowering import CpuLowering
from heliograph_backends.planning.fusion import group_nodes
from heliograph_backends.planning.layout import place_values
from heliograph_proto.ops.table import OPS

RNG = np.random.default_rng(11)
X = RNG.standard_normal((2, 6, 13, 17), np.float32)
Build = Callable[[hg.Graph, hg.Value], hg.Value]


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape, np.float32)


def made(build: Build) -> hg.Graph:
    graph = hg.Graph()
    graph.output("y", build(graph, graph.input("x", X.shape, "f32")))
    return graph


def steps(build: Build) -> int:
    """Return the number of steps of the fused plan; each must have a kernel."""
    graph = made(build)._freeze()
    places = place_values(graph)
    lowering = CpuLowering(graph, places)
    groups = group_nodes(graph, places, lowering, fusion=True)
    computed = [group for group in groups if OPS[graph.nodes[group.last].op].group != "source"]
    assert all(lowering.is_native(group) for group in computed)
    return len(computed)


KERNEL, DEPTHWISE, WHOLE = normal(8, 6, 3, 3), normal(6, 1, 3, 3), normal(10, 6, 13, 17)
BIAS, FACTOR, RESIDUAL = normal(8, 1, 1), normal(8, 1, 1), normal(2, 8, 13, 17)


def convolved(g: hg.Graph, x: hg.Value) -> hg.Value:
    return hg.ops.conv_2d(g.weight("k", KERNEL), x, padding=(1, 1))


def biased(g: hg.Graph, x: hg.Value) -> hg.Value:
    return hg.relu(convolved(g, x) + g.weight("b", BIAS))


def normalised(g: hg.Graph, x: hg.Value) -> hg.Value:
    return hg.clip(convolved(g, x) * g.weight("f", FACTOR) + g.weight("b", BIAS), 0.0, 6.0)


def residual(g: hg.Graph, x: hg.Value) -> hg.Value:
    return hg.relu(g.weight("r", RESIDUAL) + (convolved(g, x) + g.weight("b", BIAS)))


def activated(g: hg.Graph, x: hg.Value) -> hg.Value:
    y = convolved(g, x) + g.weight("b", BIAS)
    return hg.ops.silu(y)


def depthwise(g: hg.Graph, x: hg.Value) -> hg.Value:
    found = hg.ops.conv_2d_dw(g.weight("k", DEPTHWISE), x, padding=(1, 1), stride=(2, 1))
    return hg.ops.hardswish(found + g.weight("b", BIAS[:6]))


def whole(g: hg.Graph, x: hg.Value) -> hg.Value:
    return hg.relu(hg.ops.conv_2d(g.weight("k", WHOLE), x) + g.weight("b", normal(10, 1, 1) * 0 + 1))


def single(g: hg.Graph, x: hg.Value) -> hg.Value:
    return hg.relu(hg.ops.conv_2d(g.weight("k", normal(5, 6, 1, 1) * 0 + 0.5), x) + 1.0)


def pooled(g: hg.Graph, x: hg.Value) -> hg.Value:
    return hg.ops.pool_2d(x, kernel=(3, 3), stride=(2, 2), padding=(1, 1)) * 2.0


def grouped(g: hg.Graph, x: hg.Value) -> hg.Value:
    found = hg.ops.conv_2d(g.weight("k", KERNEL[:, :2]), x[:, :4], groups=2, padding=(1, 1))
    return found + g.weight("b", BIAS)


FUSED = (biased, normalised, residual, activated, depthwise, whole, single, pooled, grouped)


@pytest.mark.parametrize("build", FUSED)
def test_what_follows_windows_is_part_of_their_step(build: Build) -> None:
    assert steps(build) == 1


def test_an_operand_whose_planes_have_gaps_stays_outside() -> None:
    """Each of them is a row to windows."""
    turned, wide = normal(2, 8, 17, 13), normal(2, 8, 13, 34)

    def swapped(g: hg.Graph, x: hg.Value) -> hg.Value:
        return convolved(g, x) + hg.permute_dims(g.weight("r", turned), (0, 1, 3, 2))

    def cut(g: hg.Graph, x: hg.Value) -> hg.Value:
        return convolved(g, x) + g.weight("r", wide)[..., :17]

    def every_other(g: hg.Graph, x: hg.Value) -> hg.Value:
        return convolved(g, x) + g.weight("r", wide)[..., ::2]

    def by_column(g: hg.Graph, x: hg.Value) -> hg.Value:
        return convolved(g, x) + g.weight("r", normal(1, 8, 1, 17) * 0 + 2)

    builds = (swapped, cut, by_column, every_other)
    assert [steps(build) for build in builds] == [2, 2, 2, 1]
    with hg.connect("local:") as session:
        for build in builds:
            found = [session.compile(made(build), fusion=fusion).run(x=X)["y"] for fusion in (True, False)]
            assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("build", FUSED)
def test_bits_do_not_depend_on_fusion_threads_or_the_layout_of_images(build: Build) -> None:
    def turned(g: hg.Graph, x: hg.Value) -> hg.Value:
        return build(g, hg.permute_dims(x, (0, 3, 1, 2)))

    last = hg.Graph()
    last.output("y", turned(last, last.input("x", (2, 13, 17, 6), "f32")))
    with hg.connect("local:") as session:
        found = [session.compile(made(build), fusion=False, threads=1).run(x=X)["y"]]
        found += [session.compile(made(build), threads=threads).run(x=X)["y"] for threads in (1, 2, 4)]
        found += [session.compile(last).run(x=np.ascontiguousarray(X.transpose(0, 2, 3, 1)))["y"]]
        found += [np.concatenate([session.compile(one(build)).run(x=X[n : n + 1])["y"] for n in (0, 1)])]
    whole_batch = build is not residual
    for number, each in enumerate(found):
        if number < 5 or whole_batch:
            assert each.tobytes() == found[0].tobytes(), number


def one(build: Build) -> hg.Graph:
    """Return the graph of a single image."""
    graph = hg.Graph()
    graph.output("y", build(graph, graph.input("x", (1, *X.shape[1:]), "f32")))
    return graph


@pytest.mark.parametrize("images", [1, 2, 7])
def test_a_window_of_all_data_has_the_same_bits_with_a_packed_kernel_and_without(images: int) -> None:
    x = normal(images, 6, 5, 7)
    for outer in (1, 40, 64):
        kernel, found = normal(outer, 6, 5, 7), []
        for constant in (True, False):
            g = hg.Graph()
            k = g.weight("k", kernel) if constant else g.input("k", kernel.shape, "f32")
            g.output("y", hg.relu(hg.ops.conv_2d(k, g.input("x", x.shape, "f32")) + 0.5))
            given = {"x": x} if constant else {"x": x, "k": kernel}
            with hg.connect("local:") as session:
                found.append(session.compile(g).run(given)["y"])
        expected = np.maximum(np.einsum("ncyx,ocyx->no", x, kernel, dtype=np.float64) + 0.5, 0)
        assert found[0].tobytes() == found[1].tobytes()
        assert np.allclose(found[0][:, :, 0, 0], expected, atol=1e-4)


@pytest.mark.parametrize("sizes", [(13, 1), (1, 13), (40, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_windows_of_one_element_read_images_of_one_row_or_column(sizes: tuple[int, int], groups: int) -> None:
    """A dimension of one element has no stride."""
    x, kernel = normal(2, 6, *sizes), normal(8, 6 // groups, 1, 1)
    g = hg.Graph()
    given = g.input("x", x.shape, "f32")
    g.output("y", hg.ops.conv_2d(g.weight("k", kernel), given, groups=groups))
    with hg.connect("local:") as session:
        found = session.compile(g).run(x=x)["y"]
    parts = zip(np.split(kernel[:, :, 0, 0], groups), np.split(x, groups, 1), strict=True)
    expected = np.concatenate([np.einsum("oc,ncyx->noyx", *pair) for pair in parts], 1)
    assert np.allclose(found, expected, atol=1e-5)


def test_a_result_is_not_computed_over_an_addend() -> None:
    """The product is written before the addend is read."""

    def chain(g: hg.Graph, x: hg.Value) -> hg.Value:
        square = g.weight("k", KERNEL[:6])
        for _ in range(3):
            x = hg.relu(x + hg.ops.conv_2d(square, hg.relu(x * 0.1), padding=(1, 1)))
        return x

    with hg.connect("local:") as session:
        found = [session.compile(made(chain), fusion=fusion).run(x=X)["y"] for fusion in (True, False)]
    assert found[0].tobytes() == found[1].tobytes()


def test_mean_sum_and_largest_of_planes_have_kernels() -> None:
    for reduce in (hg.mean, hg.sum, hg.max):
        assert steps(lambda g, x, reduce=reduce: reduce(x, axis=(2, 3))) == 1  # type: ignore[misc]
    with hg.connect("local:") as session:
        found = session.compile(made(lambda g, x: hg.mean(x, axis=(2, 3), keepdims=True))).run(x=X)["y"]
    assert np.allclose(found, X.mean((2, 3), keepdims=True, dtype=np.float64), atol=1e-6)


@pytest.mark.parametrize("view", [False, True])
def test_pads_and_whole_upscales_are_copies(view: bool) -> None:
    source = X.transpose(0, 1, 3, 2) if view else X

    def seen(x: hg.Value) -> hg.Value:
        return hg.permute_dims(x, (0, 1, 3, 2)) if view else x

    def padded(g: hg.Graph, x: hg.Value) -> hg.Value:
        return hg.ops.pad(seen(x), left=(0, 1, 2, 0), right=(1, 0, 3, 4))

    def repeated(g: hg.Graph, x: hg.Value) -> hg.Value:
        shape = (2, 6, source.shape[2] * 2, source.shape[3] * 3)
        return hg.ops.upscale(seen(x), shape=shape, mode=0)

    with hg.connect("local:") as session:
        found = [session.compile(made(build)).run(x=X)["y"] for build in (padded, repeated)]
    assert np.array_equal(found[0], np.pad(source, ((0, 1), (1, 0), (2, 3), (0, 4))))
    assert np.array_equal(found[1], source.repeat(2, 2).repeat(3, 3))
    assert steps(padded) == 1 and steps(repeated) == 1
