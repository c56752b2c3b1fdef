"""Steps that no signal leaves half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from heliograph.core.interrupts import runs_handlers, undisturbed

told: list[str] = []


@pytest.fixture
def handle() -> Iterator[Callable[[signal.Signals, Any], None]]:
    """Sets handlers for the test's time."""
    told.clear()
    before: dict[signal.Signals, Any] = {}

    def set_handler(number: signal.Signals, handler: Any) -> None:
        before.setdefault(number, signal.signal(number, handler))

    # So that no handler of the test runner counts.
    for number in signal.Signals:
        if callable(found := signal.getsignal(number)) and found is not signal.default_int_handler:
            set_handler(number, signal.SIG_DFL)
    try:
        yield set_handler
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell(number: int, frame: object) -> None:
    told.append(signal.Signals(number).name)


def interrupted() -> str:
    """Raises a signal in the middle of a step, which goes on to its end."""
    told.append("begins")
    signal.raise_signal(signal.SIGINT)
    told.append("ends")
    return "result"


def test_ctrl_c_is_raised_after_the_step(handle: Callable[[signal.Signals, Any], None]) -> None:
    handle(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        undisturbed(interrupted)
    assert told == ["begins", "ends"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_runs_after_the_step(handle: Callable[[signal.Signals, Any], None]) -> None:
    handle(signal.SIGINT, tell)
    assert undisturbed(interrupted) == "result"
    assert told == ["begins", "ends", "SIGINT"]
    assert signal.getsignal(signal.SIGINT) is tell


def test_a_step_within_a_step_ends_with_the_outer_one(handle: Callable[[signal.Signals, Any], None]) -> None:
    handle(signal.SIGINT, tell)

    def outer() -> None:
        undisturbed(interrupted)
        told.append("outer ends")

    undisturbed(outer)
    assert told == ["begins", "ends", "outer ends", "SIGINT"]


def test_a_signal_that_is_ignored_stays_so(handle: Callable[[signal.Signals, Any], None]) -> None:
    handle(signal.SIGINT, signal.SIG_IGN)
    assert undisturbed(interrupted) == "result"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_only_the_main_thread_runs_handlers_and_not_that_of_ctrl_c_within_a_step(
    handle: Callable[[signal.Signals, Any], None],
) -> None:
    handle(signal.SIGINT, tell)
    assert runs_handlers() and not undisturbed(runs_handlers)
    handle(signal.SIGUSR1, tell)
    assert undisturbed(runs_handlers)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(runs_handlers()))
    thread.start()
    thread.join()
    assert found == [False]
