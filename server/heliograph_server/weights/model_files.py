"""Models in a folder that the operator allows: safetensors and GGUF files.

A client names a file by its path in the folder. Nothing outside of the folder is opened, whatever
symlinks say. The header of a file is checked before it is used: the bytes of every tensor lie
inside of the file.

Files are read, not mapped: a mapped file that is truncated would kill the daemon.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from heliograph_proto.digests import hasher
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError, InvalidModelError
from heliograph_proto.models import GgufSummary, ModelFile, ModelInfo, ModelTensor
from heliograph_server.weights.disk_cache import FileSource, read_at
from heliograph_server.weights.model_formats import FORMATS, Extent, read_header

logger = logging.getLogger(__name__)

#: The size of one read.
PIECE_BYTES = 2**20
#: The most files in a listing.
MAX_FILES = 10_000
#: The most folders that a listing looks into; links may lead to one on several paths.
MAX_FOLDERS = 10_000
#: The longest file name, in characters.
MAX_NAME = 1024


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Identifies the version of a file that was read."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class _Known:
    """A file whose tensors were hashed."""

    stamp: _Stamp
    info: ModelInfo
    #: The bytes of its metadata, which are read again each time: they may be many.
    metadata_bytes: int


@dataclass(frozen=True, slots=True)
class _Look:
    """A file as a listing found it."""

    stamp: _Stamp
    is_model: bool
    gguf: GgufSummary | None = None


class ModelFiles:
    """The models in a folder. Thread-safe. Raises ConfigurationError for a folder that cannot be
    read."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        #: Held while a file is hashed, which uses the disk's whole bandwidth anyway.
        self._reading = threading.Lock()
        self._known: dict[str, _Known] = {}
        #: By digest: the file, and the extent in it.
        self._places: dict[bytes, tuple[str, Extent]] = {}
        #: The findings of the last listing.
        self._looked_at: dict[str, _Look] = {}
        try:
            self.folder = folder.resolve(strict=True)
            os.listdir(self.folder)
        except OSError as error:
            raise ConfigurationError(
                f"cannot read the models in {folder}: {error.strerror}", advice="check --models"
            ) from None

    def __repr__(self) -> str:
        return f"<ModelFiles {self.folder}, {len(self._known)} known>"

    def files(self) -> tuple[ModelFile, ...]:
        """Return the models that `describe` takes, sorted by name; at most MAX_FILES.

        A file whose header is malformed is left out, and logged once. Blocks.
        """
        inside = sorted(self._files())
        found: dict[str, _Look] = {}
        for name in inside[:MAX_FILES]:
            try:
                path = self._path(name)
                found[name] = self._looked(name, path, _stamp(path, name))
            except (InvalidArgumentError, InvalidModelError) as error:
                logger.debug("%s is not listed: %s", name, error.message)
        self._looked_at = found
        return tuple(
            ModelFile(name, look.stamp.size_bytes, look.gguf) for name, look in found.items() if look.is_model
        )

    def _files(self) -> Iterator[str]:
        """Yield the paths of files with the suffix of a model, also in linked folders inside."""
        waiting: list[tuple[Path, tuple[Path, ...]]] = [(self.folder, (self.folder,))]
        seen = 0
        while waiting and seen < MAX_FOLDERS:
            folder, above = waiting.pop()
            seen += 1
            try:
                entries = list(os.scandir(folder))
            except OSError:
                continue
            for entry in entries:
                path = folder / entry.name
                if path.suffix in FORMATS and not path.is_dir():
                    yield path.relative_to(self.folder).as_posix()
                elif path.is_dir():
                    real = path.resolve()
                    if real.is_relative_to(self.folder) and real not in above:
                        waiting.append((path, (*above, real)))

    def _looked(self, name: str, path: Path, stamp: _Stamp) -> _Look:
        known = self._looked_at.get(name)
        if known is not None and known.stamp == stamp:
            return known
        try:
            header = read_header(path, name)
        except InvalidModelError as error:
            logger.warning("a model is not listed: %s", error.message)
            return _Look(stamp, is_model=False)
        return _Look(stamp, is_model=True, gguf=header.gguf)

    def describe(self, name: str) -> ModelInfo:
        """The tensors of a file, with their digests. Reads the whole file the first time. Blocks.

        Raises InvalidArgumentError for a name that leads out of the folder, and InvalidModelError
        for a file that is missing or malformed.
        """
        path = self._path(name)
        with self._reading:
            known = self._known.get(name)
            if known is None or known.stamp != _stamp(path, name):
                known = self._describe(name, path)
            return self._with_metadata(known, path)

    def _with_metadata(self, known: _Known, path: Path) -> ModelInfo:
        """The model with its metadata. Raises InvalidModelError."""
        info, count = known.info, known.metadata_bytes
        if not count:
            return info
        try:
            with path.open("rb") as file:
                header = file.read(count)
        except OSError as error:
            raise InvalidModelError(f"cannot read the model {info.name}: {error.strerror}") from None
        if len(header) != count or _stamp(path, info.name) != known.stamp:
            raise InvalidModelError(f"{info.name} changed while it was read", advice="try again")
        return replace(info, header=header, size_bytes=known.stamp.size_bytes)

    def _describe(self, name: str, path: Path) -> _Known:
        before = _stamp(path, name)
        header = read_header(path, name)
        extents = header.extents
        with path.open("rb", buffering=0) as file:
            found = {one.name: _digest(file.fileno(), one, name) for one in extents}
        if _stamp(path, name) != before:
            raise InvalidModelError(f"{name} changed while it was read", advice="try again")
        tensors = tuple(ModelTensor(one.name, one.type, found[one.name]) for one in extents)
        info = ModelInfo(name, tensors, header.left_out)
        with self._lock:
            self._places = {key: place for key, place in self._places.items() if place[0] != name}
            self._places.update((found[one.name], (name, one)) for one in extents)
            known = self._known[name] = _Known(before, info, header.metadata_bytes)
        return known

    def _path(self, name: str) -> Path:
        """The path of a model. Raises InvalidArgumentError, InvalidModelError."""
        parts = Path(name).parts
        is_plain = 0 < len(name) <= MAX_NAME and name.isprintable() and "\\" not in name
        if not is_plain or name.startswith("/") or not parts or ".." in parts:
            raise InvalidArgumentError(
                f"{name!r:.100} is not a path in the models' folder", advice="use a name from the listing"
            )
        if Path(name).suffix not in FORMATS:
            raise InvalidArgumentError(
                f"{name!r:.100} is not a model", advice=f"names of models end in {' or '.join(FORMATS)}"
            )
        return self._inside(name)

    def _inside(self, name: str) -> Path:
        missing = InvalidModelError(
            f"the server has no model {name!r:.100}", advice="list the models that it has"
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
        """True if a file that was described has a tensor with these bytes."""
        with self._lock:
            return digest in self._places

    def open(self, digest: bytes) -> FileSource | None:
        """Open the bytes of a tensor. None if no file has them. Raises InvalidModelError if its
        file is gone."""
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
        return FileSource(
            number, extent.type.nbytes, lambda reason: self._reject(name, reason), extent.offset_bytes
        )

    def _reject(self, name: str, reason: str) -> None:
        with self._lock:
            self._known.pop(name, None)
            self._places = {key: place for key, place in self._places.items() if place[0] != name}
        raise InvalidModelError(
            f"the model {name} has changed since it was listed: {reason}",
            advice="list it and rebuild the graph",
        )


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
