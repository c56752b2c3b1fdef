"""The memory that a placed graph needs on each device, and its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from heliograph_backends.contract import DeviceCompileOptions
from heliograph_proto.errors import LimitExceededError, OutOfMemoryError, UnsupportedError
from heliograph_proto.graph import Graph, Leaf, LeafKind
from heliograph_proto.plans import DeviceEstimate, PlanEstimate, SplitEstimate
from heliograph_proto.types import MAX_BYTES
from heliograph_server.compile.needs import lasting_needs, splits_needs
from heliograph_server.plans.reservation import ordered
from heliograph_server.resources.reclaim import BeyondReclaimError
from heliograph_server.scheduler.model import Schedule

if TYPE_CHECKING:
    from heliograph_server.compile.placement import Placement

ADVICE = "allow more, name more devices, or see what the plan takes: session.estimate(graph)"


def alone(graph: Graph, placement: Placement, options: DeviceCompileOptions) -> PlanEstimate:
    """Return the estimate of a plan in one split on one device. Raises UnsupportedError."""
    found = placement.main.estimate(ordered(placement.main, graph)[0], options)
    sizes = {kind: _size(placement, graph.of_kind(kind)) for kind in LeafKind}
    weights, variables = sizes[LeafKind.WEIGHT], sizes[LeafKind.VARIABLE]
    share = DeviceEstimate(placement.main.name, found.compute_bytes, weights, variables, found.extra_bytes)
    return PlanEstimate(
        device=placement.main.name,
        compute_bytes=found.compute_bytes,
        weights_bytes=weights,
        variables_bytes=variables,
        extra_bytes=found.extra_bytes,
        arena_bytes=found.arena_bytes,
        devices=(share,),
        splits=(SplitEstimate(placement.main.name, tuple(range(len(graph.nodes)))),),
    )


def _size(placement: Placement, leaves: tuple[Leaf, ...]) -> int:
    return checked(sum(placement.memories[0].alloc_size(leaf.type) for leaf in leaves))


def checked(size_bytes: int) -> int:
    """Return the size. Raises LimitExceededError if it is no size of memory."""
    if size_bytes > MAX_BYTES:
        raise LimitExceededError(
            f"weights or variables of {size_bytes:,} bytes in all; there can be fewer than 2**63"
        )
    return size_bytes


def shares(
    graph: Graph, placement: Placement, schedule: Schedule, options: DeviceCompileOptions, copies: int
) -> tuple[DeviceEstimate, ...]:
    """Return the estimates of a plan over several devices, by priority, for those that need memory.

    Raises UnsupportedError.
    """
    places = range(len(placement.devices))
    lasting = lasting_needs(graph, schedule, placement.memories, places)
    computing = splits_needs(graph, schedule, placement.memories, options, places)
    found = (
        DeviceEstimate(
            placement.devices[place].name,
            (lasting[place].blocks + computing[place].blocks) * copies,
            lasting[place].weights_bytes,
            lasting[place].variables_bytes,
            computing[place].extra_bytes,
        )
        for place in places
    )
    return tuple(one for one in found if one.compute_bytes or one.weights_bytes or one.variables_bytes)


def check_limits(
    graph: Graph,
    placement: Placement,
    limits: Mapping[str, int],
    lies: Mapping[int, str],
    options: DeviceCompileOptions,
    copies: int,
) -> None:
    """Check everything that a plan takes of devices against limits, by device.

    `lies` are the devices, by name, of leaves that have memory already, which do not count. Raises
    OutOfMemoryError with what is needed, what is allowed, and the difference.
    """
    try:
        if placement.schedule is None:
            found: Sequence[DeviceEstimate] = alone(graph, placement, options).devices
        else:
            found = shares(graph, placement, placement.schedule, options, copies)
    except UnsupportedError:
        return  # a device that cannot estimate; the limits bound the leaves
    more = Counter({placement.main.name: _staged(graph, placement)})
    there: Counter[str] = Counter()
    for value, name in lies.items():
        there[name] += placement.home(value).alloc_size(graph.type_of(value))
    over = [
        text
        for one in found
        if one.name in limits and (text := _excess(one, more[one.name], there[one.name], limits[one.name]))
    ]
    if over:
        raise BeyondReclaimError(f"the plan needs {'; and '.join(over)}", advice=ADVICE)


def _excess(share: DeviceEstimate, staged_bytes: int, there_bytes: int, limit: int) -> str:
    """The bytes of a share and by how much they exceed a limit; empty if they do not."""
    parts = {
        "weights and variables": share.weights_bytes + share.variables_bytes - there_bytes,
        "results": sum(share.compute_bytes),
        "data beside weights": share.extra_bytes,
        "inputs and outputs": staged_bytes,
    }
    need = sum(parts.values())
    if need <= limit:
        return ""
    listed = ", ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    return (
        f"{need:,} bytes of device {share.name} ({listed}), where memory= allows {limit:,}: "
        f"{need - limit:,} too many"
    )


def _staged(graph: Graph, placement: Placement) -> int:
    """The bytes of a run's inputs and outputs that a device without access to the host holds."""
    if placement.schedule is not None or placement.main.buffer_type.is_host:
        return 0
    memory = placement.main.buffer_type
    types = [leaf.type for leaf in graph.of_kind(LeafKind.INPUT)]
    types += [graph.type_of(output.value) for output in graph.outputs]
    return sum(map(memory.alloc_size, types))


def refused_by_limits(
    graph: Graph,
    placement: Placement,
    limits: Mapping[str, int],
    rooms: Mapping[str, int],
    options: DeviceCompileOptions,
) -> OutOfMemoryError | None:
    """Return the error of a graph that cannot be placed within limits; None if none applies.

    `placement` is the graph on one device, which stands for all of them. `rooms` has the most bytes
    that the plan may take of each device, with the limits.
    """
    try:
        found = alone(graph, placement, options)
    except UnsupportedError:
        return None
    need = sum((sum(found.compute_bytes), found.weights_bytes, found.variables_bytes, found.extra_bytes))
    over = need - sum(rooms.values())
    listed = ", ".join(
        f"{name} {'allows' if name in limits else 'has'} {size:,}" for name, size in rooms.items()
    )
    why = f"{over:,} too many" if over > 0 else "no division of its graph fits there"
    return BeyondReclaimError(
        f"the plan needs about {need:,} bytes, where with memory= {listed}: {why}", advice=ADVICE
    )
