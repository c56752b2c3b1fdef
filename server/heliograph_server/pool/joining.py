"""Checks of a daemon that becomes a member, and the pauses between attempts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from heliograph_proto.devices import BufferTypeInfo, DeviceChange, DeviceInfo
from heliograph_proto.errors import ConfigurationError, ProtocolError
from heliograph_proto.sessions import SessionInfo
from heliograph_server.pool.discovery import first_twice
from heliograph_server.pool.remote.answers import OLD, check_memory, lie

#: The most devices of one member. Each has a stream of the session.
MAX_DEVICES = 60
#: The most buffer types of a device, and named facts.
MAX_KINDS = 64
MAX_FACTS = 256
#: The most daemons behind a member that is a head.
MAX_DAEMONS = 10_000
#: The longest name of a device, in characters. Names of a head's devices include those of its
#: members.
MAX_NAME = 256
INCARNATION_BYTES = 16

#: The first and the longest pause after a member did not answer.
FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 2.0


def pause_seconds(attempt: int, chance: float) -> float:
    """The pause after a number of consecutive failed attempts, from 0.

    `chance`, 0 to 1, is random jitter: heads that lost a member together do not return together.
    """
    longest = min(LAST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempt, 16))
    return longest * (0.5 + chance / 2)


def check_lives(info: SessionInfo, own: bytes, others: Mapping[str, Collection[bytes]]) -> None:
    """Check that a daemon can be a member of the head `own`.

    `others` has the incarnations of the daemons behind each other member, by name. Raises
    ConfigurationError, ProtocolError.
    """
    if len(info.incarnation) != INCARNATION_BYTES:
        raise ProtocolError("it does not report its incarnation", advice=OLD)
    _check_daemon_count(info.daemons)
    if info.incarnation == own:
        raise ConfigurationError("it is this head itself", advice="remove it from its own list of members")
    check_daemons(info.daemons, own)
    behind = {info.incarnation, *info.daemons}
    for name, theirs in others.items():
        if behind & set(theirs):
            raise ConfigurationError(
                f"it is a member already, {name}, or has one behind it",
                advice="name each daemon once",
            )


def check_daemons(daemons: Iterable[bytes], own: bytes) -> None:
    """Raise ConfigurationError for a loop of heads."""
    if own in daemons:
        raise ConfigurationError(
            "it is a head that has this one among its members", advice="remove one from the other's list"
        )


def check_change(change: DeviceChange, names: Collection[str]) -> None:
    """Check a change of a member's devices, which have these names before. Raises ProtocolError."""
    check_devices(change.appeared)
    _check_daemon_count(change.daemons)
    left = {*names, *(one.name for one in change.appeared)} - {*change.lost}
    if len(left) > MAX_DEVICES:
        raise lie(f"it has {len(left)} devices now; at most {MAX_DEVICES} are possible")


def _check_daemon_count(daemons: Collection[bytes]) -> None:
    if len(daemons) > MAX_DAEMONS or any(len(one) != INCARNATION_BYTES for one in daemons):
        raise ProtocolError(f"it reports {len(daemons)} daemons behind it", advice=OLD)


def check_devices(devices: Collection[DeviceInfo]) -> None:
    """Check a daemon's description of its devices. Raises ProtocolError."""
    if len(devices) > MAX_DEVICES:
        raise lie(f"it lists {len(devices)} devices; at most {MAX_DEVICES} are possible")
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
