"""Graphs that a session compiled before: not decoded, validated or scheduled again, and never wrongly so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_client import CoreClient
from graph_arrivals import F4, Arrivals, X, chain
from plan_options import plan_options

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidGraphError
from heliograph_proto.graph import Leaf, LeafKind
from heliograph_proto.plans import CompileRequest, ReceivedGraph
from heliograph_proto.sessions import Limits
from heliograph_server.compile.plan_cache import MOST_BYTES, MOST_GRAPHS, KnownGraphs


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


def test_the_same_bytes_are_decoded_and_validated_once(arrivals: Arrivals) -> None:
    known = KnownGraphs(Limits())
    first = known.validated(arrivals.of(chain("neg", "sqr")), ())
    assert known.validated(arrivals.of(chain("neg", "sqr")), ()) is first
    assert known.validated(arrivals.of(chain("sqr", "neg")), ()) is not first
    assert arrivals.decoded == 2


def test_a_weight_without_a_digest_is_checked_again_where_nothing_is_bound_to_it(arrivals: Arrivals) -> None:
    graph = chain("neg")
    bare = replace(graph, leaves=(Leaf(LeafKind.WEIGHT, "w", F4),))
    known = KnownGraphs(Limits())
    known.validated(arrivals.of(bare), (0,))
    with pytest.raises(InvalidGraphError):
        known.validated(arrivals.of(bare), ())


def test_what_was_refused_is_refused_again(arrivals: Arrivals) -> None:
    known = KnownGraphs(Limits())
    for _ in range(2):
        with pytest.raises(HeliographError):
            known.validated(arrivals.of(chain("no such op")), ())
    assert arrivals.decoded == 2


def test_the_least_recently_used_graph_is_forgotten_first(arrivals: Arrivals) -> None:
    known = KnownGraphs(Limits())
    graphs = [chain(*["neg"] * count) for count in range(1, MOST_GRAPHS + 2)]
    for graph in graphs[:-1]:
        known.validated(arrivals.of(graph), ())
    known.validated(arrivals.of(graphs[0]), ())
    known.validated(arrivals.of(graphs[-1]), ())
    before = arrivals.decoded
    known.validated(arrivals.of(graphs[0]), ())
    assert arrivals.decoded == before
    known.validated(arrivals.of(graphs[1]), ())
    assert arrivals.decoded == before + 1


def test_a_graph_larger_than_all_that_is_kept_is_not_kept(arrivals: Arrivals) -> None:
    known = KnownGraphs(Limits())
    for _ in range(2):
        known.validated(arrivals.of(chain("neg"), MOST_BYTES + 1), ())
    assert arrivals.decoded == 2


# Through a session


class Counting(FakeDevice):
    """Counts how often it is asked about a node."""

    asked = 0

    def supports_op(self, *what: object) -> str:
        self.asked += 1
        return super().supports_op(*what)  # type: ignore[arg-type]


@pytest.fixture
def fake() -> Counting:
    return Counting("fake0", 2**20, is_host=False)


@pytest.fixture
def client(fake: Counting) -> Iterator[CoreClient]:
    with CoreClient(fake, CpuDevice("cpu0", 1, native=False)) as found:
        yield found


def compile_again(client: CoreClient, plan: int, graph: ReceivedGraph, **wish: Any) -> None:
    options = plan_options(devices=("fake0", "cpu0"), **wish)
    client.session.compile(CompileRequest(plan, graph, options))


def device_of(client: CoreClient, plan: int) -> list[int]:
    report = client.session.explain(plan)
    return [report.splits[node.split].device for node in report.nodes]


def test_a_schedule_is_found_once_for_each_set_of_pins(
    client: CoreClient, fake: Counting, arrivals: Arrivals
) -> None:
    graph, counts = chain("neg", "sqr", "neg"), []
    for plan, pinned in ((100, 1), (101, 1), (102, 2)):
        compile_again(client, plan, arrivals.of(graph), pins={0: "fake0", pinned: "cpu0"})
        counts.append(fake.asked)
    assert counts[0] == counts[1] < counts[2]
    assert [device_of(client, plan) for plan in (100, 101, 102)] == [[0, 1, 1], [0, 1, 1], [0, 0, 1]]
    for plan in (100, 101, 102):
        done = client.do(
            c.RunCommand(plan, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),))
        )
        assert np.array_equal(np.frombuffer(done.outputs[0][1], "f4"), -X * X)


def test_where_memory_is_tight_a_schedule_is_found_anew(
    client: CoreClient, fake: Counting, arrivals: Arrivals
) -> None:
    counts = []
    for plan, limit in ((100, 500), (101, 501)):
        compile_again(client, plan, arrivals.of(chain("neg", "sqr", "neg")), memory={"fake0": limit})
        counts.append(fake.asked)
    assert counts[0] < counts[1]
