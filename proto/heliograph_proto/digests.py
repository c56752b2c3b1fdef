"""What a content is named by: the BLAKE3 digest of its bytes, the same on both sides and on disk.

BLAKE3 is a tree, so that several threads may hash one content; the digest does not depend on how many.
"""

from __future__ import annotations

from typing import Any

from blake3 import blake3

#: Bytes of a digest.
DIGEST_BYTES = 32
#: Below this, starting threads costs more than they save: about a millisecond of hashing.
_SHARED_BYTES = 4 * 2**20


def hasher() -> Any:
    """Takes a content piece by piece: `update(bytes)`, `digest()`. One thread."""
    return blake3()


def digest_of(data: Any, threads: int = 1) -> bytes:
    """The digest of a content that is here as a whole: any contiguous bytes.

    With several `threads`, those are started for this content alone, and end with it: threads that were
    kept would be missing in the child of a fork, which would wait for them.
    """
    shared = threads if memoryview(data).nbytes >= _SHARED_BYTES else 1
    return blake3(data, max_threads=shared).digest()
