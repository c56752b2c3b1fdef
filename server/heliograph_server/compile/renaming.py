"""Plans on other devices than those that their client named, and the choice of these. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from heliograph_proto.devices import DeviceType
from heliograph_proto.plans import PlanOptions, RowSplit

T = TypeVar("T")


def renamed(options: PlanOptions, names: Mapping[str, str]) -> PlanOptions:
    """Return options that name other devices; `names` has the new one of each old one.

    Where the new one is named already, its own limit of memory and its own buffer type hold.
    """
    if not names or names.keys().isdisjoint(_named(options)):
        return options
    pins: dict[str, tuple[int, ...]] = {}
    for device, nodes in options.pins:
        name = names.get(device, device)
        pins[name] = (*pins.get(name, ()), *nodes)
    return replace(
        options,
        devices=tuple(dict.fromkeys(names.get(one, one) for one in options.devices)),
        pins=tuple(pins.items()),
        memory=_without_twins(options.memory, names),
        buffer_types=_without_twins(options.buffer_types, names),
        splits=tuple((_renamed_split(split, names), leaves) for split, leaves in options.splits),
    )


def _named(options: PlanOptions) -> Iterator[str]:
    yield from options.devices
    for pairs in (options.pins, options.memory, options.buffer_types):
        yield from (name for name, _ in pairs)
    for split, _ in options.splits:
        yield split.main
        yield from (name for name, _ in split.fractions)


def _without_twins(pairs: Sequence[tuple[str, T]], names: Mapping[str, str]) -> tuple[tuple[str, T], ...]:
    found = {names.get(name, name): value for name, value in pairs}
    found.update((name, value) for name, value in pairs if name not in names)
    return tuple(found.items())


def _renamed_split(split: RowSplit, names: Mapping[str, str]) -> RowSplit:
    fractions: defaultdict[str, float] = defaultdict(float)
    for name, fraction in split.fractions:
        fractions[names.get(name, name)] += fraction
    return replace(split, main=names.get(split.main, split.main), fractions=tuple(fractions.items()))


@dataclass(frozen=True, slots=True)
class Place:
    """A device that may take the values of another one."""

    name: str
    type: DeviceType
    backend: str
    free_bytes: int
    #: True if no new plan is to use it.
    is_avoided: bool = False


def choices(
    leaving: Sequence[Place],
    others: Sequence[Place],
    plans: Sequence[Sequence[str]],
    needed_bytes: Mapping[str, int],
) -> Iterator[dict[str, str]]:
    """Yield ways to replace devices by others of their kind, the best first.

    `plans` are the devices of plans that use one that leaves: a device that they may use already is
    better than another one, then one with more free memory. Only devices with room for
    `needed_bytes` of the one that leaves count.
    """
    uses = Counter(name for devices in plans for name in set(devices))
    ranked = sorted(others, key=lambda one: (-uses[one.name], -one.free_bytes, one.name))
    able = [
        [
            one.name
            for one in ranked
            if (one.type, one.backend) == (old.type, old.backend)
            and not one.is_avoided
            and one.free_bytes >= needed_bytes.get(old.name, 0)
        ]
        for old in leaving
    ]
    if not all(able):
        return
    for turn in range(max(map(len, able))):
        # Several devices of a member go to as many others, if there are.
        yield {
            old.name: names[(number + turn) % len(names)]
            for number, (old, names) in enumerate(zip(leaving, able, strict=True))
        }
