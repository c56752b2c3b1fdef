"""Observed runs and loops: the values that they tell their client, and when they may go on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from heliograph_proto import commands as c
from heliograph_proto.commands import TapPiece
from heliograph_proto.errors import HeliographError, InvalidArgumentError
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import Instruction, Proceed, RunTask
from heliograph_server.session.protocol.loop_rules import never_read


def pieces_of(
    sequence: int, node: int, data: memoryview, most_bytes: int, step: int = 0, output: int | None = None
) -> Iterator[TapPiece]:
    """The bytes in order, at most `most_bytes` in each piece; of no bytes one empty piece."""
    most = max(1, most_bytes)
    for offset in range(0, max(1, data.nbytes), most):
        last = offset + most >= data.nbytes
        yield TapPiece(sequence, node, offset, data[offset : offset + most], last, step, output)


class TapState:
    """What the runs of one session tell their client while they run.

    `commands` are those that were not reported, by sequence number; the bytes go to `pieces`, none
    longer than `piece_bytes`.
    """

    def __init__(
        self,
        commands: Mapping[int, CommandState],
        pieces: list[TapPiece],
        instructions: list[Instruction],
        piece_bytes: int,
    ) -> None:
        self._commands = commands
        self._pieces = pieces
        self._instructions = instructions
        self._piece_bytes = piece_bytes
        #: Whether no more commands will come.
        self._is_over = False

    def tapped(self, sequence: int, node: int, data: memoryview) -> bool:
        """Tells of an observed node that a run has computed; whether the run is to wait for its client."""
        run = self._commands.get(sequence)
        # A run that was reported was cancelled, most likely: its client awaits no more of it.
        if run is None:
            return False
        self._pieces.extend(pieces_of(sequence, node, data, self._piece_bytes))
        run.is_paused = isinstance(run.task, RunTask) and run.task.command.pause and not self._is_over
        return run.is_paused

    def stream(self, sequence: int, step: int, node: int, output: int | None, data: memoryview) -> bool:
        """Tells of a loop's value for its client. False: not yet, it is to ask again when it may proceed.

        Raises LimitExceededError where that would be never.
        """
        run = self._commands.get(sequence)
        if run is None:
            return True
        assert run.unread is not None
        if not run.unread.has_room(data.nbytes):
            if self._is_over:
                raise never_read()
            run.is_paused = True
            return False
        run.unread.tell(data.nbytes)
        self._pieces.extend(pieces_of(sequence, node, data, self._piece_bytes, step, output))
        return True

    def proceed(self, state: CommandState, kind: c.Continue) -> None:
        """Lets a run go on. That there is none that waits fails this command alone, not its stream."""
        run = self._commands.get(kind.sequence)
        state.stream = None
        try:
            if run is None or not (run.is_paused or run.unread):
                raise InvalidArgumentError(
                    f"command {kind.sequence} is no run that waits at an observed node, and no loop"
                )
            if run.unread is not None:
                run.unread.take(kind.taken_bytes)
            if run.is_paused:
                self._resume(run)
        except HeliographError as error:
            state.error = state.error or error.from_command(state.sequence)

    def _resume(self, run: CommandState) -> None:
        run.is_paused = False
        self._instructions.append(Proceed(run.sequence))

    def end_of_commands(self) -> None:
        """No more commands will come: no run waits for one any more."""
        self._is_over = True
        for run in self._commands.values():
            if run.is_paused:
                self._resume(run)
