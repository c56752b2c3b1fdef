"""Weights over devices from within: contents in parts, memory, what runs at the same time, bad requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from core_client import CoreClient
from daemon_urls import DaemonUrls
from raw_client import RawSession, f32, graph_of, node, raw_channel, still_serves

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    ComputeFailedError,
    HeliographError,
    InvalidArgumentError,
    InvalidGraphError,
    LimitExceededError,
    MissingContentError,
    OutOfMemoryError,
    UnknownDeviceError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import RowSplit
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import graph_pb2, plan_pb2

K, N = 64, 256
X_TYPE, WEIGHT, RESULT = (tensor_type("f32", shape) for shape in ((1, K), (N, K), (1, N)))
X = np.arange(K, dtype=np.float32).reshape(1, K) % 5
W = np.arange(N * K, dtype=np.float32).reshape(N, K) % 7 - 3
EXPECTED = X @ W.T
PLAN, OTHER = 100, 101
NAMES = ("fake0", "fake1", "cpu0")
EVENLY = RowSplit("cpu0", (("fake0", 1.0), ("fake1", 1.0)))
UNEVENLY = RowSplit("fake0", (("fake0", 3.0), ("fake1", 1.0)))
MEMORY = W.nbytes + W.nbytes // 4


def product(digest: bytes) -> Graph:
    return Graph(
        (Leaf(LeafKind.INPUT, "x", X_TYPE), Leaf(LeafKind.WEIGHT, "w", WEIGHT, digest)),
        (Node("mul_mat", (1, 0), RESULT, {}, "product"),),
        (Output("y", 2),),
    )


def in_batches(digest: bytes) -> Graph:
    """The same bytes as a stack of matrices."""
    x, w, y = (tensor_type("f32", shape) for shape in ((2, 1, K), (2, N // 2, K), (2, 1, N // 2)))
    return Graph(
        (Leaf(LeafKind.INPUT, "x", x), Leaf(LeafKind.WEIGHT, "w", w, digest)),
        (Node("mul_mat", (1, 0), y, {}, "product"),),
        (Output("y", 2),),
    )


class Pair:
    """A client of two scripted devices, each with memory of its own for the weight and a quarter of it more,
    and a processor; the weight was uploaded."""

    def __init__(self, client: CoreClient, first: FakeDevice, second: FakeDevice) -> None:
        self.client, self.first, self.second = client, first, second
        self.digest = client.upload(W.tobytes())
        self.graph = product(self.digest)

    def compile(self, plan: int, split: RowSplit, graph: Graph | None = None, **options: object) -> None:
        self.client.compile(
            plan,
            graph or self.graph,
            devices=NAMES,
            splits={1: split},
            **options,  # type: ignore[arg-type]
        )

    def start(self, plan: int = PLAN, x: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = X) -> int:
        return self.client.send(
            c.RunCommand(plan, (c.InputBinding(0, x.tobytes()),), (c.OutputBinding(0, 0, True),))
        )

    def run(self, plan: int = PLAN, x: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = X) -> list[float]:
        done = self.client.wait(self.start(plan, x))
        assert done.error is None, done.error
        found: list[float] = np.frombuffer(done.outputs[0][1], np.float32).tolist()
        return found

    @property
    def content_bytes(self) -> int:
        return self.client.session.statistics().content_bytes


@pytest.fixture
def pair() -> Iterator[Pair]:
    first, second = (FakeDevice(f"fake{number}", MEMORY, is_host=False) for number in range(2))
    with CoreClient(first, second, CpuDevice("cpu0", 1, native=False)) as client:
        yield Pair(client, first, second)


# Contents


def test_a_content_that_is_cut_is_there_once(pair: Pair) -> None:
    pair.compile(PLAN, EVENLY)
    assert pair.run() == EXPECTED.ravel().tolist()
    assert pair.content_bytes == W.nbytes
    assert not pair.client.session.missing_contents([pair.digest])


def test_a_whole_gives_way_to_its_own_part(pair: Pair) -> None:
    """It lies on the first device, where there is no room for three quarters of it beside it."""
    pair.compile(PLAN, UNEVENLY)
    assert pair.run() == EXPECTED.ravel().tolist()
    assert pair.content_bytes == W.nbytes
    assert pair.first.memory().free_bytes < MEMORY - W.nbytes * 3 // 4


def test_a_content_in_parts_can_be_cut_otherwise_or_put_together(pair: Pair) -> None:
    pair.compile(PLAN, EVENLY)
    pair.client.do(c.Free((PLAN,)))
    pair.compile(OTHER, RowSplit("cpu0", (("fake1", 1.0), ("cpu0", 3.0))))
    assert pair.run(OTHER) == EXPECTED.ravel().tolist()
    pair.client.compile(PLAN, pair.graph, devices=["cpu0"])
    assert pair.run() == EXPECTED.ravel().tolist()
    pair.client.compile(
        102,
        in_batches(pair.digest),
        devices=NAMES,
        splits={1: RowSplit("cpu0", (("cpu0", 1.0), ("fake0", 1.0)))},
    )
    stacked = np.concatenate([X @ W[: N // 2].T, X @ W[N // 2 :].T])
    assert pair.run(102, np.stack([X, X])) == stacked.ravel().tolist()


def test_parts_make_a_whole_for_parts_of_another_shape(pair: Pair) -> None:
    pair.compile(PLAN, EVENLY)
    pair.compile(OTHER, RowSplit("cpu0", (("cpu0", 1.0), ("fake1", 1.0))), in_batches(pair.digest))
    stacked = np.concatenate([X @ W[: N // 2].T, X @ W[N // 2 :].T])
    assert pair.run(OTHER, np.stack([X, X])) == stacked.ravel().tolist()
    assert pair.content_bytes == 2 * W.nbytes, "each plan has its parts"


def test_a_whole_that_a_plan_uses_stays(pair: Pair) -> None:
    pair.client.compile(OTHER, pair.graph, devices=["cpu0"])
    pair.compile(PLAN, EVENLY)
    assert pair.content_bytes == 2 * W.nbytes
    assert pair.run(OTHER) == pair.run() == EXPECTED.ravel().tolist()


def test_a_compile_that_fails_loses_no_content(pair: Pair) -> None:
    for split in (EVENLY, UNEVENLY, EVENLY):
        pair.second.script.fail("compile", ComputeFailedError("it is too hot"))
        with pytest.raises(ComputeFailedError, match="too hot"):
            pair.compile(PLAN, split)
        assert pair.content_bytes == W.nbytes and not pair.client.session.missing_contents([pair.digest])
    pair.compile(PLAN, UNEVENLY)
    assert pair.run() == EXPECTED.ravel().tolist() and pair.content_bytes == W.nbytes


def test_parts_that_do_not_fit_are_refused_and_nothing_is_lost(pair: Pair) -> None:
    with pytest.raises(OutOfMemoryError, match="fake1"):
        pair.compile(PLAN, EVENLY, memory={"fake1": W.nbytes // 2 - 1})
    assert pair.content_bytes == W.nbytes
    pair.compile(PLAN, EVENLY)
    assert pair.run() == EXPECTED.ravel().tolist()


def test_memory_that_goes_away_between_two_parts_is_a_typed_error(pair: Pair) -> None:
    """The content may be incomplete then: who compiles again is told to upload it again, and that works."""
    other = pair.second.buffer_type.allocate(W.nbytes)
    gate = pair.first.script
    gate.fail("allocate", OutOfMemoryError("somebody was faster"))
    gate.fail("allocate", OutOfMemoryError("somebody was faster"))
    with pytest.raises(OutOfMemoryError):
        pair.compile(PLAN, RowSplit("cpu0", (("fake0", 1.0), ("cpu0", 1.0))))
    other.free()
    if pair.client.session.missing_contents([pair.digest]):
        pair.client.upload(W.tobytes())
    pair.compile(PLAN, EVENLY)
    assert pair.run() == EXPECTED.ravel().tolist() and pair.content_bytes == W.nbytes


@pytest.mark.parametrize("stacked", [False, True])
def test_a_weight_larger_than_any_device_lies_over_several(stacked: bool) -> None:
    size = W.nbytes * 3 // 4
    devices = [FakeDevice(f"fake{number}", size, is_host=False) for number in range(2)]
    with CoreClient(*devices, CpuDevice("cpu0", 1, 20_000, native=False)) as client:
        digest = client.upload(W.tobytes())
        assert client.session.statistics().content_bytes == W.nbytes
        assert not client.session.missing_contents([digest])
        graph = in_batches(digest) if stacked else product(digest)
        client.compile(PLAN, graph, devices=NAMES, splits={1: EVENLY})
        assert client.session.statistics().content_bytes == W.nbytes
        x = np.stack([X, X]) if stacked else X
        run = c.RunCommand(PLAN, (c.InputBinding(0, x.tobytes()),), (c.OutputBinding(0, 0, True),))
        found = np.frombuffer(client.do(run).outputs[0][1], np.float32)
        assert found.tolist() == EXPECTED.ravel().tolist()
        with pytest.raises(OutOfMemoryError):
            client.compile(OTHER, graph, devices=NAMES)
        with pytest.raises(OutOfMemoryError):
            client.upload(np.ones(2 * size, np.uint8).tobytes())


def test_a_content_that_was_lost_is_missing_and_not_guessed() -> None:
    """Parts went to the host's memory to make room, which somebody else took meanwhile."""
    size = W.nbytes * 3 // 4
    devices = [FakeDevice(f"fake{number}", size, is_host=False) for number in range(2)]
    with CoreClient(*devices, CpuDevice("cpu0", 1, 20_000, native=False)) as client:
        digest = client.upload(W.tobytes())
        for _ in range(2):
            devices[0].script.fail("allocate", OutOfMemoryError("somebody was faster"))
        with pytest.raises(OutOfMemoryError, match="faster"):
            client.compile(PLAN, product(digest), devices=NAMES, splits={1: EVENLY})
        assert client.session.missing_contents([digest]) == (digest,)
        with pytest.raises(MissingContentError):
            client.compile(PLAN, product(digest), devices=NAMES, splits={1: EVENLY})
        client.upload(W.tobytes())
        client.compile(PLAN, product(digest), devices=NAMES, splits={1: EVENLY})


def test_a_content_of_another_size_is_not_cut(pair: Pair) -> None:
    for rows in (N // 2, N * 2):
        digest = pair.client.upload(np.zeros((rows, K), np.float32).tobytes())
        with pytest.raises(InvalidGraphError, match="'w' is f32"):
            pair.compile(PLAN, RowSplit("cpu0", (("cpu0", 1.0), ("fake1", 1.0))), product(digest))


# Running


def test_parts_are_computed_at_the_same_time(pair: Pair) -> None:
    pair.compile(PLAN, EVENLY)
    gates = [device.script.hold("compute") for device in (pair.first, pair.second)]
    run = pair.start()
    assert all(gate.entered.wait(10) for gate in gates), "one waits for the other"
    for gate in gates:
        gate.open()
    assert pair.client.wait(run).error is None


def test_a_part_that_fails_is_the_products_failure(pair: Pair) -> None:
    pair.compile(PLAN, EVENLY)
    origin = pair.graph.origin(0)
    pair.second.script.fail("compute", ComputeFailedError("it is too hot", origin=origin))
    error = pair.client.wait(pair.start()).error
    assert error is not None and "too hot" in error.message
    assert (error.origin.op, error.origin.node, error.origin.operands) == ("mul_mat", 0, origin.operands)
    assert pair.run() == EXPECTED.ravel().tolist()


# Requests that make no sense


@pytest.mark.parametrize(
    ("splits", "error", "words"),
    [
        ({0: EVENLY}, InvalidArgumentError, "value 0 is to lie over devices, but is no weight"),
        ({9: EVENLY}, InvalidArgumentError, "value 9"),
        ({2: EVENLY}, InvalidArgumentError, "value 2"),
        ({1: RowSplit("cpu0", (("gpu7", 1.0),))}, UnknownDeviceError, "gpu7"),
        ({1: RowSplit("", (("cpu0", 1.0),))}, UnknownDeviceError, "''"),
        ({1: RowSplit("cpu0", ())}, InvalidArgumentError, "is 0 or not finite"),
        ({1: RowSplit("cpu0", (("cpu0", float("nan")),))}, InvalidArgumentError, "nan"),
        ({1: RowSplit("cpu0", (("cpu0", -1.0), ("fake0", 2.0)))}, InvalidArgumentError, "-1.0"),
        ({1: RowSplit("cpu0", (("cpu0", 1.0), ("cpu0", 2.0)))}, InvalidArgumentError, "two fractions"),
    ],
)  # fmt: skip
def test_splits_that_make_no_sense(
    pair: Pair, splits: dict[int, RowSplit], error: type[HeliographError], words: str
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=words):
            pair.client.compile(PLAN, pair.graph, devices=NAMES, splits=splits)
    assert pair.content_bytes == W.nbytes


def test_a_split_over_devices_that_the_plan_may_not_use(pair: Pair) -> None:
    with pytest.raises(UnknownDeviceError, match="fake1"):
        pair.client.compile(PLAN, pair.graph, devices=["fake0", "cpu0"], splits={1: EVENLY})


def test_parts_count_against_the_limit_of_nodes() -> None:
    devices = [CpuDevice(f"cpu{number}", 1, native=False) for number in range(3)]
    split = RowSplit("cpu0", tuple((device.name, 1.0) for device in devices))
    with CoreClient(*devices, limits=Limits(graph_nodes=3)) as client:
        digest = client.upload(W.tobytes())
        names = [device.name for device in devices]
        with pytest.raises(LimitExceededError, match="4 nodes"):
            client.compile(PLAN, product(digest), devices=names, splits={1: split})


class Picky(FakeDevice):
    """It multiplies no narrow matrices."""

    def supports_op(self, op, attributes, operands, result):  # type: ignore[no-untyped-def]
        return "too narrow for it" if op == "mul_mat" and result.shape[-1] < N else ""


def test_a_device_that_cannot_run_its_part_is_named_with_the_weight() -> None:
    with CoreClient(Picky("fake0", is_host=False), CpuDevice("cpu0", 1, native=False)) as client:
        digest = client.upload(W.tobytes())
        split = RowSplit("cpu0", (("fake0", 1.0), ("cpu0", 1.0)))
        with pytest.raises(
            UnsupportedError, match="'w' lies partly on fake0, which cannot run mul_mat: too"
        ) as caught:
            client.compile(PLAN, product(digest), devices=["fake0", "cpu0"], splits={1: split})
        assert caught.value.origin == product(digest).origin(0)


_FRACTION = plan_pb2.RowFraction()


@pytest.mark.parametrize(
    "options",
    [
        {"row_splits": [plan_pb2.RowSplit(leaves=[1, 1], main="cpu0")]},
        {"row_splits": [plan_pb2.RowSplit(leaves=[1], main="cpu0"), plan_pb2.RowSplit(leaves=[1], main="a")]},
        {"row_splits": [plan_pb2.RowSplit(leaves=[2**32 - 1])]},
        {"row_splits": [plan_pb2.RowSplit(leaves=[1], main="cpu0", fractions=[_FRACTION] * 2000)]},
        {"row_splits": [plan_pb2.RowSplit(leaves=[0] * 1_000_000)]},
        {"row_splits": [plan_pb2.RowSplit()] * 600_000},
        {"buffer_types": {"cpu0": "cpu9"}},
        {"buffer_types": {"cpu7": "cpu0"}},
        {"buffer_types": {f"cpu{number}": "" for number in range(2000)}},
    ],
)  # fmt: skip
def test_hostile_requests_over_the_wire(daemon: DaemonUrls, options: dict[str, object]) -> None:
    graph = graph_of(node("neg", 0), output=2)
    graph.leaves.append(
        graph_pb2.Leaf(kind=graph_pb2.LEAF_KIND_WEIGHT, name="w", type=f32(2), digest=bytes(32))
    )
    graph.nodes[0].operands[:] = [0]
    with raw_channel(daemon.tcp) as channel:
        raw = RawSession(channel).attach()
        try:
            with pytest.raises((InvalidArgumentError, LimitExceededError, UnknownDeviceError)):
                raw.compile(graph, **options)
        finally:
            raw.close()
    still_serves(daemon.tcp)
