"""Ports: how the inputs and outputs of a model, sequences too, become those of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import heliograph as hg
from heliograph.lowerings.names import Names
from heliograph.onnx.elements import (
    Array,
    Bounded,
    Coded,
    Item,
    Maps,
    decode,
    element_of,
    element_of_array,
    encode,
    name_of,
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The element type and the shape of a tensor that a run is given."""

    element: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"tensor({name_of(self.element)}) {list(self.shape)}"


#: The form of an input of a run: a tensor, a sequence of them, or nothing for an optional.
Spec: TypeAlias = "TensorSpec | tuple[Any, ...] | None"


@dataclass(frozen=True, slots=True)
class Wire:
    """A tensor that a run takes or gives under a name of the graph."""

    name: str
    spec: TensorSpec
    #: Of strings: those that the elements are places of.
    names: Array | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor that the host knew before the run."""

    array: Array


@dataclass(frozen=True, slots=True)
class Rows:
    """A table, of which a run gives a dictionary for each row."""

    wire: Wire
    labels: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor of which a run says how many elements along an axis count."""

    wire: Wire
    axis: int
    #: The name of the graph's output with the number.
    count: str


Port: TypeAlias = "Wire | Rows | Cut | Known | tuple[Any, ...] | None"


def spec_of(feed: Any, name: str) -> Spec:
    """Return the spec of what a run is given. Raises InvalidInputError."""
    if feed is None:
        return None
    if isinstance(feed, (list, tuple)):
        return tuple(spec_of(one, name) for one in feed)
    array = np.asarray(feed)
    element = element_of_array(array)
    if not element:
        raise hg.InvalidInputError(f"input {name!r:.80}: NumPy's {array.dtype} is no element type of ONNX")
    return TensorSpec(element, tuple(array.shape))


def feed_into(port: Port, feed: Any, wires: dict[str, Array]) -> None:
    """Add the arrays of what a run is given to the inputs of the graph."""
    if isinstance(port, Wire):
        wires[port.name] = encode(np.asarray(feed))
    elif isinstance(port, tuple):
        for inner, one in zip(port, feed, strict=True):
            feed_into(inner, one, wires)


def result_of(port: Port, results: Mapping[str, Array]) -> Any:
    """Return what a run gives for an output: an array, a list of them, or None."""
    if isinstance(port, Wire):
        found = results[port.name]
        return decode(found, port.spec.element) if port.names is None else port.names[found]
    if isinstance(port, Rows):
        return [dict(zip(port.labels, row, strict=True)) for row in results[port.wire.name].tolist()]
    if isinstance(port, Cut):
        kept = int(results[port.count])
        return result_of(port.wire, results)[(slice(None),) * port.axis + (slice(kept),)]
    if isinstance(port, Known):
        return port.array
    return None if port is None else [result_of(one, results) for one in port]


def input_port(spec: Spec, name: str, graph: hg.Graph, names: Names, storage: str) -> tuple[Port, Item]:
    """Add the inputs of a spec to the graph, and return its port and its item.

    `storage`: the data type of its tensors' elements or codes.
    """
    if spec is None:
        return None, None
    if isinstance(spec, tuple):
        pairs = [
            input_port(one, f"{name}.{number}", graph, names, storage) for number, one in enumerate(spec)
        ]
        return tuple(port for port, _ in pairs), [item for _, item in pairs]
    wire = Wire(names.free(name), spec)
    value = graph.input(wire.name, spec.shape, storage)
    return wire, value


def output_port(item: Item, name: str, graph: hg.Graph, names: Names) -> Port:
    """Name an item as an output of the graph, and return its port."""
    if item is None:
        return None
    if isinstance(item, list):
        return tuple(output_port(one, f"{name}.{number}", graph, names) for number, one in enumerate(item))
    if isinstance(item, np.ndarray):
        return Known(item)
    if isinstance(item, Bounded):
        whole = output_port(item.value, name, graph, names)
        assert isinstance(whole, Wire)
        count = names.free(f"{whole.name}.count")
        graph.output(count, item.count)
        return Cut(whole, item.axis, count)
    if isinstance(item, Maps):
        table = output_port(item.value, name, graph, names)
        assert isinstance(table, Wire)
        return Rows(table, item.labels)
    value = item.codes if isinstance(item, Coded) else item
    strings = item.names if isinstance(item, Coded) else None
    wire = Wire(names.free(name), TensorSpec(element_of(item), value.shape), strings)
    graph.output(wire.name, value)
    return wire


def elements_in(spec: Spec) -> Sequence[int]:
    """Return the element types of a spec's tensors."""
    if spec is None:
        return ()
    if isinstance(spec, tuple):
        return [element for one in spec for element in elements_in(one)]
    return (spec.element,)
