"""Cases of vision's rarer ops, gradients of windows, and DeepSeek's; references walk over elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from op_cases import FLOATS, PLAIN, Case, Cases, Refusal, data, t, wide
from op_cases_windows import LINES, MIXED, PLANES, SPACES, numbers, windows


def conv_3d_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for (left, right), form, (n, channels, made) in itertools.product(
        MIXED, SPACES, ((1, 1, 1), (2, 3, 4), (0, 2, 1))
    ):
        x, kernel = (
            data(random, right, (n * channels, *form[0])),
            data(random, left, (made * channels, *form[1])),
        )
        seen = windows(wide(x).reshape(n, channels, *form[0]), form)
        taps = wide(kernel).reshape(made, channels, *form[1])
        expected = np.einsum("nczyxijk,ocijk->nozyx", seen, taps)
        result = expected.reshape(n * made, *expected.shape[2:])
        yield Case(op, [kernel, x], result, {**numbers(form)[1], "channels": channels})


def col2im_1d_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = (
        (1, 1, 1, 1, 0),
        (5, 3, 4, 2, 0),
        (5, 3, 4, 2, 3),
        (4, 2, 3, 5, 2),
        (7, 1, 1, 3, 1),
        (3, 2, 9, 1, 4),
    )
    for name, (tokens, channels, taps, stride, padding) in itertools.product(FLOATS, forms):
        x = data(random, name, (tokens, channels * taps))
        signal = np.zeros((channels, (tokens - 1) * stride + taps))
        for i, channel, tap in itertools.product(range(tokens), range(channels), range(taps)):
            signal[channel, i * stride + tap] += wide(x)[i, channel * taps + tap]
        expected = signal[:, padding : signal.shape[1] - padding]
        yield Case(op, [x], expected, {"channels": channels, "stride": stride, "padding": padding})


FIELDS = ((4, 6, 3, 2), (5, 7, 2, 3), (1, 1, 1, 4), (3, 3, 5, 3), (2, 5, 1, 1), (4, 3, 0, 2), (0, 3, 2, 2))


def win_part_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (height, width, channels, window) in itertools.product(PLAIN, FIELDS):
        x = data(random, name, (height, width, channels))
        down, across = math.ceil(height / window), math.ceil(width / window)
        expected = np.zeros((down * across, window, window, channels), wide(x).dtype)
        for row, column in itertools.product(range(height), range(width)):
            at = row // window * across + column // window
            expected[at, row % window, column % window] = wide(x)[row, column]
        yield Case(op, [x], expected, {"window": window})


def win_unpart_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (height, width, channels, window) in itertools.product(PLAIN, FIELDS):
        across = math.ceil(width / window)
        x = data(random, name, (math.ceil(height / window) * across, window, window, channels))
        expected = np.zeros((height, width, channels), wide(x).dtype)
        for row, column in itertools.product(range(height), range(width)):
            at = row // window * across + column // window
            expected[row, column] = wide(x)[at, row % window, column % window]
        yield Case(op, [x], expected, {"height": height, "width": width})


def get_rel_pos_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, size, channels in itertools.product(PLAIN, (1, 4), (1, 5, 0)):
        x = data(random, name, (2 * size - 1, channels))
        expected = np.zeros((size, size, channels), wide(x).dtype)
        for i, j in itertools.product(range(size), range(size)):
            expected[i, j] = wide(x)[size - 1 + i - j]
        yield Case(op, [x], expected)


def add_rel_pos_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (batch, height, width, size) in itertools.product(
        FLOATS, ((1, 1, 1, 1), (2, 3, 4, 3), (3, 2, 2, 5), (0, 2, 2, 2))
    ):
        x = data(random, name, (batch, height * width, size * size))
        columns, rows = (data(random, name, (batch, height, width, size)) for _ in range(2))
        expected = wide(x).copy()
        for b, y, at, i, j in itertools.product(*map(range, (batch, height, width, size, size))):
            added = wide(rows)[b, y, at, i] + wide(columns)[b, y, at, j]
            expected[b, y * width + at, i * size + j] += added
        yield Case(op, [x, columns, rows], expected)


def im2col_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    """The gradient is what the windows of every unit vector have in common with the rows' gradients."""
    for (left, right), form in itertools.product(MIXED, (*PLANES, *LINES)):
        shape = (2, 2, *form[0])
        units = np.eye(math.prod(form[0])).reshape(-1, 1, *form[0])
        seen = windows(units, form)[:, 0]
        counts, taps = seen.shape[1 : 1 + len(form[0])], form[1]
        gradient = data(random, right, (2, *counts, 2 * math.prod(taps)))
        split = np.moveaxis(wide(gradient).reshape(2, *counts, 2, *taps), 1 + len(counts), 1)
        expected = np.einsum("ncp,up->ncu", split.reshape(2, 2, -1), seen.reshape(seen.shape[0], -1))
        kernel, attributes = data(random, left, (3, 2, *taps)), {**numbers(form)[1], "shape": shape}
        yield Case(op, [gradient, kernel], expected.reshape(shape), attributes)


POOLS: list[tuple[tuple[int, ...], ...]] = [
    ((5, 6), (3, 2), (), ()), ((5, 7), (3, 3), (2, 1), (1, 2)), ((4, 3), (1, 1), (3, 2), (5, 2)),
    ((2, 2), (5, 5), (1, 1), (2, 2)), ((1, 1), (1, 1), (), ()), ((6, 6), (2, 2), (2, 2), ()),
]  # fmt: skip


def pool_2d_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, form, lead, average in itertools.product(FLOATS, POOLS, ((), (2, 3)), (False, True)):
        (stride, padding, _), given = numbers((*form, ()))
        x = data(random, name, (*lead, *form[0]))
        counts = [
            (size + 2 * p - k) // s + 1 for size, k, s, p in zip(*form[:2], stride, padding, strict=True)
        ]
        gradient, expected = data(random, name, (*lead, *counts)), np.zeros(x.shape)
        for at in np.ndindex(gradient.shape):
            image, (y, z) = at[:-2], at[-2:]
            inside = [
                (row, column)
                for row in range(y * stride[0] - padding[0], y * stride[0] - padding[0] + form[1][0])
                for column in range(z * stride[1] - padding[1], z * stride[1] - padding[1] + form[1][1])
                if 0 <= row < form[0][0] and 0 <= column < form[0][1]
            ]
            share = wide(gradient)[at] / (math.prod(form[1]) if average else 1)
            chosen = inside if average else sorted(inside, key=lambda one: -wide(x)[(*image, *one)])[:1]
            for one in chosen:
                expected[(*image, *one)] += share
        attributes = {"kernel": form[1], "stride": given["stride"], "padding": given["padding"]}
        yield Case(op, [gradient, x], expected, {**attributes, "average": average})


def lightning_indexer_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = (
        (1, 1, 1, 1, 1, 1),
        (4, 3, 2, 5, 7, 2),
        (2, 3, 4, 8, 33, 1),
        (2, 2, 0, 3, 4, 2),
        (1, 0, 2, 3, 4, 1),
    )
    for name, (streams, tokens, heads, width, keys, masks) in itertools.product(FLOATS, forms):
        q, k = (
            data(random, name, (streams, tokens, heads, width)),
            data(random, name, (streams, keys, 1, width)),
        )
        weights = data(random, name, (streams, 1, tokens, heads))
        for other in (name, "f16"):
            mask, expected = (
                data(random, other, (masks, 1, tokens, keys)),
                np.zeros((streams, 1, tokens, keys)),
            )
            for s, i, n in itertools.product(range(streams), range(tokens), range(keys)):
                for h in range(heads):
                    score = float(wide(q)[s, i, h] @ wide(k)[s, n, 0])
                    expected[s, 0, i, n] += max(score, 0.0) * wide(weights)[s, 0, i, h]
                expected[s, 0, i, n] += wide(mask)[s % masks, 0, i, n]
            yield Case(op, [q, k, weights, mask], expected)


def dsv4_hc_comb_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, tokens, count, turns in itertools.product(FLOATS, (0, 1, 5), (1, 4, 3), (1, 20)):
        width = (2 + count) * count
        operands = [data(random, name, shape) for shape in ((tokens, width), (3,), (width,))]
        mixes, scale, base = map(wide, operands)
        expected = np.zeros((tokens, count, count))
        for token in range(tokens):
            rows = (mixes[token] * scale[2] + base)[2 * count :].reshape(count, count)
            for i in range(count):
                expected[token, i] = np.exp(rows[i]) / np.exp(rows[i]).sum() + 1e-3
            for turn in range(turns):
                for i in range(count if turn else 0):
                    expected[token, i] /= expected[token, i].sum() + 1e-3
                for j in range(count):
                    expected[token, :, j] /= expected[token, :, j].sum() + 1e-3
        yield Case(op, operands, expected, {"eps": 1e-3, "iterations": turns})


STREAMS = ((1, 1, 1), (3, 4, 7), (2, 3, 65), (0, 4, 2), (2, 4, 0))


def dsv4_hc_pre_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for (left, right), (tokens, count, width) in itertools.product(MIXED, STREAMS):
        x, weights = data(random, left, (tokens, count, width)), data(random, right, (tokens, count))
        expected = np.zeros((tokens, width))
        for token, stream in itertools.product(range(tokens), range(count)):
            expected[token] += wide(x)[token, stream] * wide(weights)[token, stream]
        yield Case(op, [x, weights], expected)
        yield Case(op, [x, weights], -0.5 * expected, {"scale": -0.5})
        gates = data(random, right, (tokens, count, width))
        summed = (wide(x) / (1 + np.exp(-wide(gates)))).sum(1)
        yield Case(op, [x, gates], 0.25 * summed, {"gated": True, "scale": 0.25})


def dsv4_hc_post_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for (left, right), (tokens, count, width) in itertools.product(MIXED, STREAMS):
        x, residual = data(random, left, (tokens, width)), data(random, right, (tokens, count, width))
        post, comb = data(random, right, (tokens, count)), data(random, right, (tokens, count, count))
        expected = np.zeros(residual.shape)
        for token, to in itertools.product(range(tokens), range(count)):
            expected[token, to] = wide(x)[token] * wide(post)[token, to]
            for source in range(count):
                expected[token, to] += wide(residual)[token, source] * wide(comb)[token, source, to]
        yield Case(op, [x, residual, post, comb], expected)
        yield Case(op, [x, residual, post], wide(x)[:, None] * wide(post)[..., None] + wide(residual))


CASES: dict[str, Cases] = {
    "conv_3d": conv_3d_cases, "col2im_1d": col2im_1d_cases, "win_part": win_part_cases,
    "win_unpart": win_unpart_cases, "get_rel_pos": get_rel_pos_cases, "add_rel_pos": add_rel_pos_cases,
    "im2col_back": im2col_back_cases, "pool_2d_back": pool_2d_back_cases,
    "lightning_indexer": lightning_indexer_cases, "dsv4_hc_comb": dsv4_hc_comb_cases,
    "dsv4_hc_pre": dsv4_hc_pre_cases, "dsv4_hc_post": dsv4_hc_post_cases,
}  # fmt: skip

KERNEL, VOLUME = t("f32", 6, 2, 2, 2), t("f32", 6, 3, 4, 3)
INDEX = [t("f32", 2, 3, 4, 8), t("f32", 2, 5, 1, 8), t("f32", 2, 1, 3, 4), t("f32", 2, 1, 3, 5)]
COMB = [t("f32", 3, 24), t("f32", 3), t("f32", 24)]
POST = [t("f32", 3, 7), t("f32", 3, 4, 7), t("f32", 3, 4), t("f32", 3, 4, 4)]


def refused(what: str, op: str, message: str, *types: Any, **attributes: Any) -> Refusal:
    return (what, op, list(types), attributes, message)


def other(types: list[Any], place: int, *shape: int) -> list[Any]:
    return [*types[:place], t("f32", *shape), *types[place + 1 :]]


ONES: dict[str, Any] = {"eps": 1e-3, "iterations": 1}

REFUSED: list[Refusal] = [
    refused("volumes of other channels", "conv_3d", "4 channels", KERNEL, VOLUME, channels=4),
    refused("volumes of no channels", "conv_3d", "channels is 0", KERNEL, VOLUME, channels=0),
    refused("planes as volumes", "conv_3d", "four dimensions", KERNEL, t("f32", 3, 4, 3), channels=3),
    refused("a volume without room", "conv_3d", "does not fit", KERNEL, t("f32", 6, 1, 4, 3), channels=3),
    refused("columns that no channels divide", "col2im_1d", "[t, 4 k]", t("f32", 5, 6), channels=4),
    refused("columns of nothing", "col2im_1d", "at least one", t("f32", 0, 6), channels=3),
    refused("columns cut off whole", "col2im_1d", "leaves nothing", t("f32", 5, 6), channels=3, padding=3),
    refused("columns on each other", "col2im_1d", "stride is 0", t("f32", 5, 6), channels=3, stride=0),
    refused("columns with less than nothing", "col2im_1d", "padding is -1", t("f32", 5, 6), channels=3,
            padding=-1),
    refused("windows of nothing", "win_part", "window is 0", t("f32", 4, 4, 1), window=0),
    refused("windows of batches", "win_part", "[h, w, c]", t("f32", 1, 4, 4, 1), window=2),
    refused("windows past 63 bits", "win_part", "2**63", t("f32", 1, 1, 16), window=2**31 - 1),
    refused("windows too few", "win_unpart", "6 windows of 2", t("f32", 4, 2, 2, 3), height=3, width=5),
    refused("windows that are not square", "win_unpart", "[windows", t("f32", 4, 2, 3, 3), height=3, width=5),
    refused("a negative height", "win_unpart", "height is -1", t("f32", 4, 2, 2, 3), height=-1, width=5),
    refused("an even number of distances", "get_rel_pos", "[2 n - 1, c]", t("f32", 4, 3)),
    refused("scores of other columns", "add_rel_pos", "needed", t("f32", 2, 4, 9),
            *[t("f32", 2, 2, 2, 2)] * 2),
    refused("rows that differ from columns", "add_rel_pos", "of both", t("f32", 2, 4, 4),
            t("f32", 2, 2, 2, 2), t("f32", 2, 4, 1, 2)),
    refused("gradients of other windows", "im2col_back", "im2col of", t("f32", 2, 4, 4, 12),
            t("f32", 3, 3, 2, 2), shape=(2, 3, 4, 4)),
    refused("data of a negative size", "im2col_back", "shape is -2", t("f32", 2, 3, 3, 12),
            t("f32", 3, 3, 2, 2), shape=(-2, 3, 4, 4)),
    refused("data of two dimensions", "im2col_back", "dimensions needed", t("f32", 2, 3, 3, 12),
            t("f32", 3, 3, 2, 2), shape=(4, 4)),
    refused("gradients of other pools", "pool_2d_back", "pool_2d of", t("f32", 3, 3), t("f32", 3, 3),
            kernel=(2, 2)),
    refused("a kernel of one number", "pool_2d_back", "2 numbers", *[t("f32", 3, 3)] * 2, kernel=(2,)),
    refused("keys of heads", "lightning_indexer", "k is f32", *other(INDEX, 1, 2, 5, 4, 8)),
    refused("weights of other heads", "lightning_indexer", "weights is f32", *other(INDEX, 2, 2, 1, 3, 5)),
    refused("a mask of other keys", "lightning_indexer", "mask is f32", *other(INDEX, 3, 2, 1, 3, 4)),
    refused("a mask of other streams", "lightning_indexer", "do not divide", *other(INDEX, 3, 4, 1, 3, 5)),
    refused("queries of a stream", "lightning_indexer", "four dimensions", *other(INDEX, 0, 3, 4, 8)),
    refused("mixes of no number of streams", "dsv4_hc_comb", "such as 24", *other(COMB, 0, 3, 23), **ONES),
    refused("mixes of nothing", "dsv4_hc_comb", "such as 24", *other(COMB, 0, 3, 0), **ONES),
    refused("a scale of two", "dsv4_hc_comb", "three numbers", *other(COMB, 1, 2), **ONES),
    refused("a base of another size", "dsv4_hc_comb", "base is f32", *other(COMB, 2, 23), **ONES),
    refused("no iteration", "dsv4_hc_comb", "iterations is 0", *COMB, eps=0.1, iterations=0),
    refused("endless iterations", "dsv4_hc_comb", "from 1 to 1000", *COMB, eps=0.1, iterations=2**31 - 1),
    refused("iterations with a negative eps", "dsv4_hc_comb", "eps is -1", *COMB, eps=-1.0, iterations=2),
    refused("weights of other streams", "dsv4_hc_pre", "weights is f32", t("f32", 3, 4, 7), t("f32", 3, 5)),
    refused("weights as gates", "dsv4_hc_pre", "weights is", t("f32", 3, 4, 7), t("f32", 3, 4), gated=True),
    refused("gates as weights", "dsv4_hc_pre", "weights is f32", t("f32", 3, 4, 7), t("f32", 3, 4, 7)),
    refused("no scale", "dsv4_hc_pre", "scale is nan", t("f32", 3, 4, 7), t("f32", 3, 4), scale=math.nan),
    refused("streams of rows", "dsv4_hc_pre", "[t, hc, n]", t("f32", 3, 4), t("f32", 3, 4)),
    refused("a residual of rows", "dsv4_hc_post", "[t, hc, n]", *other(POST, 1, 3, 7)),
    refused("x of another width", "dsv4_hc_post", "x is f32", *other(POST, 0, 3, 8)),
    refused("post of other streams", "dsv4_hc_post", "post is f32", *other(POST, 2, 3, 5)),
    refused("comb of other streams", "dsv4_hc_post", "comb is f32", *other(POST, 3, 3, 4, 5)),
]  # fmt: skip
