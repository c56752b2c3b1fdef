"""Tensors that are weights of plans: a write changes what the next run reads, however it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from forked_daemons import running_daemon

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry

Array: TypeAlias = np.ndarray[Any, Any]
SHAPE = (48, 40)
RANDOM = np.random.default_rng(8)
X = RANDOM.standard_normal((5, 48)).astype(np.float32)
FIRST, SECOND = (RANDOM.standard_normal(SHAPE).astype(np.float32) for _ in range(2))
CPU = "--device", "cpu:threads=1"


def product() -> hg.Graph:
    """Both a product, whose weight the CPU packs, and an elementwise op."""
    g = hg.Graph()
    w = g.bound_weight("w", SHAPE, "f32")
    g.output("y", g.input("x", X.shape, "f32") @ w)
    g.output("sum", w + 1)
    return g


def check(plan: hg.Plan, w: Array) -> None:
    found = plan.run(x=X)
    assert np.allclose(found["y"], X @ w, atol=1e-4)
    assert np.array_equal(found["sum"], w + 1)


def changed_row(session: hg.Session, tensor: hg.Tensor, w: Array) -> Array:
    tensor[7:8].set(SECOND[:1])
    return np.concatenate([w[:7], SECOND[:1], w[8:]])


def changed_column(session: hg.Session, tensor: hg.Tensor, w: Array) -> Array:
    tensor[:, :1].set(SECOND[:, :1])
    return np.concatenate([SECOND[:, :1], w[:, 1:]], 1)


def set_whole(session: hg.Session, tensor: hg.Tensor, w: Array) -> Array:
    tensor.set(SECOND)
    return SECOND


def filled(session: hg.Session, tensor: hg.Tensor, w: Array) -> Array:
    tensor.memset(0)
    return np.zeros_like(w)


def copied(session: hg.Session, tensor: hg.Tensor, w: Array) -> Array:
    source = session.put(SECOND)
    source.copy_to(tensor)
    return SECOND


def given_by_a_run(session: hg.Session, tensor: hg.Tensor, w: Array) -> Array:
    g = hg.Graph()
    g.output("w", g.input("x", SHAPE, "f32") * 2)
    session.compile(g).submit(x=FIRST, out={"w": tensor})
    return FIRST * 2


WRITES = [set_whole, changed_row, changed_column, filled, copied, given_by_a_run]


@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
def test_the_next_run_reads_what_was_written(
    session: hg.Session, write: Callable[[hg.Session, hg.Tensor, Array], Array]
) -> None:
    tensor = session.put(FIRST)
    plan = session.compile(product(), weights={"w": tensor})
    check(plan, FIRST)
    expected = write(session, tensor, FIRST)
    check(plan, expected)
    assert np.array_equal(tensor.get(), expected)
    check(plan, set_whole(session, tensor, expected))


def only_product() -> hg.Graph:
    """A graph whose weight the CPU packs in place if the buffer is for weights."""
    g = hg.Graph()
    g.output("y", g.input("x", X.shape, "f32") @ g.bound_weight("w", SHAPE, "f32"))
    return g


def packed(session: hg.Session) -> tuple[hg.Tensor, hg.Plan]:
    """A tensor that is the packed weight of a plan."""
    tensor = session.buffer(FIRST.nbytes, usage="weights").place(SHAPE, "f32")
    tensor.set(FIRST)
    return tensor, session.compile(only_product(), weights={"w": tensor})


@pytest.mark.parametrize("is_read", [False, True], ids=["alone", "beside a reader"])
@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
def test_the_next_run_reads_what_was_written_to_a_packed_weight(
    session: hg.Session, write: Callable[[hg.Session, hg.Tensor, Array], Array], is_read: bool
) -> None:
    tensor, plan = packed(session)
    reader = session.compile(product(), weights={"w": tensor}) if is_read else None
    expected = write(session, tensor, FIRST)
    assert np.array_equal(tensor.get(), expected)
    assert np.allclose(plan.run(x=X)["y"], X @ expected, atol=1e-4)
    if reader is not None:
        check(reader, expected)


def doubling() -> hg.Graph:
    """A graph that doubles variable w."""
    g = hg.Graph()
    w = g.variable("w", SHAPE, "f32")
    hg.assign(w, w * 2)
    g.output("n", g.input("n", (), "f32"))
    return g


def test_a_plan_does_not_assign_the_packed_weight_of_another(session: hg.Session) -> None:
    tensor, plan = packed(session)
    with pytest.raises(hg.InvalidArgumentError, match="packed weight of another plan"):
        session.compile(doubling(), variables={"w": tensor})
    assert np.allclose(plan.run(x=X)["y"], X @ FIRST, atol=1e-4)
    plan.free()


def test_each_tensor_of_a_buffer_is_a_packed_weight_of_its_own(session: hg.Session) -> None:
    buffer = session.buffer(2 * FIRST.nbytes + 64, usage="weights")
    one, other = (buffer.place(SHAPE, "f32", offset_bytes=at) for at in (0, FIRST.nbytes + 64))
    one.set(FIRST)
    other.set(SECOND)
    plans = [session.compile(only_product(), weights={"w": each}) for each in (one, other)]
    changed = changed_row(session, other, SECOND)
    for plan, tensor, expected in zip(plans, (one, other), (FIRST, changed), strict=True):
        assert np.allclose(plan.run(x=X)["y"], X @ expected, atol=1e-4)
        assert np.array_equal(tensor.get(), expected)


def test_a_buffer_becomes_one_for_weights_beside_plans_that_read_it_as_it_is(session: hg.Session) -> None:
    buffer = session.buffer(FIRST.nbytes)
    tensor = buffer.place(SHAPE, "f32")
    tensor.set(FIRST)
    reader = session.compile(product(), weights={"w": tensor})
    for _ in range(2):
        buffer.set_usage("weights")
        plan = session.compile(only_product(), weights={"w": tensor})
        assert np.allclose(plan.run(x=X)["y"], X @ FIRST, atol=1e-4)
        check(reader, FIRST)
        reader.free()
        reader = session.compile(product(), weights={"w": tensor})
    check(reader, set_whole(session, tensor, FIRST))


def test_a_plan_reads_what_another_one_assigns_in_a_buffer_for_weights(session: hg.Session) -> None:
    tensor = session.buffer(FIRST.nbytes, usage="weights").place(SHAPE, "f32")
    tensor.set(FIRST)
    step = session.compile(doubling(), variables={"w": tensor})
    plan = session.compile(only_product(), weights={"w": tensor})
    for number in range(3):
        assert np.allclose(plan.run(x=X)["y"], X @ FIRST * 2**number, atol=1e-4)
        step.run(n=np.float32(0))


def test_all_plans_of_a_tensor_read_what_was_written(session: hg.Session) -> None:
    tensor = session.put(FIRST)
    plans = [session.compile(product(), weights={"w": tensor}, pipeline=count) for count in (1, 1, 3)]
    for w in (FIRST, SECOND, FIRST):
        tensor.set(w)
        for plan in plans:
            check(plan, w)
    plans.pop().free()
    tensor.set(SECOND)
    check(plans[0], SECOND)


def test_writes_and_runs_of_several_streams_keep_the_order_in_which_they_were_sent(
    session: hg.Session,
) -> None:
    tensor, streams = session.put(FIRST), [session.devices[0].stream() for _ in range(3)]
    plan = session.compile(product(), weights={"w": tensor}, pipeline=2)
    runs = []
    for step in range(12):
        tensor.set(FIRST * step, stream=streams[step % 3])
        runs += [plan.submit(x=X, stream=streams[turn % 3]) for turn in (step + 1, step + 2)]
    for number, run in enumerate(runs):
        assert np.allclose(run.result()["y"], X @ (FIRST * (number // 2)), atol=1e-3)


def test_a_buffer_is_cleared_under_a_weight(session: hg.Session) -> None:
    buffer = session.buffer(4 * FIRST.size)
    tensor = buffer.place(SHAPE, "f32")
    tensor.set(FIRST)
    plan = session.compile(product(), weights={"w": tensor})
    check(plan, FIRST)
    buffer.clear()
    check(plan, np.zeros_like(FIRST))


def test_a_variable_of_one_plan_is_the_weight_of_another(session: hg.Session) -> None:
    tensor = session.put(FIRST)
    g = hg.Graph()
    w = g.variable("w", SHAPE, "f32")
    hg.assign(w, w * 2)
    g.output("n", g.input("n", (), "f32"))
    step = session.compile(g, variables={"w": tensor})
    plan = session.compile(product(), weights={"w": tensor})
    for number in range(3):
        check(plan, FIRST * 2**number)
        step.run(n=np.float32(0))


def test_a_plan_does_not_assign_what_is_its_own_weight(session: hg.Session) -> None:
    tensor = session.put(FIRST)
    g = product()
    v = g.variable("v", SHAPE, "f32")
    hg.assign(v, v * 2)
    with pytest.raises(hg.InvalidArgumentError, match="assigns"):
        session.compile(g, weights={"w": tensor}, variables={"v": tensor})
    check(session.compile(product(), weights={"w": tensor}), FIRST)


def test_a_write_that_fails_is_told_by_the_next_run(session: hg.Session) -> None:
    tensor = session.put(FIRST)
    plan = session.compile(product(), weights={"w": tensor})
    never = session.compile(product(), weights={"w": session.put(FIRST)})
    g = hg.Graph()
    table = g.input("table", (2, *SHAPE), "f32")
    row = hg.ops.get_rows(table.reshape((2, 48 * 40)), g.input("row", (1,), "i32"))
    g.output("w", row.reshape(SHAPE))
    outside = session.compile(g).submit(
        table=np.zeros((2, *SHAPE), np.float32), row=np.array([5], np.int32), out={"w": tensor}
    )
    with pytest.raises(hg.OutOfRangeError):
        outside.result()
    with pytest.raises(hg.OutOfRangeError):
        plan.run(x=X)
    check(never, FIRST)
    check(plan, set_whole(session, tensor, FIRST))


def test_a_plan_over_two_devices_reads_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = FakeDevice("near", 2**24), FakeDevice("far", 2**24, is_host=False)
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*devices))
    with hg.connect("local:") as session:
        g = hg.Graph()
        w = g.bound_weight("w", SHAPE, "f32")
        g.output("y", g.input("x", X.shape, "f32") @ w)
        with g.scope("after"):
            total = w + 1
        g.output("sum", total)
        tensor = session.put(FIRST, device="near")
        plan = session.compile(g, ["near", "far"], weights={"w": tensor}, pins={"after/*": "far"})
        for expected in (FIRST, SECOND):
            tensor.set(expected)
            check(plan, expected)


@pytest.mark.parametrize("spread", [False, True], ids=["one member", "both members"])
def test_plans_of_a_pool_read_what_was_written(spread: bool) -> None:
    with running_daemon(*CPU) as one, running_daemon(*CPU) as other, hg.connect([one, other]) as session:
        names = [device.name for device in session.devices][-2:]
        g = hg.Graph()
        w = g.bound_weight("w", SHAPE, "f32")
        g.output("y", g.input("x", X.shape, "f32") @ w)
        with g.scope("after"):
            total = w + 1
        g.output("sum", total)
        tensor = session.put(FIRST, device=names[0])
        pins = {"after/*": names[1]} if spread else None
        plan = session.compile(g, names if spread else names[0], weights={"w": tensor}, pins=pins)
        for expected in (FIRST, SECOND, FIRST):
            tensor.set(expected)
            check(plan, expected)
