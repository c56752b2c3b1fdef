"""What the library does over the wire, step by step: reading, writing, waiting.

Generators that yield effects (see `_effects`), the same for the blocking and the asyncio API. Large
bytes go in pieces, each a transfer of its own, with credit asked for before each; a procedure that
holds credit never waits for more, so that no two can wait for each other. Where server and client share
memory, a piece lies in a slot of it instead; a procedure waits for a slot only while it has some itself,
which its own commands give back, and sends a transfer where it has none.

An exception thrown in (a deadline, Ctrl-C, a cancelled task) makes a procedure cancel on the server
what it began, and go on raising.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from heliograph.core.arrays import byte_view
from heliograph.core.effects import MapMemory, MoveBytes, Procedure, ReceiveDownload, StartUpload, WaitFor
from heliograph.core.future import Outcome, Pending, Transfer, What, lost
from heliograph.core.gates import OrderGate
from heliograph.core.progress import Meter
from heliograph.core.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult
from heliograph_proto.commands import Chunks
from heliograph_proto.errors import DeadlineExceededError, HeliographError
from heliograph_proto.sessions import Traffic


@dataclass(frozen=True, slots=True)
class TransferPiece:
    """The bytes of one transfer."""

    #: Where they begin here, in bytes of the whole.
    start: int
    size_bytes: int
    #: Where they begin over there, from where the whole begins.
    offset_bytes: int
    #: How they lie over there; None: one behind the other.
    chunks: Chunks | None = None

    def of(self, data: memoryview) -> memoryview:
        """The part of the whole that it carries."""
        return data[self.start : self.start + self.size_bytes]


def pieces(
    size_bytes: int, chunks: Chunks | None, piece_bytes: int, item_bytes: int
) -> Iterator[TransferPiece]:
    """The transfers of so many bytes, each of whole items, or of whole chunks where one fits."""
    if chunks is None:
        for offset, size in split_pieces(size_bytes, piece_bytes, item_bytes):
            yield TransferPiece(offset, size, offset)
    elif chunks.size_bytes > piece_bytes:
        yield from _rows(chunks, piece_bytes)
    else:
        yield from _groups(chunks, piece_bytes)


def _rows(chunks: Chunks, piece_bytes: int) -> Iterator[TransferPiece]:
    """Chunks that are larger than a piece go one by one, in pieces of their own."""
    for row in range(chunks.count):
        for offset, size in split_pieces(chunks.size_bytes, piece_bytes, 1):
            yield TransferPiece(row * chunks.size_bytes + offset, size, row * chunks.stride_bytes + offset)


def _groups(chunks: Chunks, piece_bytes: int) -> Iterator[TransferPiece]:
    together = piece_bytes // chunks.size_bytes
    for first in range(0, chunks.count, together):
        count = min(together, chunks.count - first)
        part = Chunks(chunks.size_bytes, count, chunks.stride_bytes)
        yield TransferPiece(first * chunks.size_bytes, part.total_bytes, first * chunks.stride_bytes, part)


def split_pieces(size_bytes: int, piece_bytes: int, item_bytes: int) -> list[tuple[int, int]]:
    """(offset, size) of the pieces of a large transfer, each of whole items."""
    step = max(item_bytes, piece_bytes // item_bytes * item_bytes)
    return [(offset, min(step, size_bytes - offset)) for offset in range(0, size_bytes, step)]


#: How many pieces of one read are on their way at once.
_WINDOW = 3
#: How many pieces of one write are: what comes piece by piece is in its tensor before the next ones come, so
#: that both sides use the same memory again.
_WRITES = 2
#: Into how many pieces what goes through shared memory is cut, if they are not too small then, or too large.
_SHARED_PIECES = 8
_LEAST_SHARED_BYTES = 4 * 2**20
#: From here on a read asks first whether there is something to be read.
_LARGE_BYTES = 64 * 2**20


def wait_for(core: ClientCore, outcome: Outcome) -> Procedure[None]:
    """Until the outcome is done; raises its error."""
    if not outcome.done:
        yield WaitFor(outcome)
    core.raise_error(outcome)


def observe(core: ClientCore, pending: Pending) -> Procedure[c.Completion | InlineResult | None]:
    """Until a command is done, which is cancelled if the waiting is broken off."""
    try:
        yield from wait_for(core, pending)
    except BaseException:
        core.cancel(pending)
        raise
    return pending.completion


def arrive(core: ClientCore, written: Sequence[int] = (), gate: OrderGate | None = None) -> Procedure[None]:
    """Until the server has received every command so far, or before the gate, which a call beside them could
    overtake, and has done those that write the tensors of these handles. Raises the error of what was to
    write them."""
    core.collect()
    reads = [core.send(c.GetTensor(tensor, 0, 0), observed=True, gate=gate) for tensor in written]
    # Cancelling what is no command is done when it arrives, whatever it stands behind.
    yield from wait_for_all(core, [core.send(c.Cancel(0), observed=True, gate=gate), *reads])


def credit(core: ClientCore, size_bytes: int, gate: OrderGate | None = None) -> Procedure[None]:
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
            notify=how.observed or size_bytes > core.limits.inline_bytes or _is_shared(kind),
            credit_bytes=size_bytes,
        )
    except HeliographError:
        core.give_back(size_bytes)
        raise


def _is_shared(kind: c.CommandKind) -> bool:
    return isinstance(kind, c.SetTensor) and kind.shared is not None


def _piece_bytes(core: ClientCore, size_bytes: int) -> int:
    """What one command carries of so many bytes. In shared memory each side copies one while the other is at
    the next: few of them take less time beside the copies, many lose less where nobody has the next one yet.
    """
    piece_bytes = core.limits.piece_bytes
    if core.shared is None:
        return piece_bytes
    return min(piece_bytes, core.shared.slot_bytes, max(size_bytes // _SHARED_PIECES, _LEAST_SHARED_BYTES))


def _slot(core: ClientCore, mine: Iterable[Pending]) -> Procedure[int | None]:
    """A slot of shared memory, for which it waits as long as these commands may give one back."""
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
    """A piece of a tensor on its way here: by a transfer, or to a slot of shared memory."""

    pending: Pending
    transfer: int
    slot: int | None
    out: memoryview


def read(
    core: ClientCore, source: c.GetTensor, out: memoryview, item_bytes: int, stream: int | None = None
) -> Procedure[None]:
    """Reads a tensor's bytes into `out`, which has exactly as many."""
    if out.nbytes <= core.limits.inline_bytes:
        completion = yield from observe(core, core.send(source, stream=stream, observed=True))
        assert completion is not None
        out[:] = completion.data
        core.count(Traffic(read_bytes=out.nbytes, copied_out_bytes=out.nbytes))
        return
    window: deque[_Read] = deque()
    try:
        for piece in pieces(out.nbytes, source.chunks, _piece_bytes(core, out.nbytes), item_bytes):
            # Credit is waited for only while this read holds none.
            while len(window) == _WINDOW or (window and not core.could_reserve(piece.size_bytes)):
                yield from _receive(core, window)
            window.append((yield from _request(core, source, piece, piece.of(out), stream)))
        while window:
            yield from _receive(core, window)
    finally:
        for unread in window:
            core.cancel(unread.pending)
            core.give_back(unread.out.nbytes)
            if unread.slot is not None:
                core.give_slot(unread.slot, behind=unread.pending)


def read_new(
    core: ClientCore,
    source: c.GetTensor,
    make: Callable[[], np.ndarray[Any, Any]],
    item_bytes: int,
    stream: int | None = None,
) -> Procedure[np.ndarray[Any, Any]]:
    """As `read`, into an array that is made here.

    A large one is made only when the server has given a first item: what went wrong over there says
    more than that there is no room for it here.
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
    """Asks for a piece. Its credit comes back when its bytes have arrived, not when the command is done."""
    yield from credit(core, out.nbytes)
    slot = None if core.shared is None else core.shared.take()
    number = core.transfer() if slot is None else 0
    offset = source.offset_bytes + piece.offset_bytes
    command = c.GetTensor(source.tensor, offset, out.nbytes, number, piece.chunks, slot)
    try:
        return _Read(core.send(command, stream=stream, observed=True), number, slot, out)
    except HeliographError:
        core.give_back(out.nbytes)
        if slot is not None:
            core.give_slot(slot)
        raise


def _receive(core: ClientCore, window: deque[_Read]) -> Procedure[None]:
    """The bytes of the oldest piece."""
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
            # The command's own error says more than that of the call beside it.
            core.raise_error(oldest.pending)
            raise
    window.popleft()
    core.count(Traffic(read_bytes=oldest.out.nbytes))
    core.give_back(oldest.out.nbytes)


# Writing


@dataclass(frozen=True, slots=True)
class Sending:
    """How commands are sent: in which stream's order, behind which gate, and whether somebody waits."""

    stream: int | None = None
    gate: OrderGate | None = None
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
        command = c.SetTensor(tensor, start, bytes(data), chunks=target.chunks)
        core.count(Traffic(written_bytes=data.nbytes, copied_in_bytes=data.nbytes))
        return [(yield from send_on_credit(core, command, data.nbytes, how))]
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
            pendings += _never_sent(core, unsent, how)
        stop(core, pendings, transfers, why)
        if why is not None and isinstance(error, DeadlineExceededError):
            raise DeadlineExceededError(error.message, advice=why.advice) from None
        raise
    finally:
        meter.end()
    return pendings


def _never_sent(core: ClientCore, command: c.SetTensor, how: Sending) -> list[Pending]:
    """A write whose bytes never come, to be cancelled: so that whoever uses a tensor of which only a part was
    written learns of it, also when that part was done."""
    try:
        return [core.send(command, stream=how.stream, gate=how.gate, observed=True)]
    except HeliographError:
        return []


def _send_shared(
    core: ClientCore, command: c.SetTensor, slot: int, data: memoryview, how: Sending
) -> Procedure[Pending]:
    """Sends bytes in a slot of shared memory, which the end of the command gives back."""
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
    """Breaks writes and uploads off; whoever meets what they left behind is told `why`."""
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
            yield WaitFor(pending)
    for pending in pendings:
        core.raise_error(pending)


# Memory that is mapped


def map_memory(core: ClientCore, tensor: int) -> Procedure[tuple[Any, int]]:
    """The memory of a tensor's buffer, once everything sent before has written the tensor, and where in it
    the tensor begins."""
    yield from observe(core, core.send(c.GetTensor(tensor, 0, 0), observed=True))
    found: tuple[Any, int] = yield MapMemory(tensor)
    return found


# Synchronizing


def synchronize(core: ClientCore, streams: tuple[int, ...]) -> Procedure[None]:
    """Until the streams have done everything sent so far; raises the first error nobody has seen."""
    core.collect()
    marks = [core.send(c.Synchronize(), stream=stream, observed=True) for stream in streams]
    for mark in marks:
        yield from wait_for(core, mark)
    core.raise_unobserved()
