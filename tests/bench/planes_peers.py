"""The peers and limits of the data plane's figures, and how transfers are measured in turn."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from figures import shared
from peer_lines import Bytes
from peer_process import PEER_PYTHON, PEERS, PeerProcess, client_and_server

import heliograph as hg

MIB = 2**20
#: Bytes by the name that a figure has of them.
SIZES = {"64MiB": 64 * MIB, "1GiB": 1024 * MIB}
#: Rounds in which everybody is measured, and runs in each, by bytes.
ROUNDS = {64 * MIB: (6, 2), 1024 * MIB: (3, 1)}
#: How large the pieces of a stream of raw bytes may be; the best is taken.
CHUNKS = [MIB // 2, MIB, 2 * MIB, 4 * MIB]
FLIGHT_CHUNK = 4 * MIB
CALIBRATION = (64 * MIB, 3)
#: With these glibc keeps the memory of large blocks instead of giving it back to the kernel each time.
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}

#: Seconds of each run: of a direction ("upload" or "download"), bytes, runs.
Measure = Callable[[str, int, int], list[float]]


def ggml_rpc_there() -> bool:
    """Whether ggml's RPC library is built; says how to get it if not."""
    if (PEERS / "ggml-rpc" / "llama_cpp" / "lib" / "libggml-rpc.so").exists():
        return True
    print(
        "  no ggml-rpc to compare with: `make peers` builds it, with g++, in about 8 minutes", file=sys.stderr
    )
    return False


class Ours:
    """One session's tensor as a transport for an array."""

    def __init__(self, session: hg.Session) -> None:
        self._session = session
        self.tensor = session.empty((0,), "u8")

    def prepare(self, nbytes: int) -> None:
        self.tensor.free()
        self.tensor = self._session.empty((nbytes,), "u8")

    def upload(self, array: Bytes) -> None:
        """Until the device has it."""
        self.tensor.set(array)
        self._session.synchronize()

    def download(self, array: Bytes) -> None:
        self.tensor.get(out=array)


class Copying:
    """The limit in one process: a copy between warm arrays."""

    def prepare(self, nbytes: int) -> None:
        self._other = np.ones(nbytes, np.uint8)

    def upload(self, array: Bytes) -> None:
        np.copyto(self._other, array)

    def download(self, array: Bytes) -> None:
        np.copyto(array, self._other)


@dataclass(frozen=True)
class Stream:
    """The best stream of raw bytes: of which server, in which pieces."""

    client: PeerProcess
    server: str
    chunk: int

    @property
    def name(self) -> str:
        return f"grpcio stream of raw bytes ({self.server} server, {self.chunk // 1024} KiB)"

    def __call__(self, direction: str, nbytes: int, runs: int) -> list[float]:
        return self.client.seconds(direction, nbytes, runs, self.chunk)


@contextmanager
def raw_stream(direction: str) -> Iterator[Stream]:
    """The fastest of two servers and several sizes of pieces, found by trying."""
    with client_and_server("peer_grpc.py", "aio") as aio, client_and_server("peer_grpc.py", "sync") as sync:
        tried = [
            Stream(client, name, chunk) for name, client in (("aio", aio), ("sync", sync)) for chunk in CHUNKS
        ]
        best = min(tried, key=lambda stream: statistics.median(stream(direction, *CALIBRATION)))
        (sync if best.client is aio else aio).close()
        yield best


def in_turn(direction: str, nbytes: int, parties: Mapping[str, Measure]) -> dict[str, float]:
    """Median seconds of each party, all measured in every round."""
    rounds, runs = ROUNDS[nbytes]
    seconds: dict[str, list[float]] = {name: [] for name in parties}
    for _ in range(shared(rounds)):
        for name, measure in parties.items():
            seconds[name] += measure(direction, nbytes, runs)
    return {name: statistics.median(found) for name, found in seconds.items()}


def beside(direction: str, nbytes: int) -> str:
    """What others reach that no bar is set by, each by itself since all of them keep memory: for a note."""
    runs = 2 * ROUNDS[nbytes][1]
    others: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
        "Arrow Flight": ("peer_flight.py", {"python": PEER_PYTHON}, (FLIGHT_CHUNK,)),
        "socket": ("peer_socket.py", {}, ()),
    }
    if ggml_rpc_there():
        others["ggml-rpc with its allocator tuned"] = ("peer_rpc.py", {"environment": TUNED}, ())
    found = []
    for name, (script, how, options) in others.items():
        with client_and_server(script, **how) as client:
            seconds = statistics.median(client.seconds(direction, nbytes, runs, *options))
        found.append(f"{name} {rate(nbytes, seconds)}")
    return ", ".join(found)


def rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def ms_a_gb(nbytes: int, seconds: float) -> float:
    return seconds / nbytes * 1e12
