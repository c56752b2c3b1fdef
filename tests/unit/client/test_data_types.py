"""Functions of data types under `hg.`: against NumPy's, and what bf16, f16 and blocks have of their own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import heliograph as hg
from heliograph_proto.types import DTYPES

NUMPY_FLOATS = ("f16", "f32", "f64")
INTEGERS = tuple(name for name, row in DTYPES.items() if row.is_integer)
KINDS = (
    "bool", "signed integer", "unsigned integer", "integral", "real floating", "complex floating", "numeric",
)  # fmt: skip


@pytest.mark.parametrize("name", [*NUMPY_FLOATS, "bf16"])
def test_the_limits_of_floats_are_numpys(name: str) -> None:
    found = hg.finfo(name)
    expected = ml_dtypes.finfo(ml_dtypes.bfloat16) if name == "bf16" else np.finfo(DTYPES[name].numpy)
    assert (found.bits, found.dtype) == (expected.bits, DTYPES[name])
    for what in ("eps", "max", "min", "smallest_normal"):
        assert getattr(found, what) == float(getattr(expected, what)), what


@pytest.mark.parametrize("name", INTEGERS)
def test_the_limits_of_integers_are_numpys(name: str) -> None:
    found, expected = hg.iinfo(name), np.iinfo(DTYPES[name].numpy)
    assert (found.bits, found.min, found.max) == (expected.bits, expected.min, expected.max)
    assert found.dtype is DTYPES[name]


def test_limits_are_those_of_a_value_too() -> None:
    x = hg.Graph().input("x", (2,), "bf16")
    assert hg.finfo(x).bits == 16 and hg.finfo(np.zeros(1)).bits == 64
    assert hg.iinfo(np.int8(1)).max == 127


@pytest.mark.parametrize("name", [*NUMPY_FLOATS, *INTEGERS, "bool"])
@pytest.mark.parametrize("kind", KINDS)
def test_data_types_are_of_numpys_kinds(name: str, kind: str) -> None:
    assert hg.isdtype(name, kind) == np.isdtype(DTYPES[name].numpy, kind)


def test_a_data_type_is_its_own_kind_or_one_of_several() -> None:
    assert hg.isdtype("bf16", "real floating") and hg.isdtype(np.float32, "f32")
    assert hg.isdtype("u8", ("bool", "unsigned integer")) and not hg.isdtype("u8", ("bool", "i8"))
    assert not any(hg.isdtype("q4_0", kind) for kind in KINDS)


@pytest.mark.parametrize("left", [*NUMPY_FLOATS, *INTEGERS, "bool"])
@pytest.mark.parametrize("right", [*NUMPY_FLOATS, *INTEGERS, "bool"])
def test_a_type_can_be_cast_where_promotion_leads(left: str, right: str) -> None:
    """As NumPy has it within a kind; between kinds nothing promotes."""
    kinds = {DTYPES[one].kind.removeprefix("u") for one in (left, right)}
    expected = len(kinds) == 1 and np.can_cast(DTYPES[left].numpy, DTYPES[right].numpy)
    assert hg.can_cast(left, right) == expected


def test_a_value_can_be_cast_as_its_type_can() -> None:
    x = hg.Graph().input("x", (2,), "f16")
    assert hg.can_cast(x, "f32") and not hg.can_cast(x, "bf16")


def test_the_type_of_a_result_is_that_of_the_operation() -> None:
    g = hg.Graph()
    x, y = g.input("x", (2,), "i8"), g.input("y", (2,), "u8")
    assert hg.result_type(x, y, 3) is (x + y + 3).dtype
    assert hg.result_type(x, "i32").name == "i32" and hg.result_type("f16", "bf16", 1.5).name == "f32"
    assert hg.result_type(np.zeros(1, np.float32), "f64") is DTYPES["f64"]
    for mixed in ((x, 1.5), (x, "f32"), ("bool", 1), ("u64", "i64"), ("q4_0", "f32")):
        with pytest.raises(hg.InvalidGraphError):
            hg.result_type(*mixed)


def test_astype_takes_what_the_standard_names() -> None:
    x = hg.Graph().input("x", (2,), "f32")
    assert hg.astype(x, "f32", copy=False) is x and hg.astype(x, np.float16).dtype.name == "f16"
