"""The cost of a schedule in seconds: nodes on devices, and copies between them.

Measured times take precedence. A node without one takes as long as its arithmetic or its bytes,
whichever is slower, at the rates of its device (the roofline model of Williams, Waterman and
Patterson, 2009). A device without known rates has the geometric mean of the known rates; an
unmeasured link has defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from heliograph_proto.graph import Graph
from heliograph_proto.ops.work import flops_of, read_bytes
from heliograph_proto.types import TensorType
from heliograph_server.scheduler.model import Candidate, Copy, Problem, Rates, SiteLink
from heliograph_server.scheduler.weight_homes import VIEWS

#: The bandwidth of a copy between two memories of one site.
MEMORY_BYTES_PER_S = 8e9
Seconds: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True, slots=True)
class NodeWork:
    """The work of a node."""

    flops: float
    #: Read and written.
    size_bytes: float

    def seconds(self, rates: Rates) -> float:
        """Return the time at these rates; 0 for a view, which does nothing."""
        if not self.flops and not self.size_bytes:
            return 0.0
        return rates.node_s + max(self.flops / rates.flops_per_s, self.size_bytes / rates.bytes_per_s)


def work_of(op: str, operands: Sequence[TensorType], result: TensorType) -> NodeWork:
    """Estimate the work from op, shapes and data types."""
    if op in VIEWS:
        return NodeWork(0.0, 0.0)
    size_bytes = sum(read_bytes(op, operands, result)) + result.nbytes
    return NodeWork(float(flops_of(op, operands, result)), float(size_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The costs of one problem: its nodes on each of its devices, and the links between the
    devices."""

    #: Seconds, by device and node.
    nodes: Seconds
    links: Mapping[tuple[int, int], SiteLink]
    pipeline: int = 1
    #: As `Problem.origins`.
    origins: Mapping[int, SiteLink] = field(default_factory=dict)

    def latency(self, source: int, destination: int) -> float:
        """Return the seconds until the first byte arrives."""
        link = self.links.get((source, destination))
        return link.round_trip_s / 2 if link is not None else 0.0

    def seconds_per_byte(self, source: int, destination: int) -> float:
        if source == destination:
            return 0.0
        link = self.links.get((source, destination))
        return 1 / (link.bytes_per_s if link is not None else MEMORY_BYTES_PER_S)

    def origin_seconds(self, device: int, size_bytes: float) -> float:
        """Return the seconds in which that many bytes of inputs arrive at a device, or of outputs
        return."""
        link = self.origins.get(device)
        return link.round_trip_s / 2 + size_bytes * self.origin_seconds_per_byte(device) if link else 0.0

    def origin_seconds_per_byte(self, device: int) -> float:
        link = self.origins.get(device)
        return 1 / link.bytes_per_s if link is not None else 0.0

    def copy(self, source: int, destination: int, size_bytes: float) -> float:
        """Return the seconds of one copy: half a round trip and its bytes; 0 within a device."""
        pair = source, destination
        return self.latency(*pair) + size_bytes * self.seconds_per_byte(*pair)

    def copies(self, copies: Iterable[Copy]) -> float:
        """Return the seconds of several copies to one device. Copies from one source are requested
        at once, so its half round trip counts once."""
        sizes: dict[tuple[int, int], int] = {}
        for one in copies:
            pair = one.source, one.destination
            sizes[pair] = sizes.get(pair, 0) + one.size_bytes
        return sum([self.copy(*pair, size_bytes) for pair, size_bytes in sizes.items()])


def costs_of(problem: Problem) -> Costs:
    """Return the measured times of a problem, with estimates for the rest."""
    kinds = range(len(problem.graph.nodes)) if problem.kinds is None else problem.kinds
    of = np.asarray(kinds, dtype=np.intp)
    _, examples = np.unique(of, return_index=True)
    work = [work_of_node(problem.graph, int(number)) for number in examples]
    usual = mean_rates([one.rates for one in problem.devices if one.rates is not None])
    table = [_seconds(one, work, usual)[of] for one in problem.devices]
    nodes = np.array(table).reshape(len(problem.devices), len(of))
    return Costs(nodes, problem.links, problem.pipeline, problem.origins)


def work_of_node(graph: Graph, number: int) -> NodeWork:
    """Return `work_of` of a node of a graph."""
    node = graph.nodes[number]
    return work_of(node.op, [graph.type_of(value) for value in node.operands], node.type)


def _seconds(device: Candidate, work: Sequence[NodeWork], usual: Rates) -> Seconds:
    """Return the seconds of a node of each kind."""
    rates = device.rates or usual
    known = device.times
    return np.array([known[kind] if kind in known else one.seconds(rates) for kind, one in enumerate(work)])


def mean_rates(known: Sequence[Rates]) -> Rates:
    """Return the geometric mean; without rates, the defaults."""
    if not known:
        return Rates()
    logs = ([math.log(getattr(one, name)) for one in known] for name in Rates.__slots__)
    return Rates(*(math.exp(sum(values) / len(known)) for values in logs))
