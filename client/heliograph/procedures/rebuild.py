"""Plans with `on_loss="rebuild"`: placing them again when a device was lost, and repeating their runs.

Generators as in `_procedures`; what is repeated, and where, is decided in `_journal`. Plans that share
variables are a group. Whoever sends a run of it, takes a checkpoint or mends it has the group's turn, so that
runs are sent in the order in which they were asked for, before a loss and after it. Whoever asks for the
result of a run that failed with the loss mends the group, within the time that it has.
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

#: How often a group is mended for one run, and how often mending begins anew when another device is lost.
ATTEMPTS = 3

#: How much longer than its run's deadline somebody waits for the server to say that it is over.
_GRACE_SECONDS = 1.0

#: Sends a run of the plan; the flag says whether anybody wants its outputs.
Send = Callable[[bool], Procedure[SentRun]]


@dataclass(frozen=True, slots=True)
class Rebuild:
    """That a plan was placed again."""

    #: What was lost, in words.
    reason: str
    #: Names of the devices that were lost, and of those that the plan may use since.
    lost: tuple[str, ...]
    devices: tuple[str, ...]
    #: Runs that were replayed for what they assign, and runs that were repeated for who waits for them; of
    #: all plans that share variables with this one.
    replayed: int
    repeated: int


class RepeatedRun:
    """A run of such a plan, for whoever wants its results."""

    def __init__(self, plan: PlanBase, entry: JournalEntry, send: Send) -> None:
        self.plan, self.entry = plan, entry
        self.entry.plan = _Sender(plan, send)
        entry.is_wanted = _alive(weakref.ref(self))
        #: With its results, once they are there.
        self._done: SentRun | None = None

    @property
    def run(self) -> SentRun | None:
        """As it was sent last; None before that."""
        found: SentRun | None = self._done or self.entry.plan.run
        return found

    def sending(self) -> Procedure[None]:
        """Sends it, and what was asked for before it."""
        while not self.entry.sent:
            yield from self.plan._live_group.send(self.entry)

    def seconds(self, timeout: float | None, deadline: Deadline, is_whole: bool) -> float | None:
        """How long somebody waits who named `timeout`, and whose run has a deadline. The server ends a run
        that takes too long, which is to be heard; what the run did not need to be mended is not waited
        for."""
        left = deadline.remaining()
        if left is None or is_whole:
            return left if timeout is None else timeout
        left += _GRACE_SECONDS
        return left if timeout is None else min(timeout, left)

    def finishing(self, cancel: bool) -> Procedure[SentRun]:
        """Until its results are there, on whatever devices."""
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
                # The journal is to keep what it took, not what it gave.
                entry.plan.run = None
                break
            yield from self.plan._live_group.recover(entry, run, lost)
        return self._done


def _alive(reference: weakref.ref[RepeatedRun]) -> Callable[[], bool]:
    return lambda: reference() is not None


class _Sender:
    """What sends a run, how it was sent last, and why it is not sent again."""

    __slots__ = ("error", "plan", "run", "send", "times")

    def __init__(self, plan: PlanBase, send: Send) -> None:
        self.plan, self.send = plan, send
        #: How often it was repeated.
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
        #: Runs that were asked for and not sent.
        self._unsent: deque[JournalEntry] = deque()
        self._turn: Outcome | None = None
        #: Whether what is written now is this group's.
        self._is_writing = False
        #: The group that these plans belong to now.
        self.heir: RebuildGroup | None = None
        #: What runs may have assigned so far.
        self.changed: set[str] = set()
        #: The loss that is being mended; it stays when somebody's time was over in the middle of it.
        self._mending: DeviceLostError | None = None

    def __repr__(self) -> str:
        return f"<Group of {len(self.plans)} plans, {self.journal!r}>"

    # Who is in it

    @property
    def plans(self) -> list[PlanBase]:
        """Those that are there."""
        found = [reference() for reference in self._plans]
        return [one for one in found if one is not None and not one.freed]

    @property
    def variables(self) -> dict[str, VariablePort]:
        """Those of all plans, by name."""
        return {port.port.name: port for plan in self.plans for port in plan._spec.info.variables}

    def add(self, plan: PlanBase) -> None:
        """A plan was compiled."""
        self._plans.append(weakref.ref(plan))
        plan._group = self
        self.watch(plan)

    def watch(self, plan: PlanBase) -> None:
        """Has the journal know when somebody else writes the plan's variables."""
        for port in plan._spec.info.variables:
            self._core.watched.watch(port.tensor, self._touched)

    def _touched(self) -> None:
        if not self._is_writing:
            self.journal.spoil("its variables were written by other means than its runs")

    def absorb(self, other: RebuildGroup) -> None:
        """Plans of the other share variables with these. Both have their turn."""
        other._look()
        self.journal.absorb(other.journal)
        self._unsent.extend(other._unsent)
        other._unsent.clear()
        other.heir = self
        self.changed |= other.changed
        self._mending = self._mending or other._mending
        for plan in other.plans:
            self.add(plan)

    # The order

    def take_turn(self) -> Procedure[None]:
        """Until nobody else sends, checkpoints or mends."""
        while self._turn is not None:
            yield WaitFor(self._turn)
        self._turn = Outcome()

    def give_turn(self) -> None:
        """Lets the next one in."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._core.settle(turn)

    def ask(self, entry: JournalEntry) -> None:
        """A run was asked for: it has its place from now on."""
        if self.journal.is_full and self._mending is None:
            self._look()
        self.journal.add(entry)
        self._unsent.append(entry)
        self.changed |= entry.assigns

    def send(self, entry: JournalEntry) -> Procedure[None]:
        """Sends a run, and those that were asked for before it. Raises what sending it does."""
        try:
            yield from self.take_turn()
            try:
                if self._mending is not None:
                    yield from self._mend(self._mending)
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
        """Nobody waits for a run to be sent any more."""
        if not entry.sent and entry in self._unsent:
            self._unsent.remove(entry)
            self._fail(entry, _typed(error))

    def abandon(self, entry: JournalEntry, error: BaseException) -> None:
        """Nobody waits for a run any more, which is to have no effect. In the middle of mending it has
        none: the variables get what they had before it."""
        if self._mending is not None and entry.plan.error is None:
            entry.sent = True
            self._fail(entry, _typed(error))
            entry.assigns = frozenset()

    def _send_all(self) -> Procedure[None]:
        """Finishes what was begun, and sends what was asked for."""
        if self._mending is not None:
            yield from self._mend(self._mending)
        while self._unsent:
            yield from self._send_next()

    def _send_next(self) -> Procedure[None]:
        """Sends the run that was asked for first, unless sending it is refused."""
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
        """A run is not repeated, or was never sent."""
        was_sent, entry.sent = entry.sent, True
        entry.plan.error = error
        if was_sent:
            entry.ended_well = False
        else:
            # It assigned nothing.
            entry.assigns, entry.ended_well = frozenset(), False

    def _look(self) -> None:
        """Notes which runs have ended, and how. One that failed with a loss has not."""
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
        """Until all runs that were sent have ended; those that failed with a loss."""
        for one in list(self.journal.entries):
            run = one.plan.run
            if run is not None and not run.pending.done:
                yield WaitFor(run.pending)
        self._look()
        sent = [one for one in self.journal.entries if one.sent]
        return [one for one in sent if one.ended_well is None and one.plan.error is None]

    # Mending

    def recover(self, entry: JournalEntry, run: SentRun, cause: DeviceLostError) -> Procedure[None]:
        """A run failed with a loss, or what it left did: repeats it. Raises why it is not."""
        yield from self.take_turn()
        try:
            if self.heir is not None:
                return
            if entry.plan.error is None and entry.plan.run is run:
                yield from self._mend(cause)
        finally:
            self.give_turn()
        if entry.plan.error is not None:
            raise entry.plan.error.at(entry.plan.error.origin)
        if entry.plan.run is run:
            raise type(cause)(
                f"{cause.message}; the run is not repeated: {entry.why_not or entry.once or 'it is over'}",
                advice="run it again: the plan was placed anew",
                origin=cause.origin,
            )

    def _mend(self, cause: DeviceLostError) -> Procedure[None]:
        """Places the plans again, restores variables and repeats runs. Raises why that cannot be done; then
        every run that waits for it has the same error."""
        is_unfinished, self._mending = self._mending is not None, cause
        is_news = not is_unfinished
        try:
            for _ in range(ATTEMPTS):
                repeats, places, lost = yield from self._decide(cause, is_unfinished, is_news)
                try:
                    yield from self._carry_out(cause, repeats, places, lost)
                except DeviceLostError as error:
                    cause, is_unfinished, is_news = error, True, True
                    continue
                self._mending = None
                return
            raise given_up(cause, f"devices were lost {ATTEMPTS} times meanwhile", "run it again")
        except DeadlineExceededError:
            raise
        except HeliographError as error:
            self._stay_broken(cause)
            self._give_up(error)
            raise

    def _stay_broken(self, cause: DeviceLostError) -> None:
        """Whether the next run is to try once more: where a plan could not be placed again."""
        self._mending = None if all(one._is_placed for one in self.plans) else cause

    def _give_up(self, error: HeliographError) -> None:
        self._look()
        for one in self.journal.entries:
            if one.sent and one.ended_well is None:
                self._fail(one, error)
        self.journal.sweep()

    def _decide(
        self, cause: DeviceLostError, is_unfinished: bool, is_news: bool
    ) -> Procedure[
        tuple[list[tuple[JournalEntry, bool]], list[tuple[PlanBase, tuple[str, ...]]], tuple[str, ...]]
    ]:
        """The runs to be repeated, and whether somebody wants their results; the plans that are to be placed,
        and where; the names of the lost devices. `is_unfinished`: mending was begun before. `is_news`:
        something was lost since it was."""
        failed = yield from self._settled()
        for one in self.journal.entries:
            if is_unfinished and one.plan.times and one.ended_well is False:
                # It was cancelled while it was repeated: what it assigned is undone now.
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
            # A device of the same name has come back, which is another one. Whose own are all there gets
            # the plan that it has.
            broken = plans
        lost = frozenset[str]().union(*(one._placed_devices for one in broken)) - living
        places = [(one, survivors(cause, one._asked_devices, living)) for one in broken]
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
        yield from self._write(self.journal.base or {})
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
        """Places plans again. First what is left of them goes: there may be no room for both."""
        for plan, _ in places:
            plan._let_go()
        yield from arrive(self._core)
        for plan, left in places:
            assert plan._spec.placing is not None
            spec = yield from plan._spec.placing(left)
            plan._was_rebuilt(spec, how)
            self.watch(plan)

    def _repeat(self, repeats: Iterable[tuple[JournalEntry, bool]]) -> Procedure[list[Pending]]:
        """Sends runs once more, in order; those of which nobody wants the results."""
        unwatched: list[Pending] = []
        for entry, is_wanted in repeats:
            entry.plan.run = run = yield from entry.plan.send(is_wanted)
            entry.ended_well = None
            entry.plan.times += is_wanted
            if not is_wanted:
                unwatched.append(run.pending)
        return unwatched

    # Variables

    def _write(self, values: Mapping[str, np.ndarray[Any, Any]]) -> Procedure[None]:
        """Gives all variables these elements, zeros where there are none. Ends when that was done."""
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
        """What all variables have after the runs that were asked for so far."""
        yield from self.take_turn()
        try:
            if self.heir is not None:
                return (yield from self.heir.checkpoint())
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
                    yield from self._mend(cause := error)
            raise given_up(cause, f"devices were lost {ATTEMPTS} times meanwhile", "take it again")
        finally:
            self.give_turn()

    def restore(self, checkpoint: Checkpoint) -> Procedure[None]:
        """Gives all variables what they had, behind the runs that were asked for so far; places the plans
        again where a device was lost."""
        checkpoint.check(types_of({name: one.port for name, one in self.variables.items()}))
        yield from self.take_turn()
        try:
            if self.heir is not None:
                return (yield from self.heir.restore(checkpoint))
            self._mending = None
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
        """Places those plans again that need a device that is lost, or all."""
        found = yield from ask(LIST_DEVICES, None)
        living = {one.name for one in found.devices if not one.lost}
        for plan in self.plans:
            lost = tuple(sorted(plan._placed_devices - living))
            if not lost and plan._is_placed and not all_of_them:
                continue
            cause = DeviceLostError(f"device {lost[0] if lost else plan.device} is lost")
            left = survivors(cause, plan._asked_devices, living)
            yield from self._place([(plan, left)], Rebuild(cause.message, lost, (), 0, 0))


def _typed(error: BaseException) -> HeliographError:
    """What a run ends with for which nobody waits any more."""
    return error if isinstance(error, HeliographError) else CancelledError("the run was cancelled")


def _kept(taken: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    """Its arrays, which nobody changes any more."""
    for array in taken.values():
        array.flags.writeable = False
    return dict(taken)


class RebuildGroups:
    """The groups of a session, and its plans that are not rebuilt."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._groups: list[RebuildGroup] = []
        #: Plans without `on_loss` that assign variables; names of variables that such plans, also gone ones,
        #: may have changed.
        self._others: weakref.WeakSet[PlanBase] = weakref.WeakSet()
        self._changed: set[str] = set()

    def admit_other(self, plan: PlanBase) -> None:
        """A plan was compiled that is not rebuilt. Raises InvalidArgumentError where it assigns a variable of
        one that is."""
        variables, watched = plan._spec.info.variables, self._core.watched
        for port in variables:
            if port.port.name in plan._assigns and port.tensor in watched:
                raise _mixed(port.port.name)
        if plan._assigns:
            self._others.add(plan)
        # Through a plan that reads a variable it can be written as well.
        self._changed |= {port.port.name for port in variables if port.tensor not in watched}

    def admit(self, plan: PlanBase, limit_bytes: int) -> Procedure[None]:
        """A plan was compiled that is rebuilt. Raises InvalidArgumentError."""
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

    def _prune(self) -> None:
        """Lets go of groups whose plans are gone."""
        for group in [one for one in self._groups if not one.plans]:
            self._groups.remove(group)
            self._changed |= group.changed


def _mixed(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"variable {name!r} is shared by plans of which one is rebuilt when a device is lost, and another, "
        "which assigns it, is not",
        advice="compile both with on_loss='rebuild', or name the variable otherwise",
    )
