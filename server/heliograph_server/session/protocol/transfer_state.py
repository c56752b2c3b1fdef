"""Transfers: bulk calls carry the bytes, and commands name them. This module matches the two.

Either side may come first, and either may fail. A transfer's number is free again when its command
has retired (uploads) or its bytes were read (downloads).

    upload first:   started ─▸ arrived
                       └──(command)──┴──▸ claimed ─▸ free
    command first:  waiting ──(upload starts)──▸ claimed ─▸ free
    command fails first:  refused, until its upload starts and receives the error
    upload fails first:   broken, until its command comes and fails with the error

A command that claimed its upload may have its turn before all bytes are there. It takes the bytes
as they come, and fails with the upload.
"""

from __future__ import annotations

from collections import deque

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError, LimitExceededError, ProtocolError
from heliograph_server.session.protocol.dependencies import CommandPhase, CommandState
from heliograph_server.session.protocol.instructions import DropUpload, Instruction

#: The most failures of one side kept for the other. The oldest are forgotten first.
MAX_REMEMBERED = 10_000


class TransferState:
    """The transfers of one session. Commands that a transfer unblocks go to `ready`.

    Pure: it holds sizes and errors, but no bytes.
    """

    def __init__(self, limit: int, instructions: list[Instruction], ready: deque[CommandState]) -> None:
        #: The most uploads without a command, and the most reads whose bytes were not taken.
        self._limit = limit
        self._instructions = instructions
        self._ready = ready
        #: The error that closed the session.
        self.closed: HeliographError | None = None
        #: Sizes of uploads whose bytes are coming, and of those that are here without a command.
        self._started: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._waiting: dict[int, tuple[CommandState, int]] = {}
        self._claimed: dict[int, CommandState] = {}
        self._refused: dict[int, HeliographError] = {}
        self._broken: dict[int, HeliographError] = {}
        #: At the last look: transfers without their other half, with the command if there is one.
        self._alone: dict[int, CommandState | None] = {}
        #: Transfers of reads whose bytes were not taken yet.
        self._reading: set[int] = set()

    def __repr__(self) -> str:
        coming, arrived = len(self._started), len(self._arrived)
        return f"<TransferState {coming} coming, {arrived} unclaimed, {len(self._waiting)} awaited>"

    # Commands

    def bind(self, state: CommandState, kind: c.CommandKind) -> None:
        """Claim the bytes of a write, or block it until they come; register the transfer of a read.

        Raises the error that refuses the command.
        """
        match kind:
            case c.SetTensor(data=None, shared=None, transfer=transfer):
                if state.error is None:
                    self._claim(state, transfer, kind.size_bytes)
                else:
                    self._refuse(transfer, state.error)
            case c.GetTensor(transfer=transfer) if transfer:
                if transfer not in self._reading:
                    if len(self._reading) >= self._limit:
                        raise LimitExceededError(
                            "too many reads whose bytes were not taken", advice="download them"
                        )
                    self._reading.add(transfer)
                    state.reads_for = transfer
                elif state.error is None:
                    raise InvalidArgumentError(f"transfer {transfer} is read by an earlier command")

    def _claim(self, state: CommandState, transfer: int, size_bytes: int) -> None:
        """Claim an upload that has started, or block the command until it does.

        Raises InvalidArgumentError if another unfinished command names the transfer.
        """
        if transfer <= 0:
            raise InvalidArgumentError("transfer 0 does not exist", advice="choose a number from 1")
        if transfer in self._waiting or transfer in self._claimed:
            raise InvalidArgumentError(f"transfer {transfer} is awaited by an earlier command")
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

    def _refuse(self, transfer: int, error: HeliographError) -> None:
        """Refuse the upload of a command that failed at once; drop bytes that are here."""
        if transfer in self._waiting or transfer in self._claimed:
            return
        if self._arrived.pop(transfer, None) is not None:
            self._instructions.append(DropUpload(transfer))
        elif self._broken.pop(transfer, None) is None:
            _remember(self._refused, transfer, error)

    def stop_waiting(self, transfer: int, state: CommandState, error: HeliographError) -> None:
        """Record that a command failed early. One that waits for its upload is unblocked."""
        if self._waiting.get(transfer, (None, 0))[0] is not state:
            return
        del self._waiting[transfer]
        state.blockers -= 1
        _remember(self._refused, transfer, error)
        if state.blockers == 0:
            self._ready.append(state)

    def release(self, transfer: int, state: CommandState) -> None:
        """Drop the bytes of a command that has retired. Further bytes are refused."""
        if self._claimed.get(transfer) is not state:
            return
        del self._claimed[transfer]
        if transfer in self._started and state.error is not None:
            _remember(self._refused, transfer, state.error)
        self._instructions.append(DropUpload(transfer, state.error))

    # Uploads

    def started(self, transfer: int, size_bytes: int) -> None:
        """Record that an upload began, and unblock the command that waits for it.

        Raises the error that refuses the upload; a waiting command fails with it.
        """
        if self.closed is not None:
            raise self.closed
        if (
            transfer <= 0
            or transfer in self._started
            or transfer in self._arrived
            or transfer in self._claimed
        ):
            raise ProtocolError(f"transfer {transfer} cannot be uploaded: 0, or uploaded already")
        refusal = self._refused.pop(transfer, None)
        if refusal is None:
            if len(self._started) + len(self._arrived) >= self._limit:
                raise LimitExceededError(
                    f"{self._limit:,} uploads wait for their commands", advice="send the commands"
                )
            self._started[transfer] = size_bytes
            if transfer not in self._waiting:
                return
            state, expected = self._waiting[transfer]
            if expected == size_bytes:
                del self._waiting[transfer]
                self._claimed[transfer] = state
                state.blockers -= 1
                if state.blockers == 0:
                    self._ready.append(state)
                return
            refusal = _size_error(transfer, expected, size_bytes)
        self.broke(transfer, refusal)
        raise refusal

    def arrived(self, transfer: int) -> None:
        """Record that all bytes are here. Raises the error of a command that failed meanwhile."""
        if self.closed is not None:
            raise self.closed
        size_bytes = self._started.pop(transfer)
        if transfer in self._refused:
            raise self._refused.pop(transfer)
        if transfer not in self._claimed:
            self._arrived[transfer] = size_bytes

    def broke(self, transfer: int, error: HeliographError) -> None:
        """Record that an upload ended early. Its command fails."""
        if self._started.pop(transfer, None) is not None and self._refused.pop(transfer, None) is None:
            state = self._claimed.get(transfer)
            if state is None and transfer in self._waiting:
                state, _ = self._waiting.pop(transfer)
                state.blockers -= 1
            if state is None:
                _remember(self._broken, transfer, error)
            elif state.phase in (CommandPhase.QUEUED, CommandPhase.SUBMITTED):
                state.error = state.error or error
                if state.phase is CommandPhase.QUEUED and state.blockers == 0:
                    self._ready.append(state)
        if transfer not in self._claimed:
            self._instructions.append(DropUpload(transfer))

    def drop_unmatched(self, error: HeliographError) -> list[CommandState]:
        """Drop the uploads that no command has named since the last call, and return the commands
        whose upload has not begun since then."""
        before = self._alone
        self._alone = {transfer: state for transfer, (state, _) in self._waiting.items()}
        self._alone |= dict.fromkeys(self._arrived)
        over = [one for one, state in self._alone.items() if one in before and before[one] is state]
        late = []
        for transfer in over:
            if (state := self._alone.pop(transfer)) is not None:
                late.append(state)
                continue
            del self._arrived[transfer]
            _remember(self._broken, transfer, error)
            self._instructions.append(DropUpload(transfer, error))
        return late

    # Downloads

    def is_reading(self, transfer: int) -> bool:
        """True if a command reads for this transfer and its bytes were not taken."""
        return transfer in self._reading

    def read_ended(self, transfer: int) -> None:
        """Free the number of a read whose bytes were taken, or are no longer needed."""
        self._reading.discard(transfer)

    def clear(self) -> None:
        """Forget everything, at the end of the session."""
        for kept in (self._started, self._arrived, self._waiting, self._claimed, self._refused, self._broken):
            kept.clear()
        self._reading.clear()
        self._alone.clear()


def _remember(errors: dict[int, HeliographError], transfer: int, error: HeliographError) -> None:
    if len(errors) >= MAX_REMEMBERED:
        del errors[next(iter(errors))]
    errors[transfer] = error


def _size_error(transfer: int, expected: int, announced: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"transfer {transfer} has {announced} bytes, but its command says {expected}")
