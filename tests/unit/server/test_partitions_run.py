"""Partitions that run at the same time on devices of several hosts have the bits of one device."""

from __future__ import annotations

import numpy as np
import pytest
from backend_graphs import same_bits
from partition_runs import PartitionedGraph, anywhere, two_runs
from random_graphs import RandomGraph

from heliograph_backends.cpu import CpuDevice


@pytest.mark.parametrize("seed", range(40))
def test_a_random_graph_in_partitions_has_the_bits_that_it_has_on_one_device(seed: int) -> None:
    random, made = np.random.default_rng(seed), RandomGraph(seed)
    devices = [CpuDevice(f"cpu{number}", threads=1) for number in range(int(random.integers(2, 5)))]
    sites = [int(random.integers(len(devices))) for _ in devices]
    try:
        expected = two_runs(devices[0], made)
        partitioned = PartitionedGraph(made, anywhere(made.graph(), len(devices), random), devices, sites)
        found = [*partitioned.run(1), *partitioned.run(2), *partitioned.free()]
    finally:
        for device in devices:
            device.close()
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(one, other), f"seed {seed}: value {place} differs"
