"""Runs of a plan with one small message each way: the parts that are the same each time.

The general path (`procedures/run.py`) checks every argument and explains mistakes. Everything that
a plan's runs have in common is computed once, here. Such a run then only checks each array's type
and copies its bytes. Any other arguments give None and take the general path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph.core.future import Pending
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun, RunForm
from heliograph_proto.commands import Bytes
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph.procedures.run import PlanSpec

#: The most bytes of inputs or outputs for such a run; beyond that, copying dominates its time.
MOST_BYTES = 2**18


class InlinePlan:
    """The runs of one plan with arrays as inputs that fetch all outputs."""

    __slots__ = ("_form", "_inputs", "_outputs", "_timed", "_traced", "size_bytes", "spec")

    def __init__(self, spec: PlanSpec) -> None:
        self.spec = spec
        info = spec.info
        sizes = [(place, port.type.nbytes) for place, port in enumerate(info.inputs)]
        self._form = RunForm(spec.handle, sizes, range(len(info.outputs)))
        #: The form of the last run with a time limit.
        self._timed = self._form
        #: The form of the last traced run.
        self._traced: RunForm | None = None
        self._inputs = [(port.name, *_layout(port.type)) for port in info.inputs]
        self._outputs = [(port.name, *_layout(port.type)) for port in info.outputs]
        #: The bytes of the inputs of one run.
        self.size_bytes = sum(size for _, size in sizes)

    def __repr__(self) -> str:
        return f"<InlinePlan {self.spec.signature}>"

    def run(self, given: Mapping[str, Any], timeout_ms: int = 0) -> InlineRun | None:
        """Return a run with these inputs; None unless each is an array of exactly its type."""
        if len(given) != len(self._inputs):
            return None
        data = []
        for name, dtype, shape in self._inputs:
            array = given.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                return None
            data.append(array.tobytes())
        if not timeout_ms:
            return InlineRun(self._form, data)
        form = self._timed
        if form.timeout_ms != timeout_ms:
            form = self._timed = RunForm(form.plan, form.inputs, form.outputs, timeout_ms)
        return InlineRun(form, data)

    def run_of(self, inputs: Sequence[bytes]) -> InlineRun | None:
        """Return a run with the bytes of all inputs, in order; None if a size is wrong."""
        sizes = [size for _, size in self._form.inputs]
        return InlineRun(self._form, inputs) if [len(one) for one in inputs] == sizes else None

    def traced(self, run: InlineRun, trace_parent: str) -> InlineRun:
        """Return the same run as part of a span."""
        known, form = run.form, self._traced
        if form is None or form.timeout_ms != known.timeout_ms:
            rest = known.inputs, known.outputs, known.timeout_ms
            form = self._traced = RunForm(known.plan, *rest, is_traced=True)
        return InlineRun(form, run.inputs, trace_parent=trace_parent)

    def data(self, pending: Pending) -> Sequence[Bytes]:
        """Return the bytes of the outputs of a successful run, in the plan's order."""
        completion = pending.completion
        if isinstance(completion, InlineResult):
            return completion.data_of_outputs
        return [data for _, data in completion.outputs] if completion is not None else ()

    def arrays(self, pending: Pending) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of the outputs of a successful run."""
        return {
            name: np.frombuffer(data, dtype).reshape(shape).copy()
            for (name, dtype, shape), data in zip(self._outputs, self.data(pending), strict=True)
        }


def inline_plan(spec: PlanSpec, limits: Limits) -> InlinePlan | None:
    """Return None for a plan whose inputs or outputs are too large, empty, or absent."""
    inputs, outputs = (
        [port.type.nbytes for port in ports] for ports in (spec.info.inputs, spec.info.outputs)
    )
    most = min(MOST_BYTES, limits.inline_bytes, limits.message_bytes // 4)
    if not outputs or not all((*inputs, *outputs)) or max(sum(inputs), sum(outputs)) > most:
        return None
    return InlinePlan(spec)


def _layout(type_: TensorType) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the type and shape of the client's arrays of it."""
    if type_.dtype.kind == "quantized":
        return np.dtype(np.uint8), type_.storage_shape
    return type_.dtype.numpy, type_.shape
