"""The client's side of the command stream, without any input or output.

Commands go in by `send`, leave by `take`; completions come in by `apply`. Sequence numbers are given
when a command leaves, so that the wire sees them without gaps whatever was queued meanwhile. The
shells (blocking and asyncio) move batches between this and a transport, one caller at a time.

    send ─▸ outbox ─▸ take ─▸ (transport) ─▸ apply ─▸ take_settled, to be fired by the shell

Credits. A session may have only so many bytes staged on the server and so many commands unanswered
(`Limits`). `reserve` grants bytes in the order of asking, `reserve_observed` those that observed runs may
tell (`_credit_core`); commands beyond the limit stay in the outbox. Handles that nobody refers to any more
are collected by `release`, from any thread and from destructors, and leave in one Free behind everything
queued so far.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from heliograph.core.credit import CreditCore
from heliograph.core.future import ALONE, Outcome, Pending, Transfer, cancelled, late, logger
from heliograph.core.gates import OrderGate
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun
from heliograph_proto.errors import CancelledError, DeadlineExceededError, HeliographError, LimitExceededError
from heliograph_proto.sessions import Limits, Traffic

if TYPE_CHECKING:
    from heliograph.core.feed import Feed
    from heliograph.core.progress import UploadBars
    from heliograph.procedures.run import PlanSpec
    from heliograph.transport.shared_memory import SharedSpace


class Watched:
    """Handles of tensors, and what is called when a command writes one, or a view of one."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_handle)

    def __contains__(self, handle: int) -> bool:
        return handle in self._by_handle

    def watch(self, handle: int, written: Callable[[], None]) -> None:
        """From now on it is called; it must not send."""
        self._by_handle[handle] = written

    def leave(self, handle: int) -> None:
        """Undoes `watch`."""
        self._by_handle.pop(handle, None)

    def look_at(self, kind: c.CommandKind) -> None:
        """A command is sent."""
        if isinstance(kind, c.View) and kind.source in self._by_handle:
            self._by_handle[kind.tensor] = self._by_handle[kind.source]
        for handle in _written(kind):
            if (written := self._by_handle.get(handle)) is not None:
                written()


def _written(kind: c.CommandKind) -> tuple[int, ...]:
    match kind:
        case c.SetTensor(tensor=handle) | c.Memset(tensor=handle) | c.CopyTensor(destination=handle):
            return (handle,)
        case c.RunCommand(outputs=outputs):
            return tuple(one.into for one in outputs if one.into)
    return ()


#: Room below Limits.in_flight_commands that is kept for cancelling.
_RESERVED_FOR_CANCEL = 16
#: What a command's own fields take on the wire, at most, beside names and data.
_COMMAND_BYTES = 128
#: What the number of an inline run and the lengths around it take on the wire, at most.
_NUMBER_BYTES = 24
#: The most handles in one Free.
_FREE_HANDLES = 10_000
#: The most commands that wait for credit in the client, as a multiple of Limits.in_flight_commands.
_BACKLOG = 2
#: So many commands in a message are enough: its own costs are small beside theirs, and while the server works
#: on one, the next is made.
_MESSAGE_COMMANDS = 64
#: How many errors of commands are remembered.
_REMEMBERED = 1_000


@dataclass(frozen=True, slots=True)
class ProtocolStatistics:
    """Counts of the command stream, at one moment."""

    sent_commands: int
    completed_commands: int
    queued_commands: int
    in_flight_bytes: int


class ClientCore(CreditCore):
    """Handles, sequence numbers, what is pending, and credits of one session."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        #: Where commands go that name no stream.
        self.default_stream = c.DEFAULT_STREAM
        #: The handle of the reservation in whose memory plans are to lie; 0: none.
        self.reservation = 0
        #: Memory that the server maps as well, and why there is none.
        self.shared: SharedSpace | None = None
        self.why_not_shared = ALONE
        #: What writes and reads of tensors have carried, and how often it was copied here.
        self.traffic = Traffic()
        #: Where uploads of tensors are shown.
        self.bars: UploadBars | None = None
        #: Tensors of which somebody must know who writes them.
        self.watched = Watched()
        #: Handles of the streams that were made and not freed.
        self.streams: set[int] = set()
        #: Whether the transport takes inline runs, which have no meaning but as bytes.
        self.speaks_bytes = False
        #: Whether the server tells where missing contents will lie; and addresses of daemons that could take
        #: some, but are not to be reached from here.
        self.places_contents = False
        self.unreachable: set[str] = set()
        self._next_handle = 1
        self._next_transfer = 1
        self._next_sequence = 1
        self._outbox: deque[Pending | OrderGate] = deque()
        self._cancels: deque[Pending] = deque()
        #: Runs that wait at an observed node and may go on.
        self._continues: deque[Pending] = deque()
        #: Sent and not done, in order of their sequence numbers.
        self._in_flight: OrderedDict[int, Pending] = OrderedDict()
        self._completed_through = 0
        self._most_unanswered = max(1, limits.in_flight_commands - _RESERVED_FOR_CANCEL)
        self._garbage: deque[int] = deque()
        #: Whether some of it must be freed before the next command.
        self._frees_come_first = False
        #: Outcomes to be fired by the shell.
        self._settled: list[Outcome] = []
        self._unobserved: deque[HeliographError] = deque(maxlen=_REMEMBERED)
        #: By the sequence number of the command that failed: its error, with what only we know.
        self._known: OrderedDict[int, HeliographError] = OrderedDict()

    # Numbers

    def handle(self) -> int:
        """A new handle: 1 to 2**63 - 1, never used before in this session."""
        self._next_handle += 1
        return self._next_handle - 1

    def transfer(self) -> int:
        """A new transfer's number."""
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
        """Queues a command. Raises what ended the session, or LimitExceededError.

        `observed`: somebody waits for it, so it is listed at once (unless `notify` is False), and its
        error is not kept for `raise_unobserved`.
        """
        self.check()
        self._check_backlog()
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
        """Queues an inline run, of which `size_bytes` are input. None where that is not to be had at once: it
        goes the ordinary way then, which waits, or says what is wrong."""
        if self.lost is not None or self.default_stream != c.DEFAULT_STREAM or not self.speaks_bytes:
            return None
        if len(self._outbox) >= self.limits.in_flight_commands or not self.could_reserve(size_bytes):
            return None
        if self._frees_come_first:
            self.collect()
        self._credit.held_bytes += size_bytes
        pending = Pending(run, c.DEFAULT_STREAM, True, run.form.timeout_ms)
        pending.observed, pending.credit_bytes = True, size_bytes
        pending.source_of, pending.what = plan.source_of, plan.what
        self._outbox.append(pending)
        return pending

    def check(self) -> None:
        """Raises what ended the session."""
        if self.lost is not None:
            raise self.lost.at(self.lost.origin)

    def _check_backlog(self) -> None:
        if len(self._outbox) > _BACKLOG * self.limits.in_flight_commands:
            raise LimitExceededError(
                f"{len(self._outbox):,} commands are queued behind those that the server works on",
                advice="wait for some results, or for session.synchronize(), before sending more",
            )

    def cancel(self, pending: Pending, why: HeliographError | None = None) -> None:
        """Asks the server to cancel a command; `why` is reported in place of its CancelledError."""
        if pending.done or self.lost is not None:
            return
        if pending.substitute is None:
            pending.substitute = why
        self._cancels.append(pending)

    def proceed(self, pending: Pending) -> None:
        """Lets a run go on if it waits at an observed node; tells a loop what was taken, when it is time to.
        Safe in destructors."""
        if pending.feed is not None and pending.feed.may_proceed():
            self._continues.append(pending)

    def flow(self, pending: Pending) -> None:
        """From now on a run waits for nobody to ask. Safe in destructors and from any thread."""
        if pending.feed is not None:
            pending.feed.flows = True
            self.proceed(pending)

    def open_gate(self) -> OrderGate:
        """Keeps a place in the order of commands for some that come later."""
        gate = OrderGate()
        self._outbox.append(gate)
        self._gates.append(gate)
        return gate

    def close_gate(self, gate: OrderGate) -> None:
        """No more commands come at this place. Idempotent."""
        gate.closed = True
        if gate in self._gates:
            self._gates.remove(gate)
            self._observed.share_out()
            self._credit.share_out()

    def release(self, handle: int) -> None:
        """Frees a handle behind everything queued so far. Safe in destructors and from any thread."""
        if self.lost is None:
            self._garbage.append(handle)

    def order_frees(self) -> None:
        """Lets what was released so far be freed before the next command, not only behind the ones that are
        queued. Safe in destructors and from any thread."""
        self._frees_come_first = True

    @property
    def has_garbage(self) -> bool:
        """Whether handles wait to be freed."""
        return bool(self._garbage)

    @property
    def has_only_garbage(self) -> bool:
        """Whether there is nothing to send but frees, which may gather for a moment."""
        return bool(self._garbage) and not (self._outbox or self._cancels or self._continues)

    @property
    def has_output(self) -> bool:
        """Whether `take` might have something to give."""
        return bool(self._outbox or self._cancels or self._continues or self._garbage)

    @property
    def is_full(self) -> bool:
        """Whether so much is queued that it should leave before more is queued."""
        return len(self._outbox) >= _MESSAGE_COMMANDS

    def take(self, most_bytes: int) -> list[c.Command | InlineRun]:
        """The commands that leave now: what credit allows, in a message of about that many bytes."""
        taken: list[c.Command | InlineRun] = []
        size = 0
        self.collect()
        while self.lost is None and size < most_bytes:
            pending = (
                (self._cancels and self._next_cancel())
                or (self._continues and self._next_continue())
                or self._next(most_bytes - size, first=not taken)
            )
            if pending is None:
                break
            pending.sequence = self._next_sequence
            self._next_sequence += 1
            self._in_flight[pending.sequence] = pending
            taken.append(_command(pending))
            size += size_of(pending.kind)
        return taken

    def collect(self) -> None:
        """Turns released handles into Free commands at the end of the outbox."""
        while self._garbage and self.lost is None:
            count = min(len(self._garbage), _FREE_HANDLES)
            handles = tuple(self._garbage.popleft() for _ in range(count))
            for handle in handles if self.watched else ():
                self.watched.leave(handle)
            self._outbox.append(Pending(c.Free(handles), self.default_stream, False, 0))

    def _next_cancel(self) -> Pending | None:
        """A cancel may pass the queue, but not the command that it cancels."""
        for _ in range(len(self._cancels)):
            target = self._cancels.popleft()
            if target.done:
                continue
            if target.sequence:
                return Pending(c.Cancel(target.sequence), self.default_stream, False, 0)
            self._cancels.append(target)
        return None

    def _next_continue(self) -> Pending | None:
        """It passes the queue, too, which may stand behind its run."""
        while self._continues:
            run = self._continues.popleft()
            if not run.done and run.feed is not None:
                kind = c.Continue(run.sequence, run.feed.taken_bytes)
                return Pending(kind, self.default_stream, False, 0)
        return None

    def _next(self, room: int, first: bool) -> Pending | None:
        if self._next_sequence - 1 - self._completed_through >= self._most_unanswered:
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

    def apply(self, batch: c.CompletionBatch) -> None:
        """Settles what a batch of completions reports."""
        for piece in batch.taps:
            run = self._in_flight.get(piece.sequence)
            if run is not None and run.feed is not None and run.feed.add(piece):
                self._observe(run)
        for completion in batch.completions:
            pending = self._in_flight.pop(completion.sequence, None)
            if pending is None:
                continue
            if isinstance(completion, InlineResult) and not pending.done and pending.feed is None:
                # As `_complete`, for what it comes to most often.
                pending.completion, pending.done = completion, True
                self._settled.append(pending)
                self.give_back(pending.credit_bytes)
            else:
                self._complete(pending, completion)
        self._completed_through = max(self._completed_through, batch.completed_through)
        while self._in_flight:
            sequence = next(iter(self._in_flight))
            if sequence > batch.completed_through:
                break
            self._complete(self._in_flight.pop(sequence), None)

    def _observe(self, run: Pending) -> None:
        """An observed value is complete."""
        feed = run.feed
        assert feed is not None
        self._tell(feed)
        if feed.flows:
            self.proceed(run)

    def _tell(self, feed: Feed) -> None:
        """Wakes who waits for what a run tells."""
        changed, feed.changed = feed.changed, Outcome()
        self.settle(changed)

    def _complete(self, pending: Pending, completion: c.Completion | InlineResult | None) -> None:
        pending.completion = completion
        error = self._explain(pending, completion.error) if completion and completion.error else None
        self.settle(pending, error)
        if error is not None and not pending.observed:
            self._note(pending, error)
        if pending.credit_bytes:
            self.give_back(pending.credit_bytes)
        if pending.feed is not None:
            self._observed_ended(pending.feed)
        if pending.slot is not None and self.shared is not None:
            self.shared.give(pending.slot)

    def settle(self, outcome: Outcome, error: HeliographError | None = None) -> None:
        """Makes an outcome done, unless it is."""
        if outcome.settle(error):
            self._settled.append(outcome)
            if isinstance(outcome, Pending) and outcome.feed is not None:
                self._tell(outcome.feed)

    def upload_ended(
        self, pending: Pending | None, transfer: Transfer, error: HeliographError | None
    ) -> None:
        """An upload is over, well or not; the command that waits for its bytes is cancelled if not."""
        if error is not None and pending is not None:
            self.cancel(pending, error)
        self.settle(transfer.taken)
        self.settle(transfer.ended, error)

    def take_settled(self) -> list[Outcome]:
        """What was settled since the last call; the shell fires it, outside of any lock."""
        settled, self._settled = self._settled, []
        return settled

    def _explain(self, pending: Pending, error: HeliographError) -> HeliographError:
        """The error with what only the client knows: why it cancelled, and the line of user code.

        A later command that met a poisoned handle carries the sequence number of the first.
        """
        first = error.origin.sequence or pending.sequence
        if first == pending.sequence:
            if isinstance(error, CancelledError | DeadlineExceededError):
                self._remember(first, _in_our_words(pending, error).from_command(first))
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
        """Raises an outcome's error, if any, which is thereby seen."""
        if outcome.error is not None:
            first = outcome.error.origin.sequence
            seen = [one for one in self._unobserved if first and one.origin.sequence == first]
            for one in seen:
                self._unobserved.remove(one)
            outcome.raise_error()

    def raise_unobserved(self) -> None:
        """Raises the first error that nobody has seen, and forgets the others."""
        if self._unobserved:
            first = self._unobserved.popleft()
            self._unobserved.clear()
            raise first.at(first.origin)

    # Shared memory

    def set_shared(self, found: SharedSpace | str) -> None:
        """The memory that the server maps as well, or why there is none."""
        if isinstance(found, str):
            self.why_not_shared = found
        else:
            self.shared, self.why_not_shared = found, ""

    def count(self, traffic: Traffic) -> None:
        """Bytes of tensors were carried, or copied on the way."""
        self.traffic = self.traffic.plus(traffic)

    def space(self) -> SharedSpace:
        """The memory in which somebody has a slot. Raises what ended the session."""
        self.check()
        assert self.shared is not None
        return self.shared

    def give_slot(self, slot: int, behind: Pending | None = None) -> None:
        """A slot of shared memory is free again: now, or when a command has ended that may still use it."""
        if behind is not None and not behind.done:
            behind.slot = slot
        elif self.shared is not None:
            self.shared.give(slot)

    # The end

    def connection_lost(self, error: HeliographError) -> None:
        """Ends the session: everything pending fails with this error, and so does what comes."""
        if self.lost is not None:
            return
        self.lost = error
        queued = [
            one for item in self._outbox for one in (item.queue if isinstance(item, OrderGate) else (item,))
        ]
        for outcome in (*self._in_flight.values(), *queued):
            self.settle(outcome, error)
        for credit in (self._credit, self._observed):
            credit.end(error)
        for held in (self._in_flight, self._outbox, self._gates):
            held.clear()
        for left in (self._cancels, self._continues, self._garbage):
            left.clear()
        # Its pages are free as soon as nobody has an array over them.
        self.shared, self.why_not_shared = None, "the session has ended"

    def statistics(self) -> ProtocolStatistics:
        """Counts, now."""
        return ProtocolStatistics(
            sent_commands=self._next_sequence - 1,
            completed_commands=self._next_sequence - 1 - len(self._in_flight),
            queued_commands=len(self._outbox),
            in_flight_bytes=self._credit.held_bytes + self._observed.held_bytes,
        )


def _in_our_words(pending: Pending, error: HeliographError) -> HeliographError:
    """Why a command was broken off, and what it was; the server knows neither."""
    if isinstance(error, DeadlineExceededError):
        what, seconds = pending.what, pending.timeout_ms / 1000
        return error if what is None or not seconds else late(what, seconds).at(error.origin)
    if pending.substitute is not None:
        return pending.substitute
    return error if pending.what is None else cancelled(pending.what).at(error.origin)


def _command(pending: Pending) -> c.Command | InlineRun:
    if isinstance(pending.kind, InlineRun):
        pending.kind.sequence = pending.sequence
        return pending.kind
    return c.Command(pending.sequence, pending.kind, pending.stream, pending.notify, pending.timeout_ms)


def size_of(kind: c.CommandKind | InlineRun) -> int:
    """About the bytes of a command on the wire, never less."""
    if isinstance(kind, InlineRun):
        return _NUMBER_BYTES + kind.form.template.size_bytes
    match kind:
        case c.SetTensor(data=data) if data is not None:
            return _COMMAND_BYTES + len(data)
        case c.RunCommand(inputs=inputs, outputs=outputs, loop=loop):
            data_bytes = sum(len(one.data) for one in inputs if one.data is not None)
            looped = 2 + len(loop.carries) + len(loop.taps) if loop is not None else 0
            return _COMMAND_BYTES + data_bytes + 32 * (len(inputs) + len(outputs) + looped)
        case c.Free(handles):
            return _COMMAND_BYTES + 10 * len(handles)
        case c.AllocateTensors(tensors=tensors):
            return 2 * _COMMAND_BYTES + sum(32 + 10 * type.ndim for _, type in tensors)
    return 2 * _COMMAND_BYTES
