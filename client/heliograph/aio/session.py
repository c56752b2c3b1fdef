"""Sessions for asyncio; as `heliograph.session`."""

# The timeouts are those of the blocking API; each ends in a typed error of ours.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from heliograph._aio import AioGrpcShell, AioShell
from heliograph._aio_local import AioLocalShell
from heliograph._arguments import timeout_ms
from heliograph._buffers import (
    BufferTypeArgument,
    UsageArgument,
    new_buffer,
    new_tensor,
    new_tensors,
    place_of,
    wrapped,
)
from heliograph._channels import NO_CREDENTIALS, credentials_of
from heliograph._deadline import Deadline
from heliograph._devices import DeviceArgument, DevicesArgument, best_device, device_name, find_device
from heliograph._journal import JOURNAL_BYTES
from heliograph._models import ServerWeights, describe_model, list_models
from heliograph._pins import MemoryLimits, Pins
from heliograph._placing import BufferTypes, Placing
from heliograph._plans import Fetch, Inputs
from heliograph._procedures import synchronize
from heliograph._progress import ProgressArgument, checked_progress
from heliograph._reserving import Reservation
from heliograph._sessions import (
    Bindings,
    OnLoss,
    SessionBase,
    ask_backends,
    ask_facts,
    ask_members,
    ask_traffic,
    ask_ways,
    check_on_loss,
)
from heliograph._shared import SharedMemoryArgument, checked_shared_memory, insisted
from heliograph._split_buffer_type import Splits
from heliograph._streams import make_stream
from heliograph._words import ALONE
from heliograph.aio.log_lines import LogLines
from heliograph.aio.plan import Plan
from heliograph.aio.stream import Device, Stream
from heliograph.aio.tensor import Buffer, Tensor
from heliograph.aio.watching import DeviceWatch
from heliograph.builder import Graph
from heliograph.session import Servers, address_of
from heliograph_proto.addresses import Address
from heliograph_proto.credentials import Credentials
from heliograph_proto.description import BackendInfo, DeviceType, PlanEstimate, Traffic
from heliograph_proto.errors import DeadlineExceededError
from heliograph_proto.membership import MemberInfo, Way
from heliograph_proto.types import DTypeArgument


class connect:
    """Opens a session: `async with hg.aio.connect(url) as session`, or `session = await hg.aio.connect(url)`.

    Arguments and errors are those of `hg.connect`.
    """

    def __init__(
        self,
        url: Servers = None,
        *,
        timeout: float = 10.0,
        progress: ProgressArgument = "auto",
        shared_memory: SharedMemoryArgument = "auto",
        token: str | None = None,
        ca: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
    ) -> None:
        self._address = address_of(url)
        self._credentials = credentials_of(self._address, token, ca, certificate, key)
        timeout_ms(timeout)
        self._timeout, self._progress = timeout, checked_progress(progress)
        self._shared_memory = checked_shared_memory(shared_memory)
        self._session: Session | None = None

    def __await__(self) -> Generator[Any, Any, Session]:
        return self._open().__await__()

    if not TYPE_CHECKING:  # to checkers there are no such attributes

        def __getattr__(self, name: str) -> NoReturn:
            # The first mistake under asyncio; Python would speak of an object of the class `connect`.
            raise AttributeError(
                f"no session is open yet, so there is no {name!r}: "
                "`async with hg.aio.connect(url) as session`, or `session = await hg.aio.connect(url)`"
            )

    async def __aenter__(self) -> Session:
        self._session = await self._open()
        return self._session

    async def __aexit__(self, *details: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def _open(self) -> Session:
        shell = await open_shell(self._address, self._timeout, self._shared_memory, self._credentials)
        try:
            return Session(shell, self._progress)
        except BaseException:
            await shell.close()
            raise


async def open_shell(
    address: Address,
    timeout: float,
    shared_memory: SharedMemoryArgument = "auto",
    credentials: Credentials = NO_CREDENTIALS,
) -> AioShell:
    """A session without its methods."""
    if address.scheme == "local":
        if shared_memory is True:
            raise insisted(address, ALONE)
        return await AioLocalShell.open(address, timeout, credentials)
    return await AioGrpcShell.open(address, timeout, shared_memory, credentials)


class Session(SessionBase):
    """A client's tensors, plans and variables on a server; as hg.Session. Made by `hg.aio.connect`."""

    _shell: AioShell

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    # Devices

    @property
    def devices(self) -> list[Device]:
        """As hg.Session.devices."""
        return [Device(self._shell, info) for info in self._shell.info.devices]

    def device(self, name: str) -> Device:
        """As hg.Session.device."""
        return Device(self._shell, find_device(self._shell, name))

    def devices_of(self, kind: DeviceType) -> list[Device]:
        """As hg.Session.devices_of."""
        return [device for device in self.devices if device.type is kind]

    def best_device(self) -> Device:
        """As hg.Session.best_device."""
        return Device(self._shell, best_device(self._shell))

    def watch(self) -> DeviceWatch:
        """As hg.Session.watch: an asynchronous iterator. A plain call."""
        made = DeviceWatch()
        self._shell.watchers.add(made)
        return made

    async def members(self, timeout: float | None = None) -> tuple[MemberInfo, ...]:
        """As hg.Session.members."""
        return await self._shell.drive(ask_members(), timeout, "asking for the members")

    async def ways(self, timeout: float | None = None) -> tuple[Way, ...]:
        """As hg.Session.ways."""
        return await self._shell.drive(ask_ways(self.info), timeout, "asking for the ways between members")

    async def backends(self, timeout: float | None = None) -> tuple[BackendInfo, ...]:
        """As hg.Session.backends."""
        return await self._shell.drive(ask_backends(), timeout, "asking for the backends")

    async def server_facts(self, timeout: float | None = None) -> Mapping[str, str]:
        """As hg.Session.server_facts."""
        return await self._shell.drive(ask_facts(), timeout, "asking for the server's facts")

    def log(self, level: str = "info") -> LogLines:
        """As hg.Session.log: `async for line in session.log()`. It begins where the first line is waited for,
        or where `async with session.log() as lines` is entered."""
        return LogLines(self._shell, level)

    async def server_traffic(self, timeout: float | None = None) -> Traffic:
        """As hg.Session.server_traffic."""
        return await self._shell.drive(ask_traffic(self.info), timeout, "asking for the server's statistics")

    # Models on the server

    async def models(self, timeout: float | None = None) -> tuple[str, ...]:
        """As hg.Session.models."""
        return await self._shell.drive(list_models(), timeout, "asking for the models")

    async def server_weights(self, file: str, timeout: float | None = None) -> ServerWeights:
        """As hg.Session.server_weights."""
        return await self._shell.drive(describe_model(file), timeout, "reading the model")

    def stream(self, device: DeviceArgument = None) -> Stream:
        """As hg.Session.stream; a plain call."""
        return make_stream(self._shell, device_name(self._shell, device), Stream)

    # Plans

    async def compile(
        self,
        graph: Graph,
        devices: DevicesArgument = None,
        *,
        fusion: bool = True,
        threads: int = 0,
        weights: Bindings = None,
        variables: Bindings = None,
        pins: Pins = None,
        memory: MemoryLimits = None,
        pipeline: int = 1,
        split: Splits = None,
        buffer_types: BufferTypes = None,
        on_loss: OnLoss = "raise",
        journal_bytes: int = JOURNAL_BYTES,
        timeout: float | None = None,
    ) -> Plan:
        """As hg.Session.compile. Weights are hashed in a thread."""
        check_on_loss(on_loss, journal_bytes, variables)
        deadline = Deadline(timeout, lambda: f"compiling {graph!r}")
        placing = Placing(pins, memory, split, buffer_types)
        procedure = self._compiling(graph, devices, fusion, threads, weights, variables, placing, pipeline)
        spec = await self._shell.drive(procedure, timeout, lambda: f"compiling {graph!r}")
        plan = Plan(self._shell, spec, self._progress)
        await self._shell.drive(self._admitting(plan, on_loss, journal_bytes), deadline.remaining())
        return plan

    async def estimate(
        self,
        graph: Graph,
        devices: DevicesArgument = None,
        *,
        fusion: bool = True,
        pins: Pins = None,
        memory: MemoryLimits = None,
        pipeline: int = 1,
        timeout: float | None = None,
    ) -> PlanEstimate:
        """As hg.Session.estimate."""
        procedure = self._estimating(graph, devices, fusion, Placing(pins, memory), pipeline)
        return await self._shell.drive(procedure, timeout, lambda: f"estimating {graph!r}")

    async def reserve(
        self,
        graph: Graph,
        devices: DevicesArgument = None,
        *,
        fusion: bool = True,
        threads: int = 0,
        pins: Pins = None,
        memory: MemoryLimits = None,
        timeout: float | None = None,
    ) -> Reservation:
        """As hg.Session.reserve."""
        procedure = self._reserving(graph, devices, fusion, threads, Placing(pins, memory))
        return await self._shell.drive(procedure, timeout, lambda: f"reserving memory for {graph!r}")

    async def compute(
        self,
        graph: Graph,
        inputs: Inputs = None,
        /,
        *,
        devices: DevicesArgument = None,
        fetch: Fetch = True,
        timeout: float | None = None,
        **keywords: Any,
    ) -> dict[str, Any]:
        """As hg.Session.compute."""
        deadline = Deadline(timeout, lambda: f"computing {graph!r}")
        try:
            plan = await self.compile(graph, devices, timeout=timeout)
            try:
                return await plan.run(inputs, fetch=fetch, timeout=deadline.remaining(), **keywords)
            finally:
                plan.free()
        except DeadlineExceededError:
            raise deadline.error() from None

    # Memory

    def empty(
        self,
        shape: Sequence[int] | int,
        dtype: DTypeArgument,
        device: DeviceArgument = None,
        *,
        buffer_type: BufferTypeArgument = None,
        usage: UsageArgument = "any",
    ) -> Tensor:
        """As hg.Session.empty; a plain call."""
        place = place_of(self._shell, device, buffer_type, usage)
        return new_tensor(self._shell, Tensor, shape, dtype, place)

    def empty_many(
        self,
        tensors: Iterable[tuple[Sequence[int] | int, DTypeArgument]],
        device: DeviceArgument = None,
        *,
        buffer_type: BufferTypeArgument = None,
        usage: UsageArgument = "any",
    ) -> list[Tensor]:
        """As hg.Session.empty_many; a plain call."""
        place = place_of(self._shell, device, buffer_type, usage)
        return new_tensors(self._shell, (Tensor, Buffer), tensors, place)

    def buffer(
        self,
        size_bytes: int,
        device: DeviceArgument = None,
        *,
        buffer_type: BufferTypeArgument = None,
        usage: UsageArgument = "any",
    ) -> Buffer:
        """As hg.Session.buffer; a plain call."""
        place = place_of(self._shell, device, buffer_type, usage)
        return new_buffer(self._shell, Buffer, size_bytes, place)

    async def put(self, array: Any, device: DeviceArgument = None, *, timeout: float | None = None) -> Tensor:
        """As hg.Session.put."""
        found = np.asarray(array)
        tensor = self.empty(found.shape, found.dtype, device)
        await tensor.set(found, timeout=timeout)
        return tensor

    def wrap(self, array: np.ndarray[Any, Any], device: DeviceArgument = None) -> Tensor:
        """As hg.Session.wrap; a plain call."""
        return wrapped(self._shell, (Tensor, Buffer), array, device)

    # The order of work, and its end

    async def synchronize(self, timeout: float | None = None) -> None:
        """As hg.Session.synchronize."""
        await self._shell.drive(
            synchronize(self._shell.core, self._all_streams()), timeout, "the work of the session"
        )

    async def close(self) -> None:
        """As hg.Session.close."""
        await self._shell.close()
