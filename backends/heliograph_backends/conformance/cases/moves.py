"""Cases of ops that move elements: gathers, copies, views, blocks, sources, variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from heliograph_backends.conformance.cases.forms import (
    EVERY_BLOCK,
    FLOATS,
    LARGE,
    NUMBERS,
    PLAIN,
    STRIDES,
    TAKEN,
    Cases,
    c,
    laid,
    outside,
    width,
)
from heliograph_backends.conformance.harness.case import OpCase, t
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import DTYPES


def get_rows(op: str) -> Iterator[OpCase]:
    """Rows of every type by both index types."""
    yield from laid(c(op, t("f32", 9, 33), t("i32", 4, fill="below 9")), (*STRIDES, "repeated", *TAKEN))
    for name in PLAIN:
        yield c(op, t(name, 9, 5), t("i64", 4, fill="below 9"))
        yield c(op, t(name, 2, 3, 4, 5), t("i32", 2, 3, 6, fill="below 4"))
    for count in (0, 1, 300):
        yield c(op, t("f32", 9, 5, kind=LeafKind.WEIGHT), t("i32", count, fill="below 9"))
    yield c(op, t("f32", 0, 5), t("i32", 0))
    for name in EVERY_BLOCK:
        size = width(name)
        yield c(op, t(name, 9, size, kind=LeafKind.WEIGHT), t("i32", 4, fill="below 9"))
        yield c(op, t(name, 2, 4, size), t("i64", 2, 6, fill="below 4"))
    for wrong in (9, -1, 2**31 - 1):
        yield from outside(c(op, t("f32", 9, 5), t("i32", 4, fill=f"outside {wrong}")))


def set_rows(op: str) -> Iterator[OpCase]:
    """Rows of the target's type, or of another float, at distinct indices."""
    first = c(op, t("f32", 9, 33), t("f32", 4, 33), t("i32", 4, fill="distinct 9"))
    yield from laid(first, (*STRIDES, *TAKEN))
    for name in PLAIN:
        yield c(op, t(name, 9, 5), t(name, 4, 5), t("i64", 4, fill="distinct 9"))
    for into, source in (("f16", "f32"), ("f32", "f16"), ("bf16", "f32"), ("f16", "bf16")):
        yield c(op, t(into, 9, 5), t(source, 4, 5), t("i32", 4, fill="distinct 9"))
    yield c(op, t("f32", 9, 5), t("f32", 0, 5), t("i32", 0))
    yield c(op, t("f32", 2, 3, 4, 5), t("f32", 2, 3, 2, 5), t("i32", 2, 3, 2, fill="distinct 4"))
    yield c(op, t("f32", 2, 4, 6, 3), t("f32", 2, 4, 5, 3), t("i64", 2, 5, fill="distinct 6"))
    for name in EVERY_BLOCK:
        size = width(name)
        for source, index in (("f32", "i32"), ("f16", "i64"), ("bf16", "i32")):
            yield c(op, t(name, 9, size), t(source, 4, size), t(index, 4, fill="distinct 9"))
        yield c(op, t(name, 2, 6, size), t("f32", 2, 3, size), t("i64", 3, fill="distinct 6"))
    for source in FLOATS:
        yield c(op, t("i32", 9, 5), t(source, 4, 5), t("i64", 4, fill="distinct 9"))
    for wrong in (9, -1):
        yield from outside(c(op, t("f32", 9, 5), t("f32", 2, 5), t("i64", 2, fill=f"outside {wrong}")))


def combined_rows(op: str) -> Iterator[OpCase]:
    """Rows of every number at indices that occur often, once or never."""
    first = c(op, t("f32", 9, 33), t("f32", 14, 33), t("i32", 14, fill="below 9"))
    yield from laid(first, (*STRIDES, *TAKEN))
    fill = "fraction" if op == "mul_rows" else "normal"
    for name in NUMBERS:
        small = fill if name in FLOATS else "normal"
        yield c(op, t(name, 9, 5), t(name, 12, 5, fill=small), t("i64", 12, fill="below 9"))
    for whole, part, at in (
        ((9, 5), (0, 5), (0,)), ((3, 1), (200, 1), (200,)), ((2, 4, 6, 3), (2, 4, 5, 3), (2, 5)),
        ((2, 3, 4, 5), (2, 3, 9, 5), (2, 3, 9)),
        ((9, 517), (300, 517), (300,)), ((0, 4, 3), (0, 2, 3), (1, 2)),
    ):  # fmt: skip
        operands = t("f32", *whole), t("f32", *part, fill=fill), t("i32", *at, fill=f"below {whole[-2]}")
        yield c(op, *operands)
    for wrong in (9, -1):
        yield from outside(c(op, t("f32", 9, 5), t("f32", 2, 5), t("i64", 2, fill=f"outside {wrong}")))


def mul_mat_id(op: str) -> Iterator[OpCase]:
    """Ids of experts that do not exist."""
    yield from outside(
        c(op, t("f32", 4, 5, 6), t("f32", 3, 1, 6), t("i32", 3, 2, fill="outside 4")),
        c(op, t("f32", 4, 5, 6), t("f32", 3, 1, 6), t("i32", 3, 2, fill="outside -1")),
    )


def add_id(op: str) -> Iterator[OpCase]:
    """Biases by id."""
    yield from laid(
        c(op, t("f32", 4, 2, 33), t("f32", 6, 33), t("i32", 4, 2, fill="below 6")), (*STRIDES, *TAKEN)
    )
    for name in FLOATS[1:]:
        yield c(op, t(name, 4, 5), t(name, 6, 5), t("i64", 4, fill="below 6"))
    for lead in ((), (0, 2), (2, 1, 3)):
        yield c(op, t("f32", *lead, 5), t("f32", 6, 5), t("i32", *lead, fill="below 6"))
    yield from outside(c(op, t("f32", 4, 5), t("f32", 6, 5), t("i32", 4, fill="outside 6")))


def block(op: str) -> Iterator[OpCase]:
    """A block in a larger tensor: in the middle, all of it, nothing."""
    yield from laid(c(op, t("f32", 7, 33), t("f32", 3, 20), start=(2, 5)), (*STRIDES, *TAKEN))
    forms = (((4, 5), (4, 5), (0, 0)), ((7,), (0,), (7,)), ((), (), ()), ((2, 3, 4), (1, 3, 2), (1, 0, 2)))
    for whole, part, start in forms:
        yield c(op, t("f32", *whole), t("f32", *part), start=start)
    for name in NUMBERS[1:] if op == "acc" else PLAIN[1:]:
        yield c(op, t(name, 7, 9), t(name, 3, 4), start=(4, 5))
    for step in ((2, 1), (3, 2)):
        yield c(op, t("f32", 7, 33), t("f32", 3, 14), start=(0, 5), step=step)


def cont(op: str) -> Iterator[OpCase]:
    """A copy of anything."""
    layouts = (*STRIDES, "repeated", "slice", "broadcast_to", "kept")
    yield from laid(c(op, t("f32", 7, 33)), layouts)
    for name in PLAIN[1:]:
        yield from laid(c(op, t(name, 4, 3, 5)), ("slice of permute",))
    for shape in ((), (0,), LARGE):
        yield from laid(c(op, t("f32", *shape)), ("permute",))
    yield c(op, t("f32", 13, fill="special"))
    for name in ("i32", "i64", "u64"):
        yield c(op, t(name, 200, fill="wide"))
    for name in EVERY_BLOCK:
        yield from laid(c(op, t(name, 4, 3, width(name))), ("permute",))


def bitcast(op: str) -> Iterator[OpCase]:
    """Every pair of types of one size."""
    yield from laid(c(op, t("f32", 7, 33), dtype=DTYPES["i32"]), (*STRIDES, "repeated", "kept"))
    for name, other in itertools.permutations(NUMBERS, 2):
        if DTYPES[name].block_bytes == DTYPES[other].block_bytes:
            yield c(op, t(name, 3, 5, fill="wide" if name[0] in "iu" else "normal"), dtype=DTYPES[other])
    for shape in ((), (0, 2), LARGE):
        yield c(op, t("i32", *shape), dtype=DTYPES["f32"])


def cpy(op: str) -> Iterator[OpCase]:
    """Copies to the shape and the type of another operand, whose elements do not matter."""
    yield from laid(c(op, t("f32", 7, 33), t("f16", 11, 21)), (*STRIDES, "computed", "kept"), (0,))
    for name in PLAIN[1:]:
        yield c(op, t("f32", 4, 3, fill="below 3"), t(name, 2, 6))
        yield c(op, t(name, 4, 3), t(name, 12))
    yield c(op, t("f32", 0, 3), t("i32", 5, 0))
    for name in EVERY_BLOCK:
        size = width(name)
        for other in FLOATS[:3]:
            yield c(op, t(other, 4, size * 3 // 4), t(name, 3, size))
            yield c(op, t(other, 2, 3, size), t(name, 6, size))
            yield c(op, t(name, 3, size), t(other, 4, size * 3 // 4))
        yield c(op, t(name, 3, size), t(name, 3, size))


def concat(op: str) -> Iterator[OpCase]:
    """Two and more operands, some of them empty."""
    yield from laid(c(op, t("f32", 7, 33), t("f32", 7, 12), axis=1), (*STRIDES, "repeated", "computed"))
    for name in PLAIN:
        yield c(op, t(name, 2, 4, 3), t(name, 2, 0, 3), t(name, 2, 1, 3), axis=-2)
    for name in EVERY_BLOCK:
        size = width(name)
        for axis in (0, 1):
            yield c(op, t(name, 2, size), t(name, 2, size), axis=axis)
    yield c(op, t("f32", 5, 9))
    yield c(op, t("f32", 129, 9), t("f32", 130, 9), axis=0)
    yield c(op, *(t("f32", 2, 3) for _ in range(40)), axis=1)


def reshape(op: str) -> Iterator[OpCase]:
    """Reshapes, some of strided operands, which take a copy."""
    for shape in ((33, 7), (7, 3, 11)):
        yield from laid(c(op, t("f32", 7, 33), shape=shape), (*STRIDES, "slice", "computed", "kept"))
    for name in PLAIN[1:]:
        yield c(op, t(name, 4, 1, 6), shape=(2, -1, 3))
    for name in EVERY_BLOCK:
        yield c(op, t(name, 4, 3, width(name)), shape=(2, 6, width(name)))
    yield c(op, t("f32", 0, 3), shape=(5, 0))
    yield c(op, t("f32"), shape=(1, 1))


def permute(op: str) -> Iterator[OpCase]:
    """Every order of some dimensions."""
    for axes in ((2, 0, 1), (0, 1, 2), (-1, -2, -3)):
        yield from laid(c(op, t("f32", 4, 3, 5), axes=axes), (*STRIDES, "computed", "kept"))
    for name in PLAIN[1:]:
        yield c(op, t(name, 4, 3, 5), axes=(1, 2, 0))
    for name in EVERY_BLOCK:
        yield c(op, t(name, 4, 3, width(name)), axes=(1, 0, 2))
    yield c(op, t("f32", 2, 1, 2, 1, 3, 1, 2, 5), axes=(7, 6, 5, 4, 3, 2, 1, 0))
    yield c(op, t("f32"), axes=())
    yield c(op, t("f32", *LARGE), axes=(1, 0))


def broadcast_to(op: str) -> Iterator[OpCase]:
    """New dimensions in front, and repeated ones."""
    for shape in ((4, 3, 6), (2, 2, 1, 1, 1, 4, 5, 6), (4, 1, 6)):
        yield from laid(c(op, t("f32", 4, 1, 6), shape=shape), (*STRIDES, "computed"))
    for name in PLAIN[1:]:
        yield c(op, t(name, 4, 1, 6), shape=(4, 3, 6))
    for name in EVERY_BLOCK:
        yield c(op, t(name, 1, width(name)), shape=(3, width(name)))
    yield c(op, t("f32", 1, 6), shape=(0, 6))
    yield c(op, t("f32"), shape=(3,))


def slice_(op: str) -> Iterator[OpCase]:
    """Parts with steps, empty parts."""
    forms = (
        ((1, 0, 2), (4, 1, 6), (2, 1, 3)), ((4, 0, 0), (4, 1, 6), (1, 1, 1)),
        ((0, 0, 0), (4, 1, 6), (1, 1, 7)),
    )  # fmt: skip
    for start, stop, step in forms:
        yield from laid(
            c(op, t("f32", 4, 1, 6), start=start, stop=stop, step=step), (*STRIDES, "computed", "kept")
        )
    for name in PLAIN[1:]:
        yield c(op, t(name, 9, 7), start=(1, 2), stop=(8, 7), step=(3, 2))
    for name in EVERY_BLOCK:
        block = DTYPES[name].block_size
        yield c(op, t(name, 9, 3 * block), start=(1, block), stop=(8, 3 * block), step=(3, 1))


def diag(op: str) -> Iterator[OpCase]:
    """Diagonals of several matrices."""
    yield from laid(c(op, t("f32", 3, 1, 7)), STRIDES)
    for name in PLAIN[1:]:
        yield c(op, t(name, 5))
    for shape in ((0,), (1, 4), (0, 1, 2), (2, 1, 65)):
        yield c(op, t("f32", *shape))


def diag_mask(op: str) -> Iterator[OpCase]:
    """Square, wide and high matrices."""
    yield from laid(c(op, t("f32", 7, 9), n_past=1), (*STRIDES, *TAKEN))
    for shape, past in (
        ((5, 5), 0),
        ((7, 3), 3),
        ((2, 2, 4, 6), 1),
        ((0, 3), 0),
        (LARGE, 200),
        ((3, 3), 2**31 - 1),
    ):
        yield c(op, t("f32", *shape), n_past=past)
    for name in FLOATS[1:]:
        yield c(op, t(name, 5, 7))


def tri(op: str) -> Iterator[OpCase]:
    """ggml's four triangles."""
    for kind in range(4):
        layouts = () if kind else ("spaced", "permute", *TAKEN)
        yield from laid(c(op, t("f32", 3, 7, 7), type=kind), layouts)
        yield c(op, t("f32", 1, 1), type=kind)
    yield c(op, t("f32", 0, 0), type=0)
    for name in NUMBERS[1:]:
        yield c(op, t(name, 5, 5), type=2)


def repeat(op: str) -> Iterator[OpCase]:
    """Repeats in some or new dimensions."""
    yield from laid(c(op, t("f32", 4, 3), shape=(8, 9)), (*STRIDES, "repeated", "computed"))
    for shape, target in (
        ((), (3,)),
        ((2, 3), (2, 2, 3)),
        ((0, 2), (0, 4)),
        ((5,), (0, 5)),
        ((1, 33), (129, 99)),
    ):
        yield c(op, t("f32", *shape), shape=target)
    for name in PLAIN[1:]:
        yield c(op, t(name, 2, 3), shape=(4, 9))


def fill(op: str) -> Iterator[OpCase]:
    """Constants of every plain type, and numbers that overflow it."""
    for name in PLAIN:
        yield c(op, shape=(3, 4), value=1.0 if name == "bool" else 7.0, dtype=DTYPES[name])
    for value in (float("inf"), -0.5, float("nan"), 1e300):
        yield c(op, shape=(2,), value=value, dtype=DTYPES["f32"])
    for shape in ((), (0, 2), LARGE):
        yield c(op, shape=shape, value=0.25, dtype=DTYPES["f32"])
    yield c(op, shape=(2,), value=-(2**63), dtype=DTYPES["i64"])


def arange(op: str) -> Iterator[OpCase]:
    """Rising, falling and empty ranges, and numbers between which f32 has gaps."""
    forms = (
        (0, 5, 1),
        (5, 0, -2),
        (0.5, 2, 0.25),
        (3, 3, 1),
        (1, 0, 1),
        (0, 1e3, 7.5),
        (2**24, 2**24 + 64, 4),
        (0, 70000, 1),
    )
    for start, stop, step in forms:
        yield c(op, start=float(start), stop=float(stop), step=float(step))


def philox(op: str) -> Iterator[OpCase]:
    """Sizes that are no whole blocks of four, in both data types, by several seeds and counters."""
    for name, shape in itertools.product(("f32", "u32"), ((2, 3, 7), (), (0, 3), (5,), LARGE)):
        yield c(op, t("i64"), t("i64", 1), shape=shape, dtype=DTYPES[name])
    numbers = t("i64", 1, 1, fill="wide")
    yield from laid(c(op, numbers, numbers, shape=(7, 33), dtype=DTYPES["u32"]), (*STRIDES, *TAKEN))


def assign(op: str) -> Iterator[OpCase]:
    """A variable holds the value afterwards."""

    def pair(name: str, *shape: int) -> OpCase:
        return c(op, t(name, *shape, kind=LeafKind.VARIABLE), t(name, *shape))

    yield from laid(pair("f32", 7, 33), (*STRIDES, "repeated", *TAKEN))
    for name in PLAIN[1:]:
        yield pair(name, 3, 5)
    for name in EVERY_BLOCK:
        yield pair(name, 3, width(name))
    for shape in ((), (0, 2), LARGE):
        yield pair("f32", *shape)


CASES: Mapping[str, Cases] = {
    "get_rows": get_rows, "set_rows": set_rows,
    **dict.fromkeys(("add_rows", "mul_rows", "max_rows", "min_rows"), combined_rows),
    "mul_mat_id": mul_mat_id, "add_id": add_id,
    **dict.fromkeys(("acc", "set"), block), "cont": cont, "bitcast": bitcast, "cpy": cpy,
    "concat": concat, "reshape": reshape,
    "permute": permute, "broadcast_to": broadcast_to, "slice": slice_, "diag": diag,
    **dict.fromkeys(("diag_mask_inf", "diag_mask_zero"), diag_mask), "tri": tri, "repeat": repeat,
    "fill": fill, "arange": arange, "philox": philox, "assign": assign,
}  # fmt: skip
