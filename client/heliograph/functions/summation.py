"""Einstein's sums: `hg.einsum`, lowered to products, permutations and sums."""

from __future__ import annotations

import math
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value

__all__ = ["einsum"]

#: A letter, or for a dimension of an ellipsis its number from the end as text.
_Label = str
_ADVICE = "letters for dimensions, as in NumPy: hg.einsum('bij,bjk->bik', x, y); ... stands for any"


@dataclass(frozen=True, slots=True)
class _Term:
    """A value, and a label for each dimension, all different."""

    value: Value
    labels: tuple[_Label, ...]

    def summed(self, kept: Collection[_Label]) -> _Term:
        """Sum over the dimensions whose labels are not kept."""
        axes = [place for place, label in enumerate(self.labels) if label not in kept]
        if not axes:
            return self
        found = lowering.reduce("reduce_sum", self.value, axes, keepdims=False)
        return _Term(found, tuple(label for label in self.labels if label in kept))

    def as_matrices(self, *groups: Sequence[_Label]) -> Value:
        """The dimensions in groups, each of which is one dimension."""
        order = [self.labels.index(label) for group in groups for label in group]
        shape = [math.prod(self.size(label) for label in group) for group in groups]
        return lowering.reshape(lowering.permute(self.value, order) if order else self.value, shape)

    def size(self, label: _Label) -> int:
        """The size of a dimension."""
        return self.value.shape[self.labels.index(label)]


def einsum(subscripts: str, /, *operands: Operand) -> Value:
    """The sum of products that subscripts name: "ij,jk->ik" is a matrix product.

    Each operand has a letter for each dimension, and "..." for any further ones in front of which
    those of other operands broadcast. Letters that are not in the result are summed over; without
    "->" the result has the letters that occur once, in alphabetical order. A letter that one
    operand has twice takes its diagonal.
    """
    if not isinstance(subscripts, str):
        raise invalid(f"einsum: {subscripts!r:.80} are no subscripts", _ADVICE)
    values = lowering.promoted(*operands) if operands else []
    inputs, output = _parsed(subscripts, values)
    sizes = _sizes(subscripts, inputs, values)
    wanted = _output(subscripts, inputs, output)
    terms = [_diagonal(value, labels, sizes) for value, labels in zip(values, inputs, strict=True)]
    while len(terms) > 1:
        first, second = _cheapest(terms)
        others = [one for place, one in enumerate(terms) if place not in (first, second)]
        kept = {label for one in others for label in one.labels} | set(wanted)
        terms = [*others, _product(terms[first], terms[second], kept)]
    (last,) = terms
    return _arranged(last.summed(wanted), wanted, sizes)


def _parsed(subscripts: str, values: Sequence[Value]) -> tuple[list[list[_Label]], list[_Label] | None]:
    """The labels of each operand, and of the result if they are given."""
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(values) or not values:
        raise invalid(f"einsum {subscripts!r:.80} names {len(parts)} operands, not {len(values)}", _ADVICE)
    inputs = [_labels(subscripts, part, value) for part, value in zip(parts, values, strict=True)]
    widest = max((sum(label.isdigit() for label in one) for one in inputs), default=0)
    return inputs, _letters(subscripts, right, widest) if arrow else None


def _labels(subscripts: str, part: str, value: Value) -> list[_Label]:
    letters = len(part.replace("...", ""))
    hidden = value.ndim - letters if "..." in part else 0
    found = _letters(subscripts, part, max(0, hidden))
    if len(found) != value.ndim:
        raise invalid(
            f"einsum {subscripts!r:.80}: {part!r} for {value.type}, {value.ndim} dimensions", _ADVICE
        )
    return found


def _letters(subscripts: str, part: str, hidden: int) -> list[_Label]:
    """One label for each dimension, of which an ellipsis hides some."""
    before, dots, after = part.partition("...")
    if unknown := set(before + after) - set(string.ascii_letters):
        raise invalid(f"einsum {subscripts!r:.80}: {min(unknown)!r} is no letter", _ADVICE)
    return [*before, *(map(str, range(hidden, 0, -1)) if dots else ()), *after]


def _sizes(
    subscripts: str, inputs: Sequence[Sequence[_Label]], values: Sequence[Value]
) -> Mapping[_Label, int]:
    """The size of each label; a dimension of 1 stretches."""
    sizes: dict[_Label, int] = {}
    for labels, value in zip(inputs, values, strict=True):
        for label, size in zip(labels, value.shape, strict=True):
            known = sizes.get(label, 1)
            if size != known and 1 not in (size, known):
                named = "..." if label.isdigit() else repr(label)
                raise invalid(f"einsum {subscripts!r:.80}: {named} is {known} and {size}")
            sizes[label] = known if size == 1 else size
    return sizes


def _output(subscripts: str, inputs: Sequence[Sequence[_Label]], given: list[_Label] | None) -> list[_Label]:
    every = [label for labels in inputs for label in labels]
    hidden = sorted({label for label in every if label.isdigit()}, key=int, reverse=True)
    if given is None:
        once = sorted(label for label in set(every) if every.count(label) == 1 and not label.isdigit())
        return [*hidden, *once]
    if missing := [label for label in given if label not in every]:
        raise invalid(f"einsum {subscripts!r:.80}: no operand has {missing[0]!r}", _ADVICE)
    if hidden and not set(hidden) <= set(given):
        message = f"einsum {subscripts!r:.80}: the result has no '...' for {len(hidden)} dimensions"
        raise invalid(message, "name them with letters to sum over them")
    if len(set(given)) < len(given):
        raise invalid(f"einsum {subscripts!r:.80}: the result has a letter twice", _ADVICE)
    return given


def _diagonal(value: Value, labels: Sequence[_Label], sizes: Mapping[_Label, int]) -> _Term:
    """A term whose labels are all different, without dimensions of 1 that stretch."""
    kept = [place for place, label in enumerate(labels) if value.shape[place] == sizes[label]]
    value = lowering.reshape(value, [value.shape[place] for place in kept])
    found = [labels[place] for place in kept]
    for label in sorted(set(found)):
        while found.count(label) > 1:
            first = found.index(label)
            second = found.index(label, first + 1)
            others = [place for place in range(len(found)) if place not in (first, second)]
            size, rest = value.shape[first], [value.shape[place] for place in others]
            flat = lowering.reshape(lowering.permute(value, [*others, first, second]), (*rest, size * size))
            value = flat[..., :: size + 1] if size else flat
            found = [*(found[place] for place in others), label]
    return _Term(value, tuple(found))


def _cheapest(terms: Sequence[_Term]) -> tuple[int, int]:
    """The two terms whose product takes the fewest multiplications."""

    def cost(pair: tuple[int, int]) -> int:
        first, second = (terms[place] for place in pair)
        sizes = {label: one.size(label) for one in (first, second) for label in one.labels}
        return math.prod(sizes.values())

    return min(combinations(range(len(terms)), 2), key=cost)


def _product(left: _Term, right: _Term, kept: Collection[_Label]) -> _Term:
    """The product of two terms, summed over what neither the result nor other terms have."""
    left = left.summed(set(right.labels) | set(kept))
    right = right.summed(set(left.labels) | set(kept))
    both = [label for label in left.labels if label in right.labels]
    batch = [label for label in both if label in kept]
    inner = [label for label in both if label not in kept]
    rows = [label for label in left.labels if label not in both]
    columns = [label for label in right.labels if label not in both]
    shape = [left.size(label) for label in (*batch, *rows)] + [right.size(label) for label in columns]
    if inner:
        found = lowering.apply(
            "matmul", left.as_matrices(batch, rows, inner), right.as_matrices(batch, inner, columns)
        )
    else:
        found = lowering.apply(
            "mul", left.as_matrices(batch, rows, ()), right.as_matrices(batch, (), columns)
        )
    return _Term(lowering.reshape(found, shape), (*batch, *rows, *columns))


def _arranged(term: _Term, wanted: Sequence[_Label], sizes: Mapping[_Label, int]) -> Value:
    """The dimensions in the order of the result."""
    order = [term.labels.index(label) for label in wanted]
    found = lowering.permute(term.value, order) if order else term.value
    return lowering.reshape(found, [sizes[label] for label in wanted])
