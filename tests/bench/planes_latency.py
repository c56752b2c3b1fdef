"""The command plane: a plan of one op, 64 bytes in and 64 out, over TCP on loopback.

Waiting each time it stands beside a bare echo of as many bytes on one gRPC stream; pipelined, beside a limit.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
from figures import Figure, paired_medians, seconds_of
from peer_process import PeerProcess, client_and_server
from planes_peers import ggml_rpc_there

import heliograph as hg
from heliograph.testing import running_daemon

NBYTES = 64
VALUE = np.ones(NBYTES // 4, np.float32)
ROUNDS, RUNS = 7, 300
#: Times a bare echo.
BAR_ECHO = 1.2
#: Times a run by gRPC, of one over a command socket.
BAR_GRPC = 0.5
#: Times a run over a command socket, of one within the process.
BAR_NEAR = 0.5
IN_FLIGHT = 500
LIMIT_US = 15.0
PIPELINED_RUNS = 5_000


def one_op() -> hg.Graph:
    graph = hg.Graph()
    graph.output("y", graph.input("x", VALUE.shape, "f32") + 1.0)
    return graph


def latency() -> Iterator[Figure]:
    """Microseconds from a run's call to its outputs."""
    others = _ggml_rpc("graph", "sets, computes and gets in")
    # As from another host: over a direct connection.
    with (
        running_daemon("--log-level", "warning", "--no-shared-memory") as url,
        PeerProcess("peer_grpc.py", "server", "aio") as server,
    ):
        for name, client, measured in (("aio", "aio", _aio), ("blocking", "client", _blocking)):
            with PeerProcess("peer_grpc.py", client, server.ready) as peer:
                ours, theirs = measured(url, peer)
            against = f"bare {'grpc.aio' if name == 'aio' else 'blocking grpcio'} echo of 64 B"
            yield Figure(f"planes-latency/{name}", ours * 1e6, theirs * 1e6, BAR_ECHO, "us", against, others)


def _blocking(url: str, peer: PeerProcess) -> tuple[float, float]:
    with hg.connect(url) as session:
        plan = session.compile(one_op())
        return paired_medians(
            lambda runs: seconds_of(lambda: plan.run(x=VALUE), runs, warmup=50),
            lambda runs: peer.seconds("echo", NBYTES, runs),
            ROUNDS,
            RUNS,
        )


def _aio(url: str, peer: PeerProcess) -> tuple[float, float]:
    with asyncio.Runner() as runner:
        session = runner.run(_opened(url))
        plan = runner.run(session.compile(one_op()))
        found = paired_medians(
            lambda runs: runner.run(_aio_seconds(plan, runs)),
            lambda runs: peer.seconds("echo", NBYTES, runs),
            ROUNDS,
            RUNS,
        )
        runner.run(session.close())
        return found


async def _opened(url: str) -> hg.aio.Session:
    return await hg.aio.connect(url)


async def _aio_seconds(plan: hg.aio.Plan, runs: int, warmup: int = 50) -> list[float]:
    seconds = []
    for _ in range(runs + warmup):
        start = time.perf_counter()
        await plan.run(x=VALUE)
        seconds.append(time.perf_counter() - start)
    return seconds[warmup:]


def near() -> Iterator[Figure]:
    """Microseconds from a run's call to its outputs over a command socket, beside peers; and within the
    process, beside that."""
    with ExitStack() as stack:
        url = stack.enter_context(running_daemon("--log-level", "warning"))
        session = stack.enter_context(hg.connect(url))
        by_grpc = stack.enter_context(hg.connect(url, shared_memory=False, direct=False))
        assert session.command_socket, session.why_no_command_socket
        peers: list[tuple[str, Callable[[int], list[float]], float, str]] = [
            ("grpc", _seconds_of_runs(by_grpc), BAR_GRPC, "the same by gRPC")
        ]
        if ggml_rpc_there():
            client = stack.enter_context(client_and_server("peer_rpc.py"))
            graphs = partial(client.seconds, "graph", NBYTES)
            peers.append(("ggml-rpc", graphs, 1.0, "ggml-rpc: set, compute, get"))
        measured = _seconds_of_runs(session)
        for name, peer, bar, against in peers:
            ours, theirs = paired_medians(measured, peer, ROUNDS, RUNS)
            yield Figure(f"planes-near/{name}", ours * 1e6, theirs * 1e6, bar, "us", against)
        within = _seconds_of_runs(stack.enter_context(hg.connect("local:")))
        ours, theirs = paired_medians(within, measured, ROUNDS, RUNS)
        against = "the same over a command socket"
        yield Figure("planes-near/local", ours * 1e6, theirs * 1e6, BAR_NEAR, "us", against)


def _seconds_of_runs(session: hg.Session) -> Callable[[int], list[float]]:
    plan = session.compile(one_op())
    return lambda runs: seconds_of(lambda: plan.run(x=VALUE), runs, warmup=50)


def pipelined() -> Iterator[Figure]:
    """Microseconds a run, with 500 under way and every result collected, over each kind of socket."""
    others = _ggml_rpc("pipelined", "takes graphs without an answer at one in")
    with running_daemon("--log-level", "warning") as url:
        for name, near in (("unix", True), ("tcp", False)):
            with hg.connect(url, shared_memory="auto" if near else False) as session:
                plan = session.compile(one_op())
                _steady_seconds(plan, PIPELINED_RUNS)
                found = [_steady_seconds(plan, PIPELINED_RUNS) for _ in range(5)]
            ours = statistics.median(found) * 1e6
            note = f"{1e6 / ours:,.0f} runs/s, at best {min(found) * 1e6:.0f} us; {others}"
            limit = f"{LIMIT_US:.0f} us"
            yield Figure(f"planes-pipelined/{name}", ours, LIMIT_US, 1.0, "us", limit, note)


def _steady_seconds(plan: hg.Plan, runs: int) -> float:
    """Seconds a run between the first time that 500 are under way and the last."""
    pending = deque(plan.submit(x=VALUE) for _ in range(IN_FLIGHT))
    start = time.perf_counter()
    for _ in range(runs):
        pending.popleft().result()
        pending.append(plan.submit(x=VALUE))
    seconds = (time.perf_counter() - start) / runs
    for future in pending:
        future.result()
    return seconds


def _ggml_rpc(what: str, does: str) -> str:
    """What ggml-rpc takes for the same op, for a note."""
    if not ggml_rpc_there():
        return "no ggml-rpc here"
    with ExitStack() as stack:
        client = stack.enter_context(client_and_server("peer_rpc.py"))
        return f"ggml-rpc {does} {statistics.median(client.seconds(what, NBYTES, RUNS)) * 1e6:.0f} us"
