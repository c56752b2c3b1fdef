"""The sizes of commands on the wire."""

from __future__ import annotations

from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineRun

#: The most bytes of a command's own fields on the wire, without names and data.
_COMMAND_BYTES = 128
#: The most bytes of an inline run's number and the lengths around it on the wire.
_NUMBER_BYTES = 24


def size_of(kind: c.CommandKind | InlineRun) -> int:
    """Return an upper bound, nearly exact, of a command's bytes on the wire."""
    if isinstance(kind, InlineRun):
        return _NUMBER_BYTES + kind.form.template.size_bytes
    match kind:
        case c.SetTensor(data=data) if data is not None:
            return _COMMAND_BYTES + len(data)
        case c.RunCommand(inputs=inputs, outputs=outputs, loop=loop):
            data_bytes = sum(len(one.data) for one in inputs if one.data is not None)
            looped = 3 + len(loop.carries) + len(loop.taps) + len(loop.fed_inputs) if loop is not None else 0
            return _COMMAND_BYTES + data_bytes + 32 * (len(inputs) + len(outputs) + looped)
        case c.FeedLoop(values=values, rows=rows):
            return 2 * _COMMAND_BYTES + sum(16 + len(data) for _, data in values) + 5 * len(rows)
        case c.Free(handles):
            return _COMMAND_BYTES + 10 * len(handles)
        case c.FreeVariable(name):
            return _COMMAND_BYTES + 4 * len(name)
        case c.AllocateTensors(tensors=tensors):
            return 2 * _COMMAND_BYTES + sum(32 + 10 * type.ndim for _, type in tensors)
    return 2 * _COMMAND_BYTES
