"""Clients that want all of a daemon, each a process of its own.

    python greedy_clients.py CASE URL TOKEN

It writes "ready" once it has begun, and when its standard input ends one line of JSON: how often it
was refused, by the name of the error. A case goes on until then.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import grpc
import numpy as np
from raw_client import RawSession, f32, graph_of, node

import heliograph as hg
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import HeliographError
from heliograph_proto.v1 import bulk_pb2, command_pb2, graph_pb2

MIB = 2**20
SHAPE = (1024, 1024)
SECONDS = 60.0


class _Authorized(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Presents a token with every call."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_unary = intercept_unary_stream = _call
    intercept_stream_unary = intercept_stream_stream = _call


class Greedy:
    """A daemon, a token, and a count of refusals, for each case."""

    def __init__(self, url: str, token: str) -> None:
        self._target, self._token = url.removeprefix("grpc://"), token
        self.url = f"{url}?token={token}"
        self.refused: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        #: True if the case has begun only once it is refused.
        self.wants_all = False
        self.begun = threading.Event()
        self.over = threading.Event()

    def channel(self) -> grpc.Channel:
        """One more connection."""
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ]
        made = grpc.insecure_channel(self._target, options=options)
        return grpc.intercept_channel(made, _Authorized(self._token))

    def attempt(self, call: Callable[[], Any], what: str = "done") -> Any:
        """Make a call; a typed error is counted. After one, it pauses for a moment, as clients do."""
        try:
            found = call()
        except HeliographError as error:
            self.refused[type(error).__name__] += 1
        except grpc.RpcError as refusal:
            metadata: Any = refusal.trailing_metadata()  # type: ignore[attr-defined]
            error_found = error_from_metadata(tuple(metadata or ()))
            if error_found is None and not self.over.is_set():
                self.refused[f"untyped: {refusal.code()}"] += 1  # type: ignore[attr-defined]
            elif error_found is not None:
                self.refused[type(error_found).__name__] += 1
        else:
            self.done[what] += 1
            return found
        finally:
            if self.refused or not self.wants_all:
                self.begun.set()
        self.over.wait(0.05)
        return None

    def threads(self, count: int, work: Callable[[int], None]) -> None:
        """Do some work on so many threads until the end."""

        def repeat(number: int) -> None:
            while not self.over.is_set():
                work(number)

        for number in range(count):
            threading.Thread(target=repeat, args=(number,), daemon=True).start()


def sessions(greedy: Greedy) -> None:
    """Opens sessions, and never closes one."""
    greedy.wants_all = True
    kept: list[RawSession] = []
    channels = [greedy.channel() for _ in range(4)]

    def one_more(number: int) -> None:
        opened = greedy.attempt(lambda: RawSession(channels[number]).attach())
        if opened is not None:
            kept.append(opened)

    greedy.threads(len(channels), one_more)


def staged(greedy: Greedy) -> None:
    """Uploads transfers that no command uses."""
    greedy.wants_all = True
    numbers = itertools.count(1)
    size = 32 * MIB

    def work(session: RawSession) -> None:
        target = bulk_pb2.UploadTarget(session=session.token, transfer=next(numbers), size_bytes=size)
        first = bulk_pb2.UploadRequest(target=target)
        pieces = (
            bulk_pb2.UploadRequest(offset_bytes=offset, data=bytes(MIB)) for offset in range(0, size, MIB)
        )
        greedy.attempt(lambda: session.bulk.Upload(chain([first], pieces), timeout=SECONDS))

    made = [RawSession(greedy.channel()).attach() for _ in range(8)]
    greedy.threads(len(made), lambda number: work(made[number]))


def large_graph() -> graph_pb2.Graph:
    leaf = graph_pb2.Leaf(kind=graph_pb2.LEAF_KIND_INPUT, name="x", type=f32(*SHAPE))
    output = graph_pb2.Output(name="y", value=1)
    return graph_pb2.Graph(leaves=[leaf], nodes=[node("neg", 0, shape=SHAPE)], outputs=[output])


def loops(greedy: Greedy) -> None:
    """Loops that stream 128 MiB each, of which nothing is read."""
    loop = command_pb2.Loop(
        steps=10**9, carries=[command_pb2.Carry(output=0, input=0)], taps=[0], unread_bytes=128 * MIB
    )
    given = command_pb2.InputBinding(input=0, tensor=5)
    run = command_pb2.Run(plan=1, inputs=[given], outputs=[command_pb2.OutputBinding()], loop=loop)

    def work(_: int) -> None:
        session = greedy.attempt(lambda: RawSession(greedy.channel()).attach())
        if session is None:
            return
        greedy.attempt(lambda: session.compile(large_graph()))
        session.allocate(5, *SHAPE)
        number = session.send(run=run)
        # The values fill the stream; a refusal is the first completion.
        for batch in session._answers:
            for one in batch.completions:
                if one.sequence == number and one.HasField("error"):
                    greedy.refused[type(decode_error(one.error)).__name__] += 1
                    session.close()
                    greedy.over.wait(0.2)
                    return
            if batch.taps:
                break
        greedy.done["loops"] += 1
        if greedy.done["loops"] >= 40:
            greedy.over.wait()

    greedy.threads(4, work)


def compiles(greedy: Greedy, nodes: int, clients: int) -> None:
    """Compiles large graphs, each a new one."""
    numbers = itertools.count()
    chained = [node("neg", place) for place in range(nodes)]
    made = [RawSession(greedy.channel()).attach() for _ in range(clients)]

    def work(number: int) -> None:
        graph = graph_of(*chained)
        graph.outputs[0].name = f"y{next(numbers)}"
        greedy.begun.set()
        session, plan = made[number], 1 + next(numbers)
        if greedy.attempt(lambda: session.compile(graph, plan)) is not None:
            session.send(free=command_pb2.Free(handles=[plan]))

    greedy.threads(clients, work)


def announced(greedy: Greedy) -> None:
    """Begins uploads of contents of 64 MiB, and brings the first piece of each."""
    session = RawSession(greedy.channel()).attach()
    size, numbers = 64 * MIB, itertools.count()

    def stalled() -> Iterator[bulk_pb2.UploadRequest]:
        digest = next(numbers).to_bytes(32, "big")
        target = bulk_pb2.UploadTarget(session=session.token, digest=digest, size_bytes=size)
        yield bulk_pb2.UploadRequest(target=target, data=bytes(MIB))
        greedy.done["announced"] += 1
        greedy.begun.set()
        greedy.over.wait()

    greedy.threads(32, lambda _: greedy.attempt(lambda: session.bulk.Upload(stalled(), timeout=SECONDS)))


def streams(greedy: Greedy) -> None:
    """64 streams, each with long runs behind each other."""
    session = hg.connect(greedy.url)
    x = session.put(np.zeros((512, 512), np.float32))
    g = hg.Graph()
    y = given = g.input("x", (512, 512), "f32")
    for _ in range(40):
        y = y @ given
    g.output("y", y)
    plan = session.compile(g)
    made = [session.stream() for _ in range(63)]

    def work(number: int) -> None:
        greedy.attempt(lambda: plan.run(x=x, fetch=False, stream=made[number]))

    greedy.threads(63, work)


def pipelined(greedy: Greedy) -> None:
    """Small runs without a pause, many under way at once."""

    def client() -> tuple[hg.Session, hg.Plan]:
        session = hg.connect(greedy.url)
        g = hg.Graph()
        g.output("y", g.input("x", (16,), "f32") + 1.0)
        return session, session.compile(g)

    made = [client() for _ in range(4)]
    x = np.zeros(16, np.float32)

    def work(number: int) -> None:
        plan = made[number][1]

        def many() -> None:
            for one in [plan.submit(x=x) for _ in range(1000)]:
                one.result(timeout=SECONDS)

        greedy.attempt(many)

    greedy.threads(len(made), work)


CASES: dict[str, Callable[[Greedy], None]] = {
    "sessions": sessions,
    "staged": staged,
    "loops": loops,
    "compiles-20k": lambda greedy: compiles(greedy, 20_000, 8),
    "compiles-200k": lambda greedy: compiles(greedy, 200_000, 2),
    "announced": announced,
    "streams": streams,
    "pipelined": pipelined,
}


def main() -> Iterator[str]:
    """Be greedy until standard input ends."""
    case, url, token = sys.argv[1:]
    greedy = Greedy(url, token)
    CASES[case](greedy)
    greedy.begun.wait(SECONDS)
    yield "ready"
    sys.stdin.read()
    greedy.over.set()
    yield json.dumps({"refused": greedy.refused, "done": greedy.done})


if __name__ == "__main__":
    import os

    for line in main():
        print(line, flush=True)
    # Its threads may wait for answers that come late.
    os._exit(0)
