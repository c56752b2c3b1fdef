"""What a session is asked to compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heliograph_backends.contract import CompileOptions
from heliograph_proto.graph import Graph
from heliograph_proto.portions import Portion
from heliograph_proto.rows import RowSplit
from heliograph_server.core.known_graphs import ReceivedGraph


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A graph that nobody has checked yet, and what is to become of it. The meaning is in plan.proto."""

    plan: int
    graph: Graph | ReceivedGraph
    devices: tuple[str, ...] = ()
    options: CompileOptions = field(default_factory=CompileOptions)
    #: Handles of tensors by leaf.
    bindings: Mapping[int, int] = field(default_factory=dict)
    #: 0: none.
    updates: int = 0
    #: Names of devices by node.
    pins: Mapping[int, str] = field(default_factory=dict)
    #: The most bytes that a device may use, by name.
    memory: Mapping[str, int] = field(default_factory=dict)
    #: Of a plan over several devices: how many of its runs may be under way at once.
    pipeline: int = 1
    #: How the rows of weights lie over devices, by leaf.
    splits: Mapping[int, RowSplit] = field(default_factory=dict)
    #: Names of buffer types by name of device.
    buffer_types: Mapping[str, str] = field(default_factory=dict)
    #: Nodes that are observed.
    taps: tuple[int, ...] = ()
    #: The handle of the reservation in whose memory it is to lie; 0: none.
    reservation: int = 0
    #: Whether variables that lay on a device that is lost begin anew.
    renews_lost: bool = False
    #: What it exchanges with other daemons, if it is a part of a graph on several.
    portion: Portion | None = None
