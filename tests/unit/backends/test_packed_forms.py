"""The order of a packed weight: in place, without padding, read and written in its own order."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import normal

from heliograph_backends.host_memory.buffers import aligned_bytes

pytest.importorskip("numba")

from heliograph_backends.cpu.kernels import PackedForm

SHAPES = [(1, 1), (1, 7), (7, 1), (5, 31), (6, 33), (64, 64), (17, 97), (3000, 129), (300, 1000)]


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_a_matrix_is_packed_read_written_and_unpacked_in_its_place(
    depth: int, columns: int, by_columns: bool
) -> None:
    random = np.random.default_rng(depth * columns)
    stored = normal(random, columns, depth) if by_columns else normal(random, depth, columns)
    matrix = stored.T if by_columns else stored
    memory, form = aligned_bytes(stored.nbytes), PackedForm(depth, columns, by_columns)
    memory[:] = np.frombuffer(stored.tobytes(), np.uint8)

    form.pack(memory)
    panels = [matrix[:, first : first + 32] for first in range(0, columns, 32)]
    assert memory.tobytes() == b"".join(np.ascontiguousarray(panel).tobytes() for panel in panels)

    now = bytearray(stored.tobytes())
    for _ in range(10):
        first, last = sorted(random.integers(0, stored.nbytes + 1, 2))
        new = random.bytes(int(last - first))
        now[first:last] = new
        form.write(memory, int(first), memoryview(new))
        start, stop = sorted(random.integers(0, stored.nbytes + 1, 2))
        found = bytearray(int(stop - start))
        form.read(memory, int(start), memoryview(found))
        assert found == now[start:stop]

    form.unpack(memory)
    assert memory.tobytes() == now
