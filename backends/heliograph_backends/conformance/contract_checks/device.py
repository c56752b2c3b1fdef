"""Devices: the facts that they report."""

from __future__ import annotations

import numpy as np

from heliograph_backends.conformance.contract_checks.common import ContractPart, require_raises
from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.outcome import MismatchError, NotSupportedError, require
from heliograph_proto.devices import Capabilities, DeviceType
from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.ops.table import infer
from heliograph_proto.types import F32, TensorType

CASES = ContractPart("device")


@CASES
def names(bench: Bench, random: np.random.Generator) -> None:
    """It has a name, a description, a type, and a backend."""
    device = bench.device
    for what in ("name", "description", "backend"):
        found = getattr(device, what)
        require(isinstance(found, str) and found.isprintable() and bool(found), f"its {what} is {found!r}")
    require(isinstance(device.id, str), f"its id is {device.id!r}")
    require(isinstance(device.type, DeviceType), f"its type is {device.type!r}")
    require(isinstance(device.capabilities, Capabilities), f"its capabilities are {device.capabilities!r}")


@CASES
def facts(bench: Bench, random: np.random.Generator) -> None:
    """Its features, and its reasons for missing ones, are texts by name."""
    for what in ("features", "why_missing"):
        found = getattr(bench.device, what)()
        texts = all(isinstance(word, str) for item in found.items() for word in item)
        require(texts, f"{what} gave {found!r}")


@CASES
def memory(bench: Bench, random: np.random.Generator) -> None:
    """Its free memory is not more than its total memory."""
    found = bench.device.memory()
    require(0 <= found.free_bytes <= found.total_bytes, f"its memory is {found}")


@CASES
def capabilities(bench: Bench, random: np.random.Generator) -> None:
    """Its capabilities match its methods."""
    device = bench.device
    has = device.host_buffer_type is not None
    require(device.capabilities.host_buffer == has, f"host_buffer is not {has}, as host_buffer_type is")
    if not device.capabilities.buffer_from_host:
        require_raises(
            UnsupportedError, lambda: device.buffer_from_host(memoryview(bytearray(64))), "wrapping"
        )


@CASES
def own_memory(bench: Bench, random: np.random.Generator) -> None:
    """It supports its own buffer types."""
    device = bench.device
    require(device.supports_buffer_type(device.buffer_type), "it does not support its buffer_type")
    for one in (device.buffer_type, *device.extra_buffer_types):
        require(one.device is device, f"buffer type {one.name} is of another device")


@CASES
def answers(bench: Bench, random: np.random.Generator) -> None:
    """supports_op returns a text, and offload_op a boolean."""
    x = TensorType(F32, (4, 4))
    for op, count in (("add", 2), ("exp", 1), ("matmul", 2), ("soft_max", 1), ("reduce_sum", 1), ("cont", 1)):
        result, attributes = infer(op, [x] * count, {})
        why = bench.device.supports_op(op, attributes, [x] * count, result)
        require(isinstance(why, str), f"supports_op of {op} is {why!r}")
        pays = bench.device.offload_op(op, attributes, [x] * count, result)
        require(isinstance(pays, bool), f"offload_op of {op} is {pays!r}")


@CASES
def threads(bench: Bench, random: np.random.Generator) -> None:
    """An invalid number of threads is InvalidArgumentError."""
    # No valid number is tried: it would stay set, and the device may belong to a daemon in use.
    try:
        bench.device.set_threads(-1)
    except InvalidArgumentError:
        return
    except UnsupportedError as error:
        raise NotSupportedError(str(error)) from error
    raise MismatchError("it accepted -1 threads")
