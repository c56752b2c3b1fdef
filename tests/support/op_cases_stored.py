"""Cases of bf16 and of quantized types, from those of other floats."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from backend_graphs import Array, Maker
from op_cases import data

from heliograph_proto.ops.table import OPS
from heliograph_proto.quantization import blocks as bfloat16
from heliograph_proto.quantization.blocks import quantize
from heliograph_proto.types import DTYPES, dtype

QUANTIZED = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4", "tq1_0", "tq2_0",
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "nvfp4", "q8_1", "q8_k",
    "q1_0", "q2_0",
)  # fmt: skip

#: Operands that may be blocks, by op.
BLOCK_OPERANDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("cast", "cpy", "cont", "reshape", "permute", "broadcast_to", "slice"), (0,)),
    **dict.fromkeys(("get_rows", "set_rows", "out_prod", "add", "add1", "im2col", "im2col_3d"), (0,)),
    **dict.fromkeys(("mul_mat", "mul_mat_id"), (0, 1)),
    "concat": (0, 1),
    "assign": (0, 1),
    **dict.fromkeys(("flash_attn_ext", "flash_attn_paged"), (1, 2)),
    "lightning_indexer": (1,),
}


@dataclass
class Stored:
    """An array that holds bits or blocks of a data type; "": one that NumPy has."""

    array: Array
    dtype: str = ""


@dataclass
class Node:
    """One node on such arrays."""

    op: str
    operands: Sequence[Stored]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        types = [f"{one.dtype or one.array.dtype}{one.array.shape}" for one in self.operands]
        return f"{self.op} of {', '.join(types)} with {dict(self.attributes)}"

    def made(self) -> Maker:
        """The graph of this node."""
        made = Maker()
        operands = [made.input(one.array, one.dtype) for one in self.operands]
        if self.op == "assign":
            operands[0] = made.variable(np.zeros_like(self.operands[0].array), self.operands[0].dtype)
        made.output(made.node(self.op, *operands, **self.attributes))
        return made


def plain(array: Array) -> Stored:
    return Stored(array)


def brain(array: Array) -> Stored:
    """A float array as bf16; others as they are."""
    return Stored(bfloat16.to_bits(array), "bf16") if array.dtype.kind == "f" else Stored(array)


def blocks(array: Array, name: str) -> Stored:
    return Stored(quantize(array, name), name)


# Nodes whose first operand, or keys and values, are blocks, beside the same with floats


def block_nodes(op: str, name: str, random: np.random.Generator) -> Iterator[Node]:
    """Nodes with operands that may be blocks of the data type `name`; the others are f32."""
    width = 2 * dtype(name).block_size
    made = {
        "mul_mat": _products, "mul_mat_id": _expert_products, "out_prod": _outer_products,
        "get_rows": _lookups, "flash_attn_ext": _attentions, "flash_attn_paged": _paged_attentions,
        "cast": _casts, "cpy": _copies,
        "cont": _moves, "concat": _joins, "reshape": _moves, "permute": _moves, "broadcast_to": _moves,
        "slice": _moves, "assign": _joins, "set_rows": _insertions, "lightning_indexer": _indexers,
        "add": _sums, "add1": _sums, "im2col": _windows, "im2col_3d": _windows,
    }[op]  # fmt: skip
    yield from made(op, _Source(name, random), width)


@dataclass
class _Source:
    """Random arrays, as blocks and as f32."""

    name: str
    random: np.random.Generator

    def blocks(self, *shape: int) -> Stored:
        return blocks(data(self.random, "f32", shape), self.name)

    def others(self, name: str, *shape: int) -> Stored:
        """Blocks of another data type."""
        return blocks(data(self.random, "f32", shape), name)

    def floats(self, *shape: int, name: str = "f32") -> Stored:
        array = data(self.random, "f32" if name == "bf16" else name, shape)
        return brain(array) if name == "bf16" else plain(array)

    def indices(self, count: int, *shape: int) -> Stored:
        return plain(self.random.integers(0, count, shape).astype(np.int32))


def _products(op: str, source: _Source, width: int) -> Iterator[Node]:
    for lead, own, name in itertools.product(((), (2,), (4, 3)), ((), (1,)), ("f32", "f16", "bf16")):
        if len(own) <= len(lead):
            yield Node(op, [source.blocks(*own, 5, width), source.floats(*lead, 3, width, name=name)])
    yield Node(op, [source.blocks(2, 5, width), source.floats(4, 3, width)])
    yield Node(op, [source.blocks(5, 0), source.floats(3, 0)])
    yield Node(op, [source.blocks(2, 5, width), source.others("q8_0", 4, 3, width)])


def _expert_products(op: str, source: _Source, width: int) -> Iterator[Node]:
    for own in (1, 2):
        operands = [source.blocks(6, 5, width), source.floats(3, own, width), source.indices(6, 3, 2)]
        yield Node(op, operands)
        yield Node(op, [operands[0], source.others("q8_0", 3, own, width), operands[2]])


def _sums(op: str, source: _Source, width: int) -> Iterator[Node]:
    for shape in ((3, width), (width,), (1, 1)) if op == "add" else ((1,), ()):
        yield Node(op, [source.blocks(3, width), source.floats(*shape)])


def _windows(op: str, source: _Source, width: int) -> Iterator[Node]:
    """Kernels of whole blocks, of which the shape alone matters."""
    if op == "im2col":
        yield Node(op, [source.blocks(2, 3, width), source.floats(1, 3, width + 5)])
    else:
        kernel, volume = source.blocks(2, 1, 2, width), source.floats(2, 2, 3, width + 1)
        yield Node(op, [kernel, volume], {"channels": 2})


def _outer_products(op: str, source: _Source, width: int) -> Iterator[Node]:
    yield Node(op, [source.blocks(3, width), source.floats(3, 4)])
    yield Node(op, [source.blocks(1, 3, width), source.floats(2, 3, 4)])


def _lookups(op: str, source: _Source, width: int) -> Iterator[Node]:
    yield Node(op, [source.blocks(9, width), source.indices(9, 4)])
    yield Node(op, [source.blocks(9, width), source.indices(9, 0)])
    yield Node(op, [source.blocks(2, 3, 4, width), source.indices(4, 2, 3, 6)])


def _attentions(op: str, source: _Source, width: int) -> Iterator[Node]:
    q, k, v = source.floats(2, 4, 3, width), source.blocks(2, 2, 5, width), source.blocks(2, 2, 5, width)
    yield Node(op, [q, k, v], {"scale": 0.1})
    yield Node(op, [q, k, v, source.floats(3, 5, name="f16")], {"scale": 0.1})
    yield Node(op, [q, k, source.floats(2, 2, 5, 7)], {"scale": 0.1})


def _paged_attentions(op: str, source: _Source, width: int) -> Iterator[Node]:
    q, k, v = source.floats(3, 4, 2, width), source.blocks(7, 2, 3, width), source.blocks(7, 2, 3, width)
    mask, pages = source.floats(3, 1, 2, 12, name="f16"), source.indices(7, 3, 4)
    yield Node(op, [q, k, v, mask, pages], {"scale": 0.1})
    yield Node(op, [q, k, source.floats(7, 2, 3, 7), mask, pages, source.floats(4)], {"scale": 0.1})


def _indexers(op: str, source: _Source, width: int) -> Iterator[Node]:
    q, k, weights = source.floats(2, 3, 4, width), source.blocks(2, 5, 1, width), source.floats(2, 1, 3, 4)
    for name in ("f32", "f16", "bf16"):
        yield Node(op, [q, k, weights, source.floats(1, 1, 3, 5, name=name)])


def _casts(op: str, source: _Source, width: int) -> Iterator[Node]:
    for name in ("f32", "f16", "bf16", "f64"):
        yield Node(op, [source.blocks(3, width)], {"dtype": DTYPES[name]})


def _copies(op: str, source: _Source, width: int) -> Iterator[Node]:
    for name in ("f32", "bf16"):
        yield Node(op, [source.blocks(4, width), source.floats(2, 2, width, name=name)])


def _moves(op: str, source: _Source, width: int) -> Iterator[Node]:
    x, half = source.blocks(4, 2, width), width // 2
    yield from {
        "cont": [Node(op, [x])],
        "reshape": [Node(op, [x], {"shape": shape}) for shape in ((8, width), (2, -1), (16, half))],
        "permute": [Node(op, [x], {"axes": axes}) for axes in ((1, 0, 2), (0, 1, 2))],
        "broadcast_to": [Node(op, [x], {"shape": (3, 4, 2, width)})],
        "slice": [
            Node(op, [x], {"start": (1, 0, half), "stop": (4, 1, width), "step": (2, 1, 1)}),
            Node(op, [x], {"start": (0, 0, 0), "stop": (4, 2, half), "step": (1, 1, 1)}),
            Node(op, [x], {"start": (4, 0, 0), "stop": (4, 2, 0), "step": (1, 1, 1)}),
        ],
    }[op]


def _joins(op: str, source: _Source, width: int) -> Iterator[Node]:
    a, b = source.blocks(3, width), source.blocks(3, width)
    yield from [Node(op, [a, b], {"axis": axis}) for axis in (0, 1)] if op == "concat" else [Node(op, [a, b])]


def _insertions(op: str, source: _Source, width: int) -> Iterator[Node]:
    for name in ("f32", "f16", "bf16"):
        at = plain(np.array([4, 1, 4]))
        yield Node(op, [source.blocks(6, width), source.floats(3, width, name=name), at])
    at = plain(np.array([[0, 3], [2, 1]]))
    yield Node(op, [source.blocks(2, 4, width), source.floats(2, 2, width), at])


assert set(BLOCK_OPERANDS) <= set(OPS)
