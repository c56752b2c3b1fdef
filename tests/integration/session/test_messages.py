"""What a new user meets: mistakes are typed errors that say what to do, and names are found."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import heliograph as hg
from heliograph.cli import main
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto.addresses import parse_address

X = np.ones((4, 3), np.float32)
BIG = np.ones((900, 1000), np.float32)


def plus_one(name: str = "x", shape: tuple[int, ...] = (4, 3)) -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input(name, shape, "f32") + 1.0)
    return g


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The device of `local:` sessions of this test."""
    device = FakeDevice()
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(device))
    return device


# Mistakes while a graph is built


MISTAKES: dict[str, tuple[Callable[[hg.Graph, hg.Value], object], str]] = {
    "a number as output": (lambda g, x: g.output("y", 3), "g.input, g.weight or g.constant"),  # type: ignore
    "name and value swapped": (lambda g, x: g.output(x, "y"), r"g.output\('y', y\)"),  # type: ignore
    "an open size": (lambda g, x: g.input("z", (None, 3), "f32"), "a graph for each shape"),  # type: ignore
    "letters as shape": (lambda g, x: g.input("z", "34", "f32"), "a shape is ints"),  # type: ignore
    "zeros of no graph": (lambda g, x: x + hg.zeros((2,)), r"hg.zeros\(\(2,\), graph=g\)"),  # type: ignore
    "assign to a number": (lambda g, x: hg.assign(3, x), "g.variable"),  # type: ignore
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_graph_says_what_to_do(name: str) -> None:
    mistake, words = MISTAKES[name]
    g = hg.Graph()
    with pytest.raises(hg.InvalidArgumentError, match=words) as caught:
        mistake(g, g.input("x", (4, 3), "f32"))
    assert "test_messages.py" in caught.value.origin.source


def test_an_int_is_a_shape_of_one_dimension() -> None:
    g = hg.Graph()
    assert g.input("x", 2, "f32").shape == hg.ones(2, graph=g).shape == (2,)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (np.exp, "use hg.exp"),
        (np.absolute, "use hg.abs"),
        (np.add.reduce, "np.add.reduce computes arrays"),
        (np.arctan, "use hg.atan"),
        (np.cbrt, r"dir\(hg\)"),
        (np.sum, "np.sum computes arrays, not <Value .*; use hg.sum"),
        (np.linalg.norm, "np.norm computes arrays"),
        (lambda x: np.concatenate([x, x]), "use hg.concat"),
        (lambda x: np.where(x > 0, x, 0), "use hg.where"),
    ],
)
def test_a_function_of_numpy_names_ours(function: Callable[[object], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        function(hg.Graph().input("x", (4, 3), "f32"))


def test_functions_of_numpy_tell_the_shape_of_a_value() -> None:
    x = hg.Graph().input("x", (4, 3), "f32")
    assert (np.shape(x), np.ndim(x), np.size(x), np.size(x, 1)) == ((4, 3), 2, 12, 3)  # type: ignore


def test_every_operator_takes_an_array_on_its_left() -> None:
    x = hg.Graph().input("x", (4, 3), "f32")
    found = [X + x, X - x, X * x, X / x, X // x, X % x, X**x, X @ x.T, np.float32(2) * x]
    found += [x == X, x != X, x > X, x >= X, x < X, x <= X]
    found += [(X > 0) & (x > 0), (X > 0) | (x > 0), (X > 0) ^ (x > 0)]
    assert all(isinstance(one, hg.Value) for one in found)
    array = X.copy()
    with pytest.raises(TypeError, match="use hg.add"):
        array += x  # type: ignore[misc]


def test_counts_of_one_are_singular_and_a_value_has_no_truth_value() -> None:
    g = plus_one()
    assert repr(g) == "<Graph 1 leaf, 2 nodes, 1 output>"
    with pytest.raises(TypeError, match="has no truth value"):
        bool(g.input("z", (), "f32"))


# Mistakes with a session


def test_mistakes_of_a_run_say_what_to_do() -> None:
    with hg.connect("local:") as session:
        g = plus_one()
        with pytest.raises(hg.InvalidArgumentError, match="given to runs as an input, or .* g.bound_weight"):
            g.input("w", (4, 3), "f32") + session.put(X)  # type: ignore[operator]
        with pytest.raises(hg.InvalidArgumentError, match="compile takes a graph"):
            session.compile(g.input("z", (), "f32"))  # type: ignore[arg-type]
        plan = session.compile(plus_one())
        with pytest.raises(hg.InvalidInputError, match=r"plan.run\(x=X\)"):
            plan.run(X)  # type: ignore[arg-type]
        with pytest.raises(hg.InvalidArgumentError, match="timeout is 'x'"):
            plan.run(x=X, timeout="x")  # type: ignore[arg-type]
        with pytest.raises(hg.InvalidArgumentError, match="session.stream"):
            plan.submit(x=X, stream="x")  # type: ignore[arg-type]
        with pytest.raises(hg.InvalidArgumentError, match="fetch is 3"):
            plan.run(x=X, fetch=3)  # type: ignore[arg-type]
        assert plan.run(x=X, timeout=float("inf"))["y"].shape == (4, 3)
        for one in (session, plan, session.put(X)):
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(one)


def test_an_input_that_is_named_as_an_option_goes_in_a_mapping() -> None:
    with hg.connect("local:") as session:
        plan = session.compile(plus_one("timeout"))
        with pytest.raises(hg.InvalidInputError, match=r"plan.run\({'timeout': ARRAY}\)"):
            plan.run(timeout=X)  # type: ignore[arg-type]
        assert plan.run({"timeout": X})["y"].shape == (4, 3)


def test_a_tensor_that_was_never_made_is_the_servers_error(session: hg.Session) -> None:
    t = session.empty((10**12,), "f32")
    with pytest.raises(hg.OutOfMemoryError, match="device cpu0"):
        t.get()


def test_an_array_that_does_not_fit_here_is_a_typed_error() -> None:
    from heliograph.core.arrays import room_for

    with pytest.raises(hg.OutOfMemoryError, match="this process") as caught:
        room_for((2**50,), np.dtype(np.float32))
    assert caught.value.advice


def test_a_part_of_a_tensor_is_assigned(session: hg.Session) -> None:
    t = session.empty((4, 3), "f32")
    t[1:3] = np.array([1, 2, 3], np.float32)
    t[0] = 7
    t[3] = t[0]
    assert t.get().tolist() == [[7, 7, 7], [1, 2, 3], [1, 2, 3], [7, 7, 7]]
    with pytest.raises(hg.InvalidInputError, match="astype"):
        t[0] = np.ones(3)
    with pytest.raises(hg.InvalidInputError, match="broadcast"):
        t[0] = np.ones(2, np.float32)


def test_under_aio_assigning_names_set() -> None:
    async def test() -> None:
        async with hg.aio.connect("local:") as session:
            with pytest.raises(TypeError, match="await tensor"):
                session.empty(3, "f32")[0] = 1

    asyncio.run(test())


def test_a_session_that_is_not_awaited_says_how_it_is_opened() -> None:
    with pytest.raises(AttributeError, match="await hg.aio.connect"):
        hg.aio.connect("local:").put  # type: ignore[attr-defined]  # noqa: B018


def test_a_value_that_is_assigned_to_names_what_does_that() -> None:
    x = hg.Graph().input("x", (3,), "f32")
    with pytest.raises(TypeError, match=r"hg.where .* hg.assign"):
        x[0] = 1


# Where no server answers


def test_why_nobody_answers_is_said(tmp_path: Path) -> None:
    plain, dead = tmp_path / "plain", tmp_path / "dead"
    plain.touch()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(dead))
    causes = {
        "grpc://no.such.host.invalid:7070": "does not resolve",
        "grpc://127.0.0.1:1": "connection refused",
        f"unix://{tmp_path}/none": "no such file",
        f"unix:{plain}": "not a socket",
        f"unix://{dead}": "no daemon listens",
    }
    for url, words in causes.items():
        with pytest.raises(hg.UnavailableError, match=f"no server answers at .*{words}") as caught:
            hg.connect(url)
        assert caught.value.advice


@pytest.mark.parametrize("kind", ["grpc", "local"])
def test_a_timeout_of_none_waits_without_limit(url: str, kind: str) -> None:
    where = url if kind == "grpc" else "local:"
    with hg.connect(where, timeout=None) as session:
        assert session.put(X).get().shape == X.shape

    async def connected() -> None:
        async with hg.aio.connect(where, timeout=None) as other:
            await other.put(X)

    asyncio.run(connected())


@pytest.mark.parametrize("url", ["", "  ", 3, ["local:"]])
def test_an_empty_url_is_not_quietly_the_default(url: str) -> None:
    with pytest.raises(hg.InvalidArgumentError) as caught:
        hg.connect(url)
    assert caught.value.advice


@pytest.mark.parametrize(
    ("url", "message", "advice"),
    [
        ("7071", "7071 is not a host", "127.0.0.1:7071"),
        ("grpc://7071", "7071 is not a host", "127.0.0.1:7071"),
        ("grpc://127.0.0.1:99999", "a port is a number from 0 to 65535", "grpc://host:port"),
        ("cpu:reference=1", "a port is a number", "local:#cpu:reference=1"),
    ],
)
def test_what_looks_like_a_host_or_a_port_is_said_with_what_was_meant(
    url: str, message: str, advice: str
) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=message) as caught:
        hg.connect(url)
    assert advice in caught.value.advice


def test_a_unix_address_may_be_written_as_grpc_does() -> None:
    assert parse_address("unix:/run/h.sock#cpu0") == parse_address("unix:///run/h.sock#cpu0")
    with pytest.raises(hg.InvalidArgumentError, match="absolute"):
        parse_address("unix:h.sock")


# Names


def test_names_are_listed() -> None:
    assert dir(hg) == sorted(hg.__all__) and "aio" in dir(hg)
    assert "connect" in hg.aio.__all__ and all(hasattr(hg.aio, name) for name in hg.aio.__all__)
    assert "soft_max(" in str(hg.ops.__doc__) and "soft_max" in dir(hg.ops)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("transpose", "hg.permute_dims, or .T"),
        ("concatenate", "hg.concat"),
        ("power", "hg.pow"),
        ("absolute", "hg.abs"),
        ("tanhh", "hg.tanh"),
        ("float32", "'f32'"),
        ("imag", "no data type is complex"),
        ("cumprod", "hg.cumulative_prod"),
    ],
)
def test_a_name_that_is_not_there_suggests_one(name: str, words: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(hg, name)
    assert words in str(caught.value)


def test_a_hint_is_printed_once() -> None:
    for code in ("hg.ops.conv", "hg.tanhh"):
        command = [sys.executable, "-c", f"import heliograph as hg; {code}"]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
        assert printed.lower().count("did you mean") == 1
    assert "did you mean" not in str(pytest.raises(AttributeError, getattr, hg, "heaviside").value)


# Cancelled and late


def test_a_late_run_is_said_in_the_same_words_everywhere(fake: FakeDevice) -> None:
    words = r"the run of the plan \(x: f32\[4, 3\]\) -> \(y: f32\[4, 3\]\) on \w+ was not done within 0.05 s"
    with hg.connect("local:") as session:
        plan = session.compile(plus_one())
        fake.script.hold("compute")
        with pytest.raises(hg.DeadlineExceededError, match=words):
            plan.run(x=X, timeout=0.05)
        fake.script.hold("compute")
        with pytest.raises(hg.DeadlineExceededError, match=words):
            plan.submit(x=X, timeout=0.05).result(timeout=10)

    async def test() -> None:
        async with hg.aio.connect("local:") as session:
            plan = await session.compile(plus_one())
            fake.script.hold("compute")
            with pytest.raises(hg.DeadlineExceededError, match=words):
                await plan.run(x=X, timeout=0.05)

    asyncio.run(test())


def test_a_cancelled_run_is_named(fake: FakeDevice) -> None:
    with hg.connect("local:") as session:
        gate = fake.script.hold("compute")
        future = session.compile(plus_one()).submit(x=X)
        assert gate.entered.wait(10) and future.cancel()
        with pytest.raises(hg.CancelledError, match=r"the run of the plan .* was cancelled"):
            future.result(timeout=10)


def test_a_set_that_was_broken_off_is_what_later_uses_meet_until_a_whole_one(daemon: object) -> None:
    with hg.connect(daemon.tcp) as session:  # type: ignore[attr-defined]
        shape = (16, *BIG.shape)
        t, array = session.empty(shape, "f32"), np.ones(shape, np.float32)
        named = "writing the tensor f32[16, 900, 1000] on cpu0"
        advice = ""
        # Longer and longer, until a part of it was sent before the deadline.
        for attempt in range(40):
            try:
                t.set(array, timeout=0.002 * 1.2**attempt)
            except hg.DeadlineExceededError as late:
                assert named in late.message
                advice = late.advice
            if "all of it" in advice:
                break
        # Which part was lost depends on how far it came; the whole tensor has it in any case.
        with pytest.raises(hg.CancelledError, match="contents were lost") as caught:
            t.get(timeout=30)
        assert named in caught.value.message and "memset" in caught.value.advice
        t.set(array, timeout=60)
        assert t[0, 0].get(timeout=30).sum() == 1000


# The command line


def test_some_ops_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "soft_max", "get_rows"]) == 0
    printed = capsys.readouterr().out
    calls = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert "scale: real = 1.0" in calls[0] and [call.partition("(")[0] for call in calls] == [
        "soft_max",
        "get_rows",
    ]
    assert main(["ops", "softmax"]) == 1 and "did you mean 'soft_max'" in capsys.readouterr().err


def test_the_package_is_a_command_and_so_is_its_demo() -> None:
    for module in ("heliograph", "heliograph.demo"):
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, timeout=60)
        assert done.returncode == 0 and b"usage" in done.stdout


def test_a_taken_port_is_said_by_us_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "heliograph", "serve", "--listen", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the address is in use" in done.stderr and "add_port" not in done.stderr


def test_sigterm_while_serve_is_loading_exits_with_0() -> None:
    """It comes when the first large package is looked for."""
    code = """
import os, signal, sys
class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name in ("numpy", "grpc"):
            os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["heliograph", "serve"]
sys.meta_path.insert(0, Impatient())
import heliograph.errors
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    other = code.replace('["heliograph",', '["other",')
    assert subprocess.run([sys.executable, "-c", other], timeout=60).returncode == -signal.SIGTERM
