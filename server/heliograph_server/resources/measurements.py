"""Measurements of devices and of the links between their sites, for placement by time.

A published value changes only when the measured one differs by more than `CHANGE`; so a recompiled
graph is placed anew only then. Links and rates of devices belong to the host. Times of single ops
belong to a tenant, since they reveal which ops it runs.

Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from heliograph_proto.devices import Link
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.graph import Graph
from heliograph_server.scheduler.costs import NodeWork, work_of_node
from heliograph_server.scheduler.model import Rates, SiteLink

#: Values within this factor are the same.
CHANGE = 1.5
#: The weight of the newest value in a running average.
NEWEST = 0.25
#: The most tenants with known times, and the most ops of each.
MOST_TENANTS, MOST_OPS = 64, 10_000


class Average:
    """A running average of positive numbers, and its published value."""

    __slots__ = ("_now", "published")

    def __init__(self, published: float = 0.0) -> None:
        self._now = 0.0
        #: 0: none yet.
        self.published = published

    def note(self, value: float) -> bool:
        """Add a value. Return True if the published value has changed."""
        self._now += (value - self._now) * (NEWEST if self._now else 1.0)
        if not differs(self._now, self.published):
            return False
        self.published = self._now
        return True


def differs(one: float, other: float) -> bool:
    """True if two positive numbers differ by more than `CHANGE`. Every number differs from 0."""
    return not other / CHANGE <= one <= other * CHANGE


@dataclass(frozen=True, slots=True)
class OpKind:
    """Nodes that take the same time: their key, the estimated work of each, and their number."""

    key: Hashable
    work: NodeWork
    count: int = 1


def kind_key(graph: Graph, number: int) -> Hashable:
    """The key of a node's kind in every graph: its op, attributes and types."""
    node = graph.nodes[number]
    operands = tuple([graph.type_of(value) for value in node.operands])
    return node.op, tuple(sorted(node.attributes.items())), operands, node.type


class HostMeasurements:
    """The measurements of one host. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the names of two sites, the lesser first: round trip in seconds, and bytes per second.
        self._links: dict[tuple[str, str], tuple[Average, Average]] = {}
        #: By device: its time as a multiple of that by the usual rates.
        self._slowness: dict[str, Average] = {}
        #: By device: the number of changes of its published rates.
        self._versions: Counter[str] = Counter()
        self._tenants: OrderedDict[bytes, TenantTimes] = OrderedDict()

    def __repr__(self) -> str:
        return f"<HostMeasurements of {len(self._links)} links, {len(self._slowness)} devices>"

    def note_link(self, a: str, b: str, round_trip_s: float, bytes_per_s: float = 0.0) -> None:
        """Add a measurement of the link between two sites; both directions count as alike.

        `bytes_per_s` is 0 if the bandwidth is not known yet. Raises InvalidArgumentError.
        """
        if not (a != b and 0 < round_trip_s < float("inf") and 0 <= bytes_per_s < float("inf")):
            raise InvalidArgumentError(
                f"the link from {a!r} to {b!r} has a round trip of {round_trip_s} s and {bytes_per_s} B/s",
                advice="give two sites, seconds above 0, and bytes per second or 0 if unknown",
            )
        with self._lock:
            trip, speed = self._links.setdefault(_pair(a, b), (Average(), Average()))
            trip.note(round_trip_s)
            if bytes_per_s:
                speed.note(bytes_per_s)

    def forget_site(self, name: str) -> None:
        """Forget all measurements of links to a site that is gone."""
        with self._lock:
            for pair in [pair for pair in self._links if name in pair]:
                del self._links[pair]

    def link(self, a: str, b: str) -> SiteLink:
        """The link between two sites, as measured or else assumed."""
        with self._lock:
            trip, speed = self._links.get(_pair(a, b), (Average(), Average()))
            known = bool(trip.published and speed.published)
            usual = SiteLink()
            trip_s, per_s = trip.published or usual.round_trip_s, speed.published or usual.bytes_per_s
            return SiteLink(trip_s, per_s, known, (a, b))

    def link_status(
        self, a: str, b: str, reachable: bool | None = None, why: str = "", seconds: float = 0.0
    ) -> Link:
        """The link between two sites for status reports, with its known reachability.

        `seconds` is the time for which it has been unreachable.
        """
        link = self.link(a, b)
        with self._lock:
            trip, speed = self._links.get(_pair(a, b), (Average(), Average()))
            measured = bool(trip.published), bool(speed.published)
        return Link(a, b, link.round_trip_s, link.bytes_per_s, *measured, reachable, why, seconds)

    def round_trip_s(self, site: str) -> float:
        """The round trip from here to a site in seconds; 0 if it was not measured."""
        with self._lock:
            found = self._links.get(_pair("", site))
            return found[0].published if found is not None else 0.0

    def links(self, sites: Sequence[str]) -> dict[tuple[int, int], SiteLink]:
        """The links between devices at these sites, by index. Empty if no link between them was
        measured."""
        with self._lock:
            known = any(_pair(a, b) in self._links for a, b in permutations(set(sites), 2))
        if not known:
            return {}
        links = permutations(range(len(sites)), 2)
        return {
            (one, other): self.link(sites[one], sites[other])
            for one, other in links
            if sites[one] != sites[other]
        }

    def rates(self, device: str) -> Rates | None:
        """The rates of a device. None if they are unknown."""
        with self._lock:
            found = self._slowness.get(device)
            return Rates().slowed(found.published) if found is not None and found.published else None

    def version(self, device: str) -> int:
        """A number that changes with the published rates of a device."""
        with self._lock:
            return self._versions[device]

    def note_rates(self, device: str, factor: float) -> None:
        """Add a measured time on a device, as a multiple of that by the usual rates."""
        with self._lock:
            if self._slowness.setdefault(device, Average()).note(factor):
                self._versions[device] += 1

    def of_tenant(self, tenant: bytes) -> TenantTimes:
        """The op times of a tenant. Those of a tenant without a name are not kept."""
        with self._lock:
            if not tenant:
                return TenantTimes(self)
            found = self._tenants.pop(tenant, None) or TenantTimes(self)
            self._tenants[tenant] = found
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
            return found


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a <= b else (b, a)


class TenantTimes:
    """Times of ops on devices, from the runs of one tenant. Thread-safe."""

    def __init__(self, host: HostMeasurements) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._ops: dict[str, OrderedDict[Hashable, Average]] = {}
        #: By device: the number of changes of published op times.
        self._versions: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<TenantTimes of {sum(map(len, self._ops.values()))} ops>"

    def note(self, device: str, kinds: Sequence[OpKind], took_s: float) -> None:
        """Add the total time of nodes of these kinds, divided among them by their estimates."""
        usual = Rates()
        estimates = [one.work.seconds(usual) for one in kinds]
        total = sum(one.count * estimate for one, estimate in zip(kinds, estimates, strict=True))
        if not total or took_s <= 0:
            return
        factor = took_s / total
        self.host.note_rates(device, factor)
        rates = self.host.rates(device) or usual
        with self._lock:
            known = self._ops.setdefault(device, OrderedDict())
            for one, estimate in zip(kinds, estimates, strict=True):
                if estimate and self._note_op(known, one, estimate * factor, rates):
                    self._versions[device] += 1

    def _note_op(
        self, known: OrderedDict[Hashable, Average], one: OpKind, took_s: float, rates: Rates
    ) -> bool:
        """Return True if the published time of an op has changed. An unknown op starts with its
        estimate."""
        found = known.pop(one.key, None)
        if found is None:
            found = Average(one.work.seconds(rates))
        known[one.key] = found
        if len(known) > MOST_OPS:
            known.popitem(last=False)
        return found.note(took_s)

    def times(self, device: str, keys: Iterable[Hashable]) -> dict[int, float]:
        """Known times of ops on a device in seconds, by index of the key."""
        with self._lock:
            known: Mapping[Hashable, Average] = self._ops.get(device, {})
            return {place: known[key].published for place, key in enumerate(keys) if key in known}

    def stamp(self, devices: Sequence[str], sites: Sequence[str]) -> Hashable:
        """A value that changes when these devices might be chosen otherwise. None if no link was
        measured, so that times do not decide."""
        links = self.host.links(("", *sites))
        if not links:
            return None
        with self._lock:
            ops = tuple(self._versions[one] for one in devices)
        return ops, tuple(map(self.host.version, devices)), tuple(links.items())


class Recorder:
    """Records the times of a plan's runs by split, and reports those that have changed.

    `links_us`: by split, the part of a time measured here that is the link to its device and back.
    """

    def __init__(
        self,
        times: TenantTimes,
        splits: Sequence[tuple[str, Sequence[OpKind]]],
        links_us: Sequence[float] = (),
    ) -> None:
        self._times = times
        self._splits = splits
        self._links_us = links_us or [0.0] * len(splits)
        self._averages = [Average() for _ in splits]

    def __repr__(self) -> str:
        return f"<Recorder of {len(self._splits)} splits>"

    def note_here(self, compute_us: Sequence[float]) -> None:
        """As `note`, for times measured by this host: computing took the time without the link, or
        at least a tenth."""
        pairs = zip(compute_us, self._links_us, strict=False)
        self.note([max(took_us - link_us, took_us / 10) for took_us, link_us in pairs])

    def note(self, compute_us: Sequence[float]) -> None:
        """Add the time in microseconds of a run in each split; empty if not known yet."""
        for (device, kinds), average, took_us in zip(self._splits, self._averages, compute_us, strict=False):
            if took_us > 0 and average.note(took_us):
                self._times.note(device, kinds, average.published * 1e-6)


def op_kinds(graph: Graph, nodes: Iterable[int], kinds: Sequence[int]) -> tuple[OpKind, ...]:
    """The kinds of some nodes of a graph. `kinds` has a kind number for every node of the graph."""
    counts: Counter[int] = Counter()
    examples: dict[int, int] = {}
    for node in nodes:
        counts[kinds[node]] += 1
        examples.setdefault(kinds[node], node)
    return tuple(
        OpKind(kind_key(graph, node), work_of_node(graph, node), counts[kind])
        for kind, node in examples.items()
    )
