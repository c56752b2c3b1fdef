"""What is measured of devices and of the ways between them, and what placement makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker
from core_client import CoreClient
from graph_arrivals import compile_received

from heliograph_backends.contract import Plan
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import Cause, DeviceShare, LinkReport, NodePlacement, PlanReport, RowSplit
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_server.plans.divided import client_report
from heliograph_server.plans.multi_device import LocalMultiPlan
from heliograph_server.resources.measurements import (
    CHANGE,
    MOST_TENANTS,
    Average,
    HostMeasurements,
    OpKind,
    Recorder,
)
from heliograph_server.scheduler.costs import NodeWork
from heliograph_server.scheduler.model import Rates, SiteLink
from heliograph_server.scheduler.tensor_split import divide

#: A millisecond at usual rates, and twice that.
ONE_MS = OpKind("one", NodeWork(Rates().flops_per_s * (1e-3 - Rates().node_s), 1.0))
TWO_MS = OpKind("two", NodeWork(Rates().flops_per_s * (2e-3 - Rates().node_s), 1.0))


# Ways between sites


def test_a_way_that_nobody_measured_is_assumed() -> None:
    found = HostMeasurements()
    assert found.links(["", "a", "b"]) == {}
    found.note_link("", "a", 4e-3, 5e7)
    links = found.links(["", "a", "a", "b"])
    assert links[0, 1] == links[0, 2] == SiteLink(4e-3, 5e7, True, ("", "a"))
    assert links[1, 0].sites == ("a", "") and (1, 2) not in links
    assert links[1, 3] == SiteLink(sites=("a", "b")) and not links[1, 3].is_measured


def test_a_round_trip_is_known_before_the_bandwidth_is() -> None:
    found = HostMeasurements()
    found.note_link("b", "a", 4e-3)
    assert found.link("a", "b") == SiteLink(4e-3, SiteLink().bytes_per_s, False, ("a", "b"))
    found.note_link("a", "b", 4e-3, 1e6)
    assert found.link("a", "b").is_measured and found.link("b", "a").bytes_per_s == 1e6


def test_what_is_told_changes_only_when_measurements_are_far_off() -> None:
    average = Average()
    assert average.note(1.0) and average.published == 1.0
    assert not any(average.note(value) for value in (1.2, 0.8, 1.4, 0.7, 1.3))
    assert average.published == 1.0
    assert any(average.note(3.0) for _ in range(5)) and CHANGE < average.published <= 3.0


def test_a_site_that_is_gone_is_not_known_any_more() -> None:
    found = HostMeasurements()
    found.note_link("", "a", 4e-3, 5e7)
    found.forget_site("a")
    assert found.links(["", "a"]) == {}


@pytest.mark.parametrize(
    ("a", "b", "trip_s", "per_s"),
    [
        ("a", "a", 1e-3, 1e6),
        ("a", "b", 0.0, 1e6),
        ("a", "b", float("nan"), 1e6),
        ("a", "b", float("inf"), 1e6),
        ("a", "b", 1e-3, -1.0),
        ("a", "b", 1e-3, float("nan")),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(a: str, b: str, trip_s: float, per_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="the link from"):
        HostMeasurements().note_link(a, b, trip_s, per_s)


# Times of ops


def test_the_time_of_a_split_is_spread_over_its_nodes_as_estimates_go() -> None:
    times = HostMeasurements().of_tenant(b"somebody")
    times.note("d", [ONE_MS, OpKind(TWO_MS.key, TWO_MS.work, 2)], 0.5)
    assert times.times("d", ["two", "other", "one"]) == {0: pytest.approx(0.2), 2: pytest.approx(0.1)}
    assert times.times("elsewhere", ["one"]) == {}


def test_a_device_has_the_rates_that_its_runs_tell() -> None:
    found = HostMeasurements()
    assert found.rates("d") is None
    found.of_tenant(b"").note("d", [ONE_MS], 8e-3)
    rates = found.rates("d")
    assert rates is not None and rates.flops_per_s == pytest.approx(Rates().flops_per_s / 8)


def test_tenants_share_rates_but_not_what_they_ran() -> None:
    found = HostMeasurements()
    found.of_tenant(b"one").note("d", [ONE_MS], 8e-3)
    found.of_tenant(b"").note("d", [TWO_MS], 16e-3)
    assert found.of_tenant(b"one").times("d", ["one", "two"]).keys() == {0}
    for tenant in (b"other", b""):
        assert found.of_tenant(tenant).times("d", ["one", "two"]) == {}
    assert found.rates("d") is not None


def test_the_tenants_that_came_last_are_known() -> None:
    found = HostMeasurements()
    for number in range(MOST_TENANTS + 1):
        found.of_tenant(bytes([number + 1])).note("d", [ONE_MS], 8e-3)
    assert found.of_tenant(bytes([1])).times("d", ["one"]) == {}
    assert found.of_tenant(bytes([MOST_TENANTS + 1])).times("d", ["one"]) != {}


def test_runs_tell_only_what_is_new() -> None:
    times = HostMeasurements().of_tenant(b"somebody")
    recorder = Recorder(times, [("d", [ONE_MS])])
    recorder.note([])
    assert times.times("d", ["one"]) == {}
    recorder.note([8e3])
    assert times.times("d", ["one"]) == {0: pytest.approx(8e-3)}
    before = times.stamp(["d"], ["", "a"])
    for took_us in (9e3, 7e3, 8e3):
        recorder.note([took_us])
    assert times.stamp(["d"], ["", "a"]) == before


# Through a session


def products(client: CoreClient, count: int) -> Graph:
    """A chain of products, each with a weight of 64 KiB, which the session has."""
    made = Maker()
    x = made.input(np.ones((2, 128), np.float32))
    for number in range(count):
        x = made.node("matmul", x, made.weight(np.full((128, 128), (number + 1) / 512, np.float32)))
    made.output(x)
    graph, arrays = made.graph(), made.arrays
    digests = [b"", *(client.upload(array.tobytes()) for array in arrays[1:])]
    leaves = zip(graph.leaves, digests, strict=True)
    return replace(graph, leaves=tuple(replace(leaf, digest=digest) for leaf, digest in leaves))


class Compiling(FakeDevice):
    """Counts how often it compiles."""

    compiled = 0

    def compile(self, *what: Any) -> Plan:
        self.compiled += 1
        return super().compile(*what)


@pytest.fixture
def fakes() -> list[Compiling]:
    """The first is far slower than the second, however busy the machine is."""
    found = [Compiling(f"fake{n}", site=site, is_host=False) for n, site in enumerate(("a", "b"))]
    for device, seconds in zip(found, (0.06, 0.001), strict=True):
        device.script.delay("nodes", seconds)
    return found


@pytest.fixture
def client(fakes: list[Compiling]) -> Iterator[CoreClient]:
    with CoreClient(*fakes, CpuDevice("cpu0", 1)) as found:
        yield found


NAMES = ("fake0", "fake1")


def compiled(client: CoreClient, plan: int, graph: Graph, **wish: object) -> list[str]:
    """The device of each node."""
    compile_received(client, plan, graph, devices=NAMES, **wish)
    report = client.session.explain(plan)
    return [report.devices[report.splits[one.split].device].name for one in report.nodes]


def run(client: CoreClient, plan: int, times: int = 3) -> bytes:
    data = np.ones((2, 128), np.float32).tobytes()
    for _ in range(times):
        done = client.do(c.RunCommand(plan, (c.InputBinding(0, data),), (c.OutputBinding(0, 0, True),)))
    return bytes(done.outputs[0][1])


def test_without_a_measured_way_memory_alone_decides(client: CoreClient) -> None:
    assert compiled(client, 1, products(client, 3)) == ["fake0"] * 3
    run(client, 1)
    assert compiled(client, 2, products(client, 3)) == ["fake0"] * 3


def test_what_a_slow_device_took_sends_the_next_plan_to_a_fast_one(client: CoreClient) -> None:
    client.host.measurements.note_link("a", "b", 1e-3, 1e8)
    halves = {0: "fake0", 1: "fake0", 2: "fake1", 3: "fake1"}
    compiled(client, 1, products(client, 4), pins=halves)
    expected = run(client, 1)
    assert compiled(client, 2, products(client, 4)) == ["fake1"] * 4
    assert run(client, 2) == expected


def test_the_way_to_a_device_is_no_time_that_it_computes() -> None:
    times = HostMeasurements().of_tenant(b"somebody")
    recorder = Recorder(times, [("d", [ONE_MS]), ("d", [TWO_MS])], [5e3, 50e3])
    recorder.note_here([8e3, 40e3])
    assert times.times("d", ["one", "two"]) == {0: pytest.approx(3e-3), 1: pytest.approx(4e-3)}


def test_a_first_run_says_nothing(client: CoreClient) -> None:
    client.host.measurements.note_link("a", "b", 1e-3, 1e8)
    compiled(client, 1, products(client, 3))
    run(client, 1, times=1)
    assert client.host.measurements.rates("fake0") is None
    run(client, 1, times=1)
    assert client.host.measurements.rates("fake0") is not None


def test_a_plan_is_compiled_the_same_until_measurements_change(client: CoreClient) -> None:
    """Over a slow way all stays on one device; over a fast one the pinned end takes the rest along."""
    measured = client.host.measurements
    measured.note_link("a", "b", 1e-3, 1e8)
    compiled(client, 1, products(client, 4), pins={0: "fake0", 3: "fake1"})
    run(client, 1)
    first = compiled(client, 2, products(client, 4), pins={0: "fake0"})
    for plan, (trip_s, per_s) in enumerate(((1.2e-3, 1e8), (1e-3, 0.9e8)), 3):
        measured.note_link("a", "b", trip_s, per_s)
        assert compiled(client, plan, products(client, 4), pins={0: "fake0"}) == first
    for _ in range(20):
        measured.note_link("a", "b", 2.0, 1e4)
    assert first == ["fake0", "fake1", "fake1", "fake1"]
    assert compiled(client, 9, products(client, 4), pins={0: "fake0"}) == ["fake0"] * 4


def test_a_plan_that_is_there_is_found_again_until_measurements_change(
    client: CoreClient, fakes: list[Compiling]
) -> None:
    graph, measured = products(client, 2), client.host.measurements
    for plan, (trip_s, new) in enumerate(((1e-3, 1), (1.1e-3, 0), (1e-3, 0), (1.0, 1)), 1):
        before = sum(one.compiled for one in fakes)
        measured.note_link("a", "b", trip_s, 1e8)
        compiled(client, plan, graph)
        assert sum(one.compiled for one in fakes) == before + new, f"compile {plan}"


def test_predictions_are_ordered_as_the_measurements_are(client: CoreClient) -> None:
    """Of the same graph placed in three ways: all slow, half and half, all fast."""
    client.host.measurements.note_link("a", "b", 1e-3, 1e8)
    graph, found = products(client, 4), []
    ways = [{n: NAMES[n >= slow] for n in range(4)} for slow in (4, 2, 0)]
    for plan, pins in enumerate(ways, 1):
        compiled(client, plan, graph, pins=pins)
        run(client, plan)
    for plan, pins in enumerate(ways, 11):
        compiled(client, plan, graph, pins=pins)
        run(client, plan)
        report = client.session.explain(plan)
        found.append((report.predicted_us, max(one.began_us + one.compute_us for one in report.splits)))
    predicted, measured = zip(*found, strict=True)
    assert list(predicted) == sorted(predicted, reverse=True)
    assert list(measured) == sorted(measured, reverse=True)


def test_an_explanation_has_what_was_expected_beside_what_was(client: CoreClient) -> None:
    """A product on each device: half a round trip of a millisecond, and 1 KiB at 1 KiB a millisecond, for
    what is sent to the first, for the copy, and for what comes back."""
    for one, other in (("", "a"), ("a", "b"), ("", "b")):
        client.host.measurements.note_link(one, other, 1e-3, 1.024e6)
    compiled(client, 1, products(client, 2), pins={0: "fake0", 1: "fake1"})
    run(client, 1)
    for plan in range(2, 50):
        compiled(client, plan, products(client, 2), pins={0: "fake0", 1: "fake1"})
        run(client, plan)
        report = client.session.explain(plan)
        first, second = report.splits
        if first.predicted_compute_us == pytest.approx(first.compute_us, rel=CHANGE):
            break  # Neither this run nor those before were held up by what else the machine does.
    assert second.copies[0].predicted_us == second.predicted_copy_us == pytest.approx(500 + 1000)
    assert first.predicted_compute_us == pytest.approx(first.compute_us, rel=CHANGE)
    assert first.predicted_copy_us == pytest.approx(1500)
    assert second.predicted_began_us == first.predicted_compute_us + first.predicted_copy_us
    ended_us = second.predicted_began_us + second.predicted_copy_us + second.predicted_compute_us
    assert report.predicted_us == pytest.approx(ended_us + 1500)
    ways = [("", "a"), ("", "b"), ("a", "b")]
    assert report.links == tuple(LinkReport(*way, pytest.approx(1e3), 1.024e6, True) for way in ways)


def test_a_plan_that_is_best_on_one_device_is_predicted_too(client: CoreClient) -> None:
    client.host.measurements.note_link("a", "b", 1e-3, 1e8)
    compiled(client, 1, products(client, 2))
    report = client.session.explain(1)
    assert report.predicted_us == report.splits[0].predicted_compute_us > 0.0 and report.links == ()


def test_observed_runs_and_pipelines_are_predicted_as_they_run(client: CoreClient) -> None:
    client.host.measurements.note_link("a", "b", 1e-3, 1e8)
    graph = products(client, 4)
    compiled(client, 1, graph, pins={0: "fake0", 3: "fake1"}, pipeline=2)
    compiled(client, 2, graph, pins={0: "fake0", 3: "fake1"}, taps=(1,))
    found = [client.session.explain(plan) for plan in (1, 2)]
    assert len(found[1].splits) > len(found[0].splits)
    assert all(one.predicted_compute_us > 0 for report in found for one in report.splits)
    assert found[0].predicted_us == pytest.approx(found[1].predicted_us)


def test_where_only_a_report_tells_how_long_splits_took_the_next_compile_asks_for_it(
    client: CoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a plan whose parts run on other hosts by themselves."""
    monkeypatch.setattr(LocalMultiPlan, "computed_us", ())
    measured = client.host.measurements
    measured.note_link("a", "b", 1e-3, 1e8)
    halves = {0: "fake0", 1: "fake0", 2: "fake1", 3: "fake1"}
    compiled(client, 1, products(client, 4), pins=halves)
    run(client, 1)
    assert measured.rates("fake0") is None
    assert compiled(client, 2, products(client, 4)) == ["fake1"] * 4
    assert measured.rates("fake0") is not None


# Steps of divided products


@pytest.mark.parametrize(("fractions", "step_us"), [((1.0, 1.0), 4.0 + 5.0), ((1.0, 0.0), 3.0)])
def test_a_divided_product_takes_its_longest_part_and_its_join(
    fractions: tuple[float, float], step_us: float
) -> None:
    leaves = (
        Leaf(LeafKind.INPUT, "x", tensor_type("f32", (2, 8))),
        Leaf(LeafKind.WEIGHT, "w", tensor_type("f32", (4, 8)), bytes(32)),
    )
    product = Node("mul_mat", (1, 0), tensor_type("f32", (2, 4)), {}, "product")
    graph = Graph(leaves, (product,), (Output("y", 2),))
    rows = RowSplit("a", tuple(zip("ab", fractions, strict=True)))
    divided = divide(graph, {1: rows}, Limits(), ())
    nodes = tuple(
        NodePlacement(0, Cause.USER, step_us=3.0 + number) for number in range(len(divided.graph.nodes))
    )
    report = PlanReport(nodes, (), (DeviceShare("a"), DeviceShare("b")))
    [found] = client_report(divided, report, [0] * len(divided.graph.leaves)).nodes
    assert found.step_us == step_us
