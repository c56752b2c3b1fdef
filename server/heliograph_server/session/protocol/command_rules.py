"""Rules about single commands, for the core. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from heliograph_proto.errors import ComputeFailedError, DeviceLostError, HeliographError
from heliograph_server.resources.handles import BufferHandle, Handle, HandleStorage, TensorHandle
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import RunTask


def is_of_partition(state: CommandState) -> bool:
    """True for a run of a partition: others wait for its values, and learn of its end at once."""
    return isinstance(state.task, RunTask) and bool(state.task.command.exchange_run)


def torn_variable(name: str, cause: HeliographError) -> HeliographError:
    """The error of a variable whose bytes are partly of a failed run."""
    if isinstance(cause, DeviceLostError):
        return cause
    return ComputeFailedError(
        f"variable {name!r} was left half written by a run that failed: {cause.message}",
        advice="write the whole variable again, such as by plan.restore(checkpoint) or tensor.set(array), or "
        "free the tensor",
    )


def storages_of(handles: Iterable[Handle]) -> Iterator[HandleStorage]:
    """The storages of handles."""
    for handle in handles:
        match handle:
            case TensorHandle(storage=HandleStorage() as storage):
                yield storage
            case BufferHandle(parts=parts):
                yield from storages_of(parts)
