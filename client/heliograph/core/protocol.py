"""The client's side of the command stream, without any input or output.

Commands enter by `send` and leave by `take`; completions enter by `apply`. Sequence numbers are
assigned when a command leaves, so the wire has no gaps whatever is queued. The shells (blocking and
asyncio) move batches between this and a transport, one caller at a time.

    send ─▸ outbox ─▸ take ─▸ (transport) ─▸ apply ─▸ take_settled, to be fired by the shell

Credits. A session may have a limited number of bytes staged on the server and of commands
unanswered (`Limits`). `reserve` grants bytes in the order of requests, and `reserve_observed` those
of observed runs (`credit.py`); commands beyond the limit stay in the outbox. Handles that are no
longer referenced are collected by `release`, from any thread and from destructors, and leave in one
Free after everything queued so far.

A session with a lease (`has_lease`) survives broken connections. Between `detached` and `attached`
nothing leaves. Then the commands that the server has not received leave again, in order and with
their numbers, before new ones. The core counts the messages that come, and tells the server now and
then how many it has (`take_acknowledgement`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from heliograph.core.acknowledgements import Acknowledgements
from heliograph.core.credit import OrderGate, SharingCore
from heliograph.core.effects import do_nothing
from heliograph.core.future import ALONE, Outcome, Pending, Transfer, cancelled, late, logger
from heliograph.core.loop_feeds import LoopFeeds
from heliograph.core.replay.journal import CommandJournal, MadePlan, Step
from heliograph.core.replay.repetition import Repetition
from heliograph.core.sizes import size_of
from heliograph.core.watched import Watched
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    LimitExceededError,
    LoopEndedError,
    ProtocolError,
    SessionClosedError,
)
from heliograph_proto.sessions import Limits, Traffic

if TYPE_CHECKING:
    from heliograph.core.feed import Feed
    from heliograph.core.progress.bars import ProgressBars
    from heliograph.procedures.run import PlanSpec


#: The part of Limits.in_flight_commands that is kept for cancelling.
_RESERVED_FOR_CANCEL = 16
#: The most handles in one Free.
_FREE_HANDLES = 10_000
#: The most commands that wait for credit in the client, as a multiple of Limits.in_flight_commands.
_BACKLOG = 2
#: The commands of a full message: its own cost is small beside theirs, and the next message is made
#: while the server works on it.
_MESSAGE_COMMANDS = 64
#: The number of command errors that are remembered.
_REMEMBERED = 1_000


@dataclass(frozen=True, slots=True)
class ProtocolStatistics:
    """Counts of the command stream at one moment."""

    sent_commands: int
    completed_commands: int
    queued_commands: int
    in_flight_bytes: int


class ClientCore(SharingCore):
    """Handles, sequence numbers, pending commands and credit of one session."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        #: The stream of commands that name none.
        self.default_stream = c.DEFAULT_STREAM
        #: The handle of the reservation for new plans; 0 without one.
        self.reservation = 0
        #: The gate that a move has opened, and what is done once every command before it is answered.
        self._settling: tuple[OrderGate, Outcome] | None = None
        #: The reason why commands do not go over a unix socket; empty if they do.
        self.why_no_socket = ALONE
        #: The bytes that writes and reads of tensors have carried, and how often they were copied
        #: here.
        self.traffic = Traffic()
        #: The bars for transfers, compiles and loops.
        self.bars: ProgressBars | None = None
        #: Begins work for the time in which the server compiles the next plan.
        self.meanwhile: Callable[[], object] = do_nothing
        #: Tensors whose writes must be noticed.
        self.watched = Watched()
        #: Handles of the streams that were made and not freed.
        self.streams: set[int] = set()
        #: True if the transport takes inline runs, which exist only as bytes.
        self.speaks_bytes = False
        #: True if the server can place missing contents on other daemons; and the addresses of such
        #: daemons that cannot be reached from here.
        self.places_contents = False
        self.unreachable: set[str] = set()
        self._next_handle = 1
        self._next_transfer = 1
        self._next_sequence = 1
        self._outbox: deque[Pending | OrderGate] = deque()
        #: Commands to cancel, and True for a loop that is to end after its present step.
        self._cancels: deque[tuple[Pending, bool]] = deque()
        #: Runs that wait at an observed node and may go on.
        self._continues: deque[Pending] = deque()
        #: New values for loops that run.
        self.feeds = LoopFeeds(self.settle)
        self._unsent_feeds, self._fed = self.feeds.unsent, self.feeds.known
        #: Commands that were sent and are not done, in order of their sequence numbers.
        self._in_flight: OrderedDict[int, Pending] = OrderedDict()
        self._most_unanswered = max(1, limits.in_flight_commands - _RESERVED_FOR_CANCEL)
        self._garbage: deque[int] = deque()
        #: True if released handles must be freed before the next command.
        self._frees_come_first = False
        #: Outcomes that the shell must fire.
        self._settled: list[Outcome] = []
        self._unobserved: deque[HeliographError] = deque(maxlen=_REMEMBERED)
        #: Errors by the sequence number of the command that failed, with what only the client
        #: knows.
        self._known: OrderedDict[int, HeliographError] = OrderedDict()
        #: True if the session survives a broken connection; and false while it has none.
        self.has_lease, self.is_attached = False, True
        #: Commands that the server does not have on its disk yet; None: they are not kept.
        self.journal: CommandJournal | None = None
        self._acknowledgements = Acknowledgements()
        #: Commands that leave again, since the server has not received them.
        self.repetition = Repetition(self.settle)

    # Numbers

    def handle(self) -> int:
        """Return a new handle: 1 to 2**63 - 1, never used before in this session."""
        self._next_handle += 1
        return self._next_handle - 1

    def transfer(self) -> int:
        """Return the number of a new transfer."""
        self._next_transfer += 1
        return self._next_transfer - 1

    # Commands

    def send(
        self,
        kind: c.CommandKind,
        *,
        stream: int | None = None,
        observed: bool = False,
        notify: bool | None = None,
        timeout_ms: int = 0,
        credit_bytes: int = 0,
        gate: OrderGate | None = None,
    ) -> Pending:
        """Queue a command. Raises the error that ended the session, or LimitExceededError.

        Args:
            observed: True if a caller waits for it. The completion is then listed at once (unless
                `notify` is False), and its error is not kept for `raise_unobserved`.
        """
        self.check()
        if len(self._outbox) > _BACKLOG * self.limits.in_flight_commands:
            raise LimitExceededError(
                f"{len(self._outbox):,} commands are queued behind those that the server works on",
                advice="wait for some results, or for session.synchronize(), before sending more",
            )
        if self.watched:
            self.watched.look_at(kind)
        if self._frees_come_first:
            self.collect()
        where = self.default_stream if stream is None else stream
        pending = Pending(kind, where, observed if notify is None else notify, timeout_ms)
        pending.observed, pending.credit_bytes = observed, credit_bytes
        if gate is None:
            self._outbox.append(pending)
        else:
            gate.queue.append(pending)
        return pending

    def send_inline(self, run: InlineRun, size_bytes: int, plan: PlanSpec) -> Pending | None:
        """Queue an inline run, of which `size_bytes` are inputs.

        Returns None if that is not possible at once. The general path then waits, or explains.
        """
        if self.lost is not None or self.default_stream != c.DEFAULT_STREAM or not self.speaks_bytes:
            return None
        if len(self._outbox) >= self.limits.in_flight_commands or not self.credit.could_reserve(size_bytes):
            return None
        if self._frees_come_first:
            self.collect()
        self.credit.held_bytes += size_bytes
        pending = Pending(run, c.DEFAULT_STREAM, True, run.form.timeout_ms)
        pending.observed, pending.credit_bytes = True, size_bytes
        pending.source_of, pending.what = plan.source_of, plan.what
        self._outbox.append(pending)
        return pending

    def cancel(self, pending: Pending, why: HeliographError | None = None) -> None:
        """Request the server to cancel a command; `why` replaces its CancelledError."""
        if pending.done or self.lost is not None:
            return
        if pending.substitute is None:
            pending.substitute = why
        self._cancels.append((pending, False))

    def stop(self, pending: Pending) -> None:
        """Request the server to end a loop after its present step."""
        if not pending.done and self.lost is None:
            self._cancels.append((pending, True))

    def feed(self, run: Pending, kind: c.FeedLoop, timeout_ms: int) -> Pending:
        """Queue new values for a loop. They fail if the loop has ended.

        Raises the error that ended the session, or LimitExceededError.
        """
        self.check()
        pending = Pending(kind, self.default_stream, True, timeout_ms)
        pending.observed, pending.what = True, lambda: "a feed of a loop"
        self.feeds.add(run, pending)
        return pending

    def proceed(self, pending: Pending) -> None:
        """Let a run go on from an observed node, or acknowledge a loop's values when due.

        Safe in destructors.
        """
        if pending.feed is not None and pending.feed.may_proceed():
            self._continues.append(pending)

    def flow(self, pending: Pending) -> None:
        """Let a run go on without waiting for its reader.

        Safe in destructors and from any thread.
        """
        if pending.feed is not None:
            pending.feed.flows = True
            self.proceed(pending)

    def open_gate(self) -> OrderGate:
        """Keep a place in the order of commands for some that come later."""
        gate = OrderGate()
        self._outbox.append(gate)
        self._gates.append(gate)
        return gate

    def close_gate(self, gate: OrderGate) -> None:
        """Close a gate: no more commands come at this place. Idempotent."""
        gate.closed = True
        if gate in self._gates:
            self._gates.remove(gate)
            self._observed.share_out()
            self.credit.share_out()

    def release(self, handle: int) -> None:
        """Free a handle after everything queued so far. Safe in destructors and from any thread."""
        if self.lost is None:
            self._garbage.append(handle)

    def order_frees(self) -> None:
        """Free the handles released so far before the next command, not after the queued ones.

        Safe in destructors and from any thread.
        """
        self._frees_come_first = True

    @property
    def has_garbage(self) -> bool:
        """True if handles wait to be freed."""
        return bool(self._garbage)

    @property
    def has_only_garbage(self) -> bool:
        """True if there is nothing to send but frees, which may gather for a moment."""
        queued = self._outbox or self._cancels or self._continues or self._unsent_feeds or self.repetition
        return bool(self._garbage) and not queued

    def not_meanwhile(self, begin: Callable[[], object]) -> None:
        """Take back what was to begin with the next compile, if there was none."""
        if self.meanwhile is begin:
            self.meanwhile = do_nothing

    @property
    def has_output(self) -> bool:
        """True if `take` or `take_acknowledgement` might return something."""
        if not self.is_attached:
            return False
        if self.has_lease and self._acknowledgements.is_due:
            return True
        if self.repetition:
            return self.repetition.may_leave
        queued = self._outbox or self._cancels or self._continues or self._garbage
        return bool(queued or (self._unsent_feeds and self.feeds.is_ready))

    @property
    def is_answered(self) -> bool:
        """True if the server has answered every command that was sent."""
        return not self._in_flight

    @property
    def is_full(self) -> bool:
        """True if the queued commands should leave before more are queued."""
        return len(self._outbox) >= _MESSAGE_COMMANDS

    def take(self, most_bytes: int) -> list[c.Command | InlineRun]:
        """Return the commands that credit lets leave now, in a message of about this size."""
        if not self.is_attached:
            return []
        if self.repetition:
            return self.repetition.take(most_bytes)
        taken: list[c.Command | InlineRun] = []
        size = 0
        self.collect()
        while self.lost is None and size < most_bytes:
            pending = (
                (self._cancels and self._next_cancel())
                or (self._continues and self._next_continue())
                or (self._unsent_feeds and not self._is_busy and self.feeds.next())
                or self._next(most_bytes - size, first=not taken)
            )
            if pending is None:
                break
            pending.sequence = self._next_sequence
            self._next_sequence += 1
            self._in_flight[pending.sequence] = pending
            if self.journal is not None:
                self.journal.sent(pending)
            kind = pending.kind
            if isinstance(kind, InlineRun):
                kind.sequence = pending.sequence
                taken.append(kind)
            else:
                stream, notify = pending.stream, pending.notify
                taken.append(c.Command(pending.sequence, kind, stream, notify, pending.timeout_ms))
            size += size_of(kind)
        if self._settling is not None:
            self._look_whether_settled()
        return taken

    def collect(self) -> None:
        """Turn released handles into Free commands at the end of the outbox."""
        while self._garbage and self.lost is None:
            count = min(len(self._garbage), _FREE_HANDLES)
            handles = tuple(self._garbage.popleft() for _ in range(count))
            for handle in handles if self.watched else ():
                self.watched.leave(handle)
            self._outbox.append(Pending(c.Free(handles), self.default_stream, False, 0))

    def _next_cancel(self) -> Pending | None:
        """Return a cancel, if any. It may pass the queue, but not the command that it cancels."""
        for _ in range(len(self._cancels)):
            target, after_step = self._cancels.popleft()
            if target.done:
                continue
            if target.sequence:
                return Pending(c.Cancel(target.sequence, after_step), self.default_stream, False, 0)
            self._cancels.append((target, after_step))
        return None

    def _next_continue(self) -> Pending | None:
        """Return a Continue, if any. It passes the queue, which may wait for its run."""
        while self._continues:
            run = self._continues.popleft()
            if not run.done and run.feed is not None:
                kind = c.Continue(run.sequence, run.feed.taken_bytes)
                return Pending(kind, self.default_stream, False, 0)
        return None

    @property
    def _is_busy(self) -> bool:
        """True if the server has as many commands as it accepts, but for a few that cancel.

        Those after a long loop count only until they are answered.
        """
        return len(self._in_flight) >= self._most_unanswered

    def _next(self, room: int, first: bool) -> Pending | None:
        if self._is_busy:
            return None
        while self._outbox:
            head = self._outbox[0]
            queue = head.queue if isinstance(head, OrderGate) else self._outbox
            if isinstance(head, OrderGate) and not head.queue:
                if not head.closed:
                    return None
                self._outbox.popleft()
                continue
            pending = queue[0]
            assert isinstance(pending, Pending)
            if not first and size_of(pending.kind) > room:
                return None
            queue.popleft()
            return pending
        return None

    # Completions

    def apply(self, batch: c.CompletionBatch, size_bytes: int = 0) -> None:
        """Settle what a batch of completions reports, which came in a message of this size."""
        if batch.attached is not None:
            self.attached(batch.attached)
            return
        self._acknowledgements.came(size_bytes)
        if batch.durable_through and self.journal is not None:
            self.journal.durable_through(batch.durable_through)
        for piece in batch.taps:
            run = self._in_flight.get(piece.sequence)
            if run is not None and run.feed is not None and run.feed.add(piece):
                self._wake_reader(run.feed)
                if run.feed.flows or run.feed.goes_on:
                    self.proceed(run)
        for sequence, steps in batch.steps:
            run = self._in_flight.get(sequence)
            if run is not None and (told := run.count(steps)) is not None:
                self._settled.append(told)
        for completion in batch.completions:
            pending = self._in_flight.pop(completion.sequence, None)
            if pending is None:
                continue
            if isinstance(completion, InlineResult) and not pending.done and pending.feed is None:
                # The same as `_complete`, for the most frequent case.
                pending.completion, pending.done = completion, True
                self._settled.append(pending)
                self.credit.give_back(pending.credit_bytes)
                if self.journal is not None:
                    self.journal.ended(pending)
            else:
                self._complete(pending, completion)
        while self._in_flight:
            sequence = next(iter(self._in_flight))
            if sequence > batch.completed_through:
                break
            self._complete(self._in_flight.pop(sequence), None)
        self._acknowledgements.done(batch.completed_through)
        self.repetition.done(batch.completed_through)
        if self._settling is not None:
            self._look_whether_settled()

    # Moves

    def when_settled(self, gate: OrderGate) -> Outcome:
        """Return what is done once every command before a gate is answered."""
        self._settling = gate, Outcome()
        self._look_whether_settled()
        return self._settling[1] if self._settling is not None else _done()

    def _look_whether_settled(self) -> None:
        assert self._settling is not None
        gate, outcome = self._settling
        if not (self._in_flight or self.repetition) and self._outbox and self._outbox[0] is gate:
            self._settling = None
            self.settle(outcome)

    # Leases

    def detached(self) -> None:
        """Let nothing leave from now on, since the connection broke."""
        self.is_attached = False
        self.repetition.broke()

    @property
    def received(self) -> int:
        """The messages of completions that came, over all connections."""
        return self._acknowledgements.received

    def attach(self, incarnation: bytes) -> c.Attach:
        """Return the request that continues the session on another connection."""
        return c.Attach(self.received, incarnation)

    def attached(self, answer: c.Attached) -> None:
        """Continue on another connection: what the server has not received leaves again.

        Raises ProtocolError, and SessionClosedError if commands that it lacks are not kept here.
        """
        last, count = answer.last_sequence, self._next_sequence - 1 - answer.last_sequence
        if self.is_attached or count < 0:
            raise ProtocolError(f"the server has attached, and received {last} commands")
        if answer.next_message != self.received + 1 and not answer.restored:
            raise ProtocolError(
                f"the server goes on with completion message {answer.next_message:,} after {self.received:,}"
            )
        loops = {one.sequence: (one.steps, one.unsent) for one in answer.loops}
        self.repetition.begin(self._lacking(last, count, loops, is_restored=answer.restored), last)
        self._acknowledgements.go_on(answer.next_message - 1)
        self.is_attached = True

    def _lacking(
        self, last: int, count: int, loops: Mapping[int, tuple[int, int]], *, is_restored: bool
    ) -> Sequence[Pending | Step]:
        """Return the commands after one that the server lacks, with the plans between them."""
        if self.journal is not None:
            again = self.repetition
            again.is_of_restart = again.is_of_restart or is_restored
            for run in self._in_flight.values():
                if run.sequence > last and run.feed is not None:
                    run.feed.begin_again(*loops.get(run.sequence, (0, 0)))
            steps = self.journal.steps(last, last + count, is_restored=is_restored)
            return [one for one in steps if again.is_of_restart or not isinstance(one, MadePlan)]
        kept = [pending for sequence, pending in self._in_flight.items() if sequence > last]
        if len(kept) != count:
            raise SessionClosedError(
                f"the server has lost {count:,} commands, of which {count - len(kept):,} were done",
                advice="open another session, compile and run",
            )
        return kept

    @property
    def last_sent(self) -> int:
        """The number of the last command that was sent."""
        return self._next_sequence - 1

    def downloaded(self, transfer: int) -> None:
        """Tell the server that all bytes of a transfer came, so that it drops them."""
        if self.has_lease:
            self._acknowledgements.downloaded(transfer)

    @property
    def unreceived(self) -> int:
        """The number of commands that are to leave again."""
        return len(self.repetition)

    def take_acknowledgement(self, commands: Sequence[c.Command | InlineRun]) -> c.Acknowledged | None:
        """Return what a message with these commands acknowledges; None: nothing, so far.

        Messages of small runs stay as they are, but for every 64th.
        """
        if not (self.has_lease and self.is_attached):
            return None
        is_general = any(type(one) is c.Command for one in commands)
        return self._acknowledgements.take(self._next_sequence, is_general=is_general)

    def _wake_reader(self, feed: Feed) -> None:
        changed, feed.changed = feed.changed, Outcome()
        self.settle(changed)

    def _complete(self, pending: Pending, completion: c.Completion | InlineResult | None) -> None:
        pending.completion = completion
        error = self._explain(pending, completion.error) if completion and completion.error else None
        self.settle(pending, error)
        if error is not None and not pending.observed:
            self._note(pending, error)
        if self.journal is not None:
            self.journal.ended(pending)
        if pending.credit_bytes:
            self.credit.give_back(pending.credit_bytes)
        if pending.feed is not None:
            self._observed_ended(pending.feed)
        if pending.slot is not None and (space := self.shared or self._left) is not None:
            space.give(pending.slot)
        if self._fed:
            self.feeds.ended(pending)

    def settle(self, outcome: Outcome, error: HeliographError | None = None) -> None:
        """Make an outcome done, unless it is already."""
        if outcome.settle(error):
            self._settled.append(outcome)
            if isinstance(outcome, Pending) and outcome.feed is not None:
                self._wake_reader(outcome.feed)

    def upload_ended(
        self, pending: Pending | None, transfer: Transfer, error: HeliographError | None
    ) -> None:
        """Settle an upload that has ended. A failure cancels the command that needs its bytes."""
        if error is not None and pending is not None:
            self.cancel(pending, error)
        self.settle(transfer.taken)
        self.settle(transfer.ended, error)

    def take_settled(self) -> list[Outcome]:
        """Return the outcomes settled since the last call, for the shell to fire outside locks."""
        settled, self._settled = self._settled, []
        return settled

    def _explain(self, pending: Pending, error: HeliographError) -> HeliographError:
        """Return the error with the client's knowledge: its reason to cancel, and the user's line.

        A later command that met a poisoned handle carries the sequence number of the first.
        """
        first = error.origin.sequence or pending.sequence
        if first == pending.sequence:
            if isinstance(error, CancelledError | DeadlineExceededError):
                self._remember(first, _client_error(pending, error).from_command(first))
            elif isinstance(error, LoopEndedError):
                return self.feeds.explain(pending, error)
            elif error.origin.op and pending.source_of is not None:
                source = pending.source_of(error.origin.node)
                self._remember(first, error.at(replace(error.origin, source=source)))
        return self._known.get(first, error)

    def _remember(self, sequence: int, error: HeliographError) -> None:
        self._known[sequence] = error
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _note(self, pending: Pending, error: HeliographError) -> None:
        if isinstance(pending.kind, c.Free | c.Cancel | c.Continue):
            logger.debug("%r failed: %s", pending, error)
        else:
            self._unobserved.append(error)

    def raise_error(self, outcome: Outcome) -> None:
        """Raise an outcome's error, if any, and count it as seen."""
        if outcome.error is not None:
            first = outcome.error.origin.sequence
            seen = [one for one in self._unobserved if first and one.origin.sequence == first]
            for one in seen:
                self._unobserved.remove(one)
            outcome.raise_error()

    def raise_unobserved(self) -> None:
        """Raise the first error that was not seen, and forget the others."""
        if self._unobserved:
            first = self._unobserved.popleft()
            self._unobserved.clear()
            raise first.at(first.origin)

    def count(self, traffic: Traffic) -> None:
        """Count bytes of tensors that were carried or copied."""
        self.traffic = self.traffic.plus(traffic)

    # The end

    def connection_lost(self, error: HeliographError) -> None:
        """End the session: everything pending, now or later, fails with this error."""
        if self.lost is not None:
            return
        self.lost = error
        queued = [
            one for item in self._outbox for one in (item.queue if isinstance(item, OrderGate) else (item,))
        ]
        for outcome in (*self._in_flight.values(), *queued):
            self.settle(outcome, error)
        for credit in (self.credit, self._observed, self.feeds):
            credit.end(error)
        for held in (self._in_flight, self._outbox, self._gates):
            held.clear()
        for left in (
            self._cancels,
            self._continues,
            self._garbage,
            self.repetition,
            self._acknowledgements,
        ):
            left.clear()
        settling, self._settling = self._settling, None
        if settling is not None:
            self.settle(settling[1], error)
        # The pages are freed with the last array over them.
        self._left = None
        self.shared, self.why_not_shared = None, "the session has ended"
        self.why_no_socket = self.why_not_shared

    def statistics(self) -> ProtocolStatistics:
        """Return counts at this moment."""
        return ProtocolStatistics(
            sent_commands=self._next_sequence - 1,
            completed_commands=self._next_sequence - 1 - len(self._in_flight),
            queued_commands=len(self._outbox),
            in_flight_bytes=self.credit.held_bytes + self._observed.held_bytes,
        )


def _client_error(pending: Pending, error: HeliographError) -> HeliographError:
    """Return the error with the reason for the interruption and the command's description."""
    if isinstance(error, DeadlineExceededError):
        what, seconds = pending.what, pending.timeout_ms / 1000
        return error if what is None or not seconds else late(what, seconds).at(error.origin)
    if pending.substitute is not None:
        return pending.substitute
    return error if pending.what is None else cancelled(pending.what).at(error.origin)


def _done() -> Outcome:
    outcome = Outcome()
    outcome.settle()
    return outcome
