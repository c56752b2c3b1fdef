"""Transfers: matching the bytes that bulk calls carry with the commands that name them.

Either side may come first, and either may fail. A transfer's number is free again when its command
has retired (uploads) or its bytes were read (downloads).

    upload first:   started ─▸ arrived
                       └──(command)──┴──▸ claimed ─▸ free
    command first:  waiting ──(upload starts)──▸ claimed ─▸ free
    command fails before its upload has come:  refused, until that upload comes and is told why
    upload fails before its command has come:  broken, until that command comes and is told why

A command that claimed its upload may have its turn before all bytes are there: it takes them as they come,
and they tell it if they break off.
"""

from __future__ import annotations

from collections import deque

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError, LimitExceededError, ProtocolError
from heliograph_server.session.protocol.dependencies import CommandPhase, CommandState
from heliograph_server.session.protocol.instructions import DropUpload, Instruction

#: How many failures of one side are kept for the other; the oldest are forgotten first.
MAX_REMEMBERED = 10_000


class Uploads:
    """The uploads of a session and the commands that wait for them. Pure: sizes and errors alone."""

    def __init__(self, limit: int) -> None:
        #: The most that may come or lie here without a command; their bytes are counted elsewhere.
        self._limit = limit
        #: Announced sizes, while the bytes are coming.
        self._started: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._waiting: dict[int, tuple[CommandState, int]] = {}
        self._claimed: dict[int, CommandState] = {}
        self._refused: dict[int, HeliographError] = {}
        self._broken: dict[int, HeliographError] = {}

    def __repr__(self) -> str:
        coming, arrived = len(self._started), len(self._arrived)
        return f"<Uploads {coming} coming, {arrived} unclaimed, {len(self._waiting)} awaited>"

    def check_free(self, transfer: int) -> None:
        """Raises InvalidArgumentError if another command that is not done names the transfer."""
        if transfer <= 0:
            raise InvalidArgumentError("transfer 0 does not exist", advice="choose a number from 1")
        if transfer in self._waiting or transfer in self._claimed:
            raise InvalidArgumentError(f"transfer {transfer} is awaited by an earlier command")

    def expect(self, state: CommandState, transfer: int, size_bytes: int) -> None:
        """A command came: takes what has arrived or is coming, or adds a blocker until it is."""
        if transfer in self._broken:
            state.error = self._broken.pop(transfer)
            return
        announced = self._arrived.get(transfer, self._started.get(transfer, size_bytes))
        if announced != size_bytes:
            state.error = _size_error(transfer, size_bytes, announced)
        is_coming = state.error is None and transfer in self._started
        if self._arrived.pop(transfer, None) is not None or is_coming:
            self._claimed[transfer] = state
        elif state.error is None:
            self._waiting[transfer] = (state, size_bytes)
            state.blockers += 1
        else:
            _remember(self._refused, transfer, state.error)

    def started(self, transfer: int, size_bytes: int) -> CommandState | HeliographError | None:
        """An upload began. Returns the command that waited, or why the upload is not wanted.

        Raises ProtocolError for a second one, LimitExceededError.
        """
        if transfer <= 0 or any(transfer in one for one in (self._started, self._arrived, self._claimed)):
            raise ProtocolError(f"transfer {transfer} cannot be uploaded: 0, or uploaded already")
        if transfer in self._refused:
            return self._refused.pop(transfer)
        if len(self._started) + len(self._arrived) >= self._limit:
            raise LimitExceededError(
                f"{self._limit:,} uploads wait for their commands", advice="send the commands"
            )
        self._started[transfer] = size_bytes
        if transfer not in self._waiting:
            return None
        state, expected = self._waiting[transfer]
        if expected != size_bytes:
            return _size_error(transfer, expected, size_bytes)
        del self._waiting[transfer]
        self._claimed[transfer] = state
        state.blockers -= 1
        return state

    def arrived(self, transfer: int) -> HeliographError | None:
        """All bytes came. Returns why they are not wanted any more, if so."""
        size_bytes = self._started.pop(transfer)
        if transfer in self._refused:
            return self._refused.pop(transfer)
        if transfer not in self._claimed:
            self._arrived[transfer] = size_bytes
        return None

    def broke(self, transfer: int, error: HeliographError) -> CommandState | None:
        """The upload failed. Returns the command that it was for; one that is yet to come will fail."""
        if self._started.pop(transfer, None) is None or self._refused.pop(transfer, None) is not None:
            return None
        if transfer in self._claimed:
            return self._claimed[transfer]
        if transfer not in self._waiting:
            _remember(self._broken, transfer, error)
            return None
        state, _ = self._waiting.pop(transfer)
        state.blockers -= 1
        return state

    def is_claimed(self, transfer: int) -> bool:
        """Whether a command that is not done has the bytes."""
        return transfer in self._claimed

    def stop_waiting(self, transfer: int, state: CommandState, error: HeliographError) -> bool:
        """The command failed early. Whether it had been waiting: one blocker less then."""
        if self._waiting.get(transfer, (None, 0))[0] is not state:
            return False
        del self._waiting[transfer]
        state.blockers -= 1
        _remember(self._refused, transfer, error)
        return True

    def refuse(self, transfer: int, error: HeliographError) -> bool:
        """A command was refused at once. Whether its bytes had arrived and are to be dropped."""
        if transfer in self._waiting or transfer in self._claimed:
            return False
        if self._arrived.pop(transfer, None) is not None:
            return True
        if self._broken.pop(transfer, None) is None:
            _remember(self._refused, transfer, error)
        return False

    def release(self, transfer: int, state: CommandState) -> bool:
        """The command retired. Whether its bytes are to be dropped; such as still come are refused."""
        if self._claimed.get(transfer) is not state:
            return False
        del self._claimed[transfer]
        if transfer in self._started and state.error is not None:
            _remember(self._refused, transfer, state.error)
        return True


def _remember(errors: dict[int, HeliographError], transfer: int, error: HeliographError) -> None:
    if len(errors) >= MAX_REMEMBERED:
        del errors[next(iter(errors))]
    errors[transfer] = error


def _size_error(transfer: int, expected: int, announced: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"transfer {transfer} has {announced} bytes, but its command says {expected}")


class TransferState:
    """The transfers of one session. Commands that nothing is in the way of any more go to `ready`."""

    def __init__(self, limit: int, instructions: list[Instruction], ready: deque[CommandState]) -> None:
        self._limit = limit
        self._instructions = instructions
        self._ready = ready
        #: Why the session ended.
        self.closed: HeliographError | None = None
        self._uploads = Uploads(limit)
        #: Transfers of reads whose bytes were not taken yet.
        self._reading: set[int] = set()

    def bind(self, state: CommandState, kind: c.CommandKind) -> None:
        """Finds the bytes of a write, or lets it wait for them; keeps the number of a read. Raises what the
        command is to be refused with."""
        match kind:
            case c.SetTensor(data=None, shared=None, transfer=transfer):
                self._bind_upload(state, transfer, kind.size_bytes)
            case c.GetTensor(transfer=transfer) if transfer:
                self._bind_read(state, transfer)

    def _bind_upload(self, state: CommandState, transfer: int, size_bytes: int) -> None:
        if state.error is None:
            self._uploads.check_free(transfer)
            self._uploads.expect(state, transfer, size_bytes)
        elif self._uploads.refuse(transfer, state.error):
            self._instructions.append(DropUpload(transfer))

    def _bind_read(self, state: CommandState, transfer: int) -> None:
        if transfer in self._reading:
            if state.error is not None:
                return
            raise InvalidArgumentError(f"transfer {transfer} is read by an earlier command")
        if len(self._reading) >= self._limit:
            raise LimitExceededError("too many reads whose bytes nobody has taken", advice="download them")
        self._reading.add(transfer)
        state.reads_for = transfer

    def is_reading(self, transfer: int) -> bool:
        """Whether a command that reads for this transfer came, and its bytes were not taken."""
        return transfer in self._reading

    def read_ended(self, transfer: int) -> None:
        """The bytes of a read were taken, or are not wanted: the number is free again."""
        self._reading.discard(transfer)

    def started(self, transfer: int, size_bytes: int) -> None:
        """Raises what the upload is to be refused with; a command that waits for it fails with it."""
        if self.closed is not None:
            raise self.closed
        found = self._uploads.started(transfer, size_bytes)
        if isinstance(found, HeliographError):
            self.broke(transfer, found)
            raise found
        if found is not None and found.blockers == 0:
            self._ready.append(found)

    def arrived(self, transfer: int) -> None:
        """All bytes are here. Raises why they are not wanted any more, if so."""
        if self.closed is not None:
            raise self.closed
        if (refusal := self._uploads.arrived(transfer)) is not None:
            raise refusal

    def broke(self, transfer: int, error: HeliographError) -> None:
        """The upload ended before its time; the command that it is for fails. One that runs takes its bytes,
        and learns it from these."""
        state = self._uploads.broke(transfer, error)
        if state is not None and state.phase in (CommandPhase.QUEUED, CommandPhase.SUBMITTED):
            state.error = state.error or error
            if state.phase is CommandPhase.QUEUED and state.blockers == 0:
                self._ready.append(state)
        if not self._uploads.is_claimed(transfer):
            self._instructions.append(DropUpload(transfer))

    def stop_waiting(self, transfer: int, state: CommandState, error: HeliographError) -> None:
        """The command failed before its bytes came."""
        if self._uploads.stop_waiting(transfer, state, error) and state.blockers == 0:
            self._ready.append(state)

    def release(self, transfer: int, state: CommandState) -> None:
        """The command that took the bytes has retired."""
        if self._uploads.release(transfer, state):
            self._instructions.append(DropUpload(transfer, state.error))

    def clear(self) -> None:
        """Forgets everything: the session is over."""
        self._reading.clear()
        self._uploads = Uploads(self._limit)
