"""A model's plans on several devices: its layers lie where the first plan put them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import heliograph as hg
from heliograph.llm.effects import Ask, Procedure
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import parse_size

#: How much more memory the results of a graph take on one of several devices than on one alone, at
#: most: a device computes what is between values for others in parts, each with memory of its own.
PARTS = 2.5


class Spreading:
    """Compiles the plans of one model.

    The plan that is compiled first spreads the layers over the devices, and leaves room for the
    results of later ones. These compute each weight and each part of the cache where it lies, so
    that no device takes it twice.
    """

    def __init__(self, session: Any, whole: Callable[[], hg.Graph], options: dict[str, Any]) -> None:
        """`whole` builds a graph with all weights and the cache; `options` are those of
        `session.compile`."""
        self._session = session
        self._whole = whole
        self._options = options
        #: The devices of weights and variables, by name.
        self._homes: dict[str, str] = {}
        #: By device, the free bytes before the first plan, of those that report them.
        self._free: dict[str, int] = {}

    @property
    def is_wide(self) -> bool:
        """True if there are several devices to spread layers over."""
        return len(self._devices) > 1

    @property
    def _devices(self) -> list[Any]:
        """Those of the plans that are not lost, or all if all are."""
        there = self._session.devices
        named = self._options.get("devices")
        if named is None:
            return [next((one for one in there if not one.lost), there[0])]
        listed = named if isinstance(named, list | tuple) else [named]
        found = [self._session.device(one) if isinstance(one, str) else one for one in listed]
        return [one for one in found if not one.lost] or found

    def _chosen(self) -> dict[str, Any]:
        """The options of `session.compile`, without what they say of lost devices."""
        options = dict(self._options)
        if isinstance(options.get("devices"), list | tuple):
            options["devices"] = self._devices
        lost = {one.name for one in self._session.devices if one.lost}
        for name in ("memory", "buffer_types") if lost else ():
            given = options.get(name) or {}
            options[name] = {one: value for one, value in given.items() if _name(one) not in lost}
        if lost and options.get("pins"):
            options["pins"] = {one: to for one, to in options["pins"].items() if _name(to) not in lost}
        return options

    def forget(self) -> None:
        """Let the next plan spread the layers anew: none of the earlier ones is left."""
        self._homes.clear()

    def fit(
        self, sizes: Sequence[int], later: Callable[[Sequence[int]], Iterable[hg.Graph]]
    ) -> Procedure[Any, tuple[Any, Sequence[int]]]:
        """Compile the plan of the whole graph first, and return it with the sizes of chunks whose
        plans fit beside it.

        Args:
            sizes: Those of chunks, in falling order; on several devices, the first ones are left
                out if they do not fit.
            later: Builds the graphs for which the plan leaves room, given sizes.

        Raises as `compiled`.
        """
        for one in self._devices:
            memory = yield Ask(one.memory)
            if memory.total_bytes:
                self._free[one.name] = memory.free_bytes
        while True:
            room = (yield from self._room_for(later(sizes))) if self.is_wide else {}
            try:
                return (yield from self.compiled(self._whole(), room)), sizes
            except hg.OutOfMemoryError:
                if not self.is_wide or len(sizes) == 1:
                    raise
            sizes = sizes[1:]

    def _room_for(self, graphs: Iterable[hg.Graph]) -> Procedure[Any, dict[str, Any]]:
        """Return the memory limits under which plans of these graphs fit beside another one."""
        room = 0.0
        for graph in graphs:
            room += (yield from self._run_bytes(graph)) * PARTS
        limits = {_name(one): size for one, size in (self._chosen().get("memory") or {}).items()}
        for name, free in self._free.items():
            given = limits.get(name, free)
            # A text that is no size is refused by the compile.
            size = parse_size(given) if isinstance(given, str) else given
            if size is not None:
                limits[name] = max(1, min(size, free - int(room)))
        return limits

    def _run_bytes(self, graph: hg.Graph) -> Procedure[Any, int]:
        """The bytes of the results of a run; 0 if the device cannot estimate."""
        with suppress(hg.UnsupportedError):
            return sum((yield Ask(partial(self._session.estimate, graph, self._devices[0]))).compute_bytes)
        return 0

    def compiled(self, graph: hg.Graph, memory: Mapping[str, Any] = {}) -> Procedure[Any, Any]:
        """Compile a plan, within these limits of memory in place of the caller's, if there are any.

        Raises the errors of `session.compile`; OutOfMemoryError has the sums of the model.
        """
        options = {**self._chosen(), **({"memory": memory} if memory else {})}
        # No further pins where the caller pins or divides.
        keeps = self.is_wide and not options.get("pins") and not options.get("split")
        try:
            if keeps and self._homes:
                with suppress(hg.OutOfMemoryError):
                    pinned = {**options, "pins": self._pins(graph)}
                    return (yield Ask(partial(self._session.compile, graph, **pinned)))
                # Some weights may fit elsewhere once more.
            plan = yield Ask(partial(self._session.compile, graph, **options))
        except hg.OutOfMemoryError as error:
            raise (yield from self._explained(graph, error)) from error
        if keeps:
            self._learn(graph, (yield Ask(plan.explain)))
        return plan

    def _pins(self, graph: hg.Graph) -> dict[Callable[[hg.Value], bool], str]:
        """Return pins for the nodes that use what lies on a device, and for those behind them."""
        place: list[str] = []
        nodes: dict[str, set[int]] = {}
        for number, node in enumerate(graph._nodes):
            lasting = (self._homes.get(graph._leaves[~one].name) for one in node.operands if one < 0)
            made = (place[one] for one in sorted(node.operands, reverse=True) if one >= 0)
            place.append(next((one for one in (*lasting, *made) if one), ""))
            if place[-1]:
                nodes.setdefault(place[-1], set()).add(number)
        return {partial(_is_of, frozenset(found)): device for device, found in nodes.items()}

    def _learn(self, graph: hg.Graph, found: hg.Explanation) -> None:
        for number, node in enumerate(graph._nodes):
            for one in node.operands:
                if one < 0 and (leaf := graph._leaves[~one]).kind is not LeafKind.INPUT:
                    self._homes.setdefault(leaf.name, found.nodes[number].device)

    def _explained(self, graph: hg.Graph, error: hg.OutOfMemoryError) -> Procedure[Any, hg.OutOfMemoryError]:
        """Return the error of a plan that does not fit, with what the model needs and what there
        is."""
        needs = {"weights": 0, "keys and values": 0, "a run": 0}
        for leaf in self._whole()._leaves:
            if leaf.kind is not LeafKind.INPUT:
                needs["weights" if leaf.kind is LeafKind.WEIGHT else "keys and values"] += leaf.type.nbytes
        needs["a run"] = yield from self._run_bytes(graph)
        need, there = sum(needs.values()), sum(self._free.values())
        parts = ", ".join(f"{size:,} for {what}" for what, size in needs.items())
        have = ", ".join(f"{name} has {size:,}" for name, size in self._free.items())
        over = f"{need - there:,} too few" if need > there and self._free else "no division of it fits there"
        return hg.OutOfMemoryError(
            f"the model does not fit: it needs {need:,} bytes ({parts}), and {have}: {over}; {error.message}",
            advice="name more devices, or load it with a smaller context= or cache='q8_0'",
            origin=error.origin,
        )


def _name(device: Any) -> str:
    return device if isinstance(device, str) else str(device.name)


def _is_of(numbers: frozenset[int], node: hg.Value) -> bool:
    return node.reference in numbers
