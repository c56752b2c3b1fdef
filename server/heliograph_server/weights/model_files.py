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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from heliograph_proto.digests import hasher
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError, InvalidModelError
from heliograph_proto.gguf import MAX_PARTS, part_name
from heliograph_proto.models import GgufSummary, ModelFile, ModelInfo, ModelPart, ModelTensor
from heliograph_server.weights.disk_cache import FileSource, read_at
from heliograph_server.weights.model_formats import FORMATS, Extent, HeaderFile, read_model, summary

logger = logging.getLogger(__name__)

#: The size of one read: a piece is hashed while it is in a core's cache.
PIECE_BYTES = 256 * 2**10
#: Threads that hash the tensors of a file, each one tensor.
HASH_THREADS = 4
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
    """A model whose tensors were hashed."""

    info: ModelInfo
    #: Its metadata is read again each time: it may be large.
    files: tuple[HeaderFile, ...]
    stamps: tuple[_Stamp, ...]


@dataclass(frozen=True, slots=True)
class _Look:
    """A model as a listing found it."""

    stamps: tuple[_Stamp, ...]
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
        #: By digest: the model, and the extent.
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

        A GGUF model that is split has the name of its first part. A model whose header is malformed
        is left out, and logged once. Blocks.
        """
        found: dict[str, _Look] = {}
        for name in sorted(self._files())[:MAX_FILES]:
            if self._first(name) != name:
                continue
            try:
                found[name] = self._looked(name)
            except (InvalidArgumentError, InvalidModelError) as error:
                logger.debug("%s is not listed: %s", name, error.message)
        self._looked_at = found
        return tuple(
            ModelFile(name, sum(one.size_bytes for one in look.stamps), look.gguf)
            for name, look in found.items()
            if look.is_model
        )

    def _first(self, name: str) -> str:
        """Return the first part of a split model that a name is a part of, if it is there; else the
        name."""
        part = part_name(name)
        if part is None or not part.number or not (self.folder / part.of(0)).is_file():
            return name
        return part.of(0)

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

    def _looked(self, name: str) -> _Look:
        self._path(name)
        stamps = self._around(name)
        known = self._looked_at.get(name)
        if known is not None and known.stamps == stamps:
            return known
        try:
            header = read_model(name, self._path)
        except InvalidModelError as error:
            logger.warning("a model is not listed: %s", error.message)
            return _Look(stamps, is_model=False)
        about = summary(header.gguf) if header.gguf is not None else None
        return _Look(stamps, is_model=True, gguf=about)

    def _around(self, name: str) -> tuple[_Stamp, ...]:
        """The stamps of a model's files: of all parts that are there."""
        part = part_name(name)
        names = [name] if part is None else map(part.of, range(min(part.total, MAX_PARTS)))
        there = (one for one in names if one == name or (self.folder / one).is_file())
        return tuple(_stamp(self.folder / one, one) for one in there)

    def _stamps(self, files: Sequence[HeaderFile]) -> tuple[_Stamp, ...]:
        return tuple(_stamp(self._path(one.name), one.name) for one in files)

    def describe(self, name: str) -> ModelInfo:
        """The tensors of a model, with their digests; of one that is split, any part may be named.
        Reads all of its bytes the first time. Blocks.

        Raises InvalidArgumentError for a name that leads out of the folder, and InvalidModelError
        for a file that is missing or malformed.
        """
        self._path(name)
        name = self._first(name)
        with self._reading:
            known = self._known.get(name)
            if known is None or known.stamps != self._stamps(known.files):
                known = self._describe(name)
            return self._with_metadata(known)

    def _with_metadata(self, known: _Known) -> ModelInfo:
        """The model with its metadata. Raises InvalidModelError."""
        parts = []
        for one, stamp in zip(known.files, known.stamps, strict=True):
            if one.metadata_bytes:
                header = self._metadata(one)
                parts.append(ModelPart(one.name, header, stamp.size_bytes))
        if parts and self._stamps(known.files) != known.stamps:
            raise _changed(known.info.name)
        return replace(known.info, parts=tuple(parts))

    def _metadata(self, part: HeaderFile) -> bytes:
        try:
            with self._path(part.name).open("rb") as file:
                header = file.read(part.metadata_bytes)
        except OSError as error:
            raise InvalidModelError(f"cannot read the model {part.name}: {error.strerror}") from None
        if len(header) != part.metadata_bytes:
            raise _changed(part.name)
        return header

    def _describe(self, name: str) -> _Known:
        stamps, found = dict[str, _Stamp](), dict[str, bytes]()

        def path_of(one: str) -> Path:
            path = self._path(one)
            stamps[one] = _stamp(path, one)
            return path

        header = read_model(name, path_of)
        before = tuple(stamps[one.name] for one in header.files)
        for part in header.files:
            mine = [one for one in header.extents if one.file == part.name]
            threads = ThreadPoolExecutor(min(HASH_THREADS, len(mine) or 1), "heliograph-hash")
            with self._path(part.name).open("rb", buffering=0) as file, threads:
                digests = threads.map(partial(_digest, file.fileno()), mine)
                found |= {one.name: digest for one, digest in zip(mine, digests, strict=True)}
        if self._stamps(header.files) != before:
            raise _changed(name)
        tensors = tuple(ModelTensor(one.name, one.type, found[one.name]) for one in header.extents)
        with self._lock:
            self._places = {key: place for key, place in self._places.items() if place[0] != name}
            self._places.update((found[one.name], (name, one)) for one in header.extents)
            info = ModelInfo(name, tensors, header.left_out)
            known = self._known[name] = _Known(info, header.files, before)
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
        try:
            number = os.open(self._path(extent.file), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise InvalidModelError(f"cannot read the model {extent.file}: {error.strerror}") from None
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


def _changed(name: str) -> InvalidModelError:
    return InvalidModelError(f"{name} changed while it was read", advice="try again")


def _digest(file: int, extent: Extent) -> bytes:
    taken, space = hasher(), memoryview(bytearray(PIECE_BYTES))
    offset, end = extent.offset_bytes, extent.offset_bytes + extent.type.nbytes
    try:
        while count := read_at(file, offset, space[: end - offset]):
            taken.update(space[:count])
            offset += count
    except OSError as error:
        raise InvalidModelError(f"cannot read the model {extent.file}: {error.strerror}") from None
    digest: bytes = taken.digest()
    return digest


def _stamp(path: Path, name: str) -> _Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidModelError(f"cannot read the model {name}: {error.strerror}") from None
    return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
