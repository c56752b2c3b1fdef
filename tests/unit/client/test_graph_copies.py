"""Graphs as pickles and copies, and lines that build graphs in a wrong form."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heliograph as hg

WAYS: list[Callable[[Any], Any]] = [copy.deepcopy, copy.copy, lambda graph: pickle.loads(pickle.dumps(graph))]


def built() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (2, 3), "f32")
    w = g.weight("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    g.output("y", x @ w + 0.5)
    return g


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "copy", "pickle"])
def test_a_graph_survives_pickling_and_copying(way: Callable[[Any], Any]) -> None:
    graph = built()
    other = way(graph)
    assert other._freeze() == graph._freeze()
    x = np.ones((2, 3), np.float32)
    with hg.connect("local:") as session:
        expected = session.compile(graph).run(x=x)["y"]
        assert np.array_equal(session.compile(other).run(x=x)["y"], expected)


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "copy", "pickle"])
def test_a_copied_graph_still_names_the_lines_that_built_it(way: Callable[[Any], Any]) -> None:
    graph = built()
    other = way(graph)
    assert "x @ w + 0.5" in other._source_of(0) and other._source_of(0) == graph._source_of(0)


@pytest.mark.parametrize("way", WAYS[::2], ids=["deepcopy", "pickle"])
def test_a_copied_graph_grows_by_itself(way: Callable[[Any], Any]) -> None:
    graph = built()
    other = way(graph)
    other.output("z", other.outputs["y"] + 0.5)
    assert list(other.outputs) == ["y", "z"] and list(graph.outputs) == ["y"]


def test_a_tensor_as_a_weight_is_refused_with_the_form_that_takes_one() -> None:
    with hg.connect("local:") as session:
        tensor = session.put(np.zeros((2, 2), np.float32))
        with pytest.raises(hg.InvalidGraphError, match="no array") as caught:
            hg.Graph().weight("w", tensor)  # type: ignore[arg-type]
        assert "g.bound_weight(name, shape, dtype)" in caught.value.advice


@pytest.mark.parametrize("shape", [(-1, 3), (None, 3)])
def test_an_open_size_is_answered_with_fixed_shapes(shape: Any) -> None:
    with pytest.raises(hg.InvalidGraphError) as caught:
        hg.Graph().input("x", shape, "f32")
    assert "shapes are fixed" in caught.value.advice


@pytest.mark.parametrize("given", [((-1, 3),), ((2, 3), "f32"), ("x", (2, 3)), ((2, 3), "f32", "x")])
@pytest.mark.parametrize("what", ["input", "variable", "bound_weight"])
def test_a_leaf_without_its_name_or_type_is_answered_with_the_form(what: str, given: Any) -> None:
    with pytest.raises(hg.InvalidGraphError) as caught:
        getattr(hg.Graph(), what)(*given)
    assert f"g.{what}('x', (8, 3), 'f32')" in caught.value.advice
    assert "test_graph_copies.py" in caught.value.origin.source


def test_a_quoted_line_is_cut(tmp_path: Any) -> None:
    path = tmp_path / "long.py"
    path.write_text(
        f"def build(x):\n    return x + missing({'1, ' * 4000})\n\n\ndef missing(*_):\n    return 'no'\n"
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(hg.InvalidArgumentError) as caught:
        names["build"](hg.Graph().input("x", (2,), "f32"))
    source = caught.value.origin.source
    assert "long.py:2 in build: return x + missing(" in source and source.endswith("...")
    assert len(source) < len(str(path)) + 250
