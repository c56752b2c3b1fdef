"""bf16 and quantized types through a session: as weights, inputs, outputs and variables."""

from __future__ import annotations

import numpy as np
import pytest

import heliograph as hg
from heliograph_proto.quantization import blocks
from heliograph_proto.quantization.blocks import dequantize, quantize

SEED = 20250314
ml_dtypes = pytest.importorskip("ml_dtypes")


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_a_quantized_weight_multiplies_as_what_it_stands_for(
    session: hg.Session, random: np.random.Generator, name: str
) -> None:
    w = random.standard_normal((7, 64)).astype(np.float32)
    x = random.standard_normal((3, 64)).astype(np.float32)
    rows = quantize(w, name)
    g = hg.Graph()
    weight = g.weight("w", rows, dtype=name)
    assert (weight.shape, weight.dtype.name) == ((7, 64), name)
    g.output("y", hg.ops.mul_mat(weight, g.input("x", (3, 64), "f32")))
    found = session.compile(g).run(x=x)["y"]
    np.testing.assert_allclose(found, x @ dequantize(rows, name).T, rtol=1e-4, atol=1e-5)


def test_blocks_are_inputs_and_outputs_as_bytes(session: hg.Session, random: np.random.Generator) -> None:
    x = random.standard_normal((4, 64)).astype(np.float32)
    g = hg.Graph()
    g.output("rows", hg.ops.cast(g.input("x", (4, 64), "f32"), dtype="q8_0"))
    g.output("x", hg.ops.cast(g.input("rows", (4, 64), "q8_0"), dtype="f32"))
    found = session.compile(g).run(x=x, rows=quantize(x, "q8_0"))
    np.testing.assert_array_equal(found["rows"], quantize(x, "q8_0"))
    np.testing.assert_array_equal(found["x"], dequantize(found["rows"], "q8_0"))


def test_a_cache_can_be_a_quantized_variable(session: hg.Session, random: np.random.Generator) -> None:
    """Rows are quantized when they are set; the rest of the cache keeps its bytes."""
    g = hg.Graph()
    cache = g.variable("cache", (6, 32), "q8_0")
    hg.assign(cache, hg.ops.set_rows(cache, g.input("x", (1, 32), "f32"), g.input("at", (1,), "i32")))
    g.output("all", hg.ops.get_rows(cache, g.constant(np.arange(6, dtype=np.int32))))
    plan = session.compile(g)
    x = random.standard_normal((6, 1, 32)).astype(np.float32)
    for place in (4, 0, 5):
        plan.run(x=x[place], at=np.array([place], np.int32))
    found = plan.run(x=x[1], at=np.array([1], np.int32))["all"]
    expected = dequantize(quantize(x[:, 0], "q8_0"), "q8_0")
    for place in (4, 0, 5):
        np.testing.assert_array_equal(found[place], expected[place])
    assert not found[[2, 3]].any()


def test_bf16_is_ml_dtypes_or_bits(session: hg.Session, random: np.random.Generator) -> None:
    w = random.standard_normal((5, 8)).astype(ml_dtypes.bfloat16)
    g = hg.Graph()
    as_it_is, as_bits = g.weight("a", w), g.weight("b", w.view(np.uint16), dtype="bf16")
    g.output("sum", as_it_is + as_bits + g.input("x", (5, 8), "bf16"))
    found = session.compile(g).run(x=w)["sum"]
    assert found.dtype == ml_dtypes.bfloat16
    twice = blocks.from_bits(blocks.to_bits(2 * w.astype(np.float32)))
    expected = blocks.to_bits(twice + w.astype(np.float32))
    np.testing.assert_array_equal(found.view(np.uint16), expected)


def test_functions_take_blocks_where_ops_do(session: hg.Session, random: np.random.Generator) -> None:
    x = random.standard_normal((4, 64)).astype(np.float32)
    rows = quantize(x, "q8_0")
    g = hg.Graph()
    w, at = g.weight("w", rows, dtype="q8_0"), g.constant(np.array([2, 0]))
    g.output("taken", hg.take(w, at, axis=0))
    g.output("cut", hg.astype(w[1:3, 32:], "f32"))
    g.output("joined", hg.concat([w, hg.astype(g.constant(x), "q8_0")], axis=0))
    found = session.compile(g).run()
    meant = dequantize(rows, "q8_0")
    np.testing.assert_array_equal(found["taken"], meant[[2, 0]])
    np.testing.assert_array_equal(found["cut"], meant[1:3, 32:])
    np.testing.assert_array_equal(found["joined"], np.concatenate([rows, rows]))
    with pytest.raises(hg.InvalidGraphError, match="takes float"):
        hg.exp(w)
    with pytest.raises(hg.InvalidGraphError, match="elements are blocks"):
        hg.assign(g.variable("v", (4, 64), "q8_0"), 0)


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.zeros((2, 34), np.int8), "q8_0", "int8 as q8_0"),
        (np.zeros((2, 33), np.uint8), "q8_0", "no whole blocks of 34"),
        (np.zeros((), np.uint8), "q8_0", "no whole blocks"),
        (np.zeros(4, np.float16), "bf16", "float16 as bf16"),
        (np.zeros(4, np.float64), "f32", "float64 as f32"),
        (np.zeros(4), "q9_9", "unknown dtype"),
    ],
)
def test_an_array_that_does_not_hold_that_type_is_no_weight(
    array: np.ndarray, dtype: str, message: str
) -> None:
    with pytest.raises(hg.InvalidGraphError, match=message):
        hg.Graph().weight("w", array, dtype=dtype)
