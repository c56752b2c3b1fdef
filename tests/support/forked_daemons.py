"""Daemons that start in milliseconds: `heliograph serve`, forked from a process that has loaded
everything.

    process = serve("--listen", "grpc://127.0.0.1:0", stdout=subprocess.PIPE)
    process.stdout.readline()
    process.terminate()
    assert process.wait(10) == 0

Python takes seconds to import a daemon's modules and to load its compiled kernels. One process does
that once; before it has a thread or a connection of gRPC, it forks a child for each daemon that is
wanted. The child has the environment, folder and standard streams of its caller, runs the command
line from its beginning, and exits as the command does. All of them end when their caller does.

A setting that counts when modules are imported (`IMPORTED_WITH`) makes a daemon with another value
of it the real command. Tests of the command itself, and of signals at its start, run that anyway.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

#: Of an environment: what is read once, when modules are imported or kernels are loaded.
IMPORTED_WITH = (
    "GRPC_", "HELIOGRAPH_KERNEL_CACHE", "HOME", "LD_", "MALLOC_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_",
    "XDG_CACHE_HOME",
)  # fmt: skip
#: But for what commands in the process of a test set by themselves, and what changes no daemon's work.
NOT_IMPORTED_WITH = "GRPC_VERBOSITY"
PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 2**18


def serve(
    *arguments: str, stdout: int | None = None, stderr: int | None = None
) -> ForkedDaemon | subprocess.Popen[str]:
    """A `heliograph serve` with these arguments; streams are the caller's, or subprocess.PIPE."""
    forks = _Forks.of_this_process()
    if forks.imported_with != _imported_with():
        command = [sys.executable, "-m", "heliograph.cli", "serve", *arguments]
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
    return ForkedDaemon(forks, arguments, stdout, stderr)


@contextmanager
def running_daemon(*arguments: str, listen: str = "grpc://127.0.0.1:0") -> Iterator[str]:
    """As `heliograph.testing.running_daemon`, forked."""
    from heliograph.testing import serving

    with serving(serve("--listen", listen, *arguments, stdout=subprocess.PIPE)) as url:  # type: ignore[arg-type]
        yield url


def newest_daemon() -> psutil.Process:
    """The daemon that this process started last."""
    # Daemons are forked by one child of this process.
    serving = [one for child in psutil.Process().children() for one in child.children()]
    return max(serving, key=lambda one: one.create_time())


def _imported_with() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(IMPORTED_WITH) and name != NOT_IMPORTED_WITH
    }


class ForkedCommand:
    """The process of a command: of `subprocess.Popen`, the part that daemons need."""

    def __init__(self, forks: _Forks, what: dict[str, Any], streams: list[int]) -> None:
        self._forks = forks
        self.returncode: int | None = None
        self.pid: int = forks.ask(what, streams)
        self._pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pid}: {self.returncode}>"

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, less than 0 for a signal. Raises subprocess.TimeoutExpired."""
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(repr(self), timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing happens to a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(None if seconds is None else seconds * 1000):
                self.returncode = self._forks.ask({"wait": self.pid}, [])
                os.close(self._pidfd)
        return self.returncode


def fork(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, streams: list[int]
) -> ForkedCommand:
    """A `heliograph` command in an environment and a folder, with descriptors for its standard
    streams.

    Settings that are read when modules are imported are those of this process (`IMPORTED_WITH`).
    """
    what = {"command": list(arguments), "environment": dict(environment), "folder": folder}
    return ForkedCommand(_Forks.of_this_process(), what, streams)


class ForkedDaemon(ForkedCommand):
    """A daemon's process, with pipes."""

    def __init__(
        self, forks: _Forks, arguments: tuple[str, ...], stdout: int | None, stderr: int | None
    ) -> None:
        self.stdout, out = _stream(stdout, 1)
        self.stderr, err = _stream(stderr, 2)
        what = {"command": ["serve", *arguments], "environment": dict(os.environ), "folder": os.getcwd()}
        try:
            super().__init__(forks, what, [0, out, err])
        finally:
            for own, descriptor in ((self.stdout, out), (self.stderr, err)):
                if own is not None:
                    os.close(descriptor)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read the rest of both streams, and wait for the end."""
        found = [stream.read() if stream is not None else "" for stream in (self.stdout, self.stderr)]
        self.wait(timeout)
        return found[0], found[1]


def _stream(wanted: int | None, inherited: int) -> tuple[IO[str] | None, int]:
    """Return the stream for the caller, and the descriptor for the daemon."""
    if wanted is None:
        return None, inherited
    assert wanted == subprocess.PIPE
    reading, writing = os.pipe()
    return os.fdopen(reading), writing


class _Forks:
    """The process that has loaded everything, as its parent sees it."""

    _one: _Forks | None = None
    _making = threading.Lock()

    def __init__(self) -> None:
        self.imported_with = _imported_with()
        self._asking = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__).absolute()), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    @classmethod
    def of_this_process(cls) -> _Forks:
        """Started when the first daemon is; ends with this process, whose end of the socket closes
        then."""
        with cls._making:
            if cls._one is None:
                cls._one = cls()
            return cls._one

    def ask(self, what: dict[str, Any], descriptors: list[int]) -> Any:
        """One question, and its answer."""
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(what).encode()], descriptors)
            answer = self._socket.recv(MESSAGE_BYTES)
        assert answer, f"the process that forks daemons has ended: {self._process.poll()}"
        return json.loads(answer)


def _answer(asked: socket.socket) -> dict[str, Any] | None:
    """Answers questions until there are no more: None. In a child, returns what it is to be."""
    me = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 3)
        if not data:
            return None
        question = json.loads(data)
        if "wait" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])
        elif answer := os.fork():
            for one in descriptors:
                os.close(one)
        else:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            asked.close()
            for standard, one in enumerate(descriptors):
                os.dup2(one, standard)
                os.close(one)
            return question
        asked.send(json.dumps(answer).encode())


def main() -> int:
    """Loads what a daemon loads, and forks; in the child, the command."""
    # The script's folder is no daemon's.
    del sys.path[0]
    import heliograph_server.daemon.main  # noqa: F401
    from heliograph import _bootstrap
    from heliograph.cli import main as command_line
    from heliograph_backends.cpu.kernels import available, warmup

    if available():
        warmup()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Its parent says when it ends.
    wanted = _answer(socket.socket(fileno=int(sys.argv[1])))
    if wanted is None:
        # Children that are left are killed by the kernel.
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    of_path = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:0] = [wanted["folder"], *(one for one in of_path if one not in sys.path)]
    sys.argv = ["heliograph", *wanted["command"]]
    _bootstrap.prepare()
    return command_line(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
