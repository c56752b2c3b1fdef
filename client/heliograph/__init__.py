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
    Plans       Plan, RunFuture, FeedFuture, Tap, Checkpoint, Reservation, CompileOptions,
                SplitBufferType, copy_plan
    Devices     Device, Stream, Event, DeviceEvent
    Errors      every one is an HeliographError; the tree is in `heliograph.errors`
    Tools       compare, track, tune_allocator, and `plan.explain()`

    Training    grad, value_and_grad, stop_gradient, and optimizers in `hg.optim`

`hg.aio` has the same names for asyncio; `hg.onnx` reads ONNX models, `hg.torch` PyTorch modules,
`hg.llm` language models, and `hg.random` makes random numbers.
"""

# ruff: noqa: F403 - each module of functions lists its own

import importlib
from typing import TYPE_CHECKING

from heliograph import _bootstrap as _bootstrap
from heliograph_proto import __version__

if TYPE_CHECKING:
    from heliograph import aio as aio
    from heliograph import errors as errors
    from heliograph import llm as llm
    from heliograph import onnx as onnx
    from heliograph import optim as optim
    from heliograph import random as random
    from heliograph import torch as torch
    from heliograph._base.buffer import aligned_empty
    from heliograph._base.placement import CompileOptions
    from heliograph._base.reservation import Reservation
    from heliograph._base.split_buffer_type import SplitBufferType
    from heliograph.autodiff.reverse import grad, stop_gradient, value_and_grad
    from heliograph.comparison.compare import compare
    from heliograph.comparison.report import ComparedNode, Comparison, Verdict
    from heliograph.connection import connect
    from heliograph.core.connection_state import ConnectionState
    from heliograph.core.watching import DeviceEvent
    from heliograph.device import Device, Event, Stream
    from heliograph.errors import *
    from heliograph.explain.compared import ComparedPlans, PlanAspect, PlanDifference, PlannedNode
    from heliograph.explain.explanation import Explanation
    from heliograph.explain.steps import ExplainedStep
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
        slices,
        sorting,
        summation,
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
    from heliograph.functions.slices import *
    from heliograph.functions.sorting import *
    from heliograph.functions.summation import *
    from heliograph.graph.builder import Graph, assign
    from heliograph.graph.files.graph_files import load, save
    from heliograph.graph.server_weights import ServerWeight
    from heliograph.graph.value import Value
    from heliograph.op_functions import ops
    from heliograph.plan import Plan
    from heliograph.procedures.checkpoint import Checkpoint, load_checkpoint
    from heliograph.procedures.rebuild import Rebuild
    from heliograph.procedures.server_weights import ServerWeights
    from heliograph.procedures.taps import Tap
    from heliograph.run_future import FeedFuture, RunFuture
    from heliograph.session import Session, copy_plan
    from heliograph.tensor import Buffer, Tensor, WriteFuture
    from heliograph.tracking import track
    from heliograph.transport.allocator import tune_allocator
    from heliograph.windows.convolutions import avg_pool, conv, max_pool
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
    from heliograph_proto.gguf import GgufHeader
    from heliograph_proto.models import GgufSummary, ModelFile
    from heliograph_proto.plans import Cause, PlanEstimate, SplitEstimate
    from heliograph_proto.quantization.blocks import dequantize, quantize
    from heliograph_proto.sessions import LogLine, SessionMove, SessionSnapshot
    from heliograph_proto.types import DType, TensorType

#: The modules of the names, which are imported on first use: a program pays for what it uses, and
#: the command line for nothing else. `test_every_lazy_name_is_in_its_module` compares.
_LAZY = {
    "heliograph._base.buffer": "aligned_empty",
    "heliograph._base.reservation": "Reservation",
    "heliograph._base.placement": "CompileOptions",
    "heliograph._base.split_buffer_type": "SplitBufferType",
    "heliograph.autodiff.reverse": "grad stop_gradient value_and_grad",
    "heliograph.comparison.compare": "compare",
    "heliograph.comparison.report": "ComparedNode Comparison Verdict",
    "heliograph.connection": "connect",
    "heliograph.core.connection_state": "ConnectionState",
    "heliograph.core.watching": "DeviceEvent",
    "heliograph.device": "Device Event Stream",
    "heliograph.explain.compared": "ComparedPlans PlanAspect PlanDifference PlannedNode",
    "heliograph.explain.explanation": "Explanation",
    "heliograph.explain.steps": "ExplainedStep",
    "heliograph.graph.files.graph_files": "load save",
    "heliograph.plan": "Plan",
    "heliograph.procedures.checkpoint": "Checkpoint load_checkpoint",
    "heliograph.procedures.rebuild": "Rebuild",
    "heliograph.procedures.taps": "Tap",
    "heliograph.run_future": "FeedFuture RunFuture",
    "heliograph.session": "Session copy_plan",
    "heliograph.tensor": "Buffer Tensor WriteFuture",
    "heliograph.tracking": "track",
    "heliograph.transport.allocator": "tune_allocator",
    "heliograph_proto.devices": (
        "CopyPath DeviceType Link MemberInfo MemberState OpAnswer OpPath OpQuery Usage"
    ),
    "heliograph_proto.gguf": "GgufHeader",
    "heliograph_proto.models": "GgufSummary ModelFile",
    "heliograph_proto.plans": "Cause PlanEstimate SplitEstimate",
    "heliograph_proto.quantization.blocks": "dequantize quantize",
    "heliograph_proto.sessions": "LogLine SessionMove SessionSnapshot",
    "heliograph.graph.builder": "Graph assign",
    "heliograph.graph.server_weights": "ServerWeight",
    "heliograph.graph.value": "Value",
    "heliograph.op_functions": "ops",
    "heliograph.procedures.server_weights": "ServerWeights",
    "heliograph_proto.types": "DType TensorType",
    "heliograph.errors": (
        "CancelledError ComputeFailedError ConfigurationError ConnectionError "
        "ContentMismatchError DeadlineExceededError DeviceLostError DrainingError HandleError "
        "HandleExistsError HeliographError InternalError InvalidArgumentError "
        "InvalidGraphError InvalidInputError InvalidModelError LimitExceededError "
        "LoopEndedError MemberLostError MissingContentError MovedError NotHeliographError "
        "NotReplayableError Origin OutOfMemoryError OutOfRangeError PermissionDeniedError ProtocolError "
        "Reason ResourceError SessionClosedError SnapshotFailedError UnauthenticatedError UnavailableError "
        "UnknownDeviceError UnknownHandleError UnknownOpError UnsupportedError VersionMismatchError WorkError"
    ),
    "heliograph.functions.bits": (
        "bitwise_and bitwise_invert bitwise_left_shift bitwise_or bitwise_right_shift "
        "bitwise_xor copysign nextafter signbit"
    ),
    "heliograph.functions.creation": (
        "arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid "
        "ones ones_like tril triu zeros zeros_like"
    ),
    "heliograph.functions.data_types": "astype can_cast finfo iinfo isdtype result_type",
    "heliograph.functions.elementary": (
        "acos acosh asin asinh atan atan2 atanh cos cosh erf exp expm1 hypot log log10 log1p "
        "log2 logaddexp rsqrt sin sinh sqrt tan tanh"
    ),
    "heliograph.functions.elementwise": (
        "abs add ceil clip conj divide equal floor floor_divide greater greater_equal "
        "isfinite isinf isnan less less_equal logical_and logical_not logical_or logical_xor "
        "maximum minimum multiply negative not_equal positive pow real reciprocal remainder "
        "round sign square subtract trunc where"
    ),
    "heliograph.functions.linear": "matmul tensordot vecdot",
    "heliograph.functions.manipulation": (
        "broadcast_arrays broadcast_to concat expand_dims flatten flip matrix_transpose "
        "moveaxis permute_dims repeat reshape roll split squeeze stack take take_masked tile unstack"
    ),
    "heliograph.functions.neural": (
        "gelu l2_normalize layer_norm log_softmax relu rms_norm scaled_dot_product_attention "
        "sigmoid silu softmax softplus"
    ),
    "heliograph.functions.reductions": (
        "all any argmax argmin count_nonzero diff max mean min prod std sum var"
    ),
    "heliograph.functions.summation": "einsum",
    "heliograph.windows.convolutions": "avg_pool conv max_pool",
    "heliograph.functions.slices": "dynamic_slice dynamic_update_slice",
    "heliograph.functions.sorting": (
        "argsort cumulative_prod cumulative_sum searchsorted sort take_along_axis"
    ),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names.split()}

__all__ = ["__version__", "aio", "errors", "llm", "onnx", "ops", "optim", "random", "torch"]
# Graphs
__all__ += ["DType", "Graph", "ServerWeight", "ServerWeights", "TensorType", "Value", "assign"]
__all__ += ["GgufHeader", "GgufSummary", "ModelFile"]
__all__ += ["dequantize", "load", "quantize", "save"]
__all__ += ["grad", "stop_gradient", "value_and_grad"]
__all__ += ["avg_pool", "conv", "max_pool"]
# Sessions
__all__ += [
    "Buffer",
    "LogLine",
    "SessionMove",
    "SessionSnapshot",
    "MemberInfo",
    "MemberState",
    "Session",
    "Tensor",
    "Usage",
    "Link",
    "WriteFuture",
]
__all__ += ["ConnectionState", "CopyPath", "aligned_empty", "connect"]
# Plans
__all__ += [
    "Cause",
    "Checkpoint",
    "ExplainedStep",
    "Explanation",
    "FeedFuture",
    "Plan",
    "PlanEstimate",
    "SplitEstimate",
    "Rebuild",
    "Reservation",
    "RunFuture",
]
__all__ += ["ComparedPlans", "PlanAspect", "PlanDifference", "PlannedNode"]
__all__ += ["CompileOptions", "SplitBufferType", "Tap", "copy_plan", "load_checkpoint"]
# Devices
__all__ += ["Device", "DeviceEvent", "DeviceType", "Event", "OpAnswer", "OpQuery", "OpPath", "Stream"]
# Tools
__all__ += ["ComparedNode", "Comparison", "Verdict", "compare", "track", "tune_allocator"]
# Errors and functions
if TYPE_CHECKING:
    __all__ += errors.__all__
    __all__ += creation.__all__
    __all__ += data_types.__all__
    __all__ += elementwise.__all__
    __all__ += elementary.__all__
    __all__ += bits.__all__
    __all__ += linear.__all__
    __all__ += manipulation.__all__
    __all__ += reductions.__all__
    __all__ += slices.__all__
    __all__ += sorting.__all__
    __all__ += summation.__all__
    __all__ += neural.__all__
else:
    for _module in _LAZY:
        if _module.startswith(("heliograph.errors", "heliograph.functions.")):
            __all__ += _LAZY[_module].split()


def __getattr__(name: str) -> object:
    """Import a lazy name. Other names raise an AttributeError that suggests a near one."""
    if name in ("aio", "errors", "llm", "onnx", "optim", "random", "torch"):
        return importlib.import_module(f"heliograph.{name}")
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = found
        return found
    from heliograph.graph.names import hint

    # With `obj=None` Python does not append a suggestion of its own.
    raise AttributeError(f"module 'heliograph' has no attribute {name!r}{hint(name)}", name=name, obj=None)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
