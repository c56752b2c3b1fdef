"""A device that is lost while the daemon serves: what lay there is missing, and nothing is put there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from content_clients import ALICE, content
from lost_graphs import accumulating, scaled

from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import DeviceLostError, MissingContentError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import CompileRequest, PlanOptions
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.listing import describe
from heliograph_server.session.session import Session

WEIGHT = content(1)


class Served:
    """A session on two devices of which one will be lost."""

    def __init__(self) -> None:
        self.devices = [FakeDevice("fake0", 2**22), FakeDevice("fake1", 2**22)]
        self.host = Host(Registry.of(*self.devices))
        opened = self.host.open_session("test", secret=ALICE).session
        self.session: Session = self.host.session(opened)
        self.session.attach(lambda batch: None)
        self._plans = 0

    def upload(self, data: bytes) -> None:
        upload = self.session.begin_upload(digest_of(data), len(data), 0)
        upload.write(0, data)
        upload.finish()

    def compile(self, graph: Graph, device: str, *, renews_lost: bool = False) -> int:
        self._plans += 1
        options = PlanOptions((device,))
        request = CompileRequest(self._plans, graph, options, renews_lost=renews_lost)
        found = self.session.compile(request)
        return found.variables[0].tensor if found.variables else 0


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.host.close()
    assert all(device.memory().free_bytes == 2**22 for device in made.devices)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice()
    yield made
    made.close()


def test_a_device_that_never_is_lost_says_so(device: FakeDevice) -> None:
    assert device.lost is None


def test_a_content_on_a_lost_device_is_missing_and_comes_again_to_another(served: Served) -> None:
    served.upload(WEIGHT)
    served.compile(scaled(WEIGHT), "fake0")
    served.devices[0].script.lose()
    digest = digest_of(WEIGHT)
    assert served.session.missing_contents([digest]) == (digest,)
    with pytest.raises(MissingContentError):
        served.compile(scaled(WEIGHT), "fake1")
    served.upload(WEIGHT)
    served.compile(scaled(WEIGHT), "fake1")


def test_a_lost_device_takes_no_plan_and_no_content(served: Served) -> None:
    served.devices[0].script.lose("it fell off the bus")
    with pytest.raises(DeviceLostError, match="fell off the bus"):
        served.compile(scaled(WEIGHT), "fake0")
    served.upload(WEIGHT)
    assert served.session.missing_contents([digest_of(WEIGHT)]) == ()


def test_a_plan_that_is_compiled_again_is_not_the_one_on_a_lost_device(served: Served) -> None:
    served.compile(accumulating(), "fake0")
    served.devices[0].script.lose()
    with pytest.raises(DeviceLostError):
        served.compile(accumulating(), "fake0")


def test_a_variable_on_a_lost_device_begins_anew_for_who_asks_for_it_alone(served: Served) -> None:
    before = served.compile(accumulating(), "fake0")
    served.devices[0].script.lose()
    with pytest.raises(DeviceLostError, match=r"'total'.*gone") as refusal:
        served.compile(accumulating(), "fake1")
    assert "checkpoint" in refusal.value.advice
    after = served.compile(accumulating(), "fake1", renews_lost=True)
    assert after != before
    assert served.compile(accumulating(), "fake1") == after


def test_the_list_of_devices_says_which_is_lost(served: Served) -> None:
    served.devices[1].script.lose("somebody pulled it")
    first, second = describe(served.devices, MemoryReclaim())
    assert not first.lost and "somebody pulled it" in second.lost
    assert second.memory.free_bytes == 0


def test_everything_on_a_lost_device_ends_with_its_error(device: FakeDevice) -> None:
    buffer = device.buffer_type.allocate(64)
    device.script.lose("gone")
    space = memoryview(bytearray(64))
    for work in (
        lambda: device.buffer_type.allocate(64),
        lambda: buffer.set(0, space),
        lambda: buffer.get(0, space),
        lambda: buffer.memset(0, 64, 0),
    ):
        with pytest.raises(DeviceLostError, match="gone"):
            work()
    buffer.free()


def test_what_waits_at_a_gate_learns_that_the_device_is_lost(device: FakeDevice) -> None:
    gate = device.script.hold("allocate")
    device.script.lose("gone")
    with pytest.raises(DeviceLostError, match="gone"):
        device.buffer_type.allocate(64)
    assert gate.opened.is_set()
