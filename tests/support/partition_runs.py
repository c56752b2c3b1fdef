"""Partitions of a graph, each on CPU devices of its own "host", run at the same time."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

import numpy as np
from backend_graphs import Array, Loaded, Maker, place, remove
from fake_exchange import FakeExchange
from random_graphs import RandomGraph

from heliograph_backends.contract import Abort, Device, DeviceCompileOptions, LeafBindings, Tensor
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.graph import Graph, LeafKind, validate
from heliograph_proto.plans import Arrival, Cause, Departure, Edge, Partition
from heliograph_proto.sessions import Limits
from heliograph_server.plans.multi_device import LocalMultiPlan
from heliograph_server.plans.partitions import Exchanging, check_partition, partitioned
from heliograph_server.scheduler.model import Assignment, Candidate, Problem, Schedule
from heliograph_server.scheduler.partitions import PartitionGraph, Partitions, cut_partitions
from heliograph_server.scheduler.splits import split


class Host:
    """One partition, compiled on its devices."""

    def __init__(
        self,
        piece: PartitionGraph,
        partition: Partition,
        devices: Sequence[Device],
        leaves: dict[int, Tensor],
        exchange: FakeExchange,
    ) -> None:
        graph = validate(piece.graph, Limits(), [leaf for leaf, _ in piece.bound])
        check_partition(graph, partition)
        self.piece = piece
        bindings = LeafBindings(
            *(
                {leaf: leaves[value] for leaf, value in piece.bound if graph.leaves[leaf].kind is kind}
                for kind in (LeafKind.WEIGHT, LeafKind.VARIABLE)
            )
        )
        homes = [-1] * len(graph.leaves)
        for leaf, value in piece.bound:
            homes[leaf] = next(
                n for n, one in enumerate(devices) if leaves[value].buffer.buffer_type.device is one
            )
        found = Schedule((), tuple(Assignment(one, Cause.USER) for one in piece.devices), tuple(homes))
        memories = [one.buffer_type for one in devices]
        self.ports = exchange.open(partition)
        schedule = partitioned(graph, memories, found, partition)
        exchanging = Exchanging(partition, self.ports)
        self.plan = LocalMultiPlan(
            graph, schedule, devices, bindings, DeviceCompileOptions(), exchanging=exchanging
        )

    def free(self) -> None:
        self.plan.free()
        self.ports.close()


class PartitionedGraph:
    """A graph over devices, one site for each of `sites`, with its leaves in memory."""

    def __init__(
        self, made: Maker, schedule: Schedule, devices: Sequence[Device], sites: Sequence[int]
    ) -> None:
        self.graph, self.exchange = made.graph(), FakeExchange()
        self.devices = devices
        self.arrays = made.arrays
        self.partitions = cut_partitions(self.graph, schedule, sites)
        self.leaves = {
            value: place(devices[max(0, schedule.homes[value])], array, leaf.type)
            for value, (array, leaf) in enumerate(zip(made.arrays, self.graph.leaves, strict=True))
        }
        self.hosts = [
            Host(piece, partition, devices, self.leaves, self.exchange)
            for piece, partition in zip(self.partitions.pieces, wired(self.partitions), strict=True)
        ]

    def run(self, number: int) -> list[Array]:
        types = [self.graph.type_of(one.value) for one in self.graph.outputs]
        outputs = [place(self.devices[0], np.zeros(one.shape, one.dtype.storage), one) for one in types]
        errors: list[BaseException] = []

        def compute(host: Host) -> None:
            piece = host.piece
            wanted: list[Tensor | None] = [outputs[one] for one in piece.outputs]
            wanted += [None] * (len(piece.graph.outputs) - len(wanted))
            try:
                host.plan.compute([self.leaves[one] for one in piece.inputs], wanted, Abort(), None, number)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=compute, args=(host,)) for host in self.hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for one, port in zip(outputs, self.graph.outputs, strict=True):
            if port.value in self.leaves:
                one.array[...] = self.leaves[port.value].array
        return [remove(one) for one in outputs]

    def free(self) -> list[Array]:
        for host in self.hosts:
            host.free()
        assert self.exchange.left == 0
        return [remove(one) for one in self.leaves.values()]


def wired(partitions: Partitions) -> list[Partition]:
    """The partitions with edges of their own."""
    edges = [Edge(secrets.token_bytes(16), secrets.token_bytes(32)) for _ in partitions.crossings]
    pairs = list(zip(partitions.crossings, edges, strict=True))
    return [
        Partition(
            tuple(Arrival(one.leaf, edge) for one, edge in pairs if one.target == place),
            tuple(Departure(one.node, edge) for one, edge in pairs if one.source == place),
            piece.begins,
        )
        for place, piece in enumerate(partitions.pieces)
    ]


def anywhere(graph: Graph, devices: int, random: np.random.Generator) -> Schedule:
    """Leaves and nodes here and there, in stretches."""
    homes = [-1 if leaf.kind is LeafKind.INPUT else int(random.integers(devices)) for leaf in graph.leaves]
    places, present = [], 0
    for node in graph.nodes:
        if random.random() < 0.3:
            present = int(random.integers(devices))
        places.append(homes[node.operands[0]] if node.op == "assign" else present)
    asked = [Candidate(str(n), (), frozenset((n,)), 0) for n in range(devices)]
    return split(Problem(graph, asked), homes, [Assignment(one, Cause.USER) for one in places])


def two_runs(device: CpuDevice, made: RandomGraph) -> list[Array]:
    it = Loaded(device, made)
    found = [array for array in (*it.run(), *it.run()) if array is not None]
    return found + it.free()
