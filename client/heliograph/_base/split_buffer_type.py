"""`hg.SplitBufferType`: weights whose rows lie over several devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeAlias

from heliograph._base.device import DeviceBase
from heliograph._base.pins import among
from heliograph.core.shell import Shell
from heliograph.graph.builder import Graph
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.graph import LeafKind
from heliograph_proto.plans import RowSplit, check_fractions

#: How many near names an error lists.
_NEAR = 3

#: What each device has of the rows. (Type checkers take a mapping's keys exactly.)
Fractions: TypeAlias = Mapping[str, float] | Mapping[DeviceBase, float] | Mapping[DeviceBase | str, float]


class SplitBufferType:
    """Where the rows of a weight lie: a fraction for each device, and the main one, on which products with
    the weight are joined.

        split = hg.SplitBufferType("gpu0", {"gpu0": 0.6, "gpu1": 0.4})
        plan = session.compile(g, ["gpu0", "gpu1"], split={"layer*/w": split})

    Fractions count against their sum, so {"gpu0": 3, "gpu1": 2} is the same. Raises InvalidArgumentError for
    such as are negative, not finite, or all 0.
    """

    __slots__ = ("fractions", "main")

    def __init__(self, main: DeviceBase | str, fractions: Fractions) -> None:
        if not isinstance(fractions, Mapping):
            raise InvalidArgumentError(
                f"fractions is {type(fractions).__name__}",
                advice="what each device has: {'cpu0': 0.6, 'cpu1': 0.4}",
            )
        #: The device on which products are joined.
        self.main = main
        #: What each device has of the rows, in their order.
        self.fractions: dict[DeviceBase | str, float] = {
            device: _number(fraction, device) for device, fraction in fractions.items()
        }
        check_fractions([(_name(device), fraction) for device, fraction in self.fractions.items()])

    def __repr__(self) -> str:
        fractions = {_name(device): fraction for device, fraction in self.fractions.items()}
        return f"SplitBufferType({_name(self.main)!r}, {fractions})"


#: How the rows of weights lie, by patterns of the weights' names as in fnmatch.
Splits: TypeAlias = Mapping[str, SplitBufferType] | None

#: How rows lie, and the numbers of the weights whose.
RowSplits: TypeAlias = tuple[tuple[RowSplit, tuple[int, ...]], ...]


def row_splits(
    shell: Shell, graph: Graph, devices: Sequence[str], splits: Splits, bound: Collection[int]
) -> RowSplits:
    """Weights by how their rows lie; `bound`: leaves that are tensors. Raises InvalidArgumentError,
    UnknownDeviceError."""
    if splits is None:
        return ()
    if not isinstance(splits, Mapping):
        raise InvalidArgumentError(
            f"split is {type(splits).__name__}",
            advice="by patterns of weights' names: split={'layer*/w': hg.SplitBufferType(...)}",
        )
    names = {number: name for name, (number, _) in graph._leaves_of(LeafKind.WEIGHT).items()}
    found: dict[RowSplit, list[int]] = {}
    by: dict[int, str] = {}
    for pattern, given in splits.items():
        split = _row_split(shell, devices, given, f"split[{pattern!r:.80}]")
        for number in _matching(graph, names, pattern):
            if number in bound:
                raise _bound(names[number])
            if number in by:
                raise _twice(names[number], by[number], pattern)
            by[number] = pattern
            found.setdefault(split, []).append(number)
    return tuple((split, tuple(numbers)) for split, numbers in found.items())


def _row_split(shell: Shell, devices: Sequence[str], given: SplitBufferType, what: str) -> RowSplit:
    if not isinstance(given, SplitBufferType):
        raise InvalidArgumentError(
            f"{what} is {given!r:.80}", advice="hg.SplitBufferType('cpu0', {'cpu0': 0.6, 'cpu1': 0.4})"
        )
    fractions = [
        (among(shell, devices, device, f"a device of {what}"), fraction)
        for device, fraction in given.fractions.items()
    ]
    check_fractions(fractions)
    return RowSplit(among(shell, devices, given.main, f"the main device of {what}"), tuple(fractions))


def _matching(graph: Graph, names: Mapping[int, str], pattern: str) -> list[int]:
    """The weights that a pattern means: at least one."""
    if not isinstance(pattern, str):
        raise InvalidArgumentError(
            f"split is by pattern, not by {pattern!r:.80}",
            advice="names of weights as in fnmatch: 'layer0/*'",
        )
    found = [number for number, name in names.items() if fnmatchcase(name, pattern)]
    if not found:
        raise InvalidArgumentError(
            f"no weight matches {pattern!r:.80}, which is to lie over devices",
            advice=_advice(graph, list(names.values()), pattern),
        )
    return found


def _advice(graph: Graph, names: Sequence[str], pattern: str) -> str:
    if graph.find(pattern):
        return "it matches other values alone; name weights"
    near = get_close_matches(pattern, names, _NEAR, cutoff=0.3)
    return f"near names: {', '.join(map(repr, near))}" if near else f"names are such as {list(names)[:_NEAR]}"


def _bound(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"weight {name!r} is to lie over devices, but is bound to a tensor, which lies where it is",
        advice="write a pattern that does not match it, or give the graph the weight's content",
    )


def _twice(name: str, *patterns: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"weight {name!r} is to lie over devices by {' and by '.join(map(repr, patterns))}",
        advice="write patterns that have no weight in common",
    )


def _name(device: object) -> str:
    return device.name if isinstance(device, DeviceBase) else f"{device}"


def _number(fraction: float, device: object) -> float:
    """A number as one. Raises InvalidArgumentError."""
    try:
        return float(fraction)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(
            f"the fraction of {_name(device)} is {fraction!r:.80}", advice="a number, such as 0.5"
        ) from None
