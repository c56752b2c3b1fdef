"""Reading and writing tensors, waiting, and synchronizing, step by step.

Procedures that yield effects (see `core/effects.py`), the same for the blocking and the asyncio
API. Large data travels in pieces, each a transfer of its own that needs credit. A procedure with
credit never waits for more, so two of them cannot wait for each other. If server and client share
memory, a piece lies in a slot of it instead. A procedure waits for a slot only while it has some
itself, which its own commands give back; without any it uses a transfer.

If an exception is thrown in (a deadline, Ctrl-C, a cancelled task), a procedure cancels on the
server what it began, and raises it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from heliograph.core.arrays import byte_view
from heliograph.core.credit import OrderGate
from heliograph.core.effects import MapMemory, MoveBytes, Procedure, ReceiveDownload, StartUpload, WaitFor
from heliograph.core.future import Outcome, Pending, Transfer, What, lost
from heliograph.core.progress.bars import Meter
from heliograph.core.protocol import ClientCore
from heliograph.graph.files.mapped_files import readable
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult
from heliograph_proto.commands import Chunks
from heliograph_proto.errors import DeadlineExceededError, HeliographError
from heliograph_proto.sessions import Traffic


@dataclass(frozen=True, slots=True)
class TransferPiece:
    """The bytes of one transfer."""

    #: Where they begin in the client's data, in bytes.
    start: int
    size_bytes: int
    #: Where they begin on the server, from the start of the data there.
    offset_bytes: int
    #: Their layout on the server; None if contiguous.
    chunks: Chunks | None = None

    def of(self, data: memoryview) -> memoryview:
        """Return the piece's part of the client's data."""
        return data[self.start : self.start + self.size_bytes]


def pieces(
    size_bytes: int, chunks: Chunks | None, piece_bytes: int, item_bytes: int
) -> Iterator[TransferPiece]:
    """Yield the transfers for some bytes, each of whole items, or of whole chunks if one fits."""
    if chunks is None:
        for offset, size in split_pieces(size_bytes, piece_bytes, item_bytes):
            yield TransferPiece(offset, size, offset)
    elif chunks.size_bytes > piece_bytes:
        # A chunk is larger than a piece: each is sent in pieces of its own.
        for row in range(chunks.count):
            here, there = row * chunks.size_bytes, row * chunks.stride_bytes
            for offset, size in split_pieces(chunks.size_bytes, piece_bytes, 1):
                yield TransferPiece(here + offset, size, there + offset)
    else:
        together = piece_bytes // chunks.size_bytes
        for first in range(0, chunks.count, together):
            count = min(together, chunks.count - first)
            part = Chunks(chunks.size_bytes, count, chunks.stride_bytes)
            here, there = first * chunks.size_bytes, first * chunks.stride_bytes
            yield TransferPiece(here, part.total_bytes, there, part)


def split_pieces(size_bytes: int, piece_bytes: int, item_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, size) of the pieces of a large transfer, each of whole items."""
    step = max(item_bytes, piece_bytes // item_bytes * item_bytes)
    return [(offset, min(step, size_bytes - offset)) for offset in range(0, size_bytes, step)]


#: The simultaneous pieces of one read.
_WINDOW = 3
#: The simultaneous pieces of one write: each is in its tensor before later ones arrive, so both
#: sides reuse the same memory.
_WRITES = 2
#: The simultaneous pieces of one read in a durable session.
_INLINE_WINDOW = 16
#: The number of pieces of a transfer through shared memory, unless they get too small or too large.
_SHARED_PIECES = 4
_LEAST_SHARED_BYTES = 4 * 2**20
#: A read of more bytes first asks for one item.
_LARGE_BYTES = 64 * 2**20


def wait_for(core: ClientCore, outcome: Outcome) -> Procedure[None]:
    """Wait until the outcome is done; raises its error."""
    if not outcome.done:
        yield WaitFor(outcome)
    core.raise_error(outcome)


def observe(core: ClientCore, pending: Pending) -> Procedure[c.Completion | InlineResult | None]:
    """Wait until a command is done, and cancel it if the wait is interrupted."""
    try:
        yield from wait_for(core, pending)
    except BaseException:
        core.cancel(pending)
        raise
    return pending.completion


def arrive(core: ClientCore, written: Sequence[int] = (), gate: OrderGate | None = None) -> Procedure[None]:
    """Wait until the server has received every command so far, or before the gate.

    A call on another stream could overtake them. The commands that write the tensors of these
    handles are also done then. Raises the error of the work that writes them.
    """
    core.collect()
    reads = [core.send(c.GetTensor(tensor, 0, 0), observed=True, gate=gate) for tensor in written]
    # A cancel of no command is done when it arrives, whatever is before it.
    yield from wait_for_all(core, [core.send(c.Cancel(0), observed=True, gate=gate), *reads])


def credit(core: ClientCore, size_bytes: int, gate: OrderGate | None = None) -> Procedure[None]:
    """Wait for credit for this many bytes."""
    grant = core.credit.reserve(size_bytes, gate)
    if grant.done and grant.error is None:
        return
    try:
        yield from wait_for(core, grant)
    except BaseException:
        core.credit.withdraw(grant)
        raise


def send_on_credit(
    core: ClientCore, kind: c.CommandKind, size_bytes: int, how: Sending, timeout_ms: int = 0
) -> Procedure[Pending]:
    """Send a command whose bytes hold credit until it is done."""
    yield from credit(core, size_bytes, how.gate)
    is_shared = isinstance(kind, c.SetTensor) and kind.shared is not None
    try:
        return core.send(
            kind,
            stream=how.stream,
            gate=how.gate,
            observed=how.observed,
            notify=how.observed or is_shared or size_bytes > core.limits.inline_bytes,
            timeout_ms=timeout_ms,
            credit_bytes=size_bytes,
        )
    except HeliographError:
        core.credit.give_back(size_bytes)
        raise


def _piece_bytes(core: ClientCore, size_bytes: int) -> int:
    """Return the size of the pieces of a transfer.

    In shared memory each side copies one piece while the other works on the next. Few pieces have
    less overhead; many pieces overlap better.
    """
    piece_bytes = core.limits.piece_bytes
    if core.shared is None:
        return piece_bytes
    return min(piece_bytes, core.shared.slot_bytes, max(size_bytes // _SHARED_PIECES, _LEAST_SHARED_BYTES))


def _slot(core: ClientCore, mine: Iterable[Pending]) -> Procedure[int | None]:
    """Return a slot of shared memory, waiting for one while these commands may give one back."""
    for pending in (None, *mine):
        if pending is not None and not pending.done:
            yield WaitFor(pending)
        if core.shared is None:
            return None
        if (slot := core.shared.take()) is not None:
            return slot
    return None


# Reading


@dataclass(slots=True)
class _Read:
    """A piece of a tensor that is being read: by a transfer, or through a slot of shared memory."""

    pending: Pending
    transfer: int
    slot: int | None
    out: memoryview


def read(
    core: ClientCore, source: c.GetTensor, out: memoryview, item_bytes: int, stream: int | None = None
) -> Procedure[None]:
    """Read a tensor's bytes into `out`, which has exactly as many."""
    if out.nbytes <= core.limits.inline_bytes:
        completion = yield from observe(core, core.send(source, stream=stream, observed=True))
        assert completion is not None
        out[:] = completion.data
        core.count(Traffic(read_bytes=out.nbytes, copied_out_bytes=out.nbytes))
        return
    if core.journal is not None:
        yield from _read_inline(core, source, out, item_bytes, stream)
        return
    window: deque[_Read] = deque()
    meter = Meter("receiving a tensor", out.nbytes, core.bars)
    try:
        for piece in pieces(out.nbytes, source.chunks, _piece_bytes(core, out.nbytes), item_bytes):
            # Waits for credit only while this read holds none.
            while len(window) == _WINDOW or (window and not core.credit.could_reserve(piece.size_bytes)):
                meter((yield from _receive(core, window)))
            window.append((yield from _request(core, source, piece, piece.of(out), stream)))
        while window:
            meter((yield from _receive(core, window)))
    finally:
        meter.end()
        for unread in window:
            core.cancel(unread.pending)
            if unread.transfer:
                core.downloaded(unread.transfer)
            core.credit.give_back(unread.out.nbytes)
            if unread.slot is not None:
                core.give_slot(unread.slot, behind=unread.pending)


def _read_inline(
    core: ClientCore, source: c.GetTensor, out: memoryview, item_bytes: int, stream: int | None
) -> Procedure[None]:
    """Read in completions, which a server that was restarted makes again."""
    window: deque[tuple[Pending, memoryview]] = deque()
    try:
        for piece in pieces(out.nbytes, source.chunks, core.limits.inline_bytes, item_bytes):
            if len(window) == _INLINE_WINDOW:
                yield from _take_inline(core, window)
            offset = source.offset_bytes + piece.offset_bytes
            command = c.GetTensor(source.tensor, offset, piece.size_bytes, chunks=piece.chunks)
            window.append((core.send(command, stream=stream, observed=True), piece.of(out)))
        while window:
            yield from _take_inline(core, window)
    finally:
        for pending, _ in window:
            core.cancel(pending)
    core.count(Traffic(read_bytes=out.nbytes, copied_out_bytes=out.nbytes))


def _take_inline(core: ClientCore, window: deque[tuple[Pending, memoryview]]) -> Procedure[None]:
    pending, out = window[0]
    yield from wait_for(core, pending)
    assert isinstance(pending.completion, c.Completion)
    out[:] = pending.completion.data
    window.popleft()


def read_new(
    core: ClientCore,
    source: c.GetTensor,
    make: Callable[[], np.ndarray[Any, Any]],
    item_bytes: int,
    stream: int | None = None,
) -> Procedure[np.ndarray[Any, Any]]:
    """Read like `read`, into an array that is made here.

    A large array is made only after the server has returned a first item, since an error there says
    more than a lack of memory here.
    """
    if source.size_bytes > _LARGE_BYTES:
        first = c.GetTensor(source.tensor, source.offset_bytes, item_bytes)
        yield from observe(core, core.send(first, stream=stream, observed=True))
    array = make()
    yield from read(core, source, byte_view(array), item_bytes, stream)
    return array


def _request(
    core: ClientCore, source: c.GetTensor, piece: TransferPiece, out: memoryview, stream: int | None
) -> Procedure[_Read]:
    """Request a piece. Its credit comes back when its bytes arrive, before the command ends."""
    yield from credit(core, out.nbytes)
    slot = None if core.shared is None else core.shared.take()
    number = core.transfer() if slot is None else 0
    offset = source.offset_bytes + piece.offset_bytes
    command = c.GetTensor(source.tensor, offset, out.nbytes, number, piece.chunks, slot)
    try:
        return _Read(core.send(command, stream=stream, observed=True), number, slot, out)
    except HeliographError:
        core.credit.give_back(out.nbytes)
        if slot is not None:
            core.give_slot(slot)
        raise


def _receive(core: ClientCore, window: deque[_Read]) -> Procedure[int]:
    """Receive the bytes of the oldest piece. Returns their number."""
    oldest = window[0]
    if oldest.slot is not None:
        yield from wait_for(core, oldest.pending)
        yield MoveBytes(partial(core.space().empty_into, oldest.slot, oldest.out))
        core.count(Traffic(copied_out_bytes=oldest.out.nbytes))
        core.give_slot(oldest.slot)
    else:
        try:
            yield ReceiveDownload(oldest.transfer, oldest.out)
        except HeliographError:
            # The command's own error says more than that of the download.
            core.raise_error(oldest.pending)
            raise
        core.downloaded(oldest.transfer)
    window.popleft()
    core.count(Traffic(read_bytes=oldest.out.nbytes))
    core.credit.give_back(oldest.out.nbytes)
    return oldest.out.nbytes


# Writing


@dataclass(frozen=True, slots=True)
class Sending:
    """The order, the gate and the waiting of commands."""

    #: The stream whose order they join; None for the session's own.
    stream: int | None = None
    #: The place in the order of commands that they take.
    gate: OrderGate | None = None
    #: True if a caller waits for them.
    observed: bool = False
    #: True if the bytes stay unchanged until the commands are done, so no wait is needed before.
    keep: bool = False
    #: A description for errors; None for writes that only this library sees.
    what: What | None = None


def _write_inline(
    core: ClientCore, target: c.SetTensor, data: memoryview, item_bytes: int, how: Sending
) -> Procedure[list[Pending]]:
    """Write in commands, which are kept for a server that is restarted."""
    sent: list[Pending] = []
    meter = Meter("sending a tensor", data.nbytes, core.bars)
    try:
        for piece in pieces(data.nbytes, target.chunks, core.limits.inline_bytes, item_bytes):
            where = target.offset_bytes + piece.offset_bytes
            command = c.SetTensor(target.tensor, where, bytes(piece.of(data)), chunks=piece.chunks)
            sent.append((yield from send_on_credit(core, command, piece.size_bytes, how)))
            meter(piece.size_bytes)
    finally:
        meter.end()
    core.count(Traffic(written_bytes=data.nbytes, copied_in_bytes=data.nbytes))
    return sent


def write(
    core: ClientCore, target: c.SetTensor, data: memoryview, item_bytes: int, how: Sending
) -> Procedure[list[Pending]]:
    """Write bytes into a tensor. Returns the commands that do it.

    Ends when the caller may overwrite the bytes or, with `how.keep`, when all commands were sent.
    """
    tensor, start = target.tensor, target.offset_bytes
    if data.nbytes <= core.limits.inline_bytes:
        command = c.SetTensor(tensor, start, bytes(readable(data)), chunks=target.chunks)
        core.count(Traffic(written_bytes=data.nbytes, copied_in_bytes=data.nbytes))
        return [(yield from send_on_credit(core, command, data.nbytes, how))]
    if core.journal is not None:
        return (yield from _write_inline(core, target, data, item_bytes, how))
    pendings: list[Pending] = []
    transfers: list[Transfer] = []
    unsent: c.SetTensor | None = None
    meter = Meter("sending a tensor", data.nbytes, core.bars)
    try:
        for piece in pieces(data.nbytes, target.chunks, _piece_bytes(core, data.nbytes), item_bytes):
            where, part = start + piece.offset_bytes, piece.of(data)
            unsent = c.SetTensor(tensor, where, None, core.transfer(), part.nbytes, piece.chunks)
            core.count(Traffic(written_bytes=part.nbytes))
            slot = yield from _slot(core, pendings)
            if slot is None:
                if len(transfers) >= _WRITES and not how.keep:
                    yield from wait_for(core, transfers[-_WRITES].taken)
                pendings.append((yield from send_on_credit(core, unsent, part.nbytes, how)))
                number, unsent = unsent.transfer, None
                transfers.append((yield StartUpload(number, part, pending=pendings[-1], progress=meter)))
            else:
                pendings.append((yield from _send_shared(core, unsent, slot, part, how)))
                unsent = None
                meter(part.nbytes)
        for transfer in transfers if not how.keep else ():
            yield from wait_for(core, transfer.taken)
    except BaseException as error:
        why = lost(how.what, error) if how.what and pendings else None
        if pendings and unsent is not None:
            pendings += _send_doomed(core, unsent, how)
        stop(core, pendings, transfers, why)
        if why is not None and isinstance(error, DeadlineExceededError):
            raise DeadlineExceededError(error.message, advice=why.advice) from None
        raise
    finally:
        meter.end()
    return pendings


def _send_doomed(core: ClientCore, command: c.SetTensor, how: Sending) -> list[Pending]:
    """Send a write whose bytes never come, to be cancelled.

    It poisons a tensor that was written in part, even if that part was done.
    """
    try:
        return [core.send(command, stream=how.stream, gate=how.gate, observed=True)]
    except HeliographError:
        return []


def _send_shared(
    core: ClientCore, command: c.SetTensor, slot: int, data: memoryview, how: Sending
) -> Procedure[Pending]:
    """Send bytes in a slot of shared memory, which the end of the command gives back."""
    try:
        yield MoveBytes(partial(core.space().fill, slot, data))
        core.count(Traffic(copied_in_bytes=data.nbytes))
        placed = replace(command, transfer=0, shared=slot)
        pending = yield from send_on_credit(core, placed, data.nbytes, how)
    except BaseException:
        core.give_slot(slot)
        raise
    pending.slot = slot
    return pending


def stop(
    core: ClientCore, pendings: list[Pending], transfers: list[Transfer], why: HeliographError | None = None
) -> None:
    """Cancel writes and uploads; later uses of what they wrote raise `why`."""
    for pending in pendings:
        # The caller gets the exception that interrupted the write; later uses of the tensor get the
        # reason.
        pending.observed = True
        core.cancel(pending, why)
    for transfer in transfers:
        transfer.cancel()


def wait_for_all(core: ClientCore, pendings: Sequence[Pending]) -> Procedure[None]:
    """Wait until all commands are done; raises the first error."""
    for pending in pendings:
        if not pending.done:
            yield WaitFor(pending)
    for pending in pendings:
        core.raise_error(pending)


# Variables


def free_variable(core: ClientCore, name: str) -> Procedure[None]:
    """Free a variable after everything sent and released so far. Raises its refusal."""
    core.collect()
    yield from wait_for(core, core.send(c.FreeVariable(name), observed=True))


# Memory that is mapped


def map_memory(core: ClientCore, tensor: int) -> Procedure[tuple[Any, int]]:
    """Map the memory of a tensor's buffer, after everything sent before has written the tensor.

    Returns the memory, and the tensor's position in it.
    """
    yield from observe(core, core.send(c.GetTensor(tensor, 0, 0), observed=True))
    found: tuple[Any, int] = yield MapMemory(tensor)
    return found


# Synchronizing


def synchronize(core: ClientCore, streams: tuple[int, ...]) -> Procedure[None]:
    """Wait until the streams have done everything sent so far; raises the first unseen error."""
    core.collect()
    marks = [core.send(c.Synchronize(), stream=stream, observed=True) for stream in streams]
    for mark in marks:
        yield from wait_for(core, mark)
    core.raise_unobserved()
