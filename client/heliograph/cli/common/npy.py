"""Inputs and outputs of a run in .npy files.

NumPy has neither bf16 nor quantized blocks. In a file, a bf16 tensor is f32, which holds it
exactly; rows of blocks are rows of bytes, uint8 [.., row_bytes].
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from heliograph.comparison.inputs import checked
from heliograph.graph.files.atomic_files import replacing
from heliograph_proto.errors import InvalidInputError
from heliograph_proto.graph import Leaf
from heliograph_proto.quantization import blocks
from heliograph_proto.types import TensorType

Array = np.ndarray[Any, Any]

#: The longest file name that is made from a tensor's name, without its suffix.
_LONGEST = 120


def read(path: str, leaf: Leaf) -> Array:
    """Read the elements of a leaf from a file, in the storage of its type. Raises
    InvalidInputError."""
    what = f"{leaf.kind.value} {leaf.name!r} is {leaf.type}"
    found = _mapped(path, f"{what}: ")
    if leaf.type.dtype.name == "bf16" and found.dtype == np.float32:
        found = _as_bits(found, what)
    return checked(leaf, found)


def shape_of(path: str) -> tuple[int, ...]:
    """Return the shape of the array in a file. Raises InvalidInputError."""
    return tuple(_mapped(path).shape)


def _mapped(path: str, begin: str = "") -> Array:
    """Return the array in a file, mapped. The message of an InvalidInputError begins with `begin`."""
    advice = "write one with numpy.save(path, array)"
    if not Path(path).is_file():
        raise InvalidInputError(f"{begin}{path} is not a file", advice=advice)
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInputError(f"{begin}{path} is not a .npy file: {error}", advice=advice) from None
    if not isinstance(found, np.ndarray):
        found.close()
        raise InvalidInputError(f"{begin}{path} is an archive of arrays", advice=advice)
    return found


def _as_bits(array: Array, what: str) -> Array:
    bits: Array = blocks.to_bits(array)
    if not np.array_equal(blocks.from_bits(bits), array, equal_nan=True):
        raise InvalidInputError(
            f"{what}: the f32 numbers in the file have more digits than bf16",
            advice="round them: save heliograph_proto.quantization.blocks.to_bits(array), the bits in uint16",
        )
    return bits


def write(path: Path, raw: Array, type_: TensorType) -> None:
    """Write raw elements to a file, replacing it atomically. Raises InvalidArgumentError."""
    array = blocks.from_bits(raw) if type_.dtype.name == "bf16" else raw
    with replacing(path) as part, part.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def file_names(names: Collection[str]) -> dict[str, str]:
    """Map the name of each tensor to a unique file name of letters, digits and "_.-", never a
    path."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".")[:_LONGEST] or "output"
        unique, number = plain, 2
        while unique.lower() in taken:
            unique, number = f"{plain}_{number}", number + 1
        taken.add(unique.lower())
        found[name] = f"{unique}.npy"
    return found
