"""`hg.aio.Session`, a client's connection to a server, and `hg.aio.copy_plan`."""

# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack, overload

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
from heliograph._base.placement import Bindings, CompileOptions, PlanArguments
from heliograph._base.plan import Fetch, Inputs, Outputs
from heliograph._base.plan_copy import Carrying, recompiling
from heliograph._base.reservation import Reservation
from heliograph._base.session import OnLoss, SessionBase, check_on_loss
from heliograph._base.streams import make_event, make_stream
from heliograph._base.traced import MAX_PLANS, Call, Known, TracedFunction
from heliograph.aio.device import Device, Event, Stream
from heliograph.aio.plan import Plan
from heliograph.aio.tensor import Buffer, Tensor
from heliograph.aio.watching import DeviceWatch, LogLines
from heliograph.core.effects import ask
from heliograph.core.future import Deadline
from heliograph.core.methods import GET_STATISTICS, LIST_DEVICES, LIST_LINKS
from heliograph.graph.arguments import checked_timeout
from heliograph.graph.builder import Graph
from heliograph.graph.torch_tensors import host_array
from heliograph.procedures.journal import JOURNAL_BYTES
from heliograph.procedures.replay import take_snapshot
from heliograph.procedures.server_weights import ServerWeights, describe_model, list_models
from heliograph.procedures.transfer import synchronize
from heliograph.transport.aio import AioShell
from heliograph_proto.devices import BackendInfo, DeviceType, Link, MemberInfo
from heliograph_proto.errors import DeadlineExceededError
from heliograph_proto.models import ModelFile
from heliograph_proto.plans import PlanEstimate
from heliograph_proto.sessions import SessionMove, SessionSnapshot, Traffic
from heliograph_proto.types import DTypeArgument


class Session(SessionBase):
    """A client's session on a server, with its tensors, plans and variables.

    Made by `hg.aio.connect`; bound to its event loop.

    Under asyncio weights are hashed in a thread.

    An asynchronous context manager: leaving it ends the session, and the server frees everything
    that belongs to it.
    """

    _shell: AioShell

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    # Devices

    @property
    def devices(self) -> list[Device]:
        """The server's devices now, in the order of their priority.

        Devices that this session has seen and that are gone stay in the list; `device.lost` gives
        the reason.
        """
        return [Device(self._shell, info) for info in self._shell.info.devices]

    def device(self, name: str) -> Device:
        """Return the device with a name, in any case. Raises UnknownDeviceError."""
        return Device(self._shell, find_device(self._shell, name))

    def devices_of(self, kind: DeviceType) -> list[Device]:
        """Return the devices of a kind, such as `hg.DeviceType.GPU`, by priority."""
        return [device for device in self.devices if device.type is kind]

    def best_device(self) -> Device:
        """Return the first GPU, else the first integrated GPU, else the first CPU."""
        return Device(self._shell, best_device(self._shell))

    def watch(self) -> DeviceWatch:
        """Watch the devices of a server that is the head of a pool.

        Returns an asynchronous iterator of `hg.DeviceEvent`. It yields what happens from now on.
        The last event tells of the end of the session, with the reason in `event.ended`.
        """
        made = DeviceWatch()
        self._shell.watchers.add(made)
        return made

    async def members(self, timeout: float | None = None) -> tuple[MemberInfo, ...]:
        """Return the members of the server's pool, with the reason for each one that is missing.

        The tuple is empty if the server is not the head of a pool. Raises DeadlineExceededError.
        """
        found = await self._shell.drive(ask(LIST_DEVICES, None), timeout, "asking for the members")
        return found.members

    async def links(self, timeout: float | None = None) -> tuple[Link, ...]:
        """Return the links between the pool's connected members, and from the server to each.

        Each link has its round trip, its bandwidth, and whether one end can fetch values from the
        other. Members measure links when they join. The tuple is empty if the server is not the
        head of a pool. Raises DeadlineExceededError.
        """
        return await self._shell.drive(ask(LIST_LINKS, None), timeout, "asking for the links between members")

    async def backends(self, timeout: float | None = None) -> tuple[BackendInfo, ...]:
        """Return the server's backends, including those that failed to start.

        Raises DeadlineExceededError.
        """
        found = await self._shell.drive(ask(LIST_DEVICES, None), timeout, "asking for the backends")
        return found.backends

    async def server_facts(self, timeout: float | None = None) -> Mapping[str, str]:
        """Return facts about the server's process: package versions, event loop, allocator.

        The keys are those of ListDevicesResponse.facts. Raises DeadlineExceededError.
        """
        found = await self._shell.drive(ask(LIST_DEVICES, None), timeout, "asking for the server's facts")
        return found.facts

    def log(self, level: str = "info") -> LogLines:
        """Follow the server's log of this session.

        Returns an iterator of `hg.LogLine`. It yields the lines logged from now on, at this level
        ("debug", "info", "warning", "error") or above, waits for the next one, and ends with the
        session. It never yields lines of other sessions, or lines below the level of the server's
        own log. A slow reader misses lines; `line.dropped` counts them. With `local:`, this
        process's `logging` configuration decides which lines exist.

        Under asyncio use it with `async for`. It starts at the first line that is awaited, or when
        `async with session.log() as lines` is entered.

        Raises InvalidArgumentError for an unknown level, and LimitExceededError if too many readers
        follow this session.
        """
        return LogLines(self._shell, level)

    async def server_traffic(self, timeout: float | None = None) -> Traffic:
        """Return the bytes of tensors that the server carried and copied so far.

        They count writes and reads; `statistics().traffic` has the client's side. Raises
        DeadlineExceededError.
        """
        procedure = ask(GET_STATISTICS, None)
        return await self._shell.drive(procedure, timeout, "asking for the server's statistics")

    # Snapshots

    @property
    def durable(self) -> bool:
        """True if the session outlives its daemon."""
        return self._shell.core.journal is not None

    async def snapshot(
        self, wait_seconds: float | None = None, timeout: float | None = None
    ) -> SessionSnapshot:
        """Write what the session holds to the server's disk, after the commands sent so far.

        Only changes since the last snapshot are written. Returns the snapshot: its last command,
        its bytes, those that were written, and its time. Commands wait only while the bytes that
        changed are copied in memory. After a restart of the daemon a durable session goes on from
        its last snapshot, and the commands after it are done again. A few cannot be, such as a loop
        that was fed: take a snapshot after those.

        `wait_seconds`: the time for commands under way to end; None: 30 s. Raises UnsupportedError
        for a session that is not durable, SnapshotFailedError if commands did not end in time or
        for a full disk, with the snapshot before in place, and DeadlineExceededError.
        """
        procedure = take_snapshot(self._shell.core, checked_timeout(wait_seconds))
        return await self._shell.drive(procedure, timeout, "taking a snapshot")

    # Moves

    async def move(
        self, url: str, wait_seconds: float | None = None, timeout: float | None = None
    ) -> SessionMove:
        """Have another daemon take the session, and go on there.

        Handles, plans and results stay valid. Commands that are sent meanwhile wait, and run there.
        The daemons copy what the other one lacks between them. It needs the same tenants, tokens
        and names of devices, leases, and for a durable session a state folder; this daemon needs
        the right "pool" there. Command sockets, direct connections and shared memory are set up
        again, if that daemon offers them.

        `url`: the other daemon, for this client and for the daemon that has the session now.
        `wait_seconds`: the time for commands under way to end; None: 30 s.

        Returns the bytes that went, and how long commands waited. Raises DeadlineExceededError if
        commands under way did not end in time, such as a loop or an observed run; UnsupportedError,
        UnavailableError, PermissionDeniedError, OutOfMemoryError, LimitExceededError or
        UnknownDeviceError if the other daemon cannot have the session. The session then stays where
        it is, whole.
        """
        deadline = Deadline(timeout, lambda: "moving the session")
        return await self._shell.move(url, checked_timeout(wait_seconds), deadline)

    # Models on the server

    async def models(self, timeout: float | None = None) -> tuple[ModelFile, ...]:
        """Return the files of tensors that the server offers (`serve --models`), sorted by name.

        Of a GGUF file, `gguf` summarizes the model: architecture, parameters, context length,
        quantization, tokenizer, and whether it has a chat template. Raises DeadlineExceededError.
        """
        return await self._shell.drive(list_models(), timeout, "asking for the models")

    async def server_weights(self, file: str | ModelFile, timeout: float | None = None) -> ServerWeights:
        """Return the tensors of a safetensors or GGUF file on the server, by name.

        `g.weight("w", weights["w"])` uses one of them in a graph; nothing is uploaded. The server
        reads the whole file the first time. Of a GGUF file, `header` has all metadata, with the
        tokenizer's vocabulary.

        Raises InvalidArgumentError for a path outside the server's folder, InvalidModelError for a
        file that is missing or broken, and DeadlineExceededError.
        """
        return await self._shell.drive(describe_model(file), timeout, "reading the model")

    def stream(self, device: DeviceArgument = None) -> Stream:
        """Create a stream on a device (default: the session's device).

        Raises UnknownDeviceError.
        """
        return make_stream(self._shell, device_name(self._shell, device), Stream)

    def event(self) -> Event:
        """Create an event, for `stream.record(event)`. It counts as reached until then."""
        return make_event(self._shell, Event)

    # Plans

    async def compile(
        self,
        graph: Graph,
        devices: DevicesArgument = None,
        *,
        weights: Bindings = None,
        variables: Bindings = None,
        on_loss: OnLoss = "raise",
        journal_bytes: int = JOURNAL_BYTES,
        timeout: float | None = None,
        **options: Unpack[CompileOptions],
    ) -> Plan:
        """Compile a graph into a plan; `plan.explain()` shows what runs where, and why.

        The same arguments return the existing plan. Weights that the session lacks are uploaded.

        Args:
            devices: Devices by priority (default: the server's first), filled in that order. A node
                that one cannot run goes to another; a processor of the server's host comes last.
            weights: Tensors of the session, on the plan's device, for the graph's weights of these
                names. They are not uploaded. A write to one changes what later runs read.
            variables: Tensors of the session, on the plan's device, for the graph's variables of
                these names. They are read and written in place.
            on_loss: With "raise", runs fail with DeviceLostError when a device is lost. With
                "rebuild", the plan is placed again on its other devices, its variables get the
                values of the last `plan.checkpoint()`, runs since then are replayed, and failed
                runs are repeated (see `Plan.rebuilds`), with the results of undisturbed runs. This
                needs array inputs, no `out=` and no taps. Tensors on a lost device are gone.
            journal_bytes: The most bytes of copied inputs that "rebuild" keeps until their run has
                ended or, if it assigns variables, until the next checkpoint.
            timeout: Seconds to wait; None means no limit.
            options: `fusion`, `threads`, `pins`, `memory`, `pipeline`, `split` and `buffer_types`,
                as `hg.CompileOptions` documents them.

        Raises InvalidGraphError, UnsupportedError, OutOfMemoryError, LimitExceededError,
        UnknownDeviceError, InvalidArgumentError and DeadlineExceededError, naming a node's line.
        """
        check_on_loss(on_loss, journal_bytes, variables)
        what = lambda: f"compiling {graph!r}"  # noqa: E731
        deadline = Deadline(timeout, what)
        given = PlanArguments.of("compile", devices, weights, variables, options)
        spec = await self._shell.drive(self._compiling(graph, given), timeout, what)
        plan = Plan(self._shell, spec, self._progress)
        await self._shell.drive(self._admitting(plan, on_loss, journal_bytes), deadline.remaining())
        return plan

    @overload
    def function(
        self,
        function: Callable[..., Any],
        /,
        *,
        devices: DevicesArgument = None,
        fetch: bool = True,
        max_plans: int = MAX_PLANS,
        **options: Unpack[CompileOptions],
    ) -> Function: ...
    @overload
    def function(
        self,
        /,
        *,
        devices: DevicesArgument = None,
        fetch: bool = True,
        max_plans: int = MAX_PLANS,
        **options: Unpack[CompileOptions],
    ) -> Callable[[Callable[..., Any]], Function]: ...
    def function(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        devices: DevicesArgument = None,
        fetch: bool = True,
        max_plans: int = MAX_PLANS,
        **options: Unpack[CompileOptions],
    ) -> Any:
        """Make a function of values a function of arrays, which runs on the server; a decorator.

        The first call with arrays of some shapes and data types calls the function with values in
        their places, compiles the graph that it builds, and runs the plan. Later ones run the plan.
        Results come back in the structure that the function returned.

        Arguments are arrays, tensors of the session, constants, and lists, tuples and dictionaries
        of them. Constants, such as numbers and texts, are what they are while the graph is built,
        so each value of one has a plan of its own.

        Under asyncio the result is a function to await.

        Args:
            function: A plain function that computes with the functions under `hg.`. Python's `if`
                and `while` may ask for shapes and constants, but not for elements, which only a run
                has.
            devices: The devices of the plans, as in `compile`.
            fetch: False keeps results as tensors on the server.
            max_plans: The most plans that are kept; the one that was not used for the longest time
                goes first.
            options: `hg.CompileOptions`, as in `compile`.

        Raises InvalidArgumentError. Calls raise the errors of `compile` and `plan.run`.
        """
        make = partial(Function, self, devices, fetch, max_plans, options)
        return make if function is None else make(function)

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
        """Return the device memory that `compile` would take. Nothing is allocated or uploaded.

        Arguments and errors are those of `compile`. Also raises UnsupportedError if a device cannot
        estimate.
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
        """Reserve, once, the memory that the largest graph needs for its intermediate results.

        Plans that this session compiles from then on share that memory and take no more as long as
        they fit (`plan.reserved_bytes`). Their runs are serial. `reservation.reset()` gives the
        memory back and frees these plans. The weights of the graph need no content.

        Arguments and errors are those of `compile`. Also raises InvalidArgumentError while the
        session has another reservation.
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
        """Compile a graph, run it once and free the plan. Returns what `plan.run` returns.

        To run a graph more than once, use `compile`. Arguments and errors are those of `compile`
        and `plan.run`.
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
        """Create a tensor of zeros. Errors, such as OutOfMemoryError, are raised at its first use.

        Args:
            shape: The tensor's shape; an integer means one dimension.
            dtype: The tensor's data type.
            device: The device (default: the session's device).
            buffer_type: One of `device.buffer_types`, or its name (default: the device's own
                default).
            usage: A hint of the purpose: "any", "weights" or "compute".

        Raises UnknownDeviceError and InvalidArgumentError at once.
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
        """Create tensors of zeros, from pairs of shape and data type, in one allocation.

        Either all of them are created or none. Each tensor's `buffer` is the shared one. The other
        arguments and the errors are those of `empty`.
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
        """Create a buffer of zeros in which tensors can be placed, with `buffer.place`.

        Arguments are those of `empty`. Errors are raised at the first use of a tensor in the
        buffer.
        """
        place = place_of(self._shell, device, buffer_type, usage)
        return new_buffer(self._shell, Buffer, size_bytes, place)

    async def put(self, array: Any, device: DeviceArgument = None, *, timeout: float | None = None) -> Tensor:
        """Create a tensor with the shape, data type and elements of an array.

        The array may be overwritten afterwards. Raises InvalidInputError, OutOfMemoryError and
        DeadlineExceededError.
        """
        found = host_array(array)
        tensor = self.empty(found.shape, found.dtype, device)
        await tensor.set(found, timeout=timeout)
        return tensor

    def wrap(self, array: np.ndarray[Any, Any], device: DeviceArgument = None) -> Tensor:
        """Create a tensor on the array's own memory, without a copy; `local:` only.

        The tensor keeps the array alive. The array has what the device wrote after `synchronize`,
        or after a `get`. It must be contiguous and writable, and start at a multiple of the
        alignment of the device's buffer type: create it with `hg.aligned_empty`.

        Raises UnsupportedError if the device cannot use this process's memory, and
        InvalidArgumentError.
        """
        return wrapped(self._shell, (Tensor, Buffer), array, device)

    async def free_variable(self, name: str, timeout: float | None = None) -> None:
        """Free a variable of the session, which otherwise stays until the session ends.

        Its plans must be freed before. Runs that were sent before still use it, on any stream. The
        next plan with a variable of this name has a new one, with its first elements, perhaps with
        another type or on another device. Views of the variable keep its memory until they are
        freed.

        Raises UnknownHandleError if there is no such variable, InvalidArgumentError while a plan
        uses it, and DeadlineExceededError.
        """
        await self._shell.drive(self._freeing(name), timeout, lambda: f"freeing variable {name!r}")

    # The order of work, and its end

    async def synchronize(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is done.

        Raises the first error that no other call has raised, and DeadlineExceededError.
        """
        await self._shell.drive(
            synchronize(self._shell.core, self._all_streams()), timeout, "the work of the session"
        )

    async def close(self) -> None:
        """End the session. Pending work fails with SessionClosedError. Idempotent."""
        self._is_left = True
        await self._shell.close()
        while self._successors:
            await self._successors.pop().close()


class Function(TracedFunction[Plan]):
    """A function of arrays that runs on a server. Made by `session.function`."""

    def __init__(
        self,
        session: Session,
        devices: DevicesArgument,
        fetch: bool,
        max_plans: int,
        options: CompileOptions,
        function: Callable[..., Any],
    ) -> None:
        super().__init__(function, max_plans)
        self._session, self._devices, self._fetch, self._options = session, devices, fetch, options

    async def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the function on arrays, with a plan of their kind."""
        call = self._call(arguments, keywords)
        known = self._known.find(call.key) or await self._compiled(call)
        outputs: Any = await known.plan.run(call.arrays, fetch=self._fetch)
        return known.traced.filled(outputs)

    async def plan(self, *arguments: Any, **keywords: Any) -> Plan:
        """Return the plan of a call with these arguments, which is compiled if it is new."""
        call = self._call(arguments, keywords)
        return (self._known.find(call.key) or await self._compiled(call)).plan

    async def _compiled(self, call: Call) -> Known[Plan]:
        traced = self._trace(call)
        plan = await self._session.compile(traced.graph, self._devices, **self._options)
        return self._keep(call.key, Known(plan, traced))


async def copy_plan(
    plan: Plan, session: Session, devices: DevicesArgument = None, *, timeout: float | None = None
) -> Plan:
    """Compile a plan's graph in another session, and copy the values of its variables.

    Weights that the session lacks are uploaded. The variables get the values that they have after
    everything sent before, in pieces, through this process. ggml_backend_graph_copy does the same.

    Args:
        plan: The plan to copy.
        session: The session for the new plan.
        devices: The devices of the new plan, by priority (default: the first of `session`).
        timeout: Seconds for all of this; None means no limit.

    Raises InvalidArgumentError if a leaf of the plan is a tensor of its session,
    DeadlineExceededError after `timeout`, and the errors of `session.compile`.
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
