"""A pool that Ray places and restarts: a real cluster of several nodes, in a network namespace of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any, TypeVar

import numpy as np
import pytest
from paths import SUPPORT
from pool_daemons import DEVICE, Daemon, wait_for_devices

import heliograph as hg
from heliograph.errors import HeliographError
from heliograph.testing import wait_until_serving
from heliograph_server.launchers.ray.engine import RayEngine
from heliograph_server.launchers.specification import PoolSpecification, PoolStatus
from heliograph_server.pool.discovery import ListedMember, open_source

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

CLUSTER = [sys.executable, str(SUPPORT / "ray_cluster.py")]
POOL = [sys.executable, "-m", "heliograph.cli", "pool"]
SERVE = ("--device", "cpu:threads=1,memory=256MiB")
NODES = 3
#: Bounds what is awaited; nothing here takes a quarter of it.
SECONDS = 60.0
LOOK_SECONDS = 0.1
WANTED = PoolSpecification(members=NODES, serve=SERVE, port=0)
T = TypeVar("T")


def until(find: Callable[[], T | None], what: str, seconds: float = SECONDS) -> T:
    """What is found, as soon as there is something."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        threading.Event().wait(LOOK_SECONDS)
    return found


# Processes


def parent(pid: int) -> int:
    """0 if there is no such process any more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, found = text.rpartition(")")[2].split()[:2]
    return 0 if state == "Z" else int(found)


def processes(pattern: str) -> list[int]:
    """The ids of processes with such a command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and parent(int(entry.name)):
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if re.search(pattern, command):
                found.append(int(entry.name))
    return found


# The cluster


@dataclass
class RayCluster:
    """The program that is a cluster, and the pool on it."""

    process: subprocess.Popen[str]
    address: str
    client_address: str
    nodes: list[int]
    engine: RayEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = RayEngine(self.address)

    def _ask(self, line: str) -> int:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return int(json.loads(self.process.stdout.readline()))

    def remove(self, node: int) -> None:
        self._ask(f"remove {node}")
        self.nodes.remove(node)

    def add(self) -> None:
        self.nodes.append(self._ask("add"))

    def status(self) -> PoolStatus:
        return self.engine.status(WANTED.name)

    def serving(self) -> PoolStatus:
        """The pool, when all its members serve."""

        def look() -> PoolStatus | None:
            found = self.status()
            return found if found.serving == NODES else None

        return until(look, "all members serve")

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        action, *rest = arguments
        command = [*POOL, action, "--address", self.address, *rest]
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Without a pool."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: `make test-ray` has it in an environment of its own")
    if {name for _, name in socket.if_nameindex()} != {"lo"}:
        pytest.skip("Ray would listen at this machine's address: `make test-ray` runs it in a namespace")
    process = subprocess.Popen([*CLUSTER, str(NODES)], stdin=PIPE, stdout=PIPE, text=True)
    with process:
        try:
            told = json.loads(process.stdout.readline())
            client = f"ray://127.0.0.1:{told['client_port']}"
            yield RayCluster(process, told["address"], client, told["nodes"])
            process.stdin.close()
            process.wait(SECONDS)
        finally:
            process.kill()


@pytest.fixture
def pool(cluster: RayCluster) -> Iterator[RayCluster]:
    """With a pool, all of whose members serve: before the test, and again after it."""
    cluster.engine.up(WANTED)
    yield cluster
    cluster.serving()


# Graphs


def graph() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    g.output("y", x * 2.0 + 1.0)
    return g


def computes(session: hg.Session, device: str | None = None) -> bool:
    x = np.arange(4, dtype=np.float32)
    return np.array_equal(session.compile(graph(), device).run(x=x)["y"], x * 2 + 1)


def test_up_places_one_daemon_on_each_node_and_they_compute(pool: RayCluster) -> None:
    found = pool.status()
    assert [one.state for one in found.members] == ["serving"] * NODES
    assert found.placement == "CREATED"
    # Daemon, actor, node: each node has one.
    assert {parent(parent(one.pid)) for one in found.members} == set(pool.nodes)
    lives = set()
    for one in found.members:
        with hg.connect(one.url) as session:
            assert computes(session)
            lives.add(session.info.incarnation)
    assert len(lives) == NODES


def test_up_again_changes_nothing(pool: RayCluster) -> None:
    before = pool.status()
    done = pool.cli("up", "--port", "0", "--serve", *SERVE)
    assert done.returncode == 0, done.stderr
    assert pool.status() == before
    assert all(one.url in done.stdout for one in before.members)
    assert f"--pool ray:heliograph@{pool.address}" in done.stderr


def test_another_pool_of_the_same_name_is_refused(pool: RayCluster) -> None:
    before = pool.status()
    done = pool.cli("up", "--members", "2", "--port", "0", "--serve", *SERVE)
    assert done.returncode == 1
    assert "members: 3, not 2" in done.stderr and "pool down" in done.stderr
    assert pool.status() == before


def test_status_is_for_people_and_for_programs(pool: RayCluster) -> None:
    plain = pool.cli("status")
    assert plain.returncode == 0 and "3 of 3 members serve" in plain.stderr
    told = json.loads(pool.cli("status", "--json").stdout)
    assert [one["state"] for one in told["members"]] == ["serving"] * NODES
    assert all(one["url"] in plain.stdout for one in told["members"])


def test_a_cluster_is_reached_from_elsewhere(pool: RayCluster) -> None:
    assert RayEngine(pool.client_address).status(WANTED.name) == pool.status()


def test_more_members_than_nodes_place_none_and_leave_nothing(pool: RayCluster) -> None:
    done = pool.cli("up", "--name", "large", "--members", "9", "--timeout", "2", "--port", "0")
    assert done.returncode == 1
    assert "needs 9 nodes" in done.stderr and "0 members are placed" in done.stderr
    assert "reduce --members" in done.stderr
    assert "no pool 'large'" in pool.cli("status", "--name", "large").stderr


def test_a_killed_daemon_is_started_again_by_its_supervisor(pool: RayCluster) -> None:
    victim, *others = pool.status().members
    supervisor = parent(victim.pid)
    with hg.connect(victim.url) as session:
        before = session.info.incarnation
        plan = session.compile(graph())
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(hg.ConnectionError):
            while True:
                plan.run(x=np.zeros(4, np.float32), timeout=SECONDS)
    found = until(lambda: restarted(pool, victim.pid), "the daemon is started again")
    again = found.members[0]
    assert (again.starts, again.why.partition(":")[0]) == (victim.starts + 1, "it was ended by SIGKILL")
    assert parent(again.pid) == supervisor
    with hg.connect(again.url) as session:
        assert session.info.incarnation != before and computes(session)
    assert found.members[1:] == tuple(others)


def restarted(pool: RayCluster, pid: int) -> PoolStatus | None:
    """The pool, when all serve and none as this process."""
    found = pool.status()
    is_whole = found.serving == NODES and all(one.pid != pid for one in found.members)
    return found if is_whole else None


def test_a_killed_supervisor_takes_its_daemon_along_and_both_are_started_again(pool: RayCluster) -> None:
    victim = pool.status().members[1]
    supervisor = parent(victim.pid)
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not parent(victim.pid), "the daemon has ended with its supervisor")
    again = until(lambda: restarted(pool, victim.pid), "both are started again").members[1]
    assert parent(again.pid) not in (0, supervisor)
    with hg.connect(again.url) as session:
        assert computes(session)


class Told:
    """What a source tells, to be looked at by the test."""

    def __init__(self) -> None:
        self.lists: queue.Queue[dict[str, str]] = queue.Queue()
        self.errors: list[HeliographError] = []

    def changed(self, found: Sequence[ListedMember]) -> None:
        self.lists.put({one.name: one.url for one in found})

    def failed(self, error: HeliographError) -> None:
        self.errors.append(error)

    def until(self, wanted: dict[str, str]) -> None:
        """Waits for a list."""
        deadline = time.monotonic() + SECONDS
        while self.lists.get(timeout=max(0.1, deadline - time.monotonic())) != wanted:
            pass


@pytest.fixture
def told(pool: RayCluster) -> Iterator[Told]:
    """A source that has told of all members."""
    made = Told()
    source = open_source(f"ray:heliograph@{pool.address}")
    source.start(made.changed, made.failed)
    try:
        made.until(urls(pool))
        yield made
    finally:
        source.close()


def urls(pool: RayCluster) -> dict[str, str]:
    return {f"heliograph-{one.rank}": one.url for one in pool.serving().members}


def test_a_source_tells_of_members_that_were_restarted(pool: RayCluster, told: Told) -> None:
    victim = pool.status().members[2]
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: restarted(pool, victim.pid), "the daemon is started again")
    told.until(urls(pool))
    assert told.errors == []


def test_a_source_keeps_the_members_while_their_registry_restarts(pool: RayCluster, told: Told) -> None:
    before = pool.status()
    (registry,) = processes(r"ray::Registry")
    os.kill(registry, signal.SIGKILL)
    until(lambda: processes(r"ray::Registry") not in ([], [registry]), "the registry is started again")
    assert pool.serving() == before
    assert told.lists.empty()


def test_a_source_outlives_what_speaks_to_ray_for_it(pool: RayCluster, told: Told) -> None:
    (agent,) = processes(r"mortal \d+ heliograph_server.launchers.ray.agent .*watch")
    os.kill(agent, signal.SIGKILL)
    until(lambda: processes(r"ray.agent .*watch") not in ([], [agent]), "it is started again")
    victim = pool.status().members[0]
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: restarted(pool, victim.pid), "the daemon is started again")
    told.until(urls(pool))
    assert len(told.errors) == 1


def test_a_node_that_is_killed_fails_its_runs_alone_and_its_member_moves(pool: RayCluster) -> None:
    members = pool.status().members
    node = parent(parent(members[1].pid))
    sessions = [hg.connect(one.url) for one in members]
    loops = [begin_loop(session) for session in sessions]
    pool.remove(node)
    with pytest.raises(hg.ConnectionError):
        loops[1].result(timeout=SECONDS)
    for number in (0, 2):
        # They go on, until they are told to end, and others run beside them.
        assert not loops[number].done()
        loops[number].cancel()
        assert computes(sessions[number])
    for session in sessions:
        session.close()
    until(lambda: not parent(members[1].pid), "the daemon has ended with its node")
    lost = until(lambda: is_lost(pool, 1), "the loss is known")
    assert (lost.serving, lost.members[1].url) == (NODES - 1, "")
    shown = pool.cli("status")
    assert shown.returncode == 1 and "waits for a node" in shown.stdout
    pool.add()
    again = pool.serving()
    assert parent(parent(again.members[1].pid)) == pool.nodes[-1]
    assert [again.members[one] for one in (0, 2)] == [members[one] for one in (0, 2)]


def test_a_client_of_a_head_loses_what_ran_on_a_killed_node_and_goes_on_with_the_others(
    pool: RayCluster,
) -> None:
    names = [f"heliograph-{rank}/cpu0" for rank in range(NODES)]
    node = parent(parent(pool.status().members[2].pid))
    head = Daemon("--device", DEVICE, "--pool", f"ray:@{pool.address}")
    try:
        wait_until_serving(head.url)
        # A session each, since work of one session runs in its order.
        with hg.connect(head.url) as session, hg.connect(head.url) as other:
            wait_for_devices(session, "cpu0", *names)
            assert all(computes(session, name) for name in names)
            loops = [begin_loop(session, names[1]), begin_loop(other, names[2])]
            began = time.monotonic()
            pool.remove(node)
            with pytest.raises(hg.MemberLostError, match="heliograph-2"):
                loops[1].result(timeout=SECONDS)
            print(f"the head told of a killed node's member after {time.monotonic() - began:.1f} s")
            assert not loops[0].done()
            loops[0].cancel()
            assert computes(session, names[0]) and computes(session, names[1])
            pool.add()
            wait_for_devices(session, "cpu0", *names)
            assert computes(session, names[2])
    finally:
        head.end()
    until(lambda: not processes(r"ray.agent .*watch"), "what spoke to Ray for the head has ended with it")


def begin_loop(session: hg.Session, device: str | None = None) -> Any:
    """One that would take days."""
    return session.compile(graph(), device).loop(
        {"x": np.zeros(4, np.float32)}, steps=10**9, carry={"y": "x"}
    )


def is_lost(pool: RayCluster, rank: int) -> PoolStatus | None:
    found = pool.status()
    return found if found.members[rank].state == "lost" else None


def test_down_leaves_nothing_and_has_nothing_to_do_the_second_time(cluster: RayCluster) -> None:
    cluster.engine.up(WANTED)
    done = cluster.cli("down")
    assert done.returncode == 0, done.stderr
    assert "killed" not in done.stderr
    until(
        lambda: not processes(r"heliograph.cli serve|ray::Member|ray::Registry"), "all processes have ended"
    )
    again = cluster.cli("down")
    assert again.returncode == 0 and "nothing to do" in again.stderr
    asked = cluster.cli("status")
    assert asked.returncode == 1 and "there is no pool 'heliograph'" in asked.stderr


def test_a_daemon_that_cannot_start_is_told_and_taken_away(cluster: RayCluster) -> None:
    done = cluster.cli("up", "--port", "0", "--serve", "--device", "cpu:thraeds=1")
    assert done.returncode == 1
    assert "no parameter 'thraeds'" in done.stderr
    assert "no pool 'heliograph'" in cluster.cli("status").stderr


def test_without_its_cluster_no_daemon_is_left_and_a_source_says_so_once(cluster: RayCluster) -> None:
    """The last one: nothing comes after it."""
    cluster.engine.up(WANTED)
    members = cluster.serving().members
    told = Told()
    source = open_source(f"ray:@{cluster.address}")
    source.start(told.changed, told.failed)
    try:
        told.until(urls(cluster))
        cluster.process.stdin.close()
        assert cluster.process.wait(SECONDS) == 0
        until(lambda: not any(parent(one.pid) for one in members), "all daemons have ended")
        until(lambda: told.errors, "the source has found out")
        with pytest.raises(hg.UnavailableError, match="no Ray cluster"):
            cluster.engine.status(WANTED.name)
        assert len(told.errors) == 1 and told.lists.empty()
    finally:
        source.close()
