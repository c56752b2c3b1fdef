"""Errors at build time: the op, its operands, and the line of this file that wrote it."""

from __future__ import annotations

import inspect
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
    "an axis twice": lambda g, f, i, b: hg.sum(f, axis=(0, 0)),
    "a reshape to another size": lambda g, f, i, b: f.reshape(5, 5),
    "an unknown data type": lambda g, f, i, b: g.input("z", (1,), "float33"),
    "a negative shape": lambda g, f, i, b: g.input("z", (-1,), "f32"),
    "a transpose of three dimensions": lambda g, f, i, b: f[None].T,
    "no value at all": lambda g, f, i, b: hg.add(1, 2),
    "an operand that is none": lambda g, f, i, b: f + "text",
    "logical_and of numbers": lambda g, f, i, b: f & f,
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


def test_mixing_kinds_advises_astype() -> None:
    _, f, i, _ = values()
    with pytest.raises(hg.InvalidGraphError, match="astype"):
        f + i


def test_a_failed_op_leaves_no_node_behind() -> None:
    g, f, _, _ = values()
    with pytest.raises(hg.InvalidGraphError):
        f @ f
    assert len(g.freeze().nodes) == 0


@pytest.mark.parametrize("url", ["ftp://x", "grpc://", "unix://relative", "grpc://h:99999", 7])
def test_a_bad_url_is_refused_with_advice(url: str) -> None:
    with pytest.raises(hg.InvalidArgumentError) as caught:
        hg.connect(url)
    assert caught.value.advice


def test_every_error_is_exported_and_carries_its_reason() -> None:
    from heliograph_proto.errors import concrete_classes

    for kind in concrete_classes():
        assert getattr(hg, kind.__name__) is kind
