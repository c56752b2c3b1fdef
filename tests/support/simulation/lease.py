"""A session with a lease: the real core, connection state and log, with cuts at any point.

The daemon is a model that does commands one by one, each once, and streams values of some. Streams
are cut while messages are under way in both directions. Attaches come late, twice, or from a second
client with the same secret, and clocks jump.
"""

from __future__ import annotations

from functools import partial

from heliograph.core.connection_state import ConnectionState, Dial, GiveUp, Reconnecting
from heliograph.core.future import Pending
from heliograph.core.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_runs import CompletionReader, encode_results
from heliograph_proto.errors import (
    HandleExistsError,
    HeliographError,
    LimitExceededError,
    ProtocolError,
    SessionClosedError,
    UnavailableError,
)
from heliograph_server.rpc.leases.completion_log import CompletionLog
from simulation.streams import LEASE_SECONDS, LIMITS, Stream, send_all
from simulation.world import World, hold


class _Daemon:
    """Does commands in their order, and keeps completion messages until they are acknowledged."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.log = CompletionLog()
        self.stream: Stream | None = None
        self.last = self.done = 0
        #: The work that was done, by its number, in order; and the values that were streamed.
        self.did: list[int] = []
        self._waiting: list[int] = []
        self._is_busy = False
        self._expires = 0.0
        self.is_closed = False

    def attach(self, stream: Stream, attach: c.Attach | None) -> None:
        """Begin a stream, as `Conversation.begin` does."""
        try:
            if self.is_closed:
                raise SessionClosedError("the lease has ended")
            kept = self.log.since(attach.received) if attach is not None else ()
        except HeliographError as error:
            stream.down.send(partial(stream.end, error))
            return
        if (before := self.stream) is not None:
            before.is_over = True
            superseded = HandleExistsError("another connection has attached")
            before.down.send(partial(before.end, superseded))
        self.stream = stream
        self._expires = float("inf")
        if attach is not None:
            answer = c.CompletionBatch(0, attached=c.Attached(self.last, attach.received + 1))
            for message in (encode_results(answer), *kept):
                stream.down.send(partial(stream.deliver, message))

    def detach(self, stream: Stream) -> None:
        """Notice that a stream broke."""
        stream.is_over = True
        if self.stream is stream:
            self.stream = None
            self._expires = self._world.now + LEASE_SECONDS
            self._world.after(LEASE_SECONDS + 0.001, self._expire)

    def _expire(self) -> None:
        if self.stream is None and self._world.now >= self._expires:
            self.is_closed = True

    def receive(self, stream: Stream, message: bytes) -> None:
        """Take the commands of a message, unless the stream is over."""
        for part in stream.reader.read(message):
            if stream.is_over or self.is_closed:
                return
            if isinstance(part, c.Acknowledged):
                self.log.acknowledge(part.received)
                continue
            hold(part.sequence == self.last + 1, f"command {part.sequence} after {self.last}")
            self.last = part.sequence
            self._waiting.append(part.sequence)
        self._work()

    def _work(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self._world.soon(self._finish, 0.2)

    def _finish(self) -> None:
        self._is_busy = False
        number = self._waiting.pop(0)
        self.did.append(number)
        self.done = number
        # The number of the value is that of the command, so that its reader can tell it.
        data = number.to_bytes(8, "little")
        self._tell(c.CompletionBatch(number, (c.Completion(number, data=data),)))
        self._work()

    def _tell(self, batch: c.CompletionBatch) -> None:
        message = encode_results(batch)
        self.log.append(message)
        if (stream := self.stream) is not None and not stream.is_over:
            stream.down.send(partial(stream.deliver, message))


class _Client:
    """A client with the real core, that connects again as the shells do."""

    def __init__(self, world: World, daemon: _Daemon, core: ClientCore | None = None) -> None:
        self._world, self._daemon = world, daemon
        self.core = core or ClientCore(LIMITS)
        self.core.has_lease = True
        self._completions = CompletionReader()
        self.reconnecting = Reconnecting(LEASE_SECONDS, world.random.random)
        self.sent: list[Pending] = []
        #: The fired commands, and how often each.
        self.fired: dict[Pending, int] = {}
        self.stream = self._new_stream()
        self.error: HeliographError | None = None

    def begin(self, attach: c.Attach | None = None) -> None:
        """Open a stream, whose first message arrives some time."""
        stream = self.stream = self._new_stream()
        self._completions = CompletionReader()
        stream.up.send(partial(self._daemon.attach, stream, attach))
        if self._world.chance(0.1) and attach is not None:
            # Its answer is late: the client tries once more, and both attaches arrive.
            self._world.after(0.5, partial(self._broke, stream))

    def send(self) -> None:
        if self.core.lost is None and len(self.sent) < 400:
            try:
                pending = self.core.send(c.Synchronize(), observed=True)
            except LimitExceededError:
                return  # too many wait for a connection
            pending.add_callback(partial(self._fire, pending))
            self.sent.append(pending)
            self.flush()

    def _fire(self, pending: Pending) -> None:
        # Those that never left have no number.
        self.fired[pending] = self.fired.get(pending, 0) + 1
        if pending.error is None and pending.completion is not None:
            told = int.from_bytes(pending.completion.data, "little")
            hold(told == pending.sequence, f"command {pending.sequence} got the value of {told}")

    def _new_stream(self) -> Stream:
        return Stream(self._world, self._came, self._ended)

    def flush(self) -> None:
        """Send what may leave, in messages that arrive or not."""
        send_all(self.core, self.stream, self._daemon.receive)

    def _came(self, stream: Stream, message: bytes) -> None:
        if stream is not self.stream or self.core.lost is not None:
            return
        try:
            self.core.apply(self._completions.read(message), len(message))
        except HeliographError as error:
            # As a shell does that cannot go on with such an answer: it is that of a thief.
            self._give_up(error)
            return
        if self.reconnecting.is_down:
            self.reconnecting.attached()
        for outcome in self.core.take_settled():
            outcome.fire()
        self.flush()

    def cut(self, *, both: bool) -> None:
        """Cut the stream. Each side notices in its own time, the daemon perhaps after the attach."""
        stream = self.stream
        if not both:
            # Only what is under way to the daemon is lost; the rest comes, too late.
            stream.up.is_cut = True
        else:
            stream.cut()
        self._world.soon(partial(self._daemon.detach, stream), 3.0)
        self._world.soon(partial(self._broke, stream), 1.0)

    def _broke(self, stream: Stream) -> None:
        if stream is self.stream:
            self._ended(stream, UnavailableError("the connection broke"))

    def _ended(self, stream: Stream, error: HeliographError) -> None:
        if stream is not self.stream or self.core.lost is not None:
            return
        instruction = self.reconnecting.broke(error, self._world.now)
        if isinstance(instruction, GiveUp):
            self._give_up(instruction.error)
            return
        if self.core.is_attached:
            self.core.detached()
        self.stream = self._new_stream()
        self._world.after(instruction.pause_seconds, partial(self._dial, self.stream, instruction))

    def _dial(self, awaited: Stream, _: Dial) -> None:
        if awaited is self.stream and self.core.lost is None:
            self.reconnecting.dialling()
            self.begin(self.core.attach(b""))
            # A dial that fails: nothing arrives.
            if self._world.chance(0.2):
                self.cut(both=True)

    def _give_up(self, error: HeliographError) -> None:
        self.error = error
        self.core.connection_lost(error)
        for outcome in self.core.take_settled():
            outcome.fire()


class SimulatedLease:
    """A client that sends commands while its connection is cut again and again."""

    def __init__(self, seed: int, actions: int = 60) -> None:
        self.world = World(seed)
        self.daemon = _Daemon(self.world)
        self.client = _Client(self.world, self.daemon)
        self._thief: _Client | None = None
        self._jumped = False
        for number in range(actions):
            self.world.after(number * 0.2, self._act)

    def run(self) -> int:
        """Let everything happen. Return the number of events; raises Violation."""
        self.client.begin()
        events = self.world.run(self._check)
        self._check_end()
        return events

    def _act(self) -> None:
        for _ in range(self.world.random.choice((1, 2, 8))):
            self.client.send()
        if self.world.chance(0.3):
            self.client.cut(both=self.world.chance(0.5))
        if self.world.chance(0.01) and self._thief is None:
            # Another client has the secret, and claims to have received nothing.
            self._thief = _Client(self.world, self.daemon)
            self._thief.core.detached()
            self._thief.begin(c.Attach(0))
        if self.world.chance(0.01):
            # A laptop that slept: the clock jumps past the lease.
            self._jumped = True
            self.world.now += 2 * LEASE_SECONDS

    def _check(self) -> None:
        did = self.daemon.did
        hold(not did or did[-1] == len(did), "a command was done twice, or one was left out")
        hold(all(count == 1 for count in self.client.fired.values()), "a result came twice")

    def _check_end(self) -> None:
        client = self.client
        hold(client.core.is_attached or client.core.lost is not None, "it hangs without a connection")
        hold(all(one.done for one in client.sent), "a command hangs")
        if client.core.lost is None:
            hold(client.reconnecting.state is ConnectionState.CONNECTED, "it is connected and does not know")
            hold(len(self.daemon.did) == len(client.sent), "a command was lost")
            hold(all(one.error is None for one in client.sent), "a command failed")
            return
        # Only another client, or the end of the lease, may take the session.
        was_taken = isinstance(client.error, HandleExistsError | ProtocolError) and self._thief is not None
        was_late = isinstance(client.error, SessionClosedError | UnavailableError)
        hold(was_taken or was_late, f"the session was lost: {client.error!r}")
        hold(was_taken or self._jumped or self.daemon.is_closed, f"it gave up early: {client.error!r}")
