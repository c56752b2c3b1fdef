"""Inputs of runs as arrays, and inputs of running loops that are fed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from heliograph._base.tensor import TensorBase, as_elements
from heliograph._base.type_advice import shape_advice
from heliograph.core.arrays import empty_array
from heliograph.core.future import Pending
from heliograph_proto import commands as c
from heliograph_proto.errors import InvalidArgumentError, InvalidInputError, LimitExceededError
from heliograph_proto.plans import PlanInfo, Port
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType

#: The fraction of a message that the values of one feed may fill.
_MESSAGE_SHARE = 4


def bound_array(port: Port, value: Any) -> np.ndarray[Any, Any]:
    """Return a value of an input as an array of its type. Raises InvalidInputError."""
    try:
        array = as_elements(value, port.type.dtype, casts=True)
    except InvalidInputError as error:
        raise InvalidInputError(f"input {port.name!r}: {error.message}", advice=error.advice) from None
    expected = port.type.shape if port.type.dtype.kind != "quantized" else empty_array(port.type).shape
    if array.shape != expected:
        raise InvalidInputError(
            f"input {port.name!r} has shape {array.shape}; the plan needs {expected}",
            advice=shape_advice(array.shape, expected),
        )
    return np.ascontiguousarray(array).reshape(array.shape)


class FedInputs:
    """The inputs of a loop that may be fed while it runs, by name."""

    def __init__(self, info: PlanInfo, loop: c.Loop, limits: Limits) -> None:
        ports = [(place, info.inputs[place]) for place in loop.fed_inputs]
        self._ports = {port.name: (place, port) for place, port in ports}
        self._limits = limits

    def command(self, values: Mapping[str, Any], rows: Sequence[int] | None) -> c.FeedLoop:
        """Return the command for new values, whose loop is not known yet.

        Raises InvalidArgumentError, InvalidInputError and LimitExceededError.
        """
        self._check(values)
        numbers = () if rows is None else _checked_rows(rows)
        made, size = [], 0
        for name, value in values.items():
            place, port = self._port(name, value)
            if numbers:
                port = _rows_of(port, numbers)
            data = bound_array(port, value).tobytes()
            size += len(data)
            most = min(self._limits.inline_bytes, self._limits.message_bytes // _MESSAGE_SHARE)
            if len(data) > most or size > self._limits.message_bytes // _MESSAGE_SHARE:
                raise LimitExceededError(
                    f"input {name!r}: a feed of {size:,} bytes; one input may have {most:,}, and all "
                    f"together {self._limits.message_bytes // _MESSAGE_SHARE:,}",
                    advice="feed only the rows that change: loop.feed(values, rows=[...])",
                )
            made.append((place, data))
        return c.FeedLoop(0, tuple(made), numbers)

    def _check(self, values: object) -> None:
        if not isinstance(values, Mapping) or not values:
            raise InvalidArgumentError(
                f"a feed is {values!r:.80}", advice="values by the names of inputs: loop.feed({'token': [5]})"
            )

    def _port(self, name: str, value: Any) -> tuple[int, Port]:
        if name not in self._ports:
            raise InvalidInputError(
                f"input {name!r} of the loop may not be fed",
                advice=f"those that may are: {', '.join(self._ports)}; plan.loop(..., feed=[...]) names them",
            )
        if isinstance(value, TensorBase):
            raise InvalidInputError(
                f"input {name!r}: a tensor of the session cannot be fed", advice="feed an array"
            )
        return self._ports[name]


def _rows_of(port: Port, rows: Sequence[int]) -> Port:
    """Return the port of these rows of an input. Raises InvalidInputError."""
    shape = port.type.shape
    if not shape or (port.type.dtype.kind == "quantized" and len(shape) == 1):
        raise InvalidInputError(
            f"input {port.name!r} is {port.type}, which has no rows", advice="feed all of it: rows=None"
        )
    if max(rows) >= shape[0]:
        raise InvalidInputError(f"row {max(rows)} of input {port.name!r}, which has {shape[0]} rows")
    return Port(port.name, TensorType(port.type.dtype, (len(rows), *shape[1:])))


def _checked_rows(rows: Collection[int]) -> tuple[int, ...]:
    try:
        numbers = tuple(index(row) for row in rows)
    except TypeError:
        raise InvalidArgumentError(f"rows is {rows!r:.80}", advice="numbers of rows: rows=[3]") from None
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise InvalidArgumentError(
            f"rows is {rows!r:.80}", advice="one row or more, each once, counted from 0: rows=[3]"
        )
    return numbers


def not_fed() -> InvalidArgumentError:
    """Return the error for a run or a loop that takes no feeds."""
    return InvalidArgumentError(
        "no input of the run may be fed", advice="loops can be fed: plan.loop(..., feed=['token'])"
    )


def step_of(feed: Pending) -> int:
    """Return the number of the step that took a feed."""
    assert isinstance(feed.completion, c.Completion)
    return feed.completion.steps
