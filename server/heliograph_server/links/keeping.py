"""The memory of another daemon as the medium of a store: KeeperService, from the owner's side.

A thread keeps the stream by which this daemon holds its state, and comes back on a new one when it
breaks. This daemon knows what the keeper has: the keeper lists its files at the beginning of a
stream, and no other daemon changes them. A call whose outcome is unknown ends the stream, and late
calls of an ended stream are refused by their epoch; so the list is right for as long as its stream
lasts.
"""

from __future__ import annotations

import errno
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from heliograph.transport.channels import open_channel
from heliograph_proto.addresses import Address, Shown, nothing_shown
from heliograph_proto.codec.bulk import LEAST_PIECE_BYTES, decode_piece, encode_piece
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import (
    ConfigurationError,
    HandleExistsError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.v1 import keeper_pb2
from heliograph_server.links import links
from heliograph_server.resources.failures import typed
from heliograph_server.state.files import READ_BYTES, ReadSpace
from heliograph_server.state.medium import Each, MediumLostError, ReadBlock

logger = logging.getLogger(__name__)

SERVICE = keeper_pb2.DESCRIPTOR.services_by_name["KeeperService"].full_name
HOLD, PUT, RENAME, GET, REMOVE = (f"/{SERVICE}/{name}" for name in ("Hold", "Put", "Rename", "Get", "Remove"))
#: How long a daemon that starts waits for the keeper, and for an earlier owner to be noticed as gone.
START_SECONDS, HELD_SECONDS = 30.0, 3.0
#: How long after the end of a stream writes wait for the next one, and how long a read waits.
WRITE_SECONDS, READ_SECONDS = 5.0, 15.0
#: The time limit of a call, besides a second for each MiB that it puts.
CALL_SECONDS = 15.0
#: The shortest and longest pause between two attempts to connect.
PAUSE_SECONDS = 0.1, 2.0
#: The connections for bytes.
BULK_CHANNELS = 2
#: The most files that a request names.
MOST_FILES = 1000
#: How long closing waits for the thread.
END_SECONDS = 5.0
#: Refusals that another attempt does not change.
_FINAL = (
    ConfigurationError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError, UnsupportedError,
)  # fmt: skip


class KeeperError(OSError):
    """An error of the keeper, with what to do about it."""

    def __init__(self, number: int, why: str, advice: str = "") -> None:
        super().__init__(number, why)
        self.advice = advice


class _Link:
    """The channels of one stream."""

    def __init__(self, open_one: Callable[[], grpc.Channel]) -> None:
        self.held = open_one()
        self._bulk = [open_one() for _ in range(BULK_CHANNELS)]
        self._turns = itertools.count()
        self.state = keeper_pb2.KeptState()
        self.keeper = b""
        self.piece_bytes = 0
        self.call: Any = None

    @property
    def bulk(self) -> grpc.Channel:
        """A connection for bytes."""
        return self._bulk[next(self._turns) % BULK_CHANNELS]

    def close(self) -> None:
        """End all calls. Idempotent."""
        if self.call is not None:
            self.call.cancel()
        for channel in (self.held, *self._bulk):
            channel.close()


class KeeperMedium:
    """A `Medium` in the memory of another daemon.

    `own`: the identity of this daemon's own keeper. Raises ConfigurationError for a keeper that
    does not take the state, or that cannot be reached for `start_seconds`.
    """

    def __init__(
        self,
        address: Address,
        name: str,
        shown: Shown = nothing_shown,
        *,
        own: bytes = b"",
        silence_seconds: float = links.SILENCE_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._address, self._url, self._name = links.address_of(str(address)), str(address), name
        self._credentials, self._own = shown, own
        self._options = links.channel_options(silence_seconds)
        self._changed = threading.Condition()
        #: The stream that holds the state, once its list is complete.
        self._link: _Link | None = None
        self._opening: _Link | None = None
        #: Names this object alone, which no other process has: its threads would not be there.
        self._owner = secrets.token_bytes(16)
        #: The keeper and the epoch of the last stream.
        self._earlier, self._epoch = b"", 0
        #: The sizes of the keeper's files, by path.
        self._files: dict[str, int] = {}
        #: Held while files are removed: a name that is given meanwhile waits.
        self._removing = threading.Lock()
        #: Files that are to be removed, also those that could not be so far: as good as gone.
        self._garbage: set[str] = set()
        self._losses = 0
        #: When the last stream ended.
        self._lost_at = 0.0
        self._is_taken_over = self._is_over = False
        self._why: HeliographError | None = None
        self._thread = threading.Thread(target=self._run, name="heliograph-keeper", daemon=True)
        self._thread.start()
        self._cleaner = threading.Thread(target=self._clean, name="heliograph-garbage", daemon=True)
        self._cleaner.start()
        try:
            self._start(start_seconds)
        except BaseException:
            self.close()
            raise
        logger.info("%s has %d files of earlier sessions", self.where, len(self._files))

    def __repr__(self) -> str:
        return f"<KeeperMedium {self._name!r} at {self._url}>"

    @property
    def shown(self) -> str:
        """As `Medium.shown`."""
        return f"the memory of {self._url}"

    @property
    def where(self) -> str:
        """As `Medium.where`."""
        return f"the state {self._name!r} in {self.shown}"

    @property
    def losses(self) -> int:
        """As `Medium.losses`."""
        return self._losses

    @property
    def is_taken_over(self) -> bool:
        """As `Medium.is_taken_over`."""
        return self._is_taken_over

    @property
    def is_reachable(self) -> bool:
        """As `Medium.is_reachable`."""
        return self._link is not None

    # The stream

    def _start(self, seconds: float) -> None:
        began = time.monotonic()
        with self._changed:
            while self._link is None:
                why, left = self._why, began + seconds - time.monotonic()
                if isinstance(why, HandleExistsError):
                    left = min(left, began + HELD_SECONDS - time.monotonic())
                if isinstance(why, _FINAL) or left <= 0:
                    raise self._not_started(why, seconds)
                self._changed.wait(left)

    def _not_started(self, why: HeliographError | None, seconds: float) -> ConfigurationError:
        if isinstance(why, HandleExistsError):
            return ConfigurationError(
                f"another daemon keeps the state of its sessions in {self.where}",
                advice="end that daemon, or choose another name: --state URL/NAME",
            )
        if isinstance(why, _FINAL):
            return ConfigurationError(
                f"{self._url} does not keep the state of sessions: {why.message}", advice=why.advice
            )
        return ConfigurationError(
            f"cannot reach {self._url} for {seconds:g} s, which keeps the state of sessions: "
            f"{why.message if why is not None else 'no answer'}",
            advice="start that daemon, then this one again; if what it keeps is lost, choose another place: "
            "--state DIR",
        )

    def _run(self) -> None:
        pause, longest = PAUSE_SECONDS
        while not self._is_over and not self._is_taken_over:
            had = self._losses, self._epoch
            try:
                self._hold()
                error: HeliographError = UnavailableError("it ended the stream")
            except grpc.RpcError as broken:
                error = _typed(broken)
            except Exception as broken:
                error = typed(broken, f"keeping state at {self._url}")
            pause = PAUSE_SECONDS[0] if had != (self._losses, self._epoch) else min(longest, 2 * pause)
            self._went(error)
            with self._changed:
                self._changed.wait_for(lambda: self._is_over, pause)

    def _hold(self) -> None:
        """Hold the state until the stream ends. Raises grpc.RpcError."""
        credentials = self._credentials(self._url)
        link = _Link(partial(open_channel, self._address, self._options, credentials))
        with self._changed:
            if self._is_over:
                link.close()
                return
            self._opening = link
        state = keeper_pb2.KeptState(name=self._name, epoch=self._epoch)
        request = keeper_pb2.HoldRequest(
            state=state, owner=self._owner, daemon=self._own, earlier=self._earlier
        )
        files: dict[str, int] = {}
        try:
            hold: Any = link.held.unary_stream(HOLD, None, None)
            link.call = hold(request.SerializeToString())
            for data in link.call:
                answer = keeper_pb2.HoldResponse.FromString(data)
                if answer.is_taken_over:
                    self._is_taken_over = True
                    return
                if answer.epoch:
                    link.state = keeper_pb2.KeptState(name=self._name, epoch=answer.epoch)
                    link.keeper, link.piece_bytes = answer.keeper, answer.piece_bytes
                files.update((one.path, one.size_bytes) for one in answer.files)
                if answer.is_complete:
                    self._came(link, files)
        finally:
            self._end(link)
            with self._changed:
                self._opening = None
            link.close()

    def _end(self, link: _Link) -> None:
        """A stream has ended."""
        with self._changed:
            if self._link is link:
                self._link, self._lost_at = None, time.monotonic()

    def _came(self, link: _Link, files: dict[str, int]) -> None:
        """The keeper's list is complete."""
        with self._changed:
            known = (one for one in self._files if one not in self._garbage)
            gone = [one for one in known if one not in files and not one.startswith("parts/")]
            was_away = self._earlier and self._why is not None
            self._earlier, self._epoch = link.keeper, link.state.epoch
            self._files, self._link, self._why = files, link, None
            self._losses += bool(gone)
            self._changed.notify_all()
        if gone:
            sessions = len({one.split("/")[1] for one in gone if one.startswith("sessions/")})
            logger.error(
                "%s is lost, with snapshots of %d sessions: that daemon was restarted, or forgot it. Whole "
                "snapshots are taken now; until then a crash of this daemon loses these sessions",
                self.where,
                sessions,
            )
        elif was_away:
            logger.info("%s can be reached again", self.where)

    def _went(self, error: HeliographError) -> None:
        """The stream has ended, or did not begin."""
        with self._changed:
            before, self._why = self._why, error
            self._changed.notify_all()
        if self._is_over or not self._earlier:
            return
        if self._is_taken_over:
            logger.error("another daemon has taken over %s: end this one", self.where)
        elif before is None or type(before) is not type(error):
            logger.warning(
                "%s cannot be reached, and snapshots fail meanwhile: %s", self.where, error.message
            )

    def _ready(self, seconds: float) -> _Link:
        """The stream, which is waited for. Raises KeeperError."""
        with self._changed:
            done = lambda: self._link is not None or self._is_over or self._is_taken_over  # noqa: E731
            self._changed.wait_for(done, seconds)
            if self._link is not None:
                return self._link
            why = self._why.message if self._why is not None else "no answer"
        if self._is_taken_over:
            raise KeeperError(errno.ESTALE, "another daemon has taken it over", "end this daemon")
        raise KeeperError(
            errno.EHOSTUNREACH, f"{self._url} cannot be reached: {why}", "see after that daemon"
        )

    def _failed(self, link: _Link, error: grpc.RpcError) -> KeeperError:
        """Return the error of a call. One whose outcome is unknown ends its stream."""
        found = _typed(error)
        match found:
            case LimitExceededError():
                return KeeperError(errno.ENOSPC, found.message, found.advice)
            case UnknownHandleError():
                return KeeperError(errno.ENOENT, found.message)
            case HandleExistsError():
                return KeeperError(errno.ESTALE, found.message)
            case PermissionDeniedError() | UnauthenticatedError():
                return KeeperError(errno.EACCES, found.message, found.advice)
        self._end(link)
        link.close()
        return KeeperError(errno.EHOSTUNREACH, f"{self._url} cannot be reached: {found.message}")

    # Writing

    def check(self) -> None:
        """As `Medium.check`. Waits a moment for a keeper that has just been lost."""
        self._for_writing()

    def _for_writing(self) -> _Link:
        return self._ready(max(0.0, self._lost_at + WRITE_SECONDS - time.monotonic()))

    def write(self, pieces: Iterable[memoryview], size_bytes: int) -> str:
        """As `Medium.write`."""
        link, part = self._for_writing(), f"parts/{secrets.token_hex(12)}"
        failures: list[Exception] = []
        file = keeper_pb2.KeptFile(path=part, size_bytes=size_bytes)
        first = keeper_pb2.PutRequest(state=link.state, file=file).SerializeToString()
        messages = _messages(first, pieces, link.piece_bytes, failures)
        try:
            put: Any = link.bulk.stream_unary(PUT, None, None)
            put(messages, timeout=CALL_SECONDS + size_bytes / 2**20)
        except (grpc.RpcError, ValueError) as error:
            if failures:
                raise failures[0] from None
            raise self._failed(link, _rpc_error(error)) from None
        with self._changed:
            if self._link is link:
                self._files[part] = size_bytes
        if failures:
            # All bytes had been sent.
            self.remove([part])
            raise failures[0]
        return part

    def name(self, parts: Mapping[str, str]) -> None:
        """As `Medium.name`."""
        self._for_writing()
        with self._removing, self._changed:
            # The stream whose list is known: what it has is there, or replaced.
            link = self._ready(0.0)
            self._garbage.difference_update(parts.values())
        for some in _batches(parts.items()):
            request = keeper_pb2.RenameRequest(state=link.state)
            for part, path in some:
                request.files.add(path=part, to=path)
            self._call(link, RENAME, request.SerializeToString())
            with self._changed:
                if self._link is link:
                    for part, path in some:
                        self._files[path] = self._files.pop(part, 0)

    def flush(self, paths: Iterable[str], each: Each) -> None:
        """As `Medium.flush`: a name in memory needs none."""

    def remove(self, paths: Iterable[str]) -> None:
        """As `Medium.remove`. Files that cannot be removed now are removed with the next ones."""
        with self._changed:
            self._garbage.update(paths)
        self._remove_garbage()

    def _clean(self) -> None:
        """Remove what could not be removed while the keeper was away. On a thread of its own, as
        the one of the stream is to notice its end."""
        last: _Link | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._link not in (None, last))  # noqa: B023
                if self._is_over:
                    return
                last = self._link
            self._remove_garbage()

    def _remove_garbage(self) -> None:
        with self._removing:
            with self._changed:
                link = self._link
                if link is None:
                    return
                # A file that the keeper does not list is not there.
                self._garbage.intersection_update(self._files)
                gone = sorted(self._garbage)
            try:
                for some in _batches(gone):
                    request = keeper_pb2.RemoveRequest(state=link.state, paths=some)
                    self._call(link, REMOVE, request.SerializeToString())
                    with self._changed:
                        # Else they stay garbage, so that the next list is not taken for a loss.
                        if self._link is link:
                            for path in some:
                                self._files.pop(path, None)
                                self._garbage.discard(path)
            except KeeperError as error:
                logger.warning("%s: files cannot be removed yet: %s", self.where, error.strerror)

    def remove_folder(self, path: str) -> None:
        """As `Medium.remove_folder`."""
        self.remove(self.paths(path))

    def _call(self, link: _Link, method: str, request: bytes) -> None:
        """Make a call with one answer. Raises KeeperError."""
        try:
            call: Any = link.bulk.unary_unary(method, None, None)
            call(request, timeout=CALL_SECONDS)
        except (grpc.RpcError, ValueError) as error:
            raise self._failed(link, _rpc_error(error)) from None

    # Reading

    def size_of(self, path: str) -> int | None:
        """As `Medium.size_of`."""
        with self._changed:
            return None if path in self._garbage else self._files.get(path)

    def paths(self, folder: str) -> Sequence[str]:
        """As `Medium.paths`."""
        with self._changed:
            found = [one for one in self._files if one.startswith(f"{folder}/")]
            return sorted(one for one in found if one not in self._garbage)

    def blocks(self, path: str) -> Iterator[ReadBlock]:
        """As `Medium.blocks`."""
        size_bytes = self._size(path)
        for offset in range(0, max(1, size_bytes), READ_BYTES):
            yield partial(self._block, path, offset, min(READ_BYTES, size_bytes - offset))

    def _block(
        self, path: str, offset: int, size_bytes: int, spaces: ReadSpace
    ) -> tuple[memoryview, memoryview]:
        space = spaces.take(size_bytes)
        read = 0
        for piece in self._get(path, offset, size_bytes):
            space[read : read + piece.nbytes] = piece
            read += piece.nbytes
        return space[:read], space

    def read(self, path: str, most_bytes: int) -> bytes:
        """As `Medium.read`."""
        return b"".join(self._get(path, 0, min(most_bytes, self._size(path))))

    def _size(self, path: str) -> int:
        size_bytes = self.size_of(path)
        if size_bytes is None:
            raise FileNotFoundError(errno.ENOENT, f"{path} is not in {self.shown}")
        return size_bytes

    def _get(self, path: str, offset: int, size_bytes: int) -> list[memoryview]:
        """Get a part of a file. Waits for a keeper that is away, and then raises MediumLostError."""
        end = time.monotonic() + READ_SECONDS
        while size_bytes:
            try:
                link = self._ready(max(0.0, end - time.monotonic()))
                return self._pieces(link, path, offset, size_bytes)
            except KeeperError as error:
                if error.errno == errno.ENOENT:
                    raise FileNotFoundError(errno.ENOENT, error.strerror) from None
                is_refused = error.errno in (errno.EACCES, errno.EIO)
                if is_refused or time.monotonic() >= end or self._is_taken_over or self._is_over:
                    raise MediumLostError(
                        f"{self.where} cannot be read: {error.strerror}",
                        advice=f"{error.advice or 'see after that daemon'}, then start this one again",
                    ) from None
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over, PAUSE_SECONDS[0])
        return []

    def _pieces(self, link: _Link, path: str, offset: int, size_bytes: int) -> list[memoryview]:
        request = keeper_pb2.GetRequest(
            state=link.state, path=path, offset_bytes=offset, size_bytes=size_bytes
        )
        try:
            get: Any = link.bulk.unary_stream(GET, None, None)
            answers = get(request.SerializeToString(), timeout=CALL_SECONDS)
            found, left = [], size_bytes
            for one in answers:
                found.append(_data(one))
                left -= found[-1].nbytes
                if left < 0:
                    answers.cancel()
                    raise KeeperError(errno.EIO, f"{self._url} sent more than was asked for")
        except (grpc.RpcError, ValueError) as error:
            raise self._failed(link, _rpc_error(error)) from None
        return found

    def size_bytes(self) -> int:
        """As `Medium.size_bytes`."""
        with self._changed:
            return sum(size for path, size in self._files.items() if path not in self._garbage)

    def advice(self, error: OSError) -> str:
        """As `Medium.advice`."""
        what = error.advice if isinstance(error, KeeperError) and error.advice else f"look after {self._url}"
        return f"{what}; the last snapshot stays, and runs go on"

    def close(self) -> None:
        """As `Medium.close`. Ends the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            link = self._link or self._opening
        if link is not None:
            link.close()
        for thread in (self._thread, self._cleaner):
            thread.join(END_SECONDS)


def _messages(
    first: bytes, pieces: Iterable[memoryview], most_bytes: int, failures: list[Exception]
) -> Iterator[bytes]:
    """Yield the messages of a file. If its bytes cannot be read, they end early, and the keeper
    drops it. On a thread of gRPC's."""
    yield first
    try:
        rest = b""
        for piece in pieces:
            # The keeper takes no small piece before the last one.
            start = min(piece.nbytes, most_bytes - len(rest)) if rest else 0
            rest += bytes(piece[:start])
            if len(rest) >= LEAST_PIECE_BYTES:
                yield encode_piece(rest)
                rest = b""
            while piece.nbytes - start >= LEAST_PIECE_BYTES:
                yield encode_piece(piece[start : start + most_bytes])
                start += most_bytes
            rest += bytes(piece[start:])
        if rest:
            yield encode_piece(rest)
    except Exception as error:
        failures.append(error)


def _data(message: bytes) -> memoryview:
    found = decode_piece(message)
    return memoryview(keeper_pb2.GetResponse.FromString(message).data) if found is None else found


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(items)
    while some := list(itertools.islice(remaining, MOST_FILES)):
        yield some


class _ClosedError(grpc.RpcError):
    """A call on channels that another thread has closed."""


def _rpc_error(error: Exception) -> grpc.RpcError:
    """gRPC raises ValueError for a call on a closed channel."""
    return error if isinstance(error, grpc.RpcError) else _ClosedError()


def _typed(error: Any) -> HeliographError:
    """The error of a failed call: the keeper's own if it sent one."""
    error.__traceback__ = None
    if isinstance(error, _ClosedError):
        return UnavailableError("the connection was closed")
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    found = error_from_metadata(tuple((key, value) for key, value in trailing or ()))
    if isinstance(found, UnauthenticatedError | PermissionDeniedError):
        return PermissionDeniedError(
            found.message, advice="give this daemon a token with the right 'pool' there: --pool-token FILE"
        )
    if found is not None:
        return found
    details = " ".join((error.details() or error.code().name).split())
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UnsupportedError("it knows no such call", advice="upgrade that daemon")
    return UnavailableError(details)
