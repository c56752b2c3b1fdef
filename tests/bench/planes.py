"""The data plane without shared memory: arrays to a tensor and back, over TCP on loopback.

Ours is `tensor.set(array)` until the device has it, and `tensor.get(out=array)`, blocking, between
this process and a daemon, over direct connections. Peers have their client and their server in two
processes as well, and warm arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from figures import Figure
from peer_lines import Timed
from peer_process import client_and_server
from planes_peers import SIZES, Measure, Ours, beside, ggml_rpc_there, in_turn, ms_a_gb, rate, raw_stream

import heliograph as hg
from heliograph.testing import running_daemon

#: At least this part of a peer's bandwidth; time goes the other way.
OF_GGML_RPC, OF_STREAM = 1.3, 1.0
#: Sessions that send tensors over the connection, whatever else there is between the two sides.
OVER_TCP: dict[str, Any] = (
    {"shared_memory": False} if "shared_memory" in inspect.signature(hg.connect).parameters else {}
)


def uploads() -> Iterator[Figure]:
    """Milliseconds for each GB that is sent."""
    yield from _figures("upload")


def downloads() -> Iterator[Figure]:
    """Milliseconds for each GB that is received."""
    yield from _figures("download")


def _figures(direction: str) -> Iterator[Figure]:
    with ExitStack() as stack:
        url = stack.enter_context(running_daemon("--log-level", "warning"))
        session = stack.enter_context(hg.connect(url, progress=None, **OVER_TCP))
        stream = stack.enter_context(raw_stream(direction))
        parties: dict[str, Measure] = {"": Timed(Ours(session)), stream.name: stream}
        bars = {stream.name: ("grpcio", OF_STREAM)}
        if ggml_rpc_there():
            parties["ggml-rpc"] = stack.enter_context(client_and_server("peer_rpc.py")).seconds
            bars["ggml-rpc"] = ("ggml-rpc", OF_GGML_RPC)
        for name, nbytes in SIZES.items():
            seconds = in_turn(direction, nbytes, parties)
            others = beside(direction, nbytes)
            for peer, (short, least) in bars.items():
                note = f"{rate(nbytes, seconds[''])}, peer {rate(nbytes, seconds[peer])}; {others}"
                ours, theirs = (ms_a_gb(nbytes, seconds[who]) for who in ("", peer))
                yield Figure(
                    f"planes-{direction}/{name}-{short}", ours, theirs, 1 / least, "ms/GB", peer, note
                )
                others = "as above"
