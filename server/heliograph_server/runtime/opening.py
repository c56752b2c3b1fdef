"""Opening a host and its sessions: what is known of a session, and what is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from heliograph_backends.contract import Device
from heliograph_backends.registry import Registry
from heliograph_proto import MOVE, VERSION_MAX, VERSION_MIN, WATCH
from heliograph_proto.codec import packing
from heliograph_proto.errors import ConfigurationError, VersionMismatchError
from heliograph_proto.sessions import Limits
from heliograph_server.resources.principals import Principal
from heliograph_server.resources.quotas import Account
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.session.identity import SessionIdentity
from heliograph_server.weights.cache_writer import CacheWriter
from heliograph_server.weights.session_weights import SessionWeights
from heliograph_server.weights.store import ContentStore


@dataclass(frozen=True, slots=True)
class Opening:
    """The facts of a session that is being opened."""

    #: Names it; a secret.
    token: bytes = field(repr=False)
    client: str
    #: The name of its tenant's contents.
    tenant: bytes
    #: The features that were agreed on.
    agreed: Collection[str]
    principal: Principal
    lease_seconds: float = 0.0
    #: True if snapshots of it are taken.
    is_durable: bool = False
    #: True if an earlier daemon had it: its client has time from the end of its restore on.
    is_restored: bool = False
    #: The name of the contents that it takes over, if it has no tenant.
    contents: bytes = b""

    @property
    def may_move(self) -> bool:
        """True if it may be handed to another daemon."""
        return MOVE in self.agreed and self.lease_seconds > 0

    def identity(self, number: int, principal: Principal) -> SessionIdentity:
        """Return its identity under a number; `principal` has the quota of now."""
        encodings = packing.encodings_of(self.agreed)
        return SessionIdentity(
            number, printable(self.client), principal, WATCH in self.agreed, encodings, self.lease_seconds
        )

    def weights(
        self,
        devices: Callable[[], Sequence[Device]],
        room: MemoryReclaim,
        store: ContentStore,
        cache_writer: CacheWriter | None,
        account: Account,
    ) -> SessionWeights:
        """Return the contents of the session: none so far."""
        return SessionWeights(devices, room, store, self.tenant, cache_writer, account, self.contents)

    def attach_seconds(self, limits: Limits) -> float:
        """The time that the client of a restored session has to open the command stream."""
        return max(limits.attach_timeout_ms / 1e3, self.lease_seconds)


def common_version(versions: tuple[int, int]) -> int:
    """Return the highest version that both sides speak. Raises VersionMismatchError."""
    lowest, highest = versions
    if lowest > VERSION_MAX or highest < VERSION_MIN or lowest > highest:
        raise VersionMismatchError(
            f"the client speaks versions {lowest} to {highest}, this server {VERSION_MIN} to {VERSION_MAX}",
            advice="upgrade one side",
        )
    return min(highest, VERSION_MAX)


def printable(text: str, most_characters: int = 100) -> str:
    """A client's name, or another text of it, safe for a log."""
    return "".join(one if one.isprintable() else "?" for one in text[:most_characters])


def no_device(registry: Registry) -> ConfigurationError:
    """Return the error of a host without any device."""
    whys = "; ".join(f"{one.name}: {one.why}" for one in registry.backends if one.why)
    return ConfigurationError(f"there is no device ({whys or 'no backend was requested'})")
