"""What the CPU tells of itself, its high-bandwidth memory, and scripted devices of any shape."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from heliograph_backends.contract import Device, MultiBuffer, Tensor, Usage, access
from heliograph_backends.cpu import facts
from heliograph_backends.cpu.hbm import LIBRARY, why_no_hbm
from heliograph_backends.registry import open_registry
from heliograph_proto.devices import CopyPath
from heliograph_proto.errors import ConfigurationError, OutOfMemoryError
from heliograph_proto.types import F32, TensorType

T = TensorType(F32, (6, 8))


@contextmanager
def devices(*specifications: str) -> Iterator[Any]:
    """The devices of a registry, all of whose memory is free again at the end."""
    registry = open_registry(specifications)
    yield registry.devices if len(registry.devices) > 1 else registry.devices[0]
    for device in registry.devices:
        assert device.memory().free_bytes == device.memory().total_bytes
    registry.close()


# The CPU


def test_the_cpu_tells_its_threads_kernels_and_libraries() -> None:
    with devices("cpu:threads=2") as cpu:
        features = cpu.features()
        assert features["threads"] == "2" and features["blas"]
        assert ("native_kernels" in features) is cpu.native
        assert ("native_kernels" in cpu.why_missing()) is not cpu.native
        assert cpu.id == ""


@pytest.mark.parametrize(
    ("cpuinfo", "found"),
    [
        ("model name\t: X\nflags\t\t: fpu avx2 amx_int8 avx512f\n", ("avx2", "avx512f", "amx_int8")),
        ("Features\t: fp asimd sve2 i8mm\n\nFeatures\t: fp\n", ("asimd", "i8mm", "sve2")),
        ("isa\t: rv64imafdc\n", ()),
        ("", ()),
    ],
)
def test_instruction_sets_are_read_as_linux_writes_them(cpuinfo: str, found: tuple[str, ...]) -> None:
    assert facts.known_instructions(cpuinfo) == found


def test_a_reference_device_computes_on_the_definition_alone() -> None:
    with devices("cpu:reference=1", "cpu:threads=1") as (reference, plain):
        assert not reference.native and "native_kernels" not in reference.features()
        assert "definition" in reference.why_missing()["native_kernels"]
        assert "the definition alone" in reference.description
        assert ("the definition alone" in plain.description) == (not plain.native)
        assert plain.native == bool(facts.native_compiler())


def test_high_bandwidth_memory_is_an_extra_buffer_type_or_missing_with_a_reason() -> None:
    with devices("cpu:threads=1") as cpu:
        names = [one.name for one in cpu.extra_buffer_types]
        assert ("cpu0_hbm" in names) is ("hbm" not in cpu.why_missing())
        if "hbm" in cpu.why_missing():
            assert "not installed" in why_no_hbm() or "no high-bandwidth memory" in why_no_hbm()


USE_HBM = """
import gc
import numpy as np
from heliograph_backends.contract import Tensor, Usage
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.types import F32, TensorType

device = CpuDevice(threads=1, memory_bytes=2**20)
(memory,) = [one for one in device.extra_buffer_types if one.name == "cpu0_hbm"]
assert memory.is_host and memory.device is device and device.supports_buffer_type(memory)
assert "hbm" not in device.why_missing()
buffer = memory.allocate(2**19, Usage.WEIGHTS)
assert buffer.address % memory.alignment == 0 and buffer.buffer_type is memory
assert device.memory().free_bytes == 2**19
values = Tensor(TensorType(F32, (2**17,)), buffer).array
values[:] = np.arange(2**17)
buffer.free()
buffer.free()
assert device.memory().free_bytes == 2**20
gc.collect()
assert values[-1] == 2**17 - 1  # a view keeps the bytes
memory.allocate(0).free()
try:
    memory.allocate(2**20 + 1)
except OutOfMemoryError as error:
    print(error.message)
device.close()
"""


def test_high_bandwidth_memory_is_taken_and_given_back() -> None:
    """libmemkind takes any NUMA node that it is told for such memory."""
    environment = {**os.environ, "MEMKIND_HBW_NODES": "0"}
    ask = [sys.executable, "-c", "from heliograph_backends.cpu.hbm import why_no_hbm; print(why_no_hbm())"]
    why = subprocess.run(ask, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    if why.strip():
        pytest.skip(f"{LIBRARY}: {why.strip()}")
    used = subprocess.run(
        [sys.executable, "-c", USE_HBM], env=environment, capture_output=True, text=True, timeout=60
    )
    assert used.stderr == "" and "device cpu0 has 1,048,576 bytes free" in used.stdout


# Scripted devices


def test_a_fake_device_has_the_memory_that_its_parameters_say() -> None:
    with devices("fake:memory=1MiB,alignment=512,max_size=4KiB,extra=2,host=0") as fake:
        types = [fake.buffer_type, *fake.extra_buffer_types]
        assert [one.name for one in types] == ["fake0", "fake0_extra0", "fake0_extra1"]
        assert fake.host_buffer_type is None
        for one in types:
            assert (one.alignment, one.max_size, one.is_host, one.device) == (512, 4096, False, fake)
            with pytest.raises(OutOfMemoryError, match="4,097 bytes"):
                one.allocate(4097)
            buffer = one.allocate(4096)
            assert buffer.address % 512 == 0
            assert fake.memory().free_bytes == 2**20 - 4096
            buffer.free()


def test_a_fake_device_with_small_buffers_gives_several_that_behave_as_one() -> None:
    with devices("fake:max_size=1KiB,alignment=256") as fake:
        buffer, tensors = fake.buffer_type.allocate_tensors([T] * 7, Usage.WEIGHTS)
        assert isinstance(buffer, MultiBuffer)
        assert [part.size_bytes for part in buffer.parts] == [960, 704]
        assert [one.offset_bytes for one in tensors] == [0, 256, 512, 768, 0, 256, 512]
        buffer.free()


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ("fail=the fan stopped: twice", "the fan stopped: twice"),
        ("fail=", "the parameter 'fail' is set"),
        ("alignment=48", "alignment=48 is not a power of two"),
        ("alignment=0", "alignment=0 is not a power of two"),
        ("alignment=1GiB", "is not a power of two up to 1MiB"),
        ("extra=101", "the maximum is 100"),
        ("host=2", "host=2 is neither 0 nor 1"),
    ],
)
def test_a_fake_device_that_cannot_be_says_why(parameters: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_registry(["fake", f"fake:{parameters}"])
    assert why in caught.value.message


def filled(device: Device, value: float) -> Tensor:
    tensor = Tensor(T, device.buffer_type.allocate(T.nbytes))
    tensor.buffer.set(0, np.full(T.shape, value, np.float32).reshape(-1).view("u1").data)
    return tensor


@pytest.mark.parametrize(
    ("source", "destination", "path"),
    [
        ("cpu", "fake:host=1", CopyPath.DESTINATION),
        ("fake:host=1", "cpu", CopyPath.DESTINATION),
        ("cpu", "fake:host=0", CopyPath.DESTINATION),
        ("fake:host=0", "cpu", CopyPath.SOURCE),
        ("fake:host=0", "fake:host=0", CopyPath.HOST),
        ("fake:host=0", "fake:host=1", CopyPath.SOURCE),
    ],
)
@pytest.mark.parametrize("gaps", [False, True])
def test_copies_take_each_of_the_three_paths(
    source: str, destination: str, path: CopyPath, gaps: bool
) -> None:
    with devices(source, destination) as pair:
        # One backend's devices come together: the order is that of the first mention.
        a, b = filled(pair[0], 1.0), filled(pair[1], 2.0)
        part = TensorType(F32, (6, 4))
        one, two = (t.view(part, 16, (32, 4)) for t in (a, b)) if gaps else (a, b)
        assert access.copy(one, two) is path
        expected = np.full(T.shape, 1.0, np.float32)
        if gaps:
            expected[:, :4] = 2.0
        found = np.empty(T.shape, np.float32)
        b.buffer.get(0, found.reshape(-1).view("u1").data)
        np.testing.assert_array_equal(found, expected)
        for tensor in (a, b):
            tensor.buffer.free()


def test_a_device_copies_inside_its_own_memory_whatever_that_is() -> None:
    for host in (0, 1):
        with devices(f"fake:host={host}") as fake:
            a, b = filled(fake, 1.0), filled(fake, 2.0)
            assert access.copy(a, b) is CopyPath.DESTINATION
            assert float(b.array[5, 7]) == 1.0
            a.buffer.free()
            b.buffer.free()


def test_memory_that_is_not_the_hosts_is_read_in_place_by_its_own_device_alone() -> None:
    with devices("cpu:threads=1", "fake:host=0", "fake:host=1") as (cpu, apart, shared):
        own = apart.buffer_type
        assert [one.supports_buffer_type(own) for one in (cpu, apart, shared)] == [False, True, False]
        host = cpu.buffer_type
        assert [one.supports_buffer_type(host) for one in (cpu, apart, shared)] == [True, False, True]
