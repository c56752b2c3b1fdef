"""`hg.connect` and `hg.Session`: what a client has on a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np

from heliograph._arguments import timeout_ms
from heliograph._blocking import BlockingShell, GrpcShell
from heliograph._buffers import (
    BufferTypeArgument,
    UsageArgument,
    new_buffer,
    new_tensor,
    new_tensors,
    place_of,
    wrapped,
)
from heliograph._channels import credentials_of
from heliograph._compiling import CompileOptions
from heliograph._deadline import Deadline
from heliograph._devices import DeviceArgument, DevicesArgument, best_device, device_name, find_device
from heliograph._journal import JOURNAL_BYTES
from heliograph._log_lines import LogLines
from heliograph._models import ServerWeights, describe_model, list_models
from heliograph._pins import MemoryLimits, Pins
from heliograph._placing import BufferTypes, Placing
from heliograph._plans import Fetch, Inputs
from heliograph._procedures import arrive, synchronize
from heliograph._progress import ProgressArgument, checked_progress
from heliograph._reserving import Reservation, reserve_blocks
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
from heliograph._sharing import Sharing
from heliograph._split_buffer_type import Splits
from heliograph._streams import make_stream
from heliograph._tickets import Announcement, Tell, TicketUpload
from heliograph._words import ALONE
from heliograph.buffer import Buffer
from heliograph.builder import Graph
from heliograph.plan import Outputs, Plan
from heliograph.stream import Device, Stream
from heliograph.tensor import Tensor
from heliograph.watching import DeviceWatch
from heliograph_proto import graph as contract
from heliograph_proto.addresses import DEFAULT_URL, Address, parse_address
from heliograph_proto.credentials import Credentials
from heliograph_proto.description import BackendInfo, ContentOffer, DeviceType, PlanEstimate, Traffic
from heliograph_proto.errors import DeadlineExceededError, HeliographError, InvalidArgumentError
from heliograph_proto.membership import DeviceChange, MemberInfo, Way
from heliograph_proto.types import DTypeArgument

#: What names a server, or several daemons.
Servers: TypeAlias = str | Sequence[str] | None

#: The environment variable that names the server when no URL is given.
SERVER_VARIABLE = "HELIOGRAPH_SERVER"


def address_of(url: Servers) -> Address:
    """The address of a URL, of a pool of several, of $HELIOGRAPH_SERVER, or the default. Raises
    InvalidArgumentError."""
    if isinstance(url, Sequence) and not isinstance(url, str):
        return _pool_of(url)
    if url is not None and not isinstance(url, str):
        raise InvalidArgumentError(
            f"a URL is a string, not {type(url).__name__}",
            advice="such as 'grpc://127.0.0.1:7070', 'unix:///path' or 'local:'; or a list of daemons' URLs",
        )
    if url is not None and not url.strip():
        raise InvalidArgumentError(
            "the URL is empty",
            advice=f"name a server, or leave the URL out for ${SERVER_VARIABLE}, else {DEFAULT_URL}",
        )
    return parse_address(url or os.environ.get(SERVER_VARIABLE) or DEFAULT_URL)


def _pool_of(urls: Sequence[str]) -> Address:
    """The address of a pool in this process. Raises InvalidArgumentError."""
    if not urls or not all(isinstance(one, str) for one in urls):
        raise InvalidArgumentError(
            f"{urls!r:.200} is no list of URLs", advice="one URL, or a list of at least one daemon's"
        )
    found = [parse_address(one) for one in urls]
    for one in found:
        if one.scheme == "local" or one.device:
            raise InvalidArgumentError(
                f"{one} cannot be a member of a pool", advice="a member is a whole daemon: grpc://host:port"
            )
        if one.token:
            raise InvalidArgumentError(
                f"a pool's members are shown one token, not one for {one} alone",
                advice="leave it out of the URL, and say token=..., or set $HELIOGRAPH_TOKEN",
            )
    return Address("local", members=tuple(map(str, found)))


def connect_as_head(
    url: str, timeout: float, silence_seconds: float, credentials: Credentials | None = None
) -> Session:
    """For servers that use other servers: as `connect`, to one that is gone after so much silence.
    `credentials`: what is shown there; None: what the URL and the environment say."""
    address = parse_address(url)
    shown = credentials_of(address) if credentials is None else credentials
    return Session(GrpcShell(address, timeout, "auto", silence_seconds, shown))


def connect(
    url: Servers = None,
    *,
    timeout: float = 10.0,
    progress: ProgressArgument = "auto",
    shared_memory: SharedMemoryArgument = "auto",
    token: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> Session:
    """Opens a session on a server: local:, unix:///path, grpc://host:port, or grpcs://host:port with TLS;
    URL#device names a device.

    Of a list of daemons' URLs this process makes a pool: one list of their devices, named HOST/DEVICE, for
    graphs that run on several of them. At least one must answer within `timeout`; the others join when they
    do, and devices come and go (`session.watch()`).

    `local:` is this process; local:#cpu:threads=2 gives it devices of their own, as `serve --device` does.
    Without a URL: $HELIOGRAPH_SERVER, else grpc://127.0.0.1:7070. `progress` is called, from any thread,
    with (bytes done, bytes in all) while weights are uploaded; "auto" shows bars on stderr for uploads above
    a second, also of tensors, if it is a terminal and rich is installed; None is silent. `shared_memory`:
    "auto" lets tensors go through memory that both sides map, where both prove that they are on one host and
    of one user; True insists on it, False never does.

    `token` is shown to a server that asks for one, by default the URL's own (URL?token=TOKEN, as `heliograph
    serve` prints it), else $HELIOGRAPH_TOKEN, else what is in the file $HELIOGRAPH_TOKEN_FILE. Over TLS, `ca`
    is a PEM file of authorities that vouch for servers ($HELIOGRAPH_CA, else the system's); `certificate` and
    `key` are PEM files to show to servers that ask for them ($HELIOGRAPH_CERTIFICATE and $HELIOGRAPH_KEY).
    All members of a pool are shown the same, which must have the right "pool" there.

    Raises UnavailableError when nobody answers within `timeout` seconds, or a server that answers is still
    starting its devices then, or its certificate is not to be trusted, or where shared memory is insisted on
    and there is none; UnauthenticatedError when the server does not know who asks; NotHeliographError when
    something else answers, VersionMismatchError, DrainingError, LimitExceededError.
    """
    address = address_of(url)
    timeout_ms(timeout)
    shown, wanted = checked_progress(progress), checked_shared_memory(shared_memory)
    credentials = credentials_of(address, token, ca, certificate, key)
    shell: BlockingShell
    if address.scheme == "local":
        from heliograph._local import LocalShell

        if wanted is True:
            raise insisted(address, ALONE)
        shell = LocalShell(address, timeout, credentials)
    else:
        shell = GrpcShell(address, timeout, wanted, None, credentials)
    try:
        return Session(shell, shown)
    except BaseException:
        shell.close()
        raise


class Session(SessionBase):
    """A client's tensors, plans and variables on a server. Made by `hg.connect`; thread-safe.

    A context manager: leaving it ends the session, and the server frees everything of it.
    """

    _shell: BlockingShell

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

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
        """What happens to the server's devices from now on, where it is the head of a pool: an iterator of
        `hg.DeviceEvent`, which waits for the next one and ends with the session."""
        made = DeviceWatch()
        self._shell.watchers.add(made)
        return made

    def members(self, timeout: float | None = None) -> tuple[MemberInfo, ...]:
        """The daemons of the server's pool, also those that are missing, and why. None where it is no
        head of a pool."""
        return self._shell.drive(ask_members(), timeout, "asking for the members")

    def ways(self, timeout: float | None = None) -> tuple[Way, ...]:
        """The ways between the members of the server's pool that are there, and from the server to them:
        round trip, bandwidth, and whether the one can fetch values from the other. Members measure them when
        they join. None where it is no head of a pool. Raises UnsupportedError where the server is too old."""
        return self._shell.drive(ask_ways(self.info), timeout, "asking for the ways between members")

    def backends(self, timeout: float | None = None) -> tuple[BackendInfo, ...]:
        """The backends of the server, also those that could not start."""
        return self._shell.drive(ask_backends(), timeout, "asking for the backends")

    def server_facts(self, timeout: float | None = None) -> Mapping[str, str]:
        """What the server tells of its process: versions of packages, its event loop, its allocator; see
        ListDevicesResponse.facts. Empty where it is too old to tell."""
        return self._shell.drive(ask_facts(), timeout, "asking for the server's facts")

    def server_traffic(self, timeout: float | None = None) -> Traffic:
        """What writes and reads of tensors have carried so far, and how often the server copied it;
        `statistics().traffic` is this side's. Raises UnsupportedError where the server is too old."""
        return self._shell.drive(ask_traffic(self.info), timeout, "asking for the server's statistics")

    def log(self, level: str = "info") -> LogLines:
        """What the server logs of this session from now on, of this level ("debug", "info", "warning",
        "error") or above: an iterator of `hg.LogLine`, which waits for the next one and ends with the
        session. Lines below the level of the server's own log are never made. Who reads too slowly misses
        some, and `line.dropped` says how many; other sessions' lines are never among them. With `local:`,
        this process's `logging` decides what is made.

        Raises InvalidArgumentError for another level, LimitExceededError where too many follow this session,
        UnsupportedError where the server is too old."""
        return self._shell.follow_log(level)

    # Models on the server

    def models(self, timeout: float | None = None) -> tuple[str, ...]:
        """The files of tensors that the server's operator allows (`serve --models`), by path, sorted."""
        return self._shell.drive(list_models(), timeout, "asking for the models")

    def server_weights(self, file: str, timeout: float | None = None) -> ServerWeights:
        """The tensors of a safetensors or GGUF file on the server, by name: g.weight("w", weights["w"]) uses
        one, and nothing is uploaded. The first time the server reads all of the file.

        Raises InvalidArgumentError for a name that leads out of the server's folder, InvalidModelError for a
        file that is missing or broken.
        """
        return self._shell.drive(describe_model(file), timeout, "reading the model")

    def stream(self, device: DeviceArgument = None) -> Stream:
        """A new stream, on the session's device unless told otherwise."""
        return make_stream(self._shell, device_name(self._shell, device), Stream)

    # Plans

    def compile(
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

        What is compiled again, with the same arguments, is the plan that is there, whose runs are serial, or
        was there lately: that costs a look-up.

        Weights that the session does not hold are uploaded first. Errors name the line that built
        the node. Raises InvalidGraphError, UnsupportedError, OutOfMemoryError, LimitExceededError,
        UnknownDeviceError, InvalidArgumentError, DeadlineExceededError.
        """
        check_on_loss(on_loss, journal_bytes, variables)
        deadline = Deadline(timeout, lambda: f"compiling {graph!r}")
        placing = Placing(pins, memory, split, buffer_types)
        procedure = self._compiling(graph, devices, fusion, threads, weights, variables, placing, pipeline)
        spec = self._shell.drive(procedure, timeout, lambda: f"compiling {graph!r}")
        plan = Plan(self._shell, spec, self._progress)
        self._shell.drive(self._admitting(plan, on_loss, journal_bytes), deadline.remaining())
        return plan

    def _compile_frozen(
        self,
        graph: contract.Graph,
        devices: DevicesArgument = None,
        *,
        fusion: bool = True,
        threads: int = 0,
        bindings: Mapping[int, Tensor],
        updates: Plan | None = None,
        reservation: Reservation | None = None,
        sharing: Sharing | None = None,
        timeout: float | None = None,
    ) -> Plan:
        """For servers that use other servers: a plan for a graph of the contract.

        `bindings`: tensors by the numbers of the leaves that they are; contents of other weights must be on
        the server. `updates`: a plan whose memory the new one takes over; it is freed then. When the server
        refuses, it is what it was. `reservation`: in whose memory it is to lie. `sharing`: of a part of a
        graph that runs on several servers at once.
        """
        rest = updates, reservation, sharing
        procedure = self._compiling_frozen(graph, devices, fusion, threads, bindings, *rest)
        spec = self._shell.drive(procedure, timeout, lambda: f"compiling {graph!r}")
        if updates is not None:
            updates._give_up()
        return Plan(self._shell, spec)

    def estimate(
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
        procedure = self._estimating(graph, devices, fusion, Placing(pins, memory), pipeline)
        return self._shell.drive(procedure, timeout, lambda: f"estimating {graph!r}")

    def reserve(
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
        procedure = self._reserving(graph, devices, fusion, threads, Placing(pins, memory))
        return self._shell.drive(procedure, timeout, lambda: f"reserving memory for {graph!r}")

    def _reserve_blocks(self, block_bytes: Sequence[int], device: DeviceArgument) -> Reservation:
        """For servers that use other servers: memory that a compile names."""
        options = CompileOptions((device_name(self._shell, device),))
        procedure = reserve_blocks(self._shell, options, block_bytes)
        return self._shell.drive(procedure, None, "reserving memory")

    def _arrive(self, timeout: float | None = None) -> None:
        """For servers that use other servers: until everything sent so far has come there, frees included."""
        self._shell.drive(arrive(self._shell.core), timeout, "what was sent")

    def _when_lost(self, told: Callable[[HeliographError], None]) -> None:
        """For servers that use other servers: called once, with the reason, when the session has ended."""
        self._shell.when_lost(told)

    def _announce(self, contents: Sequence[tuple[bytes, Tensor]], tell: Tell) -> Announcement:
        """For servers that use other servers: contents by digest, which others will bring straight into those
        tensors. Raises what BulkService.Admit is refused with, UnsupportedError."""
        return self._shell.announce(
            [(digest, one._live_handle, one.nbytes) for digest, one in contents], tell
        )

    def _bring(self, offer: ContentOffer, size_bytes: int) -> TicketUpload:
        """For servers that use other servers: an upload to this one by a ticket that it gave, to be begun."""
        return self._shell.bring(offer, size_bytes)

    def _when_changed(self, told: Callable[[DeviceChange], None]) -> None:
        """For servers that use other servers: called with each change of its devices. One alone is told."""
        self._shell.watchers.tell = told

    def _estimate_frozen(
        self, graph: contract.Graph, devices: DevicesArgument = None, *, fusion: bool = True
    ) -> PlanEstimate:
        """For servers that use other servers: what a graph of the contract would take."""
        procedure = self._estimating_frozen(graph, devices, fusion)
        return self._shell.drive(procedure, None, lambda: f"estimating {graph!r}")

    def compute(
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
            plan = self.compile(graph, devices, timeout=timeout)
            try:
                return plan.run(inputs, fetch=fetch, timeout=deadline.remaining(), **keywords)
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

    def put(self, array: Any, device: DeviceArgument = None, *, timeout: float | None = None) -> Tensor:
        """A new tensor with the elements of an array, which may be overwritten afterwards."""
        found = np.asarray(array)
        tensor = self.empty(found.shape, found.dtype, device)
        tensor.set(found, timeout=timeout)
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

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks until everything sent so far is done. Raises the first error that nobody has seen."""
        self._shell.drive(
            synchronize(self._shell.core, self._all_streams()), timeout, "the work of the session"
        )

    def close(self) -> None:
        """Ends the session; what is pending fails with SessionClosedError. Idempotent."""
        self._shell.close()
