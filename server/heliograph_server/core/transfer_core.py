"""Bytes that travel beside the commands: the part of a session's protocol that uploads and reads change."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError, LimitExceededError
from heliograph_proto.limits import Limits
from heliograph_server.core.ordering import Entry, Phase
from heliograph_server.core.plan_core import PlanCore
from heliograph_server.core.tasks import DropUpload
from heliograph_server.core.transfers import Uploads


class TransferCore(PlanCore):
    """What of a session's state transfers are. The rest is `SessionCore`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._uploads = Uploads(limits.in_flight_commands)
        #: Transfers of reads whose bytes nobody has taken yet.
        self._reading: set[int] = set()
        #: Entries that nothing is in the way of.
        self._ready: deque[Entry] = deque()

    @abstractmethod
    def _refuse(self, entry: Entry, kind: c.CommandKind, error: HeliographError) -> None:
        """Makes it an entry that fails in its turn, and poisons what it was to produce."""

    def _bind_transfer(self, entry: Entry, kind: c.CommandKind) -> None:
        """Finds the bytes of a write, or lets it wait for them; keeps the number of a read."""
        try:
            match kind:
                case c.SetTensor(data=None, shared=None, transfer=transfer):
                    self._bind_upload(entry, transfer, kind.size_bytes)
                case c.GetTensor(transfer=transfer) if transfer:
                    self._bind_read(entry, transfer)
        except HeliographError as error:
            self._refuse(entry, kind, error.from_command(entry.sequence))
            entry.task = None

    def _bind_upload(self, entry: Entry, transfer: int, size_bytes: int) -> None:
        if entry.error is None:
            self._uploads.check_free(transfer)
            self._uploads.expect(entry, transfer, size_bytes)
        elif self._uploads.refuse(transfer, entry.error):
            self._instructions.append(DropUpload(transfer))

    def _bind_read(self, entry: Entry, transfer: int) -> None:
        if transfer in self._reading:
            if entry.error is not None:
                return
            raise InvalidArgumentError(f"transfer {transfer} is read by an earlier command")
        if len(self._reading) >= self._limits.in_flight_commands:
            raise LimitExceededError("too many reads whose bytes nobody has taken", advice="download them")
        self._reading.add(transfer)
        entry.reads_for = transfer

    def read_ended(self, transfer: int) -> None:
        """The bytes of a read were taken, or nobody wants them: the number is free again."""
        self._reading.discard(transfer)

    def upload_started(self, transfer: int, size_bytes: int) -> None:
        """Raises what the upload is to be refused with; a command that waits for it fails with it."""
        if self.closed is not None:
            raise self.closed
        found = self._uploads.started(transfer, size_bytes)
        if isinstance(found, HeliographError):
            self.upload_broke(transfer, found)
            raise found
        if found is not None and found.blockers == 0:
            self._ready.append(found)
        self._settle()

    def upload_arrived(self, transfer: int) -> None:
        """All bytes are here. Raises why they are not wanted any more, if so."""
        if self.closed is not None:
            raise self.closed
        if (refusal := self._uploads.arrived(transfer)) is not None:
            raise refusal

    def upload_broke(self, transfer: int, error: HeliographError) -> None:
        """The upload ended before its time; the command that it is for fails. One that runs takes its bytes,
        and learns it from these."""
        entry = self._uploads.broke(transfer, error)
        if entry is not None and entry.phase in (Phase.QUEUED, Phase.SUBMITTED):
            entry.error = entry.error or error
            if entry.phase is Phase.QUEUED and entry.blockers == 0:
                self._ready.append(entry)
        if not self._uploads.is_claimed(transfer):
            self._instructions.append(DropUpload(transfer))
        self._settle()
