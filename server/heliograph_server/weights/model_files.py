"""Models in a folder that the operator allows: safetensors and GGUF files, whose tensors clients name.

A client names a file by its path in the folder; nothing outside of the folder is opened, whatever links say.
What a file says of itself is checked before it is believed: every tensor's bytes lie inside of the file.

Bytes are read, not mapped: a mapped file that somebody cuts would end the daemon.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from heliograph_proto.digests import hasher
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError, InvalidModelError
from heliograph_proto.models import ModelInfo, ModelTensor
from heliograph_server.weights.disk_cache import read_at
from heliograph_server.weights.model_formats import FORMATS, Extent, read_header

#: What is read at once.
PIECE_BYTES = 2**20
#: The most files that a listing names.
MAX_FILES = 10_000
#: The longest name of a file, in characters.
MAX_NAME = 1024


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What tells that a file is still the one that was read."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class _Known:
    """A file whose tensors were hashed."""

    stamp: _Stamp
    info: ModelInfo


class ModelFiles:
    """The files of a folder. Thread-safe. Raises ConfigurationError for a folder that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        #: Held while a file is hashed, which takes all of the disk's bandwidth anyway.
        self._reading = threading.Lock()
        self._known: dict[str, _Known] = {}
        #: By digest: the file, and where in it.
        self._places: dict[bytes, tuple[str, Extent]] = {}
        try:
            self.folder = folder.resolve(strict=True)
            os.listdir(self.folder)
        except OSError as error:
            raise ConfigurationError(
                f"cannot read the models in {folder}: {error.strerror}", advice="check --models"
            ) from None

    def __repr__(self) -> str:
        return f"<ModelFiles {self.folder}, {len(self._known)} known>"

    def names(self) -> tuple[str, ...]:
        """The files that there are, by their paths in the folder, sorted; the first MAX_FILES."""
        found = []
        for inner, _, names in os.walk(self.folder):
            found += [Path(inner, name) for name in names if Path(name).suffix in FORMATS]
        inside = sorted(path.relative_to(self.folder).as_posix() for path in found)
        return tuple(inside[:MAX_FILES])

    def describe(self, name: str) -> ModelInfo:
        """A file's tensors, with their digests: all of it is read the first time. Blocks.

        Raises InvalidArgumentError for a name that leads out of the folder, InvalidModelError for a file
        that is missing or not what its format says.
        """
        path = self._path(name)
        with self._reading:
            known = self._known.get(name)
            if known is not None and known.stamp == _stamp(path, name):
                return known.info
            return self._describe(name, path)

    def _describe(self, name: str, path: Path) -> ModelInfo:
        before = _stamp(path, name)
        header = read_header(path, name)
        extents = header.extents
        with path.open("rb", buffering=0) as file:
            found = {one.name: _digest(file.fileno(), one, name) for one in extents}
        if _stamp(path, name) != before:
            raise InvalidModelError(f"{name} changed while it was read", advice="ask again")
        tensors = tuple(ModelTensor(one.name, one.type, found[one.name]) for one in extents)
        info = ModelInfo(name, tensors, header.left_out)
        with self._lock:
            self._places = {key: place for key, place in self._places.items() if place[0] != name}
            self._places.update((found[one.name], (name, one)) for one in extents)
            self._known[name] = _Known(before, info)
        return info

    def _path(self, name: str) -> Path:
        """Raises InvalidArgumentError, InvalidModelError."""
        parts = Path(name).parts
        is_plain = 0 < len(name) <= MAX_NAME and name.isprintable() and "\\" not in name
        if not is_plain or name.startswith("/") or not parts or ".." in parts:
            raise InvalidArgumentError(
                f"{name!r:.100} is no path in the models' folder", advice="name a file as the listing does"
            )
        if Path(name).suffix not in FORMATS:
            raise InvalidArgumentError(
                f"{name!r:.100} is no model", advice=f"models end in {' or '.join(FORMATS)}"
            )
        return self._inside(name)

    def _inside(self, name: str) -> Path:
        missing = InvalidModelError(
            f"the server has no model {name!r:.100}", advice="the listing names those that it has"
        )
        try:
            path = (self.folder / name).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise missing from None
        if not path.is_relative_to(self.folder):
            raise InvalidArgumentError(
                f"{name!r:.100} leads out of the models' folder", advice="put the file itself there"
            )
        if not path.is_file():
            raise missing
        return path if path.suffix in FORMATS else self.folder / name

    # Contents

    def holds(self, digest: bytes) -> bool:
        """Whether a file that was described has a tensor of these bytes."""
        with self._lock:
            return digest in self._places

    def open(self, digest: bytes) -> ModelSource | None:
        """The bytes of a tensor; None if no file has them. Raises InvalidModelError if its file is gone."""
        with self._lock:
            place = self._places.get(digest)
        if place is None:
            return None
        name, extent = place
        path = self._path(name)
        try:
            number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise InvalidModelError(f"cannot read the model {name}: {error.strerror}") from None
        return ModelSource(number, extent, lambda why: self._spoilt(name, why))

    def _spoilt(self, name: str, why: str) -> None:
        with self._lock:
            self._known.pop(name, None)
            self._places = {key: place for key, place in self._places.items() if place[0] != name}
        raise InvalidModelError(
            f"the model {name} has changed since it was listed: {why}", advice="list it and build anew"
        )


class ModelSource:
    """A tensor's bytes in a file, until `close`."""

    def __init__(self, file: int, extent: Extent, spoilt: Callable[[str], None]) -> None:
        self._file = file
        self._extent = extent
        self.size_bytes = extent.type.nbytes
        #: To be called with why, if the bytes are not what they should be. Raises InvalidModelError.
        self.spoilt = spoilt

    def read_into(self, offset_bytes: int, out: memoryview) -> int:
        """Reads bytes from an offset in the tensor on; how many, 0 at its end. Raises OSError."""
        left = out[: self.size_bytes - offset_bytes]
        return read_at(self._file, self._extent.offset_bytes + offset_bytes, left)

    def close(self) -> None:
        os.close(self._file)


def _digest(file: int, extent: Extent, name: str) -> bytes:
    taken, space = hasher(), memoryview(bytearray(PIECE_BYTES))
    offset, end = extent.offset_bytes, extent.offset_bytes + extent.type.nbytes
    try:
        while count := read_at(file, offset, space[: end - offset]):
            taken.update(space[:count])
            offset += count
    except OSError as error:
        raise InvalidModelError(f"cannot read the model {name}: {error.strerror}") from None
    digest: bytes = taken.digest()
    return digest


def _stamp(path: Path, name: str) -> _Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidModelError(f"cannot read the model {name}: {error.strerror}") from None
    return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
