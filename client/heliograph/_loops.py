"""Loops of a plan on the server: what is given by name, checked and turned into places, for both APIs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any, TypeAlias

from heliograph._feed import cost_of
from heliograph_proto import commands as c
from heliograph_proto.description import PlanInfo, Port, SessionInfo
from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.loops import check_until
from heliograph_proto.types import TensorType

#: Which outputs of a step are inputs of the next: names of inputs, or several, by the name of the output.
Carries: TypeAlias = Mapping[str, "str | Collection[str]"] | None

#: Of the room for what is observed a loop's values on their way here may take this part of what is free,
#: unless one of them is larger: 8 MiB of the first loop, where the server holds 256.
UNREAD_PART = 24


def check_server(info: SessionInfo) -> None:
    """Raises UnsupportedError for a server that would run the plan once."""
    if "loops" not in info.features:
        raise UnsupportedError(
            f"the server {info.server} cannot run loops",
            advice="upgrade it, or call plan.run in a loop of your own",
        )


def loop_of(plan: PlanInfo, steps: int, carry: Carries, until: str | None) -> c.Loop:
    """What a loop says by name, in the plan's places; nothing is streamed. Raises InvalidArgumentError."""
    if not isinstance(steps, Integral) or isinstance(steps, bool) or not 1 <= steps <= c.MAX_LOOP_STEPS:
        raise InvalidArgumentError(
            f"steps is {steps!r:.80}", advice=f"a loop does from 1 to {c.MAX_LOOP_STEPS:,} steps"
        )
    carries = tuple(_carry(plan, output, name) for output, name in _pairs(carry))
    if twice := [place for place, count in Counter(one.input for one in carries).items() if count > 1]:
        raise InvalidArgumentError(
            f"input {plan.inputs[twice[0]].name!r} is to be fed from two outputs",
            advice="carry one of them, or combine them in the graph",
        )
    return c.Loop(int(steps), carries, None if until is None else _until(plan, until))


def _pairs(carry: Carries) -> list[tuple[Any, Any]]:
    """Outputs and inputs by name, one of each."""
    if carry is None:
        return []
    if not isinstance(carry, Mapping):
        raise InvalidArgumentError(
            f"carry is {type(carry).__name__}",
            advice="inputs by the names of outputs: carry={'next': 'token'}",
        )
    pairs: list[tuple[Any, Any]] = []
    for output, names in carry.items():
        several = isinstance(names, Collection) and not isinstance(names, str)
        pairs += [(output, name) for name in (names if several else (names,))]
    return pairs


def _carry(plan: PlanInfo, output: Any, name: Any) -> c.Carry:
    carry = c.Carry(output_place(plan, output), _place(plan.inputs, name, "input"))
    given, taken = plan.outputs[carry.output].type, plan.inputs[carry.input].type
    if given != taken:
        raise InvalidArgumentError(
            f"output {output!r} is {given}, and is to be the next step's input {name!r}, which is {taken}",
            advice="what is carried keeps its shape and data type: hg.astype or hg.reshape in the graph",
        )
    return carry


def _until(plan: PlanInfo, name: Any) -> int:
    place = output_place(plan, name)
    check_until(plan.outputs[place])
    return place


def output_place(plan: PlanInfo, name: Any) -> int:
    """Raises InvalidArgumentError for a name that no output has."""
    return _place(plan.outputs, name, "output")


def _place(ports: Sequence[Port], name: Any, what: str) -> int:
    names = [port.name for port in ports]
    if name in names:
        return names.index(name)
    near = get_close_matches(str(name), names, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
    raise InvalidArgumentError(f"the plan has no {what} {name!r:.80}", advice=advice)


def unread_bytes(types: Collection[TensorType], free_bytes: int) -> int:
    """How much may be on its way here of a loop that streams values of these types in each step, where so
    many bytes are free for what is observed: one value at least. The more loops, the less of each.
    """
    largest = max((cost_of(type_.nbytes) for type_ in types), default=0)
    return max(largest, free_bytes // UNREAD_PART)
