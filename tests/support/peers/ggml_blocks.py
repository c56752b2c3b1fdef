"""Blocks of quantized types: ours against ggml's, bit for bit, and products of blocks that ggml
made."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from heliograph_backends.conformance.harness.content import Array, Content, decode, encode
from heliograph_backends.conformance.harness.recipe import Recipe
from heliograph_proto.quantization import blocks as quantization
from heliograph_proto.types import DTYPES, TensorType, tensor_type
from peers.ggml import Graph, quantized
from peers.ggml_call import GRIDS
from peers.ggml_compare import compare_recipe

SEED = 20260822
#: Quantized types that ggml encodes as we do, and those that it decodes: not those of activations.
_ALL = tuple(name for name, dtype in DTYPES.items() if dtype.kind == "quantized")
ENCODED = tuple(name for name in _ALL if name not in GRIDS.split())
DECODED = tuple(name for name in _ALL if name not in ("q8_1", "q8_k"))


def rows_of_floats(random: np.random.Generator) -> Iterator[Array]:
    """Rows as of weights, and such as make scales that are 0, tiny or large, and quanta that are
    halves."""
    shape = (16, 512)
    yield random.standard_normal(shape, np.float32)
    yield random.uniform(-1, 1, shape).astype(np.float32)
    yield (random.integers(-12, 13, shape) / 4).astype(np.float32)
    yield random.integers(-127, 128, shape).astype(np.float32)
    yield (random.standard_normal(shape) * np.exp(random.uniform(-16, 9, shape))).astype(np.float32)
    yield np.full(shape, 0.3, np.float32)
    yield np.zeros(shape, np.float32)


def different_bytes(name: str) -> int:
    """How many bytes of our blocks are others than those of ggml's reference."""
    random = np.random.default_rng(SEED)
    return sum(
        int(np.count_nonzero(quantization.quantize(rows, name) != quantized(rows, name)))
        for rows in rows_of_floats(random)
    )


def different_floats(name: str) -> int:
    """How many of the floats that ggml's blocks stand for have other bits here than in ggml."""
    random, count = np.random.default_rng(SEED), 0
    for rows in rows_of_floats(random):
        blocks = _made(rows, name)
        with Graph() as graph:
            (theirs,) = graph.run([graph.node("cast", graph.weight(name, rows.shape, blocks), "f32")])
        ours = quantization.dequantize(blocks, name)
        count += int(np.count_nonzero(ours.view(np.uint32) != theirs.reshape(rows.shape).view(np.uint32)))
    return count


def product_error(name: str) -> float:
    """The error of a product with weights of ggml's blocks. Raises MismatchError past the op's
    tolerance."""
    random, recipe = np.random.default_rng(SEED), Recipe()
    weights = recipe.input(_blocks(random, tensor_type(name, (67, 512))))
    activations = tensor_type("f32", (5, 512))
    values = random.uniform(-1, 1, activations.shape)
    recipe.output(recipe.node("mul_mat", weights, recipe.input(encode(activations, values))))
    return compare_recipe(recipe)


def _blocks(random: np.random.Generator, type: TensorType) -> Content:
    rows = random.uniform(-1, 1, type.shape).astype(np.float32)
    return decode(type, _made(rows, type.dtype.name).reshape(-1))


def _made(rows: Array, name: str) -> Array:
    """Blocks of ggml's, or of ours where it takes minutes or a matrix of importance."""
    return quantization.quantize(rows, name) if name in GRIDS.split() else quantized(rows, name)
