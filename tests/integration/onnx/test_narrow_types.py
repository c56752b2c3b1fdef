"""Element types without a data type on a device: floats of 8 and 4 bits, integers of 4 and 2 bits."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import constant, model, node, tensor

import heliograph as hg

FLOATS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT4E2M1")
INTEGERS = {"INT4": (-8, 7), "UINT4": (0, 15), "INT2": (-2, 1), "UINT2": (0, 3)}
RNG = np.random.default_rng(17)


def cast(here: hg.Session, x: np.ndarray, source: int, target: int, **attributes: object) -> np.ndarray:
    """A model that converts from one element type to another."""
    made = model(
        [node("Cast", "x", "y", to=target, **attributes)],
        [tensor("x", x.shape, source)],
        [tensor("y", x.shape, target)],
        opset=25,
    )
    found: np.ndarray = hg.onnx.load(made.SerializeToString()).compile(here).run(x=x)["y"]
    return found


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_as_by_ml_dtypes(name: str, here: hg.Session) -> None:
    """Over their range, at halves between neighbours, and back."""
    element = getattr(TensorProto, name)
    target = helper.tensor_dtype_to_np_dtype(element)
    codes = np.arange(16 if name == "FLOAT4E2M1" else 256, dtype=np.uint8).view(target)
    values = codes.astype(np.float32)
    finite = np.unique(values[np.isfinite(values)])
    x = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, RNG.uniform(finite[0], finite[-1], 500)])
    x = x.astype(np.float32)
    found = cast(here, x, TensorProto.FLOAT, element)
    assert found.dtype == target
    np.testing.assert_array_equal(found.astype(np.float32), x.astype(target).astype(np.float32))
    np.testing.assert_array_equal(cast(here, codes, element, TensorProto.FLOAT), values)


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_powers_of_two_are_rounded_by_their_mode(mode: str, here: hg.Session) -> None:
    x = np.concatenate([2.0 ** RNG.uniform(-127, 127, 300), 2.0 ** np.arange(-126, 127), [0.0, np.nan]])
    x = x.astype(np.float32)
    found = cast(here, x, TensorProto.FLOAT, TensorProto.FLOAT8E8M0, round_mode=mode)
    wanted = numpy_helper.to_float8e8m0(x, round_mode=mode)
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))
    values = cast(here, found, TensorProto.FLOAT8E8M0, TensorProto.FLOAT)
    np.testing.assert_array_equal(values, found.astype(np.float32))


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_quantized_to_their_range_and_back(name: str, here: hg.Session) -> None:
    least, most = INTEGERS[name]
    element = getattr(TensorProto, name)
    zero = np.array(1).astype(helper.tensor_dtype_to_np_dtype(element))
    made = model(
        [node("QuantizeLinear", "x scale zero", "q"), node("DequantizeLinear", "q scale zero", "y")],
        [tensor("x", [200])],
        [tensor("q", [200], element), tensor("y", [200])],
        [constant("scale", np.float32(0.5)), constant("zero", zero)],
        opset=25,
    )
    x = RNG.normal(scale=3, size=200).astype(np.float32)
    found = hg.onnx.load(made.SerializeToString()).compile(here).run(x=x)
    codes = np.clip(np.rint(x / 0.5) + 1, least, most)
    assert np.array_equal(found["q"].astype(int), codes)
    np.testing.assert_array_equal(found["y"], (codes - 1) * 0.5)


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "int32"), ("int64", "float64"), ("float16", "uint16")]
)
def test_bits_are_kept(source: str, target: str, here: hg.Session) -> None:
    x = RNG.integers(0, 2**15, 50).astype(np.uint16).astype(source)
    elements = [helper.np_dtype_to_tensor_dtype(np.dtype(one)) for one in (source, target)]
    made = model(
        [node("BitCast", "x", "y", to=elements[1])],
        [tensor("x", [50], elements[0])],
        [tensor("y", [50], elements[1])],
        opset=26,
    )
    found = hg.onnx.load(made.SerializeToString()).compile(here).run(x=x)["y"]
    assert np.array_equal(found.view(source), x) and found.dtype == target
