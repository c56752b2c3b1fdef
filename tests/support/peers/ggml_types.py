"""For which data types ggml's CPU computes an op, found by trying.

It says that it supports more than it does: it ends the process where it meets what it does not take, or
reads elements as others. So every trial is a process of its own, and only what resembles our definition,
computed in float64 on the same numbers, counts as computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from heliograph_backends.conformance.cases import op_cases
from heliograph_backends.conformance.harness.case import OpCase
from heliograph_backends.conformance.harness.content import Array, Content, decode, encode
from heliograph_backends.reference import define
from heliograph_proto.errors import HeliographError
from heliograph_proto.ops.table import infer
from heliograph_proto.types import DTYPES, F64, DType, TensorType
from peers.ggml import Graph, Tensor
from peers.ggml_call import BLOCKS, EVERY, Call, NotTaken
from peers.ggml_child import in_child
from peers.ggml_ops import COUNTERPARTS, made, node_of

SEED = 20260824
#: So much of the mean square of a result ggml's may be off: of blocks, some of which are of two bits, and of
#: everything else; and so much of the largest element any other may be.
COARSE, CLOSE, APART = 0.1, 2e-4, 0.02
#: Blocks that stand for all others until ggml takes one of them.
SOME_BLOCKS = ("q4_0", "q8_0", "q4_k")
SOME = tuple(name for name in EVERY.split() if name in SOME_BLOCKS or name not in BLOCKS.split())
#: More than any op but those of any number has.
MOST_OPERANDS = 7
#: Operands of which ggml reads nothing but the shape, or compares the bits, whatever their type is; types
#: that make no sense there do not count.
UNREAD = {"im2col": (0,), "im2col_3d": (0,), "pool_2d_back": (1,), "count_equal": (0, 1)}


@dataclass
class Types:
    """Of an op, the types of operands and the result."""

    op: str
    tried: int = 0
    #: What ggml computes, what of this we refuse, and what both compute and our comparison leaves out.
    computed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def types_of(op: str) -> Types:
    """Tries the data types of an op's operands: each alone, and those of two together."""
    found = Types(op)
    for form in forms(op):
        seen: set[tuple[str, ...]] = set()
        todo = [*combinations(form)]
        while todo:
            names = todo.pop()
            if names in seen or not _fits(form, names):
                continue
            seen.add(names)
            found.tried += 1
            if _note(_Trial(form, names), found):
                todo += others_like(names)
    return found


def _note(trial: _Trial, found: Types) -> bool:
    """Notes what both make of these types; whether ggml computes them."""
    if not trial.is_computed():
        return False
    takes = COUNTERPARTS[found.op].takes
    for place in UNREAD.get(found.op, ()):
        if trial.types[place].dtype.name not in takes[min(place, len(takes) - 1)].split():
            return False
    found.computed.append(str(trial))
    if trial.why_not:
        found.refused.append(f"{trial}: {trial.why_not}")
    elif not trial.is_compared():
        found.left_out.append(str(trial))
    return True


# What is tried


def forms(op: str) -> Iterator[OpCase]:
    """The first plain case of each kind: its operands, blocks among them, and attributes that choose."""
    kinds = set()
    for case in op_cases(op):
        types = [one.type for one in case.operands]
        plain = all(one.layout == "plain" and not one.fill.startswith("special") for one in case.operands)
        if type(case) is not OpCase or not plain or len(types) > MOST_OPERANDS:
            continue
        if any(one.size == 0 or one.ndim > 4 for one in types):
            continue
        chosen = [value for _, value in case.attributes if isinstance(value, (bool, DType))]
        names = {one.name for one in (*(one.dtype for one in types), *chosen) if isinstance(one, DType)}
        if not names <= set(EVERY.split()):
            continue
        stored = tuple((one.dtype.kind == "quantized", one.dtype.is_integer) for one in types)
        kind = (stored, *chosen)
        if kind not in kinds and _Trial(case, [one.dtype.name for one in types]).is_made():
            kinds.add(kind)
            yield case


def combinations(case: OpCase) -> Iterator[tuple[str, ...]]:
    """The case's own types with one or two of them changed; of more than two operands two to the same."""
    own = tuple(one.type.dtype.name for one in case.operands)
    yield own
    for places in (*itertools.combinations(range(len(own)), 2), *((place,) for place in range(len(own)))):
        for names in itertools.product(SOME, repeat=len(places)):
            if len(own) <= 2 or len(set(names)) == 1:
                changed = dict(zip(places, names, strict=True))
                yield tuple(changed.get(place, name) for place, name in enumerate(own))
    for name in SOME if own else ():
        yield tuple(name if one == own[0] else one for one in own)


def others_like(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The same with other blocks, in one place, or in all that have the same ones."""
    for old, new in itertools.product(set(names) & set(SOME_BLOCKS), BLOCKS.split()):
        yield tuple(new if one == old else one for one in names)
        for place in (place for place, one in enumerate(names) if one == old):
            yield (*names[:place], new, *names[place + 1 :])


def _fits(case: OpCase, names: Sequence[str]) -> bool:
    """Whether rows are whole blocks."""
    sizes = [(*one.type.shape, 1)[one.type.ndim - 1] for one in case.operands]
    return all(size % DTYPES[name].block_size == 0 for size, name in zip(sizes, names, strict=True))


def _content(random: np.random.Generator, type: TensorType, fill: str) -> Content:
    """Seeded numbers: indices where the case has such, else small ones that no type loses."""
    word, _, count = fill.partition(" ")
    if word == "below":
        return encode(type, random.integers(0, int(count), type.shape))
    if word == "distinct":
        rows = [random.permutation(int(count))[: type.shape[-1]] for _ in range(type.size)]
        return encode(type, np.resize(rows, type.shape))
    if type.dtype.is_integer:
        return encode(type, random.integers(1, 4, type.shape))
    least, most = {"positive": (0.1, 1), "fraction": (0.1, 1), "below_zero": (-1, -0.1)}.get(word, (-1, 1))
    return encode(type, random.uniform(least, most, type.shape))


class _AsItIs(Call):
    """A call whose operands go to ggml in their own types."""

    def leaf(self, place: int = 0, as_type: str = "", shape: Sequence[int] | None = None) -> Tensor:
        return super().leaf(place, "", shape)


class _Trial:
    """A case with other data types."""

    def __init__(self, form: OpCase, names: Sequence[str]) -> None:
        self.form = form
        pairs = zip(form.operands, names, strict=True)
        self.types = [TensorType(DTYPES[name], one.type.shape) for one, name in pairs]
        own = [one.type for one in form.operands]
        self.result, self.attributes = infer(form.op, own, dict(form.attributes))
        #: Why we refuse it.
        self.why_not = ""
        try:
            self.result, self.attributes = infer(form.op, self.types, dict(form.attributes))
        except HeliographError as refusal:
            self.why_not = str(refusal).splitlines()[0]
            if form.op == "cpy":
                self.result = self.types[1]
        random = np.random.default_rng(SEED)
        fills = zip(self.types, form.operands, strict=True)
        self.contents = [_content(random, type, one.fill) for type, one in fills]

    def __str__(self) -> str:
        given = ", ".join(one.dtype.name for one in self.types)
        return f"{self.form.op} of {given} for {self.result.dtype}"

    def is_made(self) -> bool:
        """Whether ggml has nodes of these shapes and attributes."""

        def make() -> bool:
            with Graph(64) as graph:
                made(COUNTERPARTS[self.form.op], self._call(graph))
            return True

        return in_child(make) is not None

    def is_compared(self) -> bool:
        """Whether the comparison of our cases takes these types."""
        with Graph(64) as graph:
            try:
                node_of(self._call(graph), self.form.op)
            except NotTaken:
                return False
        return True

    def is_computed(self) -> bool:
        """Whether ggml computes about what the definition does."""
        found = in_child(self._by_ggml)
        if found is None or found[0] not in DTYPES or self._expected is None:
            return False
        type = TensorType(DTYPES[found[0]], self.result.shape)
        if len(found[1]) != type.nbytes:
            return False
        values = decode(type, np.frombuffer(found[1], np.uint8)).values.astype(np.float64)
        expected = self._expected
        finite = np.isfinite(expected)
        if not np.array_equal(np.isfinite(values), finite):
            return False
        values, expected = np.where(finite, values, 0), np.where(finite, expected, 0)
        if type.dtype.is_integer:
            expected = np.trunc(expected)
        if self.form.op == "top_k":
            # In whatever order.
            values, expected = np.sort(values), np.sort(expected)
        coarse = type.dtype.kind == "quantized"
        error, size = np.abs(values - expected), np.abs(expected)
        near = coarse or not size.size or error.max() <= APART * size.max()
        allowed = COARSE if coarse else CLOSE
        return bool(near and np.square(error).sum() <= allowed * np.square(size).sum())

    def _call(self, graph: Graph) -> _AsItIs:
        return _AsItIs(graph, self.contents, self.attributes, self.result)

    def _by_ggml(self) -> tuple[str, bytes]:
        """The result's type and bytes. Raises NotTaken, or ends the process."""
        with Graph(64) as graph:
            node = made(COUNTERPARTS[self.form.op], self._call(graph))
            if not graph.supports(node):
                raise NotTaken("ggml says so itself")
            (values,) = graph.run([node])
            return node.type, np.ascontiguousarray(values).tobytes()

    @cached_property
    def _expected(self) -> Array | None:
        """The definition in float64 on the same numbers; None where it does not take them."""
        indices = [one.fill.startswith(("below ", "distinct ")) for one in self.form.operands]
        pairs = zip(self.contents, indices, strict=True)
        wide = [one.values if index else one.values.astype(np.float64) for one, index in pairs]
        given = {
            name: F64 if isinstance(value, DType) and not value.is_integer else value
            for name, value in self.attributes.items()
        }
        out = np.zeros(self.result.shape, np.float64)
        try:
            with np.errstate(all="ignore"):
                define(self.form.op, given)(*wide, out)
        except (HeliographError, ArithmeticError, ValueError, TypeError, IndexError):
            return None
        return out
