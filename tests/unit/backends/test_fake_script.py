"""Scripts of the fake device: work that is held, fails, or takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker, nothing_left, place, run

from heliograph_backends.contract import Abort, access
from heliograph_backends.fake import FakeDevice
from heliograph_proto.errors import CancelledError, ComputeFailedError

SECONDS = 20.0


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    with nothing_left(FakeDevice(memory_bytes=2**20)) as made:
        assert isinstance(made, FakeDevice)
        yield made


def test_held_work_waits_at_its_gate_until_the_test_opens_it(fake: FakeDevice) -> None:
    tensor, stream = place(fake, np.zeros(4, np.float32)), fake.stream()
    done: list[BaseException | None] = []
    gate = fake.script.hold("set")
    stream.submit(lambda: access.write(tensor, 0, memoryview(b"abcd")), done.append)
    assert gate.entered.wait(SECONDS)
    assert done == []
    gate.open()
    stream.synchronize(SECONDS)
    assert done == [None]
    stream.close()
    tensor.buffer.free()


@pytest.mark.parametrize("work", ["allocate", "set", "get", "compile", "compute"])
def test_a_script_fails_the_next_such_work_alone(work: Any, fake: FakeDevice) -> None:
    made = Maker()
    made.output(made.node("neg", made.input(np.ones(4, np.float32))))
    tensor = place(fake, np.zeros(4, np.float32))
    doing = {
        "allocate": lambda: fake.buffer_type.allocate(4).free(),
        "set": lambda: access.write(tensor, 0, memoryview(b"abcd")),
        "get": lambda: access.read(tensor, 0, memoryview(bytearray(4))),
        "compile": lambda: fake.script.pass_("compile"),
        "compute": lambda: fake.script.pass_("compute"),
    }[work]
    fake.script.fail(work, ComputeFailedError("as scripted"))
    with pytest.raises(ComputeFailedError, match="as scripted"):
        doing()
    doing()
    assert run(fake, made)[0].tolist() == [-1] * 4
    tensor.buffer.free()


def test_scripted_work_happens_in_the_order_of_the_script(fake: FakeDevice) -> None:
    fake.script.fail("compute", ComputeFailedError("first"))
    fake.script.hold("compute").open()
    fake.script.fail("compute", ComputeFailedError("third"))
    with pytest.raises(ComputeFailedError, match="first"):
        fake.script.pass_("compute")
    fake.script.pass_("compute")
    with pytest.raises(ComputeFailedError, match="third"):
        fake.script.pass_("compute")


def test_a_delay_ends_early_when_the_run_is_aborted(fake: FakeDevice) -> None:
    fake.script.delay("compute", 60)
    abort = Abort()
    abort.set()
    with pytest.raises(CancelledError):
        fake.script.pass_("compute", abort)


def test_a_delay_passes_by_itself(fake: FakeDevice) -> None:
    fake.script.delay("compute", 0.001)
    fake.script.pass_("compute", Abort())
