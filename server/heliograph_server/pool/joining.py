"""Whether a daemon may be a member, and when it is tried again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from heliograph_proto.devices import BufferTypeInfo, DeviceChange, DeviceInfo
from heliograph_proto.errors import ConfigurationError, ProtocolError
from heliograph_proto.sessions import SessionInfo
from heliograph_server.pool.discovery import first_twice
from heliograph_server.pool.remote.answers import OLD, check_memory, lie

#: The most devices of one member: each has a stream of the session.
MAX_DEVICES = 60
#: Kinds of memory of a device, and named facts.
MAX_KINDS = 64
MAX_FACTS = 256
#: Daemons behind a member that is a head.
MAX_DAEMONS = 10_000
#: The longest name of a device, in characters; those of heads have the names of members in them.
MAX_NAME = 256
INCARNATION_BYTES = 16

#: How long a member that does not answer is left alone, at first and at most.
FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 2.0


def pause_seconds(attempt: int, chance: float) -> float:
    """How long to wait after a number of attempts in a row that failed, from 0; `chance`, 0 to 1, keeps
    heads that lost a member together from coming back together."""
    longest = min(LAST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempt, 16))
    return longest * (0.5 + chance / 2)


def check_lives(info: SessionInfo, own: bytes, others: Mapping[str, Collection[bytes]]) -> None:
    """Whether a daemon can be a member of the head `own`, beside others: by name, the incarnations of the
    daemons behind each. Raises ConfigurationError, ProtocolError."""
    if len(info.incarnation) != INCARNATION_BYTES:
        raise ProtocolError("it does not say which life of the daemon it is", advice=OLD)
    _check_daemon_count(info.daemons)
    if info.incarnation == own:
        raise ConfigurationError("it is this head itself", advice="take it out of its own list of members")
    check_daemons(info.daemons, own)
    behind = {info.incarnation, *info.daemons}
    for name, theirs in others.items():
        if behind & set(theirs):
            raise ConfigurationError(
                f"it is a daemon that is a member already, {name}, or has one behind it",
                advice="name each daemon once",
            )


def check_daemons(daemons: Iterable[bytes], own: bytes) -> None:
    """Raises ConfigurationError for a loop of heads."""
    if own in daemons:
        raise ConfigurationError(
            "it is a head that has this one among its members", advice="take one out of the other's list"
        )


def check_change(told: DeviceChange, names: Collection[str]) -> None:
    """Whether devices of a member may come to those of these names, and go. Raises ProtocolError."""
    check_devices(told.appeared)
    _check_daemon_count(told.daemons)
    left = {*names, *(one.name for one in told.appeared)} - {*told.lost}
    if len(left) > MAX_DEVICES:
        raise lie(f"it has {len(left)} devices now; {MAX_DEVICES} are the most")


def _check_daemon_count(daemons: Collection[bytes]) -> None:
    if len(daemons) > MAX_DAEMONS or any(len(one) != INCARNATION_BYTES for one in daemons):
        raise ProtocolError(f"it tells of {len(daemons)} daemons behind it", advice=OLD)


def check_devices(devices: Collection[DeviceInfo]) -> None:
    """Whether what a daemon says of its devices can be. Raises ProtocolError."""
    if len(devices) > MAX_DEVICES:
        raise lie(f"it lists {len(devices)} devices; {MAX_DEVICES} are the most")
    names = [device.name for device in devices]
    for name in names:
        _check_name(name, "a device")
    if (twice := first_twice(names)) is not None:
        raise lie(f"two devices are named {twice!r}")
    for device in devices:
        check_memory(device.name, device.memory)
        if not device.buffer_types:
            raise lie(f"device {device.name} has no memory")
        facts = len(device.features) + len(device.missing)
        if len(device.buffer_types) > MAX_KINDS or facts > MAX_FACTS:
            raise lie(f"device {device.name} has {len(device.buffer_types)} kinds of memory, {facts} facts")
        for kind in device.buffer_types:
            _check_buffer_type(device.name, kind)


def _check_name(name: str, what: str) -> None:
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise lie(f"{what} is named {name[:64]!r}")


def _check_buffer_type(device: str, kind: BufferTypeInfo) -> None:
    _check_name(kind.name, f"memory of device {device}")
    alignment = kind.alignment_bytes
    if alignment < 1 or alignment & (alignment - 1) or alignment > 2**30 or kind.max_size_bytes < 1:
        raise lie(
            f"buffer type {kind.name[:64]!r} of device {device} is aligned to {alignment} bytes and has "
            f"{kind.max_size_bytes:,} at most"
        )
