"""Variables of plans: what they have, and giving it back to them. Generators as in `_procedures`."""

from __future__ import annotations

from typing import Any

import numpy as np

from heliograph._arrays import byte_view, empty_array
from heliograph._effects import Procedure
from heliograph._outcome import Pending
from heliograph._procedures import Sending, read, wait_for, write
from heliograph.checkpoints import Checkpoint, types_of
from heliograph.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.description import VariablePort


def read_variables(core: ClientCore, variables: dict[str, VariablePort]) -> Procedure[Checkpoint]:
    """What they have after everything sent before."""
    arrays = {}
    for name, port in variables.items():
        type_ = port.port.type
        array = empty_array(type_)
        yield from read(
            core, c.GetTensor(port.tensor, 0, array.nbytes), byte_view(array), type_.dtype.block_bytes
        )
        arrays[name] = array
    return Checkpoint(arrays, types_of({name: one.port for name, one in variables.items()}))


def write_variable(
    core: ClientCore, port: VariablePort, array: np.ndarray[Any, Any]
) -> Procedure[list[Pending]]:
    """Gives a variable these elements; the commands that do it."""
    data = byte_view(np.ascontiguousarray(array))
    how = Sending(observed=True, keep=True)
    return (yield from write(core, c.SetTensor(port.tensor, 0), data, port.port.type.dtype.block_bytes, how))


def restore_variables(
    core: ClientCore, variables: dict[str, VariablePort], checkpoint: Checkpoint
) -> Procedure[None]:
    """Gives variables what they had, and ends when that was done."""
    checkpoint.check(types_of({name: one.port for name, one in variables.items()}))
    for name, port in variables.items():
        for pending in (yield from write_variable(core, port, checkpoint[name])):
            yield from wait_for(core, pending)
