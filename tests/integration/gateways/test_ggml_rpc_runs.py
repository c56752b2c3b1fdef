"""Runs of graphs that a client of ggml's RPC protocol computes again: they begin at once, and are
runs as any others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from daemon_threads import ThreadDaemon
from ggml_rpc_client import F32, RpcClient, real, rpc_client
from waiting import until

from heliograph_proto.errors import CancelledError
from heliograph_server.session.run_timeline import RunRecord

#: A product of this many rows and columns takes milliseconds.
LONG = 256
#: So many products, one after the other, take seconds.
MANY = 4_000


@contextmanager
def noted_runs(daemon: ThreadDaemon) -> Iterator[list[RunRecord]]:
    """The runs that the daemon tells its observers of."""

    class Notes:
        def __init__(self) -> None:
            self.runs: list[RunRecord] = []

        def run_ended(self, run: RunRecord) -> None:
            self.runs.append(run)

    notes = Notes()
    daemon.host.observers.append(notes)
    try:
        yield notes.runs
    finally:
        daemon.host.observers.remove(notes)


def test_observers_hear_of_every_run(client: RpcClient, gateway: ThreadDaemon) -> None:
    x = client.array(np.ones(16, np.float32))
    made = client.tensor(F32, (16,), x, op="sqr")
    with noted_runs(gateway) as runs:
        client.compute(made, uid=7)
        for _ in range(3):
            client.recompute(7)
        assert (client.get(made) == 1).all()
        until(lambda: len(runs) == 4)
    assert [one.sequence for one in runs] == sorted({one.sequence for one in runs})
    assert all(one.error is None and one.came <= one.began <= one.ended for one in runs)


def test_a_result_that_lies_where_its_graph_reads_is_the_same_each_time(client: RpcClient) -> None:
    x = client.array(np.full(16, 3.0, np.float32))
    at = x.data - client.base
    twice = client.tensor(F32, (16,), x, op="scale", params=(real(2.0), 0))
    # Of the last element and what lies behind it.
    over = client.tensor(F32, (16,), twice, op="scale", params=(real(0.5), 0), at=at + 4)
    client.compute(twice, over, uid=5)
    for value in (5.0, 7.0):
        client.set(x, np.full(16, value, np.float32).tobytes())
        client.recompute(5)
        assert (client.get(over) == value).all()
        assert client.get(x).ravel()[0] == value


def test_a_session_that_ends_aborts_its_run(port: int, gateway: ThreadDaemon) -> None:
    with rpc_client(port) as client:
        square = client.array(np.eye(LONG, dtype=np.float32))
        made = client.tensor(F32, (LONG, LONG), square, square, op="mul_mat")
        client.compute(made, uid=1)
        client.recompute(1)
        assert client.get(made).any()
        for _ in range(MANY):
            client.recompute(1)
        (session,) = gateway.host.sessions
        until(lambda: session.statistics().runs_in_flight, "a run is under way")
        session.close(CancelledError("the test ends it"))
        until(lambda: session.is_quiet, "the run was aborted", seconds=5.0)
    with rpc_client(port) as other:
        assert other.get(other.array(np.ones(4, np.float32))).all()
