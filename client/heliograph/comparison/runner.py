"""One side of a comparison: a device, its plans and the values that it holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from heliograph import raw
from heliograph.comparison.units import ComparedUnit
from heliograph.device import Device
from heliograph.graph.builder import Graph
from heliograph.graph.frozen import thaw
from heliograph.plan import Plan
from heliograph.run_future import RunFuture
from heliograph.session import Session
from heliograph.tensor import Tensor
from heliograph_proto.errors import (
    ConnectionError,
    HeliographError,
    InvalidArgumentError,
    UnknownDeviceError,
    UnsupportedError,
)
from heliograph_proto.types import TensorType

T = TypeVar("T")
Array = np.ndarray[Any, Any]

#: A session, whose URL may name the device, or a session and a device of it.
SideArgument = Session | tuple[Session, Device | str]


def attempt(step: Callable[[], T]) -> T | HeliographError:
    """Return a step's result or its error. Raises ConnectionError: without a connection nothing
    goes on."""
    try:
        return step()
    except ConnectionError:
        raise
    except HeliographError as error:
        return error


class DeviceSide:
    """A device, the plans of recurring units, and the tensors of values that are still needed."""

    def __init__(self, argument: SideArgument, timeout: float | None) -> None:
        session, device = argument if isinstance(argument, tuple) else (argument, None)
        if not isinstance(session, Session):
            raise InvalidArgumentError(
                f"{argument!r:.80} is no device to compare on",
                advice="a session (hg.connect(URL#DEVICE)), or a session and the name of a device",
            )
        self.session, self.timeout = session, timeout
        self.device = _device_name(session, device)
        self._plans: dict[Hashable, Plan | HeliographError] = {}
        self._tensors: dict[int, Tensor] = {}

    @property
    def name(self) -> str:
        """The device's address."""
        return f"{self.session.address.partition('#')[0]}#{self.device}"

    def start(self, unit: ComparedUnit) -> RunFuture:
        """Start to compute a unit on held inputs. Raises the errors of compiling."""
        inputs = {f"x{place}": self._tensors[value] for place, value in enumerate(unit.inputs)}
        return self._plan(unit).submit(inputs, fetch=False, timeout=self.timeout)

    def run(self, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Tensor]:
        """Run a whole graph and return its outputs on the device."""
        plan = self.session.compile(graph, self.device, timeout=self.timeout)
        tensors = {name: self.put(inputs[name], type_) for name, type_ in plan.inputs.items()}
        return plan.run(tensors, fetch=False, timeout=self.timeout)

    def put(self, array: Array, type_: TensorType) -> Tensor:
        """Make a tensor on the device."""
        return raw.put(self.session, array, type_, self.device, self.timeout)

    def hold(self, value: int, tensor: Tensor) -> None:
        """Keep a value until it is dropped."""
        self._tensors[value] = tensor

    def holds(self, value: int) -> bool:
        return value in self._tensors

    def drop(self, value: int) -> None:
        """Free a value."""
        if (tensor := self._tensors.pop(value, None)) is not None:
            tensor.free()

    def forget(self, key: Hashable) -> None:
        """Free the plan of units that do not recur."""
        plan = self._plans.pop(key, None)
        if isinstance(plan, Plan):
            plan.free()

    def close(self) -> None:
        """Free all plans and tensors."""
        for value in list(self._tensors):
            self.drop(value)
        for key in list(self._plans):
            self.forget(key)

    def _plan(self, unit: ComparedUnit) -> Plan:
        if unit.key not in self._plans:
            self._plans[unit.key] = attempt(partial(self._compiled, thaw(unit.graph, {})))
        found = self._plans[unit.key]
        if isinstance(found, HeliographError):
            raise found
        return found

    def _compiled(self, graph: Graph) -> Plan:
        """Compile for this device alone: by default a server may use another one for unsupported
        nodes."""
        device = next(one for one in self.session.devices if one.name == self.device)
        if refusals := device.unsupported(graph, self.timeout):
            raise UnsupportedError(f"device {self.device} cannot run it: {refusals[0][1]}")
        plan = self.session.compile(graph, self.device, timeout=self.timeout)
        if plan.device != self.device:
            raise UnsupportedError(f"the server runs it on device {plan.device}")
        return plan


def _device_name(session: Session, device: Device | str | None) -> str:
    """The device's name; without one the URL's, or the server's first. Raises
    UnknownDeviceError."""
    known = [one.name for one in session.devices]
    name = device.name if isinstance(device, Device) else device
    name = name or session._shell.address.device or known[0]
    if name not in known:
        raise UnknownDeviceError(f"no device is named {name!r}", advice=f"there are: {', '.join(known)}")
    return name
