"""`hg.aio`: the same names for asyncio.

    async with hg.aio.connect("grpc://127.0.0.1:7070") as session:
        plan = await session.compile(g)
        outputs = await plan.run(x=array)
        future = plan.submit(x=array)           # a plain call
        outputs = await future.result(timeout=1.0)   # or: await future

Graphs are built as everywhere. Whatever waits is a coroutine; cancelling its task cancels the work on
the server. Objects belong to the event loop that opened their session.
"""

# The timeouts are those of the blocking API; each ends in a typed error of ours.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Literal, Self, overload

import numpy as np

from heliograph import _common
from heliograph._aio import AioGrpcShell, AioLocalShell, AioShell
from heliograph._arguments import timeout_ms
from heliograph._common import (
    DeviceBase,
    EventBase,
    SessionBase,
    StreamBase,
    device_name,
    stream_handle,
)
from heliograph._deadline import Deadline
from heliograph._effects import Procedure
from heliograph._outcome import Outcome, Pending
from heliograph._plans import Fetch, Inputs, PlanBase
from heliograph._procedures import (
    Progress,
    Sending,
    read_new,
    synchronize,
    wait_for,
    wait_for_all,
    write,
)
from heliograph._running import Bound, Run, Wanted, collect, fits_inline, run_once, submit
from heliograph._tensors import TensorBase, allocate, checked_type
from heliograph._words import What, cancelled
from heliograph.builder import Graph
from heliograph.protocol import Gate
from heliograph.session import address_of
from heliograph_proto.addresses import Address
from heliograph_proto.description import Memory
from heliograph_proto.errors import HeliographError
from heliograph_proto.types import DTypeArgument

__all__ = [
    "Device",
    "Event",
    "Plan",
    "RunFuture",
    "Session",
    "Stream",
    "Tensor",
    "WriteFuture",
    "connect",
]


class connect:
    """Opens a session: `async with hg.aio.connect(url) as session`, or `session = await hg.aio.connect(url)`.

    Arguments and errors are those of `hg.connect`.
    """

    def __init__(
        self, url: str | None = None, *, timeout: float = 10.0, progress: Progress | None = None
    ) -> None:
        self._address = address_of(url)
        timeout_ms(timeout)
        self._timeout, self._progress = timeout, progress
        self._session: Session | None = None

    def __await__(self) -> Generator[Any, Any, Session]:
        return self._open().__await__()

    async def __aenter__(self) -> Session:
        self._session = await self._open()
        return self._session

    async def __aexit__(self, *details: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def _open(self) -> Session:
        shell = await open_shell(self._address, self._timeout)
        try:
            return Session(shell, self._progress)
        except BaseException:
            await shell.close()
            raise


async def open_shell(address: Address, timeout: float) -> AioShell:
    """A session without its methods."""
    if address.scheme == "local":
        return await AioLocalShell.open(address)
    return await AioGrpcShell.open(address, timeout)


class Event(EventBase):
    """A mark in a stream's order, made by `Stream.record`; awaitable."""

    _shell: AioShell

    async def result(self, timeout: float | None = None) -> None:
        """Waits until the event is reached. Raises the first error of the stream since its last mark."""
        await self._shell.drive(wait_for(self._shell.core, self._pending), timeout, "the event")

    def __await__(self) -> Generator[Any, Any, None]:
        return self.result().__await__()


class Stream(StreamBase):
    """An ordered queue of work on a device, made by `device.stream()`."""

    _shell: AioShell

    def record(self) -> Event:
        """Marks the present end of the stream."""
        return self._record(Event)

    async def synchronize(self, timeout: float | None = None) -> None:
        """Waits until everything before has been computed. Raises the first error nobody has seen."""
        await self._shell.drive(
            synchronize(self._shell.core, (self._live_handle,)), timeout, "the work on the stream"
        )


class Device(DeviceBase):
    """A device of the server."""

    _shell: AioShell

    async def memory(self, timeout: float | None = None) -> Memory:
        """Its free and total bytes, now."""
        return await self._shell.drive(
            _common.ask_memory(self.name), timeout, f"asking for the memory of {self.name}"
        )

    def stream(self) -> Stream:
        """A new ordered queue of work."""
        return _common.make_stream(self._shell, self.name, Stream)


class WriteFuture:
    """A write whose array must stay as it is until the write is done; awaitable."""

    def __init__(self, shell: AioShell, pendings: list[Pending], what: What) -> None:
        self._shell, self._pendings, self._what = shell, pendings, what

    def done(self) -> bool:
        """Whether the array may be overwritten."""
        return all(pending.done for pending in self._pendings)

    async def result(self, timeout: float | None = None) -> None:
        """Waits until the write is done. Raises its error."""
        await self._shell.drive(wait_for_all(self._shell.core, self._pendings), timeout, self._what)

    def __await__(self) -> Generator[Any, Any, None]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<WriteFuture {'done' if self.done() else 'pending'}>"


class Tensor(TensorBase):
    """A tensor in a device's memory; as hg.Tensor, with `set` and `get` awaited."""

    _shell: AioShell

    @overload
    async def set(
        self, array: Any, offset_bytes: int = 0, *, copy: Literal[True] = True, timeout: float | None = None
    ) -> None: ...
    @overload
    async def set(
        self, array: Any, offset_bytes: int = 0, *, copy: Literal[False], timeout: float | None = None
    ) -> WriteFuture: ...
    async def set(
        self, array: Any, offset_bytes: int = 0, *, copy: bool = True, timeout: float | None = None
    ) -> WriteFuture | None:
        """As hg.Tensor.set."""
        command, data = self._writing(array, offset_bytes)
        what = self._doing("writing")
        how = Sending(observed=not copy, keep=not copy, what=what)
        procedure = write(self._shell.core, command, data, self._item_bytes, how)
        pendings = await self._shell.drive(procedure, timeout, what)
        return None if copy else WriteFuture(self._shell, pendings, what)

    async def get(
        self,
        out: np.ndarray[Any, Any] | None = None,
        offset_bytes: int = 0,
        size_bytes: int | None = None,
        *,
        timeout: float | None = None,
    ) -> np.ndarray[Any, Any]:
        """As hg.Tensor.get."""
        command, make = self._reading(out, offset_bytes, size_bytes)
        procedure = read_new(self._shell.core, command, make, self._item_bytes)
        return await self._shell.drive(procedure, timeout, self._doing("reading"))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("under hg.aio a part is written with: await tensor[key].set(array)")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise TypeError("under hg.aio a tensor is read with: await tensor.get()")


class RunFuture:
    """A run that was sent, or waits to be; `await future` or `await future.result(timeout)`."""

    def __init__(
        self, shell: AioShell, sent: asyncio.Future[Run], kept: dict[str, Tensor], what: Callable[[], str]
    ) -> None:
        self._shell, self._sent, self._kept, self._what = shell, sent, kept, what
        self._ended = Outcome()
        sent.add_done_callback(self._was_sent)
        if sent.done():
            self._was_sent(sent)

    def _was_sent(self, sent: asyncio.Future[Run]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            sent.result().pending.add_callback(self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._ended.finish()

    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._ended.done

    def cancel(self) -> bool:
        """Asks the server to cancel the run; False if it has ended already."""
        if self.done():
            return False
        if not self._sent.cancel():
            pending = self._sent.result().pending
            self._shell.advance(lambda: self._shell.core.cancel(pending))
        return True

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The outputs by name: arrays, or tensors if the run was not to fetch them.

        Raises the run's error, or DeadlineExceededError (the run goes on then). Cancelling the task
        that waits cancels the run.
        """
        deadline = Deadline(timeout, self._what)
        run = await self._run(deadline)
        procedure = collect(self._shell.core, run, cancel=False)
        arrays = await self._shell.resume(procedure, lambda: next(procedure), deadline)
        return {**arrays, **self._kept}

    async def _run(self, deadline: Deadline) -> Run:
        if not self._sent.done():
            sent = Outcome()
            self._sent.add_done_callback(lambda _: sent.finish())
            try:
                await self._shell.wait(sent, deadline)
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._sent.cancelled():
            raise cancelled(self._what)
        return self._sent.result()

    def __await__(self) -> Generator[Any, Any, dict[str, Any]]:
        return self.result().__await__()

    async def exception(self, timeout: float | None = None) -> HeliographError | None:
        """The run's error, or None when it went well. Raises DeadlineExceededError."""
        try:
            await self.result(timeout)
        except HeliographError as error:
            if not self.done():
                raise
            return error
        return None

    def add_done_callback(self, function: Callable[[RunFuture], object]) -> None:
        """Calls function(self) on the loop when the run has ended."""
        self._ended.add_callback(partial(function, self))

    def __repr__(self) -> str:
        return f"<RunFuture {'done' if self.done() else 'pending'}>"


class Plan(PlanBase):
    """A graph compiled for a set of devices; as hg.Plan, with `run` and `checkpoint` awaited."""

    _shell: AioShell

    async def run(
        self,
        inputs: Inputs = None,
        /,
        *,
        fetch: Fetch = True,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> dict[str, Any]:
        """As hg.Plan.run; cancelling the task cancels the run."""
        bound = self._bind(inputs, keywords)
        how = Sending(stream_handle(self._shell, stream), observed=True, keep=not copy)
        arguments = self._running(bound, fetch, timeout, how)
        run = await self._shell.drive(run_once(*arguments), timeout, self._spec.what)
        return {**(run.results or {}), **self._tensors(run.kept)}

    def submit(
        self,
        inputs: Inputs = None,
        /,
        *,
        fetch: Fetch = True,
        timeout: float | None = None,
        stream: StreamBase | None = None,
        copy: bool = True,
        **keywords: Any,
    ) -> RunFuture:
        """As hg.Plan.submit; a plain call. Later commands of the session come after this run.

        Where credit must be waited for, a task sends the run; large arrays are copied then, unless
        `copy=False`.
        """
        core, bound = self._shell.core, self._bind(inputs, keywords)
        kept_alive = (inputs, keywords)
        if copy and not fits_inline(core, bound):
            bound = [one if isinstance(one, int) else one.copy() for one in bound]
        where = stream_handle(self._shell, stream)
        gate = core.open_gate()
        how = Sending(where, gate, observed=True, keep=True)
        try:
            arguments = self._running(bound, fetch, timeout, how)
        except BaseException:
            self._shell.advance(lambda: core.close_gate(gate))
            raise
        sent = self._send(submit(*arguments), gate, Deadline(timeout, self._spec.what), kept_alive)
        return RunFuture(self._shell, sent, self._tensors(arguments[3][1]), self._spec.what)

    def _send(
        self, procedure: Procedure[Run], gate: Gate, deadline: Deadline, kept_alive: object
    ) -> asyncio.Future[Run]:
        """Sends at once what can be; the rest in a task."""
        shell = self._shell
        try:
            effect = shell.advance(lambda: next(procedure))
        except StopIteration as stop:
            shell.advance(lambda: shell.core.close_gate(gate))
            sent: asyncio.Future[Run] = asyncio.get_running_loop().create_future()
            sent.set_result(stop.value)
            return sent
        except BaseException:
            shell.advance(lambda: shell.core.close_gate(gate))
            raise

        async def rest() -> Run:
            try:
                return await shell.resume(procedure, lambda: effect, deadline)
            finally:
                shell.advance(lambda: shell.core.close_gate(gate))
                # Tensors that were collected before the run was sent would be freed before it.
                del_later = kept_alive  # noqa: F841

        return shell.spawn(rest())

    def _running(self, bound: list[Bound], fetch: Fetch, timeout: float | None, how: Sending) -> Any:
        """The arguments of `submit` and `run_once`, checked."""
        self._live_handle  # noqa: B018 - raises when it was freed
        chosen = self._choose(fetch)
        shell = self._shell
        return (shell.core, self._spec, bound, chosen, how, timeout_ms(timeout), shell.release)

    def _tensors(self, kept: list[Wanted]) -> dict[str, Tensor]:
        return {one.port.name: Tensor(self._shell, one.handle, one.port.type, self.device) for one in kept}

    @property
    def variables(self) -> dict[str, Tensor]:
        """The variables that the plan reads or writes, by name, as tensors."""
        return {
            one.port.name: Tensor(self._shell, one.tensor, one.port.type, self.device, owned=False)
            for one in self._spec.info.variables
        }

    async def checkpoint(self, timeout: float | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """As hg.Plan.checkpoint."""
        return {name: await tensor.get(timeout=timeout) for name, tensor in self.variables.items()}


class Session(SessionBase):
    """A client's tensors, plans and variables on a server; as hg.Session. Made by `hg.aio.connect`."""

    _shell: AioShell

    def __init__(self, shell: AioShell, progress: Progress | None = None) -> None:
        super().__init__(shell)
        self._progress = progress

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    @property
    def devices(self) -> list[Device]:
        """The server's devices, in the order of their priority."""
        return [Device(self._shell, info) for info in self._shell.info.devices]

    async def compile(
        self,
        graph: Graph,
        devices: Sequence[DeviceBase | str] | DeviceBase | str | None = None,
        *,
        fusion: bool = True,
        timeout: float | None = None,
    ) -> Plan:
        """As hg.Session.compile. Weights are hashed in a thread."""
        procedure = self._compiling(graph, devices, fusion, self._progress)
        spec = await self._shell.drive(procedure, timeout, lambda: f"compiling {graph!r}")
        return Plan(self._shell, spec)

    def empty(
        self, shape: Sequence[int] | int, dtype: DTypeArgument, device: DeviceBase | str | None = None
    ) -> Tensor:
        """As hg.Session.empty; a plain call."""
        where, type_ = device_name(self._shell, device), checked_type(dtype, shape)
        return Tensor(self._shell, allocate(self._shell, type_, where), type_, where)

    async def put(
        self, array: Any, device: DeviceBase | str | None = None, *, timeout: float | None = None
    ) -> Tensor:
        """As hg.Session.put."""
        found = np.asarray(array)
        tensor = self.empty(found.shape, found.dtype, device)
        await tensor.set(found, timeout=timeout)
        return tensor

    def stream(self, device: DeviceBase | str | None = None) -> Stream:
        """As hg.Session.stream; a plain call."""
        return _common.make_stream(self._shell, device_name(self._shell, device), Stream)

    async def synchronize(self, timeout: float | None = None) -> None:
        """As hg.Session.synchronize."""
        await self._shell.drive(
            synchronize(self._shell.core, self._all_streams()), timeout, "the work of the session"
        )

    async def close(self) -> None:
        """As hg.Session.close."""
        await self._shell.close()
