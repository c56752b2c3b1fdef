"""Cases, each with a stable id."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.execution import loaded
from heliograph_backends.conformance.harness.fills import fill
from heliograph_backends.conformance.harness.layouts import operand, possible, prepared
from heliograph_backends.conformance.harness.outcome import MismatchError
from heliograph_backends.conformance.harness.recipe import Recipe
from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import DTYPES, TensorType


@dataclass(frozen=True)
class Case(ABC):
    """A test on a device that passes, is not supported, or fails."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The id: printable, unique, and the same in every run."""

    @property
    @abstractmethod
    def group(self) -> str:
        """The op or the part of the contract that it tests."""

    @property
    def quick(self) -> bool:
        """True if it belongs to the quick subset."""
        return True

    @abstractmethod
    def run(self, bench: Bench, seed: int) -> float:
        """Run the case and return the largest error of its comparisons.

        Raises NotSupportedError, MismatchError, or an unexpected error of the backend.
        """

    def random(self, seed: int) -> np.random.Generator:
        """Return a generator that depends only on the seed and the id."""
        digest = hashlib.sha256(self.id.encode()).digest()
        return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


@dataclass(frozen=True, slots=True)
class CaseOperand:
    """An operand of one op: its type, fill and layout, and the kind of leaf that feeds it."""

    type: TensorType
    fill: str = "normal"
    layout: str = "plain"
    kind: LeafKind = LeafKind.INPUT

    def __str__(self) -> str:
        parts = [str(self.type)]
        parts += [self.fill] if self.fill != "normal" else []
        parts += [self.layout] if self.layout != "plain" else []
        parts += [self.kind.value] if self.kind is not LeafKind.INPUT else []
        return " ".join(parts)


def _counted(operands: tuple[CaseOperand, ...]) -> Iterator[str]:
    """Describe each operand; more than three equal ones in a row become one text with their
    number."""
    for one, run in groupby(operands):
        count = len(list(run))
        yield from [f"{count} * {one}"] if count > 3 else [str(one)] * count


def t(name: str, *shape: int, fill: str = "normal", kind: LeafKind = LeafKind.INPUT) -> CaseOperand:
    """Return an operand; the short name keeps the lists of cases readable."""
    return CaseOperand(TensorType(DTYPES[name], shape), fill, kind=kind)


@dataclass(frozen=True)
class OpCase(Case):
    """One op on seeded operands, compared with its definition."""

    op: str
    operands: tuple[CaseOperand, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()
    #: The layout of the result in memory.
    into: str = "plain"
    #: True if it is in the quick subset; no part of the case's identity.
    is_quick: bool = field(default=False, compare=False)

    @property
    def id(self) -> str:
        words = [*_counted(self.operands), *(f"{name}={value}" for name, value in self.attributes)]
        return f"{self.op}({', '.join(words)})" + (f" into {self.into}" if self.into != "plain" else "")

    @property
    def group(self) -> str:
        return self.op

    @property
    def quick(self) -> bool:
        return self.is_quick

    def recipe(self, seed: int) -> Recipe:
        """Return its graph and data."""
        random, made = self.random(seed), Recipe()
        values = []
        for one in self.operands:
            content = prepared(one.layout, fill(one.fill, random, one.type))
            values.append(operand(made, one.kind, content, one.layout))
        result = made.node(self.op, *values, **dict(self.attributes))
        made.output(result)
        made.output_layouts[0] = self.into
        kept = [value for value, one in zip(values, self.operands, strict=True) if one.layout == "kept"]
        # A later node reads the kept operands, and the run returns them as well.
        made.output(*(made.node("cont", value) for value in kept), *kept)
        return made

    def run(self, bench: Bench, seed: int) -> float:
        with loaded(bench, self.recipe(seed)) as it:
            it.run()
            return it.check()


@dataclass(frozen=True)
class OutsideCase(OpCase):
    """An op with an index out of range: the run ends with OutOfRangeError, whose origin is the
    node."""

    @property
    def quick(self) -> bool:
        return True

    def run(self, bench: Bench, seed: int) -> float:
        with loaded(bench, self.recipe(seed)) as it:
            try:
                it.run()
            except OutOfRangeError as error:
                if (error.origin.op, error.origin.node) != (self.op, 0):
                    found = str(error.origin) or "missing"
                    raise MismatchError(
                        f"the error's origin is {found}; node 0, {self.op}, is due"
                    ) from error
                return 0.0
            raise MismatchError("the run succeeded with an index out of range; OutOfRangeError is due")


@dataclass(frozen=True)
class GraphCase(Case):
    """A small graph, compared with the definition."""

    name: str
    build: Callable[[np.random.Generator], Recipe] = field(compare=False)
    #: Runs and checks the recipe; returns the largest error of its comparisons.
    check: Callable[[Bench, Recipe], float] = field(compare=False)

    @property
    def id(self) -> str:
        return f"graph({self.name})"

    @property
    def group(self) -> str:
        return "graph"

    def run(self, bench: Bench, seed: int) -> float:
        return self.check(bench, self.build(self.random(seed)))


@dataclass(frozen=True)
class ContractCase(Case):
    """A check of a part of the contract other than computing."""

    part: str
    name: str
    check: Callable[[Bench, np.random.Generator], None] = field(compare=False)

    @property
    def id(self) -> str:
        return f"{self.part}({self.name})"

    @property
    def group(self) -> str:
        return self.part

    def run(self, bench: Bench, seed: int) -> float:
        self.check(bench, self.random(seed))
        return 0.0


def with_layouts(case: OpCase, layouts: tuple[str, ...], places: tuple[int, ...] = ()) -> Iterator[OpCase]:
    """Yield the case with one operand at a time in each of the layouts; `places`: only these
    operands."""
    for place, one in enumerate(case.operands):
        if one.kind is LeafKind.VARIABLE or (places and place not in places):
            continue
        for layout in layouts:
            if possible(layout, one.type):
                changed = replace(one, layout=layout)
                operands = (*case.operands[:place], changed, *case.operands[place + 1 :])
                yield replace(case, operands=operands)
