"""Memory that another process of the same host may map: a file without a name whose size cannot change.

Linux alone has it (memfd_create(2)). Nobody can find it who was not handed its descriptor, and when the
last process that has it ends, however it ends, the memory is free. Its size is sealed, so that nobody can
take pages away under somebody who reads them.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import numpy as np

from heliograph_proto.errors import OutOfMemoryError, UnsupportedError


def why_no_sealed() -> str:
    """Why this system has no such memory; empty if it has."""
    return "" if hasattr(os, "memfd_create") else f"{sys.platform} has no memfd_create"


class SealedMemory:
    """Bytes, all zero at first; at the beginning of a page. `close` gives back what nobody has mapped."""

    def __init__(self, size_bytes: int) -> None:
        """Raises UnsupportedError, OutOfMemoryError."""
        if why := why_no_sealed():
            raise UnsupportedError(f"no memory that other processes can map: {why}")
        self.size_bytes = size_bytes
        import fcntl

        # A mapping of nothing is an error.
        mapped_bytes = max(size_bytes, 1)
        try:
            self._descriptor = os.memfd_create("heliograph", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self._descriptor, mapped_bytes)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
                # Its pages are there as long as somebody has an array over them.
                whole = np.frombuffer(mmap.mmap(self._descriptor, mapped_bytes), np.uint8)
            except BaseException:
                os.close(self._descriptor)
                raise
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfMemoryError(
                f"the host refused {size_bytes:,} bytes of memory that can be shared: {error}"
            ) from None
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = whole[:size_bytes]
        self._is_open = True

    def __repr__(self) -> str:
        return f"<SealedMemory {self.size_bytes:,} bytes{'' if self._is_open else ', closed'}>"

    def descriptor(self) -> int:
        """A new descriptor of it, which the caller closes. Raises OutOfMemoryError if none is left."""
        try:
            return os.dup(self._descriptor)
        except OSError as error:
            raise OutOfMemoryError(f"the memory cannot be shared: {error.strerror}") from None

    def close(self) -> None:
        """Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)
