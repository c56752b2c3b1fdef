"""What was measured of devices and of the ways between their sites, for placement by time.

A value that is told stays the same until what is measured is off from it by more than `CHANGE`, so that a
graph that is compiled again is placed anew only then. Ways and rates of devices are the host's. Times of
single ops are a tenant's own, since they say which ops somebody runs.

Any thread.
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

#: What differs by no more than this factor is the same.
CHANGE = 1.5
#: How much of an average the newest value is.
NEWEST = 0.25
#: The most tenants of which times are known, and ops of each.
MOST_TENANTS, MOST_OPS = 64, 10_000


class Average:
    """A running average of positive numbers, and the value that is told of it."""

    __slots__ = ("_now", "told")

    def __init__(self, told: float = 0.0) -> None:
        self._now = 0.0
        #: 0: none yet.
        self.told = told

    def note(self, value: float) -> bool:
        """One more value. Whether what is told has changed."""
        self._now += (value - self._now) * (NEWEST if self._now else 1.0)
        if not differs(self._now, self.told):
            return False
        self.told = self._now
        return True


def differs(one: float, other: float) -> bool:
    """Whether two positive numbers are off by more than `CHANGE`; from none each is."""
    return not other / CHANGE <= one <= other * CHANGE


@dataclass(frozen=True, slots=True)
class OpKind:
    """Nodes that take the same time: how many, what names them, and an estimate of what each has to do."""

    key: Hashable
    work: NodeWork
    count: int = 1


def kind_key(graph: Graph, number: int) -> Hashable:
    """What names the kind of a node in every graph: its op, attributes and types."""
    node = graph.nodes[number]
    operands = tuple([graph.type_of(value) for value in node.operands])
    return node.op, tuple(sorted(node.attributes.items())), operands, node.type


class HostMeasurements:
    """Of one host. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the names of two sites, the lesser first: round trip in seconds, bytes in a second.
        self._links: dict[tuple[str, str], tuple[Average, Average]] = {}
        #: By device: how many times as long as usual rates say it takes.
        self._slowness: dict[str, Average] = {}
        #: By device: how often what is told of it has changed.
        self._versions: Counter[str] = Counter()
        self._tenants: OrderedDict[bytes, TenantTimes] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Measurements of {len(self._links)} links, {len(self._slowness)} devices>"

    def note_link(self, a: str, b: str, round_trip_s: float, bytes_per_s: float = 0.0) -> None:
        """The way between two sites was measured, both directions being alike; `bytes_per_s` 0: not its
        bandwidth, yet. Raises InvalidArgumentError."""
        if not (a != b and 0 < round_trip_s < float("inf") and 0 <= bytes_per_s < float("inf")):
            raise InvalidArgumentError(
                f"the way from {a!r} to {b!r} has a round trip of {round_trip_s} s and {bytes_per_s} bytes/s",
                advice="tell of two sites, seconds above 0, and bytes a second, or 0 for not known",
            )
        with self._lock:
            trip, speed = self._links.setdefault(_pair(a, b), (Average(), Average()))
            trip.note(round_trip_s)
            if bytes_per_s:
                speed.note(bytes_per_s)

    def forget_site(self, name: str) -> None:
        """A site is gone: nothing that was measured on the way to it counts any more."""
        with self._lock:
            for pair in [pair for pair in self._links if name in pair]:
                del self._links[pair]

    def link(self, a: str, b: str) -> SiteLink:
        """The way between two sites, as it was measured, or else assumed."""
        with self._lock:
            trip, speed = self._links.get(_pair(a, b), (Average(), Average()))
            known = bool(trip.told and speed.told)
            usual = SiteLink()
            trip_s, per_s = trip.told or usual.round_trip_s, speed.told or usual.bytes_per_s
            return SiteLink(trip_s, per_s, known, (a, b))

    def way(self, a: str, b: str, reachable: bool | None = None, why: str = "") -> Link:
        """As `link`, for people, with what somebody knows of whether there is a way at all."""
        link = self.link(a, b)
        with self._lock:
            trip, speed = self._links.get(_pair(a, b), (Average(), Average()))
            measured = bool(trip.told), bool(speed.told)
        return Link(a, b, link.round_trip_s, link.bytes_per_s, *measured, reachable, why)

    def round_trip_s(self, site: str) -> float:
        """Of the way from here to a site, in seconds; 0: nobody measured it."""
        with self._lock:
            found = self._links.get(_pair("", site))
            return found[0].told if found is not None else 0.0

    def links(self, sites: Sequence[str]) -> dict[tuple[int, int], SiteLink]:
        """Between devices of these sites, by their places; none where no way between any two was measured."""
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
        """How fast a device computes; None: nobody knows."""
        with self._lock:
            found = self._slowness.get(device)
            return Rates().slowed(found.told) if found is not None and found.told else None

    def version(self, device: str) -> int:
        """Another one means that other rates are told of a device."""
        with self._lock:
            return self._versions[device]

    def note_rates(self, device: str, factor: float) -> None:
        """Something took so many times as long on a device as usual rates say."""
        with self._lock:
            if self._slowness.setdefault(device, Average()).note(factor):
                self._versions[device] += 1

    def of_tenant(self, tenant: bytes) -> TenantTimes:
        """What a tenant knows of ops; of one without a name, nothing is kept."""
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
    """Times of ops on devices, as the runs of one tenant took them. Thread-safe."""

    def __init__(self, host: HostMeasurements) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._ops: dict[str, OrderedDict[Hashable, Average]] = {}
        #: By device: how often what is told of ops has changed.
        self._versions: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<TenantTimes of {sum(map(len, self._ops.values()))} ops>"

    def note(self, device: str, kinds: Sequence[OpKind], took_s: float) -> None:
        """Nodes of these kinds took so long together; each its part of that, as estimates go."""
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
        """Whether what is told of an op has changed: for one of which nothing was, that is its estimate."""
        found = known.pop(one.key, None)
        if found is None:
            found = Average(one.work.seconds(rates))
        known[one.key] = found
        if len(known) > MOST_OPS:
            known.popitem(last=False)
        return found.note(took_s)

    def times(self, device: str, keys: Iterable[Hashable]) -> dict[int, float]:
        """Seconds of ops on a device, by their place among the keys, where they are known."""
        with self._lock:
            known: Mapping[Hashable, Average] = self._ops.get(device, {})
            return {place: known[key].told for place, key in enumerate(keys) if key in known}

    def stamp(self, devices: Sequence[str], sites: Sequence[str]) -> Hashable:
        """Another one means that these devices might be chosen otherwise; None where time decides nothing."""
        links = self.host.links(("", *sites))
        if not links:
            return None
        with self._lock:
            ops = tuple(self._versions[one] for one in devices)
        return ops, tuple(map(self.host.version, devices)), tuple(links.items())


class Recorder:
    """Takes the times of a plan's runs, by split, and tells of those that have changed. `links_us`: by split,
    what of a time measured here is the way to its device and back."""

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
        """As `note`, of times that this host measured: a part of each, a tenth at least, was computing."""
        pairs = zip(compute_us, self._links_us, strict=False)
        self.note([max(took_us - link_us, took_us / 10) for took_us, link_us in pairs])

    def note(self, compute_us: Sequence[float]) -> None:
        """A run took so long in each split, in microseconds; none: nobody knows yet."""
        for (device, kinds), average, took_us in zip(self._splits, self._averages, compute_us, strict=False):
            if took_us > 0 and average.note(took_us):
                self._times.note(device, kinds, average.told * 1e-6)


def op_kinds(graph: Graph, nodes: Iterable[int], kinds: Sequence[int]) -> tuple[OpKind, ...]:
    """What some nodes of a graph are, of whose nodes `kinds` has the kinds."""
    counts: Counter[int] = Counter()
    examples: dict[int, int] = {}
    for node in nodes:
        counts[kinds[node]] += 1
        examples.setdefault(kinds[node], node)
    return tuple(
        OpKind(kind_key(graph, node), work_of_node(graph, node), counts[kind])
        for kind, node in examples.items()
    )
