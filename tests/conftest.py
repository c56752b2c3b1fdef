"""Shared by all tests: one daemon for the run, sessions over every transport, and a check for leaks."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from daemon_urls import TRANSPORTS, DaemonUrls

if TYPE_CHECKING:
    import heliograph as hg

#: What is left out of later collections of garbage once there is this much of it.
MANY_OBJECTS = 50_000

# NumPy is imported later. Its threads, one a processor in each of many test processes, would spin for
# each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background so, and every child of ours would ignore Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that no process has one left when the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Leave the collected tests, thousands of them, out of every later collection of garbage: with
    them, each takes a third of a second, and many tests end with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests are a tenant of their own, and leave the user's file alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        for name in [one for one in os.environ if one.startswith("HELIOGRAPH_")]:
            # Settings of daemons among them.
            if name != "HELIOGRAPH_KERNEL_CACHE":
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def daemon() -> Iterator[DaemonUrls]:
    """A daemon in a process of its own, on a free port and a unix socket, with two threads."""
    from forked_daemons import running_daemon

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "heliograph.sock")
        with running_daemon("--listen", f"unix://{path}", "--device", "cpu:threads=2,memory=2GiB") as url:
            yield DaemonUrls(url, f"unix://{path}")


@pytest.fixture(params=TRANSPORTS)
def url(request: pytest.FixtureRequest) -> str:
    """An address of each kind."""
    if request.param == "local":
        return "local:"
    urls: DaemonUrls = request.getfixturevalue("daemon")
    return urls.tcp if request.param == "tcp" else urls.unix


@pytest.fixture
def session(url: str) -> Iterator[hg.Session]:
    """A session over each transport, after which the device's memory is as it was before."""
    import heliograph as hg

    with hg.connect(url) as watcher:
        before = watcher.devices[0].memory().free_bytes
        # Over a unix socket tensors go through shared memory, over TCP through gRPC.
        shared: bool | Literal["auto"] = False if url.startswith("grpc:") else "auto"
        with hg.connect(url, shared_memory=shared) as made:
            yield made
        if url != "local:":
            assert watcher.devices[0].memory().free_bytes == before


@pytest.fixture(scope="module")
def local() -> Iterator[hg.Session]:
    """A session of this process."""
    import heliograph as hg

    with hg.connect("local:") as session:
        # The device starts its threads with its first work; they are not a test's.
        g = hg.Graph()
        g.output("y", hg.ones(3, graph=g))
        session.compute(g)
        yield session


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    """Every thread that a test started has ended when it is over."""
    before = set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - before
    if started:
        # Only then: a collection takes a while.
        gc.collect()
    for thread in started:
        assert _ends(thread), f"{thread.name} is left"
    if started and len(gc.get_objects()) > MANY_OBJECTS:
        # Mostly modules: a compiler alone is a twentieth of a second in each collection.
        gc.freeze()


def _ends(thread: threading.Thread) -> bool:
    """True if a thread ends by itself within 10 s, perhaps when garbage that keeps it is collected."""
    end, pause = time.monotonic() + 10.0, 0.02
    while time.monotonic() < end:
        thread.join(pause)
        if not thread.is_alive():
            return True
        gc.collect()
        pause = min(2 * pause, 0.5)
    return False


@pytest.fixture
def no_signal_handlers() -> Iterator[None]:
    """No handler of the test's own time limit, as in a program that has none."""
    previous = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, previous)
