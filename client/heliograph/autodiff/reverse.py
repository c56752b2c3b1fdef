"""`hg.grad`: reverse-mode differentiation of a graph, which adds nodes for the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from heliograph.autodiff.step import Step, fitted
from heliograph.autodiff.table import FLAT, REFUSED, RULES
from heliograph.functions.trees import leaves_of, refilled
from heliograph.graph.builder import Graph
from heliograph.graph.lowering import apply, is_value, reshape
from heliograph.graph.source_lines import describe, invalid
from heliograph.graph.value import Value
from heliograph_proto.errors import InvalidArgumentError, InvalidGraphError, Origin

__all__ = ["grad", "stop_gradient", "value_and_grad"]


def grad(loss: Value | Callable[[Any], Value], variables: Any) -> Any:
    """Return the gradient of a loss with respect to values: the partial derivatives.

    Args:
        loss: A float value of one element, or a function that makes it from `variables`.
        variables: Values of the graph, or lists, tuples and dictionaries of them: variables,
            inputs, weights or results of ops. The gradients come in the same structure.

    Each gradient has the shape and the data type of its value. Raises InvalidGraphError, at the
    line of the op, where an op on the way has no gradient, and where a value has no part in the
    loss.
    """
    return value_and_grad(loss, variables)[1]


def value_and_grad(loss: Value | Callable[[Any], Value], variables: Any) -> tuple[Value, Any]:
    """Return the loss and its gradient, as `grad` does."""
    found: Any = loss if is_value(loss) or not callable(loss) else loss(variables)
    _check_loss(found)
    named = list(leaves_of(variables))
    for path, one in named:
        _check_variable(one, path, found.graph)
    walk = _Walk(found.graph, found, frozenset(one.reference for _, one in named), through=True)
    walk.check_assignments()
    one = reshape(found.graph.full((), 1.0, found.dtype), found.shape)
    gradients = walk.gradients(one)
    for _, variable in named:
        if variable.reference not in gradients:
            walk.refuse_unreached(variable)
    return found, refilled(variables, iter([gradients[variable.reference] for _, variable in named]))


def stop_gradient(x: Value, /) -> Value:
    """Return x as it is; `grad` counts it as a constant."""
    if not is_value(x):
        raise invalid(f"stop_gradient of {x!r:.80}, which is no value of a graph", kind=InvalidArgumentError)
    stopped = apply("reshape", x, shape=x.shape)
    x.graph._stopped.add(stopped.reference)
    return stopped


def _check_loss(loss: Any) -> None:
    if not is_value(loss):
        raise invalid(
            f"the loss is {loss!r:.80}, which is no value of a graph",
            "hg.grad(loss, variables): a value, or a function that returns one",
            InvalidArgumentError,
        )
    if loss.size != 1 or not loss.dtype.is_float:
        raise invalid(f"the loss is {loss.type}", "a loss is one float: hg.mean(x) or hg.sum(x)")


def _check_variable(one: Any, path: str, graph: Graph) -> None:
    where = f"variables{path}" if path else "the variable"
    if not is_value(one):
        raise invalid(
            f"{where} is {one!r:.80}, which is no value of a graph",
            "hg.grad(loss, variables): values, or lists, tuples and dictionaries of them",
            InvalidArgumentError,
        )
    if one.graph is not graph:
        raise invalid(f"{one!r} belongs to another graph than the loss", kind=InvalidArgumentError)
    if not one.dtype.is_float:
        raise invalid(f"{where} is {one.type}: only floats have gradients", "convert it: hg.astype(x, 'f32')")


@dataclass(frozen=True, slots=True)
class _Walk:
    """The nodes between a result and the values whose gradients are wanted."""

    graph: Graph
    result: Value
    #: References of values.
    targets: frozenset[int]
    #: True if gradients also flow through a target to others that it is computed from.
    through: bool
    #: Earlier nodes are none of the walk.
    begin: int = 0

    def gradients(self, seed: Value) -> dict[int, Value]:
        """Return the gradients of the targets by reference, given that of the result."""
        on_the_way = self._carrying()
        found: dict[int, Value] = {}
        if self.result.reference in self.targets or self.result.reference in on_the_way:
            found[self.result.reference] = seed
        for number in sorted(on_the_way, reverse=True):
            if number not in found or (number in self.targets and not self.through):
                continue
            gradient = found[number] if number in self.targets else found.pop(number)
            self._step_back(number, gradient, on_the_way, found)
        return {reference: found[reference] for reference in self.targets if reference in found}

    def _step_back(self, number: int, gradient: Value, on_the_way: set[int], found: dict[int, Value]) -> None:
        node = self.graph._nodes[number]
        wanted = tuple(
            place
            for place, reference in enumerate(node.operands)
            if (reference in on_the_way or reference in self.targets) and self._is_float(reference)
        )
        if node.op == "slice" and wanted and node.operands[0] in found and gradient.size:
            # Many slices of one value write into one gradient, in place.
            block = {"start": node.attributes["start"], "step": node.attributes["step"]}
            found[node.operands[0]] = apply("acc", found[node.operands[0]], gradient, **block)
            return
        operands = tuple(map(self.graph._value, node.operands))
        step = Step(
            operands, self.graph._value(number), node.attributes, wanted, partial(_within, self.graph)
        )
        rule = RULES.get(node.op)
        if rule is None:
            self._refuse(number, REFUSED.get(node.op, "its result does not change smoothly"))
        for place, one in rule(step, gradient).items():
            reference, part = node.operands[place], fitted(one, operands[place])
            found[reference] = found[reference] + part if reference in found else part

    def _is_float(self, reference: int) -> bool:
        return self.graph._value(reference).dtype.is_float

    def _ancestors(self) -> set[int]:
        """The numbers of the nodes that the result is computed by."""
        seen: set[int] = set()
        waiting = [self.result.reference]
        while waiting:
            number = waiting.pop()
            if number < self.begin or number in seen or (number in self.targets and not self.through):
                continue
            seen.add(number)
            waiting += self.graph._nodes[number].operands
        return seen

    def _carrying(self) -> set[int]:
        """The nodes on a way from a target to the result on which a gradient flows."""
        found: set[int] = set()
        for number in sorted(self._ancestors()):
            if self._reads(number, found) and self._lets_through(number):
                found.add(number)
        return found

    def _reads(self, number: int, some: set[int]) -> bool:
        operands = self.graph._nodes[number].operands
        return any(one in self.targets or one in some for one in operands)

    def _lets_through(self, number: int) -> bool:
        node = self.graph._nodes[number]
        return node.type.dtype.is_float and node.op not in FLAT and number not in self.graph._stopped

    def check_assignments(self) -> None:
        """Raise if the way back would read a variable after an assignment that the loss came
        before."""
        assigned: dict[int, int] = {}
        for number, node in enumerate(self.graph._nodes):
            if node.op == "assign":
                assigned[node.operands[0]] = number
        for number in self._carrying() if assigned else ():
            node = self.graph._nodes[number]
            for reference in node.operands if node.op != "assign" else ():
                if assigned.get(reference, -1) > number:
                    variable = self.graph._value(reference)
                    raise invalid(
                        f"variable {variable.name!r} was assigned after the loss had read it",
                        "build gradients first: call hg.grad before hg.assign",
                    )

    # Refusals

    def refuse_unreached(self, variable: Value) -> NoReturn:
        """Raise for a target without a gradient, naming the op that ended the way."""
        walk = _Walk(self.graph, self.result, frozenset([variable.reference]), self.through)
        ancestors = sorted(walk._ancestors())
        carrying = walk._carrying()
        for number in ancestors:
            if walk._reads(number, carrying) and number not in carrying:
                op = self.graph._nodes[number].op
                why = (
                    "hg.stop_gradient ends it"
                    if number in self.graph._stopped
                    else "its result is constant between jumps"
                    if op in FLAT
                    else f"its result is {self.graph._nodes[number].type}"
                )
                self._refuse(number, why, f"the loss depends on {variable.name!r} only through it")
        raise invalid(
            f"the loss does not depend on {variable.name!r} ({variable.type})",
            "leave it out of hg.grad, or build the loss from it",
        )

    def _refuse(self, number: int, why: str, consequence: str = "") -> NoReturn:
        node = self.graph._nodes[number]
        types = tuple(self.graph._value(one).type for one in node.operands)
        origin = Origin(
            op=node.op,
            node=number,
            node_name=node.name,
            operands=types,
            source=describe(self.graph._sources[number]),
        )
        message = f"{node.op} has no gradient: {why}"
        raise InvalidGraphError(
            message,
            advice=consequence or "keep it off the way from the variables to the loss: hg.stop_gradient(x)",
            origin=origin,
        )


def _within(
    graph: Graph, result: Value, seed: Value, values: Sequence[Value], begin: int
) -> dict[int, Value]:
    """The gradients of values that a rule's own nodes begin with."""
    walk = _Walk(graph, result, frozenset(one.reference for one in values), through=False, begin=begin)
    return walk.gradients(seed)
