"""The registry: specifications, names, and the devices behind them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backend_graphs import Maker, run
from hypothesis import given
from hypothesis import strategies as st
from plugin_files import write_plugin

from heliograph_backends.contract import Parameter, ParameterKind
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry, open_registry, parse_specification
from heliograph_proto.devices import DeviceType
from heliograph_proto.errors import ConfigurationError, OutOfMemoryError, UnknownDeviceError

SECONDS = 20.0

PARAMETERS = {
    "remote": (
        Parameter("url", ParameterKind.TEXT, "where"),
        Parameter("lanes", ParameterKind.COUNT, "how many"),
        Parameter("cache", ParameterKind.SIZE, "bytes"),
    )
}


# Specifications


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", ("cpu", {})),
        (" cpu ", ("cpu", {})),
        ("cpu:", ("cpu", {})),
        ("cpu:threads=2", ("cpu", {"threads": 2})),
        ("cpu:threads=2,memory=512MiB", ("cpu", {"threads": 2, "memory": 512 * 2**20})),
        ("fake:memory=3GiB", ("fake", {"memory": 3 * 2**30})),
        ("cpu:memory=100", ("cpu", {"memory": 100})),
        ("cpu:memory=1TiB,", ("cpu", {"memory": 2**40})),
    ],
)
def test_a_specification_is_a_name_and_numbers(text: str, expected: object) -> None:
    assert parse_specification(text) == expected


@pytest.mark.parametrize(
    ("text", "message", "advice"),
    [
        ("cpus", "unknown backend 'cpus'", "did you mean 'cpu'?"),
        ("", "unknown backend ''", "known: cpu, fake"),
        ("vulkan", "unknown backend 'vulkan'", "known: cpu, fake"),
        ("cpu:thread=2", "no parameter 'thread'", "did you mean 'threads'?"),
        ("fake:threads=2", "no parameter 'threads'", "known: memory"),
        ("cpu:threads", "threads='' is not a number", "a whole number"),
        ("cpu:threads=two", "threads='two' is not a number", "a whole number"),
        ("cpu:threads=-1", "threads='-1' is not a number", "a whole number"),
        ("cpu:threads=2MiB", "threads='2MiB' is not a number", "a whole number"),
        ("cpu:memory=1.5GiB", "memory='1.5GiB' is not a number", "512MiB"),
        ("cpu:memory=1GB", "memory='1GB' is not a number", "512MiB"),
        ("cpu:memory=" + "9" * 40, "is not a number", "512MiB"),
        ("cpu:threads=1,threads=2", "'threads' twice", ""),
    ],
)
def test_a_bad_specification_is_refused_with_advice(text: str, message: str, advice: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_specification(text)
    assert message in caught.value.message
    assert advice in caught.value.advice


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("remote:url=grpc://host:7070/#cpu0", {"url": "grpc://host:7070/#cpu0"}),
        ("remote:url=unix:///run/a=b/socket,lanes=2", {"url": "unix:///run/a=b/socket", "lanes": 2}),
        ("remote:url=,lanes=0", {"url": "", "lanes": 0}),
        ("REMOTE: lanes = 3 , cache = 2KiB ", {"lanes": 3, "cache": 2048}),
        ("remote:cache=9223372036854775807", None),
        ("remote:cache=8388607TiB", {"cache": 8388607 * 2**40}),
    ],
)
def test_texts_may_have_colons_slashes_hashes_and_equals_signs(text: str, values: object) -> None:
    if values is None:
        with pytest.raises(ConfigurationError, match="is not a number"):
            parse_specification(text, PARAMETERS)
    else:
        assert parse_specification(text, PARAMETERS) == ("remote", values)


@pytest.mark.parametrize("text", ["gpu", "GPU0:memory=1GiB", "nvidia"])
def test_who_asks_for_a_gpu_is_not_sent_to_the_cpu(text: str) -> None:
    with pytest.raises(ConfigurationError, match="unknown backend") as caught:
        parse_specification(text, {"cpu": (), "cuda": (), "fake": ()})
    assert caught.value.advice == "did you mean 'cuda'?"


@pytest.mark.parametrize(
    ("text", "message", "advice"),
    [
        ("remotes", "unknown backend 'remotes'", "did you mean 'remote'?"),
        ("remote:ulr=x", "no parameter 'ulr'", "did you mean 'url'?"),
        ("remote:url", "url has no value", "url=TEXT"),
        ("remote:url=x,url=y", "'url' twice", ""),
        ("remote:lanes=2MiB", "lanes='2MiB' is not a number", "a whole number"),
        ("remote:cache=8388608TiB", "is not a number", "512MiB"),
        ("remote:" + "x" * 9999, "no parameter 'xxx", "known: url"),
    ],
)
def test_what_is_wrong_in_a_specification_is_said_with_a_suggestion(
    text: str, message: str, advice: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_specification(text, PARAMETERS)
    assert message in caught.value.message and len(caught.value.message) < 200
    assert advice in caught.value.advice


@given(st.text("remoturlcanshe:=,.#/0129KMGiB \n\u0663\u00e9\ud800", max_size=40))
def test_any_text_is_a_specification_or_refused(text: str) -> None:
    try:
        name, values = parse_specification(f"remote:{text}", PARAMETERS)
    except ConfigurationError:
        return
    assert name == "remote" and set(values) <= {"url", "lanes", "cache"}
    assert all(isinstance(values[key], str if key == "url" else int) for key in values)


# Devices by name, type and worth


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A CPU, and a plugin with devices of every kind."""
    kinds = ("accelerator", "cpu", "integrated_gpu", "gpu", "gpu")
    specifications = ["cpu:threads=1", *(f"sim:kind={kind}" for kind in kinds)]
    made = open_registry(specifications, [str(write_plugin(tmp_path, "sim"))])
    yield made
    made.close()


def test_devices_are_numbered_by_backend_in_the_order_asked_for() -> None:
    registry = open_registry(["fake:memory=1MiB", "cpu:threads=1", "fake"])
    assert [device.name for device in registry.devices] == ["fake0", "fake1", "cpu0"]
    assert registry.device() is registry.devices[0]
    assert registry.device("cpu0").memory().total_bytes > 0
    assert registry.device("fake0").memory().total_bytes == 2**20
    # Where there is no GPU the backend for them says so.
    assert {one.name for one in registry.unavailable} <= {"cuda"}
    assert repr(registry) == "<Registry of fake0, fake1, cpu0>"
    registry.close()


def test_an_unknown_device_is_refused_with_the_nearest_name() -> None:
    registry = open_registry(["fake"])
    with pytest.raises(UnknownDeviceError, match="did you mean 'fake0'"):
        registry.device("fake")
    registry.close()


def test_a_bad_specification_starts_nothing() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError):
        open_registry(["cpu:threads=4", "gpu"])
    assert threading.active_count() == before


def test_names_of_devices_and_backends_are_found_in_upper_and_lower_case(registry: Registry) -> None:
    assert registry.device("CPU0") is registry.device("cpu0") is registry.devices[0]
    assert registry.device("Sim3").name == "sim3"
    registry.unload("SIM")
    assert [device.name for device in registry.devices] == ["cpu0"]
    with pytest.raises(UnknownDeviceError, match="no device is named 'sim3'"):
        registry.device("sim3")


def test_devices_of_a_type_come_by_priority(registry: Registry) -> None:
    assert [device.name for device in registry.by_type(DeviceType.GPU)] == ["sim3", "sim4"]
    assert [device.name for device in registry.by_type(DeviceType.CPU)] == ["cpu0", "sim1"]
    assert [device.name for device in registry.by_type(DeviceType.ACCELERATOR)] == ["sim0"]


@pytest.mark.parametrize(
    ("specifications", "best"),
    [
        (("sim:kind=cpu", "sim:kind=integrated_gpu", "sim:kind=gpu"), "sim2"),
        (("sim:kind=cpu", "sim:kind=integrated_gpu", "sim:kind=accelerator"), "sim1"),
        (("sim:kind=accelerator", "sim:kind=cpu"), "sim1"),
    ],
)
def test_the_best_device_is_a_gpu_else_an_integrated_one_else_a_cpu(
    specifications: tuple[str, ...], best: str, tmp_path: Path
) -> None:
    registry = open_registry(specifications, [str(write_plugin(tmp_path, "sim"))])
    assert registry.best().name == best
    registry.close()


def test_an_accelerator_alone_is_no_best_device() -> None:
    registry = open_registry(["fake"])
    with pytest.raises(UnknownDeviceError, match="no GPU and no CPU"):
        registry.best()
    registry.close()


def test_there_is_one_cpu_unless_something_else_is_asked_for() -> None:
    registry = open_registry()
    assert [device.name for device in registry.devices] == ["cpu0"]
    known = {one.name: one for one in registry.backends}
    assert known["cpu"].devices == ("cpu0",) and known["fake"].devices == ()
    assert known["cpu"].origin == known["fake"].origin == "built in"
    registry.close()
    registry.close()


def test_devices_that_a_program_made_are_a_registry_too() -> None:
    fake, cpu = FakeDevice("fake7"), CpuDevice("cpu9", threads=1)
    registry = Registry.of(fake, cpu)
    assert registry.devices == (fake, cpu) and registry.device("CPU9") is cpu
    known = {one.name: one for one in registry.backends}
    assert known["fake"].devices == ("fake7",) and known["fake"].origin == "the program's own"
    registry.close()


# Several devices of the CPU


@pytest.fixture
def two_cpus() -> Iterator[list[CpuDevice]]:
    registry = open_registry(["cpu:threads=1,memory=1MiB", "CPU:threads=3,memory=2MiB"])
    yield [device for device in registry.devices if isinstance(device, CpuDevice)]
    registry.close()


def test_two_cpus_have_threads_and_memory_of_their_own(two_cpus: list[CpuDevice]) -> None:
    first, second = two_cpus
    assert (first.name, first.threads) == ("cpu0", 1) and (second.name, second.threads) == ("cpu1", 3)
    assert (first.memory().total_bytes, second.memory().total_bytes) == (2**20, 2**21)
    assert first.features()["threads"] == "1" and second.features()["threads"] == "3"
    taken = first.buffer_type.allocate(2**20)
    assert first.memory().free_bytes == 0 and second.memory().free_bytes == 2**21
    with pytest.raises(OutOfMemoryError, match="device cpu0 has 0 bytes free"):
        first.buffer_type.allocate(1)
    second.buffer_type.allocate(2**21).free()
    taken.free()


def test_two_cpus_start_as_many_helpers_as_they_were_given() -> None:
    before = set(threading.enumerate())
    registry = open_registry(["cpu:threads=2", "cpu:threads=3"])
    started = [one.name for one in set(threading.enumerate()) - before]
    assert sorted(started) == ["heliograph-kernel-1", "heliograph-kernel-1", "heliograph-kernel-2"]
    registry.close()
    assert set(threading.enumerate()) == before


def test_two_cpus_work_at_once_with_the_same_bits(two_cpus: list[CpuDevice]) -> None:
    """Each waits inside its work until the other one has begun."""
    made = Maker()
    x = made.input(np.random.default_rng(7).standard_normal((40, 50), dtype=np.float32))
    made.output(made.node("soft_max", made.node("gelu_erf", x)))
    begun = [threading.Event(), threading.Event()]
    results: dict[int, object] = {}

    def work(number: int) -> None:
        begun[number].set()
        assert begun[1 - number].wait(SECONDS)
        results[number] = run(two_cpus[number], made)[0].tobytes()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert results[0] == results[1]


def test_more_threads_than_any_machine_has_are_refused_before_any_starts() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError, match="0 to 4096"):
        open_registry(["cpu:threads=1", "cpu:threads=1000000"])
    assert threading.active_count() == before


def test_the_registry_imports_no_grpc() -> None:
    code = (
        "import sys; from heliograph_backends.registry import open_registry\n"
        "open_registry(['fake']).close(); print('grpc' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("False\n", "")
