"""The messages of ggml's RPC protocol: packed and unpacked. Pure.

All numbers are little-endian, and structures have no padding. A request is a command (u8), the size
of its payload (u64) and the payload; an answer is a size (u64) and a payload. Not every command has
an answer. HELLO must be the first command. The versions differ in a few commands: see `Version`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

MAX_SRC = 10
#: The fields of a tensor, in the order of the message: id, type, buffer, ne[4], nb[4], op,
#: op_params[16], flags, src[10], view_src, view_offs, data, name, use_count.
_TENSOR = struct.Struct("<QIQ4I4II16ii10QQQQ64si")
TENSOR_BYTES = _TENSOR.size
#: A tensor, a flag and an offset: a SET_TENSOR without its bytes.
SET_BYTES = TENSOR_BYTES + 9
#: A tensor, and where its pieces lie.
PIECES_BYTES = TENSOR_BYTES + 32
#: Device, rank, number of ranks, port and host of a COMM_INIT.
COMM_BYTES = 80
HEADER_BYTES = 9
CAPS_BYTES = 24

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Command(IntEnum):
    """The commands by number, the newest version's."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17
    SET_TENSOR_2D = 18
    GET_TENSOR_2D = 19
    COMM_INIT = 20


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the protocol. Clients of another major version hang up."""

    major: int
    minor: int
    patch: int
    #: True if graphs have a uid, by which they are computed again; else the last one is.
    has_uids: bool
    #: The last command.
    last: Command


VERSIONS = {
    "7.0": Version(7, 0, 0, has_uids=False, last=Command.MEMSET_TENSOR),
    "8.0": Version(8, 0, 0, has_uids=True, last=Command.COMM_INIT),
}


class WireError(ValueError):
    """A message that is not of the protocol; its connection ends."""


class Tensor(NamedTuple):
    """A tensor as the client describes it. Nothing in it is checked."""

    id: int
    type: int
    buffer: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    op: int
    op_params: tuple[int, ...]
    flags: int
    src: tuple[int, ...]
    view_src: int
    view_offs: int
    data: int
    name: str
    use_count: int

    def real(self, place: int) -> float:
        """Return a parameter of the op as a float."""
        found: float = struct.unpack("<f", struct.pack("<i", self.op_params[place]))[0]
        return found


class Range(NamedTuple):
    """Bytes of a tensor, and what the command says beside them."""

    tensor: Tensor
    offset: int
    size: int
    #: The value of a memset.
    value: int = 0


class Pieces(NamedTuple):
    """Pieces of equal size at equal distances in a tensor; their bytes are packed."""

    tensor: Tensor
    offset: int
    size: int
    number: int
    stride: int


class GraphMessage(NamedTuple):
    """A graph as the client describes it."""

    device: int
    #: 0: it is never computed again.
    uid: int
    nodes: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def exactly(payload: memoryview, size: int) -> memoryview:
    """Return the payload. Raises WireError unless it has this size."""
    if payload.nbytes != size:
        raise WireError(f"a payload of {payload.nbytes} bytes, where {size} are needed")
    return payload


def tensor(payload: memoryview, offset: int = 0) -> Tensor:
    """Unpack a tensor. Raises WireError."""
    if payload.nbytes < offset + TENSOR_BYTES:
        raise WireError(f"a payload of {payload.nbytes} bytes is too short for a tensor at byte {offset}")
    f = _TENSOR.unpack_from(payload, offset)
    name = f[42].split(b"\0", 1)[0].decode("ascii", "replace")
    return Tensor(
        f[0], f[1], f[2], f[3:7], f[7:11], f[11], f[12:28], f[28], f[29:39], f[39], f[40], f[41], name, f[43]
    )


def packed_tensor(one: Tensor) -> bytes:
    """Pack a tensor, as a client does."""
    return _TENSOR.pack(
        one.id, one.type, one.buffer, *one.ne, *one.nb, one.op, *one.op_params, one.flags, *one.src,
        one.view_src, one.view_offs, one.data, one.name.encode()[:63], one.use_count,
    )  # fmt: skip


def u32(payload: memoryview) -> int:
    """Unpack a payload of one number. Raises WireError."""
    found: int = _U32.unpack(exactly(payload, 4))[0]
    return found


def u64(payload: memoryview) -> int:
    """Unpack a payload of one number. Raises WireError."""
    found: int = _U64.unpack(exactly(payload, 8))[0]
    return found


def allocation(payload: memoryview) -> tuple[int, int]:
    """Return device and size."""
    device, size = struct.unpack("<IQ", exactly(payload, 12))
    return device, size


def clearing(payload: memoryview) -> tuple[int, int]:
    """Return the buffer's handle and the value."""
    buffer, value = struct.unpack("<QB", exactly(payload, 9))
    return buffer, value


def set_tensor(payload: memoryview) -> tuple[Tensor, int]:
    """Return the tensor and the offset of a SET_TENSOR without its bytes. Raises WireError."""
    # A flag says whether the server may keep the bytes on disk, which this one does not.
    found = tensor(exactly(payload, SET_BYTES))
    return found, _U64.unpack_from(payload, TENSOR_BYTES + 1)[0]


def hashed(payload: memoryview) -> Tensor:
    """Return the tensor of a SET_TENSOR_HASH."""
    return tensor(exactly(payload, TENSOR_BYTES + 16))


def get_tensor(payload: memoryview) -> Range:
    """Unpack a GET_TENSOR. Raises WireError."""
    found = tensor(exactly(payload, TENSOR_BYTES + 16))
    return Range(found, *struct.unpack_from("<QQ", payload, TENSOR_BYTES))


def memset(payload: memoryview) -> Range:
    """Unpack a MEMSET_TENSOR. Raises WireError."""
    found = tensor(exactly(payload, TENSOR_BYTES + 17))
    return Range(found, *struct.unpack_from("<QQB", payload, TENSOR_BYTES))


def copying(payload: memoryview) -> tuple[Tensor, Tensor]:
    """Return source and destination."""
    exactly(payload, 2 * TENSOR_BYTES)
    return tensor(payload), tensor(payload, TENSOR_BYTES)


def pieces(payload: memoryview) -> Pieces:
    """Unpack a GET_TENSOR_2D, or a SET_TENSOR_2D without its bytes. Raises WireError."""
    found = tensor(exactly(payload, PIECES_BYTES))
    return Pieces(found, *struct.unpack_from("<4Q", payload, TENSOR_BYTES))


def alloc_size(payload: memoryview) -> tuple[int, Tensor]:
    """Return device and tensor of a GET_ALLOC_SIZE, whose sources do not matter here."""
    exactly(payload, 4 + (1 + MAX_SRC) * TENSOR_BYTES)
    return _U32.unpack_from(payload)[0], tensor(payload, 4)


def recomputation(payload: memoryview, version: Version) -> tuple[int, int]:
    """Return device and uid."""
    if not version.has_uids:
        return u32(payload), 0
    device, uid = struct.unpack("<IQ", exactly(payload, 12))
    return device, uid


def graph(payload: memoryview, version: Version, most_tensors: int) -> GraphMessage:
    """Unpack a graph. Raises WireError before anything is made of counts that do not fit."""
    uid, offset = 0, 4
    if payload.nbytes < 24:
        raise WireError(f"a graph of {payload.nbytes} bytes")
    (device,) = _U32.unpack_from(payload)
    if version.has_uids:
        (uid,) = _U64.unpack_from(payload, 4)
        offset = 12
    (count,) = _U32.unpack_from(payload, offset)
    offset += 4
    if count > most_tensors or payload.nbytes < offset + 8 * count + 4:
        raise WireError(
            f"a graph of {payload.nbytes} bytes has {count:,} nodes; {most_tensors:,} are allowed"
        )
    nodes = struct.unpack_from(f"<{count}Q", payload, offset)
    offset += 8 * count
    (tensors,) = _U32.unpack_from(payload, offset)
    offset += 4
    if tensors > most_tensors or payload.nbytes != offset + TENSOR_BYTES * tensors:
        raise WireError(f"a graph of {payload.nbytes} bytes has {tensors:,} tensors")
    found = tuple(tensor(payload, offset + TENSOR_BYTES * place) for place in range(tensors))
    return GraphMessage(device, uid, nodes, found)


def answer(payload: bytes) -> bytes:
    """Return an answer with its size."""
    return _U64.pack(len(payload)) + payload


def numbers(*values: int) -> bytes:
    """Return an answer of u64 numbers."""
    return answer(struct.pack(f"<{len(values)}Q", *values))


def hello(version: Version) -> bytes:
    """Return the answer to HELLO: the version, and no other transport than TCP."""
    return answer(bytes((version.major, version.minor, version.patch, 0)) + bytes(CAPS_BYTES))


def request(command: int, payload: bytes) -> bytes:
    """Return a request, as a client sends it."""
    return bytes((command,)) + _U64.pack(len(payload)) + payload


def graph_payload(device: int, uid: int | None, nodes: Sequence[int], tensors: Sequence[Tensor]) -> bytes:
    """Return the payload of a GRAPH_COMPUTE, as a client sends it; without a uid as in version
    7."""
    head = _U32.pack(device) + (b"" if uid is None else _U64.pack(uid))
    listed = struct.pack(f"<I{len(nodes)}QI", len(nodes), *nodes, len(tensors))
    return head + listed + b"".join(map(packed_tensor, tensors))
