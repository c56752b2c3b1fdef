"""The instructions of elementwise ops on f32. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels import Operation
from heliograph_backends.cpu.kernels.program.words import MAXIMUM_VALUES, TYPED
from heliograph_backends.cpu.lowering.typed import Recipe
from heliograph_proto.graph import Node

_NAMES = {Operation.COPY: "cont", Operation.SQUARE: "sqr", Operation.SCALE_BIAS: "scale"}
#: Elementwise ops that are a single instruction, most of the same name.
INSTRUCTIONS: Mapping[str, Operation] = {
    _NAMES.get(one, one.name.lower()): one for one in Operation if one not in TYPED
}
#: The attributes of ops that become immediates of instructions, in order.
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "scale": ("scale", "bias"), "clamp": ("min", "max"), "leaky_relu": ("slope",),
    "swiglu_clamp": ("limit",), "swiglu_oai": ("limit", "alpha"),
}  # fmt: skip
#: Gated linear units: the instruction of the activation.
GATED: Mapping[str, Operation] = {
    "reglu": Operation.RELU, "geglu": Operation.GELU, "geglu_erf": Operation.GELU_ERF,
    "geglu_quick": Operation.GELU_QUICK, "swiglu": Operation.SILU, "swiglu_clamp": Operation.SILU,
    "swiglu_oai": Operation.SILU,
}  # fmt: skip
ELEMENTWISE = frozenset(INSTRUCTIONS) | frozenset(GATED)

#: A source: an operand's number, -1 - an earlier node's number, or a constant's digits.
Ref: TypeAlias = int | str


class ElementwiseForm(NamedTuple):
    """A node in plain values; equal forms become equal instructions."""

    op: str
    sources: tuple[Ref, ...]
    numbers: tuple[str, ...] = ()
    #: The instructions of a typed node; else none.
    recipe: Recipe = ()


def form_of(node: Node, sources: tuple[Ref, ...]) -> ElementwiseForm:
    """Return the form of an elementwise node."""
    names = NUMBERS.get(node.op)
    return ElementwiseForm(
        node.op, sources, tuple([digits(node.attributes[name]) for name in names]) if names else ()
    )


def instructions_of(forms: Sequence[ElementwiseForm]) -> tuple[k.Instruction, ...]:
    """Return the instructions of nodes in order; the last one writes operand 0."""
    chain = _Chain()
    for form in forms:
        chain.add(form)
    return chain.finish()


#: An instruction: the operation, its sources, of which one below 0 is -1 - the number of an earlier
#: part, and its immediates.
_Part: TypeAlias = tuple[Operation, tuple[Ref, ...], tuple[str, ...]]

# Equal operands and registers are one object; a chain has only a few.
_INPUTS = tuple(map(k.Input, range(MAXIMUM_VALUES)))
_REGISTERS = tuple(map(k.Register, range(MAXIMUM_VALUES)))


class _Chain:
    """Instructions under construction."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.results: list[Ref] = []

    def add(self, form: ElementwiseForm) -> None:
        """Append the instructions of a node."""
        results = self.results
        sources = tuple([results[-1 - ref] if type(ref) is int and ref < 0 else ref for ref in form.sources])
        if form.recipe:
            made: list[Ref] = []
            for operation, places in form.recipe:
                found = [
                    each if isinstance(each, str) else sources[each] if each >= 0 else made[each]
                    for each in places
                ]
                made.append(self._put(operation, tuple(found)))
            results.append(made[-1])
        elif form.op in GATED:
            x, gate = sources
            results.append(self._gated(form.op, x, gate, *form.numbers))
        else:
            results.append(self._put(INSTRUCTIONS[form.op], sources, *form.numbers))

    def _put(self, operation: Operation, sources: tuple[Ref, ...], *immediates: str) -> Ref:
        self.parts.append((operation, sources, immediates))
        return -len(self.parts)

    def _gated(self, op: str, x: Ref, gate: Ref, limit: str = "", alpha: str = "") -> Ref:
        """Append the instructions of activation(x) * gate."""
        if limit:
            x = self._put(Operation.MINIMUM, (x, limit))
            gate = self._put(Operation.CLAMP, (gate,), digits(-float.fromhex(limit)), limit)
        if not alpha:
            return self._put(Operation.MUL, (self._put(GATED[op], (x,)), gate))
        slope = self._put(Operation.SCALE_BIAS, (x,), alpha, digits(0))
        activated = self._put(Operation.MUL, (x, self._put(Operation.SIGMOID, (slope,))))
        above = self._put(Operation.SCALE_BIAS, (gate,), digits(1), digits(1))
        return self._put(Operation.MUL, (activated, above))

    def finish(self) -> tuple[k.Instruction, ...]:
        """Return the instructions. A register is reused after the last read of its value, to need
        few."""
        last_read = {ref: number for number, part in enumerate(self.parts) for ref in part[1]}
        homes: dict[Ref, k.Input | k.Register] = {}
        free: list[k.Register] = []
        made = []
        used, last = 0, len(self.parts) - 1
        for number, (operation, sources, immediates) in enumerate(self.parts):
            values = tuple([homes[ref] if ref in homes else _value(ref) for ref in sources])
            for ref in set(sources) if len(sources) > 1 else sources:
                if last_read[ref] == number and isinstance(home := homes.get(ref), k.Register):
                    free.append(home)
            if number < last and not free:
                free.append(_REGISTERS[used])
                used += 1
            result = free.pop() if number < last else _INPUTS[0]
            homes[-1 - number] = result
            numbers = tuple(map(float.fromhex, immediates)) if immediates else ()
            made.append(k.Instruction(operation, result, values, numbers))
        return tuple(made)


def digits(number: Any) -> str:
    """Return a text of a number in which 0.0 and -0.0 differ and NaN equals itself."""
    return float(number).hex()


def _value(ref: Ref) -> k.Input | float:
    """Return an operand or a constant."""
    return float.fromhex(ref) if isinstance(ref, str) else _INPUTS[ref]
