"""Traces of runs over several hosts: one trace shows the client, the head and each member."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from collectors import Collector, Received, Tracer, collector, tracer
from forked_daemons import running_daemon

import heliograph as hg

__all__ = ["tracer"]

CPU = "--device", "cpu:threads=1"
X = np.arange(4, dtype=np.float32) / 4
#: How many nodes of the graph each of two members has, in turn.
LENGTH = 4


@pytest.fixture
def gathering() -> Iterator[Collector]:
    with collector() as made:
        yield made


def chain() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    for number in range(LENGTH):
        with g.scope(f"n{number}"):
            x = hg.tanh(x) - hg.sin(x)
    g.output("y", x)
    return g


def traced_run(session: hg.Session, tracer: Tracer, **how: bool) -> str:
    """Compiles the chain for the members in turn and runs it twice; the number of the trace."""
    names = [one.name for one in session.devices][-2:]
    pins = {f"n{number}/*": names[number % 2] for number in range(LENGTH)}
    with tracer.request() as number:
        plan = session.compile(chain(), devices=names, pins=pins)
        plan.run(x=X)
        plan.run(x=X, **how)
    return number


def named(spans: list[Received], name: str) -> list[Received]:
    return [one for one in spans if one.name == name]


def instance(span: Received) -> str:
    """The URL of the daemon that made it."""
    return str(span.resource["service.instance.id"]).split()[0]


def check_exchange(spans: list[Received], run: Received) -> None:
    """A member's run shows when it waited for values of the other, on its device."""
    (compute,) = [one for one in spans if one.parent == run.span and one.name == "compute"]
    below = [one for one in spans if one.parent == compute.span]
    assert len(named(below, "split")) == LENGTH // 2
    assert named(below, "exchange") and {one.name for one in below} == {"split", "exchange"}
    assert all(compute.begin_ns <= one.begin_ns <= one.end_ns <= compute.end_ns for one in below)
    assert run.attributes["heliograph.exchange_run"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("fetch", [True, False])
def test_one_trace_shows_the_client_the_head_and_each_member(
    fetch: bool, gathering: Collector, tracer: Tracer
) -> None:
    with ExitStack() as stack:
        traces = "--traces", gathering.url
        start = stack.enter_context
        members = [start(running_daemon(*CPU, *traces)) for _ in range(2)]
        remote = (word for url in members for word in ("--device", f"remote:url={url}"))
        head = start(running_daemon(*CPU, *traces, *remote))
        with hg.connect(head) as session:
            number = traced_run(session, tracer, fetch=fetch)
    here, there = tracer.made(number), gathering.of_trace(number)
    runs = named(there, "heliograph.run")
    of_head = [one for one in runs if instance(one) == head]
    assert {one.parent for one in of_head} == {one.span for one in named(here, "heliograph.run")}
    for member in members:
        of_member = [one for one in runs if instance(one) == member]
        assert {one.parent for one in of_member} == {one.span for one in of_head}
        for run in of_member:
            check_exchange(there, run)
    assert len(runs) == 2 + 2 * 2
    compiled = named(there, "heliograph.compile")
    (at_head,) = [one for one in compiled if instance(one) == head]
    assert [one.parent for one in compiled if one is not at_head] == [at_head.span] * 2


def test_a_head_that_exports_nothing_leaves_no_gap(gathering: Collector, tracer: Tracer) -> None:
    with ExitStack() as stack:
        traces = "--traces", gathering.url
        members = [stack.enter_context(running_daemon(*CPU, *traces)) for _ in range(2)]
        # The head is in this process.
        with hg.connect(members) as session:
            number = traced_run(session, tracer)
    here, there = tracer.made(number), gathering.of_trace(number)
    runs = named(there, "heliograph.run")
    assert sorted(map(instance, runs)) == sorted(members * 2)
    assert {one.parent for one in runs} == {one.span for one in named(here, "heliograph.run")}
