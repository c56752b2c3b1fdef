"""Heliograph: builds a compute graph here and runs it on another machine's devices.

    import heliograph as hg, numpy as np

    with hg.connect("grpc://127.0.0.1:7070") as session:
        g = hg.Graph()
        x = g.input("x", (4, 3), "f32")
        w = g.weight("w", np.ones((3, 2), np.float32))
        g.output("y", hg.softmax(x @ w + 1.0, axis=-1))
        plan = session.compile(g)
        y = plan.run(x=np.zeros((4, 3), np.float32))["y"]

`hg.aio` has the same names for asyncio. Functions have the array API's names and rules; `hg.ops.NAME` is
the raw op of the op table. Every error is an `hg.HeliographError`; the tree is in `heliograph.errors`.
"""

import importlib
from typing import TYPE_CHECKING

from heliograph import _early as _early
from heliograph import errors
from heliograph._models import ServerWeight, ServerWeights
from heliograph._names import hint
from heliograph.builder import Graph, assign
from heliograph.errors import (
    CancelledError,
    ComputeFailedError,
    ConfigurationError,
    ConnectionError,
    ContentMismatchError,
    DeadlineExceededError,
    DeviceLostError,
    DrainingError,
    HandleError,
    HandleExistsError,
    HeliographError,
    InternalError,
    InvalidArgumentError,
    InvalidGraphError,
    InvalidInputError,
    InvalidModelError,
    LimitExceededError,
    MemberLostError,
    MissingContentError,
    NotHeliographError,
    Origin,
    OutOfMemoryError,
    OutOfRangeError,
    PermissionDeniedError,
    ProtocolError,
    Reason,
    ResourceError,
    SessionClosedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownDeviceError,
    UnknownHandleError,
    UnknownOpError,
    UnsupportedError,
    VersionMismatchError,
    WorkError,
)
from heliograph.functions.creation import (
    arange,
    full,
    full_like,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from heliograph.functions.elementwise import (
    abs,
    add,
    astype,
    ceil,
    clip,
    cos,
    cosh,
    divide,
    equal,
    erf,
    exp,
    expm1,
    floor,
    floor_divide,
    gelu,
    greater,
    greater_equal,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    log,
    log1p,
    log2,
    log10,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    positive,
    pow,
    reciprocal,
    relu,
    remainder,
    round,
    rsqrt,
    sigmoid,
    sign,
    silu,
    sin,
    sinh,
    softplus,
    sqrt,
    square,
    subtract,
    tan,
    tanh,
    trunc,
    where,
)
from heliograph.functions.linear import (
    matmul,
    tensordot,
    vecdot,
)
from heliograph.functions.manipulation import (
    broadcast_arrays,
    broadcast_to,
    concat,
    expand_dims,
    flatten,
    flip,
    matrix_transpose,
    moveaxis,
    permute_dims,
    repeat,
    reshape,
    roll,
    split,
    squeeze,
    stack,
    take,
    tile,
    unstack,
)
from heliograph.functions.neural import (
    l2_normalize,
    layer_norm,
    log_softmax,
    rms_norm,
    scaled_dot_product_attention,
    softmax,
)
from heliograph.functions.reductions import (
    all,
    any,
    argmax,
    argmin,
    count_nonzero,
    diff,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from heliograph.functions.sorting import (
    argsort,
    cumulative_sum,
    sort,
    take_along_axis,
)
from heliograph.raw_ops import ops
from heliograph.value import Value
from heliograph_proto import __version__
from heliograph_proto.types import DType, TensorType

if TYPE_CHECKING:
    from heliograph import aio as aio
    from heliograph._allocator import tune_allocator
    from heliograph._comparison import ComparedNode, Comparison, Verdict
    from heliograph._rebuilding import Rebuild
    from heliograph._reserving import Reservation
    from heliograph._split_buffer_type import SplitBufferType
    from heliograph._watching import DeviceEvent
    from heliograph.buffer import Buffer, aligned_empty
    from heliograph.checkpoints import Checkpoint, load_checkpoint
    from heliograph.comparing import compare
    from heliograph.copying import copy_plan
    from heliograph.explaining import Explanation
    from heliograph.files import load, save
    from heliograph.plan import Plan, RunFuture
    from heliograph.session import Session, connect
    from heliograph.stream import Device, Event, Stream
    from heliograph.tensor import Tensor, WriteFuture
    from heliograph_proto.description import (
        Cause,
        CopyRoad,
        DeviceType,
        OpAnswer,
        OpQuery,
        OpRoad,
        PlanEstimate,
        Usage,
    )
    from heliograph_proto.log_lines import LogLine
    from heliograph_proto.membership import MemberInfo, MemberState, Way
    from heliograph_proto.quantization import dequantize, quantize

#: Names that are loaded when they are first used, and their modules: who builds graphs, or reads the op
#: table, does not pay for talking to a server, nor who writes blocking code for asyncio.
_LATER = {
    "Buffer": "buffer",
    "ComparedNode": "_comparison",
    "Comparison": "_comparison",
    "Verdict": "_comparison",
    "compare": "comparing",
    "copy_plan": "copying",
    "connect": "session",
    "tune_allocator": "_allocator",
    "Checkpoint": "checkpoints",
    "Device": "stream",
    "DeviceEvent": "_watching",
    "Event": "stream",
    "Explanation": "explaining",
    "Plan": "plan",
    "Rebuild": "_rebuilding",
    "Reservation": "_reserving",
    "RunFuture": "plan",
    "Session": "session",
    "SplitBufferType": "_split_buffer_type",
    "Stream": "stream",
    "Tap": "_taps",
    "Tensor": "tensor",
    "WriteFuture": "tensor",
    "aligned_empty": "buffer",
    "load": "files",
    "load_checkpoint": "checkpoints",
    "save": "files",
}

#: Likewise names of the contract, and their modules there.
_CONTRACT = {
    "Cause": "description",
    "CopyRoad": "description",
    "DeviceType": "description",
    "LogLine": "log_lines",
    "MemberInfo": "membership",
    "MemberState": "membership",
    "OpAnswer": "description",
    "OpQuery": "description",
    "OpRoad": "description",
    "PlanEstimate": "description",
    "Usage": "description",
    "Way": "membership",
    "dequantize": "quantization",
    "quantize": "quantization",
}

__all__ = [
    "Buffer",
    "CancelledError",
    "Cause",
    "Checkpoint",
    "ComparedNode",
    "Comparison",
    "ComputeFailedError",
    "ConfigurationError",
    "ConnectionError",
    "ContentMismatchError",
    "CopyRoad",
    "DType",
    "DeadlineExceededError",
    "Device",
    "DeviceLostError",
    "DeviceEvent",
    "DeviceType",
    "DrainingError",
    "Event",
    "Explanation",
    "Graph",
    "HandleError",
    "HandleExistsError",
    "HeliographError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidGraphError",
    "InvalidInputError",
    "InvalidModelError",
    "LimitExceededError",
    "LogLine",
    "MemberInfo",
    "MemberLostError",
    "MemberState",
    "MissingContentError",
    "NotHeliographError",
    "OpAnswer",
    "OpQuery",
    "OpRoad",
    "Origin",
    "OutOfMemoryError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "Plan",
    "PlanEstimate",
    "ProtocolError",
    "Reason",
    "Rebuild",
    "Reservation",
    "ResourceError",
    "RunFuture",
    "ServerWeight",
    "ServerWeights",
    "Session",
    "SessionClosedError",
    "SplitBufferType",
    "Stream",
    "Tap",
    "Tensor",
    "TensorType",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownDeviceError",
    "UnknownHandleError",
    "UnknownOpError",
    "UnsupportedError",
    "Usage",
    "Value",
    "Way",
    "Verdict",
    "VersionMismatchError",
    "WorkError",
    "WriteFuture",
    "__version__",
    "abs",
    "add",
    "aio",
    "aligned_empty",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "count_nonzero",
    "cumulative_sum",
    "diff",
    "assign",
    "astype",
    "broadcast_to",
    "broadcast_arrays",
    "ceil",
    "clip",
    "compare",
    "concat",
    "connect",
    "copy_plan",
    "cos",
    "cosh",
    "dequantize",
    "divide",
    "equal",
    "erf",
    "errors",
    "exp",
    "expand_dims",
    "expm1",
    "flatten",
    "flip",
    "floor",
    "floor_divide",
    "full",
    "full_like",
    "gelu",
    "greater",
    "greater_equal",
    "isfinite",
    "isinf",
    "isnan",
    "l2_normalize",
    "layer_norm",
    "less",
    "less_equal",
    "load",
    "load_checkpoint",
    "log",
    "log1p",
    "log2",
    "log10",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "matrix_transpose",
    "moveaxis",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "ones",
    "ones_like",
    "ops",
    "permute_dims",
    "repeat",
    "positive",
    "pow",
    "prod",
    "quantize",
    "reciprocal",
    "relu",
    "remainder",
    "reshape",
    "roll",
    "rms_norm",
    "round",
    "rsqrt",
    "save",
    "scaled_dot_product_attention",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "softmax",
    "softplus",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "subtract",
    "tan",
    "sum",
    "take",
    "take_along_axis",
    "tanh",
    "tensordot",
    "tile",
    "unstack",
    "tril",
    "triu",
    "trunc",
    "tune_allocator",
    "var",
    "vecdot",
    "where",
    "zeros",
    "zeros_like",
]


def __getattr__(name: str) -> object:
    """Loads what is loaded late; for other names, an error that suggests a near one."""
    if name == "aio":
        return importlib.import_module("heliograph.aio")
    for package, modules in (("heliograph", _LATER), ("heliograph_proto", _CONTRACT)):
        if name in modules:
            found = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
            globals()[name] = found
            return found
    # With an `obj` of None Python adds no guess of its own behind ours.
    raise AttributeError(f"module 'heliograph' has no attribute {name!r}{hint(name)}", name=name, obj=None)


def __dir__() -> list[str]:
    """What is exported."""
    return sorted(__all__)
