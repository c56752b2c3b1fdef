"""A device of a member daemon."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import heliograph as hg
from heliograph.head import members
from heliograph_backends.contract import (
    Arena,
    BufferType,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    MemoryEstimate,
    Tensor,
)
from heliograph_backends.cpu.stream import CpuStream
from heliograph_proto.devices import BufferRole, Capabilities, Memory, OpAnswer, OpPath, OpQuery
from heliograph_proto.errors import MemberLostError, ProtocolError
from heliograph_proto.graph import Graph, Output
from heliograph_proto.plans import PlanOptions
from heliograph_proto.types import TensorType
from heliograph_server.pool.remote.answers import check_memory, check_plan, one_answer, printable
from heliograph_server.pool.remote.memory import RemoteArena, RemoteBuffer, RemoteBufferType
from heliograph_server.pool.remote.plan import RemotePlan

if TYPE_CHECKING:
    from heliograph_server.pool.member import Member
    from heliograph_server.pool.remote.intake import RemoteIntake
    from heliograph_server.pool.remote.site import RemoteSite

#: The most answers about ops that are cached.
MAX_ANSWERS = 10_000
#: The time that a member has to report its free memory. After a timeout it is not queried for a
#: while, since connecting clients query all devices one after the other.
ANSWER_SECONDS = 5.0

_Question: TypeAlias = tuple[str, tuple[tuple[str, Any], ...], tuple[TensorType, ...], TensorType, bool]


class RemoteDevice(Device):
    """A device of a member. All devices of a member share its session.

    Each stream has a thread that waits for the member: when its work returns, the member has
    computed. On the member each device has a stream of its own, so that it does not wait for the
    work of others.
    """

    backend = "remote"
    site: RemoteSite

    def __init__(self, name: str, member: Member, device: hg.Device) -> None:
        self.name = name
        self.member = member
        self.site = member.site
        #: The device as its daemon's client knows it.
        self.member_device = device
        #: Its name on the member.
        self.member_name = device.name
        self.description = f"{printable(device.description)}, at {member.url}"
        self.type = device.type
        self.id = device.id
        self.capabilities = Capabilities(async_=True, events=True)
        #: The stream on the member for all slow work.
        self.member_stream = device.stream()
        own = [one for one in device.buffer_types if one.role is not BufferRole.HOST]
        self._buffer_types = [RemoteBufferType(self, one) for one in own or device.buffer_types]
        self._answers: OrderedDict[_Question, OpAnswer] = OrderedDict()
        #: Streams on the member for loops, which may wait for their clients: those not in use.
        self._loop_streams: deque[hg.Stream] = deque()
        self._numbers = count()
        self._lost: MemberLostError | None = None
        self._last_memory: Memory | None = None

    def __repr__(self) -> str:
        return f"<RemoteDevice {self.name}>"

    @property
    def session(self) -> hg.Session:
        """The session with the member."""
        return self.member.session

    @property
    def intake(self) -> RemoteIntake | None:
        return self.member.intake

    @property
    def lost(self) -> MemberLostError | None:
        return self._lost or self.member.lost

    @property
    def is_draining(self) -> bool:
        # New plans avoid a member that is away, too.
        return self.member.is_draining or self.member.why_away is not None

    def lose(self, error: MemberLostError) -> None:
        """Mark it as lost by its daemon, which is itself a head."""
        self._lost = error

    def memory(self) -> Memory:
        """The member's answer; while it is away, the last one."""
        if self._last_memory is not None and self.member.why_away is not None:
            self.member.check()
            return self._last_memory
        with self.member.edge(), self.member.patience():
            # Wait until the member has handled earlier frees.
            members.await_arrival(self.session, ANSWER_SECONDS)
            found = check_memory(self.name, self.member_device.memory(timeout=ANSWER_SECONDS))
        self._last_memory = found
        return found

    @property
    def site_name(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def buffer_type(self) -> RemoteBufferType:
        return self._buffer_types[0]

    @property
    def extra_buffer_types(self) -> Sequence[RemoteBufferType]:
        return self._buffer_types[1:]

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        return isinstance(buffer_type, RemoteBufferType) and buffer_type.is_readable_by(self)

    def features(self) -> Mapping[str, str]:
        facts = {printable(name): printable(fact) for name, fact in self.member_device.features.items()}
        return {**facts, "member": self.member.url, "member backend": printable(self.member_device.backend)}

    def stream(self) -> CpuStream:
        return CpuStream(self, f"heliograph-{self.name}-stream-{next(self._numbers)}")

    def take_stream(self) -> hg.Stream:
        """Return a stream on the member for a loop, which gives it back at its end."""
        try:
            return self._loop_streams.popleft()
        except IndexError:
            return self.member_device.stream()

    def return_stream(self, stream: hg.Stream) -> None:
        """Give a loop's stream back."""
        self._loop_streams.append(stream)

    def tensor(self, tensor: Tensor) -> hg.Tensor:
        """A tensor of this device as the member knows it."""
        assert isinstance(tensor.buffer, RemoteBuffer), "a tensor of another device"
        return tensor.buffer.tensor(tensor)

    # Supported ops: the member's answers, cached

    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        return self._answer(op, attributes, operands, result).why_not

    def offload_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> bool:
        return self._answer(op, attributes, operands, result).offload

    def op_path(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> OpPath:
        return self._answer(op, attributes, operands, result, op_path=True).op_path

    def _answer(
        self,
        op: str,
        attributes: Mapping[str, Any],
        operands: Sequence[TensorType],
        result: TensorType,
        *,
        op_path: bool = False,
    ) -> OpAnswer:
        question = op, tuple(sorted(attributes.items())), tuple(operands), result, op_path
        if question not in self._answers:
            with self.member.edge():
                answers = self.member_device.query(
                    [OpQuery(op, tuple(operands), result, attributes, op_path)]
                )
            self._answers[question] = one_answer(answers)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return self._answers[question]

    # Plans

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> RemotePlan:
        return self.compile_on_member(graph, bindings, options)

    def arena(self, block_bytes: Sequence[int]) -> RemoteArena:
        with self.member.edge():
            return RemoteArena(self, members.reserve_blocks(self.session, block_bytes, self.member_device))

    def compile_in(
        self, arena: Arena, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions
    ) -> RemotePlan:
        assert isinstance(arena, RemoteArena), "an arena of another kind of device"
        return self.compile_on_member(graph, bindings, options, arena=arena)

    def compile_on_member(
        self,
        graph: Graph,
        bindings: LeafBindings,
        options: DeviceCompileOptions,
        updates: hg.Plan | None = None,
        arena: RemoteArena | None = None,
    ) -> RemotePlan:
        """Compile on the member. `updates` is a plan whose memory it takes over, `arena` the memory
        to use."""
        leaves = {**bindings.weights, **bindings.variables}
        with self.member.edge():
            member = members.compile_frozen(
                self.session,
                graph,
                PlanOptions((self.member_name,), options.fusion, options.threads),
                bindings={leaf: self.tensor(tensor) for leaf, tensor in leaves.items()},
                updates=updates,
                reservation=arena.reservation if arena is not None else None,
            )
        check_compiled(member, graph)
        return RemotePlan(self, graph, member)

    def estimate(self, graph: Graph, options: DeviceCompileOptions) -> MemoryEstimate:
        with self.member.edge():
            plan_options = PlanOptions((self.member_name,), options.fusion)
            if not graph.outputs:
                # A split that only assigns; members take graphs with outputs, and a leaf costs nothing.
                graph = replace(graph, outputs=(Output("none", 0),))
            found = members.estimate_frozen(self.session, graph, plan_options)
        return MemoryEstimate(found.compute_bytes, found.extra_bytes, found.arena_bytes)

    def close(self) -> None:
        self.member.leave(self)


def check_compiled(plan: hg.Plan, graph: Graph) -> None:
    """Check that a member's plan matches its graph. Otherwise free it, and raise ProtocolError."""
    try:
        check_plan(plan._spec.info, graph)
    except ProtocolError:
        plan.free()
        raise
