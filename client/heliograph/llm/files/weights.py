"""The tensors of a model: in a GGUF file here, or on the server."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

import heliograph as hg
from heliograph.llm.files.headers import read_header, read_parts
from heliograph_proto.gguf import GgufHeader, GgufTensor, joined


@dataclass(frozen=True, slots=True)
class File:
    """A model's file: its header, and its tensors."""

    header: GgufHeader
    weights: LocalWeights | ServerFileWeights


class LocalWeights:
    """The tensors of a file here, or of the parts of one, which are mapped into memory."""

    def __init__(self, name: str, parts: Sequence[mmap.mmap], tensors: Mapping[str, GgufTensor]) -> None:
        #: The name of the file in errors.
        self.name = name
        self._parts = parts
        self._tensors = tensors
        #: The same array for each graph, so that its digest is taken once.
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors by name, in numpy order."""
        return {name: one.shape for name, one in self._tensors.items()}

    def add(self, graph: hg.Graph, name: str) -> hg.Value:
        """Add a tensor to a graph, as it is stored. Raises InvalidModelError and
        UnsupportedError."""
        found = self._tensors.get(name)
        if found is None:
            raise missing(self.name, name)
        type_ = found.type
        if type_ is None:
            raise unsupported(self.name, name, found.type_name)
        if name not in self._arrays:
            raw = np.frombuffer(self._parts[found.part], np.uint8, type_.nbytes, found.offset_bytes)
            self._arrays[name] = raw.view(type_.dtype.storage).reshape(type_.storage_shape)
        return graph.weight(name, self._arrays[name], dtype=type_.dtype)


class ServerFileWeights:
    """The tensors of a file on the server: nothing is uploaded."""

    def __init__(self, found: hg.ServerWeights) -> None:
        self._found = found

    @property
    def name(self) -> str:
        """The file's path in the server's folder."""
        return self._found.file

    def check_same(self, other: hg.ServerWeights) -> None:
        """Raises InvalidModelError for a file with other tensors."""
        if {one: self._found[one].digest for one in self._found} != {one: other[one].digest for one in other}:
            raise hg.InvalidModelError(
                f"{self.name} is another file now than when the model was loaded",
                advice="load the model again",
            )

    def __contains__(self, name: object) -> bool:
        return name in self._found or name in self._left_out

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors by name, in numpy order."""
        return {name: one.shape for name, one in self._found.items()}

    @property
    def _left_out(self) -> dict[str, str]:
        """The types of the tensors that the server cannot use, by name."""
        pairs = (one.partition(": ") for one in self._found.left_out)
        return {name: kind for name, _, kind in pairs}

    def add(self, graph: hg.Graph, name: str) -> hg.Value:
        """Add a tensor to a graph, as it is stored. Raises InvalidModelError and
        UnsupportedError."""
        if name in self._left_out:
            raise unsupported(self._found.file, name, self._left_out[name])
        if name not in self._found:
            raise missing(self._found.file, name)
        return graph.weight(name, self._found[name])


def open_file(file: str | Path | hg.ServerWeights) -> File:
    """Read the header of a model's file, or of all files of a model that is split.

    Raises InvalidModelError, and InvalidArgumentError for what names no file.
    """
    if isinstance(file, hg.ServerWeights):
        return File(read_header(file), ServerFileWeights(file))
    if not isinstance(file, str | PathLike):
        raise hg.InvalidArgumentError(
            f"the file is {file!r:.60}", advice="a path, or session.server_weights(name)"
        )
    path = Path(file)
    parts = read_parts(path)
    header, data = joined(parts), []
    for part in parts:
        end = max((one.offset_bytes + (one.nbytes or 0) for one in part.tensors), default=0)
        data.append(_mapped(path.with_name(part.name), end))
    return File(header, LocalWeights(header.name, data, {one.name: one for one in header.tensors}))


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Map a file of so many bytes at least. Raises InvalidModelError for one that is another now
    than when its header was read."""
    try:
        with path.open("rb") as opened:
            found = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise hg.InvalidModelError(f"cannot read {path}: {error}", advice="load it again") from None
    if len(found) < size:
        raise hg.InvalidModelError(f"{path} became shorter while it was read", advice="load it again")
    return found


def missing(file: str, name: str) -> hg.InvalidModelError:
    """Return the error for a model without a tensor that its architecture has."""
    return hg.InvalidModelError(f"{file} has no tensor {name!r}", advice="convert the model to GGUF again")


def unsupported(file: str, name: str, kind: str) -> hg.UnsupportedError:
    """Return the error for a tensor of a type that Heliograph lacks."""
    return hg.UnsupportedError(
        f"{file}: tensor {name!r} is stored as {kind}",
        advice="take a file of another type, such as f16, q4_0 to q8_0, q2_k to q6_k, iq1 to iq4 or mxfp4",
    )
