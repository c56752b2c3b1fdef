"""Rules of branches, loops, sequences and optionals, all of which are resolved on import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from onnx import ValueInfoProto, helper

import heliograph as hg
from heliograph.lowerings.arrays import cast, part
from heliograph.onnx.checks import sizes_of
from heliograph.onnx.elements import Array, Bounded, Item
from heliograph.onnx.node import Node
from heliograph.onnx.ops.shapes import pieces
from heliograph.onnx.rules import Result, rule

_T = TypeVar("_T")
#: The most turns of a loop that is unrolled, of one whose results are stacked on a server, and of
#: any other.
MOST_TURNS, MOST_STACKED, MOST_STEPS = 1024, 2**18, 10**9


@rule("If")
def _branch(node: Node) -> Result:
    """Take one branch of a constant condition; else compute both, and choose."""
    condition = node.item(0)
    if isinstance(condition, np.ndarray):
        return tuple(node.run("then_branch" if bool(condition.all()) else "else_branch", []))
    chosen = hg.reshape(node.value(0), ())
    pairs = zip(node.run("then_branch", []), node.run("else_branch", []), strict=True)
    return tuple(_either(node, chosen, yes, no) for yes, no in pairs)


def _either(node: Node, chosen: hg.Value, yes: Item, no: Item) -> Item:
    """Return one of two items of one form by what a run finds."""
    if isinstance(yes, list) and isinstance(no, list) and len(yes) == len(no):
        return [_either(node, chosen, *pair) for pair in zip(yes, no, strict=True)]
    if isinstance(yes, list) or isinstance(no, list) or yes is None or no is None:
        raise node.refuse(
            "its condition is computed by a run, and its results are sequences of other lengths"
        )
    left, right = node.level.lift(yes, node), node.level.lift(no, node)
    if left.type != right.type:
        raise node.refuse(f"its condition is computed by a run, and it gives {left.type} or {right.type}")
    return left if left is right else hg.where(chosen, left, right)


@rule("Loop")
def _loop(node: Node) -> Result:
    """Unroll a loop of few turns, some of which a run may leave out; others run on the server."""
    most = node.integer(0) if node.has(0) else None
    state = [node.items[place] for place in range(2, len(node.items))]
    scans: list[list[Item]] = [[] for _ in range(max(0, len(node.body("body").output) - 1 - len(state)))]
    are_tensors = not any(isinstance(one, list) or one is None for one in state)
    may_loop = node.level.may_loop and are_tensors
    # Without results of each turn, a condition may be all that bounds the turns.
    is_endless = may_loop and not scans and (most is None or most > MOST_STACKED)
    condition: Item = np.array(True)
    if node.has(1):
        # A run may end the loop if its turns are bounded and its state has one shape.
        is_free = are_tensors and (most is not None or is_endless)
        condition = node.item(1) if is_free else node.array(1)
    is_long = most is not None and MOST_TURNS < most <= MOST_STACKED
    if is_long and may_loop and not (isinstance(condition, np.ndarray) and not condition.all()):
        return _on_server(node, most or 0, condition, state, 0)
    turn, running, turns = 0, None, []
    while most is None or turn < most:
        if is_endless and (turn >= MOST_TURNS or not isinstance(condition, np.ndarray)):
            return _on_server(node, min(most or MOST_STEPS, MOST_STEPS) - turn, condition, state, turn)
        if not isinstance(condition, np.ndarray):
            if most is None:
                raise node.refuse("its condition is computed by a run, and its turns have no bound")
            decided = hg.reshape(node.level.lift(condition, node), ())
            running = decided if running is None else running & decided
        elif not bool(condition.all()):
            break
        if turn >= MOST_TURNS:
            raise _too_long(node)
        found = node.run("body", [np.array(turn, np.int64), condition, *state])
        condition = found[0]
        after, parts = found[1 : 1 + len(state)], found[1 + len(state) :]
        if running is not None:
            after = [_either(node, running, new, old) for new, old in zip(after, state, strict=True)]
        turns.append(running)
        state = after
        for scan, one in zip(scans, parts, strict=True):
            scan.append(one)
        turn += 1
    kinds = node.body("body").output[1 + len(state) :]
    stacked = [_stacked(node, scan, 0, kind) for scan, kind in zip(scans, kinds, strict=False)]
    if running is not None:
        flags = [one for one in turns if one is not None]
        count = hg.sum(cast(hg.stack(flags), "i64")) + (len(turns) - len(flags))
        stacked = [Bounded(node.level.lift(one, node), 0, count) for one in stacked]
    return (*state, *stacked)


def _too_long(node: Node) -> hg.UnsupportedError:
    return node.refuse(
        f"it has more than {MOST_TURNS} turns", "model.compile runs loops of the main graph on the server"
    )


def _on_server(
    node: Node, steps: int, condition: Item, state: Sequence[Item], first: int
) -> tuple[Item, ...]:
    """Run the body in a loop on the server, from its turn `first` on."""

    def body(turn: hg.Value, values: Sequence[hg.Value]) -> tuple[Item, list[Item], list[Item]]:
        found = node.run("body", [turn + first, np.array(True), *values])
        return found[0], found[1 : 1 + len(state)], found[1 + len(state) :]

    return node.level.loop(node, steps, condition, state, body)


def _stacked(node: Node, items: list[Item], axis: int, kind: ValueInfoProto | None = None) -> Item:
    """Return the results of all turns along an axis. Of no turn, `kind` tells the type."""
    if not items:
        declared = None if kind is None else sizes_of(kind)
        element = 0 if kind is None else kind.type.tensor_type.elem_type
        sizes = [one for one in declared or () if isinstance(one, int)]
        if declared is None or len(sizes) < len(declared) or not element:
            raise node.refuse("it has no turn, and its body does not declare the shapes of its results")
        sizes.insert(axis % (len(sizes) + 1), 0)
        return np.zeros(sizes, helper.tensor_dtype_to_np_dtype(element))
    if all(isinstance(one, np.ndarray) for one in items):
        arrays: list[Array] = [np.asarray(one) for one in items]
        return np.stack(arrays, axis=axis)
    return hg.stack([node.level.lift(one, node) for one in items], axis=axis)


@rule("Scan")
def _scan(node: Node) -> Result:
    """Unroll a scan over the elements along an axis of each of its inputs."""
    count = node.int("num_scan_inputs")
    if node.opset >= 9:
        values = node.values()
        return _scanned(node, values[: len(values) - count], values[len(values) - count :], batched=False)
    values = node.values(1)
    states, inputs = values[: len(values) - count], values[len(values) - count :]
    node.parts(inputs[0].shape[0])
    batches = [
        _scanned(node, [one[number] for one in states], [one[number] for one in inputs], batched=True)
        for number in range(inputs[0].shape[0])
    ]
    return tuple(_stacked(node, list(items), 0) for items in zip(*batches, strict=True))


def _scanned(
    node: Node, state: Sequence[Item], inputs: Sequence[hg.Value], *, batched: bool
) -> tuple[Item, ...]:
    names = "directions directions" if batched else "scan_input_axes scan_input_directions"
    axes = [] if batched else node.ints(names.split()[0]) or []
    ways = node.ints(names.split()[1]) or []
    axes = [node.axis(one, v.ndim) for one, v in zip(axes or [0] * len(inputs), inputs, strict=True)]
    ways = ways or [0] * len(inputs)
    turns = inputs[0].shape[axes[0]]
    out_axes = (None if batched else node.ints("scan_output_axes")) or []
    out_ways = (None if batched else node.ints("scan_output_directions")) or []
    if MOST_TURNS < turns <= MOST_STACKED and node.level.may_loop and not batched:

        def body(turn: hg.Value, values: Sequence[hg.Value]) -> tuple[Item, list[Item], list[Item]]:
            here = [node.level.lift(node.level.here(v), node) for v in inputs]
            places = [turns - 1 - turn if way else turn for way in ways]
            taken = [hg.take(v, one, axis=axis) for v, one, axis in zip(here, places, axes, strict=True)]
            found = node.run("body", [*values, *taken])
            return np.array(True), found[: len(state)], found[len(state) :]

        made = node.level.loop(node, turns, np.array(True), state, body)
        stacks = [node.level.lift(one, node) for one in made[len(state) :]]
        stacks = [hg.flip(one, axis=0) if way else one for one, way in _paired(stacks, out_ways)]
        stacks = [hg.moveaxis(one, 0, axis) for one, axis in _paired(stacks, out_axes)]
        return (*made[: len(state)], *stacks)
    if turns > MOST_TURNS:
        raise _too_long(node)
    results: list[list[Item]] = [[] for _ in range(len(node.body("body").output) - len(state))]
    for turn in range(turns):
        slices = []
        for v, axis, way in zip(inputs, axes, ways, strict=True):
            place = v.shape[axis] - 1 - turn if way else turn
            slices.append(hg.squeeze(part(v, axis, place, place + 1), axis=axis))
        found = node.run("body", [*state, *slices])
        state = found[: len(state)]
        for one, item in zip(results, found[len(state) :], strict=True):
            one.append(item)
    turned = [items[::-1] if way else items for items, way in _paired(results, out_ways)]
    return (*state, *(_stacked(node, items, axis) for items, axis in _paired(turned, out_axes)))


def _paired(items: Sequence[_T], options: Sequence[int]) -> Iterator[tuple[_T, int]]:
    """Yield items with their options, which are all given or all 0."""
    return zip(items, options or [0] * len(items), strict=True)


# Sequences


@rule("SequenceConstruct")
def _sequence_construct(node: Node) -> Result:
    return (list(node.items),)


@rule("SequenceEmpty")
def _sequence_empty(node: Node) -> Result:
    return ([],)


def _place(node: Node, place: int, length: int) -> int:
    if not -length <= place < length:
        raise node.broken(f"place {place} of a sequence of {length}")
    return place % length


@rule("SequenceAt")
def _sequence_at(node: Node) -> Result:
    items = node.sequence(0)
    return (items[_place(node, node.integer(1), len(items))],)


@rule("SequenceLength")
def _sequence_length(node: Node) -> Result:
    return np.array(len(node.sequence(0)), np.int64)


@rule("SequenceInsert")
def _sequence_insert(node: Node) -> Result:
    items = list(node.sequence(0))
    place = node.integer(2) if node.has(2) else len(items)
    items.insert(place if place >= 0 else len(items) + place, node.item(1))
    return (items,)


@rule("SequenceErase")
def _sequence_erase(node: Node) -> Result:
    items = list(node.sequence(0))
    del items[_place(node, node.integer(1) if node.has(1) else -1, len(items))]
    return (items,)


@rule("SplitToSequence")
def _split_to_sequence(node: Node) -> Result:
    x = node.value(0)
    axis = node.axis(node.int("axis", 0), x.ndim)
    whole = x.shape[axis]
    if not node.has(1):
        node.parts(whole)
        parts = pieces(x, axis, [1] * whole)
        return ([hg.squeeze(one, axis=axis) for one in parts] if not node.int("keepdims", 1) else [*parts],)
    sizes = node.integers(1)
    if node.array(1).ndim == 0:
        each = sizes[0]
        if each < 1:
            raise node.broken(f"parts of {each} elements")
        node.parts(whole // each)
        sizes = [min(each, whole - start) for start in range(0, whole, each)]
    return ([*pieces(x, axis, sizes)],)


@rule("ConcatFromSequence")
def _concat_from_sequence(node: Node) -> Result:
    values = [node.level.lift(one, node) for one in node.sequence(0)]
    join = hg.stack if node.int("new_axis", 0) else hg.concat
    return join(values, axis=node.int("axis"))


@rule("Optional")
def _optional(node: Node) -> Result:
    return (node.items[0] if node.items else None,)


@rule("OptionalHasElement")
def _optional_has_element(node: Node) -> Result:
    return np.array(node.has(0))


@rule("OptionalGetElement")
def _optional_get_element(node: Node) -> Result:
    return (node.item(0),)
