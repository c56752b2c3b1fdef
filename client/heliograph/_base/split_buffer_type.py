"""`hg.SplitBufferType`: weights whose rows are spread over several devices."""

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

#: The number of near names in an error.
_NEAR = 3

#: Each device's fraction of the rows. (Type checkers require exact key types of a mapping.)
Fractions: TypeAlias = Mapping[str, float] | Mapping[DeviceBase, float] | Mapping[DeviceBase | str, float]


class SplitBufferType:
    """The spread of a weight's rows: a fraction per device, and the device that joins products.

        split = hg.SplitBufferType("gpu0", {"gpu0": 0.6, "gpu1": 0.4})
        plan = session.compile(g, ["gpu0", "gpu1"], split={"layer*/w": split})

    Fractions are relative to their sum, so {"gpu0": 3, "gpu1": 2} is the same. Raises
    InvalidArgumentError for fractions that are negative, not finite, or all 0.
    """

    __slots__ = ("fractions", "main")

    def __init__(self, main: DeviceBase | str, fractions: Fractions) -> None:
        if not isinstance(fractions, Mapping):
            raise InvalidArgumentError(
                f"fractions is {type(fractions).__name__}",
                advice="the fraction of each device: {'cpu0': 0.6, 'cpu1': 0.4}",
            )
        #: The device that joins the products.
        self.main = main
        #: Each device's fraction of the rows, in their order.
        self.fractions: dict[DeviceBase | str, float] = {
            device: _number(fraction, device) for device, fraction in fractions.items()
        }
        check_fractions([(_name(device), fraction) for device, fraction in self.fractions.items()])

    def __repr__(self) -> str:
        fractions = {_name(device): fraction for device, fraction in self.fractions.items()}
        return f"SplitBufferType({_name(self.main)!r}, {fractions})"


#: Splits by patterns of weight names as in fnmatch.
Splits: TypeAlias = Mapping[str, SplitBufferType] | None

#: Splits, with the numbers of the weights that they apply to.
RowSplits: TypeAlias = tuple[tuple[RowSplit, tuple[int, ...]], ...]


def row_splits(
    shell: Shell, graph: Graph, devices: Sequence[str], splits: Splits, bound: Collection[int]
) -> RowSplits:
    """Return the weights by their splits; `bound` are the leaves that are tensors.

    Raises InvalidArgumentError and UnknownDeviceError.
    """
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
    """Return the weights that a pattern selects, at least one."""
    if not isinstance(pattern, str):
        raise InvalidArgumentError(
            f"a key of split is a pattern, not {pattern!r:.80}",
            advice="names of weights as in fnmatch: 'layer0/*'",
        )
    found = [number for number, name in names.items() if fnmatchcase(name, pattern)]
    if not found:
        raise InvalidArgumentError(
            f"no weight matches {pattern!r:.80}, a key of split",
            advice=_advice(graph, list(names.values()), pattern),
        )
    return found


def _advice(graph: Graph, names: Sequence[str], pattern: str) -> str:
    if graph.find(pattern):
        return "it matches only other values; name weights"
    near = get_close_matches(pattern, names, _NEAR, cutoff=0.3)
    return f"near names: {', '.join(map(repr, near))}" if near else f"names are such as {list(names)[:_NEAR]}"


def _bound(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"weight {name!r} is split over devices, but is bound to a tensor, which stays where it is",
        advice="write a pattern that does not match it, or give the graph the weight's content",
    )


def _twice(name: str, *patterns: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"weight {name!r} is split over devices by {' and by '.join(map(repr, patterns))}",
        advice="write patterns that have no weight in common",
    )


def _name(device: object) -> str:
    return device.name if isinstance(device, DeviceBase) else f"{device}"


def _number(fraction: float, device: object) -> float:
    """Return a fraction as a number. Raises InvalidArgumentError."""
    try:
        return float(fraction)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(
            f"the fraction of {_name(device)} is {fraction!r:.80}", advice="a number, for example 0.5"
        ) from None
