"""Attributes of other libraries that a value lacks: the error names what there is."""

from __future__ import annotations

import copy
import re

import pytest

import heliograph as hg
from heliograph.graph.names import _METHODS

GRAPH = hg.Graph()
X = GRAPH.input("x", (2, 3), "f32")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("item", "no elements while the graph is built"),
        ("numpy", "no elements while the graph is built"),
        ("dot", "use hg.matmul"),
        ("transpose", "use hg.permute_dims, or .T and .mT"),
        ("flatten", "use hg.flatten"),
        ("std", "use hg.std"),
        ("argmax", "use hg.argmax"),
        ("cumsum", "use hg.cumulative_sum"),
        ("view", "use x.reshape"),
        ("unsqueeze", "use hg.expand_dims"),
        ("to", r"use x.astype\(dtype\)"),
        ("relu_", "values never change: use the result of hg.relu"),
        ("masked_fill_", "use hg.where"),
        ("cuda", "a plan has devices"),
        ("nonzero", "its result would depend on values"),
        ("reshpe", "did you mean .reshape"),
    ],
)
def test_an_attribute_that_a_value_lacks_says_what_there_is(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"a value has no attribute '{name}'.*{advice}"):
        getattr(X, name)


def test_all_names_that_are_advised_exist() -> None:
    for advice in _METHODS.values():
        for name in re.findall(r"hg\.(\w+)", advice):
            assert hasattr(hg, name), advice
        for name in re.findall(r"\bx\.(\w+)", advice):
            assert hasattr(X, name), advice


def test_values_answer_protocols_as_before() -> None:
    assert not hasattr(X, "__torch_function__") and not hasattr(X, "_anything")
    assert copy.copy(X).name == "x"
