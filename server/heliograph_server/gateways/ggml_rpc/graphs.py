"""A client's graph of addresses as graphs of ours, each with the memory of its leaves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from heliograph_proto.errors import HeliographError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.pace import in_turns
from heliograph_proto.types import TensorType
from heliograph_server.gateways.ggml_rpc import ops, wire
from heliograph_server.gateways.ggml_rpc.buffers import Buffers, Place, RefusedError, Spans
from heliograph_server.gateways.ggml_rpc.building import Builder, Value
from heliograph_server.gateways.ggml_rpc.tracing import Part, Region, Step, parts_of

#: A node with this flag is computed; others are only there.
COMPUTE_FLAG = 16


@dataclass(frozen=True, slots=True)
class BoundGraph:
    """A graph and its memory."""

    graph: Graph
    #: The region of each leaf, a variable or a weight.
    leaves: dict[int, tuple[Region, TensorType]]
    #: The region that each of these outputs is copied to after the run.
    copied: dict[int, tuple[Region, TensorType]]

    @property
    def weights(self) -> Set[int]:
        """The buffers whose memory is weights of the graph."""
        leaves = self.graph.leaves
        found = [one.buffer for leaf, (one, _) in self.leaves.items() if leaves[leaf].kind is LeafKind.WEIGHT]
        return frozenset(found)


def steps_of(message: wire.GraphMessage, buffers: Buffers) -> list[Step]:
    """Check a graph and return the nodes that compute something. Raises RefusedError."""
    tensors = {one.id: one for one in message.tensors}
    if len(tensors) != len(message.tensors) or 0 in tensors:
        raise RefusedError("a graph with a tensor twice, or one without a number")
    found = []
    for number in in_turns(message.nodes):
        node = tensors.get(number)
        if node is None:
            raise RefusedError(f"node {number:#x} is not among the tensors of its graph")
        if node.op in ops.VIEWS or not node.flags & COMPUTE_FLAG:
            continue
        step = _step(node, tensors, buffers, message.device)
        if step is not None and not step.writes.is_empty:
            found += _with_further_results(step)
    return found


def _step(node: wire.Tensor, tensors: dict[int, wire.Tensor], buffers: Buffers, device: int) -> Step | None:
    rule = ops.RULES.get(node.op)
    if rule is None:
        raise RefusedError(f"node {node.name!r}: op {node.op} is not computed here")
    reads: list[Place | None] = []
    for place, number in enumerate(node.src):
        source = tensors.get(number)
        if number and source is None:
            raise RefusedError(f"node {node.name!r}: its source {number:#x} is not among the tensors")
        is_read = source is not None and (rule.reads is None or place in rule.reads)
        reads.append(buffers.place(source) if source is not None and is_read else None)
    given = [one for one in reads if one is not None]
    if len(given) < rule.least or any(one is None for one in reads[: rule.least]):
        raise RefusedError(f"node {node.name!r} (op {node.op}) needs {rule.least} sources")
    if rule.updates and any(one.is_empty for one in given):
        return None
    is_empty = any(one.is_empty for one in given)
    if is_empty and ops.NAMES[node.op] not in ops.SUMS:
        raise RefusedError(f"node {node.name!r} reads a tensor without elements")
    places = [*given, buffers.place(node)]
    if any(one.buffer.device != device for one in places):
        raise RefusedError(f"node {node.name!r} of device {device} uses the memory of another")
    if is_empty:
        return Step(node, (), places[-1])
    return Step(node, tuple(reads), places[-1], rule.updates)


def _with_further_results(step: Step) -> list[Step]:
    """Return a step for each result of a node: the later ones do not depend on those before them."""
    found = [step]
    for number, source in enumerate(ops.RULES[step.tensor.op].also, 1):
        place = step.reads[source]
        assert place is not None
        found.append(Step(step.tensor, step.reads, place, result=number))
    return found


def written_by(steps: Iterable[Step]) -> Set[int]:
    """Return the buffers that nodes write."""
    return frozenset(one.writes.buffer.handle for one in steps)


def bound_graphs(
    steps: Sequence[Step], *, rounds_rows: bool = False, written: Set[int] | None = None
) -> list[BoundGraph]:
    """Return the graphs that compute a client's nodes, in order. Raises RefusedError.

    `rounds_rows`: products with blocks round their rows. `written`: matrices in other buffers than
    these are weights; None: nothing is.
    """
    return [_Translation(part, rounds_rows, written).result() for part in parts_of(steps)]


class _Translation:
    """Makes a graph of a part."""

    def __init__(self, part: Part, rounds_rows: bool, written: Set[int] | None) -> None:
        self._part, self._rounds_rows, self._written = part, rounds_rows, written
        self._builder = Builder()
        #: Memory that is read as it was, by region, and kept regions with their present values.
        self._leaves: dict[Value, tuple[Region, TensorType]] = {}
        self._memory = _merged(part)
        self._read: dict[Region, Value] = {}
        self._now: dict[Region, Value] = {}
        self._variables: dict[Region, Value] = {}
        #: The result of each step, in the order of its memory.
        self._results: list[Value] = []

    def result(self) -> BoundGraph:
        for number, step in in_turns(enumerate(self._part.steps)):
            try:
                self._compute(number, step)
            except (HeliographError, ArithmeticError) as error:
                why = error.message if isinstance(error, HeliographError) else str(error)
                raise RefusedError(f"node {step.tensor.name!r} (op {step.tensor.op}): {why}") from None
        copied = {self._builder.output(value): where for value, where in self._write_results()}
        if not copied:
            last = len(self._builder) - 1
            self._builder.output(last)
        graph, numbers = self._builder.graph()
        return BoundGraph(graph, {numbers[value]: where for value, where in self._leaves.items()}, copied)

    def _compute(self, number: int, step: Step) -> None:
        builder, rule = self._builder, ops.RULES[step.tensor.op]
        sources = [
            None if place is None or source is None else self._value(place, source)
            for place, source in zip(step.reads, self._part.sources[number], strict=True)
        ]
        want = TensorType(step.writes.dtype, step.writes.ne[::-1])
        given = ops.Call(builder, step.tensor, sources, want, step.result, self._rounds_rows)
        # A sum of nothing is 0.
        found = rule.make(given) if sources or not rule.least else ops.zeros(given)
        made = builder.reshape(builder.cast(found, want.dtype), want.shape)
        self._results.append(self._stored(step.writes, made))

    def _stored(self, place: Place, made: Value) -> Value:
        """Return a result in the order of its memory, and write it into the kept region that has
        it."""
        builder = self._builder
        strides = _in_blocks(place)
        for region in self._part.kept:
            if region.has(place):
                offset = (place.offset - region.start) // place.dtype.block_bytes
                now = self._kept(region, place)
                changed = builder.with_part(now, made, offset, strides)
                if changed is None:
                    raise RefusedError("its result lies in memory in a way that is not supported")
                self._now[region] = builder.node("assign", self._variables[region], changed)
                return made
        found = builder.in_memory_order(made, strides)
        if found is None:
            raise RefusedError("its result lies in memory in a way that is not supported")
        return found

    def _value(self, place: Place, source: int | Region) -> Value:
        if isinstance(source, Region) and source not in self._part.kept:
            whole, start, dtype = self._memory_value(source)
        elif isinstance(source, Region):
            whole, start, dtype = self._kept(source, place), source.start, source.dtype
        else:
            written = self._part.steps[source].writes
            whole, start, dtype = self._results[source], written.offset, written.dtype
        builder = self._builder
        if dtype is not place.dtype:
            whole = builder.node("bitcast", builder.flat(whole), dtype=place.dtype)
        offset, rest = divmod(place.offset - start, place.dtype.block_bytes)
        found = None if rest else builder.part(whole, offset, place.ne[::-1], _in_blocks(place))
        if found is None:
            raise RefusedError("it reads memory with strides that are not supported")
        return found

    def _memory_value(self, region: Region) -> tuple[Value, int, object]:
        whole, shape = self._memory[region]
        if whole not in self._read:
            type = TensorType(whole.dtype, shape or (whole.size,))
            is_weight = self._written is not None and whole.buffer not in self._written and len(shape) > 1
            kind = LeafKind.WEIGHT if is_weight else LeafKind.VARIABLE
            value = self._read[whole] = self._builder.leaf(type, kind)
            self._leaves[value] = whole, type
        return self._read[whole], whole.start, whole.dtype

    def _kept(self, region: Region, place: Place) -> Value:
        """Return the present value of a kept region, whose shape is that of its first use."""
        if region not in self._now:
            is_all = (place.offset, place.end) == (region.start, region.end) and place.is_contiguous
            type = TensorType(region.dtype, place.ne[::-1] if is_all else (region.size,))
            value = self._now[region] = self._variables[region] = self._builder.leaf(type)
            self._leaves[value] = region, type
        return self._now[region]

    def _write_results(self) -> list[tuple[Value, tuple[Region, TensorType]]]:
        """Assign the results that lie apart from what is read, and return the others."""
        builder, copied = self._builder, []
        read: dict[int, Spans] = {}
        for one in (*{whole for whole, _ in self._memory.values()}, *self._part.kept):
            read.setdefault(one.buffer, Spans()).set(one.start, one.end, 0)
        for region, number in in_turns(self._part.results):
            value, place = self._results[number], self._part.steps[number].writes
            if (region.start, region.end) != (place.offset, place.end):
                offset, rest = divmod(region.start - place.offset, region.dtype.block_bytes)
                if rest or (region.end - place.offset) % region.dtype.block_bytes:
                    raise RefusedError("results overlap in the middle of an element")
                shape = (region.size,)
                found = builder.part(builder.flat(value), offset, shape, (1,))
                assert found is not None
                value = found
            type = builder.type(value)
            if region.buffer in read and read[region.buffer].overlapping(region.start, region.end):
                copied.append((value, (region, type)))
                continue
            variable = builder.leaf(type)
            self._leaves[variable] = region, type
            builder.node("assign", variable, value)
        return copied


def _in_blocks(place: Place) -> tuple[int, ...]:
    """The strides in blocks, slowest dimension first; those of sizes of 1 do not matter."""
    unit = place.dtype.block_bytes
    found = []
    for size, stride in zip(place.blocks, place.nb, strict=True):
        if size != 1 and stride % unit:
            raise RefusedError("strides that are no whole elements")
        found.append(stride // unit)
    return tuple(reversed(found))


def _with_whole_rows(place: Place) -> tuple[int, int]:
    """Return the bytes that a place lies in, with those between its last elements and the next row
    that is not there: a view is cut out of whole rows."""
    steps = [stride * size for stride, size in zip(place.nb, place.blocks, strict=True) if size != 1]
    more = max([place.span, *steps]) - place.span
    after = min(more, place.buffer.size - place.end)
    unit = place.dtype.block_bytes
    after -= after % unit
    before = min(more - after, place.offset)
    return place.offset - (before - before % unit), place.end + after


def _merged(part: Part) -> dict[Region, tuple[Region, tuple[int, ...]]]:
    """Return, for each region of memory that is read, the whole that it is bound as, and its shape.

    Regions of one type that overlap are one whole, which is a vector; a region that is only read
    whole has the shape of its reads.
    """
    shapes: dict[Region, set[tuple[int, ...]]] = {}
    rows: dict[Region, tuple[int, int]] = {}
    for step, sources in zip(part.steps, part.sources, strict=True):
        for place, source in zip(step.reads, sources, strict=True):
            if isinstance(source, Region) and source not in part.kept:
                assert place is not None
                shape = place.ne[::-1] if place.is_contiguous else ()
                shapes.setdefault(source, set()).add(shape)
                start, end = rows.get(source, (source.start, source.end))
                rows[source] = min(start, _with_whole_rows(place)[0]), max(end, _with_whole_rows(place)[1])
    found: dict[Region, tuple[Region, tuple[int, ...]]] = {}
    group: list[Region] = []
    group_end = 0

    def close() -> None:
        if not group:
            return
        first = group[0]
        start, end = min(rows[one][0] for one in group), max(rows[one][1] for one in group)
        whole = Region(first.buffer, start, end, first.dtype)
        forms = shapes[first] if len(group) == 1 else set()
        shape = next(iter(forms)) if len(forms) == 1 else ()
        found.update(dict.fromkeys(group, (whole, shape)))
        group.clear()

    for region in sorted(shapes, key=lambda one: (one.buffer, one.dtype.name, one.start, one.end)):
        if group:
            first = group[0]
            is_same = (region.buffer, region.dtype) == (first.buffer, first.dtype)
            is_near = region.start < group_end
            if not is_same or not is_near or (region.start - first.start) % region.dtype.block_bytes:
                close()
        group_end = max(group_end, region.end) if group else region.end
        group.append(region)
    close()
    return found
