"""One node of an ONNX graph as its rule sees it: inputs, attributes, and what it may build."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

import heliograph as hg
from heliograph.onnx import errors
from heliograph.onnx.elements import DIRECT, NARROW, Array, Bounded, Coded, Item, Maps, name_of
from heliograph.onnx.errors import NeedsValue

#: The most elements of an array that a rule makes on the host.
MOST_HOST_ELEMENTS = 2**24
#: The most parts that a rule makes of one tensor, or terms that it adds up.
MOST_PARTS = 4096


class Level(Protocol):
    """The level of the graph that a node is in."""

    @property
    def graph(self) -> hg.Graph: ...

    def opset(self, domain: str) -> int: ...

    def lift(self, item: Item, node: Node, name: str = "") -> hg.Value: ...

    def origin(self, name: str) -> frozenset[str]: ...

    def tensor(self, tensor: TensorProto) -> Array: ...

    def subgraph(self, graph: GraphProto, inputs: Sequence[Item], node: Node) -> list[Item]: ...

    def random(self, seed: int | None) -> tuple[hg.Value, hg.Value]: ...

    @property
    def may_loop(self) -> bool: ...

    def here(self, item: Item) -> Item: ...

    def loop(
        self, node: Node, steps: int, condition: Item, state: Sequence[Item], body: Body
    ) -> tuple[Item, ...]: ...


#: A loop's body: by the number of the turn and the state, whether it goes on, the state after the
#: turn, and the results that are stacked.
Body: TypeAlias = Callable[[hg.Value, Sequence[hg.Value]], tuple[Item, list[Item], list[Item]]]


class Node:
    """A node with its inputs. Accessors raise InvalidModelError where the node breaks ONNX's rules,
    UnsupportedError where a value has no type here, and NeedsValue where constants are needed."""

    def __init__(self, proto: NodeProto, items: Sequence[Item], level: Level) -> None:
        self.proto = proto
        self.items = items
        self.level = level
        self._attributes = {one.name: one for one in proto.attribute}

    @property
    def op(self) -> str:
        return self.proto.op_type

    @property
    def opset(self) -> int:
        """The version of the node's domain."""
        return self.level.opset(self.proto.domain)

    @property
    def outputs(self) -> int:
        """The number of outputs that the node names."""
        return len(self.proto.output)

    @property
    def graph(self) -> hg.Graph:
        return self.level.graph

    def wants(self, output: int) -> bool:
        """True if the node names this output."""
        return output < self.outputs and self.proto.output[output] != ""

    # Errors

    def refuse(self, why: str, advice: str = "") -> hg.UnsupportedError:
        """Return the error for what cannot be expressed; the rule raises it."""
        return errors.refusal(self.proto, why, advice)

    def broken(self, why: str) -> hg.InvalidModelError:
        """Return the error for a broken model; the rule raises it."""
        return errors.broken(self.proto, why)

    def needs(self, place: int) -> NeedsValue:
        """Return the demand for the elements of an input; the rule raises it."""
        name = self.proto.input[place]
        return NeedsValue(errors.label(self.proto), name, self.level.origin(name))

    # Inputs

    def has(self, place: int) -> bool:
        """True if this input is given."""
        return place < len(self.items) and self.items[place] is not None

    def item(self, place: int) -> Item:
        """Return an input as it is."""
        if not self.has(place):
            raise self.broken(f"input {place} is missing")
        return self.items[place]

    def value(self, place: int) -> hg.Value:
        """Return an input as a value; constants are added to the graph."""
        return self.level.lift(self.item(place), self, self.proto.input[place])

    def optional(self, place: int) -> hg.Value | None:
        """Return an input as a value, or None if it is not given."""
        return self.value(place) if self.has(place) else None

    def values(self, start: int = 0) -> list[hg.Value]:
        """Return all inputs from a place on as values."""
        return [self.value(place) for place in range(start, len(self.items))]

    def array(self, place: int) -> Array:
        """Return the elements of an input, which must be constant."""
        item = self.item(place)
        if isinstance(item, (hg.Value, Coded)):
            raise self.needs(place)
        if not isinstance(item, np.ndarray):
            raise self.broken(f"input {place} is a sequence, not a tensor")
        return item

    def integers(self, place: int) -> list[int]:
        """Return the elements of a constant input as ints."""
        return [int(one) for one in np.ravel(self.array(place))]

    def integer(self, place: int) -> int:
        """Return the only element of a constant input."""
        found = self.integers(place)
        if len(found) != 1:
            raise self.broken(f"input {place} has {len(found)} elements, not one")
        return found[0]

    def sequence(self, place: int) -> list[Item]:
        """Return an input that is a sequence."""
        item = self.item(place)
        if not isinstance(item, list):
            raise self.broken(f"input {place} is no sequence")
        return item

    def shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of an input."""
        item = self.item(place)
        if isinstance(item, Coded):
            return item.codes.shape
        if isinstance(item, list) or item is None:
            raise self.broken(f"input {place} is a sequence, not a tensor")
        if isinstance(item, (Bounded, Maps)):
            item = item.value
        return tuple(item.shape)

    def axis(self, place: int, ndim: int) -> int:
        """Return an axis counted from the front."""
        if not -max(ndim, 1) <= place < max(ndim, 1):
            raise self.broken(f"axis {place} of {ndim} dimensions")
        return place % max(ndim, 1)

    # Attributes

    def _attribute(self, name: str, kind: int) -> AttributeProto | None:
        found = self._attributes.get(name)
        if found is None:
            return None
        if found.type != kind:
            wanted = AttributeProto.AttributeType.Name(kind)
            raise self.broken(f"attribute {name!r} is of another type than {wanted}")
        return found

    def given(self, name: str) -> bool:
        """True if the node has this attribute."""
        return name in self._attributes

    def int(self, name: str, default: int | None = None) -> int:
        """Return an attribute; without a default it is required."""
        found = self._attribute(name, AttributeProto.INT)
        if found is not None:
            return int(found.i)
        if default is None:
            raise self.broken(f"attribute {name!r} is missing")
        return default

    def float(self, name: str, default: float) -> float:
        """Return an attribute."""
        found = self._attribute(name, AttributeProto.FLOAT)
        return default if found is None else float(found.f)

    def string(self, name: str, default: str) -> str:
        """Return an attribute."""
        found = self._attribute(name, AttributeProto.STRING)
        return default if found is None else found.s.decode("utf-8", "replace")

    def ints(self, name: str) -> list[Any] | None:
        """Return an attribute, or None."""
        found = self._attribute(name, AttributeProto.INTS)
        return None if found is None else [int(one) for one in found.ints]

    def floats(self, name: str) -> list[Any] | None:
        """Return an attribute, or None."""
        found = self._attribute(name, AttributeProto.FLOATS)
        return None if found is None else [float(one) for one in found.floats]

    def strings(self, name: str) -> list[str] | None:
        """Return an attribute, or None."""
        found = self._attribute(name, AttributeProto.STRINGS)
        return None if found is None else [one.decode("utf-8", "replace") for one in found.strings]

    def body(self, name: str) -> GraphProto:
        """Return a subgraph."""
        found = self._attribute(name, AttributeProto.GRAPH)
        if found is None:
            raise self.broken(f"attribute {name!r} is missing")
        return found.g

    def attribute(self, name: str) -> Any:
        """Return an attribute of any type, or None."""
        found = self._attributes.get(name)
        return None if found is None else helper.get_attribute_value(found)

    # Types and sizes

    def dtype(self, element: builtins.int) -> str:
        """Return the data type of an element type. Raises UnsupportedError if there is none."""
        if element not in DIRECT:
            what = NARROW[element].name if element in NARROW else name_of(element)
            raise self.refuse(f"there is no data type for {what}")
        return DIRECT[element]

    def room(self, *sizes: Any) -> None:
        """Check that an array of this shape may be made on the host."""
        if math.prod(sizes) > MOST_HOST_ELEMENTS:
            raise self.refuse(f"it needs an array of {sizes} on the host, which is too large")

    def parts(self, count: Any) -> None:
        """Check that a rule may make so many nodes or more."""
        if count > MOST_PARTS:
            raise self.refuse(f"it makes {count} parts or terms; {MOST_PARTS} are the most")

    def run(self, name: str, inputs: Sequence[Item]) -> list[Item]:
        """Import the subgraph of an attribute with these inputs, and return its outputs."""
        return self.level.subgraph(self.body(name), inputs, self)
