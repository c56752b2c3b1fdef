"""Rules of signals, and of steps of training."""

from __future__ import annotations

import heliograph as hg
from heliograph.lowerings.arrays import cast, part
from heliograph.lowerings.fourier import transform
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule

#: The most frames of one transform over time.
_MOST_FRAMES = 4096


@rule("DFT")
def _fourier(node: Node) -> Item:
    x = node.value(0)
    count = node.integer(1) if node.has(1) else None
    axis = (node.integer(2) if node.has(2) else -2) if node.opset >= 20 else node.int("axis", 1)
    return transform(
        x,
        node.axis(axis, x.ndim),
        count,
        inverse=bool(node.int("inverse", 0)),
        onesided=bool(node.int("onesided", 0)),
    )


@rule("STFT")
def _short_time_fourier(node: Node) -> Item:
    x, step = node.value(0), node.integer(1)
    window = node.optional(2)
    if node.has(3):
        size = node.integer(3)
    elif window is not None:
        size = window.shape[0]
    else:
        raise node.broken("it has neither a window nor the length of a frame")
    count = (x.shape[1] - size) // step + 1
    if not 0 < count <= _MOST_FRAMES:
        raise node.refuse(f"{count} frames; from 1 to {_MOST_FRAMES} are computed")
    if x.ndim == 2:
        x = hg.expand_dims(x, axis=2)
    frames = hg.stack([part(x, 1, number * step, number * step + size) for number in range(count)], axis=1)
    if window is not None:
        frames = frames * hg.reshape(window, (1, 1, size, 1))
    return transform(frames, 2, onesided=bool(node.int("onesided", 1)))


def _groups(node: Node, many: int) -> list[list[hg.Value]]:
    """The tensors of each parameter: itself, its gradient, and its states."""
    count = (len(node.items) - 2) // many
    return [[node.value(2 + kind * count + place) for kind in range(many)] for place in range(count)]


def _in_order(results: list[tuple[hg.Value, ...]]) -> tuple[Item, ...]:
    return tuple(one for kind in zip(*results, strict=True) for one in kind)


@rule("Momentum")
def _momentum(node: Node) -> tuple[Item, ...]:
    rate, count = node.value(0), node.value(1)
    alpha, beta, decay = (node.float(name, 0.0) for name in ("alpha", "beta", "norm_coefficient"))
    results: list[tuple[hg.Value, ...]] = []
    for x, gradient, speed in _groups(node, 3):
        gradient = x * decay + gradient
        speed = speed * alpha + gradient * hg.where(count > 0, beta, hg.ones_like(rate))
        step = gradient + speed * alpha if node.string("mode", "") == "nesterov" else speed
        results.append((x - rate * step, speed))
    return _in_order(results)


@rule("Adagrad")
def _adagrad(node: Node) -> tuple[Item, ...]:
    rate, count = node.value(0), cast(node.value(1), node.value(0).dtype)
    rate = rate / (1 + count * node.float("decay_factor", 0.0))
    results: list[tuple[hg.Value, ...]] = []
    for x, gradient, squares in _groups(node, 3):
        gradient = x * node.float("norm_coefficient", 0.0) + gradient
        squares = squares + gradient * gradient
        x = x - rate * gradient / (hg.sqrt(squares) + node.float("epsilon", 1e-6))
        results.append((x, squares))
    return _in_order(results)


@rule("Adam")
def _adam(node: Node) -> tuple[Item, ...]:
    rate, count = node.value(0), node.value(1)
    alpha, beta = node.float("alpha", 0.9), node.float("beta", 0.999)
    number = cast(count, rate.dtype)
    bases = [hg.full((), one, rate.dtype, graph=node.graph) for one in (alpha, beta)]
    first, second = (1 - hg.pow(one, number) for one in bases)
    rate = hg.where(count > 0, rate * hg.sqrt(second) / first, rate)
    results: list[tuple[hg.Value, ...]] = []
    for x, gradient, mean, square in _groups(node, 4):
        gradient = x * node.float("norm_coefficient", 0.0) + gradient
        mean = mean * alpha + gradient * (1 - alpha)
        square = square * beta + gradient * gradient * (1 - beta)
        x = x - rate * mean / (hg.sqrt(square) + node.float("epsilon", 1e-6))
        results.append((x * (1 - node.float("norm_coefficient_post", 0.0)), mean, square))
    return _in_order(results)
