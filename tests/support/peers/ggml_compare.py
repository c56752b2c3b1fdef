"""The cases of an op, run by ggml and compared with our definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from op_cases_all import CASES, cases_of

from heliograph_backends.conformance.cases import op_cases
from heliograph_backends.conformance.harness.case import OpCase
from heliograph_backends.conformance.harness.content import Array, Content, decode, encode
from heliograph_backends.conformance.harness.expected import ExpectedValue, compare, evaluate
from heliograph_backends.conformance.harness.outcome import MismatchError
from heliograph_backends.conformance.harness.recipe import Recipe
from heliograph_proto.types import TensorType, dtype
from peers.ggml import Graph, Tensor, reversed_shape
from peers.ggml_call import GRIDS, Call, NotTaken
from peers.ggml_ops import node_of

SEED = 20260821
#: (the operands, our result) -> which elements are not compared.
Exempt: TypeAlias = Callable[[Sequence[Content], ExpectedValue], Array]


@dataclass(frozen=True)
class Difference:
    """Where ggml's CPU does another thing than our definition, and why both are right."""

    reason: str
    #: The error that is allowed, if that is more than the op table's.
    tolerance: float = 0.0
    exempt: Exempt | None = None


def our_nans(operands: Sequence[Content], expected: ExpectedValue) -> Array:
    return np.isnan(expected.numbers)


def halves(operands: Sequence[Content], expected: ExpectedValue) -> Array:
    with np.errstate(invalid="ignore"):
        return np.asarray(operands[0].values % 1 == 0.5)


_TABLE = "looks f16 values of gelu up in a table; beyond 10 it is 0 or x, where our formula has NaN at -inf"
_COMPARED = "compares in a way that loses NaN; in ours, as in the array API's clip and maximum, NaN stays"
DIFFERENCES: Mapping[str, Difference] = {
    "gelu": Difference(_TABLE, 1e-6, our_nans),
    "geglu": Difference(_TABLE, 1e-6, our_nans),
    "gelu_quick": Difference("looks f16 values up in a table", 1e-6),
    "geglu_quick": Difference("looks f16 values up in a table", 1e-6),
    **dict.fromkeys(
        ("relu", "reglu", "sgn", "clamp", "leaky_relu", "hardsigmoid"),
        Difference(_COMPARED, exempt=our_nans),
    ),
    "l2_norm": Difference("takes eps for the length of a row with NaN", exempt=our_nans),
    "round": Difference("rounds halves away from zero, ours, as the array API's, to even", exempt=halves),
}


#: Ops that make blocks of floats.
ENCODING_OPS = frozenset({"add", "add1", "cast", "cpy", "set_rows"})


@dataclass
class Comparison:
    """What became of an op's cases."""

    op: str
    compared: int = 0
    worst: float = 0.0
    #: Why ggml has no such case, and how many there are.
    not_taken: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


def compare_op(op: str, seed: int = SEED) -> Comparison:
    """Every case of the op whose operands lie plainly: how they lie is no matter of what the op
    is."""
    found = Comparison(op)
    for what, recipe in (*conformance_recipes(op, seed), *table_recipes(op, seed)):
        try:
            found.worst = max(found.worst, compare_recipe(recipe))
            found.compared += 1
        except NotTaken as reason:
            found.not_taken[str(reason)] += 1
        except MismatchError as mismatch:
            found.differences.append(f"{what}: {mismatch}")
    return found


def conformance_recipes(op: str, seed: int) -> Iterator[tuple[str, Recipe]]:
    """Those of the conformance suite, with their ids."""
    for case in op_cases(op):
        plain = case.into == "plain" and all(one.layout == "plain" for one in case.operands)
        # Cases that end with an error are of another type.
        if plain and type(case) is OpCase:
            yield case.id, case.recipe(seed)


def table_recipes(op: str, seed: int) -> Iterator[tuple[str, Recipe]]:
    """Those of the op table's tests, whose results are written down element by element there."""
    random = np.random.default_rng(seed)
    for number, case in enumerate(cases_of(op, random) if op in CASES else ()):
        recipe = Recipe()
        operands = [recipe.input(_content(np.asarray(one))) for one in case.operands]
        recipe.output(recipe.node(op, *operands, **case.attributes))
        yield f"case {number} of the op table's tests, {case.attributes}", recipe


def _content(values: Array) -> Content:
    return encode(TensorType(dtype(values.dtype), values.shape), values)


def compare_recipe(recipe: Recipe) -> float:
    """The error of ggml's result of a recipe's only node. Raises NotTaken, or MismatchError."""
    contents, op = [leaf.content for leaf in recipe.leaves], recipe.nodes[0][0]
    graph = recipe.graph()
    encoded = graph.type_of(graph.outputs[0].value).dtype.name if op in ENCODING_OPS else ""
    if encoded in GRIDS.split():
        raise NotTaken(f"ggml searches the points of {encoded} in another way, or has no quantizer for it")
    if op == "mul_mat" and contents[0].type.dtype.kind == "quantized" and contents[0].type.shape[-2] == 1:
        raise NotTaken("single elements of a product say little, since ggml rounds the activations")
    found = by_ggml(recipe, contents)
    (expected,), _ = evaluate(graph, contents)
    if op in INDEX_OPS:
        return INDEX_OPS[op](contents[0].values, found.values, expected.numbers)
    if op in DIFFERENCES:
        found, expected = _allowing(DIFFERENCES[op], contents, found, expected)
    return compare(op, found, expected).error


def _allowing(
    known: Difference, operands: Sequence[Content], found: Content, expected: ExpectedValue
) -> tuple[Content, ExpectedValue]:
    if known.exempt is not None:
        exempt = known.exempt(operands, expected)
        found = replace(found, values=np.where(exempt, expected.numbers, found.values))
    return found, replace(expected, tolerance=max(expected.tolerance, known.tolerance))


def by_ggml(recipe: Recipe, contents: Sequence[Content]) -> Content:
    """ggml's result. Raises NotTaken, or MismatchError if it is of another data type or size."""
    ((op, operands, attributes, result),) = recipe.nodes
    with Graph(64) as graph:
        call = Call(graph, [contents[value] for value in operands], attributes, result)
        node = node_of(call, op)
        if not graph.supports(node):
            raise NotTaken("ggml's CPU backend says that it does not support it")
        (values,) = graph.run([node])
        _require_type(result, node)
        return decode(result, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _require_type(result: TensorType, node: Tensor) -> None:
    if node.type != result.dtype.name:
        raise MismatchError(f"ggml's result is {node.type}, ours {result.dtype}")
    if node.shape != tuple(reversed(reversed_shape(result.shape))):
        raise MismatchError(f"ggml's result has the shape {node.shape}, ours {result.shape}")


# Of equal elements ggml's sorts and maxima may name any, so what the indices point at is compared.


def _of_rows(x: Array, found: Array, expected: Array) -> float:
    """argsort: each row's places, each once, whose elements are in order."""
    if not np.array_equal(np.sort(found, -1), np.sort(expected, -1)):
        raise MismatchError("a row's places are not each there once")
    return _of_elements(np.take_along_axis(x, found, -1), np.take_along_axis(x, expected, -1))


def _of_sets(x: Array, found: Array, expected: Array) -> float:
    """top_k: so many different places of each row, whose elements are the largest, in any order."""
    if any(len(set(row)) < len(row) for row in found.reshape(-1, found.shape[-1]).tolist()):
        raise MismatchError("a place is there twice")
    elements = (np.sort(np.take_along_axis(x, places, -1), -1) for places in (found, expected))
    return _of_elements(*elements)


def _of_maxima(x: Array, found: Array, expected: Array) -> float:
    """argmax: a place of the largest element."""
    elements = (np.take_along_axis(x, places[..., None], -1) for places in (found, expected))
    return _of_elements(*elements)


def _of_elements(found: Array, expected: Array) -> float:
    if not np.array_equal(found, expected):
        raise MismatchError(f"{np.count_nonzero(found != expected)} places are of other elements")
    return 0.0


INDEX_OPS: Mapping[str, Callable[[Array, Array, Array], float]] = {
    "argsort": _of_rows,
    "top_k": _of_sets,
    "argmax": _of_maxima,
}
