"""What `heliograph doctor` measures where all is well, and a fixture with which it measures briefly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heliograph.cli.doctor import growth, machine
from heliograph.cli.doctor.measurements import (
    Copies,
    DeviceSeen,
    Direction,
    PathMeasurement,
    Rate,
    RoundTrip,
    SideFacts,
    TransportKind,
    TransportMeasurements,
)

MIB = 2**20
TUNED = "MALLOC_MMAP_THRESHOLD_=33554432"
ONCE = Copies(1.0, 1.0)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the time for each rate; a module takes the fixture by giving it a name of its own."""
    for module, name in ((growth, "DIRECTION_SECONDS"), (machine, "SECONDS")):
        monkeypatch.setattr(module, name, getattr(module, name) / 5)


def transport(kind: TransportKind, bytes_per_second: float, copies: Copies = ONCE) -> PathMeasurement:
    """A transport with one rate both ways."""
    way = Direction(Rate(64 * MIB, 64 * MIB / bytes_per_second, 5), copies)
    return PathMeasurement(kind, way, way)


DEVICE = DeviceSeen(
    "cpu0",
    "cpu",
    "cpu",
    "a processor",
    8 * 10**9,
    16 * 10**9,
    {"native_kernels": "numba 0.62", "blas": "openblas"},
)
#: One host, all well.
WELL = TransportMeasurements(
    url="grpc://127.0.0.1:7070",
    in_process=False,
    local_address=True,
    client=SideFacts("heliograph/0.1.0", {"rich": "13.0", "allocator": "glibc 2.36"}),
    server=SideFacts(
        "heliograph/0.1.0", {"event_loop": "uvloop", "allocator": "glibc 2.36", "shared_memory": "on"}
    ),
    connect_seconds=0.01,
    empty=RoundTrip(300e-6, 400e-6, 200),
    run=RoundTrip(800e-6, 900e-6, 200),
    transports=(
        transport(TransportKind.SHARED, 3e9),
        transport(TransportKind.GRPC, 900e6),
        transport(TransportKind.MAPPED, 7e9),
    ),
    chunk_bytes=MIB,
    shared_memory=True,
    why_not_shared="",
    why_no_command_socket="",
    version=1,
    features=("blake3", "statistics"),
    missing_features=(),
    devices=(DEVICE,),
)
#: Another host, by a fast network.
FAR = replace(
    WELL,
    url="grpc://box:7070",
    local_address=False,
    client=SideFacts(
        "heliograph/0.1.0", {"rich": "13.0", "allocator": "glibc 2.36", "allocator_settings": TUNED}
    ),
    server=SideFacts("heliograph/0.1.0", {"event_loop": "uvloop", "allocator": "jemalloc"}),
    transports=(transport(TransportKind.GRPC, 900e6),),
    shared_memory=False,
    why_not_shared="the server offers none",
    why_no_command_socket="the server offers none",
)
