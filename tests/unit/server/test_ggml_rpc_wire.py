"""Messages of ggml's RPC protocol, strided parts, and ranges of bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from heliograph_server.gateways.ggml_rpc import ops, regions, wire
from heliograph_server.gateways.ggml_rpc.buffers import Buffers, RefusedError, Spans

VERSION = wire.VERSIONS["8.0"]


def tensor(**fields: Any) -> wire.Tensor:
    made = wire.Tensor(
        id=7, type=0, buffer=3, ne=(4, 2, 1, 1), nb=(4, 16, 32, 32), op=2, op_params=tuple(range(16)),
        flags=16, src=tuple(range(10)), view_src=8, view_offs=64, data=1 << 40, name="kq", use_count=-1,
    )  # fmt: skip
    return made._replace(**fields)


def test_a_tensor_has_296_bytes_with_its_fields_where_ggml_has_them() -> None:
    packed = wire.packed_tensor(tensor())
    assert len(packed) == wire.TENSOR_BYTES == 296
    at = {8: ("<I", 0), 12: ("<Q", 3), 20: ("<I", 4), 36: ("<I", 4), 52: ("<I", 2), 120: ("<i", 16)}
    at |= {124: ("<Q", 0), 204: ("<Q", 8), 212: ("<Q", 64), 220: ("<Q", 1 << 40), 292: ("<i", -1)}
    for offset, (form, value) in at.items():
        assert struct.unpack_from(form, packed, offset) == (value,), offset
    assert wire.tensor(memoryview(packed)) == tensor()


@pytest.mark.parametrize("version", wire.VERSIONS.values(), ids=wire.VERSIONS)
def test_a_graph_is_unpacked_as_it_was_packed(version: wire.Version) -> None:
    uid = 5 if version.has_uids else None
    payload = memoryview(wire.graph_payload(1, uid, (7, 8), [tensor(), tensor(id=8)]))
    assert wire.graph(payload, version, 10) == (1, uid or 0, (7, 8), (tensor(), tensor(id=8)))
    for size in range(payload.nbytes):
        with pytest.raises(wire.WireError):
            wire.graph(payload[:size], version, 10)
    with pytest.raises(wire.WireError, match="1 are allowed"):
        wire.graph(payload, version, 1)


def test_commands_of_other_sizes_are_refused() -> None:
    for unpack in (
        wire.u32, wire.u64, wire.allocation, wire.clearing, wire.tensor, wire.set_tensor, wire.hashed,
        wire.get_tensor, wire.memset, wire.copying, wire.pieces, wire.alloc_size,
    ):  # fmt: skip
        with pytest.raises(wire.WireError):
            unpack(memoryview(bytes(7)))
    with pytest.raises(wire.WireError):
        wire.recomputation(memoryview(bytes(7)), VERSION)


def test_the_greeting_says_the_version_and_no_other_transport() -> None:
    assert wire.hello(VERSION) == struct.pack("<Q", 28) + bytes((8, 0, 0, 0)) + bytes(24)


def test_every_op_of_ggml_is_computed_or_is_known_not_to_be() -> None:
    missing = {"custom", "map_custom1", "map_custom2", "map_custom3", "flash_attn_back"}
    assert len(ops.NAMES) == 101
    assert {name for place, name in enumerate(ops.NAMES) if place not in {*ops.RULES, *ops.VIEWS}} == missing


def test_addresses_of_buffers_never_overlap_and_are_not_given_twice() -> None:
    buffers = Buffers()
    made = [buffers.add(0, size) for size in (1, 5_000_000, 0, 64)]
    ends = [one.base + one.size for one in made]
    assert all(end < other.base for end, other in zip(ends, made[1:], strict=False))
    buffers.remove(made[-1].handle)
    assert buffers.add(0, 64).base > made[-1].base
    with pytest.raises(RefusedError, match="there is no buffer"):
        buffers.get(made[-1].handle)


@pytest.mark.parametrize("fields", [
    {"data": 0}, {"data": 2**64 - 1}, {"buffer": 99}, {"type": 43}, {"type": 2}, {"ne": (2**32 - 1,) * 4},
    {"nb": (4, 2**32 - 1, 4, 4)},
])  # fmt: skip
def test_a_tensor_outside_of_its_buffer_is_refused(fields: dict[str, Any]) -> None:
    buffers = Buffers()
    buffer = buffers.add(0, 64)
    good = tensor(buffer=buffer.handle, data=buffer.base)
    assert buffers.place(good).span == 32
    with pytest.raises(RefusedError):
        buffers.place(good._replace(**fields))


@pytest.mark.parametrize("seed", range(30))
def test_a_block_of_an_array_holds_the_elements_of_the_strided_part(seed: int) -> None:
    random = np.random.default_rng(seed)
    array = np.arange(240)
    shape = tuple(int(one) for one in random.permutation([2, 3, 4, 10]))
    strides = [int(np.prod(shape[place + 1 :])) for place in range(4)]
    sizes = [int(random.integers(1, size + 1)) for size in shape]
    first = [int(random.integers(0, size - count + 1)) for size, count in zip(shape, sizes, strict=True)]
    order = random.permutation(4)
    offset = sum(at * step for at, step in zip(first, strides, strict=True))
    given = [sizes[place] for place in order], [strides[place] for place in order]
    expected = np.lib.stride_tricks.as_strided(array[offset:], given[0], [8 * step for step in given[1]])
    found = regions.nest(array.size, offset, *given)
    assert found is not None
    used = array[: int(np.prod(found.shape))].reshape(found.shape)
    cut = used[tuple(slice(at, at + size) for at, size in zip(found.start, found.sizes, strict=True))]
    rest = [axis for axis in range(cut.ndim) if axis not in found.order]
    assert np.array_equal(cut.transpose(*found.order, *rest).ravel(), expected.ravel())


@pytest.mark.parametrize("seed", range(10))
def test_a_later_range_takes_over_what_it_covers(seed: int) -> None:
    random = np.random.default_rng(seed)
    spans, array = Spans(), np.full(60, -1)
    for number in range(25):
        start, end = sorted(int(one) for one in random.integers(0, 61, 2))
        spans.set(start, end, number)
        array[start:end] = number
        found = np.full(60, -1)
        for begin, stop, value in spans:
            assert (found[begin:stop] == -1).all()
            found[begin:stop] = value
        assert np.array_equal(found, array)
