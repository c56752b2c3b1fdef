"""Errors at build time: the op, its operands, and the line of this file that wrote it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest

import heliograph as hg


def values() -> tuple[hg.Graph, hg.Value, hg.Value, hg.Value]:
    g = hg.Graph()
    return g, g.input("f", (4, 3), "f32"), g.input("i", (4, 3), "i32"), g.input("b", (4, 3), "bool")


CASES: dict[str, Callable[[hg.Graph, hg.Value, hg.Value, hg.Value], object]] = {
    "shapes that do not broadcast": lambda g, f, i, b: f + g.input("y", (5,), "f32"),
    "inner dimensions of matmul": lambda g, f, i, b: f @ f,
    "float with int": lambda g, f, i, b: f + i,
    "int with a Python float": lambda g, f, i, b: i * 0.5,
    "a Python int that does not fit": lambda g, f, i, b: hg.astype(i, "i8") + 300,
    "bool with a number": lambda g, f, i, b: b + 1,
    "division of ints": lambda g, f, i, b: i / 2,
    "a mean of ints": lambda g, f, i, b: i.mean(),
    "sqrt of ints": lambda g, f, i, b: hg.sqrt(i),
    "an axis that does not exist": lambda g, f, i, b: hg.softmax(f, axis=2),
    "an axis that is a word": lambda g, f, i, b: hg.sum(f, axis="rows"),  # type: ignore[arg-type]
    "a shape that is a word": lambda g, f, i, b: hg.reshape(f, "flat"),  # type: ignore[arg-type]
    "one value where a list of them is joined": lambda g, f, i, b: hg.concat(f),  # type: ignore[arg-type]
    "attention of vectors": lambda g, f, i, b: hg.scaled_dot_product_attention(f[0], f[0], f[0]),
    "attention with two masks": lambda g, f, i, b: hg.scaled_dot_product_attention(
        f, f, f, f, is_causal=True
    ),
    "an axis twice": lambda g, f, i, b: hg.sum(f, axis=(0, 0)),
    "a reshape to another size": lambda g, f, i, b: f.reshape(5, 5),
    "an unknown data type": lambda g, f, i, b: g.input("z", (1,), "float33"),
    "a negative shape": lambda g, f, i, b: g.input("z", (-1,), "f32"),
    "a transpose of three dimensions": lambda g, f, i, b: f[None].T,
    "no value at all": lambda g, f, i, b: hg.add(1, 2),
    "an operand that is none": lambda g, f, i, b: f + "text",
    "the bits of floats": lambda g, f, i, b: f & f,
    "the bits of floats the other way round": lambda g, f, i, b: ~f,
    "the bits of a number and of a boolean": lambda g, f, i, b: i | b,
    "a shift of booleans": lambda g, f, i, b: b << 1,
    "a shift by a float": lambda g, f, i, b: i >> 1.0,
    "the sign of ints": lambda g, f, i, b: hg.signbit(i),
    "a repetition by a value": lambda g, f, i, b: hg.repeat(f, i[0], axis=1),  # type: ignore[arg-type]
    "a repetition by too many numbers": lambda g, f, i, b: hg.repeat(f, [1, 2], axis=1),
    "a negative repetition": lambda g, f, i, b: hg.repeat(f, -1, axis=1),
    "a grid of matrices": lambda g, f, i, b: hg.meshgrid(f, f),
    "a grid of an unknown kind": lambda g, f, i, b: hg.meshgrid(f[0], indexing="yx"),  # type: ignore[arg-type]
    "an unknown side": lambda g, f, i, b: hg.searchsorted(f[0], f, side="top"),  # type: ignore[arg-type]
    "a search in a matrix": lambda g, f, i, b: hg.searchsorted(f, f),
    "places in other dimensions": lambda g, f, i, b: hg.take_along_axis(f, i[0], axis=-1),
    "rows that do not broadcast": lambda g, f, i, b: hg.take_along_axis(f, i[:3]),
    "sums without an axis": lambda g, f, i, b: hg.cumulative_prod(f),
    "a list without a graph": lambda g, f, i, b: hg.asarray([1, 2]),
    "an array that is not copied": lambda g, f, i, b: hg.asarray(np.ones(2), copy=False, graph=g),
    "a list by dlpack": lambda g, f, i, b: hg.from_dlpack([1], graph=g),
    "fewer than no numbers": lambda g, f, i, b: hg.linspace(0, 1, -1, graph=g),
    "the limits of ints as floats": lambda g, f, i, b: hg.finfo(i),
    "the limits of floats as ints": lambda g, f, i, b: hg.iinfo("f16"),
    "an unknown kind of data types": lambda g, f, i, b: hg.isdtype("f32", "real"),
    "the type of scalars alone": lambda g, f, i, b: hg.result_type(1, 2.0),
    "a sum in an unknown type": lambda g, f, i, b: hg.sum(f, dtype="float33"),
    "float indices": lambda g, f, i, b: hg.take(f, f[0], axis=0),
    "concat of other shapes": lambda g, f, i, b: hg.concat([f, f[:, :2]], axis=0),
    "max of nothing": lambda g, f, i, b: hg.max(f[:0]),
    "an attribute that is none": lambda g, f, i, b: hg.ops.soft_max(f, scaling=2.0),
    "an operand too many": lambda g, f, i, b: hg.ops.relu(f, f),
    "signed with u64": lambda g, f, i, b: i + g.input("u", (), "u64"),
    "an array of another kind": lambda g, f, i, b: f * np.arange(3),
    "gelu of an unknown kind": lambda g, f, i, b: hg.gelu(f, approximate="erf"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_an_error_of_the_line_that_wrote_it(name: str) -> None:
    """At once, typed, with the file and the line, and with nothing of ours in between."""
    case = CASES[name]
    with pytest.raises(hg.InvalidArgumentError) as caught:
        case(*values())
    _, line = inspect.getsourcelines(case)
    assert f"{__file__}:{line} in " in caught.value.origin.source
    assert "<lambda>" in caught.value.origin.source
    assert caught.value.message


def test_an_error_of_an_op_names_it_and_its_operands() -> None:
    g, f, _, _ = values()
    with g.scope("layer3"), pytest.raises(hg.InvalidGraphError) as caught:
        hg.ops.matmul(f, f, name="scores")
    origin = caught.value.origin
    assert (origin.op, origin.node_name) == ("matmul", "layer3/scores")
    assert [str(one) for one in origin.operands] == ["f32[4, 3]", "f32[4, 3]"]
    assert "built at" in str(caught.value) and "advice" in str(caught.value)


BLOCKS = hg.quantize(np.ones((2, 32), np.float32), "q4_0")


@pytest.mark.parametrize(
    ("build", "advice"),
    [
        (lambda g, x, w: g.weight("p", BLOCKS + np.float32(0), "q4_0"), r"hg.quantize\(array, 'q4_0'\)"),
        (lambda g, x, w: g.weight("p", np.ones(3, np.float32), "f16"), r"array.astype\('float16'\)"),
        (lambda g, x, w: g.weight("p", (3, 4), "f32"), "g.bound_weight"),
        (lambda g, x, w: hg.ops.mul_mat(g.weight("p", BLOCKS), x), "dtype='q4_0'"),
        (lambda g, x, w: hg.ops.mul_mat(x, w), "its first operand"),
        (lambda g, x, w: x @ w.mT, "hg.ops.mul_mat"),
    ],
)
def test_mistakes_with_stored_weights_are_answered_with_the_way_that_works(
    build: Callable[..., hg.Value], advice: str
) -> None:
    g = hg.Graph()
    x, w = g.input("x", (1, 32), "f32"), g.weight("w", BLOCKS, "q4_0")
    with pytest.raises(hg.InvalidGraphError) as caught:
        build(g, x, w)
    assert re.search(advice, caught.value.advice)


def test_rows_that_are_no_whole_blocks_are_answered_with_a_type_whose_blocks_are_smaller() -> None:
    with pytest.raises(hg.InvalidArgumentError) as caught:
        hg.quantize(np.ones((2, 64), np.float32), "q4_k")
    assert "q4_0" in caught.value.advice


def test_mixing_kinds_advises_astype() -> None:
    _, f, i, _ = values()
    with pytest.raises(hg.InvalidGraphError, match="astype"):
        f + i


def test_a_failed_op_leaves_no_node_behind() -> None:
    g, f, _, _ = values()
    with pytest.raises(hg.InvalidGraphError):
        f @ f
    assert len(g._freeze().nodes) == 0


@pytest.mark.parametrize("url", ["ftp://x", "grpc://", "unix://relative", "grpc://h:99999", 7])
def test_a_bad_url_is_refused_with_advice(url: str) -> None:
    with pytest.raises(hg.InvalidArgumentError) as caught:
        hg.connect(url)
    assert caught.value.advice


def test_every_error_is_exported_and_carries_its_reason() -> None:
    from heliograph_proto.errors import concrete_classes

    for kind in concrete_classes():
        assert getattr(hg, kind.__name__) is kind
