"""Observed runs and loops: the values that they send to their client, and their pauses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from heliograph_proto import commands as c
from heliograph_proto.commands import TapPiece
from heliograph_proto.errors import HeliographError, InvalidArgumentError
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import Instruction, Proceed, RunTask
from heliograph_server.session.protocol.loop_rules import never_read


def pieces_of(
    sequence: int,
    node: int,
    data: memoryview,
    most_bytes: int,
    step: int = 0,
    output: int | None = None,
    *,
    gather_ms: int | None = None,
) -> Iterator[TapPiece]:
    """Cut a value into pieces of at most `most_bytes`. An empty value is one empty piece."""
    most = max(1, most_bytes)
    for offset in range(0, max(1, data.nbytes), most):
        last = offset + most >= data.nbytes
        part = data[offset : offset + most]
        yield TapPiece(sequence, node, offset, part, last, step, output, gather_ms)


class TapState:
    """The values that the runs of one session send while they run.

    `commands` are the unreported ones, by sequence number. The bytes are appended to `pieces`, none
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
        #: True once the command stream has ended.
        self._is_over = False
        #: The complete steps of loops to tell of, by sequence number.
        self.steps: dict[int, int] = {}

    def tapped(self, sequence: int, node: int, data: memoryview) -> bool:
        """Send the value of an observed node. True if the run must wait for its client."""
        run = self._commands.get(sequence)
        # A run that was reported early was cancelled: its client expects no more values.
        if run is None:
            return False
        self._pieces.extend(pieces_of(sequence, node, data, self._piece_bytes))
        run.is_paused = isinstance(run.task, RunTask) and run.task.command.pause and not self._is_over
        return run.is_paused

    def counted(self, sequence: int, steps: int) -> None:
        """Tell of a loop's complete steps. Only the last count is sent."""
        if sequence in self._commands:
            self.steps[sequence] = steps

    def take_steps(self) -> tuple[tuple[int, int], ...]:
        """Return the counts since the last call."""
        found, self.steps = self.steps, {}
        return tuple(found.items())

    def stream(self, sequence: int, step: int, node: int, output: int | None, data: memoryview) -> bool:
        """Send a value of a loop. False if the loop must wait to proceed, and try again.

        Raises LimitExceededError if the loop would wait forever.
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
        assert isinstance(run.task, RunTask) and (loop := run.task.command.loop) is not None
        # A client that feeds the loop may wait for a value, and another daemon may too.
        may_gather = output is not None and not loop.is_fed and loop.exchange is None
        gather_ms = loop.gather_ms if may_gather else None
        self._pieces.extend(
            pieces_of(sequence, node, data, self._piece_bytes, step, output, gather_ms=gather_ms)
        )
        return True

    def proceed(self, state: CommandState, kind: c.Continue) -> None:
        """Resume a run for a Continue command, which fails alone if no run waits."""
        run = self._commands.get(kind.sequence)
        state.stream = None
        try:
            if run is None or not (run.is_paused or run.unread):
                raise InvalidArgumentError(
                    f"command {kind.sequence} is neither a run that waits at an observed node nor a loop"
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
        """Record the end of the command stream. Runs that wait for a command proceed."""
        self._is_over = True
        for run in self._commands.values():
            if run.is_paused:
                self._resume(run)
