"""The session of a connection: commands that are sent and awaited, from one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError as CancelledFutureError
from typing import NamedTuple, TypeVar

from heliograph_proto import commands as c
from heliograph_proto.errors import CancelledError, DeadlineExceededError, HeliographError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import CompileRequest, PlanOptions
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.compile.turns import CompileTurns
from heliograph_server.resources.principals import Principal
from heliograph_server.runtime.host import Host
from heliograph_server.session.parts.quiet_memory import QuietMemory
from heliograph_server.session.parts.runs_alone import RunsAlone

T = TypeVar("T")

_BYTE = DTYPES["u8"]
#: The bytes of a node in a message of ours, about: they say which compiles are large.
NODE_BYTES = 20
#: The most commands that are sent without a wait for one of them.
MOST_UNAWAITED = 256
#: The most commands that are held to be submitted together.
MOST_HELD = 32


class Memory(NamedTuple):
    """The handles of a buffer, and of all of its bytes as a tensor."""

    buffer: int
    bytes: int


class GatewaySession:
    """A session without a client of ours. Failures appear at the next call.

    Raises DrainingError, LimitExceededError.
    """

    def __init__(
        self,
        host: Host,
        client: str,
        principal: Principal,
        on_lost: Callable[[], None],
        turns: CompileTurns,
        compile_seconds: Callable[[], float],
    ) -> None:
        """`on_lost` is called, on any thread, when the session ends."""
        self.info = host.open_session(client, principal=principal)
        self._session = host.session(self.info.session)
        self._changed = threading.Condition()
        self._sequence = 0
        self._handle = 0
        self._results: dict[int, c.Completion] = {}
        self._failure: HeliographError | None = None
        self._in_flight_bytes = 0
        #: Commands that are submitted together: each submission wakes the device's thread.
        self._held: list[c.Command] = []
        #: True if they are writes alone, which the next command submits.
        self._may_wait = True
        #: Commands since the last wait.
        self._unawaited = 0
        self.piece_bytes = self.info.limits.inline_bytes
        self._most_bytes = max(self.piece_bytes, self.info.limits.in_flight_bytes // 4)
        #: The piece that was read last: fresh memory for each would cost the system a page at a time.
        self._read = bytearray()
        self._on_lost = on_lost
        self._turns, self._compile_seconds = turns, compile_seconds
        self._memory = QuietMemory(self._session.inside)
        self._runs = RunsAlone(self._session.inside)
        # Nothing interrupts the connection's thread.
        self._session.attach(self._apply, self._lose, at_once=lambda: True)

    def close(self) -> None:
        """End the session and free its memory."""
        self._session.close()

    @property
    def device_names(self) -> list[str]:
        return [one.name for one in self.info.devices]

    # Callbacks of the session, on any thread

    def _apply(self, batch: c.CompletionBatch) -> None:
        with self._changed:
            for one in batch.completions:
                assert isinstance(one, c.Completion)
                self._results[one.sequence] = one
                if one.error is not None and self._failure is None:
                    self._failure = one.error
            self._changed.notify_all()

    def _lose(self, error: HeliographError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        self._on_lost()

    # Commands

    def handle(self) -> int:
        """Return a new handle."""
        self._handle += 1
        return self._handle

    def send(self, *kinds: c.CommandKind) -> None:
        """Send commands without a wait; they are held until `flush` or another call. Raises the
        error of an earlier one."""
        self._submit(kinds, notify=False)
        self._unawaited += len(kinds)
        if self._unawaited > MOST_UNAWAITED:
            self.call(c.Synchronize())

    def call(self, *kinds: c.CommandKind) -> c.Completion:
        """Send commands and return the completion of the last one. Raises the first error."""
        last = self._submit(kinds, notify=True)
        self._unawaited = 0
        with self._changed:
            while last not in self._results and self._failure is None:
                self._changed.wait()
            self._check()
            return self._results.pop(last)

    def attempt(self, *kinds: c.CommandKind) -> HeliographError | None:
        """Send commands and return the error of the last one, which does not count as a failure."""
        last = self._submit(kinds, notify=True)
        with self._changed:
            while last not in self._results and self._failure is None:
                self._changed.wait()
            found = self._results.pop(last, None)
            if found is not None and found.error is not None and self._failure is found.error:
                self._failure = None
                return found.error
            self._check()
            return None

    def _submit(self, kinds: Sequence[c.CommandKind], *, notify: bool) -> int:
        for place, kind in enumerate(kinds):
            self._sequence += 1
            is_last = notify and place == len(kinds) - 1
            self._may_wait = self._may_wait and isinstance(kind, c.SetTensor)
            self._held.append(c.Command(self._sequence, kind, notify=is_last))
        if notify or len(self._held) >= MOST_HELD:
            self.flush()
        return self._sequence

    def flush_work(self) -> None:
        """Submit the commands that are held, unless they are writes alone. Raises as `flush`."""
        if not self._may_wait:
            self.flush()

    def flush(self) -> None:
        """Submit the commands that are held. Raises the error of an earlier one."""
        if not self._held:
            return
        with self._changed:
            self._check()
            self._results.clear()
        held, self._held, self._may_wait = self._held, [], True
        # This thread waits for the work anyway.
        here: list[Callable[[], None]] = []
        try:
            self._session.submit(held, here)
        finally:
            for work in here:
                work()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Memory

    def allocate(self, device: str, size: int) -> Memory | HeliographError:
        """Return new memory, or the error why there is none."""
        made, size = Memory(self.handle(), self.handle()), max(1, size)
        error = self.attempt(c.AllocateBuffer(made.buffer, size, device))
        if error is not None:
            self.free(made.buffer)
            return error
        self.call(c.PlaceTensor(made.bytes, made.buffer, 0, TensorType(_BYTE, (size,))))
        return made

    def view(self, source: int, offset: int, type: TensorType) -> int:
        """Return the handle of a part of memory as a tensor."""
        tensor = self.handle()
        self.send(c.View(tensor, source, offset, type))
        return tensor

    def free(self, *handles: int) -> None:
        if handles:
            self.send(c.Free(handles))

    def set(self, tensor: int, offset: int, data: bytearray) -> None:
        """Write bytes, of one piece at most. Waits while much is in flight."""
        if not self._may_wait:
            self.flush()
        self._check()
        if not self._held and self._memory.write(tensor, offset, data):
            return
        command = c.SetTensor(tensor, offset, data)
        self._in_flight_bytes += len(data)
        if self._in_flight_bytes > self._most_bytes:
            self._in_flight_bytes = 0
            self.call(command)
        else:
            self.send(command)

    def get(self, tensor: int, offset: int, size: int) -> c.Bytes:
        """Return bytes, of one piece at most, after all that was sent before; valid until the next
        call."""
        self.flush()
        self._check()
        if len(self._read) < size:
            self._read = bytearray(size)
        found = memoryview(self._read)[:size]
        if self._memory.read(tensor, offset, found):
            return found
        self._in_flight_bytes = 0
        return self.call(c.GetTensor(tensor, offset, size)).data

    def copy(self, source: int, start: int, destination: int, to: int, size: int) -> bool:
        """Copy bytes. False if the two overlap."""
        type = TensorType(_BYTE, (size,))
        if source == destination and start < to + size and to < start + size:
            return start == to
        views = self.view(source, start, type), self.view(destination, to, type)
        self.call(c.CopyTensor(*views))
        self.free(*views)
        return True

    # Plans

    def run(self, run: c.RunCommand, copies: Sequence[c.CopyTensor]) -> None:
        """Send a run, and copies of its results. Raises its error if that is known, or one of
        before."""
        self.flush()
        self._check()
        if self._runs.run(run):
            self._sequence += 1
        else:
            self.send(run)
            self.flush()
        self._check()
        for one in copies:
            if self._held or not self._memory.copy(one.source, one.destination):
                self.send(one)

    def in_turn(self, size_bytes: int, call: Callable[[], T]) -> T:
        """Compute something about a graph whose message has so many bytes, in the tenant's turn.

        Raises its errors, and DeadlineExceededError.
        """
        turn = self._turns.submit(self._session.flow, size_bytes, call)
        seconds = self._compile_seconds()
        try:
            found: T = turn.future.result(seconds)
        except TimeoutError:
            turn.cancel()
            raise DeadlineExceededError(f"the compile took longer than {seconds:g} s") from None
        except CancelledFutureError:
            raise CancelledError("the server is closing") from None
        return found

    def compile(self, graph: Graph, bindings: dict[int, int], device: str) -> int:
        """Compile a graph and return the plan's handle. Raises the errors of a compile."""
        plan = self.handle()
        # The memory that it is bound to must be there.
        self.call(c.Synchronize())
        request = CompileRequest(plan, graph, PlanOptions(devices=(device,)), bindings)
        self.in_turn(NODE_BYTES * len(graph.nodes), lambda: self._session.compile(request))
        return plan
