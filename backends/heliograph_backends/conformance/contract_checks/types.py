"""Buffer types: alignment, sizes, and placing tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from heliograph_backends.conformance.contract_checks.common import (
    ContractPart,
    buffer_of,
    offered,
    random_bytes,
    read,
    require_bytes,
    require_raises,
    used_bytes,
    write,
)
from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.outcome import NotSupportedError, require
from heliograph_backends.contract import Buffer, BufferType, Usage, access, host_bytes
from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.types import DTYPES, TensorType

CASES = ContractPart("buffer type")

#: More bytes than any device has, for devices that do not report their memory.
TOO_MANY = 2**60


def own_types(bench: Bench) -> list[BufferType]:
    """Return all buffer types of the device."""
    device = bench.device
    host = [] if device.host_buffer_type is None else [device.host_buffer_type]
    return [device.buffer_type, *host, *device.extra_buffer_types]


@CASES
def alignment(bench: Bench, random: np.random.Generator) -> None:
    """The alignment is a power of two and a multiple of every element's size."""
    for one in own_types(bench):
        power = one.alignment >= 8 and one.alignment & (one.alignment - 1) == 0
        require(power, f"the alignment of {one.name} is {one.alignment}")


@CASES
def aligned(bench: Bench, random: np.random.Generator) -> None:
    """Every buffer begins at a multiple of the alignment."""
    for one in own_types(bench):
        for size in (1, 64, 1000, 4096, 100_003):
            with buffer_of(one, size) as buffer, offered():
                found = address(buffer)
                rest = found % one.alignment
                require(
                    not rest,
                    f"{size} bytes of {one.name} begin at {found:#x}, {rest} behind an aligned place",
                )


def address(buffer: Buffer) -> int:
    """Return the address of a buffer. Raises NotSupportedError if its arrays have none."""
    array: Any = buffer.array(TensorType(DTYPES["u8"], (1,)), 0, (1,))
    for protocol in ("__cuda_array_interface__", "__array_interface__"):
        if hasattr(array, protocol):
            return int(getattr(array, protocol)["data"][0])
    raise NotSupportedError(f"{type(array).__name__} has no address")


@CASES
def description(bench: Bench, random: np.random.Generator) -> None:
    """A buffer reports its type, size and usage."""
    for one in own_types(bench):
        require(bool(one.name) and one.max_size > 0, f"{one.name!r} has a maximum size of {one.max_size}")
        for usage in Usage:
            with buffer_of(one, 100, usage) as buffer:
                require(
                    buffer.buffer_type is one, f"the type of a buffer of {one.name} is {buffer.buffer_type}"
                )
                require(buffer.size_bytes == 100, f"100 bytes of {one.name} are {buffer.size_bytes}")
                require(buffer.usage is usage, f"a buffer for {usage.value} is for {buffer.usage.value}")
                buffer.set_usage(Usage.COMPUTE)
                require(buffer.usage is Usage.COMPUTE, "set_usage does not change what the buffer is for")


@CASES
def nothing(bench: Bench, random: np.random.Generator) -> None:
    """An empty buffer can be made, read, written, cleared and freed."""
    for one in own_types(bench):
        with buffer_of(one, 0) as buffer:
            require(buffer.size_bytes == 0, f"0 bytes of {one.name} are {buffer.size_bytes}")
            write(bench, buffer, 0, np.empty(0, np.uint8))
            read(bench, buffer, 0, 0)
            bench.run(partial(buffer.clear, 1))


@CASES
def sizes(bench: Bench, random: np.random.Generator) -> None:
    """No tensor takes less than its own bytes."""
    for one in own_types(bench):
        for dtype in DTYPES.values():
            for shape in ((0,), (dtype.block_size,), (3, 5 * dtype.block_size)):
                type = TensorType(dtype, shape)
                size = one.alloc_size(type)
                require(size >= type.nbytes, f"{type} takes {size} bytes of {one.name}; it has {type.nbytes}")


@CASES
def tensors(bench: Bench, random: np.random.Generator) -> None:
    """Tensors that are allocated together do not overlap, are aligned, and keep their bytes."""
    types = [
        TensorType(DTYPES[name], shape)
        for name, shape in (
            ("u8", (3,)),
            ("f32", (5, 7)),
            ("f16", (0,)),
            ("q8_0", (2, 64)),
            ("i64", ()),
            ("f64", (9,)),
        )
    ]
    for one in own_types(bench):
        buffer, placed = one.allocate_tensors(types, Usage.WEIGHTS)
        try:
            data = [random_bytes(random, type.nbytes) for type in types]
            for tensor, own in zip(placed, data, strict=True):
                require(
                    tensor.offset_bytes % one.alignment == 0, f"{tensor.type} lies at {tensor.offset_bytes}"
                )
                bench.run(partial(access.write, tensor, 0, host_bytes(own)))
            for tensor, own in zip(placed, data, strict=True):
                found = read(bench, tensor.buffer, tensor.offset_bytes, own.size)
                require_bytes(found, own, f"{tensor.type} among others")
        finally:
            buffer.free()


def _allocate(buffer_type: BufferType, size_bytes: int) -> None:
    buffer_type.allocate(size_bytes).free()


def _allocate_tensors(buffer_type: BufferType, types: Sequence[TensorType]) -> None:
    buffer_type.allocate_tensors(types)[0].free()


@CASES
def too_much(bench: Bench, random: np.random.Generator) -> None:
    """Allocating more memory than available is OutOfMemoryError, and takes no memory."""
    device = bench.device
    total = device.memory().total_bytes
    before = used_bytes(device) if total else 0
    one = device.buffer_type
    for size in {TOO_MANY, total + 1 if total else TOO_MANY}:
        require_raises(OutOfMemoryError, partial(_allocate, one, size), f"allocating {size:,} bytes")
    if total:
        parts = [TensorType(DTYPES["u8"], (max(1, total // 3),))] * 4
        require_raises(OutOfMemoryError, partial(_allocate_tensors, one, parts), "allocating tensors")
        after = used_bytes(device)
        # Less may be in use: a search for memory frees caches.
        require(after <= before, f"{after - before:,} bytes more are taken after allocations that failed")


@CASES
def largest(bench: Bench, random: np.random.Generator) -> None:
    """A tensor larger than the largest buffer is OutOfMemoryError."""
    for one in own_types(bench):
        if one.max_size < TOO_MANY:
            type = TensorType(DTYPES["u8"], (one.max_size + 1,))
            require_raises(OutOfMemoryError, partial(_allocate_tensors, one, [type]), str(type))
