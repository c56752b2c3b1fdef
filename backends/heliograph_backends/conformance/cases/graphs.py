"""Small whole graphs, for behaviour that single ops do not show.

Each is run fused and unfused, twice each. All runs must have the same bits and match the
definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.case import Case, GraphCase
from heliograph_backends.conformance.harness.content import Array
from heliograph_backends.conformance.harness.execution import loaded
from heliograph_backends.conformance.harness.fills import fill
from heliograph_backends.conformance.harness.outcome import MismatchError
from heliograph_backends.conformance.harness.recipe import Recipe
from heliograph_backends.contract import DeviceCompileOptions
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import DTYPES, TensorType

Build = Callable[[Recipe, "Data"], None]


class Data:
    """Seeded leaves of a recipe."""

    def __init__(self, recipe: Recipe, random: np.random.Generator) -> None:
        self._recipe, self._random = recipe, random

    def input(self, *shape: int, name: str = "f32", fill: str = "normal", layout: str = "plain") -> int:
        """Add an input."""
        return self._leaf(LeafKind.INPUT, shape, name, fill, layout)

    def weight(self, *shape: int, name: str = "f32", fill: str = "normal") -> int:
        """Add a weight."""
        return self._leaf(LeafKind.WEIGHT, shape, name, fill, "plain")

    def variable(self, *shape: int, name: str = "f32") -> int:
        """Add a variable."""
        return self._leaf(LeafKind.VARIABLE, shape, name, "normal", "plain")

    def _leaf(self, kind: LeafKind, shape: tuple[int, ...], name: str, fill_name: str, layout: str) -> int:
        content = fill(fill_name, self._random, TensorType(DTYPES[name], shape))
        return self._recipe.leaf(kind, content, layout)


def alike(bench: Bench, recipe: Recipe) -> float:
    """Run fused and unfused, twice each. Raises MismatchError unless the bits are the same and
    correct."""
    bits: list[tuple[str, list[Array]]] = []
    error = 0.0
    for fusion in (True, False):
        with loaded(bench, recipe, options=DeviceCompileOptions(fusion=fusion)) as it:
            for turn in ("first", "second"):
                it.run()
                outputs, leaves = it.read()
                bits.append((f"{turn} run, fusion={fusion}", [one.raw for one in (*outputs, *leaves)]))
            error = max(error, it.check())
    (name, expected), *others = bits
    for other, found in others:
        for place, (a, b) in enumerate(zip(expected, found, strict=True)):
            if not np.array_equal(a, b):
                raise MismatchError(f"value {place}: the bits of the {name} and of the {other} differ")
    return error


def graph_cases() -> Iterator[Case]:
    """Yield a case of every graph, named by its docstring."""
    for build in GRAPHS:
        name = (build.__doc__ or "").rstrip(".")
        yield GraphCase(name, partial(_recipe, build), alike)


def _recipe(build: Build, random: np.random.Generator) -> Recipe:
    made = Recipe()
    build(made, Data(made, random))
    return made


def chain(g: Recipe, data: Data) -> None:
    """elementwise ops one after the other."""
    x, y = data.input(33, 65), data.input(65)
    value = g.node("add", g.node("mul", x, y), x)
    value = g.node("scale", g.node("gelu", value), scale=0.5, bias=0.25)
    g.output(g.node("where", g.node("greater", value, y), value, g.node("neg", x)))


def product(g: Recipe, data: Data) -> None:
    """a product with a weight, a bias, and an epilogue."""
    value = g.node("matmul", data.input(9, 65), data.weight(65, 37))
    value = g.node("silu", g.node("add", value, data.weight(37)))
    g.output(g.node("mul", value, data.input(9, 37)))


def transformer(g: Recipe, data: Data) -> None:
    """a block of a transformer."""
    tokens, heads, width = 7, 3, 8
    size = heads * width
    x = data.input(tokens, size)
    normed = g.node("mul", g.node("rms_norm", x), data.weight(size))
    parts = []
    for _ in range(3):
        projected = g.node("mul_mat", data.weight(size, size), normed)
        split = g.node("reshape", projected, shape=(tokens, heads, width))
        parts.append(g.node("permute", split, axes=(1, 0, 2)))
    q, k, v = parts
    scores = g.node("diag_mask_inf", g.node("mul_mat", k, q))
    weights = g.node("soft_max", scores, scale=width**-0.5)
    mixed = g.node("permute", g.node("matmul", weights, v), axes=(1, 0, 2))
    joined = g.node("reshape", mixed, shape=(tokens, size))
    y = g.node("add", x, g.node("mul_mat", data.weight(size, size), joined))
    inner = g.node("mul_mat", data.weight(4 * size, size), g.node("norm", y))
    outer = g.node("mul_mat", data.weight(size, 2 * size), g.node("swiglu", inner))
    g.output(g.node("add", y, outer))


def views(g: Recipe, data: Data) -> None:
    """views of an intermediate result, also of each other."""
    value = g.node("mul", data.input(8, 6, 10), data.input(6, 10))
    part = g.node("slice", value, start=(1, 0, 2), stop=(8, 6, 9), step=(2, 1, 3))
    turned = g.node("permute", part, axes=(2, 0, 1))
    wide = g.node("broadcast_to", turned, shape=(2, 3, 4, 6))
    g.output(g.node("exp", wide), g.node("add", turned, data.input(6)), part)


def reshaped(g: Recipe, data: Data) -> None:
    """a reshape of a transposed value."""
    value = g.node("permute", g.node("tanh", data.input(7, 33)), axes=(1, 0))
    flat = g.node("reshape", value, shape=(21, 11))
    g.output(flat, g.node("add", flat, data.input(11)))


def overlapping(g: Recipe, data: Data) -> None:
    """an op whose operands are a value and its own transpose."""
    value = g.node("cont", data.input(17, 17))
    total = g.node("add", value, g.node("permute", value, axes=(1, 0)))
    shifted = g.node("slice", total, start=(1, 0), stop=(17, 17), step=(1, 1))
    before = g.node("slice", total, start=(0, 0), stop=(16, 17), step=(1, 1))
    g.output(g.node("sub", before, shifted))


def broadcast_in_place(g: Recipe, data: Data) -> None:
    """an op whose operand is a part of its other operand."""
    value = g.node("exp", data.input(9, 33))
    first = g.node("slice", value, start=(0, 0), stop=(1, 33), step=(1, 1))
    g.output(g.node("sub", value, first))


def twice(g: Recipe, data: Data) -> None:
    """one value as both operands."""
    x = data.input(9, 9)
    y = g.node("mul", x, x)
    g.output(g.node("matmul", y, y), g.node("concat", y, y, axis=0), g.node("sub", x, x))


def diamond(g: Recipe, data: Data) -> None:
    """a value with many readers, the last one much later."""
    first = g.node("exp", data.input(33, 17))
    value = first
    for _ in range(6):
        value = g.node("add", g.node("sqrt", value), data.input(17, fill="positive"))
    g.output(g.node("mul", value, first))


def reversed_lives(g: Recipe, data: Data) -> None:
    """results of growing sizes, used in the opposite order."""
    x = data.input(1, 5)
    values = [g.node("exp", g.node("broadcast_to", x, shape=(rows, 5))) for rows in (3, 9, 1, 27, 2, 81)]
    total = g.node("reduce_sum", values[-1], axes=(0,))
    for value in reversed(values[:-1]):
        total = g.node("add", total, g.node("reduce_sum", value, axes=(0,)))
    g.output(total)


def deep(g: Recipe, data: Data) -> None:
    """two hundred ops in a chain."""
    value = data.input(3, 5)
    for number in range(100):
        value = g.node("scale", g.node("neg", value), scale=0.984375, bias=number / 1024)
    g.output(value)


def assigned(g: Recipe, data: Data) -> None:
    """a variable that is read, assigned, and read again."""
    variable, x = data.variable(5, 7), data.input(5, 7)
    before = g.node("mul", variable, x)
    after = g.node("assign", variable, g.node("add", variable, x))
    g.output(before, after, g.node("mul", variable, x), variable)


def old_view(g: Recipe, data: Data) -> None:
    """a view of a variable from before an assignment."""
    variable = data.variable(6, 4)
    turned = g.node("permute", variable, axes=(1, 0))
    g.node("assign", variable, data.input(6, 4))
    g.output(g.node("neg", turned), g.node("cont", variable))


def assigned_twice(g: Recipe, data: Data) -> None:
    """a variable that is assigned twice, from itself."""
    variable = data.variable(4, 6)
    first = g.node("assign", variable, g.node("scale", variable, scale=2.0))
    seen = g.node("neg", variable)
    second = g.node("assign", variable, g.node("add", variable, data.input(6)))
    g.output(first, seen, second)


def cache(g: Recipe, data: Data) -> None:
    """rows that are put into a cache, which is then read."""
    keys = data.variable(16, 8)
    rows, places = data.input(3, 8), data.input(3, name="i64", fill="distinct 16")
    g.node("assign", keys, g.node("set_rows", keys, rows, places))
    g.output(g.node("mul_mat", keys, data.input(2, 8)))


def outputs_as_they_are(g: Recipe, data: Data) -> None:
    """outputs that are an input, a weight, a variable and views of them."""
    x, w, v = data.input(4, 6), data.weight(3, 5), data.variable(2, 7)
    turned = g.node("permute", x, axes=(1, 0))
    part = g.node("slice", w, start=(1, 0), stop=(3, 5), step=(1, 2))
    g.output(x, w, v, turned, part, g.node("broadcast_to", v, shape=(2, 2, 7)))


def wanted_twice(g: Recipe, data: Data) -> None:
    """a value and a view of it, each an output twice."""
    value = g.node("exp", data.input(5, 6))
    turned = g.node("permute", value, axes=(1, 0))
    g.output(value, turned, value, turned)


def nothing(g: Recipe, data: Data) -> None:
    """no ops at all."""
    x = data.input(3, 5)
    g.output(x, x)


def strided(g: Recipe, data: Data) -> None:
    """outputs in memory with strides."""
    x = data.input(9, 5, layout="transposed")
    value = g.node("exp", x)
    g.output(value, g.node("add", value, data.input(5)), g.node("neg", x))
    g.output_layouts.update({0: "transposed", 1: "spaced", 2: "spaced"})


def embedding(g: Recipe, data: Data) -> None:
    """a weight that is gathered from and multiplied."""
    weight = data.weight(33, 64, name="f16")
    rows = g.node("get_rows", weight, data.input(5, name="i32", fill="below 33"))
    g.output(g.node("mul_mat", weight, g.node("rms_norm", rows)))


def weight_both_ways(g: Recipe, data: Data) -> None:
    """a weight from either side, transposed, and added."""
    weight, x = data.weight(33, 33), data.input(5, 33)
    left = g.node("matmul", x, weight)
    right = g.node("matmul", x, g.node("permute", weight, axes=(1, 0)))
    g.output(g.node("add", left, right), g.node("matmul", g.node("add", weight, weight), weight))


def quantized(g: Recipe, data: Data) -> None:
    """a product with quantized weights between others."""
    weight = data.weight(64, 96, name="q8_0")
    hidden = g.node("relu", g.node("mul_mat", weight, g.node("rms_norm", data.input(5, 96))))
    g.output(g.node("mul_mat", data.weight(32, 64, name="q4_0"), hidden))


def mixed_types(g: Recipe, data: Data) -> None:
    """several data types in one graph."""
    x = data.input(9, 33)
    half = g.node("cast", x, dtype=DTYPES["f16"])
    places = g.node("argsort", x)
    mask = g.node("greater", half, g.node("cast", data.input(33), dtype=DTYPES["f16"]))
    counted = g.node("reduce_sum", g.node("cast", mask, dtype=DTYPES["i32"]), axes=(1,))
    g.output(half, places, mask, counted)


def empty(g: Recipe, data: Data) -> None:
    """values without elements."""
    x = data.input(0, 8)
    product = g.node("matmul", x, data.weight(8, 5))
    g.output(product, g.node("reduce_sum", product, axes=(0,)), g.node("permute", x, axes=(1, 0)))


def scalars(g: Recipe, data: Data) -> None:
    """tensors of no dimensions."""
    x, y = data.input(), data.input()
    g.output(g.node("add", g.node("mul", x, y), g.node("sin", x)))


def sources(g: Recipe, data: Data) -> None:
    """constants that are made in the graph, and their readers."""
    steps = g.node("arange", start=0.0, stop=33.0, step=1.0)
    half = g.node("fill", shape=(33,), value=0.5, dtype=DTYPES["f32"])
    g.output(g.node("mul", g.node("add", steps, half), data.input(5, 33)), steps)


GRAPHS: tuple[Build, ...] = (
    chain, product, transformer, views, reshaped, overlapping, broadcast_in_place, twice, diamond,
    reversed_lives, deep, assigned, old_view, assigned_twice, cache, outputs_as_they_are, wanted_twice,
    nothing, strided, embedding, weight_both_ways, quantized, mixed_types, empty, scalars, sources,
)  # fmt: skip
