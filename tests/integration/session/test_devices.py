"""What devices say of themselves, and what they answer, over every transport."""

from __future__ import annotations

import numpy as np
import pytest

import heliograph as hg

SQUARE = hg.TensorType(hg.Graph().input("x", (4, 4), "f32").dtype, (4, 4))


def test_a_device_says_what_it_is(session: hg.Session) -> None:
    device = session.devices[0]
    (memory, *_) = device.buffer_types
    assert device.type is hg.DeviceType.CPU and isinstance(device.id, str)
    assert memory.is_host and memory.alignment_bytes >= 64 and device.name in memory.readable_by
    assert int(device.features["threads"]) >= 1 and all(device.missing.values())


def test_a_device_offers_host_memory_exactly_where_an_array_can_be_wrapped(session: hg.Session) -> None:
    for device in session.devices:
        array = hg.aligned_empty((16,), "f32")
        array[:] = 3.0
        if device.capabilities.buffer_from_host:
            assert session.wrap(array, device).get().tolist() == [3.0] * 16
        else:
            with pytest.raises(hg.UnsupportedError):
                session.wrap(array, device)
    assert session.devices[0].capabilities.buffer_from_host == session.address.startswith("local:")


def test_an_event_that_was_never_recorded_counts_as_reached(session: hg.Session) -> None:
    event, stream = session.event(), session.stream()
    stream.wait(event)
    event.result(timeout=10)
    stream.synchronize(timeout=10)
    assert event.done() and "reached" in repr(event)
    event.free()
    session.synchronize(timeout=10)


def test_recording_an_event_again_moves_its_mark(session: hg.Session) -> None:
    first, second = session.stream(), session.stream()
    event = session.event()
    x = session.empty((64,), "f32")
    for value in (1, 2):
        x.set(np.full(64, value, np.float32), stream=first)
        assert first.record(event) is event
        second.wait(event)
        event.result(timeout=10)
        assert event.done() and x.get()[0] == value
    assert second.record(event) is event
    event.result(timeout=10)
    event.free()
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        first.record(event)
    with pytest.raises(hg.InvalidArgumentError, match=r"session\.event\(\)"):
        first.record("event")  # type: ignore[arg-type]
    session.synchronize(timeout=10)


def test_devices_are_found_by_name_and_kind(session: hg.Session) -> None:
    first = session.devices[0]
    assert session.device(first.name.upper()).name == session.device(first.name).name == first.name
    assert [one.name for one in session.devices_of(hg.DeviceType.CPU)][0] == first.name
    assert session.devices_of(hg.DeviceType.GPU) == [] and session.best_device().name == first.name
    for wrong in ("gpu7", "", 5):
        with pytest.raises(hg.UnknownDeviceError, match=f"there are: {first.name}"):
            session.device(wrong)


def test_backends_say_where_they_come_from(session: hg.Session) -> None:
    found = {one.name: one for one in session.backends(timeout=10)}
    assert session.devices[0].name in found["cpu"].devices and found["cpu"].origin == "built in"


def test_a_device_is_asked_about_nodes(session: hg.Session) -> None:
    device = session.devices[0]
    product = hg.OpQuery("mul_mat", (SQUARE, SQUARE), SQUARE)
    answers = device.query([hg.OpQuery("add", (SQUARE, SQUARE), SQUARE), product], timeout=10)
    assert [(one.why_not, one.offload) for one in answers] == [("", False)] * 2
    assert device.query([]) == ()
    with pytest.raises(hg.UnknownOpError):
        device.query([hg.OpQuery("fly", (SQUARE,), SQUARE)])
    with pytest.raises(hg.InvalidGraphError):
        device.query([hg.OpQuery("add", (SQUARE,), SQUARE)])
    with pytest.raises(hg.InvalidArgumentError, match=r"gives f32\[4, 4\] here, not f32\[\]"):
        device.query([hg.OpQuery("add", (SQUARE, SQUARE), hg.TensorType(SQUARE.dtype))])
    with pytest.raises(hg.InvalidArgumentError, match="is not a query"):
        device.query(["add"])


def test_a_device_names_the_nodes_that_it_cannot_run(session: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (4, 4), "f32")
    for _ in range(50):
        x = hg.relu(x @ g.constant(np.eye(4, dtype=np.float32))) + 1.0
    g.output("y", x)
    assert session.devices[0].unsupported(g, timeout=30) == []
    assert session.devices[0].unsupported(hg.Graph()) == []
    with pytest.raises(hg.InvalidArgumentError, match="is not a graph"):
        session.devices[0].unsupported(x)


def test_a_device_tells_what_tensors_would_take(session: hg.Session) -> None:
    device = session.devices[0]
    alignment = device.buffer_types[0].alignment_bytes
    found = device.placement([((4, 3), "f32"), (5, "u8"), ((2, 64), "q4_0")], timeout=10)
    assert found.tensor_bytes == (48, 5, 72) and found.buffer_bytes == (2 * alignment + 72,)
    for one in (device.buffer_types[0], device.buffer_types[0].name):
        assert device.placement([], buffer_type=one).tensor_bytes == ()
    with pytest.raises(hg.InvalidArgumentError, match="no buffer type 'other'"):
        device.placement([], buffer_type="other")
    with pytest.raises(hg.LimitExceededError):
        device.placement([((1,), "u8")] * (session.info.limits.tensors + 1))
