"""Of several processes that need kernels, one compiles and the others wait for it."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path

import pytest

from heliograph_backends.cpu.kernels import CacheState
from heliograph_backends.cpu.warming import DONE, LOCK, load_kernels

SECONDS = 10.0


def test_a_start_beside_a_compiling_process_waits_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    compiled = threading.Event()
    other = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    starting = threading.Thread(
        target=load_kernels, args=(CacheState(tmp_path), lambda progress: compiled.set())
    )
    starting.start()
    while "another process compiles" not in caplog.text and starting.is_alive():
        starting.join(0.01)
    assert not compiled.is_set()
    os.close(other)
    starting.join(SECONDS)
    assert compiled.is_set() and not starting.is_alive()
    assert caplog.text.count("another process compiles") == 1


def test_a_complete_cache_is_loaded_without_waiting(tmp_path: Path) -> None:
    load_kernels(CacheState(tmp_path), lambda progress: None)
    assert (tmp_path / DONE).exists()
    other = os.open(tmp_path / LOCK, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        loaded: list[object] = []
        load_kernels(CacheState(tmp_path), lambda progress: loaded.append(progress))
        assert len(loaded) == 1
    finally:
        os.close(other)


def test_a_failed_compile_leaves_the_cache_incomplete(tmp_path: Path) -> None:
    def fail(progress: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        load_kernels(CacheState(tmp_path), fail)
    assert not (tmp_path / DONE).exists()


def test_progress_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def compile_three(progress: object) -> None:
        assert callable(progress)
        for number in range(3):
            progress(number + 1, 3, "gemm")

    load_kernels(CacheState(tmp_path), compile_three)
    assert caplog.messages == ["compiling the CPU kernels: 1 of 3 functions are done"]
