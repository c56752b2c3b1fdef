"""How much memory the CPU offers for tensors, by what the system says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import heliograph as hg
from heliograph_backends.host_memory.buffers import machine_memory_bytes

MIB = 2**20
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_device_that_holds_a_weight_once_multiplies_by_it() -> None:
    weight = np.ones((512, 1024), np.float32)
    g = hg.Graph()
    g.output("y", hg.ops.mul_mat(g.weight("w", weight), g.input("x", (1, 1024), "f32")))
    with hg.connect("local:#cpu:memory=3MiB") as session:
        found = session.compile(g).run(x=np.ones((1, 1024), np.float32))["y"]
    np.testing.assert_array_equal(found, np.full((1, 512), 1024))


@pytest.mark.parametrize(
    ("limit", "offered"),
    [
        (str(1536 * MIB), 1024 * MIB),
        (str(600 * MIB), 300 * MIB),
        ("max", MACHINE),
        (str(2**63 - 4096), MACHINE),
    ],
)
def test_a_container_keeps_room_for_the_daemon_itself(tmp_path: Path, limit: str, offered: int) -> None:
    file = tmp_path / "memory.max"
    file.write_text(f"{limit}\n")
    assert machine_memory_bytes([file, tmp_path / "missing"]) == offered
