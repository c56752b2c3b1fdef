"""Assignment of nodes to devices: ggml's passes, each a function over the same table.

1. *pre-assign*: pinned nodes run where the user pinned them. Nodes that read a weight or variable
   run where it lies or, with offload, on a device that fetches it. With predicted times, all other
   nodes run where the prediction puts them, if they can.
2. *sweep*: unassigned nodes take the device of their neighbours: first only devices other than the
   last one (down, then up), then any device.
3. *upgrade and rescue*: a node moves to a device of higher priority that reads the same memory. An
   unassigned node goes where most of its operands can be read; one that reads only inputs goes to
   the first device that can run it.
4. *the rest*: views run where their source is. Other nodes run where their consumer is, else on the
   first device that can run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress

from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.graph import LeafKind
from heliograph_proto.plans import Cause
from heliograph_server.scheduler.model import Assignment, Problem
from heliograph_server.scheduler.weight_homes import LIGHT_WEIGHTS, VIEWS


def assign(
    problem: Problem, homes: Sequence[int], roots: Sequence[int], wishes: Sequence[int] = ()
) -> tuple[Assignment, ...]:
    """Return the device of each node and the cause.

    `roots` is `leaf_roots` of the graph; `wishes` is the preferred device of each node, or empty if
    unknown. Raises UnsupportedError, with every device's reason, and InvalidArgumentError for a pin
    that cannot be kept.
    """
    table = Table(problem, homes, roots)
    pre_assign(table)
    follow(table, wishes)
    sweep(table)
    upgrade(table)
    complete(table)
    return tuple(one for one in table.found if one is not None)


class Table:
    """The assignments so far, and the queries of the passes."""

    def __init__(self, problem: Problem, homes: Sequence[int], roots: Sequence[int]) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.leaves = len(self.graph.leaves)
        self.homes = homes
        self.roots = roots
        self.devices = problem.devices
        self.last = len(problem.devices) - 1
        self.found: list[Assignment | None] = [None] * len(self.graph.nodes)
        self.views = [node.op in VIEWS for node in self.graph.nodes]
        self._computed = [not is_view for is_view in self.views]
        # Equal assignments are one object.
        self._one = cache(Assignment)

    @property
    def is_complete(self) -> bool:
        """True if all nodes are assigned, but for views."""
        return all(compress(self.found, self._computed))

    def can(self, device: int, number: int) -> bool:
        return not self.devices[device].refusals[number]

    def put(self, number: int, device: int, cause: Cause, operand: int = -1) -> None:
        self.found[number] = self._one(device, cause, operand)

    def memory_of(self, value: int) -> int | None:
        """Return the device in whose memory a value lies; None for an unassigned node or an
        input."""
        if value < self.leaves:
            return self.homes[value] if self.homes[value] >= 0 else None
        found = self.found[value - self.leaves]
        return None if found is None else found.device

    def reads(self, device: int, value: int) -> bool:
        home = self.memory_of(value)
        return home is None or home in self.devices[device].reads


# 1


def pre_assign(table: Table) -> None:
    """Assign pinned nodes, then the nodes that must run where a weight or a variable lies."""
    pins, roots, homes, views = table.problem.pins, table.roots, table.homes, table.views
    for number, node in enumerate(table.graph.nodes):
        if pins and number in pins:
            _pin(table, number, pins[number])
        elif node.op == "assign":
            _place_assignment(table, number)
        elif not views[number] and node.op not in LIGHT_WEIGHTS:
            for place, value in enumerate(node.operands):
                # A weight or a variable that it reads, directly or through views.
                leaf = roots[value]
                if leaf >= 0 and homes[leaf] >= 0:
                    device, cause = _weight_device(table, number, homes[leaf])
                    if device is not None:
                        table.put(number, device, cause, place)
                        break


def _pin(table: Table, number: int, device: int) -> None:
    node, found = table.graph.nodes[number], table.devices[device]
    if not table.can(device, number):
        raise InvalidArgumentError(
            f"node {node.name!r} is pinned to {found.name}, which cannot run {node.op}: "
            f"{found.refusals[number]}",
            advice="pin it elsewhere",
            origin=table.graph.origin(number),
        )
    if node.op == "assign" and table.homes[node.operands[0]] not in found.reads:
        variable, home = _variable(table, number)
        raise InvalidArgumentError(
            f"node {node.name!r} is pinned to {found.name}, which cannot write variable {variable!r}: "
            f"the variable lies on {table.devices[home].name}",
            advice=f"pin all that assigns to it to {table.devices[home].name}, or nothing",
            origin=table.graph.origin(number),
        )
    table.put(number, device, Cause.USER)


def _place_assignment(table: Table, number: int) -> None:
    """Assign to the variable's device, else to a device that works in the same memory."""
    variable, home = _variable(table, number)
    device = _in_memory_of(table, number, home)
    if device is None:
        writers = (one for one in table.devices if home in one.reads)
        reasons = "; ".join(f"{one.name}: {one.refusals[number]}" for one in writers)
        raise UnsupportedError(
            f"variable {variable!r} lies on {table.devices[home].name}, and no device that can write it "
            f"there can run assign: {reasons}",
            advice="pin the assignment to another device before the variable is made",
            origin=table.graph.origin(number),
        )
    table.put(number, device, Cause.PLACED_RESULT)


def _variable(table: Table, number: int) -> tuple[str, int]:
    """Return the name and home of the variable that a node assigns to."""
    value = table.graph.nodes[number].operands[0]
    return table.graph.leaves[value].name, table.homes[value]


def _weight_device(table: Table, number: int, home: int) -> tuple[int | None, Cause]:
    """Return the device of highest priority for a node with a weight on `home`; None if the weight
    is copied."""
    if table.problem.offload and table.devices[home].is_host:
        for device in range(home):
            candidate = table.devices[device]
            if candidate.offloads and candidate.offloads[number] and table.can(device, number):
                return device, Cause.OFFLOAD
    return _in_memory_of(table, number, home), Cause.WEIGHT


def _in_memory_of(table: Table, number: int, home: int) -> int | None:
    """Return the device itself if it can run a node, else the first that can and that reads its
    memory."""
    device = table.devices[home]
    if home in device.reads and not device.refusals[number]:
        return home
    order = (home, *range(len(table.devices)))
    return next((d for d in order if home in table.devices[d].reads and table.can(d, number)), None)


def follow(table: Table, wishes: Sequence[int]) -> None:
    """Assign free nodes to the devices that the prediction prefers."""
    for number, device in enumerate(wishes):
        if table.found[number] is None and not table.views[number] and table.can(device, number):
            table.put(number, device, Cause.PREDICTED)


# 2


def sweep(table: Table) -> None:
    """Sweep four times: down and up without the last device, then down and up with it."""
    count = len(table.graph.nodes)
    for with_last in (False, True):
        for order in (range(count), range(count - 1, -1, -1)):
            if table.is_complete:
                return
            _sweep(table, order, with_last)


def _sweep(table: Table, order: Iterable[int], with_last: bool) -> None:
    views, assigned = table.views, table.found
    present: int | None = None
    for number in order:
        if views[number]:
            continue
        found = assigned[number]
        if found is not None:
            present = found.device if with_last or found.device != table.last else None
        elif present is not None and table.can(present, number):
            table.put(number, present, Cause.SWEPT)


# 3


def upgrade(table: Table) -> None:
    """Move nodes to devices of higher priority where that costs no copy, and assign the unassigned
    ones."""
    helpers = [_helpers(table, place) for place in range(len(table.devices))]
    if table.is_complete and not any(helpers):
        return
    for number, node in enumerate(table.graph.nodes):
        if table.views[number]:
            continue
        found = table.found[number]
        if found is None:
            _rescue(table, number)
        elif found.cause not in (Cause.USER, Cause.OFFLOAD) and node.op != "assign":
            _move_up(table, number, helpers[found.device])


def _helpers(table: Table, place: int) -> list[int]:
    """Return the devices of higher priority that help others and work in a device's memory."""
    reads = table.devices[place].reads
    before = enumerate(table.devices[:place])
    return [number for number, one in before if one.helps and number in reads and place in one.reads]


def _rescue(table: Table, number: int) -> None:
    operands = table.graph.nodes[number].operands
    able = [device for device in range(len(table.devices)) if table.can(device, number)]
    if able:
        best = max(able, key=lambda device: (sum(table.reads(device, v) for v in operands), -device))
        # Every device can read inputs, so for them the order of the devices decides.
        leaves = table.graph.leaves
        are_inputs = all(v < table.leaves and leaves[v].kind is LeafKind.INPUT for v in operands)
        table.put(number, best, Cause.INPUT if are_inputs else Cause.BEST_INPUTS)


def _move_up(table: Table, number: int, helpers: Sequence[int]) -> None:
    """Move to the first of these devices that can run the node, so that nothing is copied."""
    operands = table.graph.nodes[number].operands
    for device in helpers:
        if table.can(device, number) and all(table.reads(device, value) for value in operands):
            table.put(number, device, Cause.UPGRADED)
            return


# 4


def complete(table: Table) -> None:
    """Assign views to their source's device, else to their consumer's; the rest to the first device
    that can."""
    _follow_sources(table)
    if all(table.found):
        return
    consumers = _first_consumers(table)
    for number in range(len(table.graph.nodes) - 1, -1, -1):
        if table.found[number] is None:
            consumer = consumers.get(number)
            found = table.found[consumer] if consumer is not None else None
            if found is not None and table.can(found.device, number):
                table.put(number, found.device, Cause.FROM_CONSUMER)
    for number in range(len(table.graph.nodes)):
        if table.found[number] is None:
            _first_that_can(table, number)


def _follow_sources(table: Table) -> None:
    for number, node in enumerate(table.graph.nodes):
        if table.views[number] and table.found[number] is None:
            device = table.memory_of(node.operands[0])
            if device is not None and table.can(device, number):
                is_leaf = table.roots[node.operands[0]] >= 0
                table.put(number, device, Cause.PLACED_VIEW_SOURCE if is_leaf else Cause.FROM_VIEW)


def _first_consumers(table: Table) -> dict[int, int]:
    found: dict[int, int] = {}
    for number, node in enumerate(table.graph.nodes):
        for value in node.operands:
            if value >= table.leaves:
                found.setdefault(value - table.leaves, number)
    return found


def _first_that_can(table: Table, number: int) -> None:
    for device in range(len(table.devices)):
        if table.can(device, number):
            table.put(number, device, Cause.FIRST_THAT_CAN)
            return
    node = table.graph.nodes[number]
    reasons = "; ".join(f"{device.name}: {device.refusals[number]}" for device in table.devices)
    raise UnsupportedError(f"no device can run op {node.op}: {reasons}", origin=table.graph.origin(number))
