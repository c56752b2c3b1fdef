"""The rates that are usual for each kind of transport, as parts of this machine's own rates. Pure.

| transport | the machine's own rate | usual part, at least |
| -- | -- | -- |
| direct connections; gRPC, TCP on this host | TCP on the loopback interface | a tenth |
| gRPC with TLS on this host | TCP on the loopback interface | a fortieth |
| gRPC, unix socket | unix socket | a twentieth |
| shared memory | copy in memory | a fortieth |
| mapped tensor | copy in memory | a tenth |
| this process | copy in memory | a fortieth |

The parts are a quarter or less of those of machines where all is well, so that other work on the
machine alone does not pass them. Networks have line rates instead, see `findings.NETWORKS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from heliograph.cli.common.text import usable
from heliograph.cli.doctor.measurements import TransportKind, TransportMeasurements
from heliograph_proto.addresses import parse_address
from heliograph_proto.errors import InvalidArgumentError

#: The usual part of the machine's own rate, by the way of the bytes.
PARTS = {
    "tcp": 0.1,
    "tls": 0.025,
    "unix": 0.05,
    TransportKind.SHARED: 0.025,
    TransportKind.MAPPED: 0.1,
    TransportKind.LOCAL: 0.025,
}


@dataclass(frozen=True, slots=True)
class ExpectedRate:
    """The least usual rate of a transport, in bytes a second."""

    least: float
    #: The machine's own rate, and how it carries bytes.
    raw: float
    raw_way: str


def expected_rate(found: TransportMeasurements, kind: TransportKind) -> ExpectedRate | None:
    """Return the least usual rate; None where the machine's own rate is unknown or says nothing."""
    if found.machine is None:
        return None
    if kind in (TransportKind.GRPC, TransportKind.DIRECT):
        way = _way(found.url)
        raw = found.machine.unix if way == "unix" else found.machine.tcp
        words = "a unix socket" if way == "unix" else "TCP on the loopback interface"
        part = PARTS[way]
    else:
        raw, words, part = found.machine.copy, "a copy in memory", PARTS[kind]
    return ExpectedRate(part * raw, raw, words) if usable(raw) else None


def _way(url: str) -> str:
    try:
        address = parse_address(url)
    except InvalidArgumentError:
        return "tcp"
    return "unix" if address.scheme == "unix" else "tls" if address.is_tls else "tcp"
