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
from heliograph_proto.types import TensorType
from heliograph_server.scheduler.model import Candidate, Copy, Problem, Rates, SiteLink
from heliograph_server.scheduler.weight_homes import VIEWS

#: The bandwidth of a copy between two memories of one site.
MEMORY_BYTES_PER_S = 8e9
#: Ops that read no more of their first operand than they return.
_READ_ROWS = frozenset({"get_rows"})
#: Products: each element of the result is a sum over the last axis of the first operand.
_PRODUCTS = frozenset({"matmul", "mul_mat", "mul_mat_id"})
#: Each element of the result is a sum over all but the first axis of the kernel, the first operand.
_CONVOLUTIONS = frozenset({"conv_2d", "conv_2d_dw", "conv_3d"})

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
    count = math.prod(result.shape)
    read = sum([one.nbytes for one in operands])
    if op in _READ_ROWS:
        read += min(result.nbytes, operands[0].nbytes) - operands[0].nbytes
    if op == "flash_attn_paged":
        read -= _unread_pages(operands)
    return NodeWork(float(count * _flops_per_element(op, operands)), float(read + result.nbytes))


def _flops_per_element(op: str, operands: Sequence[TensorType]) -> int:
    if op in _PRODUCTS and operands[0].shape:
        return 2 * operands[0].shape[-1]
    if op in _CONVOLUTIONS:
        return 2 * math.prod(operands[0].shape[1:])
    if op == "flash_attn_ext":
        return 4 * operands[1].shape[-2]
    if op == "flash_attn_paged":
        return 4 * operands[3].shape[-1]
    return 1


def _unread_pages(operands: Sequence[TensorType]) -> int:
    """Return the bytes of keys and values that are on no page of the tables."""
    _, k, v, _, pages = operands[:5]
    count = k.shape[0]
    return (k.nbytes + v.nbytes) // max(1, count) * (count - min(count, pages.size))


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
