"""What the library does over the wire, step by step: reading, writing, running, compiling.

Generators that yield effects (see `_effects`), the same for the blocking and the asyncio API. Large
bytes go in pieces, each a transfer of its own, with credit asked for before each; a procedure that
holds credit never waits for more, so that no two can wait for each other.

An exception thrown in (a deadline, Ctrl-C, a cancelled task) makes a procedure cancel on the server
what it began, and go on raising.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from heliograph._effects import (
    Compile,
    Compute,
    Download,
    FindMissing,
    Procedure,
    Upload,
    Wait,
)
from heliograph._outcome import Outcome, Pending, Transfer
from heliograph._words import What, lost
from heliograph.builder import Graph
from heliograph.protocol import ClientCore, Gate, split_pieces
from heliograph_proto import commands as c
from heliograph_proto.description import PlanInfo
from heliograph_proto.errors import DeadlineExceededError, HeliographError, MissingContentError

#: How many pieces of one read are on their way at once, and how many contents are uploaded at once.
_WINDOW = 3
#: From here on a read asks first whether there is something to be read.
_LARGE_BYTES = 64 * 2**20

Progress = Callable[[int, int], None]


def wait_for(core: ClientCore, outcome: Outcome) -> Procedure[None]:
    """Until the outcome is done; raises its error."""
    if not outcome.done:
        yield Wait(outcome)
    core.raise_error(outcome)


def observe(core: ClientCore, pending: Pending) -> Procedure[c.Completion | None]:
    """Until a command is done, which is cancelled if the waiting is broken off."""
    try:
        yield from wait_for(core, pending)
    except BaseException:
        core.cancel(pending)
        raise
    return pending.completion


def credit(core: ClientCore, size_bytes: int, gate: Gate | None = None) -> Procedure[None]:
    """Until so many bytes may be on their way."""
    grant = core.reserve(size_bytes, gate)
    if grant.done and grant.error is None:
        return
    try:
        yield from wait_for(core, grant)
    except BaseException:
        core.withdraw(grant)
        raise


def send_on_credit(
    core: ClientCore, kind: c.CommandKind, size_bytes: int, how: Sending
) -> Procedure[Pending]:
    """Sends a command whose bytes count until it is done."""
    yield from credit(core, size_bytes, how.gate)
    try:
        return core.send(
            kind,
            stream=how.stream,
            gate=how.gate,
            observed=how.observed,
            notify=how.observed or size_bytes > core.limits.inline_bytes,
            credit_bytes=size_bytes,
        )
    except HeliographError:
        core.give_back(size_bytes)
        raise


# Reading


@dataclass(slots=True)
class _Read:
    """A piece of a tensor on its way here."""

    pending: Pending
    transfer: int
    out: memoryview


def read(
    core: ClientCore, source: c.GetTensor, out: memoryview, item_bytes: int, stream: int | None = None
) -> Procedure[None]:
    """Reads a tensor's bytes into `out`, which has exactly as many."""
    if out.nbytes <= core.limits.inline_bytes:
        completion = yield from observe(core, core.send(source, stream=stream, observed=True))
        assert completion is not None
        out[:] = completion.data
        return
    window: deque[_Read] = deque()
    try:
        for offset, size in split_pieces(out.nbytes, core.limits.piece_bytes, item_bytes):
            # Credit is waited for only while this read holds none.
            while len(window) == _WINDOW or (window and not core.could_reserve(size)):
                yield from _receive(core, window)
            window.append((yield from _request(core, source, offset, out[offset : offset + size], stream)))
        while window:
            yield from _receive(core, window)
    finally:
        for piece in window:
            core.cancel(piece.pending)
            core.give_back(piece.out.nbytes)


def read_new(
    core: ClientCore, source: c.GetTensor, make: Callable[[], np.ndarray[Any, Any]], item_bytes: int
) -> Procedure[np.ndarray[Any, Any]]:
    """As `read`, into an array that is made here.

    A large one is made only when the server has given a first item: what went wrong over there says
    more than that there is no room for it here.
    """
    if source.size_bytes > _LARGE_BYTES:
        first = c.GetTensor(source.tensor, source.offset_bytes, item_bytes)
        yield from observe(core, core.send(first, observed=True))
    array = make()
    yield from read(core, source, byte_view(array), item_bytes)
    return array


def _request(
    core: ClientCore, source: c.GetTensor, offset: int, out: memoryview, stream: int | None
) -> Procedure[_Read]:
    """Asks for a piece. Its credit comes back when its bytes have arrived, not when the command is done."""
    yield from credit(core, out.nbytes)
    number = core.transfer()
    piece = c.GetTensor(source.tensor, source.offset_bytes + offset, out.nbytes, number)
    try:
        return _Read(core.send(piece, stream=stream, observed=True), number, out)
    except HeliographError:
        core.give_back(out.nbytes)
        raise


def _receive(core: ClientCore, window: deque[_Read]) -> Procedure[None]:
    """The bytes of the oldest piece."""
    oldest = window[0]
    try:
        yield Download(oldest.transfer, oldest.out)
    except HeliographError:
        # The command's own error says more than that of the call beside it.
        core.raise_error(oldest.pending)
        raise
    window.popleft()
    core.give_back(oldest.out.nbytes)


# Writing


@dataclass(frozen=True, slots=True)
class Sending:
    """How commands are sent: in which stream's order, behind which gate, and whether somebody waits."""

    stream: int | None = None
    gate: Gate | None = None
    observed: bool = False
    #: Whether the bytes stay as they are until the commands are done, so that nobody need wait before.
    keep: bool = False
    #: What is written, in words for errors; None for what nobody but this library sees.
    what: What | None = None


def write(
    core: ClientCore, target: c.SetTensor, data: memoryview, item_bytes: int, how: Sending
) -> Procedure[list[Pending]]:
    """Writes bytes into a tensor; gives the commands that do it.

    Ends when the caller may overwrite the bytes, or, with `how.keep`, when all commands were sent.
    """
    tensor, start = target.tensor, target.offset_bytes
    if data.nbytes <= core.limits.inline_bytes:
        command = c.SetTensor(tensor, start, bytes(data))
        return [(yield from send_on_credit(core, command, data.nbytes, how))]
    pendings: list[Pending] = []
    transfers: list[Transfer] = []
    try:
        for offset, size in split_pieces(data.nbytes, core.limits.piece_bytes, item_bytes):
            number = core.transfer()
            command = c.SetTensor(tensor, start + offset, None, number, size)
            pendings.append((yield from send_on_credit(core, command, size, how)))
            transfers.append((yield Upload(number, data[offset : offset + size], pendings[-1])))
        for transfer in transfers if not how.keep else ():
            yield from wait_for(core, transfer.taken)
    except BaseException as error:
        why = lost(how.what, error) if how.what and pendings else None
        _stop(core, pendings, transfers, why)
        if why is not None and isinstance(error, DeadlineExceededError):
            raise DeadlineExceededError(error.message, advice=why.advice) from None
        raise
    return pendings


def _stop(
    core: ClientCore, pendings: list[Pending], transfers: list[Transfer], why: HeliographError | None = None
) -> None:
    for pending in pendings:
        # The caller learns of it by the exception that broke the writing off; who meets what it left
        # behind, by the reason.
        pending.observed = True
        core.cancel(pending, why)
    for transfer in transfers:
        transfer.cancel()


def wait_for_all(core: ClientCore, pendings: Sequence[Pending]) -> Procedure[None]:
    """Until all commands are done; raises the first error."""
    for pending in pendings:
        if not pending.done:
            yield Wait(pending)
    for pending in pendings:
        core.raise_error(pending)


# Synchronizing


def synchronize(core: ClientCore, streams: tuple[int, ...]) -> Procedure[None]:
    """Until the streams have done everything sent so far; raises the first error nobody has seen."""
    marks = [core.send(c.Synchronize(), stream=stream, observed=True) for stream in streams]
    for mark in marks:
        yield from wait_for(core, mark)
    core.raise_unobserved()


# Compiling


def compile_graph(
    core: ClientCore,
    graph: Graph,
    handle: int,
    devices: tuple[str, ...],
    fusion: bool,
    progress: Progress | None,
) -> Procedure[PlanInfo]:
    """Uploads the contents that the session lacks, and compiles; errors name the user's lines."""
    frozen = yield Compute(graph.freeze)
    contents = graph.weights()
    yield from upload_missing(core, contents, progress)
    request = Compile(handle, frozen, devices, fusion)
    try:
        try:
            return (yield request)  # type: ignore[no-any-return]
        except MissingContentError:
            # Another plan's contents may just have been dropped: ask and send once more.
            yield from upload_missing(core, contents, progress)
            return (yield request)  # type: ignore[no-any-return]
    except HeliographError as error:
        raise with_source(error, graph.source_of) from None


def with_source(error: HeliographError, source_of: Callable[[int], str]) -> HeliographError:
    """The error with the line of user code that built its node."""
    if not error.origin.op or error.origin.source:
        return error
    return error.at(replace(error.origin, source=source_of(error.origin.node)))


def upload_missing(
    core: ClientCore, contents: Mapping[bytes, Any], progress: Progress | None
) -> Procedure[None]:
    """Sends the contents that the session does not hold, a few at a time."""
    if not contents:
        return
    missing: tuple[bytes, ...] = yield FindMissing(tuple(contents))
    views = [(digest, byte_view(contents[digest])) for digest in missing]
    meter = _Meter(sum(view.nbytes for _, view in views), progress)
    window: deque[Transfer] = deque()
    try:
        for digest, view in views:
            window.append((yield Upload(digest, view, None, meter)))
            if len(window) == _WINDOW:
                yield from _ended(core, window)
        while window:
            yield from _ended(core, window)
    except BaseException:
        _stop(core, [], list(window))
        raise


def _ended(core: ClientCore, window: deque[Transfer]) -> Procedure[None]:
    yield from wait_for(core, window[0].ended)
    window.popleft()


class _Meter:
    """Tells a progress callback (bytes done, bytes in all); called from whatever thread uploads."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes, self._progress = total_bytes, progress
        self._done_bytes = 0
        self._lock = threading.Lock()
        self(0)

    def __call__(self, taken_bytes: int) -> None:
        if self._progress is None or not self._total_bytes:
            return
        with self._lock:
            self._done_bytes += taken_bytes
            self._progress(self._done_bytes, self._total_bytes)


def byte_view(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a contiguous array."""
    view: Any = array.reshape(-1).view(np.uint8)
    return memoryview(view)
