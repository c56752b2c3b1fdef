"""Ctrl-C that Python would ignore is raised again.

Python runs the handler of a signal in the main thread, wherever that is. In a destructor, or in a
callback of the garbage collector, a KeyboardInterrupt is printed and ignored, and a loop of runs
goes on. Sessions therefore send it again a moment later, until it reaches the program.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from _thread import get_ident, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

T = TypeVar("T")
# The functions of `signal` convert to enumerations, which takes ten times as long.
_functions: Any = importlib.import_module("_signal")
getsignal, set_handler = _functions.getsignal, _functions.signal
SIGINT, default_int_handler = int(signal.SIGINT), signal.default_int_handler
_MAIN = threading.main_thread().ident

#: The time until an interrupt is sent again: longer than a destructor.
AGAIN_SECONDS = 0.01


def raise_ignored() -> None:
    """Let ignored interrupts be raised again, from now on in this process. Idempotent."""
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


class _Hook:
    """Handles ignored exceptions: interrupts are sent again, all others go to the previous hook."""

    def __init__(self, previous: Callable[[UnraisableHookArgs], Any]) -> None:
        self._previous = previous

    def __call__(self, ignored: UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            again()
        else:
            self._previous(ignored)


def again() -> None:
    """Interrupt the main thread once more, soon."""
    with suppress(RuntimeError):  # the interpreter ends
        start_new_thread(_interrupt, ())


def _interrupt() -> None:
    time.sleep(AGAIN_SECONDS)
    # Not `interrupt_main`, which does not wake a thread that waits for a lock.
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)


class _Came:
    """Handles Ctrl-C by remembering that it came."""

    def __init__(self) -> None:
        self.is_true = False

    def __call__(self, number: int, frame: object) -> None:
        self.is_true = True


def undisturbed(step: Callable[[], T]) -> T:
    """Return the result of a step that must not be left half done: Ctrl-C is raised after it.

    The step must be short. Handlers, Python's own or another one, run in the main thread.
    """
    if get_ident() != _MAIN or not callable(handler := getsignal(SIGINT)) or isinstance(handler, _Came):
        return step()
    came = _Came()
    set_handler(SIGINT, came)
    try:
        return step()
    finally:
        set_handler(SIGINT, handler)
        if came.is_true:
            handler(SIGINT, sys._getframe())


def is_interruptible() -> bool:
    """True if Ctrl-C may be raised in this thread."""
    return get_ident() == _MAIN and getsignal(SIGINT) is default_int_handler


_SIGNALS = tuple(int(one) for one in signal.Signals)


def runs_handlers() -> bool:
    """True if a signal handler of the program may run in this thread.

    Such a handler may use the session, or raise, wherever the thread is.
    """
    if get_ident() != _MAIN:
        return False
    for number in _SIGNALS:
        found = getsignal(number)
        # Numbers stand for the system's own behaviour, None for a handler that is not Python's.
        if found is not default_int_handler and callable(found) and not isinstance(found, _Came):
            return True
    return False


class InThread:
    """A function that runs in a thread of its own, where nothing interrupts it.

    `result` starts it, so that an interrupt finds it in the caller's hands.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._has_begun = False
        #: Held until it has ended.
        self._ended = threading.Lock()
        self._ended.acquire()
        self._thread = threading.Thread(target=self._run, name="heliograph-receiver", daemon=True)

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
        self._ended.release()

    def result(self) -> None:
        """Run it, and wait for its end. Raises its error."""
        self._has_begun = True
        try:
            self._thread.start()
        except RuntimeError:
            self._has_begun = False
            raise
        self._ended.acquire()
        self._ended.release()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self, seconds: float) -> None:
        """Wait for its end, for so many seconds at most."""
        if self._has_begun and self._ended.acquire(timeout=seconds):
            self._ended.release()
