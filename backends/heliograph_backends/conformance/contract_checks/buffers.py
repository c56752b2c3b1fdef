"""Buffers: bytes in and out, copies, bounds."""

from __future__ import annotations

from functools import partial

import numpy as np

from heliograph_backends.conformance.contract_checks.common import (
    ContractPart,
    buffer_of,
    offered,
    random_bytes,
    read,
    require_bytes,
    require_raises,
    write,
)
from heliograph_backends.conformance.contract_checks.types import own_types
from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.outcome import NotSupportedError, require
from heliograph_backends.contract import Chunks, MultiBuffer, Tensor, Usage, access, host_bytes
from heliograph_proto.errors import InvalidArgumentError, OutOfRangeError
from heliograph_proto.types import DTYPES, TensorType

CASES = ContractPart("buffer")

F32 = DTYPES["f32"]
SIZE = 4096
#: Offset and size of pieces: aligned or not, of one byte, to the end, none.
PIECES = ((0, 64), (1, 1), (63, 130), (4095, 1), (100, 3000), (77, 0), (0, SIZE))


@CASES
def bytes_in_and_out(bench: Bench, random: np.random.Generator) -> None:
    """Bytes written at an offset are read back, and nothing beside them changes."""
    for one in own_types(bench):
        with buffer_of(one, SIZE) as buffer:
            expected = random_bytes(random, SIZE)
            write(bench, buffer, 0, expected)
            for offset, size in PIECES:
                piece = random_bytes(random, size)
                write(bench, buffer, offset, piece)
                expected[offset : offset + size] = piece
                require_bytes(read(bench, buffer, offset, size), piece, f"{size} bytes at {offset}")
            require_bytes(read(bench, buffer, 0, SIZE), expected, f"all bytes of {one.name}")


@CASES
def large(bench: Bench, random: np.random.Generator) -> None:
    """Many bytes go in and out in one piece."""
    with buffer_of(bench.device.buffer_type, 2**23 + 1) as buffer:
        expected = random_bytes(random, buffer.size_bytes)
        write(bench, buffer, 0, expected)
        require_bytes(read(bench, buffer, 0, expected.size), expected, "8 MiB")


@CASES
def filled(bench: Bench, random: np.random.Generator) -> None:
    """memset fills only its range, and clear everything."""
    for one in own_types(bench):
        with buffer_of(one, SIZE) as buffer:
            expected = random_bytes(random, SIZE)
            write(bench, buffer, 0, expected)
            for value, (offset, size) in zip((0, 255, 1, 128, 7, 9), PIECES[:-1], strict=True):
                bench.run(partial(buffer.memset, offset, size, value))
                expected[offset : offset + size] = value
            require_bytes(read(bench, buffer, 0, SIZE), expected, f"memset of {one.name}")
            for value in (0, 200):
                bench.run(partial(buffer.clear, value))
                require_bytes(read(bench, buffer, 0, SIZE), np.full(SIZE, value, np.uint8), f"clear({value})")


@CASES
def chunks(bench: Bench, random: np.random.Generator) -> None:
    """Chunks at equal distances go in and out, and the gaps between them stay."""
    forms = (
        Chunks(5, 7, 16),
        Chunks(1, 100, 3),
        Chunks(64, 8, 64),
        Chunks(100),
        Chunks(0, 4, 8),
        Chunks(16, 0, 32),
    )
    with buffer_of(bench.device.buffer_type, SIZE) as buffer:
        expected = random_bytes(random, SIZE)
        write(bench, buffer, 0, expected)
        for form in forms:
            data, out = random_bytes(random, form.total_bytes), np.zeros(form.total_bytes, np.uint8)
            bench.run(partial(buffer.set_2d, 33, host_bytes(data), form))
            for number in range(form.count):
                start = 33 + number * form.stride_bytes
                piece = data[number * form.size_bytes :][: form.size_bytes]
                expected[start : start + form.size_bytes] = piece
            require_bytes(read(bench, buffer, 0, SIZE), expected, f"written {form}")
            bench.run(partial(buffer.get_2d, 33, host_bytes(out), form))
            require_bytes(out, data, f"read {form}")


@CASES
def views(bench: Bench, random: np.random.Generator) -> None:
    """A view with strides is read and written as its elements lie."""
    with buffer_of(bench.device.buffer_type, SIZE) as buffer, offered():
        whole = Tensor(TensorType(F32, (8, 16)), buffer, 64)
        image = random_bytes(random, SIZE)
        write(bench, buffer, 0, image)
        held = image[64 : 64 + 512].view(np.uint32).reshape(8, 16)
        for view, expected in (
            (whole.view(TensorType(F32, (16, 8)), 0, (4, 64)), held.T),
            (whole.view(TensorType(F32, (3, 5)), 68, (128, 12)), held[1:7:2, 1::3]),
        ):
            out = np.zeros(expected.shape, np.uint32)
            bench.run(partial(access.read, view, 0, host_bytes(out)))
            require_bytes(
                out.view(np.uint8).ravel(), np.ascontiguousarray(expected).view(np.uint8).ravel(), "read"
            )
            fresh = random_bytes(random, out.nbytes).view(np.uint32).reshape(expected.shape)
            bench.run(partial(access.write, view, 0, host_bytes(fresh)))
            expected[...] = fresh
            require_bytes(read(bench, buffer, 0, SIZE), image, "written through a view")


@CASES
def copies(bench: Bench, random: np.random.Generator) -> None:
    """A tensor is copied to another buffer, and to another place of its own."""
    one = bench.device.buffer_type
    with buffer_of(one, SIZE) as first, buffer_of(one, SIZE) as second:
        for name, shape in (
            ("f32", (9, 7)),
            ("u8", (333,)),
            ("f16", (0, 3)),
            ("q4_0", (3, 64)),
            ("bf16", (5, 5)),
        ):
            type = TensorType(DTYPES[name], shape)
            for target, offset in ((second, 128), (first, 2048)):
                image, other = random_bytes(random, SIZE), random_bytes(random, SIZE)
                write(bench, first, 0, image)
                if target is second:
                    write(bench, second, 0, other)
                expected = other if target is second else image
                expected[offset : offset + type.nbytes] = image[64 : 64 + type.nbytes]
                pair = Tensor(type, first, 64), Tensor(type, target, offset)
                bench.run(partial(access.copy, *pair))
                require_bytes(read(bench, target, 0, SIZE), expected, f"a copy of {type}")


@CASES
def strided_copies(bench: Bench, random: np.random.Generator) -> None:
    """A view with strides is copied to another, and the gaps stay."""
    one = bench.device.buffer_type
    with buffer_of(one, SIZE) as first, buffer_of(one, SIZE) as second, offered():
        image, other = random_bytes(random, SIZE), random_bytes(random, SIZE)
        write(bench, first, 0, image)
        write(bench, second, 0, other)
        type = TensorType(F32, (5, 7))
        source, target = Tensor(type, first, 64, (4, 20)), Tensor(type, second, 128, (112, 8))
        bench.run(partial(access.copy, source, target))
        taken = np.ndarray((5, 7), np.uint32, image, 64, (4, 20))
        np.ndarray((5, 7), np.uint32, other, 128, (112, 8))[...] = taken
        require_bytes(read(bench, second, 0, SIZE), other, "a copy with strides")


@CASES
def bounds(bench: Bench, random: np.random.Generator) -> None:
    """Bytes outside of a tensor are OutOfRangeError, and nothing changes."""
    with buffer_of(bench.device.buffer_type, SIZE) as buffer:
        image, data = random_bytes(random, SIZE), host_bytes(random_bytes(random, 65))
        write(bench, buffer, 0, image)
        tensor = Tensor(TensorType(F32, (16,)), buffer, 64)
        for what, action in (
            ("a write of one byte too many", lambda: access.write(tensor, 0, data)),
            ("a write before the tensor", lambda: access.write(tensor, -1, data[:4])),
            ("a read behind the tensor", lambda: access.read(tensor, 61, memoryview(bytearray(4)))),
            ("a memset behind the tensor", lambda: access.memset(tensor, 60, 8, 1)),
            ("chunks that reach outside", lambda: access.write_2d(tensor, 0, data[:30], Chunks(10, 3, 28))),
            ("a view that reaches outside", lambda: tensor.view(TensorType(F32, (2,)), 60)),
        ):
            require_raises(OutOfRangeError, action, what)
        require_raises(InvalidArgumentError, lambda: access.memset(tensor, 0, 4, 256), "memset with 256")
        require_bytes(read(bench, buffer, 0, SIZE), image, "after refused accesses")


@CASES
def freed(bench: Bench, random: np.random.Generator) -> None:
    """A buffer can be reset, and freed twice."""
    buffer = bench.device.buffer_type.allocate(1000)
    buffer.reset()
    buffer.free()
    buffer.free()


@CASES
def several(bench: Bench, random: np.random.Generator) -> None:
    """Several buffers that behave as one are cleared, reset, marked and freed together."""
    one = bench.device.buffer_type
    parts = [one.allocate(size) for size in (100, 0, 3000)]
    whole = MultiBuffer(one, parts)
    try:
        bench.run(partial(whole.clear, 7))
        whole.set_usage(Usage.WEIGHTS)
        whole.reset()
        for part in parts:
            require(part.usage is Usage.WEIGHTS, f"a part is for {part.usage.value}")
            size = part.size_bytes
            require_bytes(read(bench, part, 0, size), np.full(size, 7, np.uint8), f"a part of {size} bytes")
    finally:
        whole.free()
        whole.free()


@CASES
def from_host(bench: Bench, random: np.random.Generator) -> None:
    """A buffer over memory of this process is that memory."""
    if not bench.device.capabilities.buffer_from_host:
        raise NotSupportedError("the device says that it has no buffer_from_host")
    held = bytearray(random_bytes(random, 300).tobytes())
    buffer = bench.device.buffer_from_host(memoryview(held))
    try:
        require(buffer.size_bytes == 300, f"300 bytes of the host are a buffer of {buffer.size_bytes}")
        require_bytes(
            read(bench, buffer, 0, 300), np.frombuffer(held, np.uint8), "read from the host's memory"
        )
        write(bench, buffer, 7, random_bytes(random, 100))
        require_bytes(
            read(bench, buffer, 0, 300), np.frombuffer(held, np.uint8), "written to the host's memory"
        )
    finally:
        buffer.free()
