"""The sessions that a head has with its members, kept over its restart.

A head that comes back takes up what its members still hold for it. It proves that it is the same
one by the secrets of these sessions, which lie in the state folder with everything else.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass

from heliograph_proto.digests import digest_of
from heliograph_proto.errors import SnapshotFailedError
from heliograph_server.state.store import StateStore

logger = logging.getLogger(__name__)

#: The version of the format.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class KeptLink:
    """A session with one incarnation of a member."""

    incarnation: bytes
    secret: bytes


class KeptLinks:
    """The links to members, by the members' names, as of now. Thread-safe."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._now: dict[str, KeptLink] = {}
        #: Those of the head before.
        self.earlier = _read(store)

    def __repr__(self) -> str:
        return f"<KeptLinks to {len(self._now)} members>"

    def keep(self, name: str, incarnation: bytes, secret: bytes) -> None:
        """Keep the link to a member in place of an earlier one. A disk that fails is logged: the
        member is then not taken up."""
        with self._lock:
            self._now[name] = KeptLink(incarnation, secret)
            # Those that were not taken up yet stay, in case this head ends before.
            kept = {**self.earlier, **self._now}
            try:
                self._store.write_links(encode_links(kept))
            except SnapshotFailedError as error:
                logger.warning("the link to member %s is not kept: %s", name, error)


def encode_links(links: dict[str, KeptLink]) -> bytes:
    """Encode links, with their checksum."""
    members = {name: [one.incarnation.hex(), one.secret.hex()] for name, one in links.items()}
    body = json.dumps({"format": FORMAT, "members": members}, sort_keys=True).encode()
    return digest_of(body).hex().encode() + b"\n" + body


def decode_links(data: bytes) -> dict[str, KeptLink]:
    """Decode links. Raises SnapshotFailedError for damaged ones, and for those of a newer version."""
    checksum, _, body = data.partition(b"\n")
    if digest_of(body).hex().encode() != checksum:
        raise SnapshotFailedError("the links to members are damaged")
    try:
        found = json.loads(body)
        if found["format"] > FORMAT:
            raise SnapshotFailedError(
                f"the links to members have version {found['format']}; this daemon reads up to {FORMAT}"
            )
        return {name: KeptLink(*map(bytes.fromhex, one)) for name, one in found["members"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotFailedError(f"the links to members are damaged: {error}") from None


def _read(store: StateStore) -> dict[str, KeptLink]:
    try:
        data = store.read_links()
        return decode_links(data) if data else {}
    except SnapshotFailedError as error:
        logger.warning("%s: what members hold is restored from the folder", error)
        return {}
