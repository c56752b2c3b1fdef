"""Daemons as supervised children, and what speaks to an engine: all that needs no engine."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest

import heliograph as hg
from heliograph.cli import main
from heliograph.errors import ConfigurationError, HeliographError, InvalidArgumentError, UnavailableError
from heliograph_server.launchers import child_process
from heliograph_server.launchers.ray.address import check_reach, endpoint
from heliograph_server.launchers.specification import (
    MemberStatus,
    PoolSpecification,
    PoolStatus,
    check_serve_arguments,
    pool_from_json,
)
from heliograph_server.launchers.supervisor import (
    LONGEST_PAUSE_SECONDS,
    SupervisedDaemon,
    Supervisor,
    SupervisorPhase,
    ending,
    pause_seconds,
)
from heliograph_server.pool.discovery import ListedMember, open_source
from heliograph_server.pool.ray_discovery import RaySource

SECONDS = 60.0
SERVE = ("--listen", "grpc://127.0.0.1:0", "--device", "cpu:threads=1,memory=64MiB")
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ends it with its parent")


# Supervised daemons


class Changes:
    """What a supervisor tells."""

    def __init__(self) -> None:
        self.children: queue.Queue[SupervisedDaemon] = queue.Queue()

    def until(self, phase: SupervisorPhase) -> SupervisedDaemon:
        """The next that is in this phase."""
        while (found := self.children.get(timeout=SECONDS)).phase != phase:
            pass
        return found


@contextmanager
def supervised(*arguments: str) -> Iterator[tuple[Supervisor, Changes]]:
    changes = Changes()
    supervisor = Supervisor(arguments, on_change=changes.children.put)
    try:
        yield supervisor, changes
    finally:
        supervisor.stop(SECONDS)


@needs_linux
def test_a_daemon_that_ends_is_started_again_as_another() -> None:
    with supervised(*SERVE) as (supervisor, changes):
        first = changes.until(SupervisorPhase.SERVING)
        with hg.connect(first.url) as session:
            life = session.info.incarnation
        os.kill(first.pid, signal.SIGKILL)
        ended = changes.until(SupervisorPhase.RESTARTING)
        assert (ended.url, ended.pid, ended.why.partition(":")[0]) == ("", 0, "it was ended by SIGKILL")
        second = changes.until(SupervisorPhase.SERVING)
        assert (second.starts, supervisor.child) == (2, second)
        with hg.connect(second.url) as session:
            assert session.info.incarnation != life


@needs_linux
def test_a_stopped_daemon_ends_well_and_is_not_started_again() -> None:
    with supervised(*SERVE) as (supervisor, changes):
        pid = changes.until(SupervisorPhase.SERVING).pid
        assert supervisor.stop(SECONDS)
        assert changes.until(SupervisorPhase.STOPPED) == supervisor.child
        assert has_ended(pid)


@needs_linux
def test_a_daemon_that_does_not_end_in_time_is_killed() -> None:
    with supervised(*SERVE) as (supervisor, changes):
        pid = changes.until(SupervisorPhase.SERVING).pid
        os.kill(pid, signal.SIGSTOP)
        assert not supervisor.stop(0.1)
        assert has_ended(pid)
        assert supervisor.child.phase == SupervisorPhase.STOPPED


@needs_linux
def test_last_words_tell_why_a_daemon_does_not_start() -> None:
    with supervised("--device", "cpu:thraeds=1") as (_, changes):
        why = changes.until(SupervisorPhase.RESTARTING).why
        assert why.startswith("it ended with status 1: ") and "no parameter 'thraeds'" in why
        assert changes.until(SupervisorPhase.STARTING).starts == 2


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


SUPERVISE = """
import sys, time
from heliograph_server.launchers.supervisor import Supervisor, SupervisorPhase
def tell(child):
    if child.phase == SupervisorPhase.SERVING:
        print(child.pid, flush=True)
supervisor = Supervisor(sys.argv[1:], on_change=tell)
time.sleep(600)
"""


@needs_linux
def test_a_daemon_for_which_there_was_no_process_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError("no process is left"), RuntimeError("no thread is left")]
    started = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return started(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with supervised(*SERVE) as (_, changes):
        assert changes.until(SupervisorPhase.RESTARTING).why == "it could not be started: no thread is left"
        assert changes.until(SupervisorPhase.SERVING).starts == 1


@needs_linux
def test_a_daemon_ends_with_a_supervisor_that_is_killed() -> None:
    command = [sys.executable, "-c", SUPERVISE, *SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        daemon = os.pidfd_open(int(process.stdout.readline()))
        try:
            process.kill()
            assert select.select([daemon], [], [], SECONDS)[0], "the daemon is left"
        finally:
            os.close(daemon)


@needs_linux
def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    command = child_process.command("this", ["never runs"])
    command[3] = "1"
    assert subprocess.run(command, timeout=SECONDS).returncode == 1


def test_pauses_between_starts_grow_to_a_bound() -> None:
    pauses = [pause_seconds(failures) for failures in range(1, 2000)]
    assert pauses == sorted(pauses) and pauses[0] < 1 and pauses[-1] == LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("status", "text"), [(0, "status 0"), (3, "status 3"), (-9, "SIGKILL"), (-250, "signal 250")]
)
def test_the_end_of_a_process_is_told_in_words(status: int, text: str) -> None:
    assert ending(status).endswith(text)


# What is asked for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frob"], "--frob"),
        (["--listen", "grpc://127.0.0.1:1"], "no --listen"),
        (["--pool", "static:a:7070"], "no --pool"),
        (["--drain-seconds", "soon"], "soon"),
        (["--drain-seconds", "-1"], "--drain-seconds is -1"),
        (["--limit", "tensor=5"], "--limit"),
    ],
)
def test_serve_arguments_that_no_daemon_takes_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_serve_arguments(arguments)
    assert caught.value.advice


def test_a_configuration_file_is_the_nodes() -> None:
    check_serve_arguments(["--config", "/on/the/nodes.toml", "--insecure"])


@pytest.mark.parametrize(
    "wrong",
    [{"name": "a/b"}, {"name": ""}, {"name": "-a"}, {"members": -1}, {"cpus": -1.0}, {"port": 65536}],
    ids=str,
)
def test_a_pool_that_cannot_be_is_refused(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PoolSpecification(**wrong)


def test_pools_differ_in_what_is_named() -> None:
    pool = PoolSpecification(members=3, serve=("--insecure",))
    assert PoolSpecification(serve=("--insecure",)).difference(pool) == ""
    assert PoolSpecification(members=2, serve=("--insecure",)).difference(pool) == "members: 3, not 2"
    assert "serve" in PoolSpecification().difference(pool)


def test_a_status_survives_its_way_as_json() -> None:
    member = MemberStatus(0, "serving", "grpc://127.0.0.1:7070", "127.0.0.1", 17, 2, "why")
    found = PoolStatus(PoolSpecification(members=1, serve=("--insecure",)), "CREATED", (member,))
    assert pool_from_json(json.loads(json.dumps(found.as_json()))) == found
    assert json.loads(json.dumps(asdict(found))) == json.loads(json.dumps(found.as_json()))


# Addresses of clusters


@pytest.mark.parametrize(
    ("address", "where"),
    [
        ("auto", None),
        ("head:6379", ("head", 6379)),
        ("10.0.0.1", ("10.0.0.1", 6379)),
        ("ray://head", ("head", 10001)),
        ("ray://[::1]:5", ("::1", 5)),
    ],
)
def test_a_cluster_has_an_address(address: str, where: tuple[str, int] | None) -> None:
    assert endpoint(address) == where


@pytest.mark.parametrize("address", ["", "a b", "http://a", "a:b", "a:99999", "ray://", "a/b", "ray://a?b"])
def test_what_is_no_address_of_a_cluster_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not an address of a Ray cluster"):
        endpoint(address)


def test_a_cluster_that_nobody_is_at_is_told_at_once() -> None:
    with pytest.raises(UnavailableError, match="Connection refused"):
        check_reach("127.0.0.1:1")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
@pytest.mark.parametrize("action", ["up", "status", "down"])
def test_without_ray_the_extra_is_named(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", action]) == 1
    assert "heliograph[ray]" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="'ray' is not installed"):
        open_source("ray:")


@pytest.mark.parametrize("wrong", [["--timeout", "0"], ["--timeout", "nan"], ["--members", "-2"]], ids=str)
def test_a_command_line_that_cannot_be_is_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "up", *wrong]) == 1
    assert "error: " in capsys.readouterr().err


# The source, with an agent that says what the test has written


class Told:
    """What a source tells, in its order: lists as dictionaries, errors as they are."""

    def __init__(self) -> None:
        self.things: queue.Queue[Any] = queue.Queue()

    def changed(self, found: Sequence[ListedMember]) -> None:
        self.things.put({one.name: one.url for one in found})

    def failed(self, error: HeliographError) -> None:
        self.things.put(error)

    def next(self) -> Any:
        return self.things.get(timeout=SECONDS)


Say = Callable[..., None]


@contextmanager
def watching() -> Iterator[tuple[Told, queue.Queue[subprocess.Popen[str]]]]:
    """A source of the pool "p", and its agents, which repeat what is written to them."""
    agents: queue.Queue[subprocess.Popen[str]] = queue.Queue()

    def start(task: Mapping[str, Any]) -> subprocess.Popen[str]:
        assert task == {"do": "watch", "name": "p", "address": "there:1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        agent = subprocess.Popen(["cat"], **pipes, text=True, bufsize=1)
        agents.put(agent)
        return agent

    told = Told()
    source = RaySource("p", "there:1", start)
    source.start(told.changed, told.failed)
    try:
        yield told, agents
    finally:
        source.close()
        source.close()


def say(agent: subprocess.Popen[str], *urls: str, is_settled: bool = True) -> None:
    members = [{"rank": rank, "url": url, "state": "", "pid": 1} for rank, url in enumerate(urls)]
    write(agent, json.dumps({"members": members, "is_settled": is_settled}))


def write(agent: subprocess.Popen[str], line: str) -> None:
    assert agent.stdin is not None
    agent.stdin.write(line + "\n")


def test_a_source_tells_the_members_that_serve_by_their_places() -> None:
    with watching() as (told, agents):
        agent = agents.get(timeout=SECONDS)
        say(agent, "grpc://a:1", "", "grpc://c:1")
        assert told.next() == {"p-0": "grpc://a:1", "p-2": "grpc://c:1"}
        say(agent, "grpc://a:1", "", "grpc://c:1")
        say(agent, "grpc://a:1", "grpc://b:9", "grpc://c:1")
        assert told.next() == {"p-0": "grpc://a:1", "p-1": "grpc://b:9", "p-2": "grpc://c:1"}


def test_a_registry_that_has_just_begun_takes_no_member_away() -> None:
    with watching() as (told, agents):
        agent = agents.get(timeout=SECONDS)
        say(agent, "grpc://a:1", "grpc://b:1")
        told.next()
        say(agent, is_settled=False)
        say(agent, "grpc://a:2", is_settled=False)
        assert told.next() == {"p-0": "grpc://a:2", "p-1": "grpc://b:1"}
        say(agent, "grpc://a:2")
        assert told.next() == {"p-0": "grpc://a:2"}


def test_what_is_absent_is_told_once_until_it_is_there_again() -> None:
    with watching() as (told, agents):
        agent = agents.get(timeout=SECONDS)
        for why in ("no such pool", "nobody answers", "no such pool"):
            write(agent, json.dumps({"absent": why}))
        assert told.next() == {}
        error = told.next()
        assert isinstance(error, UnavailableError) and "no such pool" in error.message and error.advice
        say(agent, "grpc://a:1")
        assert told.next() == {"p-0": "grpc://a:1"}
        write(agent, json.dumps({"absent": "gone again"}))
        assert "gone again" in told.next().message


@pytest.mark.parametrize(
    "last", ["", "no JSON", "[]", '{"error": {"reason": 1, "message": "m", "advice": ""}}']
)
def test_an_agent_that_ends_or_says_nonsense_is_replaced(last: str) -> None:
    with watching() as (told, agents):
        agent = agents.get(timeout=SECONDS)
        say(agent, "grpc://a:1")
        told.next()
        if last:
            write(agent, last)
        else:
            agent.kill()
        assert isinstance(told.next(), UnavailableError)
        other = agents.get(timeout=SECONDS)
        say(other, "grpc://a:1", "grpc://b:1")
        # Nothing was forgotten, and nothing more was told.
        assert told.next() == {"p-0": "grpc://a:1", "p-1": "grpc://b:1"}
        assert agent.poll() is not None
