"""KeeperService: the states of other daemons' sessions, in this one's memory.

It needs no devices, so it answers while they start: two daemons that keep each other's state can
start together. Bytes lie in spaces of 4 MiB; a rest that fills none stays in its messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import replace
from mmap import mmap
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc import aio

from heliograph_proto.codec.bulk import decode_piece, encode_piece
from heliograph_proto.errors import LimitExceededError, ProtocolError, UnavailableError
from heliograph_proto.sessions import KeptStateStatus, Quota
from heliograph_proto.v1 import keeper_pb2
from heliograph_server.resources.principals import current_principal
from heliograph_server.rpc.keeping.spaces import SPACE_BYTES, Spaces, new_pages
from heliograph_server.rpc.receiving import first_of, next_of
from heliograph_server.rpc.requests import Context, Requests, gives_bytes, takes_bytes
from heliograph_server.runtime.host import shut_down
from heliograph_server.runtime.keeper import Coming, Keeper, KeeperFigures, Ownership, State, TakenOverError

logger = logging.getLogger(__name__)

#: The time without a file that comes after which a burst of files is over.
QUIET_SECONDS = 0.2
#: The least time between two log lines about files without room.
LOG_SECONDS = 30.0
#: The most bytes of a piece, and of what surrounds it.
PIECE_BYTES, HEADER_BYTES = 2**20, 1024
#: The largest request that is no piece, the most files that it names, and those of one answer.
MOST_BYTES, MOST_FILES = 2**20, 1000

M = TypeVar("M", bound=Message)


class KeeperService:
    """Keeps files of other daemons."""

    def __init__(
        self,
        keeper: Keeper,
        threads: Executor,
        piece_bytes: int = PIECE_BYTES,
        quota: Callable[[], Quota] = Quota,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads` make memory. `piece_bytes`: the largest piece that the server takes.
        `quota` returns that of callers without a tenant."""
        self.keeper = keeper
        self._threads = threads
        self.spaces = Spaces(lambda: keeper.room_bytes)
        #: Refusals until then are not logged.
        self._silent_until = 0.0
        #: The files that are coming.
        self._coming = 0
        #: Makes memory for the next burst of files.
        self._ahead: asyncio.Task[None] | None = None
        self._piece_bytes = min(PIECE_BYTES, piece_bytes)
        self._quota = quota
        self._clock = clock
        #: The streams of owners, each with what ends it.
        self._open: dict[Ownership, asyncio.Event] = {}
        self._is_over = False

    def add_to(self, server: aio.Server, requests: Requests) -> None:
        """Register the service with a server."""
        requests.serve(server, keeper_pb2.DESCRIPTOR.services_by_name["KeeperService"], self)

    def figures(self) -> KeeperFigures:
        """Return the figures of this moment. From any thread."""
        return replace(self.keeper.figures(), spare_bytes=self.spaces.waiting * SPACE_BYTES)

    def status(self) -> tuple[KeptStateStatus, ...]:
        """Return the states for operators."""
        return self.keeper.status(self._clock())

    @takes_bytes
    @gives_bytes
    async def Hold(self, _requests: object, context: Context) -> None:
        request = await _one(context, keeper_pb2.HoldRequest)
        epoch = request.state.epoch if request.earlier == self.keeper.identity else 0
        tenant, now = current_principal().tenant, self._clock()
        self._forget(now)
        try:
            hold = self.keeper.hold(tenant, request.state.name, request.owner, epoch, request.daemon, now)
        except TakenOverError:
            await context.write(keeper_pb2.HoldResponse(is_taken_over=True).SerializeToString())
            return
        ended = self._open[hold] = asyncio.Event()
        for other, event in self._open.items():
            if other.is_replaced:
                event.set()
        logger.info("%s is held in epoch %d", hold.state, hold.epoch)
        try:
            for message in _listing(self.keeper.identity, hold, self._piece_bytes):
                await context.write(message.SerializeToString())
            await ended.wait()
            raise shut_down() if self._is_over else UnavailableError("its owner came back on another stream")
        finally:
            del self._open[hold]
            self._let_go(hold)

    def _let_go(self, hold: Ownership) -> None:
        self.keeper.let_go(hold, self._clock())
        if hold.is_replaced or self._is_over:
            return
        seconds = self.keeper.keep_seconds
        logger.info("%s has no owner any more; it is kept for %g s", hold.state, seconds)
        asyncio.get_running_loop().call_later(seconds + 0.01, lambda: self._forget(self._clock()))

    def _forget(self, now: float) -> None:
        for state in self.keeper.forget_due(now):
            logger.warning("%s is forgotten: its owner was away for %g s", state, self.keeper.keep_seconds)

    async def hang_up(self) -> None:
        """End the streams of owners, which last as long as these do."""
        self._is_over = True
        self._stop_making()
        for ended in self._open.values():
            ended.set()

    @takes_bytes
    async def Put(self, _requests: object, context: Context) -> keeper_pb2.PutResponse:
        request = await _one(context, keeper_pb2.PutRequest)
        state, file = request.state, request.file
        caller = current_principal()
        quota = caller.quota if caller.tenant else self._quota()
        names = caller.tenant, state.name
        most_bytes = quota.kept_state_bytes
        with self._logging_refusals(*names):
            coming = self.keeper.begin(*names, state.epoch, file.path, file.size_bytes, most_bytes)
        self.spaces.make_room(file.size_bytes)
        self._coming += 1
        try:
            await self._take(coming, context)
            coming.finish()
        except BaseException:
            coming.give_up()
            raise
        finally:
            self._coming -= 1
            self._make_ahead()
        return keeper_pb2.PutResponse()

    def _make_ahead(self) -> None:
        if not self._coming and not self._is_over:
            self._stop_making()
            self._ahead = asyncio.get_running_loop().create_task(self._after_burst())

    def _stop_making(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    async def _after_burst(self) -> None:
        await asyncio.sleep(QUIET_SECONDS)
        # Without memory the next file finds none either, and says so.
        with suppress(LimitExceededError):
            for _ in range(self.spaces.end_burst()):
                self.spaces.add(await self._new_pages())

    @contextmanager
    def _logging_refusals(self, tenant: str, name: str) -> Iterator[None]:
        try:
            yield
        except LimitExceededError as error:
            if (now := self._clock()) >= self._silent_until:
                self._silent_until = now + LOG_SECONDS
                whose = f" of tenant {tenant!r}" if tenant else ""
                logger.warning("a file of the state %r%s is refused: %s", name, whose, error.message)
            raise

    async def _take(self, coming: Coming, context: Context) -> None:
        space: memoryview | None = None
        filled = 0
        while (message := await next_of(context.read())) is not aio.EOF:
            data: Any = message
            if len(data) > self._piece_bytes + HEADER_BYTES:
                raise LimitExceededError(
                    f"a piece of {len(data):,} bytes; {self._piece_bytes:,} are the most"
                )
            piece = decode_piece(data)
            piece = memoryview(_decoded(data, keeper_pb2.PutRequest).data) if piece is None else piece
            coming.came(piece.nbytes)
            while piece.nbytes:
                if space is None and coming.left_bytes >= SPACE_BYTES:
                    space, filled = await self._space(), 0
                if space is None:
                    # A small rest of a message would keep all of it.
                    coming.keep(piece if piece.nbytes > len(data) // 2 else memoryview(bytes(piece)))
                    break
                count = min(piece.nbytes, SPACE_BYTES - filled)
                space[filled : filled + count] = piece[:count]
                piece, filled = piece[count:], filled + count
                if filled == SPACE_BYTES:
                    coming.keep(space)
                    space = None

    async def _space(self) -> memoryview:
        if (found := self.spaces.take()) is not None:
            return found
        return self.spaces.lend(await self._new_pages())

    def _new_pages(self) -> asyncio.Future[mmap]:
        return asyncio.get_running_loop().run_in_executor(self._threads, new_pages)

    @takes_bytes
    async def Rename(self, _requests: object, context: Context) -> keeper_pb2.RenameResponse:
        request = await _one(context, keeper_pb2.RenameRequest)
        _check_count(len(request.files))
        state, files = request.state, [(one.path, one.to) for one in request.files]
        self.keeper.rename(current_principal().tenant, state.name, state.epoch, files)
        return keeper_pb2.RenameResponse()

    @takes_bytes
    @gives_bytes
    async def Get(self, _requests: object, context: Context) -> None:
        request = await _one(context, keeper_pb2.GetRequest)
        state = request.state
        file = self.keeper.file(current_principal().tenant, state.name, state.epoch, request.path)
        for piece in file.read(request.offset_bytes, request.size_bytes):
            for start in range(0, piece.nbytes, PIECE_BYTES):
                await context.write(encode_piece(piece[start : start + PIECE_BYTES]))

    @takes_bytes
    async def Remove(self, _requests: object, context: Context) -> keeper_pb2.RemoveResponse:
        request = await _one(context, keeper_pb2.RemoveRequest)
        _check_count(len(request.paths))
        state = request.state
        self.keeper.remove(current_principal().tenant, state.name, state.epoch, request.paths)
        return keeper_pb2.RemoveResponse()


def _listing(identity: bytes, hold: Ownership, piece_bytes: int) -> Iterator[keeper_pb2.HoldResponse]:
    """Return the answers with the files of a state."""
    answer = keeper_pb2.HoldResponse(keeper=identity, epoch=hold.epoch, piece_bytes=piece_bytes)
    # Of this moment: its owner waits for the last answer before it changes anything.
    for path, size_bytes in _files(hold.state):
        if len(answer.files) >= MOST_FILES:
            yield answer
            answer = keeper_pb2.HoldResponse()
        answer.files.add(path=path, size_bytes=size_bytes)
    answer.is_complete = True
    yield answer


def _files(state: State) -> list[tuple[str, int]]:
    return [(path, one.size_bytes) for path, one in state.files.items()]


async def _one(context: Context, kind: type[M]) -> M:
    """Return the first message of a call."""
    data: Any = await first_of(context.read())
    if data is aio.EOF:
        raise ProtocolError(f"the call takes a {kind.DESCRIPTOR.name}, and none came")
    if len(data) > MOST_BYTES:
        raise LimitExceededError(f"a request of {len(data):,} bytes; {MOST_BYTES:,} are the most")
    return _decoded(data, kind)


def _decoded(data: bytes, kind: type[M]) -> M:
    return kind.FromString(data)


def _check_count(count: int) -> None:
    if count > MOST_FILES:
        raise LimitExceededError(f"{count:,} files in one request; {MOST_FILES:,} are the most")
