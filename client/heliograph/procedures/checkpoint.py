"""`hg.Checkpoint`: the values of plans' variables at one moment, in memory or in a file.

checkpoint = plan.checkpoint()
checkpoint.save("step1000.npz")
plan.restore(hg.load_checkpoint("step1000.npz"))
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from heliograph.core.arrays import byte_view, empty_array
from heliograph.core.effects import Procedure
from heliograph.core.future import Pending
from heliograph.core.protocol import ClientCore
from heliograph.graph.files.atomic_files import replacing
from heliograph.procedures.transfer import Sending, read, wait_for, write
from heliograph_proto import commands as c
from heliograph_proto.errors import InvalidArgumentError, InvalidModelError
from heliograph_proto.plans import VariablePort
from heliograph_proto.types import TensorType, tensor_type

Array = np.ndarray[Any, Any]

#: The file in the archive that describes the others.
_INDEX = "heliograph"
_FORMAT = 1


class Checkpoint(dict[str, Array]):
    """The elements of variables by name, as arrays of `tensor.get()`, and their types."""

    def __init__(
        self, arrays: Mapping[str, Array], types: Mapping[str, TensorType], taken: float | None = None
    ) -> None:
        super().__init__(arrays)
        #: The shapes and data types of the variables.
        self.types = dict(types)
        #: The time when it was taken, in UTC.
        self.taken = datetime.fromtimestamp(time.time() if taken is None else taken, UTC)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for array in self.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the checkpoint to a file, a zip archive of .npy files, replacing it atomically.

        Raises InvalidArgumentError if it cannot be written.
        """
        types = [(name, one.dtype.name, list(one.shape)) for name, one in self.types.items()]
        index = {"format": _FORMAT, "taken": self.taken.timestamp(), "variables": types}
        # Files are named by numbers: a variable may have any name, and NumPy lacks some types.
        arrays: dict[str, Array] = {
            str(place): np.frombuffer(byte_view(self[name]), np.uint8) for place, name in _placed(types)
        }
        arrays[_INDEX] = np.array(json.dumps(index))
        save: Any = np.savez
        with replacing(Path(path)) as part, part.open("wb") as file:
            save(file, **arrays)

    def check(self, ports: Mapping[str, TensorType]) -> None:
        """Raise InvalidArgumentError unless the checkpoint has these variables with these types."""
        for name, type_ in ports.items():
            if name not in self:
                raise InvalidArgumentError(
                    f"the checkpoint has no variable {name!r}; it has {', '.join(self) or 'none'}",
                    advice="take a checkpoint of this plan: plan.checkpoint()",
                )
            room = empty_array(type_)
            found = self[name]
            if found.shape != room.shape or found.dtype != room.dtype:
                raise InvalidArgumentError(
                    f"the checkpoint's {name!r} is {found.dtype} {found.shape}; the plan's is {type_}"
                )


def types_of(variables: Mapping[str, VariablePort]) -> dict[str, TensorType]:
    """Return the types of variables by name."""
    return {name: one.port.type for name, one in variables.items()}


def _placed(types: list[tuple[str, str, list[int]]]) -> list[tuple[int, str]]:
    return [(place, name) for place, (name, _, _) in enumerate(types)]


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file that `Checkpoint.save` wrote.

    Raises InvalidModelError for a file that is missing, damaged or of another kind.
    """
    try:
        with np.load(Path(path), allow_pickle=False) as file:
            index = json.loads(str(file[_INDEX]))
            if index["format"] != _FORMAT:
                raise ValueError(f"its format is {index['format']}, of a newer version")
            types = {name: tensor_type(dtype, tuple(shape)) for name, dtype, shape in index["variables"]}
            arrays = {
                name: _array(types[name], file[str(place)]) for place, name in _placed(index["variables"])
            }
            return Checkpoint(arrays, types, float(index["taken"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidModelError(
            f"{path} is not a checkpoint: {error}", advice="name a file that checkpoint.save wrote"
        ) from None


def _array(type_: TensorType, data: Array) -> Array:
    """Return the elements of a variable. Raises ValueError for a wrong number of bytes."""
    array = empty_array(type_)
    byte_view(array)[:] = byte_view(np.ascontiguousarray(data, np.uint8))
    return array


def read_variables(core: ClientCore, variables: dict[str, VariablePort]) -> Procedure[Checkpoint]:
    """Read the variables after everything sent before."""
    arrays = {}
    for name, port in variables.items():
        type_ = port.port.type
        array = empty_array(type_)
        yield from read(
            core, c.GetTensor(port.tensor, 0, array.nbytes), byte_view(array), type_.dtype.block_bytes
        )
        arrays[name] = array
    return Checkpoint(arrays, types_of(variables))


def write_variable(
    core: ClientCore, port: VariablePort, array: np.ndarray[Any, Any]
) -> Procedure[list[Pending]]:
    """Write a variable. Returns the commands that do it."""
    data = byte_view(np.ascontiguousarray(array))
    how = Sending(observed=True, keep=True)
    return (yield from write(core, c.SetTensor(port.tensor, 0), data, port.port.type.dtype.block_bytes, how))


def restore_variables(
    core: ClientCore, variables: dict[str, VariablePort], checkpoint: Checkpoint
) -> Procedure[None]:
    """Write a checkpoint's values to variables, and wait until it is done."""
    checkpoint.check(types_of(variables))
    for name, port in variables.items():
        for pending in (yield from write_variable(core, port, checkpoint[name])):
            yield from wait_for(core, pending)
