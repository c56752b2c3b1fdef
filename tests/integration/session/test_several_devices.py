"""Several devices with memories of their own: paths of copies, parts of lists, and work that is held up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry

X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture
def devices() -> tuple[FakeDevice, FakeDevice]:
    """One in host memory, of another buffer type too; one with memory that nobody else may touch."""
    host = FakeDevice("host", 2**20, max_size=4096, extra=1)
    return host, FakeDevice("far", 2**20, alignment=256, is_host=False)


@pytest.fixture
def session(devices: tuple[FakeDevice, FakeDevice], monkeypatch: pytest.MonkeyPatch) -> Iterator[hg.Session]:
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*devices))
    with hg.connect("local:") as made:
        yield made


def plus(number: float) -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (4, 3), "f32") + number)
    return g


def doubled() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (4, 3), "f32") * g.bound_weight("w", (4, 3), "f32"))
    return g


@pytest.mark.parametrize(
    ("kinds", "best"),
    [
        ("CPU INTEGRATED_GPU GPU GPU", "D2"),
        ("ACCELERATOR CPU INTEGRATED_GPU", "D2"),
        ("ACCELERATOR CPU", "D1"),
        ("ACCELERATOR", "D0"),
    ],
)
def test_the_best_device_is_a_gpu(monkeypatch: pytest.MonkeyPatch, kinds: str, best: str) -> None:
    made = [FakeDevice(f"D{number}") for number, _ in enumerate(kinds.split())]
    for device, kind in zip(made, kinds.split(), strict=True):
        device.type = hg.DeviceType[kind]
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*made))
    with hg.connect("local:") as session:
        assert session.best_device().name == best
        for kind in hg.DeviceType:
            expected = [one.name for one in made if one.type is kind]
            assert [one.name for one in session.devices_of(kind)] == expected
        assert session.device("d0").name == "D0"


def test_a_copy_tells_who_made_it(session: hg.Session) -> None:
    here, there, back = (session.empty((4, 3), "f32", name) for name in ("host", "far", "host"))
    here.set(X)
    assert here.copy_and_wait(there) is hg.CopyPath.DESTINATION
    assert there.copy_and_wait(back) is hg.CopyPath.SOURCE
    assert np.array_equal(back.get(), X)


def test_buffer_types_are_those_of_their_device(session: hg.Session) -> None:
    host, far = session.device("host"), session.device("far")
    assert [one.name for one in host.buffer_types] == ["host", "host_extra0"]
    assert [one.alignment_bytes for one in far.buffer_types] == [256]
    assert session.buffer(64, "host", buffer_type="host_extra0").buffer_type == "host_extra0"
    with pytest.raises(hg.InvalidArgumentError, match="no buffer type 'host_extra0'"):
        session.buffer(64, "far", buffer_type="host_extra0")
    with pytest.raises(hg.InvalidArgumentError, match="not a multiple of 256"):
        session.buffer(1024, "far").place((4,), "f32", 64)


def test_a_list_larger_than_a_buffer_has_several_parts(session: hg.Session) -> None:
    tensors = session.empty_many([((1024,), "u8")] * 10)
    (buffer,) = {one.buffer for one in tensors}
    assert session.devices[0].placement([((1024,), "u8")] * 10).buffer_bytes == (4096, 4096, 2048)
    for number, one in enumerate(tensors):
        one.memset(number)
    assert [int(one.get()[-1]) for one in tensors] == list(range(10))
    buffer.clear(7)
    assert {int(one.get()[0]) for one in tensors} == {7}
    with pytest.raises(hg.InvalidArgumentError, match="several parts"):
        buffer.place((4,), "u8").get()
    with pytest.raises(hg.OutOfMemoryError):
        session.devices[0].placement([((4097,), "u8")])


def test_an_allocation_that_fails_poisons_the_whole_list(
    session: hg.Session, devices: tuple[FakeDevice, FakeDevice]
) -> None:
    devices[0].script.fail("allocate", hg.OutOfMemoryError("the memory is elsewhere"))
    one, two = session.empty_many([((4,), "f32"), ((4,), "f32")])
    for tensor in (one, two):
        with pytest.raises(hg.OutOfMemoryError, match="the memory is elsewhere"):
            tensor.get()
    with pytest.raises(hg.OutOfMemoryError, match="the memory is elsewhere"):
        one.buffer.place((4,), "f32").get()
    session.synchronize(timeout=10)


def test_memory_of_this_process_is_no_memory_of_a_far_device(session: hg.Session) -> None:
    with pytest.raises(hg.UnsupportedError, match=r"far cannot use host memory in place(.|\n)*session\.put"):
        session.wrap(hg.aligned_empty(4, "f32"), "far")


def test_a_weight_lies_where_the_plan_runs(session: hg.Session) -> None:
    w = session.put(np.full((4, 3), 2, np.float32), "host")
    assert np.array_equal(session.compile(doubled(), "host", weights={"w": w}).run(x=X)["y"], X * 2)
    with pytest.raises(hg.UnsupportedError, match="copy it"):
        session.compile(doubled(), "far", weights={"w": w})
    moved = session.empty(w.shape, w.dtype, "far", usage="weights")
    w.copy_to(moved)
    assert np.array_equal(session.compile(doubled(), "far", weights={"w": moved}).run(x=X)["y"], X * 2)


def test_an_output_goes_to_a_tensor_of_another_device(session: hg.Session) -> None:
    plan, t = session.compile(plus(1.0), "far"), session.empty((4, 3), "f32", "host")
    assert plan.run(x=X, out={"y": t})["y"] is t and np.array_equal(t.get(), X + 1)


def test_compiling_waits_for_what_writes_its_weights(
    session: hg.Session, devices: tuple[FakeDevice, FakeDevice]
) -> None:
    plan, w = session.compile(plus(0.0)), session.empty((4, 3), "f32")
    gate = devices[0].script.hold("compute")
    plan.submit(x=np.full((4, 3), 2, np.float32), out={"y": w})
    assert gate.entered.wait(10)
    with pytest.raises(hg.DeadlineExceededError, match="compiling"):
        session.compile(doubled(), weights={"w": w}, timeout=0.05)
    gate.open()
    assert np.array_equal(session.compile(doubled(), weights={"w": w}).run(x=X)["y"], X * 2)


def test_an_update_that_nobody_waited_for_frees_the_plan(
    session: hg.Session, devices: tuple[FakeDevice, FakeDevice]
) -> None:
    plan, running = session.compile(plus(1.0)), devices[0].script.hold("compute")
    # Memory in use is not taken over: the other graph is compiled anew.
    future, compiling = plan.submit(x=X), devices[0].script.hold("compile")
    with pytest.raises(hg.DeadlineExceededError, match=r"updating the plan(.|\n)*freed: compile it again"):
        plan.update(plus(2.0), timeout=1.0)
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        plan.run(x=X)
    compiling.open()
    running.open()
    assert np.array_equal(future.result(timeout=10)["y"], X + 1)
    assert np.array_equal(session.compute(plus(3.0), x=X)["y"], X + 3)


def test_an_update_that_fails_changes_nothing(
    session: hg.Session, devices: tuple[FakeDevice, FakeDevice]
) -> None:
    plan, running = session.compile(plus(1.0)), devices[0].script.hold("compute")
    future = plan.submit(x=X)
    devices[0].script.fail("compile", hg.OutOfMemoryError("no room for that"))
    with pytest.raises(hg.OutOfMemoryError, match="no room for that"):
        plan.update(plus(2.0))
    running.open()
    assert np.array_equal(future.result(timeout=10)["y"], X + 1)
    assert np.array_equal(plan.run(x=X)["y"], X + 1)


def test_computing_once_is_late_as_a_whole(
    session: hg.Session, devices: tuple[FakeDevice, FakeDevice]
) -> None:
    gate = devices[0].script.hold("compute")
    with pytest.raises(hg.DeadlineExceededError, match=r"computing <Graph(.|\n)*within 0\.3 s"):
        session.compute(plus(1.0), x=X, timeout=0.3)
    gate.open()
    session.synchronize(timeout=10)
