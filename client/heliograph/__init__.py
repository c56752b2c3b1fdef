"""Heliograph: build a compute graph here and run it on another machine's devices.

    import heliograph as hg, numpy as np

    with hg.connect("grpc://127.0.0.1:7070") as session:
        g = hg.Graph()
        x = g.input("x", (4, 3), "f32")
        w = g.weight("w", np.ones((3, 2), np.float32))
        g.output("y", hg.softmax(x @ w + 1.0, axis=-1))
        plan = session.compile(g)
        y = plan.run(x=np.zeros((4, 3), np.float32))["y"]

    Graphs      Graph, Value, assign, save, load, quantize, dequantize
    Functions   the array API's names and rules; `hg.ops.NAME` is the raw op of the op table
    Sessions    connect, Session, Tensor, Buffer, aligned_empty
    Plans       Plan, RunFuture, Tap, Checkpoint, Reservation, CompileOptions, copy_plan,
                SplitBufferType
    Devices     Device, Stream, Event, DeviceEvent
    Errors      every one is an HeliographError; the tree is in `heliograph.errors`
    Tools       compare, tune_allocator, and `plan.explain()`

`hg.aio` has the same names for asyncio.
"""

# ruff: noqa: F403 - each module of functions lists its own

import importlib
from typing import TYPE_CHECKING

from heliograph import _bootstrap as _bootstrap
from heliograph import errors
from heliograph.errors import *
from heliograph.functions import (
    bits,
    creation,
    data_types,
    elementary,
    elementwise,
    linear,
    manipulation,
    neural,
    reductions,
    sorting,
)
from heliograph.functions.bits import *
from heliograph.functions.creation import *
from heliograph.functions.data_types import *
from heliograph.functions.elementary import *
from heliograph.functions.elementwise import *
from heliograph.functions.linear import *
from heliograph.functions.manipulation import *
from heliograph.functions.neural import *
from heliograph.functions.reductions import *
from heliograph.functions.sorting import *
from heliograph.graph.builder import Graph, assign
from heliograph.graph.names import hint
from heliograph.graph.server_weights import ServerWeight
from heliograph.graph.value import Value
from heliograph.ops import ops
from heliograph.procedures.server_weights import ServerWeights
from heliograph_proto import __version__
from heliograph_proto.types import DType, TensorType

if TYPE_CHECKING:
    from heliograph import aio as aio
    from heliograph._base.buffer import aligned_empty
    from heliograph._base.placement import CompileOptions
    from heliograph._base.reservation import Reservation
    from heliograph._base.split_buffer_type import SplitBufferType
    from heliograph.comparison.compare import compare
    from heliograph.comparison.report import ComparedNode, Comparison, Verdict
    from heliograph.connection import connect
    from heliograph.core.watching import DeviceEvent
    from heliograph.device import Device, Event, Stream
    from heliograph.explain.explanation import Explanation
    from heliograph.graph.files import load, save
    from heliograph.plan import Plan
    from heliograph.procedures.checkpoint import Checkpoint, load_checkpoint
    from heliograph.procedures.rebuild import Rebuild
    from heliograph.procedures.taps import Tap
    from heliograph.run_future import RunFuture
    from heliograph.session import Session, copy_plan
    from heliograph.tensor import Buffer, Tensor, WriteFuture
    from heliograph.transport.allocator import tune_allocator
    from heliograph_proto.devices import (
        CopyPath,
        DeviceType,
        Link,
        MemberInfo,
        MemberState,
        OpAnswer,
        OpPath,
        OpQuery,
        Usage,
    )
    from heliograph_proto.plans import Cause, PlanEstimate, SplitEstimate
    from heliograph_proto.quantization.blocks import dequantize, quantize
    from heliograph_proto.sessions import LogLine

#: Names that are imported on first use, by their modules. Code that only builds graphs or reads the
#: op table does not pay for the transport, nor asyncio code for the blocking API.
_LAZY = {
    "heliograph._base.buffer": "aligned_empty",
    "heliograph._base.reservation": "Reservation",
    "heliograph._base.placement": "CompileOptions",
    "heliograph._base.split_buffer_type": "SplitBufferType",
    "heliograph.comparison.compare": "compare",
    "heliograph.comparison.report": "ComparedNode Comparison Verdict",
    "heliograph.connection": "connect",
    "heliograph.core.watching": "DeviceEvent",
    "heliograph.device": "Device Event Stream",
    "heliograph.explain.explanation": "Explanation",
    "heliograph.graph.files": "load save",
    "heliograph.plan": "Plan",
    "heliograph.procedures.checkpoint": "Checkpoint load_checkpoint",
    "heliograph.procedures.rebuild": "Rebuild",
    "heliograph.procedures.taps": "Tap",
    "heliograph.run_future": "RunFuture",
    "heliograph.session": "Session copy_plan",
    "heliograph.tensor": "Buffer Tensor WriteFuture",
    "heliograph.transport.allocator": "tune_allocator",
    "heliograph_proto.devices": (
        "CopyPath DeviceType Link MemberInfo MemberState OpAnswer OpPath OpQuery Usage"
    ),
    "heliograph_proto.plans": "Cause PlanEstimate SplitEstimate",
    "heliograph_proto.quantization.blocks": "dequantize quantize",
    "heliograph_proto.sessions": "LogLine",
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names.split()}

__all__ = ["__version__", "aio", "errors", "ops"]
# Graphs
__all__ += ["DType", "Graph", "ServerWeight", "ServerWeights", "TensorType", "Value", "assign"]
__all__ += ["dequantize", "load", "quantize", "save"]
# Sessions
__all__ += [
    "Buffer",
    "LogLine",
    "MemberInfo",
    "MemberState",
    "Session",
    "Tensor",
    "Usage",
    "Link",
    "WriteFuture",
]
__all__ += ["CopyPath", "aligned_empty", "connect"]
# Plans
__all__ += [
    "Cause",
    "Checkpoint",
    "Explanation",
    "Plan",
    "PlanEstimate",
    "SplitEstimate",
    "Rebuild",
    "Reservation",
    "RunFuture",
]
__all__ += ["CompileOptions", "SplitBufferType", "Tap", "copy_plan", "load_checkpoint"]
# Devices
__all__ += ["Device", "DeviceEvent", "DeviceType", "Event", "OpAnswer", "OpQuery", "OpPath", "Stream"]
# Tools
__all__ += ["ComparedNode", "Comparison", "Verdict", "compare", "tune_allocator"]
# Errors and functions
__all__ += errors.__all__
__all__ += creation.__all__
__all__ += data_types.__all__
__all__ += elementwise.__all__
__all__ += elementary.__all__
__all__ += bits.__all__
__all__ += linear.__all__
__all__ += manipulation.__all__
__all__ += reductions.__all__
__all__ += sorting.__all__
__all__ += neural.__all__


def __getattr__(name: str) -> object:
    """Import a lazy name. Other names raise an AttributeError that suggests a near one."""
    if name == "aio":
        return importlib.import_module("heliograph.aio")
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = found
        return found
    # With `obj=None` Python does not append a suggestion of its own.
    raise AttributeError(f"module 'heliograph' has no attribute {name!r}{hint(name)}", name=name, obj=None)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
