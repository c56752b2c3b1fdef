"""Observed runs and loops: the part of a session's protocol that tells of them, and lets them go on."""

from __future__ import annotations

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError
from heliograph_proto.limits import Limits
from heliograph_server.core.loops import never_read
from heliograph_server.core.ordering import Entry
from heliograph_server.core.pieces import pieces_of
from heliograph_server.core.tasks import Proceed, RunTask
from heliograph_server.core.transfer_core import TransferCore


class ObservingCore(TransferCore):
    """What of a session's state observed runs are. The rest is `SessionCore`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        #: Commands that were not reported, by sequence number.
        self._open: dict[int, Entry] = {}
        self._taps: list[c.TapPiece] = []
        #: Whether no more commands will come.
        self._is_over = False

    def tapped(self, sequence: int, node: int, data: memoryview) -> bool:
        """A run has computed a node that is observed; whether it is to wait for its client."""
        entry = self._open.get(sequence)
        # Of a run that was reported, cancelled most likely, nobody wants to know more.
        if entry is None:
            return False
        self._taps.extend(pieces_of(sequence, node, data, self._limits.inline_bytes))
        pauses = isinstance(entry.task, RunTask) and entry.task.pauses
        entry.is_paused = pauses and not self._is_over
        return entry.is_paused

    def stream(self, sequence: int, step: int, node: int, output: int | None, data: memoryview) -> bool:
        """A loop has a value for its client. False: not yet, it is to ask again when it may proceed.

        Raises LimitExceededError where that would be never.
        """
        entry = self._open.get(sequence)
        if entry is None:
            return True
        assert entry.unread is not None
        if not entry.unread.has_room(data.nbytes):
            if self._is_over:
                raise never_read()
            entry.is_paused = True
            return False
        entry.unread.tell(data.nbytes)
        self._taps.extend(pieces_of(sequence, node, data, self._limits.inline_bytes, step, output))
        return True

    def _proceed(self, entry: Entry, kind: c.Continue) -> None:
        """Lets a run go on. That there is none that waits fails this command alone, not its stream."""
        run = self._open.get(kind.sequence)
        entry.stream = None
        try:
            if run is None or not (run.is_paused or run.unread):
                raise InvalidArgumentError(
                    f"command {kind.sequence} is no run that waits at an observed node, and no loop"
                )
            if run.unread is not None:
                run.unread.take(kind.taken_bytes)
            if run.is_paused:
                self._resume_run(run)
        except HeliographError as error:
            entry.error = entry.error or error.from_command(entry.sequence)

    def _resume_run(self, run: Entry) -> None:
        run.is_paused = False
        self._instructions.append(Proceed(run.sequence))

    def end_of_commands(self) -> None:
        """No more commands will come: no run waits for one any more."""
        self._is_over = True
        for entry in self._open.values():
            if entry.is_paused:
                self._resume_run(entry)
