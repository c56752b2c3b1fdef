"""A process in which ggml runs: it ends itself where a graph is wrong, and tests must outlive that."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
#: How long a call may take, and the end of the process.
CALL_SECONDS = 60.0
END_SECONDS = 10.0
_CONTEXT = get_context("spawn")


class GgmlProcess:
    """Calls functions of modules in a process of their own, which is started anew after ggml ended it."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        # With ours alone open, the end of the process is the end of the pipe.
        theirs.close()

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the function returned or raised. Raises RuntimeError if the process ended or took too long."""
        self._connection.send((function, args, kwargs))
        try:
            if not self._connection.poll(CALL_SECONDS):
                raise EOFError
            result, error = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.close()
            code = self._process.exitcode
            self._start()
            raise RuntimeError(f"ggml's process ended with {code}; stderr has its message") from None
        if error is not None:
            raise error
        found: R = result
        return found

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(END_SECONDS / 10)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(END_SECONDS)


def _serve(connection: Connection) -> None:
    """Answers calls until the other end is closed."""
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(*args, **kwargs), None))
        except Exception as error:
            connection.send((None, error))
