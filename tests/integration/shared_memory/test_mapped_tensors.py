"""Tensors that client and server map both."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from forked_daemons import running_daemon

import heliograph as hg
from heliograph_backends.host_memory.sealed import whole_pages, why_no_sealed

pytestmark = pytest.mark.skipif(bool(why_no_sealed()), reason=why_no_sealed() or "-")

MIB = 2**20
SECONDS = 60


def test_a_mapped_tensor_is_read_and_written_by_both_without_a_copy(session_of: hg.Session) -> None:
    tensor = session_of.empty((100, 50), "f32", buffer_type="shared")
    array = tensor.map()
    assert (array.shape, array.dtype, array.any()) == ((100, 50), np.float32, False)
    array[:] = 3
    assert tensor.get().tolist() == array.tolist()
    tensor[10:20].set(np.full((10, 50), 4, np.float32))
    session_of.synchronize()
    assert array.sum() == 3 * 100 * 50 + 10 * 50
    part = tensor[5:95:10, ::2].map()
    assert part.strides == (2000, 8)
    part[:] = 0
    assert np.array_equal(tensor.get(), array) and not array[5:95:10, ::2].any()


def test_a_mapped_tensor_is_shared_by_dlpack(session_of: hg.Session) -> None:
    tensor = session_of.empty((2, 3), "i64", buffer_type="shared")
    tensor.set(np.arange(6).reshape(2, 3))
    array = np.from_dlpack(tensor[:, 1])
    assert array.tolist() == [1, 4]
    tensor.map()[1, 1] = 9
    assert array.tolist() == [1, 9]
    with pytest.raises(BufferError, match="cannot be mapped"):
        np.from_dlpack(session_of.empty(3, "f32"))


def test_mapping_waits_for_what_was_sent_before(session_of: hg.Session) -> None:
    source = session_of.put(np.arange(3_000_000, dtype=np.int32))
    for _ in range(3):
        tensor = session_of.empty(3_000_000, "i32", buffer_type="shared")
        source.copy_to(tensor)
        assert tensor.map()[-1] == 2_999_999


def test_runs_read_mapped_tensors_and_write_into_them(session_of: hg.Session) -> None:
    g = hg.Graph()
    x, rows = g.input("x", (20, 8), "f32"), g.input("rows", (5,), "i32")
    g.output("y", hg.ops.get_rows(x, rows))
    plan = session_of.compile(g)
    places = {
        name: session_of.empty(*what, buffer_type="shared")
        for name, what in {"x": ((20, 8), "f32"), "rows": ((5,), "i32"), "y": ((5, 8), "f32")}.items()
    }
    arrays = {name: one.map() for name, one in places.items()}
    arrays["x"][:] = np.arange(160, dtype=np.float32).reshape(20, 8)
    for chosen in ([0, 19, 3, 3, 7], [1, 2, 3, 4, 5]):
        arrays["rows"][:] = chosen
        plan.run({"x": places["x"], "rows": places["rows"]}, out={"y": places["y"]})
        assert np.array_equal(arrays["y"], arrays["x"][chosen])


def test_indices_that_a_client_changes_during_runs_never_reach_outside(session_of: hg.Session) -> None:
    g = hg.Graph()
    x, rows = g.input("x", (4, 8), "f32"), g.input("rows", (4096,), "i32")
    g.output("y", hg.ops.get_rows(x, rows).sum())
    plan = session_of.compile(g)
    places = session_of.empty(4096, "i32", buffer_type="shared")
    array, over = places.map(), threading.Event()

    def change() -> None:
        while not over.is_set():
            array[:] = 2**31 - 1
            array[:] = 0

    changing = threading.Thread(target=change)
    changing.start()
    try:
        ones = np.ones((4, 8), np.float32)
        for _ in range(300):
            try:
                assert plan.run({"x": ones, "rows": places})["y"] == 4096 * 8
            except hg.OutOfRangeError:
                pass
            except hg.HeliographError as error:
                assert "2147483647" in str(error), error
    finally:
        over.set()
        changing.join()
    assert session_of.put(ones).get().sum() == 32


def test_a_mapped_tensor_is_no_weight_and_no_variable(session_of: hg.Session) -> None:
    tensor = session_of.empty((4, 4), "f32", buffer_type="shared")
    g = hg.Graph()
    g.output("y", g.input("x", (4, 4), "f32") @ g.bound_weight("w", (4, 4), "f32"))
    with pytest.raises(hg.UnsupportedError, match="cannot read"):
        session_of.compile(g, weights={"w": tensor})
    with pytest.raises(hg.UnsupportedError, match="does not compute in memory"):
        session_of.compile(product(), buffer_types={"cpu0": "shared"})


def product() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (4, 4), "f32") @ g.weight("w", np.ones((4, 4), np.float32)))
    return g


def test_other_memory_cannot_be_mapped(session: hg.Session) -> None:
    with pytest.raises(hg.UnsupportedError, match="cannot be mapped") as caught:
        session.empty(10, "f32").map()
    assert "shared" in caught.value.advice


def test_in_one_process_tensors_can_be_mapped_too() -> None:
    with hg.connect("local:") as session:
        tensor = session.empty((3, 4), "i64", buffer_type="shared")
        tensor.map()[:] = 7
        assert tensor.get().tolist() == [[7] * 4] * 3


def test_the_array_outlives_tensor_session_and_daemon() -> None:
    script = """
        import sys
        import heliograph as hg
        session = hg.connect(sys.argv[1])
        array = session.empty(1_000_000, "f64", buffer_type="shared").map()
        array[:] = 1
        print("mapped", flush=True)
        sys.stdin.read()
        print(array.sum())
    """
    with ExitStack() as ending:
        with running_daemon("--device", "cpu:reference=1,memory=64MiB") as url:
            client = ending.enter_context(_client(script, url))
            with hg.connect(url) as watcher:
                # The tensor was collected at once, and gave the device its memory back.
                assert watcher.devices[0].memory().free_bytes == 64 * MIB
        # Now the daemon has ended, and the client has not.
        out, _ = client.communicate("", timeout=SECONDS)
    assert out == "1000000.0\n"


@contextmanager
def _client(script: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own, once it says that it has mapped its tensor."""
    command = [sys.executable, "-c", textwrap.dedent(script), url]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None and client.stdout.readline() == "mapped\n"
        yield client
    finally:
        client.kill()
        client.communicate(timeout=SECONDS)


def test_a_client_that_is_killed_leaves_no_memory_behind() -> None:
    script = """
        import sys
        import heliograph as hg
        session = hg.connect(sys.argv[1], reconnect=False)
        tensor = session.empty(30_000_000, "u8", buffer_type="shared")
        array = tensor.map()
        array[:] = 1
        print("mapped", flush=True)
        sys.stdin.read()
    """
    with running_daemon("--device", "cpu:reference=1,memory=64MiB") as url, hg.connect(url) as watcher:
        (device,) = watcher.devices
        with _client(script, url) as client:
            assert device.memory().free_bytes == 64 * MIB - whole_pages(30_000_000)
            client.kill()
        # The kernel tells the daemon at once; what is asked behind that may still be a moment early.
        for _ in range(2000):
            if device.memory().free_bytes == 64 * MIB:
                return
        pytest.fail("the memory of a client that was killed is still taken")


def test_tensors_and_strides_may_be_larger_than_four_gigabytes() -> None:
    with running_daemon("--device", "cpu:threads=1,memory=6GiB") as url, hg.connect(url) as session:
        # Of such memory only the pages are taken that are touched.
        tensor = session.empty(5 * 2**30 + 64, "u8", buffer_type="shared")
        array = tensor.map()
        far = 5 * 2**30
        tensor[far:].set(np.full(64, 9, np.uint8))
        assert tensor[far + 63 :].get().tolist() == [9]
        tensor.set_2d(np.full((2, 16), 7, np.uint8), 8, far)
        assert tensor.get_2d(2, 16, 8, far).tolist() == [[7] * 16] * 2
        assert array[[8, 23, 24, far + 8, far + 23, far + 24]].tolist() == [7, 7, 0, 7, 7, 9]
        assert tensor[::far].get().tolist() == [0, 9]
