"""A durable session's commands, kept to be sent again to a daemon that was restarted. Pure.

The daemon goes on after the last command of its last snapshot. The commands after that one are sent
again, with their numbers, so that their effects are as they were. Those that had only an answer,
which came, are passed over. Those that cannot be done again poison the objects that they wrote,
with an error that says why. Compiles are between the commands, where they were.

Bytes in commands are owned by them: a durable session sends none by transfers or shared memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from heliograph.core.future import Outcome, Pending
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    NotReplayableError,
    SessionClosedError,
)
from heliograph_proto.plans import CompileRequest, ReserveRequest

if TYPE_CHECKING:
    import numpy as np

#: Of a kept command, beyond the bytes in it.
_COMMAND_BYTES = 200
#: Commands whose answer is all that they have. Those that let a run go on are sent anew by its
#: reader.
_ANSWERED = (c.GetTensor, c.Cancel, c.Continue, c.FeedLoop, c.Skip, c.OfferTensor)


@dataclass(slots=True, eq=False)
class MadePlan:
    """A compile, or a reservation, that the daemon's disk may not have yet."""

    request: CompileRequest | ReserveRequest
    #: The arrays of the plan's weights, by digest.
    contents: Mapping[bytes, np.ndarray[Any, Any]]
    #: The last command that was sent before the request.
    after: int
    #: The last command that was sent before its answer: a snapshot after a later one has the plan.
    before: int
    #: Settled when every command up to `after` was done again.
    due: Outcome = field(default_factory=Outcome)


@dataclass(frozen=True, slots=True)
class Again:
    """A command that leaves again."""

    sequence: int
    kind: c.CommandKind | InlineRun
    stream: int
    notify: bool = False
    timeout_ms: int = 0


#: The things that are done again, in order.
Step: TypeAlias = "Again | MadePlan"


class CommandJournal:
    """The commands of a durable session after the last one on the daemon's disk."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: with more, it is given up until the daemon's disk has caught up."""
        self.most_bytes = most_bytes
        #: About the memory of what is kept.
        self.size_bytes = 0
        #: Commands up to this one are on the daemon's disk.
        self.durable = 0
        #: Commands up to this one were given up, since there was no room for them.
        self.given_up = 0
        self._commands: OrderedDict[int, Pending] = OrderedDict()
        self._made: deque[MadePlan] = deque()
        #: The variables' handles of plans that have any: their runs leave something.
        self._variables: dict[int, tuple[int, ...]] = {}
        #: Loops of which a step took a feed: another run of them would take it at another step.
        self._fed: set[int] = set()

    def __repr__(self) -> str:
        return f"<CommandJournal of {len(self._commands)} commands, {self.size_bytes:,} bytes>"

    # Keeping

    def sent(self, pending: Pending) -> None:
        """Keep a command that leaves."""
        self._commands[pending.sequence] = pending
        self.size_bytes += _size_of(pending.kind)
        if self.size_bytes > self.most_bytes:
            self._give_up(pending.sequence)

    def _give_up(self, sequence: int) -> None:
        """Forget everything: a restart of the daemon ends the session until its disk has this
        command."""
        self.given_up = sequence
        self._commands.clear()
        self._made.clear()
        self._fed.clear()
        self.size_bytes = 0

    def ended(self, pending: Pending) -> None:
        """Forget a command that is done, if nothing is left of it."""
        kind = pending.kind
        if isinstance(kind, c.FeedLoop) and pending.error is None:
            self._fed.add(kind.sequence)
        if not self._leaves_something(kind):
            self._forget(pending.sequence)

    def _leaves_something(self, kind: c.CommandKind | InlineRun) -> bool:
        if isinstance(kind, InlineRun):
            return kind.form.plan in self._variables
        if isinstance(kind, c.RunCommand):
            return kind.plan in self._variables or any(one.tensor or one.into for one in kind.outputs)
        return not isinstance(kind, _ANSWERED)

    def _forget(self, sequence: int) -> None:
        if (pending := self._commands.pop(sequence, None)) is not None:
            self.size_bytes -= _size_of(pending.kind)

    def has_variables(self, plan: int, handles: tuple[int, ...]) -> None:
        """Note the variables of a plan that was compiled."""
        if handles:
            self._variables[plan] = handles

    def made(self, made: MadePlan) -> None:
        """Keep a compile or a reservation that was answered."""
        self._made.append(made)

    def durable_through(self, sequence: int, *, asked_after: int = -1) -> None:
        """Forget what the daemon has on its disk. `asked_after`: the last command that was answered
        when the snapshot was asked for, if it was."""
        self.durable = max(self.durable, sequence)
        while self._commands and next(iter(self._commands)) <= sequence:
            self._forget(next(iter(self._commands)))
        while self._made and self._made[0].before < max(sequence, asked_after):
            self._made.popleft()
        self._fed = {one for one in self._fed if one > sequence}

    # Doing it again

    def steps(self, last: int, sent: int, *, is_restored: bool = True) -> list[Step]:
        """Return what is done again: the commands after `last`, of those up to `sent`, and plans.

        `is_restored`: the server that had them before is gone, with its work on them. Raises
        SessionClosedError if the daemon lacks commands that are not kept.
        """
        if last < max(self.durable, self.given_up):
            raise SessionClosedError(
                f"the server has restored the session as of command {last:,}; the client keeps its commands "
                f"only from {max(self.durable, self.given_up) + 1:,}",
                advice="open another session, compile and run",
            )
        found: list[Step] = []
        through = last
        made = deque(self._made)
        for again in self._again(last, is_restored):
            while made and made[0].after < again.sequence:
                through = _skip_to(found, through, max(through, made[0].after))
                found.append(made.popleft())
            through = _skip_to(found, through, again.sequence - 1)
            found.append(again)
            through = again.sequence
        for one in made:
            through = _skip_to(found, through, max(through, one.after))
            found.append(one)
        _skip_to(found, through, sent)
        for step in found:
            if isinstance(step, MadePlan):
                step.due = Outcome()
        return found

    def _again(self, last: int, is_restored: bool) -> Iterator[Again]:
        for sequence, pending in self._commands.items():
            if sequence <= last:
                continue
            if (kind := self._kind(pending, last, is_restored)) is not None:
                waits = not pending.done
                notify = pending.notify and waits
                yield Again(sequence, kind, pending.stream, notify, pending.timeout_ms if waits else 0)

    def _kind(self, pending: Pending, last: int, is_restored: bool) -> c.CommandKind | InlineRun | None:
        """The command to send in place of one that was sent; None: none."""
        kind = pending.kind
        if isinstance(kind, c.Continue) and kind.sequence > last:
            # Its run begins again, and its reader says anew what it has taken.
            return None
        why = self._why_not(pending) if is_restored or pending.done else None
        if why is not None:
            return c.Skip(pending.sequence, why, self._written_by(kind))
        if not pending.done:
            return kind
        if isinstance(kind, InlineRun):
            return _without_answer(kind.command().kind)
        if isinstance(kind, c.RunCommand):
            return _without_answer(_of_steps(kind, pending))
        return kind

    def _why_not(self, pending: Pending) -> HeliographError | None:
        """The error of what a command wrote, if it cannot be done again."""
        kind, error = pending.kind, pending.error
        if isinstance(kind, c.FetchTensor):
            return _not_again(f"tensor {kind.tensor} was fetched from another daemon", "fetch it again")
        if isinstance(kind, c.OfferTensor):
            return _not_again(f"tensor {kind.tensor} was offered to another daemon", "offer it again")
        if pending.sequence in self._fed:
            return _not_again("a loop took values while it ran, at steps that are unknown", "run it again")
        if error is None or not pending.done:
            return None
        if isinstance(error, CancelledError | DeadlineExceededError):
            is_run = isinstance(kind, c.RunCommand | InlineRun)
            plan = _plan_of(kind)
            if is_run and plan in self._variables:
                return _not_again("a run that writes variables was broken off", "write them again")
            return error
        return None

    def _written_by(self, kind: c.CommandKind | InlineRun) -> tuple[int, ...]:
        """The handles of tensors and variables that a command makes or writes."""
        match kind:
            case InlineRun():
                return self._variables.get(kind.form.plan, ())
            case c.RunCommand(plan=plan, outputs=outputs):
                made = [one.tensor or one.into for one in outputs if one.tensor or one.into]
                return (*made, *self._variables.get(plan, ()))
            case c.CopyTensor(destination=handle):
                return (handle,)
            case c.AllocateTensors(buffer=buffer, tensors=tensors):
                return (buffer, *(handle for handle, _ in tensors))
            case c.Allocate() | c.View() | c.PlaceTensor() | c.SetTensor() | c.Memset() | c.FetchTensor():
                return (kind.tensor,)
        return ()


def _skip_to(found: list[Step], after: int, through: int) -> int:
    """Pass over the commands after one, up to another, which is returned."""
    if through > after:
        found.append(Again(after + 1, c.Skip(through), c.DEFAULT_STREAM))
    return through


def _plan_of(kind: c.CommandKind | InlineRun) -> int:
    if isinstance(kind, InlineRun):
        return kind.form.plan
    return kind.plan if isinstance(kind, c.RunCommand) else 0


def _of_steps(run: c.RunCommand, pending: Pending) -> c.RunCommand:
    """A loop that ends after as many steps as it had, and streams nothing."""
    if run.loop is None:
        return run
    steps = getattr(pending.completion, "steps", 0) or run.loop.steps
    return replace(run, loop=replace(run.loop, steps=steps, taps=(), unread_bytes=0))


def _without_answer(kind: c.CommandKind) -> c.CommandKind:
    """A run that returns nothing and waits for no reader."""
    if not isinstance(kind, c.RunCommand):
        return kind
    kept = tuple(replace(one, fetch=False) for one in kind.outputs if one.tensor or one.into)
    return replace(kind, outputs=kept, pause=False, trace_parent="")


def _size_of(kind: c.CommandKind | InlineRun) -> int:
    match kind:
        case InlineRun():
            return _COMMAND_BYTES + kind.form.template.size_bytes
        case c.SetTensor(data=data) if data is not None:
            return _COMMAND_BYTES + len(data)
        case c.RunCommand(inputs=inputs, outputs=outputs):
            data_bytes = sum(len(one.data) for one in inputs if one.data is not None)
            return _COMMAND_BYTES + data_bytes + 64 * (len(inputs) + len(outputs))
        case c.FeedLoop(values=values):
            return _COMMAND_BYTES + sum(len(data) for _, data in values)
        case c.Free(handles):
            return _COMMAND_BYTES + 36 * len(handles)
        case c.AllocateTensors(tensors=tensors):
            return _COMMAND_BYTES + 200 * len(tensors)
    return _COMMAND_BYTES


def _not_again(what: str, advice: str) -> NotReplayableError:
    return NotReplayableError(
        f"the daemon was restarted, and this cannot be done again: {what}",
        advice=f"{advice}, or take a snapshot after it: session.snapshot()",
    )
