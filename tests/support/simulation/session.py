"""A session between a simulated client and server: the real cores of both, and wires with delays and cuts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from heliograph.core.credit import CreditGrant
from heliograph.core.feed import LoopFeed, output_key
from heliograph.core.future import Outcome, Pending
from heliograph.core.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ConnectionError,
    HeliographError,
    LimitExceededError,
    SessionClosedError,
)
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from simulation.plans import PLANS, SIZE, TYPE
from simulation.serial import SerialModel
from simulation.server import SimulatedServer
from simulation.world import Wire, World, hold

#: Small, so that every schedule meets them.
LIMITS = Limits(in_flight_bytes=8192, in_flight_commands=40, inline_bytes=64, chunk_bytes=64)
MESSAGE_BYTES = 2048
#: The most bytes of values that a loop may have unread.
UNREAD_BYTES = 1100


class SimulatedSession:
    """A client that does random things. It keeps its side of every limit, so it meets none."""

    def __init__(self, seed: int, actions: int = 30) -> None:
        self.world = World(seed)
        self._random = self.world.random
        self.core = ClientCore(LIMITS)
        self._commands, self._completions = Wire(self.world), Wire(self.world)
        self._bulk: list[Wire] = []
        self.server = SimulatedServer(self.world, LIMITS, self._send_batch, self._deliver)
        self._actions = actions
        #: Live tensors by handle: their sizes, and the tensors that they are views of.
        self._tensors: dict[int, int] = {}
        self._viewed: dict[int, int] = {}
        self._streams = [0]
        self._events: list[int] = []
        self._sent: list[Pending] = []
        self._fired: dict[Pending, int] = {}
        #: Downloads that wait, by transfer.
        self._reading: dict[int, Callable[[bytes | HeliographError], None]] = {}
        self._is_lost = False
        for number in range(actions):
            self.world.after(number * self._random.choice((0.01, 0.1, 0.3)), self._act)
        if self.world.chance(0.25):
            self.world.after(self._random.random() * actions * 0.15, self._lose)

    def run(self) -> int:
        """Run the schedule to its end. Returns the number of events. Raises Violation."""
        events = self.world.run(self._check)
        if not self._is_lost:
            self._check_quiet()
            self._free_all()
            events += self.world.run(self._check)
            self.server.close(SessionClosedError("closed"))
            events += self.world.run(lambda: None)
        self.server.close_at_last()
        for pending in self._sent:
            hold(
                pending.done and self._fired[pending] == 1, f"{pending} was told {self._fired[pending]} times"
            )
        reports = self.server.reports
        SerialModel(self.server.guilty | ({*reports} if self._is_lost else set())).replay(
            reports[number] for number in sorted(reports)
        )
        return events

    # Invariants

    def _check(self) -> None:
        core = self.server.core
        hold(core.in_flight <= LIMITS.in_flight_commands, f"{core.in_flight} commands are in flight")
        hold(
            self.server.staged_bytes <= LIMITS.in_flight_bytes, f"{self.server.staged_bytes} bytes are staged"
        )
        held = self.core.statistics().in_flight_bytes
        hold(held >= 0, f"the client holds {held} bytes")

    def _check_quiet(self) -> None:
        """Everything is done, and all credit is back."""
        statistics = self.core.statistics()
        hold(statistics.queued_commands == 0, f"{statistics} although nothing happens any more")
        hold(statistics.completed_commands == statistics.sent_commands, f"{statistics} at the end")
        hold(statistics.in_flight_bytes == 0, f"{statistics} at the end")
        hold(self.server.core.unretired == 0, f"{self.server.core!r} at the end")
        hold(self.server.staged_bytes == 0, f"{self.server.staged_bytes} bytes stay staged")
        for report in self.server.reports.values():
            hold(not isinstance(report.error, LimitExceededError), f"{report} met a limit")

    # The connection

    def _pump(self) -> None:
        """Send what the core lets leave."""
        while self.core.has_output:
            commands = self.core.take(MESSAGE_BYTES)
            if not commands:
                break
            message = [one for one in commands if isinstance(one, c.Command)]
            self._commands.send(partial(self.server.receive, message))

    def _send_batch(self, batch: c.CompletionBatch) -> None:
        self._completions.send(partial(self._apply, batch))

    def _apply(self, batch: c.CompletionBatch) -> None:
        self.core.apply(batch)
        self._fire()
        self._pump()

    def _fire(self) -> None:
        for outcome in self.core.take_settled():
            outcome.fire()

    def _lose(self) -> None:
        """Cut the connection. Either side notices in its own time."""
        self._is_lost = True
        for wire in (self._commands, self._completions, *self._bulk):
            wire.is_cut = True
        self.world.soon(self._client_noticed)
        self.world.soon(lambda: self.server.close(SessionClosedError("the client is gone")))

    def _client_noticed(self) -> None:
        self.core.connection_lost(ConnectionError("cut"))
        self._fire()

    def _send(self, kind: c.CommandKind, credit_bytes: int = 0, **how: object) -> Pending | None:
        """Queue a command and follow it."""
        if self.core.lost is not None:
            return None
        stream = self._random.choice(self._streams)
        timeout_ms = self._random.choice((1, 50, 500)) if self.world.chance(0.05) else 0
        if isinstance(kind, c.Free | c.CreateStream | c.Allocate | c.View):
            timeout_ms = 0
        pending = self.core.send(
            kind,
            stream=stream,
            observed=self.world.chance(0.7),
            timeout_ms=timeout_ms,
            credit_bytes=credit_bytes,
        )
        self._sent.append(pending)
        self._fired[pending] = 0

        def fired() -> None:
            self._fired[pending] += 1

        pending.add_callback(fired)
        may_cancel = isinstance(kind, c.SetTensor | c.GetTensor | c.RunCommand | c.CopyTensor | c.Memset)
        if may_cancel and self.world.chance(0.08):
            self.world.soon(partial(self._cancel, pending))
        return pending

    def _cancel(self, pending: Pending) -> None:
        self.core.cancel(pending)
        self._pump()

    # Actions

    def _act(self) -> None:
        if self.core.lost is not None:
            return
        actions = [self._allocate] * 3 + [self._new_stream]
        if self._tensors:
            actions += [
                self._write,
                self._fill,
                self._read,
                self._copy,
                self._view,
                self._run,
                self._loop,
            ] * 2
            actions += [self._write_large, self._read_large] * 2 + [self._record, self._wait, self._free]
            actions += [self._synchronize, self._run_many]
        self._random.choice(actions)()
        self._fire()
        self._pump()

    def _tensor(self, size: int | None = None) -> int | None:
        found = [one for one, nbytes in self._tensors.items() if size in (None, nbytes)]
        return self._random.choice(found) if found else None

    def _allocate(self) -> None:
        number, size = self.core.handle(), self._random.choice((SIZE, SIZE, SIZE, 16, 1024))
        self._send(c.Allocate(number, tensor_type("u8", (size,)), self._random.choice(("a", "b"))))
        self._tensors[number] = size

    def _part(self, number: int) -> tuple[int, int]:
        size = self._tensors[number]
        if self.world.chance(0.5):
            return 0, size
        start = self._random.randrange(size)
        return start, self._random.randrange(1, size - start + 1)

    def _write(self) -> None:
        number = self._tensor()
        assert number is not None
        offset, size = self._part(number)
        size = min(size, LIMITS.inline_bytes)
        self._with_credit(size, lambda: c.SetTensor(number, offset, self._random.randbytes(size)), number)

    def _with_credit(self, size: int, make: Callable[[], c.CommandKind], *handles: int) -> None:
        """Send a command whose bytes hold credit until it is done."""
        grant = self.core.credit.reserve(size)

        def granted() -> None:
            if grant.error is not None:
                return
            if self.core.lost is None and all(one in self._tensors for one in handles):
                self._send(make(), credit_bytes=size)
                self._pump()
            else:
                self.core.credit.give_back(size)

        grant.add_callback(granted)

    def _fill(self) -> None:
        number = self._tensor()
        assert number is not None
        offset, size = self._part(number)
        self._send(c.Memset(number, offset, size, self._random.randrange(256)))

    def _read(self) -> None:
        number = self._tensor()
        assert number is not None
        offset, size = self._part(number)
        size = min(size, LIMITS.inline_bytes)
        self._with_credit(size, lambda: c.GetTensor(number, offset, size), number)

    def _copy(self) -> None:
        source, destination = self._tensor(SIZE), self._tensor(SIZE)
        if source is not None and destination is not None and self._are_separate(source, destination):
            self._send(c.CopyTensor(source, destination))

    def _view(self) -> None:
        source, number = self._tensor(16), self.core.handle()
        if source is not None:
            self._send(c.View(number, source, self._random.choice((0, 4, 8)), TYPE))
            self._tensors[number] = SIZE
            self._viewed[number] = self._viewed.get(source, source)

    def _are_separate(self, one: int, other: int) -> bool:
        return self._viewed.get(one, one) != self._viewed.get(other, other)

    def _run(self) -> None:
        x = self._tensor(SIZE)
        given = self._random.randbytes(SIZE) if x is None or self.world.chance(0.3) else None
        kind = self._random.randrange(3)
        into, made = self._tensor(SIZE), self.core.handle()
        if kind == 0 and into is not None and (x is None or self._are_separate(into, x)):
            output = c.OutputBinding(0, into=into)
        elif kind == 1:
            output = c.OutputBinding(0, made)
        else:
            output = c.OutputBinding(0, fetch=True)
        binding = c.InputBinding(0, given, 0 if given is not None else x or 0)
        run = c.RunCommand(self._random.choice([*PLANS]), (binding,), (output,))
        handles = [one for one in (binding.tensor, output.into) if one]

        def make() -> c.CommandKind:
            if output.tensor:
                self._tensors[made] = SIZE
            return run

        self._with_credit(2 * SIZE, make, *handles)

    def _run_many(self) -> None:
        for _ in range(self._random.randrange(2, 8)):
            self._run()

    def _new_stream(self) -> None:
        if len(self._streams) < 5:
            number = self.core.handle()
            self._send(c.CreateStream(number, self._random.choice(("", "a", "b"))))
            self._streams.append(number)

    def _record(self) -> None:
        event = (
            self._random.choice(self._events)
            if self._events and self.world.chance(0.5)
            else self.core.handle()
        )
        self._send(c.Record(event))
        if event not in self._events:
            self._events.append(event)

    def _wait(self) -> None:
        if self._events:
            self._send(c.WaitCommand(self._random.choice(self._events)))

    def _synchronize(self) -> None:
        self._send(c.Synchronize())

    def _free(self) -> None:
        number = self._tensor()
        assert number is not None
        del self._tensors[number]
        self.core.release(number)

    def _free_all(self) -> None:
        for number in (*self._tensors, *self._events, *self._streams[1:], *PLANS):
            self.core.release(number)
        self._tensors.clear()
        self._pump()

    # Transfers

    def _write_large(self) -> None:
        number = self._tensor(1024)
        if number is None:
            return
        grant = self.core.credit.reserve(1024)
        grant.add_callback(partial(self._upload, grant, number))

    def _upload(self, grant: CreditGrant, number: int) -> None:
        if grant.error is not None:
            return
        if self.core.lost is not None or number not in self._tensors:
            self.core.credit.give_back(1024)
            return
        transfer, data = self.core.transfer(), self._random.randbytes(1024)
        pending = self._send(c.SetTensor(number, 0, None, transfer, 1024), credit_bytes=1024)
        assert pending is not None
        self._pump()
        wire = Wire(self.world)
        self._bulk.append(wire)
        wire.send(partial(self._upload_starts, wire, transfer, data, pending))
        self.world.after(3.0, partial(self._upload_cut, wire, transfer))

    def _upload_starts(self, wire: Wire, transfer: int, data: bytes, pending: Pending) -> None:
        refused = self.server.upload(transfer, data)
        if refused is not None:
            return
        if self.world.chance(0.1):
            wire.is_cut = True
            self.world.soon(partial(self._upload_broke, transfer, pending))
        else:
            wire.send(partial(self.server.arrived, transfer))

    def _upload_broke(self, transfer: int, pending: Pending) -> None:
        """The upload's call fails: the server hears of it, and the client cancels the command."""
        upload = self.server.uploads.get(transfer)
        if upload is None or (not upload.has_arrived and upload.error is None):
            self._blame_upload(transfer)
            if upload is not None or not self.server.is_closed:
                self.server.broke(transfer, CancelledError("cut"))
        self.core.cancel(pending, CancelledError("cut"))
        self._pump()

    def _upload_cut(self, wire: Wire, transfer: int) -> None:
        """After a cut of the whole connection, the call on the server ends as well."""
        upload = self.server.uploads.get(transfer)
        if wire.is_cut and upload is not None and not upload.has_arrived and upload.error is None:
            self._blame_upload(transfer)
            self.server.broke(transfer, CancelledError("cut"))

    def _blame_upload(self, transfer: int) -> None:
        self.server.guilty.update(
            pending.sequence
            for pending in self._sent
            if isinstance(pending.kind, c.SetTensor) and pending.kind.transfer == transfer
        )

    def _read_large(self) -> None:
        number = self._tensor(1024)
        if number is None:
            return
        grant = self.core.credit.reserve(1024)
        grant.add_callback(partial(self._download, grant, number))

    def _download(self, grant: CreditGrant, number: int) -> None:
        """Ask for the bytes. The credit comes back when they are here."""
        if grant.error is not None:
            return
        if self.core.lost is not None or number not in self._tensors:
            self.core.credit.give_back(1024)
            return
        transfer = self.core.transfer()
        self._send(c.GetTensor(number, 0, 1024, transfer))
        self._pump()
        self._reading[transfer] = partial(self._downloaded, transfer)

    def _deliver(self, transfer: int, found: bytes | HeliographError) -> None:
        """The server's answer to a download is on its way."""
        wire = Wire(self.world)
        wire.is_cut = self._is_lost
        self._bulk.append(wire)
        wire.send(partial(self._reading.pop(transfer), found))
        if self._is_lost:
            self.server.took(transfer)

    def _downloaded(self, transfer: int, found: bytes | HeliographError) -> None:
        self.server.took(transfer)
        self.core.credit.give_back(1024)
        self._fire()
        self._pump()

    # Loops

    def _loop(self) -> None:
        steps, plan = self._random.randrange(1, 12), self._random.choice([*PLANS.values()])
        feed = LoopFeed({output_key(0): TYPE}, steps, UNREAD_BYTES, LIMITS.in_flight_bytes)
        grant = self.core.reserve_observed(feed, SIZE)
        loop = c.Loop(steps, (c.Carry(0, 0),), None, (0,), UNREAD_BYTES)
        given = c.InputBinding(0, self._random.randbytes(SIZE))
        run = c.RunCommand(plan.handle, (given,), (c.OutputBinding(0, fetch=True),), loop=loop)

        def granted() -> None:
            if grant.error is not None:
                return
            pending = self._send(run)
            if pending is not None:
                pending.feed = feed
                self._pump()
                self._follow_loop(pending, feed, [])

        grant.add_callback(granted)

    def _follow_loop(self, pending: Pending, feed: LoopFeed, values: list[bytes]) -> None:
        """Read the loop's values as they come, sometimes late; at last let it flow."""
        while feed.ready:
            values.append(feed.take()[2].tobytes())
        self.core.proceed(pending)
        self._pump()
        unread = sum(value[2].nbytes for value in feed.ready)
        hold(unread <= UNREAD_BYTES, f"{unread} bytes of a loop's values are unread")
        if pending.done:
            if pending.error is None:
                streamed = self.server.reports[pending.sequence].streamed
                hold(values == streamed, f"{pending} gave {values}, not {streamed}")
            return
        if self.world.chance(0.1):
            self.core.flow(pending)
        changed: Outcome = feed.changed
        changed.add_callback(lambda: self.world.soon(lambda: self._follow_loop(pending, feed, values)))
