"""`hg.aio.Session`: what a client has on a server; `hg.aio.copy_plan`: from one to another."""

# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from heliograph._base.buffer import (
    BufferTypeArgument,
    UsageArgument,
    new_buffer,
    new_tensor,
    new_tensors,
    place_of,
    wrapped,
)
from heliograph._base.device import DeviceArgument, DevicesArgument, best_device, device_name, find_device
from heliograph._base.pins import MemoryLimits, Pins
from heliograph._base.placement import Bindings, BufferTypes, PlanArguments
from heliograph._base.plan import Fetch, Inputs, Outputs
from heliograph._base.plan_copy import Carrying, recompiling
from heliograph._base.reservation import Reservation
from heliograph._base.session import (
    OnLoss,
    SessionBase,
    ask_backends,
    ask_facts,
    ask_members,
    check_on_loss,
)
from heliograph._base.split_buffer_type import Splits
from heliograph._base.streams import make_stream
from heliograph.aio.device import Device, Stream
from heliograph.aio.plan import Plan
from heliograph.aio.tensor import Buffer, Tensor
from heliograph.aio.watching import DeviceWatch, LogLines
from heliograph.core.effects import ask
from heliograph.core.future import Deadline
from heliograph.core.methods import GET_STATISTICS, LIST_LINKS
from heliograph.graph.builder import Graph
from heliograph.procedures.journal import JOURNAL_BYTES
from heliograph.procedures.server_weights import ServerWeights, describe_model, list_models
from heliograph.procedures.transfer import synchronize
from heliograph.transport.aio import AioShell
from heliograph_proto.devices import BackendInfo, DeviceType, Link, MemberInfo
from heliograph_proto.errors import DeadlineExceededError
from heliograph_proto.plans import PlanEstimate
from heliograph_proto.sessions import Traffic
from heliograph_proto.types import DTypeArgument


class Session(SessionBase):
    """A client's tensors, plans and variables on a server. Made by `hg.aio.connect`; bound to its event loop.

    Under asyncio weights are hashed in a thread.

    An asynchronous context manager: leaving it ends the session, and the server frees everything of it.
    """

    _shell: AioShell

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    # Devices

    @property
    def devices(self) -> list[Device]:
        """The server's devices, in the order of their priority, now. Those that this session knew and that
        are gone are among them: `device.lost` says why."""
        return [Device(self._shell, info) for info in self._shell.info.devices]

    def device(self, name: str) -> Device:
        """The device of a name, in any case. Raises UnknownDeviceError."""
        return Device(self._shell, find_device(self._shell, name))

    def devices_of(self, kind: DeviceType) -> list[Device]:
        """The devices of a kind, such as hg.DeviceType.GPU, in the order of their priority."""
        return [device for device in self.devices if device.type is kind]

    def best_device(self) -> Device:
        """The first GPU; else the first integrated GPU; else the first CPU."""
        return Device(self._shell, best_device(self._shell))

    def watch(self) -> DeviceWatch:
        """What happens to the server's devices from now on, where it is the head of a pool: an asynchronous
        iterator of `hg.DeviceEvent`, which waits for the next one and ends with the session."""
        made = DeviceWatch()
        self._shell.watchers.add(made)
        return made

    async def members(self, timeout: float | None = None) -> tuple[MemberInfo, ...]:
        """The daemons of the server's pool, also those that are missing, and why. None where it is no
        head of a pool."""
        return await self._shell.drive(ask_members(), timeout, "asking for the members")

    async def links(self, timeout: float | None = None) -> tuple[Link, ...]:
        """The ways between the members of the server's pool that are there, and from the server to them:
        round trip, bandwidth, and whether the one can fetch values from the other. Members measure them when
        they join. None where it is no head of a pool."""
        return await self._shell.drive(ask(LIST_LINKS, None), timeout, "asking for the ways between members")

    async def backends(self, timeout: float | None = None) -> tuple[BackendInfo, ...]:
        """The backends of the server, also those that could not start."""
        return await self._shell.drive(ask_backends(), timeout, "asking for the backends")

    async def server_facts(self, timeout: float | None = None) -> Mapping[str, str]:
        """What the server tells of its process: versions of packages, its event loop, its allocator; see
        ListDevicesResponse.facts."""
        return await self._shell.drive(ask_facts(), timeout, "asking for the server's facts")

    def log(self, level: str = "info") -> LogLines:
        """What the server logs of this session from now on, of this level ("debug", "info", "warning",
        "error") or above: an iterator of `hg.LogLine`, which waits for the next one and ends with the
        session. Lines below the level of the server's own log are never made. Who reads too slowly misses
        some, and `line.dropped` says how many; other sessions' lines are never among them. With `local:`,
        this process's `logging` decides what is made.

        Under asyncio it is for `async for`, and begins where the first line is waited for, or where
        `async with session.log() as lines` is entered.

        Raises InvalidArgumentError for another level, LimitExceededError where too many follow this
        session."""
        return LogLines(self._shell, level)

    async def server_traffic(self, timeout: float | None = None) -> Traffic:
        """What writes and reads of tensors have carried so far, and how often the server copied it;
        `statistics().traffic` is this side's."""
        procedure = ask(GET_STATISTICS, None)
        return await self._shell.drive(procedure, timeout, "asking for the server's statistics")

    # Models on the server

    async def models(self, timeout: float | None = None) -> tuple[str, ...]:
        """The files of tensors that the server's operator allows (`serve --models`), by path, sorted."""
        return await self._shell.drive(list_models(), timeout, "asking for the models")

    async def server_weights(self, file: str, timeout: float | None = None) -> ServerWeights:
        """The tensors of a safetensors or GGUF file on the server, by name: g.weight("w", weights["w"]) uses
        one, and nothing is uploaded. The first time the server reads all of the file.

        Raises InvalidArgumentError for a name that leads out of the server's folder, InvalidModelError for a
        file that is missing or broken.
        """
        return await self._shell.drive(describe_model(file), timeout, "reading the model")

    def stream(self, device: DeviceArgument = None) -> Stream:
        """A new stream, on the session's device unless told otherwise."""
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
        """A plan for a graph, on the named devices by priority (default: the server's first).

        Of several devices the first is filled, then the next, and one that cannot run a node leaves it to
        another; if there is no processor of the server's host among them, that comes last. `pins`: devices
        by patterns of nodes' names as in fnmatch, or by functions of a node. `memory`: the most that the
        plan may take of a device, in bytes or as "2GiB". `plan.explain()` tells what runs where, and why.

        `pipeline`: how many runs of a plan over several devices may be under way at once, each with memory
        of its own for what is between nodes: while one is in later splits, the next enters.

        `split`: how the rows of weights lie over several devices, each `hg.SplitBufferType` by a pattern of
        the weights' names; products with them run there in parts. `buffer_types`: by device, the buffer type
        (one of `device.buffer_types`, or its name) in which it has the plan's weights, variables, and values
        that lie between splits.

        `threads`: the most of the device's threads that a run uses; 0: all. `weights` and `variables`:
        tensors of the session, on the plan's device, that the graph's leaves of these names are. A weight
        that is bound is not uploaded, and its tensor cannot be written as long as the plan lives; a
        variable's is read and written in place.

        `on_loss`: what becomes of the plan when a device is lost. "raise": its runs fail with
        DeviceLostError. "rebuild": it is placed again on those of its devices that are left, its variables
        get what they had at the last `plan.checkpoint()`, the runs since are replayed, and those that failed
        are repeated: results are those of undisturbed runs; see `Plan.rebuilds`. For that inputs are copied,
        and kept until a run has ended or, if it assigns variables, until the next checkpoint: `journal_bytes`
        at most. Repeated are runs of arrays, without out= and taps; tensors on a lost device are gone.

        Compiling again with the same arguments finds the plan that is there: that costs a look-up. Weights
        that the session does not hold are uploaded first. Errors name the line that built the node. Raises
        InvalidGraphError, UnsupportedError, OutOfMemoryError, LimitExceededError, UnknownDeviceError,
        InvalidArgumentError, DeadlineExceededError.
        """
        check_on_loss(on_loss, journal_bytes, variables)
        deadline = Deadline(timeout, lambda: f"compiling {graph!r}")
        given = PlanArguments(
            devices, fusion, threads, weights, variables, pins, memory, split, buffer_types, pipeline
        )
        procedure = self._compiling(graph, given)
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
        """What `compile` would take of devices' memory, without taking or uploading anything.

        Raises as `compile`, and UnsupportedError where the device cannot tell.
        """
        given = PlanArguments(devices, fusion, pins=pins, memory=memory, pipeline=pipeline)
        procedure = self._estimating(graph, given)
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
        """Takes the memory that the largest graph takes for its intermediate results, once.

        Plans that this session compiles from then on lie there, one over the other, and take no more as
        long as they fit: `plan.reserved_bytes`. Their runs are serial. `reservation.reset()` gives the
        memory back, and ends them. Weights of the graph need not be there, nor have any content.

        Arguments are those of `compile`. Raises as that, and InvalidArgumentError while the session has
        another reservation.
        """
        given = PlanArguments(devices, fusion, threads, pins=pins, memory=memory)
        procedure = self._reserving(graph, given)
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
    ) -> Outputs:
        """Compiles a graph, runs it once and frees the plan: what `plan.run` returns.

        Whoever runs it more than once compiles it. Raises as `compile` and `plan.run`.
        """
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
        """A new tensor of zeros. Errors, such as OutOfMemoryError, appear at its first use.

        `buffer_type`: one of `device.buffer_types`, or its name; the device's default otherwise. `usage`:
        what it is for, "any", "weights" or "compute"; a hint.
        """
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
        """New tensors of zeros, pairs of shape and data type, in one allocation: each one's `buffer`.

        All of them are made, or none. Arguments and errors are those of `empty`.
        """
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
        """New memory, of zeros, in which tensors can be placed: `buffer.place(shape, dtype, offset_bytes)`.

        Arguments are those of `empty`; errors appear at the first use of a tensor in it.
        """
        place = place_of(self._shell, device, buffer_type, usage)
        return new_buffer(self._shell, Buffer, size_bytes, place)

    async def put(self, array: Any, device: DeviceArgument = None, *, timeout: float | None = None) -> Tensor:
        """A new tensor with the elements of an array, which may be overwritten afterwards."""
        found = np.asarray(array)
        tensor = self.empty(found.shape, found.dtype, device)
        await tensor.set(found, timeout=timeout)
        return tensor

    def wrap(self, array: np.ndarray[Any, Any], device: DeviceArgument = None) -> Tensor:
        """A tensor whose bytes are the array's own, which is kept alive and not copied; `local:` only.

        What the device writes is in the array once it is done: after `synchronize`, or a `get`. The array
        must be contiguous and writable, and begin at a multiple of the alignment of the device's buffer
        type: make it with `hg.aligned_empty`.

        Raises UnsupportedError where memory of this process cannot be used, InvalidArgumentError.
        """
        return wrapped(self._shell, (Tensor, Buffer), array, device)

    # The order of work, and its end

    async def synchronize(self, timeout: float | None = None) -> None:
        """Waits until everything sent so far is done. Raises the first error that nobody has seen."""
        await self._shell.drive(
            synchronize(self._shell.core, self._all_streams()), timeout, "the work of the session"
        )

    async def close(self) -> None:
        """Ends the session; what is pending fails with SessionClosedError. Idempotent."""
        await self._shell.close()


async def copy_plan(
    plan: Plan, session: Session, devices: DevicesArgument = None, *, timeout: float | None = None
) -> Plan:
    """The same graph compiled in another session, on the named devices (default: its own first).

    Weights that the session lacks are uploaded, and its variables get what the plan's hold after everything
    sent before, through this process, a piece at a time. So does ggml_backend_graph_copy.

    Raises InvalidArgumentError for a plan some of whose leaves are tensors of its session, and whatever
    `session.compile` raises; DeadlineExceededError when all this takes longer than `timeout` seconds.
    """
    deadline = Deadline(timeout, lambda: f"copying {plan!r}")
    procedure = recompiling(plan, session, devices)
    spec = await session._shell.drive(procedure, timeout, lambda: f"copying {plan!r}")
    copy = Plan(session._shell, spec, session._progress)
    try:
        for reading, writing in Carrying(plan, copy).pieces():
            await plan._shell.drive(reading, deadline.remaining(), lambda: f"copying {plan!r}")
            await session._shell.drive(writing, deadline.remaining(), lambda: f"copying {plan!r}")
    except BaseException as error:
        copy.free()
        raise deadline.worded(error) from None
    return copy
