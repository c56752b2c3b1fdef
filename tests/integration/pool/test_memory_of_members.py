"""Memory of members that comes back to them: weights of freed plans, and variables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pool_daemons import SECONDS, Daemon, daemons, head_of, wait_for_devices

import heliograph as hg

MIB = 2**20
X = np.ones(MIB // 4, np.float32)


@pytest.fixture(scope="module")
def members() -> Iterator[list[Daemon]]:
    with daemons(2, "--device", "cpu:threads=1,memory=16MiB") as made:
        yield made


@pytest.fixture
def session(members: list[Daemon]) -> Iterator[hg.Session]:
    # A head that is killed leaves nothing behind: the next test has all memory.
    with head_of(*members, lease=0.0) as head, hg.connect(head.url) as made:
        wait_for_devices(made, "cpu0", "m0/cpu0", "m1/cpu0")
        yield made


@pytest.mark.parametrize("devices", [["m0/cpu0"], ["m0/cpu0", "m1/cpu0"]])
def test_models_one_after_the_other_fit_on_members(session: hg.Session, devices: list[str]) -> None:
    for number in range(20 * len(devices)):
        g = hg.Graph()
        x = g.input("x", X.shape, "f32")
        g.output("y", x + g.weight("w", np.full(X.shape, number, np.float32)))
        plan = session.compile(g, devices, timeout=SECONDS)
        assert "cpu0" not in plan.devices
        if number % 10 == 9:
            assert plan.run(x=X, timeout=SECONDS)["y"][0] == number + 1
        plan.free()


def test_a_variable_on_a_member_is_freed_and_made_anew(session: hg.Session) -> None:
    for size in (12 * MIB // 4, 13 * MIB // 4):
        g = hg.Graph()
        v = g.variable("v", (size,), "f32")
        g.output("y", hg.assign(v, v + 1.0)[:2])
        plan = session.compile(g, ["m0/cpu0"], timeout=SECONDS)
        assert plan.run(timeout=SECONDS)["y"].tolist() == [1.0, 1.0]
        plan.free()
        session.free_variable("v", timeout=SECONDS)
