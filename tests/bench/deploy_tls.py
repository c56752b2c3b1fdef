"""What TLS costs: a daemon's grpcs:// beside its grpc://, over loopback, in turns.

Tensors of 64 MiB each way, and an empty command with its answer. Loopback is the worst case for TLS: nothing
else limits the bytes there.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from figures import Figure, paired_medians, seconds_of

import heliograph as hg
from heliograph.testing import running_daemon

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from certificates import Authority

MEBIBYTES = 64
#: At most 35 % of the bandwidth, and 15 % of a round trip, may go.
BULK_BAR, ROUND_TRIP_BAR = 1 / 0.65, 1.15
ROUNDS, TRIPS = 25, 40


@contextmanager
def two_transports() -> Iterator[tuple[hg.Session, hg.Session]]:
    """Sessions of one daemon: with TLS, and in the clear."""
    with TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        pair, port = authority.server(), _free_port()
        tls = f"grpcs://127.0.0.1:{port}"
        files = ("--tls-certificate", pair.certificate, "--tls-key", pair.key)
        with (
            running_daemon("--listen", tls, *files, "--device", "cpu:threads=1") as plain,
            hg.connect(tls, ca=authority.ca, shared_memory=False, direct=False, progress=None) as ours,
            hg.connect(plain, shared_memory=False, direct=False, progress=None) as theirs,
        ):
            yield ours, theirs


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def _timed(call: Callable[[], object]) -> Callable[[int], list[float]]:
    return lambda runs: seconds_of(call, runs, warmup=1)


def figures() -> Iterator[Figure]:
    """Milliseconds for a tensor, microseconds for a round trip; ours with TLS, the peer without."""
    note = f"{os.cpu_count()} processors shared by both sides"
    array = np.ones(MEBIBYTES * 2**18, np.float32)
    with two_transports() as (ours, theirs):
        tensors = [session.put(array) for session in (ours, theirs)]
        uploads = [_timed(partial(one.set, array)) for one in tensors]
        downloads = [_timed(one.get) for one in tensors]
        for name, (tls, plain) in (("upload", uploads), ("download", downloads)):
            mine, peer = paired_medians(tls, plain, ROUNDS, 1)
            rates = f"{array.nbytes / mine / 1e9:.2f} GB/s beside {array.nbytes / peer / 1e9:.2f}; {note}"
            yield Figure(f"deploy-tls/{name}", mine * 1e3, peer * 1e3, BULK_BAR, "ms", "grpc://", rates)
        tls, plain = (_timed(one.synchronize) for one in (ours, theirs))
        mine, peer = paired_medians(tls, plain, ROUNDS, TRIPS)
        yield Figure("deploy-tls/round-trip", mine * 1e6, peer * 1e6, ROUND_TRIP_BAR, "us", "grpc://", note)
