"""The contract between Heliograph and a backend: ggml's backend model in Python.

    Backend ── devices ──▸ Device ── buffer_type ──▸ BufferType ── allocate ──▸ Buffer
                             │ stream                                            ▲
                             │ event                                           Tensor (a placed view)
                             ▼ compile
                            Plan

Each class stands on one screen. Methods that raise nothing but have a body here are optional; what
they do when left alone is their default. Work is asynchronous by streams: `Stream.submit` queues
host code that issues device work, and reports when that work has been *computed*.
`heliograph_backends.conformance` tells a backend's author when it is right.
"""

from heliograph_backends.contract.device import CONTRACT_VERSION, Backend, Device, Parameter, ParameterKind
from heliograph_backends.contract.memory import Buffer, BufferType, MultiBuffer, Tensor, host_bytes
from heliograph_backends.contract.plan import Arena, DeviceCompileOptions, LeafBindings, MemoryEstimate, Plan
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
from heliograph_backends.contract.stream import Abort, Done, Event, Stream
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
    "Event",
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
    "Stream",
    "Tensor",
    "Usage",
    "host_bytes",
]
