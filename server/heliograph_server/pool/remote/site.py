"""A member as a host that runs partitions of graphs: one message a run, with intermediate values
from and to other members."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import heliograph as hg
from heliograph.explain.report_checks import check_report
from heliograph.head import members
from heliograph.head.handoff import probe
from heliograph_backends.contract import Site, SitePlan, SiteRun, SiteWork, Tensor
from heliograph_proto import EXCHANGE, EXCHANGED_LOOPS
from heliograph_proto.addresses import parse_address
from heliograph_proto.commands import Loop
from heliograph_proto.devices import ProbeResult
from heliograph_proto.errors import HeliographError, PermissionDeniedError, UnknownHandleError
from heliograph_proto.plans import PlanOptions, PlanReport
from heliograph_server.pool.remote.answers import printable
from heliograph_server.pool.remote.binding import INLINE_BYTES, BoundRun
from heliograph_server.pool.remote.device import check_compiled
from heliograph_server.pool.remote.loop import RemoteLoop
from heliograph_server.pool.remote.memory import RemoteBuffer
from heliograph_server.pool.remote.reached import KnownLink
from heliograph_server.resources.membership import Reachability

if TYPE_CHECKING:
    from heliograph_server.pool.member import Member
    from heliograph_server.pool.remote.device import RemoteDevice

logger = logging.getLogger(__name__)

#: The time that a member has to look for another one.
PROBE_SECONDS = 3.0
#: The time that a member has to confirm its presence when another one reports it missing. A silent
#: member is lost earlier, unless its silence is configured to be long.
CONFIRM_SECONDS = 5.0
#: The reason of a link that was missing in a run.
FOUND_BY_RUN = "a run found no link"


class RemoteSite(Site):
    """A member as a site. Thread-safe."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.name = member.name
        self._lock = threading.Lock()
        #: By incarnation of another member: the link by which this one fetches values from it.
        self._known: defaultdict[bytes, KnownLink] = defaultdict(KnownLink)

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
        if EXCHANGE in info.features:
            return ""
        return f"{self.name} runs {printable(info.server)}, which exchanges nothing"

    @property
    def exchanges_loops(self) -> bool:
        return EXCHANGED_LOOPS in self.member.session.info.features

    def check(self) -> None:
        self.member.check()

    def confirm(self) -> None:
        # A member that is away comes back, or is lost, within its lease.
        seconds = CONFIRM_SECONDS + self.member.session.info.lease_seconds
        with suppress(HeliographError):
            members.await_arrival(self.member.session, seconds)

    def can_reach(self, other: Site) -> bool:
        if self._link(other).is_there is None:
            self.look_for(other)
        # Without a probe the first run finds out.
        return self._link(other).is_there is not False

    def look_again(self, other: Site) -> None:
        if self._link(other).is_due_for_compile(time.monotonic()):
            self.look_for(other)

    def due(self) -> list[bytes]:
        """The incarnations of members whose relayed links are to be probed now."""
        now = time.monotonic()
        with self._lock:
            return [incarnation for incarnation, one in self._known.items() if one.is_due(now)]

    def relayed(self) -> dict[bytes, Reachability]:
        """The members from which this one cannot fetch values, by incarnation, without their
        names."""
        now = time.monotonic()
        with self._lock:
            missing = {key: one for key, one in self._known.items() if one.is_there is False}
            return {
                key: Reachability(self.name, "", False, one.why, now - one.since)
                for key, one in missing.items()
            }

    def forget(self, lives: Collection[bytes]) -> None:
        """Forget the links to incarnations that are not among `lives`."""
        with self._lock:
            for incarnation in self._known.keys() - lives:
                del self._known[incarnation]

    def _link(self, other: Site) -> KnownLink:
        with self._lock:
            return self._known[other.incarnation]

    def look_for(self, other: Site, bandwidth_bytes: int = 0) -> tuple[float, float] | None:
        """Make the member probe another one, with so many bytes each way.

        Return the round trip in seconds and the bandwidth in bytes per second (0: not measured).
        Return None if there is no link, or the member could not be asked.
        """
        if self.why_not:
            return None
        link = self._link(other)
        with self._lock:
            link.probed = time.monotonic()
        try:
            found = probe(self.member.session, other.address, bandwidth_bytes, PROBE_SECONDS)
        except PermissionDeniedError as error:
            found = ProbeResult(error=error)
        except HeliographError as error:
            logger.debug("%s cannot probe %s: %s", self.name, other.name, error)
            return None
        reaches = found.error is None and found.incarnation == other.incarnation
        if not reaches and not _answers(other):
            return None
        why = found.error.message if found.error is not None else "another daemon answers there"
        with self._lock:
            has_changed = link.found() if reaches else link.missing(why, time.monotonic())
        if reaches:
            if has_changed:
                logger.info("%s reaches %s: values between them go straight again", self.name, other.name)
            return found.round_trip_seconds, found.bytes_per_second
        if has_changed:
            self._warn(other, why)
        return None

    def cannot_reach(self, other: Site) -> None:
        with self._lock:
            self._known[other.incarnation].broke(FOUND_BY_RUN, time.monotonic())

    def _warn(self, other: Site, why: str) -> None:
        logger.warning(
            "%s cannot reach %s, so values between them are relayed: %s",
            self.name,
            other.name,
            printable(why),
        )

    def reach(self, other: Site) -> Reachability:
        """The known reachability, without a probe."""
        if why := self.why_not or other.why_not:
            return Reachability(self.name, other.name, False, why)
        with self._lock:
            link = self._known[other.incarnation]
            seconds = time.monotonic() - link.since if link.is_there is False else 0.0
            return Reachability(self.name, other.name, link.is_there, link.why, seconds)

    def compile(self, work: SiteWork) -> RemoteSitePlan:
        leaves = {**work.bindings.weights, **work.bindings.variables}
        devices: dict[str, list[int]] = {}
        found: dict[str, RemoteDevice] = {}
        for node, device in enumerate(work.devices):
            found[device.name] = device  # type: ignore[assignment]
            devices.setdefault(device.name, []).append(node)
        names = tuple(found[name].member_name for name in devices)
        options = PlanOptions(
            names,
            work.options.fusion,
            work.options.threads,
            pins=tuple((name, tuple(nodes)) for name, nodes in zip(names, devices.values(), strict=True)),
            pipeline=work.pipeline,
            partition=work.partition,
        )
        bindings = {leaf: _member_tensor(tensor) for leaf, tensor in leaves.items()}
        with self.member.edge():
            plan = members.compile_frozen(self.member.session, work.graph, options, bindings=bindings)
        check_compiled(plan, work.graph)
        return RemoteSitePlan(self, found[next(iter(devices))], work, plan)


def _answers(site: Site) -> bool:
    """True if a member that another one cannot find is present."""
    assert isinstance(site, RemoteSite), "a host of another kind"
    try:
        site.member.session.synchronize(timeout=PROBE_SECONDS)
    except HeliographError:
        return False
    return True


def _member_tensor(tensor: Tensor) -> hg.Tensor:
    assert isinstance(tensor.buffer, RemoteBuffer), "a leaf on another host"
    return tensor.buffer.tensor(tensor)


class RemoteSitePlan(SitePlan):
    """A plan made by `RemoteSite.compile`."""

    def __init__(self, site: RemoteSite, device: RemoteDevice, work: SiteWork, plan: hg.Plan) -> None:
        self.site = site
        #: The device for inputs from elsewhere.
        self.device = device
        self.graph = work.graph
        self.compute_bytes = plan.compute_bytes
        self.steps = plan.steps
        self._plan: hg.Plan | None = plan

    def __repr__(self) -> str:
        return f"<RemoteSitePlan of {self.graph} on {self.site.name}>"

    @property
    def plan(self) -> hg.Plan:
        """The plan as the member's client knows it."""
        if self._plan is None:
            raise UnknownHandleError("the plan was freed")
        return self._plan

    def prepare(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> RemoteSiteRun:
        return RemoteSiteRun(self, inputs, outputs)

    def prepare_loop(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], stack: ExitStack
    ) -> Callable[[Loop, int], RemoteLoop]:
        with self.site.member.edge():
            bound = BoundRun(self.device, inputs, outputs, INLINE_BYTES)
        stack.callback(bound.close)
        return lambda loop, number: RemoteLoop(self.device, self.plan, self.graph, loop, bound, number)

    def measure(self, *, on: bool) -> None:
        with self.site.member.edge():
            members.report(self.plan, measure=on)

    def report(self) -> PlanReport:
        with self.site.member.edge():
            found = members.report(self.plan)
            check_report(self.graph, found)
            return found

    def free(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.free()


class RemoteSiteRun(SiteRun):
    """One run of a `RemoteSitePlan`."""

    def __init__(
        self, plan: RemoteSitePlan, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> None:
        self._plan = plan
        self._run: hg.RunFuture | None = None
        self._error: HeliographError | None = None
        with plan.site.member.edge():
            self._bound = BoundRun(plan.device, inputs, outputs, INLINE_BYTES)

    def start(self, number: int, ended: Callable[[], None]) -> None:
        plan, bound = self._plan, self._bound
        with plan.site.member.edge():
            self._run = members.submit_partition(
                plan.plan, number, bound.inputs, tuple(bound.fetched), bound.into
            )
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
        if self._bound.fetched:
            with self._plan.site.member.edge():
                self._bound.take(self._plan.plan, self._run)

    def close(self) -> None:
        # The future is in a reference cycle, which would keep the tensors of the run.
        self._run = None
        self._bound.close()
