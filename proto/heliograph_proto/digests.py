"""BLAKE3 digests, which name contents on both sides and on disk.

BLAKE3 is a tree hash: several threads can hash one content, and the digest does not depend on
their number.
"""

from __future__ import annotations

from typing import Any

from blake3 import blake3

#: Bytes of a digest.
DIGEST_BYTES = 32
#: Below this size, starting threads costs more than it saves: about a millisecond of hashing.
_SHARED_BYTES = 4 * 2**20


def hasher(threads: int = 1) -> Any:
    """Return a hasher with `update(bytes)` and `digest()`, for a content in pieces.

    Threads are started for each `update`.
    """
    return blake3(max_threads=threads)


def digest_of(data: Any, threads: int = 1) -> bytes:
    """Return the digest of a content: any contiguous bytes.

    With several `threads`, the threads are started for this call and end with it: a kept pool would
    be missing in the child of a fork, and the child would hang.
    """
    shared = threads if memoryview(data).nbytes >= _SHARED_BYTES else 1
    return blake3(data, max_threads=shared).digest()


def moved_secret(secret: bytes, proof: bytes) -> bytes:
    """Return the secret of a session at the daemon to which it moved; see Moved in error.proto."""
    return digest_of(b"moved" + secret + proof)[:16]
