"""The rules of the op table: what each refuses, and what it says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import op_cases_activations
import op_cases_attention
import op_cases_elementary
import op_cases_patches
import op_cases_products
import op_cases_recurrent
import op_cases_reductions
import op_cases_rope
import op_cases_training
import op_cases_windows
import pytest
from op_cases import SEED, Refusal, t
from op_cases_basic import slicing

from heliograph_proto.errors import HeliographError, InvalidGraphError, UnknownOpError
from heliograph_proto.ops.table import MAX_OPERANDS, OPS, infer
from heliograph_proto.types import DTYPES, TensorType

REFUSED: list[Refusal] = [
    *op_cases_activations.REFUSED,
    *op_cases_attention.REFUSED,
    *op_cases_elementary.REFUSED,
    *op_cases_products.REFUSED,
    *op_cases_reductions.REFUSED,
    *op_cases_rope.REFUSED,
    *op_cases_windows.REFUSED,
    *op_cases_training.REFUSED,
    *op_cases_recurrent.REFUSED,
    *op_cases_patches.REFUSED,
    ("no operand", "exp", [], {}, "takes the operands"),
    ("too many operands", "exp", [t("f32"), t("f32")], {}, "takes the operands"),
    ("one operand of two", "add", [t("f32")], {}, "takes the operands"),
    ("four for soft_max", "soft_max", [t("f32", 1)] * 4, {}, "takes the operands"),
    ("operands of a source", "fill", [t("f32")], {}, "takes the operands"),
    ("more than a variadic op takes", "concat", [t("f32", 1)] * (MAX_OPERANDS + 1), {}, "takes the operands"),
    ("nothing to join", "concat", [], {}, "takes the operands"),
    ("an unknown attribute", "exp", [t("f32")], {"speed": 1}, "no attribute 'speed'"),
    ("a missing attribute", "reshape", [t("f32")], {}, "needs the attribute 'shape'"),
    ("None for an attribute", "scale", [t("f32")], {"scale": None}, "needs the attribute"),
    ("text for a number", "scale", [t("f32")], {"scale": "2"}, "is real, not str"),
    ("a boolean for a number", "scale", [t("f32")], {"scale": True}, "is real, not bool"),
    ("a boolean for an integer", "concat", [t("f32", 1)], {"axis": True}, "is integer, not bool"),
    ("a float for an integer", "concat", [t("f32", 1)], {"axis": 0.0}, "is integer, not float"),
    ("a number for a boolean", "reduce_sum", [t("f32", 1)], {"keepdims": 1}, "is boolean"),
    ("a number for integers", "reshape", [t("f32")], {"shape": 1}, "is integers"),
    ("floats for integers", "reshape", [t("f32")], {"shape": (1.0,)}, "is integers"),
    ("booleans for integers", "reshape", [t("f32")], {"shape": (True,)}, "is integers"),
    ("a name for a dtype", "cast", [t("f32")], {"dtype": "f16"}, "is dtype"),
    ("an integer of 64 bits", "concat", [t("f32", 1)], {"axis": 2**63}, "exceeds 64 bits"),
    ("a number of 64 bits", "scale", [t("f32")], {"scale": 2**63}, "exceeds 64 bits"),
    ("integers of 64 bits", "reshape", [t("f32")], {"shape": (2**63,)}, "exceeds 64 bits"),
    ("a million dimensions", "reshape", [t("f32")], {"shape": (2**62,) * 10**6}, "at most 8 dimensions"),
    ("a million axes", "permute", [t("f32")], {"axes": (0,) * 10**6}, "at most 8 dimensions"),
    ("integers for floats", "exp", [t("i32", 2)], {}, "takes float elements"),
    ("booleans for numbers", "neg", [t("bool", 2)], {}, "takes float or int or uint"),
    ("numbers for booleans", "logical_not", [t("f32", 2)], {}, "takes bool"),
    ("blocks", "add", [t("q8_0", 32), t("q8_0", 32)], {}, "takes float or int or uint"),
    ("two data types", "add", [t("f32"), t("f64")], {}, "different data types"),
    ("shapes that do not broadcast", "add", [t("f32", 2, 3), t("f32", 2)], {}, "do not broadcast"),
    ("no condition", "where", [t("f32"), t("f32"), t("f32")], {}, "takes bool"),
    ("branches of two types", "where", [t("bool"), t("f32"), t("f16")], {}, "different data types"),
    ("a cast to half a block", "cast", [t("f32", 48)], {"dtype": DTYPES["q8_0"]}, "whole blocks of 32"),
    ("a cast of a scalar to blocks", "cast", [t("f32")], {"dtype": DTYPES["q8_0"]}, "whole blocks of 32"),
    ("integers cast to blocks", "cast", [t("i32", 32)], {"dtype": DTYPES["q8_0"]}, "i32 does not convert"),
    ("blocks cast to integers", "cast", [t("q8_0", 32)], {"dtype": DTYPES["i32"]}, "q8_0 does not convert"),
    ("blocks cast to others", "cast", [t("q8_0", 32)], {"dtype": DTYPES["q4_0"]}, "does not convert"),
    ("a copy of another size", "cpy", [t("f32", 6), t("f32", 5)], {}, "6 and 5 elements"),
    ("integers copied to blocks", "cpy", [t("i32", 32), t("q8_0", 32)], {}, "does not convert"),
    ("bounds out of order", "clamp", [t("f32")], {"min": 1, "max": 0}, "is not <="),
    ("a bound that is NaN", "clamp", [t("f32")], {"min": math.nan, "max": 0}, "is not <="),
    ("eps NaN", "norm", [t("f32", 4)], {"eps": math.nan}, "eps is nan"),
    ("eps infinite", "rms_norm", [t("f32", 4)], {"eps": math.inf}, "eps is inf"),
    ("eps negative", "l2_norm", [t("f32", 4)], {"eps": -1e-9}, "not negative"),
    ("no row", "norm", [t("f32")], {}, "at least 1 needed"),
    ("an axis too high", "reduce_sum", [t("f32", 2, 3)], {"axes": (2,)}, "axis 2 does not exist"),
    ("an axis too low", "reduce_sum", [t("f32", 2, 3)], {"axes": (-3,)}, "axis -3 does not exist"),
    ("an axis twice", "reduce_sum", [t("f32", 2, 3)], {"axes": (1, -1)}, "twice"),
    ("an axis of a scalar", "reduce_sum", [t("f32")], {"axes": (0,)}, "does not exist"),
    ("the largest of nothing", "reduce_max", [t("f32", 0)], {}, "nothing to reduce"),
    ("the mean of nothing", "reduce_mean", [t("f32", 2, 0)], {"axes": (1,)}, "nothing to reduce"),
    ("the place in nothing", "argmax", [t("f32", 2, 0)], {}, "empty rows"),
    ("the place in a scalar", "argmax", [t("f32")], {}, "at least 1 needed"),
    ("a vector", "matmul", [t("f32", 3), t("f32", 3, 2)], {}, "at least 2 needed"),
    ("sides that do not meet", "matmul", [t("f32", 2, 3), t("f32", 2, 3)], {}, "the left rows have 3"),
    ("batches that differ", "matmul", [t("f32", 2, 1, 1), t("f32", 3, 1, 1)], {}, "do not broadcast"),
    ("a product of booleans", "matmul", [t("bool", 1, 1)] * 2, {}, "takes float"),
    ("an empty soft_max", "soft_max", [t("f32", 2, 0)], {}, "empty rows"),
    ("a scale that is NaN", "soft_max", [t("f32", 2)], {"scale": math.nan}, "must be finite"),
    ("a mask of another type", "soft_max", [t("f32", 2), t("f64", 2)], {}, "data types"),
    ("a mask too large", "soft_max", [t("f32", 2), t("f32", 3, 2)], {}, "does not broadcast to"),
    ("an index that is a float", "get_rows", [t("f32", 2, 2), t("f32", 1)], {}, "must be i32 or i64"),
    ("an index that is unsigned", "get_rows", [t("f32", 2, 2), t("u32", 1)], {}, "must be i32 or i64"),
    ("one row", "get_rows", [t("f32", 2), t("i32", 1)], {}, "at least 2 needed"),
    ("batches of indices", "get_rows", [t("f32", 2, 2, 2), t("i32", 3, 1)], {}, "leading dimensions"),
    ("another size", "reshape", [t("f32", 6)], {"shape": (4,)}, "6 elements"),
    ("two unknown sizes", "reshape", [t("f32", 6)], {"shape": (-1, -1)}, "at most one -1"),
    ("a negative size", "reshape", [t("f32", 6)], {"shape": (-2, -3)}, "at most one -1"),
    ("no whole rest", "reshape", [t("f32", 6)], {"shape": (4, -1)}, "6 elements"),
    ("an unknown beside zero", "reshape", [t("f32", 0)], {"shape": (0, -1)}, "0 elements"),
    ("an axis missing", "permute", [t("f32", 2, 3)], {"axes": (0,)}, "every axis exactly once"),
    ("an axis named twice", "permute", [t("f32", 2, 3)], {"axes": (0, 0)}, "twice"),
    ("an axis outside", "permute", [t("f32", 2, 3)], {"axes": (0, 2)}, "does not exist"),
    ("a size that cannot repeat", "broadcast_to", [t("f32", 2)], {"shape": (3,)}, "do not broadcast"),
    ("fewer dimensions", "broadcast_to", [t("f32", 1, 2)], {"shape": (2,)}, "does not broadcast to"),
    ("a negative repeat", "broadcast_to", [t("f32", 1)], {"shape": (-1,)}, "none < 0"),
    ("a start before", "slice", [t("f32", 4)], slicing((-1,), (2,), (1,)), "is not within"),
    ("a stop behind", "slice", [t("f32", 4)], slicing((0,), (5,), (1,)), "is not within"),
    ("a stop before the start", "slice", [t("f32", 4)], slicing((3,), (2,), (1,)), "is not within"),
    ("a step of 0", "slice", [t("f32", 4)], slicing((0,), (4,), (0,)), "is not within"),
    ("a step back", "slice", [t("f32", 4)], slicing((0,), (4,), (-1,)), "is not within"),
    ("a dimension too few", "slice", [t("f32", 4, 4)], slicing((0,), (4,), (1,)), "for every dimension"),
    ("scalars joined", "concat", [t("f32")] * 2, {}, "at least 1 needed"),
    ("ranks that differ", "concat", [t("f32", 2), t("f32", 2, 1)], {}, "differ only in dimension 0"),
    ("sides that differ", "concat", [t("f32", 2, 3), t("f32", 2, 4)], {}, "differ only in dimension 0"),
    ("joined along nothing", "concat", [t("f32", 2)], {"axis": 1}, "axis 1 does not exist"),
    ("types joined", "concat", [t("f32", 2), t("f64", 2)], {}, "different data types"),
    ("a byte of 256", "fill", [], {"shape": (), "value": 256, "dtype": DTYPES["u8"]}, "value of u8"),
    ("a byte of -1", "fill", [], {"shape": (), "value": -1, "dtype": DTYPES["u8"]}, "value of u8"),
    ("half an integer", "fill", [], {"shape": (), "value": 0.5, "dtype": DTYPES["i8"]}, "value of i8"),
    (
        "infinite integers",
        "fill",
        [],
        {"shape": (), "value": math.inf, "dtype": DTYPES["i64"]},
        "value of i64",
    ),
    ("2**63 as i64", "fill", [], {"shape": (), "value": 2.0**63, "dtype": DTYPES["i64"]}, "value of i64"),
    ("half a bool", "fill", [], {"shape": (), "value": 0.5, "dtype": DTYPES["bool"]}, "value of bool"),
    (
        "a bool that is NaN",
        "fill",
        [],
        {"shape": (), "value": math.nan, "dtype": DTYPES["bool"]},
        "value of bool",
    ),
    ("a scale NaN", "scale", [t("f32")], {"scale": math.nan}, "scale is NaN"),
    ("a slope NaN", "leaky_relu", [t("f32")], {"slope": math.nan}, "slope is NaN"),
    ("a place past i32", "argmax", [t("i8", 2**31)], {}, "do not fit in i32"),
    ("filled blocks", "fill", [], {"shape": (32,), "value": 0, "dtype": DTYPES["q8_0"]}, "not supported"),
    ("a negative fill", "fill", [], {"shape": (-1,), "value": 0, "dtype": DTYPES["f32"]}, "negative"),
    ("2**63 bytes", "fill", [], {"shape": (2**61,), "value": 0, "dtype": DTYPES["f32"]}, "passes 2**63"),
    ("2**63 beside zero", "fill", [], {"shape": (0, 2**62), "value": 0, "dtype": DTYPES["f32"]}, "2**63"),
    ("nine dimensions", "broadcast_to", [t("f32")], {"shape": (1,) * 9}, "at most 8 dimensions"),
    ("a product of nine", "matmul", [t("f32", *(1,) * 9), t("f32", 1, 1)], {}, "9 dimensions"),
    ("a step of nothing", "arange", [], {"start": 0, "stop": 1, "step": 0}, "step not 0"),
    ("an endless range", "arange", [], {"start": 0, "stop": math.inf, "step": 1}, "finite numbers"),
    ("a range too long", "arange", [], {"start": 0, "stop": 1e300, "step": 1}, "passes 2**63"),
    ("a range past numbers", "arange", [], {"start": 0, "stop": 1e308, "step": 1e-308}, "arange"),
    ("a repeat past 2**63", "broadcast_to", [t("f32", 1)], {"shape": (2**62,)}, "passes 2**63"),
    ("the bits of more bytes", "bitcast", [t("f32", 2)], {"dtype": DTYPES["i64"]}, "4 and 8 bytes"),
    ("the bits of truths", "bitcast", [t("bool", 2)], {"dtype": DTYPES["u8"]}, "must be numbers"),
    (
        "random numbers of two seeds",
        "philox",
        [t("i64", 2), t("i64")],
        {"shape": (3,), "dtype": DTYPES["f32"]},
        "one i64 element",
    ),
    (
        "random numbers by an i32",
        "philox",
        [t("i64"), t("i32")],
        {"shape": (3,), "dtype": DTYPES["f32"]},
        "counter is",
    ),
    (
        "random halves",
        "philox",
        [t("i64"), t("i64")],
        {"shape": (3,), "dtype": DTYPES["f16"]},
        "u32 or f32",
    ),
    ("an assignment of another type", "assign", [t("f32", 2), t("f32", 3)], {}, "must be equal"),
]


@pytest.mark.parametrize(
    ("op", "types", "attributes", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_node_that_breaks_a_rule_is_refused_with_what_was_wrong(
    op: str, types: list[TensorType], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidGraphError) as caught:
        infer(op, types, attributes)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 100_000


def test_an_unknown_op_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownOpError, match="did you mean 'soft_max'"):
        infer("softmax", [t("f32", 2)], {})


def test_an_unknown_op_that_resembles_none_names_the_table() -> None:
    with pytest.raises(UnknownOpError, match="heliograph ops"):
        infer("#" * 10_000, [], {})


def test_huge_but_legal_shapes_are_inferred_without_memory() -> None:
    found, _ = infer("matmul", [t("f32", 2**40, 1), t("f32", 1, 2**20)], {})
    assert found.shape == (2**40, 2**20)


def test_errors_of_rules_are_heliograph_errors_whatever_the_numbers() -> None:
    random = np.random.default_rng(SEED)
    edge = [-(2**63), -1, 0, 1, 2, 7, 2**31, 2**62, 2**63 - 1]
    for name, row in OPS.items():
        for _ in range(30):
            attributes: dict[str, Any] = {}
            for attribute in row.attributes:
                numbers = [int(random.choice(edge)) for _ in range(int(random.integers(0, 4)))]
                real = float(random.choice([-math.inf, math.nan, 0.0, 1e308, -1e-308, 3.0]))
                attributes[attribute.name] = {
                    "integers": numbers, "integer": (numbers or [0])[0], "real": real,
                    "boolean": True, "dtype": DTYPES["i8"],
                }[attribute.kind]  # fmt: skip
            types = [t("f32", *([2, 0, 3][: int(random.integers(0, 4))])) for _ in range(row.least_operands)]
            try:
                infer(name, types, attributes)
            except HeliographError:
                pass


F32, F16, BF16, Q8_0 = (t(name, 2, 32) for name in ("f32", "f16", "bf16", "q8_0"))


@pytest.mark.parametrize(
    ("op", "operands", "result", "tolerance"),
    [
        ("add", [F32, F32], F32, 1e-7),
        ("add", [F16, F16], F16, 5e-5),
        ("add", [BF16, BF16], BF16, 1e-4),
        ("neg", [BF16], BF16, 0),
        ("mul_mat", [Q8_0, F32], F32, 5e-4),
        ("mul_mat", [F16, BF16], F32, 5e-4),
        ("rope", [F16, t("i32", 2)], F16, 1e-3),
        ("cast", [F32], F16, 0),
        ("cast", [F32], Q8_0, 5e-6),
        ("cast", [Q8_0], F32, 1e-7),
        ("cont", [Q8_0], Q8_0, 0),
        ("get_rows", [F16, t("i32", 2)], F32, 0),
        ("get_rows", [Q8_0, t("i32", 2)], F32, 1e-7),
        ("set_rows", [Q8_0, F32, t("i32", 2)], Q8_0, 5e-6),
        ("set_rows", [F16, F32, t("i32", 2)], F16, 0),
    ],
)
def test_a_tolerance_depends_on_types(
    op: str, operands: list[TensorType], result: TensorType, tolerance: float
) -> None:
    assert OPS[op].tolerance_for(operands, result) == tolerance
