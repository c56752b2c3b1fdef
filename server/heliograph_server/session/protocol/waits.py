"""The commands that a command, or a caller beside the stream, waits for. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from heliograph_server.resources.handles import (
    HandleTable,
    PlanHandle,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.session.protocol.command_rules import storages_of
from heliograph_server.session.protocol.dependencies import CommandState, wait_for_users, wait_for_writers
from heliograph_server.session.protocol.instructions import FreeTask


def wait_for_freed(state: CommandState, task: FreeTask) -> None:
    """Let a command that frees handles wait for the commands that use them."""
    wait_for_users(state, dict.fromkeys(storages_of(task.handles)))
    earlier: list[CommandState | None] = []
    for handle in task.handles:
        match handle:
            case PlanHandle() | ReservationHandle():
                earlier.extend(handle.slots.running())
            case StreamHandle():
                earlier += [handle.tail, handle.gate, *handle.runs]
    for one in earlier:
        state.wait_for(one)


def waiter_for_writers(handles: HandleTable, numbers: Iterable[int]) -> CommandState:
    """Return a state that waits for the commands received so far that write these tensors."""
    waiting = CommandState(0)
    for number in numbers:
        if (tensor := handles.peek(number, TensorHandle)) is not None:
            wait_for_writers(waiting, (tensor,))
    return waiting
