"""Of several processes that need kernels, one compiles and the others load what it has finished."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path

import pytest

from heliograph_backends.cpu.kernels.runtime.turns import LOCK, turn

SECONDS = 10.0


def test_a_start_beside_a_compiling_process_waits_and_looks_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    looked, has_turn = threading.Event(), threading.Event()
    other = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)

    def start() -> None:
        with turn(tmp_path, looked.set):
            has_turn.set()

    starting = threading.Thread(target=start)
    starting.start()
    assert looked.wait(SECONDS) and not has_turn.is_set()
    os.close(other)
    starting.join(SECONDS)
    assert has_turn.is_set() and not starting.is_alive()
    assert caplog.text.count("another process compiles") == 1


def test_a_failed_compile_gives_its_turn_to_the_next(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), turn(tmp_path, lambda: None):
        raise MemoryError
    with turn(tmp_path, lambda: pytest.fail("there is no other process")):
        pass
