"""`heliograph cache`: the weights that daemons keep on disk (`serve --cache`). They may be
running."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from heliograph_proto.errors import ConfigurationError, InvalidArgumentError
from heliograph_proto.types import size_text
from heliograph_server.weights.disk_cache import Blob, DiskCache

#: The environment variable that names the folder.
CACHE_VARIABLE = "HELIOGRAPH_CACHE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions ls, rm and verify."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the contents, most recently used first")
    removing = actions.add_parser("rm", help="remove contents")
    removing.add_argument("digests", nargs="*", metavar="DIGEST", help="digest or a prefix of it, as in ls")
    removing.add_argument("--all", action="store_true", help="remove all contents")
    verifying = actions.add_parser("verify", help="check every content, and remove broken ones")
    for action in (listing, removing, verifying):
        action.add_argument(
            "--cache",
            metavar="DIR",
            default=os.environ.get(CACHE_VARIABLE),
            help=f"folder of `heliograph serve --cache` (default: ${CACHE_VARIABLE})",
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Returns 1 if `verify` finds a broken content.

    Raises ConfigurationError, InvalidArgumentError.
    """
    cache = _open(arguments.cache)
    if arguments.action == "ls":
        return _list(cache)
    if arguments.action == "rm":
        return _remove(cache, arguments.digests, arguments.all)
    return _verify(cache)


def _open(folder: str | None) -> DiskCache:
    if not folder:
        raise ConfigurationError("no cache is given", advice=f"give --cache DIR, or set ${CACHE_VARIABLE}")
    if not Path(folder, "blobs").is_dir():
        raise ConfigurationError(
            f"{folder} is not a cache", advice="give the folder of `heliograph serve --cache`"
        )
    return DiskCache(Path(folder), 0)


def _list(cache: DiskCache) -> int:
    now = time.time()
    blobs = cache.blobs()
    for blob in blobs:
        print(f"{blob.digest.hex()}  {blob.size_bytes:>15,}  {_ago(now - blob.used_at)}")
    total = sum(blob.size_bytes for blob in blobs)
    print(f"{len(blobs):,} contents, {size_text(total)}", file=sys.stderr)
    return 0


def _ago(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(0, seconds):.0f} s ago"


def _remove(cache: DiskCache, digests: list[str], everything: bool) -> int:
    if everything == bool(digests):
        raise InvalidArgumentError("nothing to remove is given", advice="give digests, or only --all")
    blobs = cache.blobs()
    chosen = blobs if everything else [_named(blobs, one) for one in digests]
    try:
        removed = sum(cache.remove(blob.digest) for blob in chosen)
    except OSError as error:
        raise ConfigurationError(f"cannot remove from {cache.folder}: {error.strerror}") from None
    print(f"{removed:,} contents removed", file=sys.stderr)
    return 0


def _named(blobs: list[Blob], beginning: str) -> Blob:
    """The only content whose digest has this prefix. Raises InvalidArgumentError."""
    found = [blob for blob in blobs if blob.digest.hex().startswith(beginning.lower())]
    if len(found) != 1 or not beginning:
        what = "no content" if not found else f"{len(found)} contents"
        raise InvalidArgumentError(
            f"{what} of the cache begin with {beginning!r:.80}", advice="`heliograph cache ls` lists them"
        )
    return found[0]


def _verify(cache: DiskCache) -> int:
    blobs = cache.blobs()
    # A content that is gone meanwhile is not broken.
    broken = [blob for blob in blobs if not cache.is_whole(blob.digest) and cache.remove(blob.digest)]
    for blob in broken:
        print(f"{blob.digest.hex()}  broken, and removed")
    print(f"{len(blobs):,} contents, {len(broken):,} broken", file=sys.stderr)
    return 1 if broken else 0
