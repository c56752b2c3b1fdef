"""The arguments of `compile`, checked and turned into options for the server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from operator import index
from typing import TypeAlias, TypedDict

from heliograph._base.device import DeviceBase, DevicesArgument, buffer_type_name, device_info
from heliograph._base.pins import MemoryLimits, Pins, among, memory_limits, pinned_nodes
from heliograph._base.split_buffer_type import Splits, row_splits
from heliograph._base.tensor import TensorBase
from heliograph._base.type_advice import type_advice
from heliograph.core.shell import Shell
from heliograph.graph.builder import Graph
from heliograph_proto.devices import BufferTypeInfo
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.graph import LeafKind
from heliograph_proto.plans import PlanOptions
from heliograph_proto.types import TensorType

#: Tensors of the session for a graph's leaves, by the leaves' names.
Bindings: TypeAlias = Mapping[str, TensorBase] | None

#: Buffer types for a plan's weights, variables and values, by device. (Type checkers require exact
#: key types of a mapping.)
BufferTypes: TypeAlias = (
    Mapping[str, BufferTypeInfo | str]
    | Mapping[str, str]
    | Mapping[str, BufferTypeInfo]
    | Mapping[DeviceBase | str, BufferTypeInfo | str]
    | None
)


class UpdateOptions(TypedDict, total=False):
    """The options of `plan.update`, with the meaning that `CompileOptions` documents."""

    fusion: bool
    threads: int
    pins: Pins
    memory: MemoryLimits
    split: Splits
    buffer_types: BufferTypes


class CompileOptions(UpdateOptions, total=False):
    """The options of `session.compile`.

    A dictionary of them serves several graphs: `session.compile(graph, **options)`.

    Keys:
        fusion: False computes each node by itself; True is the default.
        threads: The most threads of the device that a run uses; 0, the default, means all.
        pins: Devices for nodes, by name patterns as in fnmatch, or by functions of a node.
        memory: The most bytes that the plan may take of a device; a string may be "2GiB".
        pipeline: The runs of a plan over several devices that may be in progress at once, each with
            its own memory: the next enters while an earlier one is in later splits. 1 is the
            default.
        split: Spreads the rows of weights over devices, where products with them run in parts: an
            `hg.SplitBufferType` by pattern of weight names.
        buffer_types: By device, the buffer type, or its name, for the plan's weights, variables,
            and values between splits.
    """

    pipeline: int


@dataclass(frozen=True, slots=True)
class PlanArguments:
    """The checked names of a compilation's arguments, with the meaning that `CompileOptions`
    has."""

    devices: DevicesArgument = None
    fusion: bool = True
    threads: int = 0
    weights: Bindings = None
    variables: Bindings = None
    pins: Pins = None
    memory: MemoryLimits = None
    split: Splits = None
    buffer_types: BufferTypes = None
    pipeline: int = 1

    @classmethod
    def of(
        cls,
        method: str,
        devices: DevicesArgument,
        weights: Bindings,
        variables: Bindings,
        options: UpdateOptions,
    ) -> PlanArguments:
        """Return the arguments of a method. Raises TypeError for an unknown option."""
        known = (CompileOptions if method == "compile" else UpdateOptions).__annotations__
        if unknown := [name for name in options if name not in known]:
            near = get_close_matches(unknown[0], known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{method}() got an unexpected keyword argument {unknown[0]!r}{hint}")
        return cls(devices, weights=weights, variables=variables, **options)


def checked_options(
    shell: Shell, graph: Graph, given: PlanArguments, devices: tuple[str, ...], bound: Collection[int] = ()
) -> PlanOptions:
    """Return the checked arguments as options.

    `devices` are the names of the plan's devices, and `bound` the leaves that are tensors. Raises
    InvalidArgumentError and UnknownDeviceError.
    """
    return PlanOptions(
        devices,
        given.fusion,
        _checked_count("threads", given.threads, 0, "a number of threads, or 0 for all"),
        pinned_nodes(shell, graph, devices, given.pins),
        memory_limits(shell, devices, given.memory),
        _checked_count("pipeline", given.pipeline, 1, "the number of runs in progress at once: 1 or more"),
        row_splits(shell, graph, devices, given.split, bound),
        _buffer_types(shell, devices, given.buffer_types),
    )


def bound_leaves(shell: Shell, graph: Graph, given: PlanArguments) -> dict[int, TensorBase]:
    """Return the tensors of the session for leaves, by the leaves' numbers.

    Every weight must be one, or have a content. Raises InvalidArgumentError and UnknownHandleError.
    """
    bound = {
        **_bound(graph, LeafKind.WEIGHT, "weights", given.weights),
        **_bound(graph, LeafKind.VARIABLE, "variables", given.variables),
    }
    if missing := [name for name, number in graph._without_content.items() if number not in bound]:
        raise InvalidArgumentError(
            f"the weight {missing[0]!r} has no content and is bound to no tensor"
            + (f"; {len(missing) - 1} more are not" if len(missing) > 1 else ""),
            advice=f"name its tensor: compile(g, weights={{{missing[0]!r}: tensor}})",
        )
    check_handles(shell, bound)
    return bound


def check_handles(shell: Shell, bound: Mapping[int, TensorBase]) -> None:
    """Raise UnknownHandleError for a tensor that was freed, or belongs to another session."""
    for tensor in bound.values():
        tensor._used_in(shell)


def _buffer_types(shell: Shell, devices: tuple[str, ...], given: BufferTypes) -> tuple[tuple[str, str], ...]:
    """Return names of buffer types by device.

    Raises InvalidArgumentError and UnknownDeviceError.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"buffer_types is {type(given).__name__}",
            advice="buffer types by device: buffer_types={'cpu0': 'NAME'}",
        )
    found: dict[str, str] = {}
    for device, buffer_type in given.items():
        name = among(shell, devices, device, "a key of buffer_types")
        if name in found:
            raise InvalidArgumentError(f"buffer_types names {name} twice")
        if not isinstance(buffer_type, BufferTypeInfo | str) or not buffer_type:
            raise InvalidArgumentError(
                f"buffer_types[{name!r}] is {buffer_type!r:.80}",
                advice="one of device.buffer_types, or its name",
            )
        found[name] = buffer_type_name(device_info(shell, name), buffer_type)
    return tuple(sorted(found.items()))


def _bound(graph: Graph, kind: LeafKind, argument: str, given: Bindings) -> dict[int, TensorBase]:
    """Return the tensors for leaves of a kind, by the leaves' numbers.

    Raises InvalidArgumentError.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"{argument} is {type(given).__name__}", advice=f"tensors by name: {argument}={{'w': tensor}}"
        )
    leaves, found = graph._leaves_of(kind), {}
    for name, tensor in given.items():
        if name not in leaves:
            raise InvalidArgumentError(
                f"the graph has no {kind.value} {name!r:.80}", advice=_near(str(name), list(leaves))
            )
        number, type_ = leaves[name]
        _check_bound(f"{argument}[{name!r}]", type_, tensor)
        found[number] = tensor
    return found


def _near(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known[:8]) or 'none'}"


def _check_bound(what: str, type_: TensorType, tensor: TensorBase) -> None:
    if not isinstance(tensor, TensorBase):
        raise InvalidArgumentError(
            f"{what} is {type(tensor).__name__}", advice="a tensor of the session: session.put(array)"
        )
    if tensor.type != type_:
        raise InvalidArgumentError(
            f"{what} is {tensor.type}; the graph says {type_}", advice=type_advice(type_, tensor.type)
        )
    if not tensor.is_contiguous:
        raise InvalidArgumentError(f"{what} is a view with gaps", advice="copy it: tensor.copy_to(another)")


def _checked_count(name: str, value: int, least: int, advice: str) -> int:
    """Return a number from `least` on. Raises InvalidArgumentError."""
    if not hasattr(value, "__index__") or not least <= index(value) < 2**32:
        raise InvalidArgumentError(f"{name} is {value!r:.80}", advice=advice)
    return index(value)
