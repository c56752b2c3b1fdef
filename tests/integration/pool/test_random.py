"""Random graphs over the devices of real daemons and of this process have the bits of one device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from backend_graphs import Array, same_bits
from forked_daemons import running_daemon
from partition_runs import anywhere, two_runs
from random_graphs import RandomGraph

from heliograph_backends.contract import (
    Abort,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    Tensor,
    access,
    host_bytes,
)
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.links.blocking import BlockingPeers
from heliograph_server.plans.multi_device import LocalMultiPlan
from heliograph_server.plans.multi_host import Blueprint, DistributedPlan, Pooled, partitions_of
from heliograph_server.plans.partitions import Exchanging
from heliograph_server.pool import open_device
from heliograph_server.scheduler.model import Schedule


@pytest.fixture(scope="module")
def devices() -> Iterator[list[Device]]:
    """One of this process, and one of each of two daemons."""
    own = CpuDevice("cpu0", threads=1)
    with (
        running_daemon("--device", "cpu:threads=1") as one,
        running_daemon("--device", "cpu:threads=1") as other,
        open_device(one) as first,
        open_device(other) as second,
    ):
        yield [own, first, second]
    own.close()


def put(device: Device, array: Array, type: TensorType) -> Tensor:
    made = Tensor(type, device.buffer_type.allocate(type.nbytes))
    access.write(made, 0, host_bytes(np.ascontiguousarray(array)))
    return made


def take(tensor: Tensor) -> Array:
    found = np.empty(tensor.type.shape, tensor.type.dtype.storage)
    access.read(tensor, 0, host_bytes(found))
    return found


def runs(made: RandomGraph, schedule: Schedule, devices: list[Device], exchange: LiveExchange) -> list[Array]:
    """The outputs of two runs, and what the leaves hold at last."""
    graph = made.graph()
    leaves = {
        value: put(devices[max(0, schedule.homes[value])], array, leaf.type)
        for value, (array, leaf) in enumerate(zip(made.arrays, graph.leaves, strict=True))
    }

    def own(piece: Graph, found: Schedule, bound: LeafBindings, exchanging: Exchanging) -> LocalMultiPlan:
        return LocalMultiPlan(piece, found, devices, bound, DeviceCompileOptions(), exchanging=exchanging)

    memories = tuple(one.buffer_type for one in devices)
    lasting = {value: one for value, one in leaves.items() if schedule.homes[value] >= 0}
    partitions = partitions_of(graph, schedule, devices)
    assert partitions is not None
    blueprint = Blueprint(graph, schedule, memories, lasting, DeviceCompileOptions(), 1, exchange, own)
    plan = DistributedPlan(Pooled(blueprint, partitions), 0)
    found = []
    try:
        for _ in range(2):
            types = [graph.type_of(one.value) for one in graph.outputs]
            outputs = [put(devices[0], np.zeros(type.shape, type.dtype.storage), type) for type in types]
            given = [leaves[value] for value in leaves if value not in lasting]
            plan.compute(given, outputs, Abort())
            found += [take(one) for one in outputs]
    finally:
        plan.free()
    return found + [take(one) for one in leaves.values()]


@pytest.mark.parametrize("seed", range(12))
def test_a_random_graph_over_three_hosts_has_the_bits_that_it_has_on_one_device(
    devices: list[Device], seed: int
) -> None:
    random, made = np.random.default_rng(seed), RandomGraph(seed)
    exchange = LiveExchange(peers=BlockingPeers())
    own = devices[0]
    assert isinstance(own, CpuDevice)
    try:
        expected = two_runs(own, made)
        schedule = anywhere(made.graph(), len(devices), random)
        found = runs(made, schedule, devices, exchange)
        assert exchange.open_edges == 0 and exchange.budget.held_bytes == 0
    finally:
        exchange.close()
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(one, other), f"seed {seed}: value {place} differs"
