"""Rules of recurrent layers, whose steps are unrolled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.ops.activations import ACTIVATIONS
from heliograph.onnx.rules import rule

#: The most steps of one layer.
MOST_STEPS = 2048
_DEFAULTS = {
    "RNN": ("Tanh",),
    "GRU": ("Sigmoid", "Tanh"),
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_Function = Callable[[hg.Value], hg.Value]


#: Activations by their names in lower case.
_ACTIVATIONS = {name.lower(): one for name, one in ACTIVATIONS.items()}


def _activation(node: Node, name: str, alpha: float | None, beta: float | None) -> _Function:
    if name.lower() not in _ACTIVATIONS:
        raise node.refuse(f"there is no activation {name!r:.40}")
    function, first, second = _ACTIVATIONS[name.lower()]
    a, b = first if alpha is None else alpha, second if beta is None else beta
    return lambda x: function(x, a, b)


@dataclass(slots=True)
class Direction:
    """The weights and activations of one direction of a layer, and its state."""

    kind: str
    size: int
    weights: hg.Value
    recurrence: hg.Value
    bias: hg.Value | None
    recurrent_bias: hg.Value | None
    functions: list[_Function]
    clip: float | None
    reset_after: bool
    couples: bool
    peepholes: hg.Value | None
    hidden: hg.Value
    cell: hg.Value | None

    def gate(self, x: hg.Value, number: int, count: int = 1) -> hg.Value:
        """Return the part of a gate, or of several."""
        return x[..., number * self.size : (number + count) * self.size]

    def limited(self, x: hg.Value) -> hg.Value:
        """Return the input of an activation."""
        return x if self.clip is None else hg.clip(x, -self.clip, self.clip)

    def _recurred(self, hidden: hg.Value, first: int, count: int) -> hg.Value:
        found = hg.matmul(hidden, self.gate(self.recurrence, first, count))
        if self.recurrent_bias is None:
            return found
        return found + self.gate(self.recurrent_bias, first, count)

    def step(self, x: hg.Value) -> tuple[hg.Value, hg.Value | None]:
        """Return the next state, given the product of the input with the weights."""
        if self.kind == "RNN":
            return self.functions[0](self.limited(x + self._recurred(self.hidden, 0, 1))), None
        return (self._gru(x), None) if self.kind == "GRU" else self._lstm(x)

    def _gru(self, x: hg.Value) -> hg.Value:
        both = self._recurred(self.hidden, 0, 2)
        update = self.functions[0](self.limited(self.gate(x, 0) + self.gate(both, 0)))
        reset = self.functions[0](self.limited(self.gate(x, 1) + self.gate(both, 1)))
        if self.reset_after:
            inner = reset * self._recurred(self.hidden, 2, 1)
        else:
            inner = self._recurred(reset * self.hidden, 2, 1)
        new = self.functions[1](self.limited(self.gate(x, 2) + inner))
        return (1 - update) * new + update * self.hidden

    def _lstm(self, x: hg.Value) -> tuple[hg.Value, hg.Value]:
        assert self.cell is not None
        sums = x + self._recurred(self.hidden, 0, 4)
        put, out, forget, new = (self.gate(sums, number) for number in range(4))
        if self.peepholes is not None:
            put = put + self.gate(self.peepholes, 0) * self.cell
            forget = forget + self.gate(self.peepholes, 2) * self.cell
        put = self.functions[0](self.limited(put))
        kept = 1 - put if self.couples else self.functions[0](self.limited(forget))
        cell = kept * self.cell + put * self.functions[1](self.limited(new))
        if self.peepholes is not None:
            out = out + self.gate(self.peepholes, 1) * cell
        return self.functions[0](self.limited(out)) * self.functions[2](cell), cell

    def run(self, x: hg.Value, lengths: hg.Value | None, *, backwards: bool) -> hg.Value:
        """Run all steps over x [steps, batch, inputs], and return the hidden states."""
        products = hg.matmul(x, self.weights)
        if self.bias is not None:
            products = products + self.bias
        count = x.shape[0]
        states: list[hg.Value] = [self.hidden] * count
        for number in reversed(range(count)) if backwards else range(count):
            hidden, cell = self.step(products[number])
            states[number] = hidden
            if lengths is not None:
                here = hg.expand_dims(lengths > number, axis=1)
                states[number] = hg.where(here, hidden, 0.0)
                hidden = hg.where(here, hidden, self.hidden)
                if cell is not None and self.cell is not None:
                    cell = hg.where(here, cell, self.cell)
            self.hidden, self.cell = hidden, cell
        return hg.stack(states, axis=0)


def _direction(node: Node, x: hg.Value, number: int) -> Direction:
    kind = node.op
    recurrence = node.value(2)[number]
    size, gates = recurrence.shape[1], _GATES[kind]
    bias = node.value(3)[number] if node.has(3) else None
    names = node.strings("activations") or [*_DEFAULTS[kind]] * node.value(1).shape[0]
    count = len(_DEFAULTS[kind])
    chosen = names[number * count : (number + 1) * count]
    if len(chosen) < count:
        raise node.broken(f"it names {len(names)} activations")
    alphas, betas = node.floats("activation_alpha") or [], node.floats("activation_beta") or []
    functions = [
        _activation(node, name, _at(alphas, number * count + place), _at(betas, number * count + place))
        for place, name in enumerate(chosen)
    ]
    zeros = hg.zeros((x.shape[1], size), x.dtype, graph=node.graph)

    def state(place: int) -> hg.Value:
        if not node.has(place):
            return zeros
        found = node.value(place)
        return found[:, number] if node.int("layout", 0) else found[number]

    is_lstm = kind == "LSTM"
    return Direction(
        kind=kind,
        size=size,
        weights=node.value(1)[number].mT,
        recurrence=recurrence.mT,
        bias=None if bias is None else bias[: gates * size],
        recurrent_bias=None if bias is None else bias[gates * size :],
        functions=functions,
        clip=node.float("clip", 0.0) or None,
        reset_after=bool(node.int("linear_before_reset", 0)),
        couples=bool(node.int("input_forget", 0)),
        peepholes=node.value(7)[number] if is_lstm and node.has(7) else None,
        hidden=state(5),
        cell=state(6) if is_lstm else None,
    )


def _at(numbers: list[float], place: int) -> float | None:
    return numbers[place] if place < len(numbers) else None


@rule("RNN", "GRU", "LSTM")
def _recurrent(node: Node) -> tuple[Item, ...]:
    x = node.value(0)
    batch_first = bool(node.int("layout", 0))
    if batch_first:
        x = hg.permute_dims(x, (1, 0, 2))
    if not 0 < x.shape[0] <= MOST_STEPS:
        raise node.refuse(f"{x.shape[0]} steps; from 1 to {MOST_STEPS} are unrolled")
    lengths = cast(node.value(4), "i64") if node.has(4) else None
    ways = {"forward": 1, "reverse": 1, "bidirectional": 2}
    way = node.string("direction", "forward")
    if ways.get(way) != node.shape(1)[0]:
        raise node.broken(f"direction {way!r:.40} with weights of {node.shape(1)[0]} directions")
    outputs, hidden, cells = [], [], []
    for number in range(ways[way]):
        one = _direction(node, x, number)
        outputs.append(one.run(x, lengths, backwards=way == "reverse" or number == 1))
        hidden.append(one.hidden)
        cells.append(one.cell)
    all_states, last = hg.stack(outputs, axis=1), hg.stack(hidden, axis=0)
    found = [all_states, last]
    if node.op == "LSTM":
        found.append(hg.stack([one for one in cells if one is not None], axis=0))
    if batch_first:
        found = [hg.permute_dims(found[0], (2, 0, 1, 3)), *(hg.permute_dims(v, (1, 0, 2)) for v in found[1:])]
    return tuple(found)
