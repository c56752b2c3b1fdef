"""The contract between Heliograph and a backend: ggml's backend model in Python::

    Backend ── devices ──▸ Device ── buffer_type ──▸ BufferType ── allocate ──▸ Buffer
                             │ stream                                            ▲
                             │ event                                           Tensor (placed view)
                             ▼ compile
                            Plan

Methods with a body are optional to override; the body is their default. Streams make work
asynchronous: `Stream.submit` queues host code that issues device work, and reports when that work
has been *computed*. `heliograph_backends.conformance` tests an implementation, and
`examples/backend.py` is a small one.

Types of arguments are elsewhere: `Graph`, `Node` and `Leaf` in `heliograph_proto.graph`,
`TensorType` and `DType` in `heliograph_proto.types`, `DeviceType`, `Capabilities`, `Memory` and
`OpPath` in `heliograph_proto.devices`, errors in `heliograph_proto.errors`. `Site`, `SitePlan`,
`SiteRun`, `SiteWork`, `HostedLoop`, `Intake`, `Admittance`, `Relay` and `UploadNews` serve devices
of other daemons in a pool; a backend for local hardware does not use them.
"""

from heliograph_backends.contract.device import CONTRACT_VERSION, Backend, Device, Parameter, ParameterKind
from heliograph_backends.contract.memory import Buffer, BufferType, MultiBuffer, Tensor, host_bytes
from heliograph_backends.contract.plan import (
    Arena,
    DeviceCompileOptions,
    HostedLoop,
    LeafBindings,
    MemoryEstimate,
    MemoryMap,
    Plan,
    StoredResult,
)
from heliograph_backends.contract.remote import (
    Admittance,
    Intake,
    Relay,
    Site,
    SitePlan,
    SiteRun,
    SiteWork,
    UploadNews,
)
from heliograph_backends.contract.stream import Abort, Done, Event, Stream, Turn
from heliograph_proto.commands import Chunks
from heliograph_proto.devices import Usage

__all__ = [
    "CONTRACT_VERSION",
    "Abort",
    "Admittance",
    "Arena",
    "Backend",
    "Buffer",
    "BufferType",
    "Chunks",
    "DeviceCompileOptions",
    "Device",
    "Done",
    "MemoryEstimate",
    "MemoryMap",
    "Event",
    "HostedLoop",
    "Intake",
    "LeafBindings",
    "MultiBuffer",
    "UploadNews",
    "Parameter",
    "ParameterKind",
    "Plan",
    "Relay",
    "Site",
    "SitePlan",
    "SiteRun",
    "SiteWork",
    "StoredResult",
    "Stream",
    "Tensor",
    "Turn",
    "Usage",
    "host_bytes",
]
