"""The data plane where client and daemon share memory, beside a copy within one process.

A tensor is written and read with `set` and `get`, which copy, and through the array that `map` gives of one
in a shared buffer, where the only copy is the user's own. `set` and `get` copy once on each side, so the bar
of both is two copies and a tenth; that of `map` is one copy and a twentieth.
"""

from __future__ import annotations

import inspect
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from figures import Figure, seconds_of
from peer_lines import Bytes, Timed, Warm
from peer_process import client_and_server
from planes_peers import ROUNDS, SIZES, Copying, Measure, Ours, ggml_rpc_there, in_turn, ms_a_gb, rate

import heliograph as hg
from heliograph.testing import running_daemon

#: The most that ours may take of a peer's time.
OF_GGML_RPC, OF_COPY, MAPPED_OF_COPY = 0.2, 2.2, 1.05
COPY, GGML_RPC = "np.copyto, warm", "ggml-rpc"


class Mapped:
    """A tensor in a shared buffer, whose memory is an array here."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def prepare(self, nbytes: int) -> None:
        self._tensor = self._array = None  # what is there goes first
        self._tensor = self._session.empty((nbytes,), "u8", buffer_type="shared")
        self._array = self._tensor.map()

    def upload(self, array: Bytes) -> None:
        np.copyto(self._array, array)

    def download(self, array: Bytes) -> None:
        np.copyto(array, self._array)


def figures() -> Iterator[Figure]:
    """Milliseconds for each GB; nothing where sessions know no shared memory."""
    if "shared_memory" not in inspect.signature(hg.connect).parameters:
        print("  sessions have no shared memory yet: nothing to measure", file=sys.stderr)
        return
    sharing: dict[str, Any] = {"shared_memory": True}
    with ExitStack() as stack:
        url = stack.enter_context(running_daemon("--log-level", "warning"))
        session = stack.enter_context(hg.connect(url, progress=None, **sharing))
        ours, memory = Ours(session), Warm()
        parties: dict[str, Measure] = {
            "": Timed(ours, memory),
            "mapped": Timed(Mapped(session), memory),
            COPY: Timed(Copying(), memory),
        }
        if ggml_rpc_there():
            parties[GGML_RPC] = stack.enter_context(client_and_server("peer_rpc.py")).seconds
        for name, nbytes in SIZES.items():
            for direction in ("upload", "download"):
                seconds = in_turn(direction, nbytes, parties)
                note = _fresh(ours, nbytes) if direction == "download" else ""
                yield from _compared(f"planes-shared/{direction}-{name}", nbytes, seconds, note)


def _fresh(ours: Ours, nbytes: int) -> str:
    seconds = statistics.median(seconds_of(ours.tensor.get, ROUNDS[nbytes][0], warmup=1))
    return f"; into a fresh array {rate(nbytes, seconds)}"


def _compared(name: str, nbytes: int, seconds: dict[str, float], note: str) -> Iterator[Figure]:
    for transport, peer, bar in (
        ("", GGML_RPC, OF_GGML_RPC),
        ("", COPY, OF_COPY),
        ("mapped", COPY, MAPPED_OF_COPY),
    ):
        if peer not in seconds:
            continue
        ours, theirs = (ms_a_gb(nbytes, seconds[who]) for who in (transport, peer))
        rates = f"{rate(nbytes, seconds[transport])}, peer {rate(nbytes, seconds[peer])}"
        rates += "" if transport else note
        full = f"{name}-{transport or ('ggml-rpc' if peer == GGML_RPC else 'copy')}"
        yield Figure(full, ours, theirs, bar, "ms/GB", peer, rates)
