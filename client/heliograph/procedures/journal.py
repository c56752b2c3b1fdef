"""Decisions about runs to repeat after a device loss: which, in which order, from which state.

Plans that share variables, directly or through others, have one journal, since a run of one may
read what a run of another assigned. It holds, in the order of sending, the runs that have not
ended, those whose results were not delivered, and those since the last checkpoint that assigned
variables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph_proto.errors import DeviceLostError
from heliograph_proto.plans import RowSplit

if TYPE_CHECKING:
    from heliograph.procedures.compile import Compilation

#: The size of a run in the journal without its inputs.
ENTRY_BYTES = 1024
#: The default for the most bytes of a journal.
JOURNAL_BYTES = 256 * 2**20
#: Completed runs are swept when the journal has doubled and grown by this many.
_SLACK = 16

GIVEN_UP = "; the plan is not rebuilt: "
_CHECKPOINT = "take one with plan.checkpoint() when the variables have the values to continue from"

_REPEATABLE = "pass arrays, and get the outputs as arrays or new tensors; plan.restore(checkpoint) continues"


@dataclass(eq=False)
class JournalEntry:
    """A run, with the data to repeat it."""

    #: The object that repeats it; opaque here.
    plan: Any
    inputs: list[Any]
    #: The names of the variables that it assigns, and whether it has variables at all.
    assigns: frozenset[str]
    has_state: bool = False
    #: The reason why it cannot be repeated, and the reason why it can be repeated only for its
    #: assignments. Empty if it can.
    why_not: str = ""
    once: str = ""
    #: Returns True while a caller waits for its results.
    is_wanted: Callable[[], bool] = lambda: True
    #: True if it was sent; True or False when it has ended, with or without success, None before.
    sent: bool = False
    ended_well: bool | None = None
    #: True if the caller has its results.
    delivered: bool = False
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        arrays = (one for one in self.inputs if isinstance(one, np.ndarray))
        self.size_bytes = ENTRY_BYTES + sum(one.nbytes for one in arrays)

    @property
    def is_open(self) -> bool:
        """True if it has not ended, or its results may still be requested."""
        return self.ended_well is None or (self.ended_well and not self.delivered and self.is_wanted())


class Journal:
    """The runs of plans that share variables, since the last checkpoint.

    Runs that have ended take at most `limit_bytes`; beyond that the journal is unusable until the
    next checkpoint.
    """

    def __init__(self, limit_bytes: int = JOURNAL_BYTES) -> None:
        self.limit_bytes = limit_bytes
        #: In the order of sending.
        self.entries: list[JournalEntry] = []
        self.size_bytes = 0
        #: The values of the variables at the last checkpoint; None for the initial zeros.
        self.base: Mapping[str, np.ndarray[Any, Any]] | None = None
        #: The reason why the state of the variables cannot be restored; empty if it can.
        self.why_not = ""
        self._look_at = _SLACK
        self._look_bytes = limit_bytes // 2

    def __repr__(self) -> str:
        return f"<Journal {len(self.entries)} runs, {self.size_bytes:,} bytes>"

    @property
    def is_full(self) -> bool:
        """True if the journal should be swept before the next run is added."""
        return len(self.entries) >= self._look_at or self.size_bytes >= self._look_bytes

    def add(self, entry: JournalEntry) -> None:
        """Add a run."""
        if self.is_full:
            self.sweep()
            self._look_at = 2 * len(self.entries) + _SLACK
            open_bytes = sum(one.size_bytes for one in self.entries if one.is_open)
            self._look_bytes = self.size_bytes + open_bytes + self.limit_bytes // 2
        self.entries.append(entry)
        self.size_bytes += entry.size_bytes

    def spoil(self, why: str) -> None:
        """Record that no run of the journal explains the state of the variables."""
        self.why_not = self.why_not or why

    def weights_changed(self) -> None:
        """Record that runs sent from now on read other weights, tensors of the session."""
        for one in self.entries:
            if one.sent:
                one.why_not = one.why_not or "a tensor that is a weight was written since"

    def sweep(self) -> None:
        """Drop the runs that need not be repeated any more."""
        for one in self.entries:
            self._note(one)
        self.entries = [one for one in self.entries if one.is_open or self._is_kept(one)]
        self.size_bytes = sum(one.size_bytes for one in self.entries)
        kept_bytes = sum(one.size_bytes for one in self.entries if not one.is_open)
        if kept_bytes > self.limit_bytes:
            self.spoil(
                f"the runs since the last checkpoint have inputs of {kept_bytes:,} bytes, more than the "
                f"journal keeps ({self.limit_bytes:,}): take checkpoints more often, or raise journal_bytes"
            )
            self.entries = [one for one in self.entries if one.is_open]
            self.size_bytes = sum(one.size_bytes for one in self.entries)

    def _note(self, one: JournalEntry) -> None:
        """Record the effect of a run's end on the state."""
        if not one.assigns or one.ended_well is None or self.why_not:
            return
        if not one.ended_well:
            self.spoil("a run that assigns variables failed, or was cancelled, for another reason")
        elif self.base is None:
            self.spoil("runs have changed its variables, and there is no checkpoint")
        elif one.why_not:
            self.spoil(f"a run that assigned variables cannot be repeated: {one.why_not}")

    def _is_kept(self, one: JournalEntry) -> bool:
        """True if a run that has ended must be repeated for its assignments."""
        return bool(one.assigns) and one.ended_well is True and not self.why_not

    def restart(self, base: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restart from a checkpoint of the variables, before which everything has ended."""
        self.base, self.why_not = dict(base), ""
        self.entries = [one for one in self.entries if one.is_open]
        for one in self.entries:
            # Its result may still be requested, but the checkpoint has its assignments.
            one.assigns = frozenset()
            if one.has_state:
                one.why_not = one.why_not or "the state that it began with is older than the last checkpoint"
        self.size_bytes = sum(one.size_bytes for one in self.entries)

    def forget(self, variable: str) -> None:
        """Forget the value of a variable that was freed."""
        if self.base is not None:
            self.base = {name: array for name, array in self.base.items() if name != variable}

    def absorb(self, other: Journal) -> None:
        """Merge the journal of plans that share variables from now on.

        The runs so far shared none.
        """
        bases = [one for one in (self.base, other.base) if one is not None]
        if len(bases) == 1 and any(one.entries or one.why_not for one in (self, other) if one.base is None):
            self.spoil("plans that share variables had no common checkpoint")
        self.base = {name: array for one in bases for name, array in one.items()} if bases else None
        self.why_not = self.why_not or other.why_not
        self.entries += other.entries
        self.size_bytes += other.size_bytes
        self.limit_bytes = min(self.limit_bytes, other.limit_bytes)

    def to_repeat(self, cause: DeviceLostError) -> list[tuple[JournalEntry, bool]]:
        """Return the runs to repeat, in order, with True if their results are wanted.

        Every run that was sent has ended, or failed with the loss. Raises the loss, with the
        reason, if runs cannot be repeated.
        """
        self.sweep()
        if self.why_not:
            raise given_up(cause, self.why_not, _CHECKPOINT)
        found: list[tuple[JournalEntry, bool]] = []
        for one in (entry for entry in self.entries if entry.sent):
            why_not = one.why_not or (one.once if one.ended_well is None else "")
            if why_not and one.assigns:
                raise given_up(cause, why_not, _REPEATABLE)
            is_wanted = not one.delivered and not one.once and one.is_wanted()
            if not why_not and (is_wanted or one.assigns):
                found.append((one, is_wanted))
        return found


def given_up(cause: DeviceLostError, why: str, advice: str) -> DeviceLostError:
    """Return the loss, with the reason why the plan is not rebuilt."""
    if GIVEN_UP in cause.message:
        return cause
    message = f"{cause.message}{GIVEN_UP}{why}"
    return type(cause)(message, advice=advice, origin=cause.origin)


def survivors(cause: DeviceLostError, requested: Iterable[str], living: Collection[str]) -> tuple[str, ...]:
    """Return the requested devices that are left, or there again.

    Raises the loss if there are none.
    """
    requested = tuple(requested)
    if left := tuple(name for name in requested if name in living):
        return left
    raise given_up(
        cause,
        f"none of its devices is left: {', '.join(requested)}",
        "compile it with more devices, compile(g, devices=[...]); it continues on those that are left",
    )


def placed_on(how: Compilation, left: tuple[str, ...]) -> Compilation:
    """Return the compilation for the remaining devices, without the lost ones' pins and limits."""
    options = how.options
    placed = replace(
        options,
        devices=left,
        pins=tuple(one for one in options.pins if one[0] in left),
        memory=tuple(one for one in options.memory if one[0] in left),
        buffer_types=tuple(one for one in options.buffer_types if one[0] in left),
        splits=tuple(
            (split, leaves) for one, leaves in options.splits if (split := _split_over(one, left)) is not None
        ),
        taps=(),
    )
    return replace(how, options=placed, updates=0, doubt=lambda: None, reservation=0, renews_lost=True)


def _split_over(split: RowSplit, left: tuple[str, ...]) -> RowSplit | None:
    """Return the rest of a split over devices; None if only one device is left."""
    shares = tuple((name, share) for name, share in split.fractions if name in left)
    if not any(share for _, share in shares):
        return None
    return RowSplit(split.main if split.main in left else shares[0][0], shares)
