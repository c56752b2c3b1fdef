"""Cases of ggml's matrix products, and of what puts rows, blocks and triangles into a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, NUMBERS, PLAIN, Case, Cases, Refusal, data, t, wide

from heliograph_proto.types import DTYPES

#: Data types of two operands of a product.
MIXED = (("f32", "f32"), ("f16", "f32"), ("f32", "f16"), ("f16", "f16"), ("f64", "f64"))


def repeated(part: Array, lead: tuple[int, ...]) -> Array:
    """Each leading dimension up to its size, by repeating every entry as often in a row."""
    part = part.reshape((1,) * (len(lead) + 2 - part.ndim) + part.shape)
    for axis, size in enumerate(lead):
        part = np.repeat(part, size // max(1, part.shape[axis]), axis=axis)
    return part


def mul_mat_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [
        ((1, 1), (1, 1)), ((7, 5), (3, 5)), ((70, 33), (65, 33)), ((129, 1), (1, 1)), ((3, 0), (2, 0)),
        ((4, 3), (0, 3)), ((0, 3), (4, 3)), ((5, 8), (2, 3, 4, 8)), ((2, 5, 8), (4, 3, 8)),
        ((2, 3, 5, 8), (4, 6, 1, 8)), ((1, 3, 5, 8), (2, 3, 4, 8)), ((0, 2, 3), (0, 1, 3)),
        ((1, 2, 1, 1, 3, 4), (2, 1, 2, 2, 1, 3, 2, 4)),
    ]  # fmt: skip
    for (left, right), (weights, activations) in itertools.product(MIXED, forms):
        a, b = data(random, left, weights), data(random, right, activations)
        yield Case(op, [a, b], wide(b) @ repeated(wide(a), activations[:-2]).swapaxes(-1, -2))


def out_prod_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [
        ((1, 1), (1, 1)), ((5, 7), (5, 3)), ((0, 2), (0, 3)), ((2, 5, 3), (4, 5, 2)), ((5, 3), (2, 2, 5, 4)),
        ((1, 2, 9, 17), (3, 4, 9, 16)),
    ]  # fmt: skip
    for (left, right), (first, second) in itertools.product(MIXED, forms):
        a, b = data(random, left, first), data(random, right, second)
        outer = np.einsum("...kn,...km->...mn", repeated(wide(a), second[:-2]), wide(b))
        yield Case(op, [a, b], outer)


def mul_mat_id_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [
        (4, 5, 6, 3, 2, 1),
        (4, 5, 6, 3, 2, 2),
        (1, 3, 2, 1, 1, 1),
        (8, 2, 33, 7, 4, 2),
        (3, 2, 2, 0, 2, 1),
    ]
    for (left, right), (count, n, k, tokens, used, own) in itertools.product(MIXED, forms):
        experts, b = data(random, left, (count, n, k)), data(random, right, (tokens, own, k))
        ids = random.integers(0, count, (tokens, used)).astype(np.int32 if left == "f32" else np.int64)
        expected = np.zeros((tokens, used, n))
        for token, slot in itertools.product(range(tokens), range(used)):
            expected[token, slot] = wide(experts)[ids[token, slot]] @ wide(b)[token, slot % own]
        yield Case(op, [experts, b, ids], expected)


def set_rows_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    kinds = [(name, name) for name in PLAIN] + [("f16", "f32"), ("f32", "f16")]
    forms = [
        ((9, 5), (4, 5), (4,)), ((9, 5), (0, 5), (0,)), ((2, 3, 4, 5), (2, 3, 2, 5), (2, 3, 2)),
        ((2, 4, 6, 3), (2, 4, 5, 3), (2, 5)), ((4, 6, 3), (4, 2, 3), (2,)), ((0, 4, 3), (0, 2, 3), (1, 2)),
    ]  # fmt: skip
    for (into, source), index, (whole, part, at) in itertools.product(kinds, ("i32", "i64"), forms):
        target, rows = data(random, into, whole), data(random, source, part)
        indices = np.empty(at, DTYPES[index].numpy)
        for place in np.ndindex(at[:-1]):
            indices[place] = random.permutation(whole[-2])[: at[-1]]
        expected = wide(target).copy()
        for place in np.ndindex(part[:-1]):
            lead = (0,) * (len(part) - 1 - len(at)) + place[len(place) - len(at) :]
            own = [p % size for p, size in zip(lead[len(lead) - len(at) :], at, strict=True)]
            expected[(*place[:-1], indices[tuple(own)])] = wide(rows)[place]
        yield Case(op, [target, rows, indices], expected)
    for source in FLOATS:
        target, rows = data(random, "i32", (6, 5)), data(random, source, (2, 5))
        expected = wide(target).copy()
        expected[[4, 1]] = np.frompyfunc(int, 1, 1)(wide(rows))
        yield Case(op, [target, rows, np.array([4, 1])], expected)
    twice = [np.zeros((3, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2), np.array([1, 1, 0])]
    yield Case(op, twice, np.array([[4.0, 5], [2, 3], [0, 0]]))


COMBINED: dict[str, Callable[..., Array]] = {
    "add_rows": np.add, "mul_rows": np.multiply, "max_rows": np.maximum, "min_rows": np.minimum,
}  # fmt: skip


def combined_rows_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [
        ((4, 5), (9, 5), (9,)), ((9, 5), (0, 5), (0,)), ((2, 3, 4, 5), (2, 3, 7, 5), (2, 3, 7)),
        ((3, 1), (20, 1), (20,)),
        ((2, 4, 6, 3), (2, 4, 5, 3), (2, 5)), ((4, 6, 3), (4, 2, 3), (2,)), ((0, 4, 3), (0, 2, 3), (1, 2)),
    ]  # fmt: skip
    for name, index, (whole, part, at) in itertools.product(NUMBERS, ("i32", "i64"), forms):
        target, rows = data(random, name, whole), data(random, name, part)
        if name in FLOATS:
            # No sum cancels, and no product leaves the range of a narrow float.
            target, rows = abs(target) + target.dtype.type(0.5), abs(rows) / 4 + rows.dtype.type(0.5)
        indices = random.integers(0, whole[-2], at).astype(DTYPES[index].numpy)
        expected = wide(target).copy()
        for place in np.ndindex(part[:-1]):
            own = place[len(place) - len(at) :]
            own = tuple(p % size for p, size in zip(own, at, strict=True))
            row = (*place[:-1], indices[own])
            expected[row] = COMBINED[op](expected[row], wide(rows)[place])
        yield Case(op, [target, rows, indices], expected)


def add1_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape, one in itertools.product(NUMBERS, ((), (3, 5), (0, 2)), ((), (1,), (1, 1, 1))):
        a, b = data(random, name, shape), data(random, name, one)
        yield Case(op, [a, b], wide(a) + wide(b).reshape(()))
    a, b = data(random, "f16", (3, 5)), data(random, "f32", (1,))
    yield Case(op, [a, b], wide(a) + wide(b))


def add_id_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, lead in itertools.product(FLOATS, ((), (4,), (3, 2), (0, 2), (2, 1, 3))):
        a, biases = data(random, name, (*lead, 5)), data(random, name, (6, 5))
        ids = random.integers(0, 6, lead).astype(np.int32)
        rows = np.array([wide(biases)[i] for i in ids.ravel()]).reshape(a.shape)
        yield Case(op, [a, biases, ids], wide(a) + rows)


BLOCKS = [((4, 5), (2, 3), (1, 2)), ((4, 5), (4, 5), (0, 0)), ((7,), (0,), (7,)), ((), (), ()),
          ((2, 3, 4), (1, 3, 2), (1, 0, 2))]  # fmt: skip
SPREAD = [((7, 9), (3, 4), (1, 2), (2, 1)), ((7, 9), (2, 3), (0, 2), (6, 3)), ((7,), (0,), (7,), (5,))]


def block_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [*((*each, ()) for each in BLOCKS), *SPREAD]
    for name, (whole, part, start, step) in itertools.product(NUMBERS if op == "acc" else PLAIN, forms):
        a, b = data(random, name, whole), data(random, name, part)
        expected = wide(a).copy() if whole else np.array(wide(a))
        for place in np.ndindex(part):
            walks = zip(place, start, step or (1,) * len(part), strict=True)
            at = tuple(first + by * p for p, first, by in walks)
            expected[at] = expected[at] + wide(b)[place] if op == "acc" else wide(b)[place]
        yield Case(op, [a, b], expected, {"start": start, **({"step": step} if step else {})})


def diag_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(PLAIN, ((5,), (0,), (1, 4), (2, 3, 1, 5), (0, 1, 2))):
        x = data(random, name, shape)
        row = wide(x).reshape(*shape[:-2], shape[-1])
        expected = np.zeros((*shape[:-2], shape[-1], shape[-1]), row.dtype)
        for place in np.ndindex(row.shape):
            expected[(*place, place[-1])] = row[place]
        yield Case(op, [x], expected)


def diag_mask_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    value = -math.inf if op == "diag_mask_inf" else 0.0
    shapes = ((5, 5), (3, 7), (7, 3), (2, 2, 4, 6), (0, 3))
    for name, shape, past in itertools.product(FLOATS, shapes, (0, 1, 3, 2**31 - 1)):
        x = data(random, name, shape)
        expected = wide(x).copy()
        for *lead, row, column in np.ndindex(shape):
            if column > past + row:
                expected[(*lead, row, column)] = value
        yield Case(op, [x], expected, {"n_past": past})


def tri_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    cuts = (lambda x: np.triu(x), lambda x: np.triu(x, 1), lambda x: np.tril(x), lambda x: np.tril(x, -1))
    for name, shape, kind in itertools.product(NUMBERS, ((5, 5), (2, 3, 4, 4), (1, 1), (0, 0)), range(4)):
        x = data(random, name, shape)
        yield Case(op, [x], cuts[kind](wide(x)), {"type": kind})


def repeat_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [
        ((), (3,)),
        ((2, 3), (4, 9)),
        ((2, 3), (2, 2, 3)),
        ((0, 2), (0, 4)),
        ((5,), (0, 5)),
        ((1, 2), (3, 4)),
    ]
    for name, (shape, target) in itertools.product(PLAIN, forms):
        x = data(random, name, shape)
        own = (1,) * (len(target) - len(shape)) + shape
        counts = [size // max(1, have) for have, size in zip(own, target, strict=True)]
        yield Case(op, [x], np.tile(wide(x), counts), {"shape": target})


CASES: dict[str, Cases] = {
    "mul_mat": mul_mat_cases,
    "mul_mat_id": mul_mat_id_cases,
    "out_prod": out_prod_cases,
    "set_rows": set_rows_cases,
    **dict.fromkeys(COMBINED, combined_rows_cases),
    "add1": add1_cases,
    "add_id": add_id_cases,
    "acc": block_cases,
    "set": block_cases,
    "diag": diag_cases,
    "diag_mask_inf": diag_mask_cases,
    "diag_mask_zero": diag_mask_cases,
    "tri": tri_cases,
    "repeat": repeat_cases,
}

F, I = "f32", "i32"  # noqa: E741
REFUSED: list[Refusal] = [
    ("rows that differ", "mul_mat", [t(F, 2, 3), t(F, 2, 4)], {}, "rows have 3 and 4"),
    ("weights that do not repeat", "mul_mat", [t(F, 2, 1, 1), t(F, 3, 1, 1)], {}, "do not divide"),
    ("weights of more dimensions", "mul_mat", [t(F, 1, 1, 1), t(F, 1, 1)], {}, "do not divide"),
    ("no weights", "mul_mat", [t(F, 0, 1, 1), t(F, 3, 1, 1)], {}, "do not divide"),
    ("a vector of weights", "mul_mat", [t(F, 3), t(F, 1, 3)], {}, "at least 2"),
    ("integer weights", "mul_mat", [t(I, 2, 3), t(F, 2, 3)], {}, "takes float"),
    ("f64 by f32", "mul_mat", [t("f64", 2, 3), t(F, 2, 3)], {}, "one of them f64"),
    ("columns that differ", "out_prod", [t(F, 2, 3), t(F, 3, 3)], {}, "2 and 3 rows"),
    ("outer products that do not repeat", "out_prod", [t(F, 2, 1, 1), t(F, 3, 1, 1)], {}, "do not divide"),
    ("ids that are floats", "mul_mat_id", [t(F, 2, 3, 4), t(F, 5, 1, 4), t(F, 5, 2)], {}, "i32 or i64"),
    ("experts as a matrix", "mul_mat_id", [t(F, 3, 4), t(F, 5, 1, 4), t(I, 5, 2)], {}, "needed"),
    ("tokens that differ", "mul_mat_id", [t(F, 2, 3, 4), t(F, 5, 1, 4), t(I, 6, 2)], {}, "do not fit"),
    ("slots that differ", "mul_mat_id", [t(F, 2, 3, 4), t(F, 5, 2, 4), t(I, 5, 3)], {}, "do not fit"),
    ("inner sizes that differ", "mul_mat_id", [t(F, 2, 3, 4), t(F, 5, 1, 3), t(I, 5, 3)], {}, "do not fit"),
    ("rows of another size", "set_rows", [t(F, 4, 3), t(F, 1, 2), t(I, 1)], {}, "only in dimension -2"),
    ("more rows than indices", "set_rows", [t(F, 4, 3), t(F, 2, 3), t(I, 1)], {}, "one index for each"),
    ("batches set at others", "set_rows", [t(F, 4, 4, 3), t(F, 4, 2, 3), t(I, 3, 2)], {}, "do not divide"),
    ("more batches of indices", "set_rows", [t(F, 4, 3), t(F, 2, 3), t(I, 1, 2)], {}, "do not divide"),
    ("floats set in other integers", "set_rows", [t("i64", 4, 3), t(F, 2, 3), t(I, 2)], {}, "different data"),
    ("integers set in floats", "set_rows", [t(F, 4, 3), t(I, 2, 3), t(I, 2)], {}, "different data types"),
    ("a float as an index", "set_rows", [t(F, 4, 3), t(F, 2, 3), t(F, 2)], {}, "i32 or i64"),
    ("other rows added", "add_rows", [t("f64", 4, 3), t(F, 2, 3), t(I, 2)], {}, "data types"),
    ("truths multiplied", "mul_rows", [t("bool", 4, 3), t("bool", 2, 3), t(I, 2)], {}, "takes float"),
    ("the largest of fewer", "max_rows", [t(F, 4, 3), t(F, 1, 3), t(I, 2)], {}, "one index for each"),
    ("the least at floats", "min_rows", [t(F, 4, 3), t(F, 1, 3), t(F, 1)], {}, "i32 or i64"),
    ("a row set in a row", "set_rows", [t(F, 3), t(F, 3), t(I, 1)], {}, "at least 2"),
    ("two numbers added", "add1", [t(F, 4), t(F, 2)], {}, "one element"),
    ("another number added", "add1", [t(F, 4), t(I, 1)], {}, "different data types"),
    ("biases of another size", "add_id", [t(F, 2, 3), t(F, 4, 2), t(I, 2)], {}, "needed"),
    ("ids of another shape", "add_id", [t(F, 2, 3), t(F, 4, 3), t(I, 3)], {}, "needed"),
    ("a block outside", "acc", [t(F, 4), t(F, 2)], {"start": (3,)}, "is not within"),
    ("a block before", "set", [t(F, 4), t(F, 2)], {"start": (-1,)}, "is not within"),
    ("a block at the end of numbers", "set", [t(F, 4), t(F, 2)], {"start": (2**63 - 1,)}, "is not within"),
    ("a block of another rank", "set", [t(F, 4), t(F, 2, 1)], {"start": (0,)}, "number of dimensions"),
    ("a start of another rank", "acc", [t(F, 4), t(F, 2)], {"start": (0, 0)}, "number of dimensions"),
    ("a block that ends outside", "set", [t(F, 5), t(F, 3)], {"start": (1,), "step": (2,)}, "is not within"),
    ("steps that stay", "acc", [t(F, 5), t(F, 3)], {"start": (1,), "step": (0,)}, "step is 0"),
    ("a step of another rank", "acc", [t(F, 5), t(F, 3)], {"start": (1,), "step": (1, 1)}, "number of dimen"),
    ("a matrix for a diagonal", "diag", [t(F, 2, 2)], {}, "must be 1"),
    ("a diagonal past 2**63", "diag", [t(F, 2**40)], {}, "passes 2**63"),
    ("a negative past", "diag_mask_inf", [t(F, 2, 2)], {"n_past": -1}, "n_past is -1"),
    ("a huge past", "diag_mask_zero", [t(F, 2, 2)], {"n_past": 2**31}, "n_past is 2147483648"),
    ("a mask of a row", "diag_mask_inf", [t(F, 2)], {}, "at least 2"),
    ("a triangle of no type", "tri", [t(F, 2, 2)], {"type": 4}, "type is 4"),
    ("a triangle of an oblong", "tri", [t(F, 2, 3)], {"type": 0}, "must be square"),
    ("no multiple", "repeat", [t(F, 2)], {"shape": (3,)}, "must be multiples"),
    ("fewer dimensions repeated", "repeat", [t(F, 1, 2)], {"shape": (2,)}, "must be multiples"),
    ("a negative multiple", "repeat", [t(F, 2)], {"shape": (-2,)}, "negative"),
    ("nothing repeated", "repeat", [t(F, 0)], {"shape": (2,)}, "must be multiples"),
    ("a repeat too large", "repeat", [t(F, 1)], {"shape": (2**62,)}, "passes 2**63"),
]  # fmt: skip
