"""Plans with `on_loss="rebuild"`: placing them again after a device loss, and repeating their runs.

`journal.py` decides which runs to repeat, and where. Plans that share variables form a group.
Sending a run, taking a checkpoint and rebuilding each need the group's turn, so runs are sent in
the order of their requests, before a loss and after it. The caller that waits for a run which
failed with the loss rebuilds the group, within its own deadline.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph.core.effects import Procedure, WaitFor, ask
from heliograph.core.future import Deadline, Outcome, Pending, logger
from heliograph.core.methods import LIST_DEVICES
from heliograph.core.protocol import ClientCore
from heliograph.procedures.checkpoint import Checkpoint, read_variables, types_of, write_variable
from heliograph.procedures.journal import Journal, JournalEntry, given_up, survivors
from heliograph.procedures.run import SentRun, collect
from heliograph.procedures.transfer import arrive, wait_for_all
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    DeviceLostError,
    HeliographError,
    InvalidArgumentError,
)
from heliograph_proto.plans import VariablePort

if TYPE_CHECKING:
    from heliograph._base.plan import PlanBase

#: How often a group is rebuilt for one run, and how often rebuilding restarts when another device
#: is lost.
ATTEMPTS = 3

#: The time beyond its run's deadline that a caller waits for the server to report the end.
_GRACE_SECONDS = 1.0

#: Sends a run of the plan; the flag is True if its outputs are wanted.
Send = Callable[[bool], Procedure[SentRun]]


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A record that a plan was placed again."""

    #: The loss, in words.
    reason: str
    #: The names of the lost devices, and of those that the plan may use since.
    lost: tuple[str, ...]
    devices: tuple[str, ...]
    #: The number of runs that were replayed for the variables that they assign, and of runs that
    #: were repeated for their results; of all plans that share variables with this one.
    replayed: int
    repeated: int


class RepeatedRun:
    """A run of such a plan, held by the caller that wants its results."""

    def __init__(self, plan: PlanBase, entry: JournalEntry, send: Send, is_loop: bool) -> None:
        self.plan, self.entry, self._is_loop = plan, entry, is_loop
        self.entry.plan = _Sender(plan, send)
        entry.is_wanted = _alive(weakref.ref(self))
        #: The run with its results, once they are there.
        self._done: SentRun | None = None

    @property
    def run(self) -> SentRun | None:
        """The run as it was last sent; None before that."""
        found: SentRun | None = self._done or self.entry.plan.run
        return found

    def sending(self) -> Procedure[None]:
        """Send the run, after those requested before it."""
        while not self.entry.sent:
            yield from self.plan._live_group.send(self.entry)

    def stop(self) -> bool:
        """Request the end of a loop after its present step. Returns False if it has ended.

        A repetition would not know that step, so there is none.
        """
        run = self.run
        if run is not None and run.pending.done:
            return False
        if self._is_loop:
            self.entry.why_not = self.entry.why_not or "the loop was stopped before its last step"
        if run is not None:
            self.plan._shell.core.stop(run.pending)
        return True

    def was_fed(self) -> None:
        """Record that a loop was fed. A repetition would not know at which steps."""
        if self.run is not None and self.run.pending.done:
            return
        self.entry.why_not = self.entry.why_not or "the loop was fed while it ran"

    def seconds(self, timeout: float | None, deadline: Deadline, is_whole: bool) -> float | None:
        """Return the seconds to wait with a `timeout`, for a run with a deadline.

        The server ends a run that takes too long, and its report is awaited. Time that rebuilding
        did not need is not waited for.
        """
        left = deadline.remaining()
        if left is None or is_whole:
            return left if timeout is None else timeout
        left += _GRACE_SECONDS
        return left if timeout is None else min(timeout, left)

    def finishing(self, cancel: bool) -> Procedure[SentRun]:
        """Wait until the results are there, on whatever devices."""
        try:
            return (yield from self._finishing(cancel))
        except DeviceLostError:
            raise
        except BaseException as error:
            if cancel:
                self.plan._live_group.abandon(self.entry, error)
            raise

    def _finishing(self, cancel: bool) -> Procedure[SentRun]:
        entry = self.entry
        while self._done is None:
            yield from self.sending()
            run = entry.plan.run
            if run is None:
                raise entry.plan.error.at(entry.plan.error.origin)
            try:
                yield from collect(self.plan._shell.core, run, cancel=cancel)
            except DeviceLostError as error:
                lost = error
            else:
                self._done, entry.delivered, entry.ended_well = run, True, True
                # The journal keeps the run's inputs, not its results.
                entry.plan.run = None
                break
            yield from self.plan._live_group.recover(entry, run, lost)
        return self._done


def _alive(reference: weakref.ref[RepeatedRun]) -> Callable[[], bool]:
    return lambda: reference() is not None


class _Sender:
    """The function that sends a run, the run as last sent, and an error if it is not repeated."""

    __slots__ = ("error", "plan", "run", "send", "times")

    def __init__(self, plan: PlanBase, send: Send) -> None:
        self.plan, self.send = plan, send
        #: The number of repetitions.
        self.times = 0
        self.run: SentRun | None = None
        self.error: HeliographError | None = None


class RebuildGroup:
    """Plans that share variables, and their journal."""

    def __init__(self, core: ClientCore, journal: Journal) -> None:
        self._core = core
        self.journal = journal
        #: In the order of compiling.
        self._plans: list[weakref.ref[PlanBase]] = []
        #: Runs that were requested and not sent.
        self._unsent: deque[JournalEntry] = deque()
        self._turn: Outcome | None = None
        #: True while the group itself writes variables.
        self._is_writing = False
        #: The group that these plans belong to now.
        self.successor: RebuildGroup | None = None
        #: The variables that runs may have assigned so far.
        self.changed: set[str] = set()
        #: The loss that is being repaired. It stays if a caller's deadline ends in the middle.
        self._rebuilding: DeviceLostError | None = None

    def __repr__(self) -> str:
        return f"<Group of {len(self.plans)} plans, {self.journal!r}>"

    # Members

    @property
    def plans(self) -> list[PlanBase]:
        """The plans that still exist."""
        found = [reference() for reference in self._plans]
        return [one for one in found if one is not None and not one.freed]

    @property
    def variables(self) -> dict[str, VariablePort]:
        """The variables of all plans, by name."""
        return {port.port.name: port for plan in self.plans for port in plan._spec.info.variables}

    def add(self, plan: PlanBase) -> None:
        """Add a plan that was compiled."""
        self._plans.append(weakref.ref(plan))
        plan._group = self
        self.watch(plan)

    def watch(self, plan: PlanBase) -> None:
        """Note in the journal when the plan's variables are written other than by runs, or its
        weights."""
        for port in plan._spec.info.variables:
            self._core.watched.watch(port.tensor, self._spoil_journal)
        for weight in plan._spec.weights:
            self._core.watched.watch(weight, self.journal.weights_changed)

    def _spoil_journal(self) -> None:
        if not self._is_writing:
            self.journal.spoil("its variables were written by other means than its runs")

    def absorb(self, other: RebuildGroup) -> None:
        """Take over a group whose plans share variables with these. Both groups have their turn."""
        other._note_ended()
        self.journal.absorb(other.journal)
        self._unsent.extend(other._unsent)
        other._unsent.clear()
        other.successor = self
        self.changed |= other.changed
        self._rebuilding = self._rebuilding or other._rebuilding
        for plan in other.plans:
            self.add(plan)

    # The order

    def take_turn(self) -> Procedure[None]:
        """Wait for the group's turn: no other caller sends, checkpoints or rebuilds meanwhile."""
        while self._turn is not None:
            yield WaitFor(self._turn)
        self._turn = Outcome()

    def give_turn(self) -> None:
        """Let the next caller in."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._core.settle(turn)

    def enqueue(self, entry: JournalEntry) -> None:
        """Add a run that was requested. This fixes its place in the order."""
        if self.journal.is_full and self._rebuilding is None:
            self._note_ended()
        self.journal.add(entry)
        self._unsent.append(entry)
        self.changed |= entry.assigns

    def send(self, entry: JournalEntry) -> Procedure[None]:
        """Send a run, and those requested before it. Raises the errors of sending it."""
        try:
            yield from self.take_turn()
            try:
                if self._rebuilding is not None:
                    yield from self._rebuild(self._rebuilding)
                while not entry.sent and self._unsent:
                    yield from self._send_next()
            finally:
                self.give_turn()
        except BaseException as error:
            self._withdraw(entry, error)
            raise
        if entry.plan.error is not None:
            raise entry.plan.error.at(entry.plan.error.origin)

    def _withdraw(self, entry: JournalEntry, error: BaseException) -> None:
        """Remove a run that no caller waits for any more, if it was not sent."""
        if not entry.sent and entry in self._unsent:
            self._unsent.remove(entry)
            self._fail(entry, _typed(error))

    def abandon(self, entry: JournalEntry, error: BaseException) -> None:
        """Give up a run that no caller waits for.

        During a rebuild it has no effect: the variables get their earlier values.
        """
        if self._rebuilding is not None and entry.plan.error is None:
            entry.sent = True
            self._fail(entry, _typed(error))
            entry.assigns = frozenset()

    def _send_all(self) -> Procedure[None]:
        """Finish a rebuild that was begun, and send all requested runs."""
        if self._rebuilding is not None:
            yield from self._rebuild(self._rebuilding)
        while self._unsent:
            yield from self._send_next()

    def _send_next(self) -> Procedure[None]:
        """Send the first requested run, or record why it is refused."""
        first = self._unsent[0]
        try:
            first.plan.run = yield from first.plan.send(True)
        except DeadlineExceededError:
            raise
        except HeliographError as error:
            if first in self._unsent:
                self._unsent.remove(first)
                self._fail(first, error)
            return
        first.sent = True
        if first in self._unsent:
            self._unsent.remove(first)

    def _fail(self, entry: JournalEntry, error: HeliographError) -> None:
        """Record that a run is not repeated, or was never sent."""
        was_sent, entry.sent = entry.sent, True
        entry.plan.error = error
        if was_sent:
            entry.ended_well = False
        else:
            # It assigned nothing.
            entry.assigns, entry.ended_well = frozenset(), False

    def _note_ended(self) -> None:
        """Note which runs have ended, and how. A run that failed with a loss has not."""
        for one in self.journal.entries:
            run: SentRun | None = one.plan.run
            if run is None or not run.pending.done or one.plan.error is not None:
                continue
            error = run.pending.error
            lost = isinstance(error, DeviceLostError)
            one.ended_well = None if lost else error is None
            if one.ended_well and not one.is_wanted():
                one.plan.run = None

    def _settled(self) -> Procedure[list[JournalEntry]]:
        """Wait until all runs that were sent have ended. Returns those that failed with a loss."""
        for one in list(self.journal.entries):
            run = one.plan.run
            if run is not None and not run.pending.done:
                yield WaitFor(run.pending)
        self._note_ended()
        sent = [one for one in self.journal.entries if one.sent]
        return [one for one in sent if one.ended_well is None and one.plan.error is None]

    # Rebuilding

    def recover(self, entry: JournalEntry, run: SentRun, cause: DeviceLostError) -> Procedure[None]:
        """Repeat a run that failed with a loss, its own or an earlier run's.

        Raises the reason if it is not.
        """
        yield from self.take_turn()
        try:
            if self.successor is not None:
                return
            if entry.plan.error is None and entry.plan.run is run:
                yield from self._rebuild(cause)
        finally:
            self.give_turn()
        if entry.plan.error is not None:
            raise entry.plan.error.at(entry.plan.error.origin)
        if entry.plan.run is run:
            raise type(cause)(
                f"{cause.message}; the run is not repeated: {entry.why_not or entry.once or 'it is over'}",
                advice="run it again: the plan was placed again",
                origin=cause.origin,
            )

    def _rebuild(self, cause: DeviceLostError) -> Procedure[None]:
        """Place the plans again, restore variables and repeat runs.

        Raises the reason if that is not possible; all runs that wait for it then have the same
        error.
        """
        is_unfinished, self._rebuilding = self._rebuilding is not None, cause
        is_news = not is_unfinished
        try:
            for _ in range(ATTEMPTS):
                repeats, places, lost = yield from self._decide(cause, is_unfinished, is_news)
                try:
                    yield from self._carry_out(cause, repeats, places, lost)
                except DeviceLostError as error:
                    cause, is_unfinished, is_news = error, True, True
                    continue
                self._rebuilding = None
                return
            raise given_up(cause, f"devices were lost {ATTEMPTS} times in the meantime", "run it again")
        except DeadlineExceededError:
            raise
        except HeliographError as error:
            self._stay_broken(cause)
            self._give_up(error)
            raise

    def _stay_broken(self, cause: DeviceLostError) -> None:
        """Make the next run try again if a plan could not be placed."""
        self._rebuilding = None if all(one._is_placed for one in self.plans) else cause

    def _give_up(self, error: HeliographError) -> None:
        self._note_ended()
        for one in self.journal.entries:
            if one.sent and one.ended_well is None:
                self._fail(one, error)
        self.journal.sweep()

    def _decide(
        self, cause: DeviceLostError, is_unfinished: bool, is_news: bool
    ) -> Procedure[
        tuple[list[tuple[JournalEntry, bool]], list[tuple[PlanBase, tuple[str, ...]]], tuple[str, ...]]
    ]:
        """Return the runs to repeat, the plans to place, and the names of lost devices.

        A run comes with True if its results are wanted, a plan with its devices. `is_unfinished`: a
        rebuild was begun before. `is_news`: a device was lost since then.
        """
        failed = yield from self._settled()
        for one in self.journal.entries:
            if is_unfinished and one.plan.times and one.ended_well is False:
                # It was cancelled while it was repeated, and its assignments are undone now.
                one.assigns = frozenset()
            if one.plan.plan.freed:
                one.why_not = "its plan was freed: take a checkpoint before"
            elif one in failed and one.plan.times >= ATTEMPTS:
                one.why_not = (
                    one.why_not or f"it was repeated {ATTEMPTS} times, and devices were lost each time"
                )
        found = yield from ask(LIST_DEVICES, None)
        living = {one.name for one in found.devices if not one.lost}
        plans = self.plans
        broken = [one for one in plans if one._placed_devices - living or not one._is_placed]
        if not broken and is_news:
            # Another device has come back under the same name. A plan whose devices are all there
            # gets its existing compilation.
            broken = plans
        lost = frozenset[str]().union(*(one._placed_devices for one in broken)) - living
        places = [(one, survivors(cause, one._requested_devices, living)) for one in broken]
        return self.journal.to_repeat(cause), places, tuple(sorted(lost))

    def _carry_out(
        self,
        cause: DeviceLostError,
        repeats: list[tuple[JournalEntry, bool]],
        places: list[tuple[PlanBase, tuple[str, ...]]],
        lost: tuple[str, ...],
    ) -> Procedure[None]:
        replayed = sum(not is_wanted for _, is_wanted in repeats)
        made = Rebuild(cause.message, lost, (), replayed, len(repeats) - replayed)
        yield from self._place(places, made)
        yield from self._write(self._initial() if self.journal.base is None else self.journal.base)
        unwatched = yield from self._repeat(repeats)
        yield from wait_for_all(self._core, unwatched)
        for _, left in places:
            logger.warning(
                "%s: the plan was placed again on %s; runs replayed: %d, repeated: %d",
                cause.message,
                ", ".join(left),
                made.replayed,
                made.repeated,
            )

    def _place(self, places: Iterable[tuple[PlanBase, tuple[str, ...]]], how: Rebuild) -> Procedure[None]:
        """Place plans again. Their remains are freed first, since there may be no room for both."""
        for plan, _ in places:
            plan._let_go()
        yield from arrive(self._core)
        for plan, left in places:
            assert plan._spec.placing is not None
            spec = yield from plan._spec.placing(left)
            plan._was_rebuilt(spec, how)
            self.watch(plan)

    def _repeat(self, repeats: Iterable[tuple[JournalEntry, bool]]) -> Procedure[list[Pending]]:
        """Send runs once more, in order. Returns those whose results are not wanted."""
        unwatched: list[Pending] = []
        for entry, is_wanted in repeats:
            entry.plan.run = run = yield from entry.plan.send(is_wanted)
            entry.ended_well = None
            entry.plan.times += is_wanted
            if not is_wanted:
                unwatched.append(run.pending)
        return unwatched

    # Variables

    def _initial(self) -> dict[str, np.ndarray[Any, Any]]:
        """The first elements of variables, by name; others begin as zeros."""
        recipes = [plan._spec.recipe for plan in self.plans]
        return {name: one for recipe in recipes if recipe for name, one in recipe.initial.items()}

    def _write(self, values: Mapping[str, np.ndarray[Any, Any]]) -> Procedure[None]:
        """Set all variables to these elements, or to zeros, and wait until it is done."""
        core = self._core
        pendings: list[Pending] = []
        self._is_writing = True
        try:
            for name, port in self.variables.items():
                if name in values:
                    pendings += yield from write_variable(core, port, values[name])
                else:
                    command = c.Memset(port.tensor, 0, port.port.type.nbytes, 0)
                    pendings.append(core.send(command, observed=True))
            yield from wait_for_all(core, pendings)
        finally:
            self._is_writing = False

    def checkpoint(self) -> Procedure[Checkpoint]:
        """Return the values of all variables after the runs requested so far."""
        yield from self.take_turn()
        try:
            if self.successor is not None:
                return (yield from self.successor.checkpoint())
            yield from self._send_all()
            for _ in range(ATTEMPTS):
                failed = yield from self._settled()
                try:
                    if failed:
                        raise failed[0].plan.run.pending.error
                    taken = yield from read_variables(self._core, self.variables)
                    self.journal.restart(_kept(taken))
                    return taken
                except DeviceLostError as error:
                    yield from self._rebuild(cause := error)
            raise given_up(cause, f"devices were lost {ATTEMPTS} times in the meantime", "take it again")
        finally:
            self.give_turn()

    def restore(self, checkpoint: Checkpoint) -> Procedure[None]:
        """Set all variables to a checkpoint's values, after the runs requested so far.

        Places the plans again if a device was lost.
        """
        checkpoint.check(types_of(self.variables))
        yield from self.take_turn()
        try:
            if self.successor is not None:
                return (yield from self.successor.restore(checkpoint))
            self._rebuilding = None
            yield from self._send_all()
            failed = yield from self._settled()
            for one in failed:
                self._fail(
                    one, given_up(one.plan.run.pending.error, "its variables were restored", "run it again")
                )
            for attempt in range(ATTEMPTS):
                try:
                    yield from self._place_broken(attempt > 0)
                    yield from self._write(checkpoint)
                    self.journal.restart({name: array.copy() for name, array in checkpoint.items()})
                    return
                except DeviceLostError as error:
                    cause = error
            raise cause
        except HeliographError:
            self._stay_broken(DeviceLostError("a device was lost, and the plan was not placed again"))
            raise
        finally:
            self.give_turn()

    def _place_broken(self, all_of_them: bool) -> Procedure[None]:
        """Place plans again: those that need a lost device, or all."""
        found = yield from ask(LIST_DEVICES, None)
        living = {one.name for one in found.devices if not one.lost}
        for plan in self.plans:
            lost = tuple(sorted(plan._placed_devices - living))
            if not lost and plan._is_placed and not all_of_them:
                continue
            cause = DeviceLostError(f"device {lost[0] if lost else plan.device} is lost")
            left = survivors(cause, plan._requested_devices, living)
            yield from self._place([(plan, left)], Rebuild(cause.message, lost, (), 0, 0))


def _typed(error: BaseException) -> HeliographError:
    """Return the error of a run that no caller waits for any more."""
    return error if isinstance(error, HeliographError) else CancelledError("the run was cancelled")


def _kept(taken: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays, made read-only."""
    for array in taken.values():
        array.flags.writeable = False
    return dict(taken)


class RebuildGroups:
    """The groups of a session, and its plans that are not rebuilt."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._groups: list[RebuildGroup] = []
        #: Plans without `on_loss` that assign variables; names of variables that such plans, also
        #: freed ones, may have changed.
        self._others: weakref.WeakSet[PlanBase] = weakref.WeakSet()
        self._changed: set[str] = set()

    def admit_other(self, plan: PlanBase) -> None:
        """Register a plan that is not rebuilt.

        Raises InvalidArgumentError if it assigns a variable of a plan that is rebuilt.
        """
        variables, watched = plan._spec.info.variables, self._core.watched
        for port in variables:
            if port.port.name in plan._assigns and port.tensor in watched:
                raise _mixed(port.port.name)
        if plan._assigns:
            self._others.add(plan)
        # A plan that only reads a variable makes it writable as well.
        self._changed |= {port.port.name for port in variables if port.tensor not in watched}

    def admit(self, plan: PlanBase, limit_bytes: int) -> Procedure[None]:
        """Register a plan that is rebuilt. Raises InvalidArgumentError."""
        names = {port.port.name for port in plan._spec.info.variables}
        for other in list(self._others):
            if not other.freed and (shared := other._assigns & names):
                raise _mixed(min(shared))
        self._prune()
        made = RebuildGroup(self._core, Journal(limit_bytes))
        if names & self._changed:
            made.journal.spoil(
                "other plans may have changed its variables before, and there is no checkpoint"
            )
        made.add(plan)
        sharing = [one for one in self._groups if names & one.variables.keys()]
        self._groups.append(made)
        for group in sharing:
            yield from group.take_turn()
            try:
                if group in self._groups:
                    made.absorb(group)
                    self._groups.remove(group)
            finally:
                group.give_turn()

    def forget_variable(self, name: str) -> None:
        """Forget a variable that was freed. Another one of its name begins with zeros."""
        self._prune()
        self._changed.discard(name)
        for group in self._groups:
            group.changed.discard(name)
            group.journal.forget(name)

    def _prune(self) -> None:
        """Drop the groups whose plans are gone."""
        for group in [one for one in self._groups if not one.plans]:
            self._groups.remove(group)
            self._changed |= group.changed


def _mixed(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"variable {name!r} is shared by a plan that is rebuilt when a device is lost and a plan that "
        "assigns it and is not rebuilt",
        advice="compile both with on_loss='rebuild', or give the variable another name",
    )
