"""The protocol of a session, without devices: what is freed, and when."""

from __future__ import annotations

import protocol_script
from protocol_script import PLAN, STREAM, Script, T

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    InvalidArgumentError,
    UnknownHandleError,
)
from heliograph_server.resources.handles import (
    PlanHandle,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.session.protocol import instructions

script = protocol_script.script


def test_a_freed_handle_is_unknown_at_once(script: Script) -> None:
    script.tensor(1)
    script.send(c.Free((1,)))
    use = script.read(1)
    script.run_all()
    assert isinstance(script.done[use], UnknownHandleError)


def test_a_tensor_that_is_freed_while_a_run_uses_it_stays_until_the_run_is_done(script: Script) -> None:
    script.tensor(1)
    script.run_all()
    script.run(1)
    free = script.send(c.Free((1,)))
    assert script.released == [] and free not in script.done
    script.run_all()
    assert len(script.released) == 1 and script.done[free] is None


def test_a_view_keeps_the_bytes_of_its_source(script: Script) -> None:
    script.tensor(1)
    script.send(c.View(2, 1, 0, T))
    script.send(c.Free((1,)))
    use = script.read(2)
    script.run_all()
    assert script.done[use] is None and script.released == []
    script.send(c.Free((2,)))
    assert len(script.released) == 1


def test_freeing_an_unknown_handle_frees_the_others(script: Script) -> None:
    script.tensor(1)
    free = script.send(c.Free((9, 1)))
    script.run_all()
    assert isinstance(script.done[free], UnknownHandleError) and len(script.released) == 1


def test_a_freed_number_can_be_used_again_at_once(script: Script) -> None:
    script.tensor(1)
    script.send(c.Free((1,)))
    again = script.tensor(1)
    script.run_all()
    assert script.done[again] is None


def test_a_plan_is_released_when_its_last_run_is_done(script: Script) -> None:
    script.run()
    script.send(c.Free((PLAN,)))
    assert not any(isinstance(one, instructions.ReleasePlan) for one in script.other)
    script.run_all()
    assert any(isinstance(one, instructions.ReleasePlan) for one in script.other)


def test_a_free_is_not_cancelled(script: Script) -> None:
    script.tensor(1)
    free = script.send(c.Free((1,)))
    script.send(c.Cancel(free))
    script.run_all()
    assert script.done[free] is None and len(script.released) == 1


def test_a_variable_cannot_be_freed(script: Script) -> None:
    number = script.core.plans.add_variable("v", T, "a", object())
    assert isinstance(script.done[script.send(c.Free((number,)))], InvalidArgumentError)


def test_counts_are_those_of_the_table(script: Script) -> None:
    script.tensor(1)
    script.send(c.CreateStream(STREAM))
    count = script.core.handles.count
    assert (count(TensorHandle), count(PlanHandle), count(StreamHandle)) == (1, 1, 1)
