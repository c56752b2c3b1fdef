"""A member of a pool that is stopped in the middle of things, and what goes on all the same."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from member_factory import FactoryMember, MemberFactory
from pool_daemons import DEVICE, SECONDS

import heliograph as hg
from heliograph_proto.errors import DeadlineExceededError

SIZE = 4096
X = np.linspace(-1, 1, SIZE, dtype=np.float32)
#: More than the inputs of a few runs find no room in the stopped member.
ROOM_BYTES = 4 * X.nbytes
RUNS = 8


def chain(names: list[str]) -> tuple[hg.Graph, dict[str, str]]:
    """A scope on each of these devices, each of which reads the one before."""
    g = hg.Graph()
    x = g.input("x", (SIZE,), "f32")
    for number in range(len(names)):
        with g.scope(f"n{number}"):
            x = hg.tanh(x) - hg.sin(x)
    g.output("y", x)
    return g, {f"n{number}/*": name for number, name in enumerate(names)}


def compiled(session: hg.Session, *names: str, pipeline: int = 1) -> hg.Plan:
    graph, pins = chain(list(names))
    return session.compile(graph, devices=list(dict.fromkeys(names)), pins=pins, pipeline=pipeline)


@pytest.mark.slow
def test_runs_go_on_that_do_not_need_a_member_which_is_stopped_and_has_no_room_left(tmp_path: Path) -> None:
    config = tmp_path / "small.toml"
    config.write_text(f"[limits]\nin_flight_bytes = {ROOM_BYTES}\n")
    with MemberFactory() as factory:
        left = factory.start("--config", str(config), "--device", DEVICE)
        middle, right = (factory.start("--device", DEVICE) for _ in range(2))
        members = zip(("left", "middle", "right"), (left, middle, right), strict=True)
        pool = "static:" + ",".join(f"{name}={one.host}:{one.port}" for name, one in members)
        # So long that nobody takes it for lost.
        head = factory.start("--device", DEVICE, "--pool", pool, "--pool-silence-seconds", str(SECONDS))
        with hg.connect(head.url) as session, session.watch() as watch:
            while len(session.devices) < 4:
                watch.next(SECONDS)
            _look(session, left)


def _look(session: hg.Session, left: FactoryMember) -> None:
    names = [f"{name}/cpu0" for name in ("left", "middle", "right")]
    queued = compiled(session, *names[:2], pipeline=RUNS)
    alone = compiled(session, *names[:2])
    broken_off = compiled(session, *names[:2])
    others = [compiled(session, *names[1:]), compiled(session, names[1])]
    expected = [plan.run(x=X)["y"] for plan in (queued, alone, *others)]
    left.kill(signal.SIGSTOP)
    try:
        stuck = [queued.submit(x=X) for _ in range(RUNS)] + [alone.submit(x=X)]
        for plan, wanted in zip(others, expected[2:], strict=True):
            for _ in range(3):
                assert plan.run(x=X, timeout=SECONDS)["y"].tobytes() == wanted.tobytes()
        assert not any(one.done() for one in stuck)
        with pytest.raises(DeadlineExceededError):
            broken_off.run(x=X, timeout=0.1)
    finally:
        left.kill(signal.SIGCONT)
    for future in stuck:
        assert future.result(SECONDS)["y"].tobytes() == expected[0].tobytes()
    # The part of it that waited on the other member was broken off as well.
    assert broken_off.run(x=X, timeout=SECONDS)["y"].tobytes() == expected[0].tobytes()
