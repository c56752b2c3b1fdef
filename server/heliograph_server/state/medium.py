"""The medium of a store, on which its files lie: a folder, or the memory of another daemon.

The store decides what is written, in which order, and what may be removed; a medium keeps files
under relative paths, each whole or not there. As a file system does, it raises OSError:
FileNotFoundError for a file that is gone, and the number ENOSPC where it is full.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from heliograph_proto.errors import SnapshotFailedError
from heliograph_server.state.files import ReadSpace

#: The numbers of errors that say that a medium is full.
FULL = (errno.ENOSPC, errno.EDQUOT)

#: Makes a call for each path: one after the other, or on threads.
Each: TypeAlias = "Callable[[Callable[[str], None], Iterable[str]], Iterator[None]]"
#: Reads a block of a file: its bytes, and the space that they are in. Raises OSError.
ReadBlock: TypeAlias = "Callable[[ReadSpace], tuple[memoryview, memoryview]]"


class MediumLostError(SnapshotFailedError):
    """A medium cannot be read now. Its files may be there all the same."""


class Medium(Protocol):
    """Files under relative paths. Thread-safe. Every wait has a bound."""

    @property
    def shown(self) -> str:
        """The name in messages, such as "the state folder"."""

    @property
    def where(self) -> str:
        """The same name with its place."""

    @property
    def losses(self) -> int:
        """The number of times that everything was lost since the store was opened."""

    @property
    def is_taken_over(self) -> bool:
        """True once another daemon has it."""

    @property
    def is_reachable(self) -> bool:
        """True if it answers."""

    def check(self) -> None:
        """Raise OSError if nothing can be written now."""

    def write(self, pieces: Iterable[memoryview], size_bytes: int) -> str:
        """Write a new file and return its path, a part's. Nothing is left of one that fails.

        Raises OSError, and the errors of `pieces`."""

    def name(self, parts: Mapping[str, str]) -> None:
        """Give parts their paths, which need not be flushed yet. Raises OSError."""

    def flush(self, paths: Iterable[str], each: Each) -> None:
        """Flush paths that were given, by any thread, if that is left. Raises OSError."""

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files. Those that are gone are ignored, and what cannot be removed is logged."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all files in it, likewise."""

    def size_of(self, path: str) -> int | None:
        """The size of a file in bytes; None if it is not there."""

    def paths(self, folder: str) -> Sequence[str]:
        """The paths of all files in a folder and below, sorted."""

    def blocks(self, path: str) -> Iterator[ReadBlock]:
        """Return functions that read a file, a block each, for any threads. Raises OSError."""

    def read(self, path: str, most_bytes: int) -> bytes:
        """Read a file up to so many bytes. Raises OSError, MediumLostError."""

    def size_bytes(self) -> int:
        """The bytes of all files."""

    def advice(self, error: OSError) -> str:
        """Return the advice for an error of writing."""

    def close(self) -> None:
        """Let another daemon have it. Idempotent."""
