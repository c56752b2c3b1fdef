"""A process forks while it has a session: the child prints nothing and gets typed errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

PARENT = """
import asyncio, multiprocessing, os, subprocess, sys, traceback
import heliograph as hg, numpy as np

url = sys.argv[1]
X = np.arange(4, dtype=np.float32)

def refused(use):
    try:
        use()
    except hg.SessionClosedError as error:
        assert "spawn" in error.advice, error
    else:
        raise AssertionError("the parent's session works in the child")

def cannot_connect():
    try:
        hg.connect(url)
    except hg.UnsupportedError as error:
        assert "spawn" in error.advice, error
    else:
        raise AssertionError("gRPC is used in the child")

def child(session, tensor, plan):
    refused(tensor.get)
    refused(lambda: plan.run(x=X))
    refused(lambda: session.put(X))
    session.close()
    if url == "local:":
        with hg.connect(url) as own:
            assert own.put(X).get(timeout=20).tolist() == X.tolist()
    else:
        cannot_connect()

def forked(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

g = hg.Graph()
g.output("y", g.input("x", (4,), "f32") + 1.0)
"""
BLOCKING = """
session = hg.connect(url)
tensor, plan = session.put(X), session.compile(g)
plan.run(x=X)
forked(lambda: child(session, tensor, plan))
assert subprocess.run([sys.executable, "-c", ""]).returncode == 0
process = multiprocessing.get_context("fork").Process(target=child, args=(session, tensor, plan))
process.start()
process.join()
assert process.exitcode == 0
assert plan.run(x=tensor)["y"].tolist() == (X + 1).tolist()
"""
ASYNCIO = """
async def main():
    session = await hg.aio.connect(url)
    tensor, plan = await session.put(X), await session.compile(g)
    forked(lambda: in_child(session, tensor, plan))
    assert (await plan.run(x=tensor))["y"].tolist() == (X + 1).tolist()
    await session.close()

def in_child(session, tensor, plan):
    # The loop of the parent runs in this thread; a child has one of its own.
    asyncio.events._set_running_loop(None)
    for use in (tensor.get, lambda: plan.run(x=X), lambda: session.put(X)):
        refused(lambda: asyncio.run(use()))
    asyncio.run(session.close())

asyncio.run(main())
"""


@pytest.mark.parametrize("code", [BLOCKING, ASYNCIO], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("kind", ["tcp", "unix", "local"])
def test_a_child_prints_nothing_and_gets_typed_errors(daemon: Any, kind: str, code: str) -> None:
    url = "local:" if kind == "local" else getattr(daemon, kind)
    ended = subprocess.run(
        [sys.executable, "-c", PARENT + code, url], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert (ended.stdout, ended.stderr) == ("", "")


BEFORE = """
def connects():
    with hg.connect(url) as own:
        assert own.put(X).get(timeout=20).tolist() == X.tolist()

forked(connects)
forked(connects)
connects()
"""


def test_a_child_that_was_forked_before_the_first_session_has_its_own(daemon: Any) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PARENT + BEFORE, daemon.tcp], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
