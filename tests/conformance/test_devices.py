"""The devices of this distribution pass the conformance suite."""

from __future__ import annotations

import pytest
from backend_graphs import nothing_left

from heliograph_backends.conformance import run
from heliograph_backends.conformance.pytest import conformance_tests
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice

MEMORY = 2**28

TestCpu = conformance_tests(lambda: CpuDevice(threads=2, memory_bytes=MEMORY), quick=True)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_definition_passes_all_of_it_with_another_seed() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=MEMORY, native=False)) as device:
        report = run(device, seed=7)
    assert report.ok, report.failures
    assert len(report.results) > 3000


def test_the_fake_device_passes() -> None:
    with nothing_left(FakeDevice(memory_bytes=MEMORY)) as device:
        report = run(device, quick=True)
    assert report.ok, report.failures
