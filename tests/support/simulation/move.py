"""A session that goes from daemon to daemon and back: the real core, gate, journal and decisions, with cuts.

Two daemons do commands one by one, each once, and chain their numbers, so that a command that is left out or
done twice gives other values. A client moves its session while its connection is cut; the link between the
daemons breaks before and after the other one has the session; others show old and forged secrets. A durable
session's daemons are killed and start again from their last snapshots. Clocks jump.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from heliograph.core.connection_state import ConnectionState, Follow, GiveUp, Reconnecting
from heliograph.core.effects import Call, Compute, Procedure, WaitFor
from heliograph.core.future import Pending
from heliograph.core.protocol import ClientCore
from heliograph.core.replay.journal import CommandJournal
from heliograph.procedures.moving import Moving
from heliograph.procedures.replay import repeat
from heliograph_proto import codec
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_runs import CompletionReader, encode_results
from heliograph_proto.digests import digest_of, moved_secret
from heliograph_proto.errors import (
    DeadlineExceededError,
    HandleExistsError,
    HeliographError,
    LimitExceededError,
    MovedError,
    ProtocolError,
    SessionClosedError,
    SnapshotFailedError,
    UnavailableError,
)
from heliograph_proto.sessions import SessionMove
from heliograph_server.rpc.leases.attaching import Attaching
from heliograph_server.rpc.leases.completion_log import CompletionLog
from heliograph_server.runtime.whereabouts import Arrivals, Departures
from simulation.streams import LEASE_SECONDS, LIMITS, Stream, send_all
from simulation.world import Wire, World, hold

#: The time for which a daemon waits for the answer of the other one.
GIVE_SECONDS = 5.0
#: The time for commands under way to end before a move.
SETTLE_SECONDS = 5.0
TENANT = "t"


def chained(before: int, number: int) -> int:
    """The value of a command after all before it."""
    return (before * 31 + number) % (1 << 61)


@dataclass(frozen=True, slots=True)
class _Image:
    """A session between two commands."""

    secret_digest: bytes
    last: int
    value: int
    did: tuple[int, ...]
    acknowledged: int
    messages: tuple[bytes, ...]


@dataclass(eq=False)
class _Session:
    """A session at one daemon."""

    digest: bytes
    attaching: Attaching
    log: CompletionLog
    last: int = 0
    value: int = 0
    did: list[int] = field(default_factory=list)
    stream: Stream | None = None
    waiting: list[c.Command] = field(default_factory=list)
    #: Commands that came while it is held still.
    kept: list[c.Command] | None = None
    is_busy = is_closed = is_claimed = False
    expires: float = float("inf")

    @property
    def is_at_rest(self) -> bool:
        return not (self.waiting or self.is_busy)

    def image(self, digest: bytes) -> _Image:
        messages = self.log.since(self.log.acknowledged)
        return _Image(digest, self.last, self.value, tuple(self.did), self.log.acknowledged, messages)


class _Daemon:
    """Sessions by secret, and the decisions about those that come and go."""

    def __init__(self, world: World, name: str, *, is_durable: bool) -> None:
        self._world, self.name, self.is_durable = world, name, is_durable
        self.is_up, self.lives = True, 0
        #: The images on its disk, by the digest of the secret.
        self.disk: dict[bytes, _Image] = {}
        self._begin()

    def _begin(self) -> None:
        self.incarnation = f"{self.name}{self.lives}".encode()
        self.sessions: dict[bytes, _Session] = {}
        self.departures, self.arrivals = Departures(), Arrivals()

    @property
    def all(self) -> list[_Session]:
        return [one for one in self.sessions.values() if not one.is_closed]

    def open(self, token: bytes) -> None:
        """Open a session."""
        made = _Session(digest_of(token), Attaching(self.incarnation), CompletionLog())
        made.is_claimed = True
        self.sessions[token] = made
        if self.is_durable:
            self.disk[made.digest] = made.image(made.digest)

    def kill(self) -> None:
        """End with everything but the disk; and begin again after a while."""
        for one in self.all:
            one.is_closed = True
            if one.stream is not None:
                one.stream.is_over = True
                self._world.soon(one.stream.cut)
                gone = UnavailableError("the daemon is gone")
                self._world.soon(partial(one.stream.end, gone))
        self.is_up = False
        self.lives += 1
        self._world.after(1.0 + self._world.random.random(), self._start)

    def _start(self) -> None:
        self._begin()
        self.is_up = True
        for image in self.disk.values():
            self._take_in(image, has_moved_here=False)

    def _take_in(self, image: _Image, *, has_moved_here: bool) -> None:
        """Restore an image, unclaimed, for its lease."""
        log = CompletionLog(image.acknowledged, image.messages)
        how = Attaching(self.incarnation, True, has_moved_here, log.written)
        made = _Session(image.secret_digest, how, log, image.last, image.value, list(image.did))
        place = self._world.random.randbytes(16)
        self.sessions[place] = made
        self.arrivals.offer(image.secret_digest, place)
        self._let_expire(made)

    def _let_expire(self, session: _Session) -> None:
        session.expires = self._world.now + LEASE_SECONDS
        self._world.after(LEASE_SECONDS + 0.001, partial(self._expire, session))

    def _expire(self, session: _Session) -> None:
        if session.stream is None and not session.is_closed and self._world.now >= session.expires:
            session.is_closed = True
            self.disk.pop(session.digest, None)

    # Attaching

    def session(self, token: bytes) -> _Session:
        """As `Host.session`."""
        found = self.sessions.get(token)
        if found is None and (place := self.arrivals.claim(digest_of(token))) is not None:
            found = self.sessions[token] = self.sessions.pop(place)
            found.is_claimed = True
        is_gone = found is None or found.is_closed
        if is_gone and (moved := self.departures.where(token, TENANT, self._world.now)) is not None:
            raise moved
        if found is None or found.is_closed:
            raise SessionClosedError("the session is unknown or was closed")
        return found

    def attach(self, token: bytes, stream: Stream, attach: c.Attach | None) -> None:
        """Begin a stream, as `Conversation.begin` does."""
        if not self.is_up:
            stream.down.send(partial(stream.end, UnavailableError("nothing listens")))
            return
        kept: tuple[bytes, ...] = ()
        try:
            session = self.session(token)
            if attach is not None:
                self.departures.check(session)
                kept = session.log.since(session.attaching.received(attach))
        except HeliographError as error:
            stream.down.send(partial(stream.end, error))
            return
        if (before := session.stream) is not None:
            before.is_over = True
            before.down.send(partial(before.end, HandleExistsError("another connection has attached")))
        session.stream, session.expires = stream, float("inf")
        if attach is not None:
            answer = session.attaching.answer(attach, session.last)
            for message in (encode_results(c.CompletionBatch(0, attached=answer)), *kept):
                stream.down.send(partial(stream.deliver, message))

    def detach(self, stream: Stream) -> None:
        """Notice that a stream broke."""
        stream.is_over = True
        for session in self.all:
            if session.stream is stream:
                session.stream = None
                self._let_expire(session)

    # Work

    def receive(self, stream: Stream, message: bytes) -> None:
        """Take the commands of a message, unless the stream is over."""
        session = next((one for one in self.all if one.stream is stream), None)
        for part in stream.reader.read(message) if session is not None else ():
            if stream.is_over or session.is_closed:
                return
            if isinstance(part, c.Acknowledged):
                session.log.acknowledge(part.received)
                continue
            command = codec.decode_command(part)
            if session.kept is not None:
                session.kept.append(command)
            else:
                self._take(session, command)

    def _take(self, session: _Session, command: c.Command) -> None:
        hold(command.sequence == session.last + 1, f"command {command.sequence} after {session.last}")
        hold(session.is_claimed, "a copy that nobody has claimed takes a command")
        session.last = command.kind.through if isinstance(command.kind, c.Skip) else command.sequence
        session.waiting.append(command)
        self._work(session)

    def _work(self, session: _Session) -> None:
        if session.waiting and not session.is_busy:
            session.is_busy = True
            self._world.soon(partial(self._finish, session), 0.2)

    def _finish(self, session: _Session) -> None:
        if session.is_closed:
            return
        session.is_busy = False
        command = session.waiting.pop(0)
        done, listed = command.sequence, ()
        if isinstance(command.kind, c.Synchronize):
            session.did.append(command.sequence)
            session.value = chained(session.value, command.sequence)
        elif isinstance(command.kind, c.Skip):
            done = command.kind.through
        if command.notify:
            listed = (c.Completion(command.sequence, data=session.value.to_bytes(8, "little")),)
        self._tell(session, c.CompletionBatch(done, listed))
        self._work(session)

    def _tell(self, session: _Session, batch: c.CompletionBatch) -> None:
        message = encode_results(batch)
        session.log.append(message)
        if (stream := session.stream) is not None and not stream.is_over:
            stream.down.send(partial(stream.deliver, message))

    def snapshot(self) -> None:
        """Write what is at rest to the disk, and tell the clients."""
        for session in self.all if self.is_up and self.is_durable else ():
            if session.is_at_rest and session.kept is None and session.is_claimed:
                self.disk[session.digest] = session.image(session.digest)
                self._tell(session, c.CompletionBatch(session.last, durable_through=session.last))

    # Moves

    def move(
        self, token: bytes, other: _Daemon, answer: Callable[[SessionMove | HeliographError], None]
    ) -> None:
        """Hand a session to another daemon, as `Moves.move` does."""
        try:
            if not self.is_up:
                raise UnavailableError("nothing listens")
            session = self.session(token)
            self.departures.begin(session)
        except HeliographError as error:
            answer(error)
            return
        if not session.is_at_rest:
            self._stays(session, SnapshotFailedError("commands are under way"), answer)
            return
        session.kept = []
        proof, life = self._world.random.randbytes(16), self.lives
        image = session.image(digest_of(moved_secret(token, proof)))
        ends: list[bool] = []

        def ended(error: HeliographError | None) -> None:
            if ends or self.lives != life:
                return
            ends.append(True)
            if error is None and not session.is_closed:
                self._give_up(token, session, other, proof, answer)
            else:
                self._stays(session, error or SessionClosedError("the session was closed"), answer)

        link, back = Wire(self._world, 1.0), Wire(self._world, 1.0)
        link.is_cut, back.is_cut = self._world.chance(0.1), self._world.chance(0.1)
        link.send(lambda: other.take(image, lambda found: back.send(partial(ended, found))))
        self._world.after(GIVE_SECONDS, partial(ended, UnavailableError("the other daemon does not answer")))

    def take(self, image: _Image, answer: Callable[[HeliographError | None], None]) -> None:
        """Take a session of another daemon, as `Moves.receive` does."""
        if not self.is_up or self._world.chance(0.1):
            answer(UnavailableError("it cannot be here"))
            return
        self._take_in(image, has_moved_here=True)
        if self.is_durable:
            self.disk[image.secret_digest] = image
        answer(None)

    def _stays(self, session: _Session, error: HeliographError, answer: Callable[[Any], None]) -> None:
        kept, session.kept = session.kept or [], None
        self.departures.end(session)
        for command in kept:
            if not session.is_closed:
                self._take(session, command)
        answer(error)

    def _give_up(
        self,
        token: bytes,
        session: _Session,
        other: _Daemon,
        proof: bytes,
        answer: Callable[[SessionMove | HeliographError], None],
    ) -> None:
        error = MovedError(f"the session is at {other.name} now").to(other.name, proof)
        until, is_told = self._world.now + LEASE_SECONDS, session.stream is not None
        self.departures.give_up(token, error, TENANT, until, is_told=is_told)
        self._world.after(LEASE_SECONDS, partial(self.disk.pop, session.digest, None))
        session.is_closed, session.kept = True, None
        self.departures.end(session)
        if (stream := session.stream) is not None:
            stream.is_over = True
            stream.down.send(partial(stream.end, error))
        answer(SessionMove(session.last, 0, 0, 0.0))


@dataclass(eq=False)
class _Open:
    """A call that was not answered so far, and where it was made."""

    call: Call
    answered: Callable[[Any], None]
    name: str


class _Client:
    """A client with the real core, that connects again, follows, and moves."""

    def __init__(self, world: World, daemons: dict[str, _Daemon], token: bytes, *, is_durable: bool) -> None:
        self._world, self._daemons, self.token = world, daemons, token
        self.at = "a"
        self.core = ClientCore(LIMITS)
        self.core.has_lease = True
        self.reconnecting = Reconnecting(LEASE_SECONDS, world.random.random)
        if is_durable:
            self.core.journal = CommandJournal(2**20)
            self.reconnecting.is_durable = True
        self._incarnation = daemons["a"].incarnation
        self.sent: list[Pending] = []
        #: The fired commands, and how often each.
        self.fired: dict[Pending, int] = {}
        self.values: dict[int, int] = {}
        self.error: HeliographError | None = None
        self.moved = self.stayed = 0
        self._call: _Open | None = None
        self._moving = False
        self.begin()

    @property
    def daemon(self) -> _Daemon:
        return self._daemons[self.at]

    def begin(self, attach: c.Attach | None = None) -> None:
        """Open a stream."""
        self.stream = Stream(self._world, self._came, self._ended)
        self._completions = CompletionReader()
        self.stream.up.send(partial(self.daemon.attach, self.token, self.stream, attach))

    def send(self) -> None:
        if self.core.lost is not None or len(self.sent) >= 300:
            return
        try:
            pending = self.core.send(c.Synchronize(), observed=True)
        except LimitExceededError:
            return
        pending.add_callback(partial(self._fire, pending))
        self.sent.append(pending)
        self.flush()

    def _fire(self, pending: Pending) -> None:
        self.fired[pending] = self.fired.get(pending, 0) + 1
        if pending.error is None and pending.completion is not None:
            self.values[pending.sequence] = int.from_bytes(pending.completion.data, "little")

    def flush(self) -> None:
        """Send what may leave."""
        send_all(self.core, self.stream, self.daemon.receive)
        self._settle()

    def _settle(self) -> None:
        for outcome in self.core.take_settled():
            outcome.fire()

    # The connection

    def _came(self, stream: Stream, message: bytes) -> None:
        if stream is not self.stream or self.core.lost is not None:
            return
        batch = self._completions.read(message)
        try:
            if batch.attached is not None:
                self._attached(batch.attached)
            else:
                self.core.apply(batch, len(message))
        except HeliographError as error:
            self._give_up(error)
            return
        self._settle()
        self.flush()

    def _attached(self, answer: c.Attached) -> None:
        self.core.attached(answer)
        self.reconnecting.attached()
        self._incarnation = answer.incarnation
        if self.core.repetition.is_of_restart:
            self.drive(repeat(self.core), lambda _: None)
        if (call := self._call) is not None:
            self._call = None
            if call.name != self.at:
                call.answered(MovedError("the session has moved"))
            else:
                self._ask(call.call, call.answered)

    def cut(self) -> None:
        """Cut the stream. Each side notices in its own time."""
        stream, daemon = self.stream, self.daemon
        stream.cut()
        self._world.soon(partial(daemon.detach, stream), 3.0)
        self._world.soon(partial(self._ended, stream, UnavailableError("the connection broke")))

    def _ended(self, stream: Stream, error: HeliographError) -> None:
        if stream is not self.stream or self.core.lost is not None:
            return
        instruction = self.reconnecting.broke(error, self._world.now)
        if isinstance(instruction, GiveUp):
            self._give_up(instruction.error)
            return
        if self.core.is_attached:
            self.core.detached()
            self._settle()
        pause = 0.0
        if isinstance(instruction, Follow):
            moved = instruction.moved
            self.at, self.token = moved.url, moved_secret(self.token, moved.proof)
        else:
            pause = instruction.pause_seconds
        self.stream = Stream(self._world, self._came, self._ended)
        self._world.after(pause, partial(self._dial, self.stream))

    def _dial(self, awaited: Stream) -> None:
        if awaited is self.stream and self.core.lost is None:
            self.reconnecting.dialling()
            self.begin(self.core.attach(self._incarnation))
            if self._world.chance(0.2):
                self.cut()

    def _give_up(self, error: HeliographError) -> None:
        self.error = error
        self.core.connection_lost(error)
        self._settle()
        if (call := self._call) is not None:
            self._call = None
            call.answered(error)

    # Procedures

    def drive(self, procedure: Procedure[Any], ended: Callable[[Any], None]) -> None:
        """Run a procedure in virtual time. `ended` gets its result or its error."""
        self._step(procedure, ended, lambda: next(procedure))

    def _step(self, procedure: Procedure[Any], ended: Callable[[Any], None], go: Callable[[], Any]) -> None:
        try:
            effect = go()
        except StopIteration as over:
            ended(over.value)
        except HeliographError as error:
            ended(error)
        else:
            self._perform(procedure, ended, effect)
        self.flush()

    def _perform(self, procedure: Procedure[Any], ended: Callable[[Any], None], effect: Any) -> None:
        def on(found: Any = None) -> None:
            if isinstance(found, HeliographError):
                self._step(procedure, ended, partial(procedure.throw, found))
            else:
                self._step(procedure, ended, partial(procedure.send, found))

        match effect:
            case WaitFor(outcome):
                outcome.add_callback(lambda: self._world.after(0.0, on))
            case Compute():
                # A look at the other daemon, or a pause.
                self._world.soon(on, 0.1)
            case Call():
                self._ask(effect, on)
            case _:
                raise AssertionError(f"{effect} has no place here")

    def _ask(self, call: Call, answered: Callable[[Any], None]) -> None:
        """Ask the daemon to move the session; once more after each break, as calls are."""
        made = self._call = _Open(call, answered, self.at)

        def came(found: SessionMove | HeliographError) -> None:
            if self._call is made:
                self._call = None
                answered(found)

        other = self._daemons["b" if self.at == "a" else "a"]
        back = Wire(self._world, 0.5)
        back.is_cut = self._world.chance(0.2)
        stream = self.stream
        if back.is_cut:
            self._world.soon(lambda: self.cut() if stream is self.stream else None)
        asking = partial(self.daemon.move, self.token, other, lambda found: back.send(partial(came, found)))
        self.stream.up.send(asking)

    def move(self) -> None:
        """Move to the other daemon, as `transport.moving.move` does."""
        if self._moving or self.core.lost is not None:
            return
        self._moving = True
        moving = Moving(self.core, "there", lambda: None, SETTLE_SECONDS)
        state = {"is_settled": False}

        def over(found: Any) -> None:
            self.moved += not isinstance(found, HeliographError)
            self.stayed += isinstance(found, HeliographError)
            moving.end()
            self._moving = False
            self.flush()

        def settled(found: Any) -> None:
            if state["is_settled"]:
                return
            state["is_settled"] = True
            if isinstance(found, HeliographError):
                over(found)
            else:
                self.drive(moving.hand_over(), over)

        self._world.after(SETTLE_SECONDS, lambda: settled(DeadlineExceededError("commands are under way")))
        self.drive(moving.settle(), settled)


class SimulatedMove:
    """A client whose session goes between two daemons."""

    def __init__(self, seed: int, actions: int = 60) -> None:
        self.world = World(seed)
        self._is_durable = self.world.chance(0.5)
        made = [_Daemon(self.world, name, is_durable=self._is_durable) for name in "ab"]
        self.daemons = {one.name: one for one in made}
        self._first_token = self.world.random.randbytes(16)
        self.daemons["a"].open(self._first_token)
        self.client = _Client(self.world, self.daemons, self._first_token, is_durable=self._is_durable)
        self._has_thief = self._jumped = False
        for number in range(actions):
            self.world.after(number * 0.4, self._act)

    def run(self) -> int:
        """Let everything happen. Return the number of events; raises Violation."""
        events = self.world.run(self._check)
        self._check_end()
        return events

    def _act(self) -> None:
        chance, client = self.world.chance, self.client
        for _ in range(self.world.random.choice((0, 1, 4))):
            client.send()
        if chance(0.2):
            client.move()
        if chance(0.15):
            client.cut()
        for daemon in self.daemons.values():
            if self._is_durable and chance(0.2):
                daemon.snapshot()
            if self._is_durable and daemon.is_up and chance(0.03):
                daemon.kill()
        if chance(0.1):
            self._forge()
        if not self._is_durable and not self._has_thief and chance(0.01):
            self._steal()
        if chance(0.005):
            self._jumped = True
            self.world.now += 2 * LEASE_SECONDS

    def _forge(self) -> None:
        """A client with the first secret, but without proof, tries to get the copy of a daemon."""
        daemon = self.world.random.choice(list(self.daemons.values()))
        forged = moved_secret(self._first_token, self.world.random.randbytes(16))
        got: list[object] = []
        stream = Stream(self.world, lambda _, message: got.append(message), lambda _, error: None)
        before = {id(one): one.is_claimed for one in daemon.all}
        daemon.attach(forged, stream, c.Attach(0))
        claimed = any(one.is_claimed and not before.get(id(one), True) for one in daemon.all)
        hold(not got and not claimed, "a forged secret claims a session")

    def _steal(self) -> None:
        """Another client has the secret, and claims to have received nothing."""
        self._has_thief = True
        daemon, token = self.client.daemon, self.client.token
        stream = Stream(self.world, lambda *_: None, lambda *_: None)
        daemon.attach(token, stream, c.Attach(0))

    def _check(self) -> None:
        copies = [one for daemon in self.daemons.values() for one in daemon.all]
        live = [one for one in copies if one.is_claimed and one.stream is not None and not one.stream.is_over]
        hold(len(live) <= 1, "two copies of the session take commands")
        for one in copies:
            value = 0
            for number in one.did:
                value = chained(value, number)
            hold(one.value == value and one.did == sorted(set(one.did)), "a command was done twice")
        hold(all(count == 1 for count in self.client.fired.values()), "a result came twice")

    def _check_end(self) -> None:
        client = self.client
        hold(all(one.done for one in client.sent), "a command hangs")
        hold(not client._moving, "a move hangs")
        if client.core.lost is None:
            state = client.reconnecting.state
            hold(state is ConnectionState.CONNECTED, "it is connected and does not know")
            session = client.daemon.session(client.token)
            numbers = [one.sequence for one in client.sent]
            hold(session.did == numbers, "a command was lost, or done in another order")
            self._check_values(numbers)
            hold(all(one.error is None for one in client.sent), "a command failed")
            return
        was_taken = isinstance(client.error, HandleExistsError | ProtocolError) and self._has_thief
        was_late = isinstance(client.error, SessionClosedError | UnavailableError) and self._jumped
        hold(was_taken or was_late, f"the session was lost: {client.error!r}")

    def _check_values(self, numbers: list[int]) -> None:
        value = 0
        for number in numbers:
            value = chained(value, number)
            hold(self.client.values.get(number) == value, f"command {number} has another value")
