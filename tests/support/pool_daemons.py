"""Daemons that a test kills, stops and starts again at the same address, and what is seen of them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from forked_daemons import ForkedDaemon, serve

import heliograph as hg
from heliograph.testing import wait_until_serving
from heliograph.watching import DeviceWatch
from heliograph_proto.codec import encode
from heliograph_proto.v1 import command_pb2_grpc, session_pb2, session_pb2_grpc

SECONDS = 60.0
DEVICE = "cpu:threads=1,memory=256MiB"


class Daemon:
    """A daemon in a process of its own, which keeps its port when it is started again."""

    def __init__(self, *arguments: str, port: int = 0) -> None:
        self._arguments = arguments or ("--device", DEVICE)
        self.port = port
        self.process: ForkedDaemon | subprocess.Popen[str] = self._start()

    def _start(self) -> ForkedDaemon | subprocess.Popen[str]:
        listen = "--listen", f"grpc://127.0.0.1:{self.port}"
        process = serve("--log-level", "warning", *listen, *self._arguments, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        self.port = int(line.rpartition(":")[2])
        return process

    @property
    def host(self) -> str:
        """What a source calls it."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"grpc://{self.host}"

    def kill(self) -> None:
        """The kernel ends it, and tells everybody who is connected."""
        self._signal(signal.SIGKILL)
        self.process.wait(SECONDS)

    def stop(self) -> None:
        """It does nothing any more, and nobody is told."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """Another life of it, at the same address."""
        self.end()
        self.process = self._start()
        wait_until_serving(self.url)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def daemons(count: int, *arguments: str) -> Iterator[list[Daemon]]:
    """So many, which start at the same time."""
    made: list[Daemon] = []
    try:
        with futures.ThreadPoolExecutor(count) as threads:
            for one in [threads.submit(Daemon, *arguments) for _ in range(count)]:
                made.append(one.result())
        for one in made:
            wait_until_serving(one.url)
        yield made
    finally:
        for one in made:
            one.end()


@contextmanager
def head_of(
    *members: Daemon | str, port: int = 0, silence: float = 3.0, lease: float = 10.0
) -> Iterator[Daemon]:
    """A daemon with a device of its own that offers those of the members, named m0, m1, ..."""
    listed = [one if isinstance(one, str) else one.host for one in members]
    source = "static:" + ",".join(f"m{number}={one}" for number, one in enumerate(listed))
    how = "--pool", source, "--pool-silence-seconds", str(silence), "--pool-lease-seconds", str(lease)
    head = Daemon("--device", DEVICE, *how, port=port)
    try:
        wait_until_serving(head.url)
        yield head
    finally:
        head.end()


def wait_for_devices(session: hg.Session, *names: str, seconds: float = SECONDS) -> None:
    """Until exactly these are there."""
    with session.watch() as watch:
        end = time.monotonic() + seconds
        while present(session) != set(names):
            watch.next(timeout=end - time.monotonic())


def present(session: hg.Session) -> set[str]:
    return {device.name for device in session.devices if not device.lost}


def next_event(watch: DeviceWatch) -> hg.DeviceEvent:
    """The next thing that happens to a device."""
    found = watch.next(timeout=SECONDS)
    assert found is not None, "the session has ended"
    return found


#: A server of this name ends every command stream.
HANGS_UP = "hangs up"


class Liar(session_pb2_grpc.SessionServiceServicer, command_pb2_grpc.CommandServiceServicer):
    """A server that shakes hands as a real daemon did, but for what `change` does to the message."""

    def __init__(self, answer: session_pb2.OpenResponse) -> None:
        self.answer = answer
        self._asked = threading.Semaphore(0)

    def Open(self, request: Any, context: Any) -> session_pb2.OpenResponse:
        self._asked.release()
        return self.answer

    def wait_for(self, count: int) -> bool:
        """Until so many have tried to open a session."""
        return all(self._asked.acquire(timeout=SECONDS) for _ in range(count))

    def Close(self, request: Any, context: Any) -> session_pb2.CloseResponse:
        return session_pb2.CloseResponse()

    def Execute(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        for _ in request_iterator:
            if self.answer.server == HANGS_UP:
                break
        yield from ()


@contextmanager
def liar(url: str, change: Any) -> Iterator[tuple[str, Liar]]:
    """A server that pretends to be the daemon at a URL, with changes; its address."""
    with hg.connect(url) as session:
        answer = encode(session.info, session_pb2.OpenResponse)
    answer.ClearField("shared_memory")
    change(answer)
    made = Liar(answer)
    with futures.ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        session_pb2_grpc.add_SessionServiceServicer_to_server(made, server)
        command_pb2_grpc.add_CommandServiceServicer_to_server(made, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"grpc://127.0.0.1:{port}", made
        finally:
            server.stop(0).wait()
