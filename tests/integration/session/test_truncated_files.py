"""A file that is truncated while its bytes are read ends no client, on any way to the server."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from daemon_threads import ThreadDaemon

import heliograph as hg
from heliograph_backends.cpu.backend import CpuDevice

#: More than one piece of any transfer.
ELEMENTS = 5 * 2**20
#: The bytes that are left of the file.
LEFT = 8192
WAYS = ("local", "grpc", "direct", "shared")

Use = Callable[[hg.Session, np.ndarray, Callable[[], object]], None]


@pytest.fixture(params=WAYS)
def session(request: pytest.FixtureRequest) -> Iterator[hg.Session]:
    if request.param == "local":
        with hg.connect("local:") as session:
            yield session
        return
    options = {"direct_connections": 0 if request.param == "direct" else -1}
    is_shared = request.param == "shared"
    daemon = ThreadDaemon(CpuDevice(threads=1, native=False), shared_memory=is_shared, **options)
    try:
        with hg.connect(daemon.url, shared_memory=is_shared) as session:
            yield session
    finally:
        daemon.stop()


def _hashed(session: hg.Session, array: np.ndarray, truncate: Callable[[], object]) -> None:
    g = hg.Graph()
    truncate()
    g.output("y", g.weight("w", array) + 1)
    session.compile(g)


def _uploaded(session: hg.Session, array: np.ndarray, truncate: Callable[[], object]) -> None:
    g = hg.Graph()
    g.output("y", g.weight("w", array) + 1)
    truncate()
    session.compile(g)


def _written(session: hg.Session, array: np.ndarray, truncate: Callable[[], object]) -> None:
    tensor = session.empty(array.shape, "f32")
    truncate()
    tensor.set(array)
    session.synchronize()


def _written_inline(session: hg.Session, array: np.ndarray, truncate: Callable[[], object]) -> None:
    _written(session, array[-100:], truncate)


def _run(session: hg.Session, array: np.ndarray, truncate: Callable[[], object]) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", array.shape, "f32") + 1)
    plan = session.compile(g)
    truncate()
    plan.run(x=array)


@pytest.mark.parametrize("use", [_hashed, _uploaded, _written, _written_inline, _run])
def test_a_truncated_file_is_a_typed_error(session: hg.Session, use: Use, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    np.arange(ELEMENTS, dtype=np.float32).tofile(path)
    with path.open("r+b") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        array = np.frombuffer(whole, np.float32)
        with pytest.raises(hg.InvalidArgumentError, match="truncated"):
            use(session, array, lambda: file.truncate(LEFT))
    tensor = session.put(np.arange(3, dtype=np.float32))
    assert tensor.get().tolist() == [0, 1, 2], "the session goes on"


def test_arrays_in_files_are_read_as_they_are(session: hg.Session, tmp_path: Path) -> None:
    expected = np.arange(ELEMENTS, dtype=np.float32)
    np.save(tmp_path / "weights.npy", expected)
    array = np.load(tmp_path / "weights.npy", mmap_mode="r")
    g = hg.Graph()
    g.output("y", g.weight("w", array) + g.input("x", (ELEMENTS,), "f32"))
    assert np.array_equal(session.compile(g).run(x=array)["y"], expected + expected)
    tensor = session.empty(expected.shape, "f32")
    tensor.set(array)
    assert np.array_equal(tensor.get(), expected)
