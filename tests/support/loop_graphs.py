"""Loops for tests: the plan run step by step by its client, and seeded graphs of what loops do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import heliograph as hg

Array = np.ndarray[Any, Any]

SHAPE = (4, 8)
DATA_TYPES = ("f32", "f32", "f32", "i32")
#: A value so large that a few of them are all that may be unread.
LARGE = (2**18,)
#: The carry of `counting`.
CARRY = {"y": "x", "count": "n"}


def counting(last: int = 7) -> hg.Graph:
    """x is halved and raised, n counted, until it is the last one."""
    g = hg.Graph()
    x, n = g.input("x", SHAPE, "f32"), g.input("n", (), "i32")
    counted = n + 1
    with g.scope("layer"):
        y = hg.tanh(x * 0.5 + 1.0)
    g.output("y", y)
    g.output("count", counted)
    g.output("done", counted >= last)
    return g


def large(session: hg.Session) -> hg.Plan:
    """x + 1, of a MiB."""
    g = hg.Graph()
    g.output("y", g.input("x", LARGE, "f32") + 1.0)
    return session.compile(g)


@dataclass(frozen=True)
class LoopCase:
    """The first inputs of a loop, the inputs that each output feeds, and the number of steps."""

    inputs: Mapping[str, Array]
    carry: Mapping[str, Any]
    steps: int


def step_by_step(plan: hg.Plan, case: LoopCase) -> dict[str, Array]:
    """The outputs of the last of so many runs, each fed by the client with those of the one
    before."""
    inputs, found = dict(case.inputs), dict[str, Array]()
    for _ in range(case.steps):
        found = plan.run(inputs)
        for output, names in case.carry.items():
            for name in (names,) if isinstance(names, str) else names:
                inputs[name] = found[output]
    return found


def state_of(arrays: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Types and bits, to be compared."""
    return {name: (str(one.dtype), one.shape, one.tobytes()) for name, one in sorted(arrays.items())}


def random_case(seed: int, devices: list[str] | None) -> tuple[hg.Graph, LoopCase, dict[str, str]]:
    """A graph of inputs, variables, assignments and outputs that are leaves, views and results; how
    to loop it; and where its nodes run."""
    made = _Made(seed)
    pins = {}
    if devices:
        pins = {name: str(made.random.choice(devices)) for name in made.names if made.random.random() < 0.7}
    return made.graph, made.case(), pins


class _Made:
    """A seeded graph."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.graph = hg.Graph()
        self.names: list[str] = []
        self.inputs = {
            f"x{number}": self.graph.input(f"x{number}", SHAPE, dtype)
            for number, dtype in enumerate(DATA_TYPES)
        }
        self.variables = [self.graph.variable(f"v{number}", SHAPE, "f32") for number in range(2)]
        self.floats = [one for one in self.inputs.values() if one.dtype.name == "f32"] + self.variables
        self.integers = [self.inputs["x3"]]
        for number in range(int(self.random.integers(4, 16))):
            with self.graph.scope(f"n{number}"):
                assigns = self._add()
            # Assignments run where their variable lies.
            self.names += [] if assigns else [f"n{number}/*"]
        self.outputs = self._choose_outputs()

    def _pick(self, values: list[Any]) -> Any:
        return values[int(self.random.integers(len(values)))]

    def _add(self) -> bool:
        """Add a node, and return whether it assigns to a variable."""
        one, other = self._pick(self.floats), self._pick(self.floats)
        kind = int(self.random.integers(7))
        match kind:
            case 0:
                self.floats.append(hg.tanh(one + other))
            case 1:
                self.floats.append(one * 0.5)
            case 2:
                self.floats.append(hg.tanh(one * other - 0.25))
            case 3:
                self.floats.append(hg.reshape(one, (8, 4)).T * 1.0)
            case 4:
                self.floats.append(hg.assign(self._pick(self.variables), hg.tanh(one - other)))
            case 5:
                self.integers.append(self._pick(self.integers) + 3)
            case _:
                self.floats.append(hg.softmax(one + other, axis=-1))
        return kind == 4

    def _choose_outputs(self) -> dict[str, str]:
        """Names and data types."""
        chosen = [self._pick(self.floats) for _ in range(4)]
        # One twice, a leaf, and a variable as it is at the end.
        chosen += [chosen[0], self.inputs["x1"], self.variables[0], self._pick(self.integers)]
        for number, value in enumerate(chosen):
            self.graph.output(f"y{number}", value)
        return {f"y{number}": value.dtype.name for number, value in enumerate(chosen)}

    def case(self) -> LoopCase:
        given = {
            name: self.random.integers(-9, 9, SHAPE).astype(np.int32)
            if value.dtype.name == "i32"
            else self.random.standard_normal(SHAPE).astype(np.float32)
            for name, value in self.inputs.items()
        }
        carry: dict[str, list[str]] = {}
        for name, value in self.inputs.items():
            fitting = [one for one, dtype in self.outputs.items() if dtype == value.dtype.name]
            if self.random.random() < 0.8:
                carry.setdefault(self._pick(fitting), []).append(name)
        return LoopCase(given, carry, int(self.random.integers(1, 7)))
