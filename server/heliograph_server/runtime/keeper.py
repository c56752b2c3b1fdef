"""The states of other daemons in this one's memory: who holds which, and what is in them. Pure.

A state belongs to a tenant. One owner at a time holds it, and shows the epoch in which it does:
calls of an earlier owner are refused. A file is there once all its bytes came. A state whose owner
is gone is kept for a time, and then forgotten.

One thread, the event loop's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from heliograph_proto.codec.bulk import LEAST_PIECE_BYTES
from heliograph_proto.errors import (
    HandleExistsError,
    InvalidArgumentError,
    LimitExceededError,
    ProtocolError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.sessions import KeptStateStatus

#: The longest name of a state, and the longest path of a file, in characters.
MOST_NAME, MOST_PATH = 255, 255
#: The size of the name by which an owner is known again.
OWNER_BYTES = 16
#: The most states at once, of all tenants and of one that has a name.
MOST_STATES, MOST_OF_TENANT = 1024, 256
#: The memory that a file and a piece take besides their bytes, with all objects of Python.
FILE_BYTES, PIECE_BYTES = 1024, 512


@dataclass(slots=True)
class KeptBytes:
    """The bytes of a file, in pieces."""

    size_bytes: int
    #: The tenant that its memory counts for.
    tenant: str = ""
    pieces: list[memoryview] = field(default_factory=list)
    #: Where each of them begins.
    starts: list[int] = field(default_factory=list)
    kept_bytes: int = 0
    #: Those that came, of which some may not be kept yet.
    received_bytes: int = 0
    #: The memory that it takes.
    charged_bytes: int = 0

    def read(self, offset_bytes: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield a part of the bytes; those beyond the end are left out.

        Raises UnknownHandleError once the file is removed: a slow reader does not keep its memory.
        """
        end = min(self.size_bytes, offset_bytes + size_bytes)
        number = bisect_right(self.starts, offset_bytes) - 1
        while offset_bytes < end:
            if not self.pieces:
                raise UnknownHandleError("the file was removed while it was read")
            begin, piece = self.starts[number], self.pieces[number]
            yield piece[offset_bytes - begin : end - begin]
            offset_bytes = begin + len(piece)
            number += 1


@dataclass(slots=True, eq=False)
class State:
    """A state that is kept."""

    tenant: str
    name: str
    epoch: int
    owner: bytes
    #: The stream of its owner; None: the owner is gone.
    hold: Ownership | None
    #: When its owner went.
    idle_since: float = 0.0
    files: dict[str, KeptBytes] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<State {self.name!r} of {self.tenant or 'all'}: {len(self.files)} files>"

    @property
    def charged_bytes(self) -> int:
        """The memory that its files take."""
        return sum(one.charged_bytes for one in tuple(self.files.values()))


@dataclass(slots=True, eq=False)
class Ownership:
    """The hold of one stream of an owner."""

    state: State
    epoch: int
    #: True once the same owner came back on another stream.
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class KeeperFigures:
    """The states of a keeper at one moment, and totals since the daemon began."""

    limit_bytes: int = 0
    #: The memory that is taken, with files that are still coming.
    used_bytes: int = 0
    #: The same of each tenant.
    by_tenant: Mapping[str, int] = field(default_factory=dict)
    held: int = 0
    #: States whose owner is gone.
    waiting: int = 0
    forgotten: int = 0
    refused: int = 0
    #: Memory that waits for the next files.
    spare_bytes: int = 0


class TakenOverError(HandleExistsError):
    """Another owner has held the state since."""


class Keeper:
    """The states of other daemons. `identity` names this run of the keeper."""

    def __init__(self, limit_bytes: int, keep_seconds: float, identity: bytes) -> None:
        """`keep_seconds`: the time for which a state is kept without its owner."""
        self.identity, self.keep_seconds = identity, keep_seconds
        self._limit_bytes = limit_bytes
        self._states: dict[tuple[str, str], State] = {}
        self._last_epoch = 0
        self._used_bytes = self._forgotten = self._refused = 0
        self._used_by: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Keeper of {len(self._states)} states, {self._used_bytes:,} bytes>"

    @property
    def room_bytes(self) -> int:
        """The memory that may still be taken."""
        return self._limit_bytes - self._used_bytes

    def figures(self) -> KeeperFigures:
        """Return the figures of this moment. From any thread."""
        states = tuple(self._states.values())
        held = sum(one.hold is not None for one in states)
        by_tenant = {one.tenant: self._used_by[one.tenant] for one in states}
        counts = held, len(states) - held, self._forgotten, self._refused
        return KeeperFigures(self._limit_bytes, self._used_bytes, by_tenant, *counts)

    def status(self, now: float) -> tuple[KeptStateStatus, ...]:
        """Return the states for operators. From any thread."""
        return tuple(
            KeptStateStatus(
                one.name,
                one.tenant,
                one.charged_bytes,
                len(one.files),
                one.hold is not None,
                0.0 if one.hold is not None else max(0.0, now - one.idle_since),
            )
            for one in self.states
        )

    @property
    def states(self) -> Sequence[State]:
        """All states, in the order in which they were first held. From any thread."""
        return tuple(self._states.values())

    # Owners

    def hold(self, tenant: str, name: str, owner: bytes, epoch: int, daemon: bytes, now: float) -> Ownership:
        """Let an owner hold a state. `epoch`: that in which it held the state before, here; else 0.
        It may have missed later answers, and the first one: an owner is known by its name alone.

        Raises TakenOverError, HandleExistsError, InvalidArgumentError, LimitExceededError, and
        UnsupportedError if nothing is kept here.
        """
        if daemon == self.identity:
            raise InvalidArgumentError(
                "a daemon cannot keep its own state: it would end with it",
                advice="name another daemon, or a folder: --state DIR",
            )
        if not self._limit_bytes:
            raise UnsupportedError(
                "this daemon keeps no state of other daemons",
                advice="start it with --kept-state-size SIZE, such as 16GiB",
            )
        _check_name(name, owner)
        self.forget_due(now)
        found = self._states.get((tenant, name))
        if found is None:
            self._check_count(tenant)
            found = self._states[tenant, name] = State(tenant, name, self._next(), owner, None)
        elif epoch and owner != found.owner:
            raise TakenOverError(f"another daemon has taken over the state {name!r}")
        elif found.hold is not None and owner != found.owner:
            raise HandleExistsError(
                f"another daemon keeps the state of its sessions here as {name!r}",
                advice="end that daemon, or choose another name: --state URL/NAME",
            )
        else:
            # Late calls of the stream before are refused, and its parts get no names any more.
            found.epoch = self._next()
            self._remove(found, [path for path in found.files if path.startswith("parts/")])
        if found.hold is not None:
            found.hold.is_replaced = True
        found.owner = owner
        found.hold = Ownership(found, found.epoch)
        return found.hold

    def _check_count(self, tenant: str) -> None:
        if len(self._states) >= MOST_STATES:
            self._refused += 1
            raise LimitExceededError(f"{MOST_STATES:,} states are kept here, which is the most")
        if tenant and sum(one.tenant == tenant for one in self._states.values()) >= MOST_OF_TENANT:
            self._refused += 1
            raise LimitExceededError(
                f"{MOST_OF_TENANT:,} states of tenant {tenant!r} are kept here, the most of one tenant",
                advice="end daemons that keep empty states here, or wait until old states are forgotten",
            )

    def let_go(self, hold: Ownership, now: float) -> None:
        """The stream of an owner has ended. An empty state is forgotten at once."""
        state = hold.state
        if state.hold is not hold:
            return
        state.hold, state.idle_since = None, now
        if not state.files:
            self._states.pop((state.tenant, state.name), None)

    def forget_due(self, now: float) -> list[State]:
        """Forget the states whose owner did not come back in time, and return them."""
        due = [
            one
            for one in self._states.values()
            if one.hold is None and now - one.idle_since >= self.keep_seconds
        ]
        for state in due:
            del self._states[state.tenant, state.name]
            for file in state.files.values():
                self.give_up(file)
            self._forgotten += 1
        return due

    def _next(self) -> int:
        self._last_epoch += 1
        return self._last_epoch

    # Files

    def begin(
        self, tenant: str, name: str, epoch: int, path: str, size_bytes: int, quota_bytes: int = 0
    ) -> Coming:
        """Begin to put a file. `quota_bytes`: what all states of the tenant may take; 0: any.

        Raises HandleExistsError, InvalidArgumentError, LimitExceededError."""
        state = self._state(tenant, name, epoch)
        _check_path(path)
        if path in state.files:
            raise InvalidArgumentError(f"{path} is there already")
        coming = Coming(self, state, epoch, path, KeptBytes(size_bytes, tenant), quota_bytes)
        self.charge(coming.file, size_bytes + FILE_BYTES, quota_bytes)
        return coming

    def charge(self, file: KeptBytes, more_bytes: int, quota_bytes: int) -> None:
        """Take memory for a file. Raises LimitExceededError."""
        used_bytes = self._used_by[file.tenant]
        if quota_bytes and used_bytes + more_bytes > quota_bytes:
            self._refused += 1
            name = f"tenant {file.tenant!r}" if file.tenant else "all owners"
            raise LimitExceededError(
                f"the quota of {name} is {quota_bytes:,} bytes for states of other daemons: "
                f"{used_bytes:,} are used, so no room for {more_bytes:,} more",
                advice="raise the quota kept_state_bytes there",
            )
        if self._used_bytes + more_bytes > self._limit_bytes:
            self._refused += 1
            raise LimitExceededError(
                f"no room for {more_bytes:,} bytes more: {self._used_bytes:,} of {self._limit_bytes:,} "
                "bytes for states of other daemons are taken",
                advice="raise --kept-state-size there",
            )
        file.charged_bytes += more_bytes
        self._used_bytes += more_bytes
        self._used_by[file.tenant] += more_bytes

    def give_up(self, file: KeptBytes) -> None:
        """Give the memory of a file back."""
        self._used_bytes -= file.charged_bytes
        self._used_by[file.tenant] -= file.charged_bytes
        file.charged_bytes = 0
        file.pieces, file.starts = [], []

    def finish(self, coming: Coming) -> None:
        """A file is whole. Raises HandleExistsError, InvalidArgumentError."""
        state = self._state(coming.state.tenant, coming.state.name, coming.epoch)
        if coming.path in state.files:
            raise InvalidArgumentError(f"{coming.path} is there already")
        state.files[coming.path] = coming.file

    def rename(self, tenant: str, name: str, epoch: int, files: Sequence[tuple[str, str]]) -> None:
        """Give files other paths, all or none. Raises UnknownHandleError, HandleExistsError,
        InvalidArgumentError."""
        state = self._state(tenant, name, epoch)
        for path, to in files:
            _check_path(to)
            if path not in state.files:
                raise _missing(path)
        if len({path for path, _ in files}) < len(files):
            raise InvalidArgumentError("a file is renamed twice")
        moved = [(to, state.files.pop(path)) for path, to in files]
        for to, file in moved:
            if (before := state.files.get(to)) is not None:
                self.give_up(before)
            state.files[to] = file

    def file(self, tenant: str, name: str, epoch: int, path: str) -> KeptBytes:
        """Return a file. Raises UnknownHandleError, HandleExistsError."""
        found = self._state(tenant, name, epoch).files.get(path)
        if found is None:
            raise _missing(path)
        return found

    def remove(self, tenant: str, name: str, epoch: int, paths: Iterable[str]) -> None:
        """Remove files. Raises HandleExistsError."""
        self._remove(self._state(tenant, name, epoch), paths)

    def _remove(self, state: State, paths: Iterable[str]) -> None:
        for path in paths:
            if (file := state.files.pop(path, None)) is not None:
                self.give_up(file)

    def _state(self, tenant: str, name: str, epoch: int) -> State:
        """The state in an epoch. Only its owner knows the epoch."""
        found = self._states.get((tenant, name))
        if found is None or not epoch or found.epoch != epoch or found.hold is None:
            raise HandleExistsError(
                f"the state {name[:MOST_NAME]!r} is not held in this epoch: another daemon may have it",
                advice="hold it again",
            )
        return found


@dataclass(slots=True, eq=False)
class Coming:
    """A file that is being put."""

    keeper: Keeper
    state: State
    epoch: int
    path: str
    file: KeptBytes
    #: The memory that all states of its tenant may take.
    quota_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """The bytes that are not kept yet."""
        return self.file.size_bytes - self.file.kept_bytes

    def came(self, size_bytes: int) -> None:
        """Check the size of a piece that came. Raises ProtocolError."""
        file = self.file
        if not size_bytes or file.received_bytes + size_bytes > file.size_bytes:
            raise ProtocolError(
                f"a piece of {size_bytes:,} bytes after {file.received_bytes:,} of {file.size_bytes:,}"
            )
        is_last = file.received_bytes + size_bytes == file.size_bytes
        if size_bytes < LEAST_PIECE_BYTES and not is_last:
            raise ProtocolError(
                f"a piece of {size_bytes:,} bytes; {LEAST_PIECE_BYTES:,} are the fewest but for the last one"
            )
        file.received_bytes += size_bytes

    def keep(self, data: memoryview) -> None:
        """Keep the next bytes of those that came. Raises LimitExceededError."""
        file = self.file
        self.keeper.charge(file, PIECE_BYTES, self.quota_bytes)
        file.pieces.append(data)
        file.starts.append(file.kept_bytes)
        file.kept_bytes += data.nbytes

    def finish(self) -> None:
        """The last piece has come. Raises ProtocolError, HandleExistsError, InvalidArgumentError."""
        if self.file.received_bytes != self.file.size_bytes:
            raise ProtocolError(
                f"a file of {self.file.size_bytes:,} bytes ended after {self.file.received_bytes:,}"
            )
        self.keeper.finish(self)

    def give_up(self) -> None:
        """It does not come."""
        self.keeper.give_up(self.file)


def _missing(path: str) -> UnknownHandleError:
    return UnknownHandleError(f"{path[:MOST_PATH]} is not there")


def _check_name(name: str, owner: bytes) -> None:
    if not 0 < len(name) <= MOST_NAME or not name.isprintable():
        raise InvalidArgumentError(
            f"{name[:MOST_NAME]!r} is no name of a state",
            advice=f"a name has 1 to {MOST_NAME} printable characters: --state URL/NAME",
        )
    if len(owner) != OWNER_BYTES:
        raise InvalidArgumentError(f"an owner is named by {OWNER_BYTES} bytes, not {len(owner)}")


def _check_path(path: str) -> None:
    parts = path.split("/")
    if len(path) > MOST_PATH or not path.isprintable() or not all(parts) or not {".", ".."}.isdisjoint(parts):
        raise InvalidArgumentError(f"{path[:MOST_PATH]!r} is no path of a file")
