"""The daemon's memory after a connection was cut whose client left much unread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import grpc
import pytest
from daemon_processes import started
from raw_client import RawSession, f32, node, raw_channel, still_serves

from heliograph_proto.errors import ProtocolError, SessionClosedError
from heliograph_proto.v1 import bulk_pb2, command_pb2, graph_pb2, session_pb2, session_pb2_grpc

MIB = 2**20
#: Each with as much as a session may hold unread here.
SESSIONS, UNREAD_BYTES = 8, 40 * MIB
SHAPE = (1024, 1024)
SECONDS = 30.0


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def reaches(pid: int, url: str, is_there: Callable[[int], bool]) -> int:
    """The memory of the process, once it is as wanted; a new client is served meanwhile."""
    end = time.monotonic() + SECONDS
    while not is_there(found := resident_bytes(pid)):
        assert time.monotonic() < end, f"the daemon has {found / MIB:.0f} MiB"
        still_serves(url)
    return found


@contextmanager
def sessions(url: str) -> Iterator[list[RawSession]]:
    """Raw sessions of one connection, which is cut at the end."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    made: list[RawSession] = []
    with grpc.insecure_channel(url.removeprefix("grpc://"), options=options) as channel:
        for _ in range(SESSIONS):
            made.append(RawSession(channel).attach())
        yield made
    for one in made:
        one.close()


def unread_loop(session: RawSession) -> None:
    """A loop that streams 40 MiB, of which nothing is read."""
    leaf = graph_pb2.Leaf(kind=graph_pb2.LEAF_KIND_INPUT, name="x", type=f32(*SHAPE))
    output = graph_pb2.Output(name="y", value=1)
    session.compile(graph_pb2.Graph(leaves=[leaf], nodes=[node("neg", 0, shape=SHAPE)], outputs=[output]))
    session.allocate(5, *SHAPE)
    loop = command_pb2.Loop(
        steps=10**6, carries=[command_pb2.Carry(output=0, input=0)], taps=[0], unread_bytes=UNREAD_BYTES
    )
    given = command_pb2.InputBinding(input=0, tensor=5)
    session.send(
        run=command_pb2.Run(plan=1, inputs=[given], outputs=[command_pb2.OutputBinding()], loop=loop)
    )


def unwanted_upload(session: RawSession) -> None:
    """An upload for a command that never comes."""
    target = bulk_pb2.UploadTarget(session=session.token, transfer=7, size_bytes=UNREAD_BYTES)
    offsets = range(0, UNREAD_BYTES, MIB)
    pieces = (bulk_pb2.UploadRequest(offset_bytes=offset, data=bytes(MIB)) for offset in offsets)
    first = bulk_pb2.UploadRequest(target=target)
    assert session.bulk.Upload(chain([first], pieces)).received_bytes == UNREAD_BYTES


@pytest.mark.parametrize("greed", [unread_loop, unwanted_upload])
def test_what_a_lost_client_left_is_given_back(greed: Callable[[RawSession], None]) -> None:
    with started("--device", "cpu:threads=1", "--log-level", "error") as (process, url):
        still_serves(url)
        start = resident_bytes(process.pid)
        with sessions(url) as first:
            unread_loop(first[0])
        # The first time, the process also loads what it keeps for later ones.
        before = reaches(process.pid, url, lambda found: found < start + 64 * MIB)
        for _ in range(2):
            with sessions(url) as made:
                for session in made:
                    greed(session)
                reaches(process.pid, url, lambda found: found > before + 48 * MIB)
            reaches(process.pid, url, lambda found: found < before + 64 * MIB)


def test_the_first_message_of_a_session_is_not_kept() -> None:
    writes = [command_pb2.SetTensor(tensor=9, data=bytes(2**16)) for _ in range(56)]
    commands = [command_pb2.Command(sequence=number + 1, set_tensor=one) for number, one in enumerate(writes)]
    with (
        started("--device", "cpu:threads=1", "--log-level", "error") as (process, url),
        sessions(url) as made,
    ):

        def one_more() -> None:
            session = RawSession(made[0].channel)
            batch = command_pb2.CommandBatch(session=session.token, commands=commands)
            session.attach(batch.SerializeToString())
            session.sequence = len(commands)
            session.answer(session.send(synchronize=command_pb2.Synchronize()))
            made.append(session)

        for _ in range(8):
            one_more()
        before = resident_bytes(process.pid)
        for _ in range(40):
            one_more()
        # Their messages have 140 MiB.
        reaches(process.pid, url, lambda found: found < before + 48 * MIB)


def test_what_came_while_a_session_ended_is_given_back() -> None:
    """Its client sends 4 MiB again and again, and reads the end at last."""
    writes = [command_pb2.SetTensor(tensor=9, data=bytes(2**16)) for _ in range(60)]
    commands = [command_pb2.Command(sequence=number + 2, set_tensor=one) for number, one in enumerate(writes)]
    batch = command_pb2.CommandBatch(commands=commands).SerializeToString()

    def end_one(url: str) -> None:
        with raw_channel(url) as channel:
            session = RawSession(channel).attach()
            session.answer(session.allocate(9, 2**14))
            for _ in range(4):
                session.send_bytes(batch)
            closing = session_pb2.CloseRequest(session=session.token)
            session_pb2_grpc.SessionServiceStub(channel).Close(closing, timeout=SECONDS)
            assert isinstance(session.end(), SessionClosedError | ProtocolError)
            session.close()

    with started("--device", "cpu:threads=1", "--log-level", "error") as (process, url):
        for _ in range(10):
            end_one(url)
        before = resident_bytes(process.pid)
        for _ in range(40):
            end_one(url)
        reaches(process.pid, url, lambda found: found < before + 32 * MIB)
