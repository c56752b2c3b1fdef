"""Sessions, tensors, plans and futures: the blocking API on all transports, and faults of the other side."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from forked_daemons import newest_daemon, running_daemon

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto.types import DTYPES

X = np.arange(12, dtype=np.float32).reshape(4, 3)
BIG = np.random.default_rng(3).random((900, 1000)).astype(np.float32)


def plus_one(shape: tuple[int, ...] = (4, 3)) -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", shape, "f32") + 1.0)
    return g


# Tensors


@pytest.mark.parametrize(
    "name", ["f64", "f32", "f16", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"]
)
def test_every_plain_type_survives_the_journey(session: hg.Session, name: str) -> None:
    array = np.array([[0, 1, 2], [3, 100, 1]]).astype(DTYPES[name].numpy)
    assert np.array_equal(session.put(array).get(), array)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)])
def test_every_shape_survives_the_journey(session: hg.Session, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).random(shape)
    assert np.array_equal(session.put(array).get(), array)


def test_nan_and_infinity_are_data(session: hg.Session) -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    assert session.put(array).get().tobytes() == array.tobytes()


def test_a_new_tensor_is_zeros(session: hg.Session) -> None:
    assert not session.empty((3, 2), "i32").get().any()
    assert session.empty(5, "f32").shape == (5,)


def test_large_tensors_go_in_pieces(session: hg.Session) -> None:
    t = session.put(BIG)
    assert np.array_equal(t.get(), BIG)
    out = np.empty_like(BIG)
    assert t.get(out) is out and np.array_equal(out, BIG)


def test_views_read_and_write_their_part(session: hg.Session) -> None:
    mine = np.arange(60).reshape(5, 12)
    t = session.put(mine)
    for key in [
        (slice(1, 3),),
        (2,),
        (slice(None), 4),
        (slice(None, None, 2), slice(1, 9, 3)),
        (Ellipsis, None),
    ]:
        view = t[key]
        assert view.shape == mine[key].shape and np.array_equal(view.get(), mine[key])
        view.set(mine[key] * 10)
        mine[key] *= 10
    assert np.array_equal(t.get(), mine)
    assert np.array_equal(t[1:, ::2][::2, 1].get(), mine[1:, ::2][::2, 1])
    assert np.array_equal(t.reshape(10, -1).get(), mine.reshape(10, -1))
    with pytest.raises(hg.InvalidArgumentError, match="contiguous"):
        t[:, ::2].reshape(-1)


def test_large_views_with_gaps_go_in_pieces(session: hg.Session) -> None:
    t = session.put(BIG)
    view = t[:, ::2]
    assert np.array_equal(view.get(), BIG[:, ::2])
    view.set(BIG[:, 1::2])
    assert np.array_equal(t.get()[:, ::2], BIG[:, 1::2])


def test_byte_ranges(session: hg.Session) -> None:
    t = session.put(np.arange(10, dtype=np.int32))
    assert t.get(offset_bytes=8, size_bytes=12).tolist() == [2, 3, 4]
    t.set(np.array([7, 8], np.int32), offset_bytes=32)
    assert t.get()[-2:].tolist() == [7, 8]
    assert t.get(np.empty(3, np.uint8), offset_bytes=1, size_bytes=3).nbytes == 3


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 1), (0, 41), (40, 1), (2**63, 1), (0, 2**64), (2**63 - 1, 2**63 - 1)]
)
def test_ranges_outside_are_refused(session: hg.Session, offset: int, size: int) -> None:
    with pytest.raises(hg.OutOfRangeError):
        session.empty(10, "i32").get(offset_bytes=offset, size_bytes=size)


def test_a_tensor_takes_its_own_type_and_shape_alone(session: hg.Session) -> None:
    t = session.empty((2, 3), "f32")
    for wrong in (np.zeros((2, 3)), np.zeros((3, 2), np.float32), np.zeros(7, np.float32), "text", [["a"]]):
        with pytest.raises(hg.InvalidArgumentError):
            t.set(wrong)
    t.set([[1, 2, 3], [4, 5, 6]])
    assert t.get().tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_part_is_written_only_where_it_is_said_to_be_one(session: hg.Session) -> None:
    t = session.put(np.zeros((2, 3), np.float32))
    for part in (np.ones(2, np.float32), np.ones(6, np.float32)):
        with pytest.raises(hg.InvalidArgumentError, match="offset_bytes"):
            t.set(part)
    t.set(np.ones(2, np.float32), offset_bytes=0)
    assert t.get().tolist() == [[1, 1, 0], [0, 0, 0]]


def test_a_future_tells_when_the_array_may_be_overwritten(session: hg.Session) -> None:
    mine = BIG.copy()
    t = session.empty(mine.shape, "f32")
    future = t.set(mine, copy=False)
    future.result(timeout=30)
    assert future.done()
    mine[:] = 0
    assert np.array_equal(t.get(), BIG)


def test_a_freed_tensor_is_no_more(session: hg.Session) -> None:
    t = session.put(X)
    t.free()
    t.free()
    assert "freed" in repr(t)
    for use in (t.get, lambda: t.set(X), lambda: t[0]):
        with pytest.raises(hg.UnknownHandleError, match="freed"):
            use()


def test_tensors_are_freed_when_they_are_collected(session: hg.Session) -> None:
    session.synchronize()
    before = session.devices[0].memory().free_bytes
    for _ in range(20):
        session.put(BIG)
    gc.collect()
    deadline = time.monotonic() + 10
    while session.devices[0].memory().free_bytes != before:
        session.synchronize(timeout=10)
        assert time.monotonic() < deadline


def test_a_tensor_too_large_for_the_device_fails_at_its_use(session: hg.Session) -> None:
    t = session.empty((2**45,), "f64")
    with pytest.raises(hg.OutOfMemoryError):
        t[:4].get()
    session.synchronize()
    assert np.array_equal(session.put(X).get(), X)


def test_errors_that_nobody_met_appear_at_synchronize(session: hg.Session) -> None:
    session.empty((2**45,), "f64")
    with pytest.raises(hg.OutOfMemoryError):
        session.synchronize(timeout=10)
    session.synchronize(timeout=10)


def test_memset_and_copy_to(session: hg.Session) -> None:
    a, b = session.put(X), session.empty(X.shape, "f32")
    a.memset(0, offset_bytes=0, size_bytes=8)
    a.copy_to(b)
    assert b.get().ravel()[:3].tolist() == [0, 0, 2]
    with pytest.raises(hg.InvalidArgumentError):
        a.copy_to(session.empty((1,), "f32"))


def test_a_tensor_of_another_session_is_refused(session: hg.Session, url: str) -> None:
    with hg.connect(url) as other:
        t = other.put(X)
        with pytest.raises(hg.UnknownHandleError, match="another session"):
            session.compile(plus_one()).run(x=t)


def test_asarray(session: hg.Session) -> None:
    t = session.put(X)
    assert np.asarray(t, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="always a copy"):
        np.asarray(t, copy=False)


# Plans


def test_a_plan_says_what_it_is(session: hg.Session) -> None:
    plan = session.compile(plus_one())
    assert {name: str(found) for name, found in plan.inputs.items()} == {"x": "f32[4, 3]"}
    assert "x: f32[4, 3]" in repr(plan) and plan.device == session.devices[0].name
    plan.free()
    with pytest.raises(hg.UnknownHandleError, match="plan was freed"):
        plan.run(x=X)


def test_inputs_by_mapping_keyword_list_and_scalar(session: hg.Session) -> None:
    g = hg.Graph()
    with g.scope("layer0"):
        ids = g.input("ids", (2,), "f32")
    g.output("y", ids * g.input("k", (), "f32"))
    plan = session.compile(g)
    assert plan.run({"layer0/ids": np.ones(2, np.float32)}, k=3.0)["y"].tolist() == [3, 3]
    assert plan.run({"layer0/ids": [1, 2], "k": 2})["y"].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "missing.*'x'"),
        ({"y": X}, "no input 'y'"),
        ({"x": X.astype(np.float16)}, "f16"),
        ({"x": X.T}, r"\(3, 4\)"),
        ({"x": [["a", "b", "c"]] * 4}, "input 'x'"),
        ({"x": object()}, "input 'x'"),
    ],
)
def test_inputs_that_do_not_match_are_named(session: hg.Session, inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(hg.InvalidInputError, match=words):
        session.compile(plus_one()).run(inputs)


def test_large_inputs_and_outputs(session: hg.Session) -> None:
    plan = session.compile(plus_one(BIG.shape))
    futures = [plan.submit(x=BIG + step) for step in range(6)]
    for step, future in enumerate(futures):
        assert np.array_equal(future.result(timeout=60)["y"], BIG + step + 1)


def test_outputs_that_stay_are_valid_whatever_runs_next(session: hg.Session) -> None:
    plan = session.compile(plus_one())
    first = plan.run(x=X, fetch=False)["y"]
    second = plan.run(x=first, fetch=False)["y"]
    plan.free()
    assert np.array_equal(first.get(), X + 1) and np.array_equal(second.get(), X + 2)


def test_outputs_can_be_chosen(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (2,), "f32")
    g.output("a", x + 1.0)
    g.output("b", x + 2.0)
    plan = session.compile(g)
    assert list(plan.run(x=[0, 0], fetch=["b"])) == ["b"]
    assert plan.run(x=[0, 0], fetch=()) == {}
    with pytest.raises(hg.InvalidArgumentError, match="no output 'c'"):
        plan.run(x=[0, 0], fetch={"c"})


def test_results_belong_to_the_caller(session: hg.Session) -> None:
    plan = session.compile(plus_one())
    first, second = plan.run(x=X)["y"], plan.run(x=X)["y"]
    first[:] = 0
    assert np.array_equal(second, X + 1)


def test_a_future_answers_many_times_and_calls_back(session: hg.Session) -> None:
    called = threading.Event()
    future = session.compile(plus_one()).submit(x=X)
    future.add_done_callback(lambda found: called.set() if found is future else None)
    assert called.wait(10)
    assert future.result(10)["y"] is future.result()["y"]
    assert future.done() and not future.cancel() and future.exception() is None


def test_an_index_outside_names_the_line_that_built_the_node(session: hg.Session) -> None:
    g = hg.Graph()
    with g.scope("embed"):
        y = hg.take(g.input("rows", (3, 2), "f32"), g.input("i", (1,), "i32"), axis=0)
    g.output("y", y)
    plan = session.compile(g)
    tensor = plan.submit({"embed/rows": np.ones((3, 2), np.float32), "embed/i": [5]}, fetch=False)
    with pytest.raises(hg.HeliographError) as caught:
        tensor.result(timeout=10)
    origin = caught.value.origin
    assert origin.op == "get_rows" and origin.node_name.startswith("embed/")
    assert "test_session.py" in origin.source and "hg.take" in origin.source


def test_weights_are_uploaded_once_for_all_plans(url: str) -> None:
    told: list[tuple[int, int]] = []
    with hg.connect(url, progress=lambda done, total: told.append((done, total))) as session:
        for rows in (1, 2):
            g = hg.Graph()
            g.output("y", g.input("x", (rows, 900), "f32") @ g.weight("w", BIG))
            x = np.ones((rows, 900), np.float32)
            np.testing.assert_allclose(session.compile(g).run(x=x)["y"], x @ BIG, rtol=1e-4)
    assert told[-1] == (BIG.nbytes, BIG.nbytes)
    assert [done for done, _ in told].count(BIG.nbytes) == 1


def test_threads_share_a_session(session: hg.Session) -> None:
    plan = session.compile(plus_one(BIG.shape))

    def work(step: int) -> bool:
        t = session.put(BIG + step)
        return np.array_equal(plan.run(x=t)["y"], BIG + step + 1) and np.array_equal(t.get(), BIG + step)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_variables_can_be_restored(session: hg.Session) -> None:
    g = hg.Graph()
    v = g.variable("cache", (3,), "f32")
    g.output("old", v + 0.0)
    hg.assign(v, v + 1.0)
    plan = session.compile(g)
    plan.variables["cache"].set([5, 6, 7])
    assert plan.run()["old"].tolist() == [5, 6, 7]
    assert plan.checkpoint()["cache"].tolist() == [6, 7, 8]


def test_a_device_can_be_named_in_the_url(url: str) -> None:
    with hg.connect(f"{url}#cpu0") as session:
        assert session.empty(1, "f32").device == "cpu0"
    with pytest.raises(hg.UnknownDeviceError, match="cpu7"):
        hg.connect(f"{url}#cpu7")


def test_a_closed_session_says_so(url: str) -> None:
    session = hg.connect(url)
    t, plan = session.put(X), session.compile(plus_one())
    session.close()
    session.close()
    assert session.closed and "closed" in repr(session) and "lost" in repr(t)
    for use in (t.get, lambda: plan.run(x=X), lambda: session.empty(1, "f32"), session.synchronize):
        with pytest.raises(hg.SessionClosedError):
            use()


# A scripted device, in this process


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The device of `local:` sessions of this test."""
    device = FakeDevice()
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(device))
    return device


@pytest.fixture
def scripted(fake: FakeDevice) -> Iterator[hg.Session]:
    with hg.connect("local:") as session:
        yield session


def test_a_run_past_its_timeout_is_cancelled(scripted: hg.Session, fake: FakeDevice) -> None:
    plan = scripted.compile(plus_one())
    fake.script.hold("compute")
    with pytest.raises(hg.DeadlineExceededError):
        plan.run(x=X, timeout=0.05)
    assert np.array_equal(plan.run(x=X, timeout=10)["y"], X + 1)


def test_a_result_that_is_late_leaves_the_run_going(scripted: hg.Session, fake: FakeDevice) -> None:
    plan = scripted.compile(plus_one())
    gate = fake.script.hold("compute")
    future = plan.submit(x=X)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    gate.open()
    assert np.array_equal(future.result(timeout=10)["y"], X + 1)


def test_a_cancelled_run_ends_with_a_typed_error(scripted: hg.Session, fake: FakeDevice) -> None:
    plan = scripted.compile(plus_one())
    gate = fake.script.hold("compute")
    future = plan.submit(x=X)
    assert gate.entered.wait(10) and future.cancel()
    with pytest.raises(hg.CancelledError):
        future.result(timeout=10)
    assert isinstance(future.exception(), hg.CancelledError)


def test_ctrl_c_cancels_the_run(scripted: hg.Session, fake: FakeDevice) -> None:
    plan = scripted.compile(plus_one())
    gate = fake.script.hold("compute")

    def interrupt() -> None:
        gate.entered.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        plan.run(x=X)
    thread.join()
    assert np.array_equal(plan.run(x=X, timeout=10)["y"], X + 1)


def test_a_failed_run_poisons_what_it_was_to_make(scripted: hg.Session, fake: FakeDevice) -> None:
    plan = scripted.compile(plus_one())
    fake.script.fail("compute", hg.ComputeFailedError("the fan stopped"))
    victim = scripted.empty(X.shape, "f32")
    future = plan.submit(x=X, fetch=False)
    later = plan.submit(x=victim)
    with pytest.raises(hg.ComputeFailedError, match="the fan stopped"):
        future.result(timeout=10)
    assert np.array_equal(later.result(timeout=10)["y"], np.ones_like(X))


def test_a_compile_past_its_timeout_is_undone(scripted: hg.Session, fake: FakeDevice) -> None:
    gate = fake.script.hold("compile")
    with pytest.raises(hg.DeadlineExceededError):
        scripted.compile(plus_one(), timeout=0.05)
    gate.open()
    assert np.array_equal(scripted.compile(plus_one()).run(x=X)["y"], X + 1)


def test_events_order_streams(scripted: hg.Session, fake: FakeDevice) -> None:
    plan = scripted.compile(plus_one())
    gate = fake.script.hold("compute")
    first, second = scripted.stream(), scripted.stream()
    plan.submit(x=X, stream=first)
    event = first.record()
    second.wait(event)
    after = second.record()
    assert gate.entered.wait(10) and not event.done() and not after.done()
    with pytest.raises(hg.DeadlineExceededError):
        after.result(timeout=0.05)
    gate.open()
    after.result(timeout=10)
    second.synchronize(timeout=10)
    assert event.done() and "reached" in repr(event)


def test_closing_ends_what_is_pending(fake: FakeDevice) -> None:
    session = hg.connect("local:")
    plan = session.compile(plus_one())
    gate = fake.script.hold("compute")
    future = plan.submit(x=X)
    gate.entered.wait(10)
    session.close()
    with pytest.raises(hg.SessionClosedError):
        future.result(timeout=10)


# The other side


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(hg.UnavailableError, match="no server answers") as caught:
        hg.connect(f"grpc://127.0.0.1:{free_port()}")
    assert "heliograph serve" in caught.value.advice
    with pytest.raises(hg.UnavailableError):
        hg.connect("unix:///tmp/no/such/socket")


def test_a_port_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        with pytest.raises(hg.ConnectionError):
            hg.connect(f"grpc://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00" * 64]
)
def test_a_port_that_speaks_something_else(words: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        done = threading.Event()

        def answer() -> None:
            while not done.is_set():
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                peer.sendall(words)
                peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(hg.NotHeliographError):
                hg.connect(f"grpc://127.0.0.1:{listener.getsockname()[1]}", timeout=5)
        finally:
            done.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join()


def test_a_grpc_server_that_is_not_heliograph() -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with pytest.raises(hg.NotHeliographError):
                hg.connect(f"grpc://127.0.0.1:{port}", timeout=5)
        finally:
            server.stop(0).wait(5)


def test_a_connection_that_breaks_at_once_is_no_other_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            peer.settimeout(10)
            with peer, peer.makefile("rb") as stream:
                stream.read(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
                # HTTP/2's SETTINGS, then the request comes. A connection that breaks before it
                # is tried again, and the listener takes no second one.
                peer.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                headers = 1
                while (header := stream.read(9))[3] != headers:
                    stream.read(int.from_bytes(header[:3], "big"))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(hg.UnavailableError, match="broke before a session was open"):
            hg.connect(f"grpc://127.0.0.1:{listener.getsockname()[1]}", timeout=5)
        thread.join()


SLOW = """
import heliograph as hg, numpy as np, sys
session = hg.connect(sys.argv[1], silence_seconds=2.0, reconnect=False)
g = hg.Graph()
y = g.input("x", (600, 600), "f32")
for _ in range(2000):
    y = y @ y
g.output("y", y)
plan = session.compile(g)
future = plan.submit(x=np.zeros((600, 600), np.float32))
print("running", flush=True)
try:
    future.result()
except hg.HeliographError as error:
    print(type(error).__name__, flush=True)
try:
    session.put(np.zeros(3))
except hg.HeliographError as error:
    print(type(error).__name__, flush=True)
session.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "is stopped"])
def test_a_server_that_goes_away_in_mid_run(end: signal.Signals) -> None:
    """One that is stopped keeps its connections, and is noticed by its silence."""
    with running_daemon() as url:
        daemon = newest_daemon()
        command = [sys.executable, "-c", SLOW, url]
        try:
            out, status = communicate(command, lambda: daemon.send_signal(end))
        finally:
            if end is signal.SIGSTOP:
                daemon.send_signal(signal.SIGCONT)
    assert (out.split(), status) == (["UnavailableError", "UnavailableError"], 0)


def communicate(command: list[str], when_running: Callable[[], None]) -> tuple[str, int]:
    """What a client prints after "running", and its status."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None and client.stdout.readline() == "running\n"
            when_running()
            return client.communicate(timeout=30)[0], client.returncode
        finally:
            client.kill()


def test_an_interpreter_ends_with_a_session_open(daemon: Any) -> None:
    """Neither hangs nor complains."""
    code = "import heliograph as hg, sys, numpy as np; s = hg.connect(sys.argv[1]); t = s.put(np.zeros(9))"
    for url in (daemon.tcp, "local:"):
        ended = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=30)
        assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("broken", [False, True], ids=["closed", "broken off"])
def test_a_session_leaves_no_call_of_grpc_behind(daemon: Any, broken: bool) -> None:
    """Not even until the next garbage collection: a call's destructor may hang at the interpreter's end."""
    gc.collect()
    gc.disable()
    try:
        session = hg.connect(daemon.tcp)
        call = weakref.ref(session._shell._stream)  # type: ignore[attr-defined]
        session.put(BIG)
        if broken:
            call().cancel()
        session.close()
        assert call() is None
    finally:
        gc.enable()
