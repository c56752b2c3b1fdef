"""Data types and tensor types: names, sizes, strides, and what no tensor can be."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from heliograph_proto.types import (
    DTYPES,
    F32,
    I64,
    TensorType,
    contiguous_strides,
    dtype,
    dtype_from_number,
    shape_problem,
    tensor_type,
)

PLAIN = [row for row in DTYPES.values() if row.numpy_name]
QUANTIZED = [row for row in DTYPES.values() if row.kind == "quantized"]


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_a_plain_type_is_named_by_its_name_numpys_name_and_numpys_type(row: Any) -> None:
    scalar = np.dtype(row.numpy_name).type
    assert dtype(row.name) is dtype(row.numpy_name) is dtype(scalar) is dtype(np.dtype(scalar)) is row
    assert row.numpy.itemsize == row.itemsize


@pytest.mark.parametrize("row", DTYPES.values(), ids=str)
def test_every_type_has_a_number_of_the_contract(row: Any) -> None:
    assert dtype_from_number(row.number) is row


def test_a_number_that_is_no_type_gives_none() -> None:
    assert dtype_from_number(0) is None
    assert dtype_from_number(10_000) is None


@pytest.mark.parametrize("row", DTYPES.values(), ids=str)
def test_there_is_one_object_of_each_type_also_after_a_copy(row: Any) -> None:
    assert pickle.loads(pickle.dumps(row)) is row
    assert copy.deepcopy(TensorType(row, ())).dtype is row


def test_short_codes_count_bits_here() -> None:
    assert dtype("i8").itemsize == 1
    assert dtype("f16").itemsize == 2


@pytest.mark.parametrize("name", ["<i8", ">f4", "=f8", "|b1"])
def test_codes_with_a_byte_order_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(TypeError, match="count bytes in NumPy and bits here"):
        dtype(name)


@pytest.mark.parametrize("argument", ["f33", "", "float", "complex64", None])
def test_what_names_no_type_is_refused(argument: Any) -> None:
    with pytest.raises(TypeError):
        dtype(argument)


@pytest.mark.parametrize("argument", [np.complex64, np.dtype(">f4"), np.dtype("U3"), object])
def test_numpys_other_types_are_refused_with_those_known(argument: Any) -> None:
    with pytest.raises(TypeError, match="known: f64"):
        dtype(argument)


def test_python_types_are_numpys() -> None:
    assert (dtype(float).name, dtype(int).name, dtype(bool).name) == ("f64", "i64", "bool")


@pytest.mark.parametrize("row", QUANTIZED, ids=str)
def test_blocks_have_no_numpy_type(row: Any) -> None:
    with pytest.raises(TypeError, match="blocks of bytes"):
        _ = row.numpy
    assert row.itemsize == 0


def test_sizes_and_strides_of_blocks_count_blocks() -> None:
    found = TensorType(DTYPES["q8_0"], (3, 64))
    assert (found.size, found.nbytes, found.strides) == (192, 3 * 2 * 34, (68, 34))


@pytest.mark.parametrize(
    ("name", "shape", "blocks", "storage", "stored"),
    [
        ("f32", (3, 64), (3, 64), "float32", (3, 64)),
        ("bf16", (3, 64), (3, 64), "uint16", (3, 64)),
        ("bf16", (), (), "uint16", ()),
        ("q8_0", (3, 64), (3, 2), "uint8", (3, 68)),
        ("q4_k", (0, 512), (0, 2), "uint8", (0, 288)),
        ("q4_0", (0,), (0,), "uint8", (0,)),
        ("bool", (5,), (5,), "bool", (5,)),
    ],
)
def test_every_tensor_can_be_held_by_an_array_of_its_storage(
    name: str, shape: tuple[int, ...], blocks: tuple[int, ...], storage: str, stored: tuple[int, ...]
) -> None:
    """bf16 as its bits, and rows of blocks as rows of bytes, without a package for either."""
    found = TensorType(DTYPES[name], shape)
    assert (found.block_shape, found.dtype.storage, found.storage_shape) == (blocks, storage, stored)
    array = np.zeros(found.storage_shape, found.dtype.storage)
    assert array.nbytes == found.nbytes
    assert not array.size or array.strides[:-1] == found.strides[:-1]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4), (1,) * 8])
def test_sizes_and_strides_are_numpys(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    found = tensor_type("f32", shape)
    assert (found.size, found.nbytes, found.ndim) == (array.size, array.nbytes, array.ndim)
    if array.size:
        assert found.strides == contiguous_strides(shape, F32) == array.strides


def test_a_tensor_type_reads_as_type_and_shape() -> None:
    assert str(tensor_type("int64", (2, 3))) == "i64[2, 3]"
    assert str(TensorType(I64)) == "i64[]"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("f32", (1,) * 9, "at most 8"),
        ("f32", (3, -1), "cannot be negative"),
        ("u8", (2**63,), "passes 2\\*\\*63"),
        ("f64", (2**60,), "passes 2\\*\\*63"),
        ("u8", (2**32, 2**32), "passes 2\\*\\*63"),
        ("u8", (0, 2**62, 2**62), "passes 2\\*\\*63"),
        ("q4_k", (128,), "whole blocks of 256"),
        ("q4_0", (), "whole blocks of 32"),
    ],
)
def test_what_no_tensor_can_be_is_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_type(name, shape)


def test_the_largest_tensor_is_one_byte_less_than_2_to_the_63() -> None:
    assert not shape_problem(TensorType(DTYPES["u8"], (2**63 - 1,)))


def test_equal_types_are_equal_and_hash_alike() -> None:
    assert tensor_type("f32", (2,)) == tensor_type(np.float32, (2,))
    assert hash(tensor_type("f32", (2,))) == hash(tensor_type(np.float32, (2,)))
    assert tensor_type("f32", (2,)) != tensor_type("i32", (2,))
