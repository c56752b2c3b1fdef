"""Stages: a model with a long loop is a chain of graphs, in which each long loop is one by itself.

The values between them stay on the server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import heliograph as hg
from heliograph.graph.arguments import checked_timeout
from heliograph.onnx.elements import Array, Bounded, Coded, Item, Maps

#: The stage that computes a value, and the name of its output there.
Place: TypeAlias = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Loop:
    """The arguments of `plan.loop`."""

    steps: int
    carry: dict[str, list[str]]
    until: str | None


@dataclass(slots=True)
class Stage:
    """A graph of the chain."""

    graph: hg.Graph = field(default_factory=hg.Graph)
    #: The sources of its inputs: outputs of earlier stages, or arrays of the host.
    takes: dict[str, Place | Array] = field(default_factory=dict)
    loop: Loop | None = None
    #: Its variables: stacked results of a loop's turns, which two stages share.
    stacks: dict[str, tuple[tuple[int, int], hg.DType]] = field(default_factory=dict)


class Stages:
    """The stages of one import. Nodes are added to the last one."""

    def __init__(self) -> None:
        self.all = [Stage()]
        #: Values by their identity, which are kept: where they come from, and what stands for them
        #: in the last stage.
        self._places: dict[int, tuple[hg.Value, Place]] = {}
        self._here: dict[int, hg.Value] = {}
        #: The number of the turn, while the body of a loop is built.
        self.turn: hg.Value | None = None
        self._names = 0

    @property
    def last(self) -> Stage:
        """The stage to which nodes are added."""
        return self.all[-1]

    def begin(self) -> None:
        """Begin another stage."""
        self.all.append(Stage())
        self._here.clear()

    def name(self) -> str:
        """Return a name that no other stage has."""
        self._names += 1
        return f"stage.{self._names}"

    def place(self, value: hg.Value) -> Place:
        """Make a value an output of its stage."""
        if id(value) not in self._places:
            value.graph.output(self.name(), value)
            # The scope of the node at hand is part of the name.
            name = list(value.graph.outputs)[-1]
            number = next(place for place, one in enumerate(self.all) if one.graph is value.graph)
            self._places[id(value)] = value, (number, name)
        return self._places[id(value)][1]

    def take(self, item: hg.Value | Array) -> hg.Value:
        """Return an input of the last stage, which begins as this value or constant."""
        name = self.name()
        self.last.takes[name] = self.place(item) if isinstance(item, hg.Value) else item
        return self.last.graph.input(name, item.shape, item.dtype)

    def stack(self, row: hg.Value, turn: hg.Value, most: int) -> str:
        """Write a row at the place of the turn into a variable of `most` rows; return its name."""
        name = self.name()
        whole = self.stacked(name, row, most)
        hg.assign(whole, hg.ops.set_rows(whole, hg.reshape(row, (1, row.size)), turn))
        return name

    def stacked(self, name: str, row: hg.Value, most: int) -> hg.Value:
        """Return the variable of this name in the last stage, for so many of these rows."""
        self.last.stacks[name] = (most, row.size), row.dtype
        return self.last.graph.variable(name, (most, row.size), row.dtype)

    def loop(
        self, steps: int, inputs: Sequence[str], ends: Sequence[hg.Value], goes: hg.Value | None
    ) -> None:
        """Make the last stage a loop, whose first inputs carry these values as long as it goes
        on."""
        carry: dict[str, list[str]] = {}
        for name, end in zip(inputs, ends, strict=True):
            carry.setdefault(self.place(end)[1], []).append(name)
        until = None if goes is None else self.place(hg.logical_not(goes))[1]
        self.last.loop = Loop(steps, carry, until)

    def here(self, item: Item) -> Item:
        """Return an item whose values are in the last stage."""
        if isinstance(item, hg.Value):
            if item.graph is self.last.graph:
                return item
            if id(item) not in self._here:
                self._here[id(item)] = self.take(item)
            return self._here[id(item)]
        if isinstance(item, list):
            return [self.here(one) for one in item]
        if isinstance(item, Coded):
            return replace(item, codes=self._value(item.codes))
        if isinstance(item, Maps):
            return Maps(self._value(item.value), item.labels)
        if isinstance(item, Bounded):
            return Bounded(self._value(item.value), item.axis, self._value(item.count))
        return item

    def _value(self, value: hg.Value) -> hg.Value:
        found = self.here(value)
        assert isinstance(found, hg.Value)
        return found


def run(
    stages: Sequence[Stage],
    plans: Sequence[hg.Plan | None],
    wires: Mapping[str, Array],
    timeout: float | None,
) -> dict[str, Any]:
    """Run the plans of all stages in their order, and return the results of the last.

    A stage without outputs has no plan.
    """
    checked_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    made: list[dict[str, Any]] = []
    for number, (stage, plan) in enumerate(zip(stages, plans, strict=True)):
        feeds: dict[str, Array | hg.Tensor] = {**wires} if number == 0 else {}
        for name, source in stage.takes.items():
            feeds[name] = made[source[0]][source[1]] if isinstance(source, tuple) else source
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if plan is None:
            made.append({})
        elif stage.loop is None:
            made.append(plan.run(feeds, fetch=stage is stages[-1], timeout=left))
        else:
            steps, carry, until = stage.loop.steps, stage.loop.carry, stage.loop.until
            running = plan.loop(feeds, steps=steps, carry=carry, until=until, fetch=False, timeout=left)
            made.append(running.result())
    return made[-1]
