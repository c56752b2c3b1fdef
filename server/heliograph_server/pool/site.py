"""A member as a host that runs portions of graphs: each one message a run, with values in between from and to
other members."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import heliograph as hg
from heliograph._handing import probe
from heliograph._sharing import Sharing
from heliograph_backends import access
from heliograph_backends.contract import Site, SitePlan, SiteRun, SiteWork, Tensor, Usage
from heliograph_proto import EXCHANGE
from heliograph_proto.addresses import parse_address
from heliograph_proto.description import PlanReport
from heliograph_proto.errors import HeliographError, UnknownHandleError
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.pool.memory import RemoteBuffer

if TYPE_CHECKING:
    from heliograph_server.pool.device import RemoteDevice
    from heliograph_server.pool.member import Member

logger = logging.getLogger(__name__)

#: How long a member may look for another one.
PROBE_SECONDS = 3.0
#: Larger inputs are written to a tensor there before the run is sent.
INLINE_BYTES = 64 * 1024


class RemoteSite(Site):
    """Thread-safe."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.name = member.name
        self._lock = threading.Lock()
        #: By the lives of other members: whether it can fetch values from them, as far as is known.
        self._reaches: dict[bytes, bool] = {}

    def __repr__(self) -> str:
        return f"<RemoteSite {self.name}>"

    @property
    def address(self) -> str:
        return str(replace(parse_address(self.member.url), device=""))

    @property
    def incarnation(self) -> bytes:
        return self.member.incarnation

    @property
    def why_not(self) -> str:
        info = self.member.session.info
        return "" if EXCHANGE in info.features else f"{self.name} runs {info.server}, which exchanges nothing"

    def check(self) -> None:
        self.member.check()

    def can_reach(self, other: Site) -> bool:
        if other.incarnation not in self._reaches:
            self.look_for(other)
        # What nobody could ask is found out by trying.
        return self._reaches.get(other.incarnation, True)

    def look_for(self, other: Site, bandwidth_bytes: int = 0) -> tuple[float, float] | None:
        """Has the member look for another one, and carry so many bytes each way: the seconds of a round trip,
        and bytes a second (0: not measured). None where it found no way, or could not be asked."""
        if self.why_not:
            return None
        try:
            found = probe(self.member.session, other.address, bandwidth_bytes, PROBE_SECONDS)
        except HeliographError as error:
            logger.debug("%s measures no way to %s: %s", self.name, other.name, error)
            return None
        reaches = found.error is None and found.incarnation == other.incarnation
        if not reaches and not _answers(other):
            return None
        with self._lock:
            is_news = self._reaches.get(other.incarnation) is not False
            self._reaches[other.incarnation] = reaches
        if reaches:
            return found.round_trip_seconds, found.bytes_per_second
        if is_news:
            why = found.error.message if found.error is not None else "another daemon answers there"
            logger.warning(
                "%s cannot reach %s: values between them are relayed: %s", self.name, other.name, why
            )
        return None

    def cannot_reach(self, other: Site) -> None:
        with self._lock:
            self._reaches[other.incarnation] = False

    def compile(self, work: SiteWork) -> RemoteSitePlan:
        leaves = {**work.bindings.weights, **work.bindings.variables}
        devices: dict[str, list[int]] = {}
        found: dict[str, RemoteDevice] = {}
        for node, device in enumerate(work.devices):
            found[device.name] = device  # type: ignore[assignment]
            devices.setdefault(device.name, []).append(node)
        pins = tuple((found[name].member_name, tuple(nodes)) for name, nodes in devices.items())
        bindings = {leaf: _tensor_there(tensor) for leaf, tensor in leaves.items()}
        with self.member.edge():
            plan = self.member.session._compile_frozen(
                work.graph,
                [found[name].there for name in devices],
                fusion=work.options.fusion,
                threads=work.options.threads,
                bindings=bindings,
                sharing=Sharing(work.portion, pins, work.pipeline),
            )
        return RemoteSitePlan(self, found[next(iter(devices))], work, plan)


def _answers(site: Site) -> bool:
    """Whether a member that another one does not find is there all the same."""
    assert isinstance(site, RemoteSite), "a host of another kind"
    try:
        site.member.session.synchronize(timeout=PROBE_SECONDS)
    except HeliographError:
        return False
    return True


def _tensor_there(tensor: Tensor) -> hg.Tensor:
    assert isinstance(tensor.buffer, RemoteBuffer), "a leaf that lies on another host"
    return tensor.buffer.tensor(tensor)


class RemoteSitePlan(SitePlan):
    """Made by `RemoteSite.compile`."""

    def __init__(self, site: RemoteSite, device: RemoteDevice, work: SiteWork, plan: hg.Plan) -> None:
        self.site = site
        #: Where inputs from elsewhere are put.
        self.device = device
        self.graph = work.graph
        self.compute_bytes = plan.compute_bytes
        self.steps = plan.steps
        self._plan: hg.Plan | None = plan

    def __repr__(self) -> str:
        return f"<RemoteSitePlan of {self.graph} on {self.site.name}>"

    @property
    def plan(self) -> hg.Plan:
        """As the member's client knows it."""
        if self._plan is None:
            raise UnknownHandleError("the plan was freed")
        return self._plan

    def prepare(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> RemoteSiteRun:
        return RemoteSiteRun(self, inputs, outputs)

    def report(self) -> PlanReport:
        with self.site.member.edge():
            return self.plan._report()

    def there(self, tensor: Tensor) -> hg.Tensor | None:
        """A tensor as the member knows it, if it lies there."""
        buffer = tensor.buffer
        if isinstance(buffer, RemoteBuffer) and buffer.buffer_type.device.member is self.site.member:
            return buffer.tensor(tensor)
        return None

    def free(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.free()


class RemoteSiteRun(SiteRun):
    """One run of it."""

    def __init__(
        self, plan: RemoteSitePlan, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> None:
        self._plan = plan
        self._made: list[Tensor] = []
        self._run: hg.RunFuture | None = None
        self._error: HeliographError | None = None
        self._inputs: list[hg.Tensor | np.ndarray[Any, Any]] = []
        #: Outputs that come here, and where they belong.
        self._fetched = dict[int, Tensor]()
        self._into = dict[int, hg.Tensor]()
        for place, target in enumerate(outputs):
            if target is not None:
                if (there := plan.there(target)) is not None:
                    self._into[place] = there
                else:
                    self._fetched[place] = target
        try:
            with plan.site.member.edge():
                self._inputs = [self._input(one) for one in inputs]
        except BaseException:
            self.close()
            raise

    def _input(self, tensor: Tensor) -> hg.Tensor | np.ndarray[Any, Any]:
        """In place where it lies on the member; small ones ride in the run; others are brought."""
        if (there := self._plan.there(tensor)) is not None:
            return there
        if tensor.buffer.buffer_type.is_host and tensor.type.nbytes <= INLINE_BYTES:
            return _bytes_of(tensor)
        device = self._plan.device
        memory = device.buffer_type
        moved = Tensor(tensor.type, memory.allocate(memory.alloc_size(tensor.type), Usage.COMPUTE))
        self._made.append(moved)
        access.copy(tensor, moved)
        return device.tensor(moved)

    def start(self, number: int, ended: Callable[[], None]) -> None:
        plan = self._plan
        with plan.site.member.edge():
            self._run = plan.plan._submit_portion(number, self._inputs, tuple(self._fetched), self._into)
        self._run.add_done_callback(lambda _: ended())

    @property
    def error(self) -> HeliographError | None:
        if self._run is not None and self._error is None and self._run.done():
            found = self._run._run.pending.error
            self._error = self._plan.site.member.ours(found) if found is not None else None
        return self._error

    def cancel(self) -> None:
        if self._run is not None:
            self._run.cancel()

    def finish(self) -> None:
        assert self._run is not None, "it was started"
        if not self._fetched:
            return
        with self._plan.site.member.edge():
            arrays = self._run.result()
        ports = self._plan.plan._spec.info.outputs
        for place, target in self._fetched.items():
            array = arrays[ports[place].name]
            access.write(target, 0, np.ascontiguousarray(array).reshape(-1).view("u1").data)

    def close(self) -> None:
        made, self._made = self._made, []
        # Views keep the member's memory, though its buffer is freed, and the run is one of a ring of objects.
        self._run, self._inputs = None, []
        self._into.clear()
        for one in made:
            one.buffer.free()


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in host memory: in place where they lie together."""
    if not tensor.is_contiguous:
        return np.frombuffer(access.read_whole(tensor), np.uint8)
    row = TensorType(DTYPES["u8"], (tensor.type.nbytes,))
    found: np.ndarray[Any, Any] = tensor.buffer.array(row, tensor.offset_bytes, (1,))
    return found
