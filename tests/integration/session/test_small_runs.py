"""Runs that are one small message each way: hundreds in flight, in order, with failures and cancels.

They take a shorter way than others, so what is tested here is that nobody can tell: values, order, errors,
cancelling, deadlines and what ends the session are those of every run.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from daemon_urls import DaemonUrls

import heliograph as hg
from heliograph.core.future import Outcome
from heliograph.core.protocol import ClientCore
from heliograph_backends.contract import Usage
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.host_memory.order import Bytes
from heliograph_backends.registry import Registry
from heliograph_proto import commands as c
from heliograph_proto.codec import decode_completions
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun, RunForm
from heliograph_proto.eager import begin
from heliograph_proto.errors import ComputeFailedError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import CompileRequest
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import command_pb2
from heliograph_server.resources.handles import TensorHandle
from heliograph_server.rpc.completion_writer import LATE_COMMANDS, CompletionWriter
from heliograph_server.runtime.host import Host, HostStatistics
from heliograph_server.session.session import Session

SECONDS = 20.0
MANY = 600
TABLE = np.arange(8, dtype=np.float32).reshape(4, 2)


def rows() -> hg.Graph:
    """Rows of a table by index: one outside fails the run that asks for it."""
    g = hg.Graph()
    g.output("y", hg.ops.get_rows(g.weight("table", TABLE), g.input("i", (1,), "i32")))
    return g


def index(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([number], np.int32)


def wide() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    g.output("sum", x + g.input("z", (), "f32"))
    g.output("flag", x > 0.0)
    return g


# What a client sees


def test_hundreds_in_flight_come_back_in_order_with_a_failure_in_the_middle(session: hg.Session) -> None:
    plan, ended = session.compile(rows()), list[int]()
    bad = MANY // 2
    runs = [plan.submit(i=index(9 if number == bad else number % 4)) for number in range(MANY)]
    for number, run in enumerate(runs):
        run.add_done_callback(lambda _, number=number: ended.append(number))
    for number, run in enumerate(runs):
        if number == bad:
            with pytest.raises(hg.OutOfRangeError, match="9 is not one of 4 rows") as failure:
                run.result(SECONDS)
            assert (
                failure.value.origin.op == "get_rows" and "test_small_runs.py" in failure.value.origin.source
            )
            assert isinstance(run.exception(), hg.OutOfRangeError) and run.steps is None
        else:
            assert np.array_equal(run.result(SECONDS)["y"], TABLE[[number % 4]]) and run.steps == 1
    assert ended == sorted(ended)
    # Whoever looked has seen it, so nothing is left to be raised.
    session.synchronize(SECONDS)


def test_the_same_for_asyncio(daemon: DaemonUrls) -> None:
    async def main() -> None:
        async with hg.aio.connect(daemon.tcp) as session:
            plan, ended = await session.compile(rows()), list[int]()
            bad = MANY // 2
            runs = [plan.submit(i=index(9 if number == bad else number % 4)) for number in range(MANY)]
            assert len(asyncio.all_tasks()) < 10, "a task for each run"
            for number, run in enumerate(runs):
                run.add_done_callback(lambda _, number=number: ended.append(number))
            for number, run in enumerate(runs):
                if number == bad:
                    assert isinstance(await run.exception(SECONDS), hg.OutOfRangeError)
                    assert run.steps is None
                else:
                    assert np.array_equal((await run)["y"], TABLE[[number % 4]]) and run.steps == 1
            assert ended == sorted(ended)

    asyncio.run(main(), debug=True)


def test_no_thread_is_made_for_runs_in_flight(daemon: DaemonUrls) -> None:
    with hg.connect(daemon.tcp) as session:
        plan = session.compile(rows())
        plan.run(i=index(0))
        before = threading.active_count()
        runs = [plan.submit(i=index(1)) for _ in range(MANY)]
        assert threading.active_count() <= before
        assert all(run.exception(SECONDS) is None for run in runs)


def test_a_callback_may_submit_the_next_run_without_end(session: hg.Session) -> None:
    """However short the runs are, callbacks do not call one another."""
    g = hg.Graph()
    g.output("y", g.input("x", (4,), "f32") + 1)
    plan, x = session.compile(g), np.zeros(4, np.float32)
    numbers, done = iter(range(3000)), threading.Event()

    def again(_: object) -> None:
        if next(numbers, None) is None:
            done.set()
        else:
            plan.submit(x=x).add_done_callback(again)

    again(None)
    assert done.wait(60)
    assert (plan.run(x=x)["y"] == 1).all()


def test_what_waits_behind_a_run_that_pauses_can_be_cancelled(session: hg.Session) -> None:
    plan = session.compile(rows())
    expected = plan.run(i=index(2))["y"]
    paused = plan.submit(i=index(1), taps="*", pause=True)
    taps = paused.taps(SECONDS)
    next(taps)
    runs = [plan.submit(i=index(2)) for _ in range(50)]
    assert runs[20].cancel() and not any(run.done() for run in runs[:20])
    with pytest.raises(hg.CancelledError, match="was cancelled"):
        runs[20].result(SECONDS)
    assert paused.exception(SECONDS) is None
    for run in (*runs[:20], *runs[21:]):
        assert np.array_equal(run.result(SECONDS)["y"], expected)
    assert not runs[0].cancel()


def test_waiting_that_ends_too_early_says_so_and_the_run_goes_on(session: hg.Session) -> None:
    plan = session.compile(rows())
    plan.run(i=index(0))
    paused = plan.submit(i=index(1), taps="*", pause=True)
    taps = paused.taps(SECONDS)
    next(taps)
    run = plan.submit(i=index(2))
    with pytest.raises(hg.DeadlineExceededError, match="the run of the plan"):
        run.result(timeout=0.01)
    with pytest.raises(hg.DeadlineExceededError):
        run.exception(timeout=0)
    assert not run.done()
    assert paused.exception(SECONDS) is None
    assert np.array_equal(run.result(SECONDS)["y"], TABLE[[2]])
    with pytest.raises(hg.InvalidArgumentError, match="nothing of this run|observed|taps"):
        run.taps()


def test_a_run_that_takes_too_long_is_cancelled(session: hg.Session) -> None:
    plan = session.compile(rows())
    for timeout in (SECONDS, SECONDS, 5, None):
        assert np.array_equal(plan.run(i=index(3), timeout=timeout)["y"], TABLE[[3]])
    paused = plan.submit(i=index(1), taps="*", pause=True)
    taps = paused.taps(SECONDS)
    next(taps)
    with pytest.raises(hg.DeadlineExceededError, match="the run of the plan .* within 0.02 s"):
        plan.run(i=index(3), timeout=0.02)
    late = plan.submit(i=index(3), timeout=0.02)
    with pytest.raises(hg.DeadlineExceededError, match="the run of the plan .* within 0.02 s"):
        late.result(SECONDS)
    assert not paused.done() and paused.exception(SECONDS) is None
    with pytest.raises(hg.InvalidArgumentError, match="timeout"):
        plan.run(i=index(3), timeout=-1)


def test_a_task_that_is_cancelled_cancels_its_run(daemon: DaemonUrls) -> None:
    async def main() -> None:
        async with hg.aio.connect(daemon.tcp) as session:
            plan = await session.compile(rows())
            await plan.run(i=index(0))
            paused = plan.submit(i=index(1), taps="*", pause=True)
            taps = paused.taps(SECONDS)
            await anext(taps)
            behind = plan.submit(i=index(1))
            waiting = asyncio.ensure_future(behind.result())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert isinstance(await behind.exception(SECONDS), hg.CancelledError)
            assert await paused.exception(SECONDS) is None

    asyncio.run(main(), debug=True)


def test_results_are_the_callers_own_and_the_same_each_time(session: hg.Session) -> None:
    plan = session.compile(wide())
    x = np.array([-1, 0, 1, 2], np.float32)
    for _ in range(3):
        given = x.copy()
        run = plan.submit({"x": given, "z": np.array(0.5, np.float32)})
        given[:] = 77
        first = run.result(SECONDS)
        assert np.array_equal(first["sum"], x + 0.5) and first["flag"].tolist() == [False, False, True, True]
        first["sum"][0] = 5
        assert run.result()["sum"] is first["sum"] and run.done()
        assert first["sum"].flags.owndata and first["sum"].flags.writeable
    del run
    gc.collect()
    assert np.array_equal(plan.run(x=x, z=np.array(1, np.float32))["sum"], x + 1)


def test_other_arguments_mean_what_they_always_did(session: hg.Session) -> None:
    plan, x = session.compile(wide()), np.ones(4, np.float32)
    expected = plan.run(x=x, z=np.array(1, np.float32))["sum"]
    for given in (
        {"x": [1, 1, 1, 1], "z": 1},
        {"x": np.ones(8, np.float32)[::2], "z": np.float32(1)},
        {"x": x[::-1], "z": np.array(1, np.float32)},
    ):
        assert np.array_equal(plan.run(given)["sum"], expected)
        assert np.array_equal(plan.run(**given, timeout=SECONDS, fetch=["sum"])["sum"], expected)
    with pytest.raises(hg.InvalidInputError, match="f16"):
        plan.run(x=x.astype(np.float16), z=np.array(1, np.float32))
    with pytest.raises(hg.InvalidInputError, match="missing"):
        plan.run(x=x)
    with pytest.raises(hg.InvalidInputError, match="shape"):
        plan.run(x=x.reshape(2, 2), z=np.array(1, np.float32))
    plan.free()
    with pytest.raises(hg.UnknownHandleError, match="freed"):
        plan.run(x=x, z=np.array(1, np.float32))


def test_a_run_sent_before_its_plan_is_freed_or_updated_is_the_old_plans(session: hg.Session) -> None:
    g = hg.Graph()
    g.output("y", g.input("i", (1,), "i32") + 1)
    plan = session.compile(rows())
    before = [plan.submit(i=index(3)) for _ in range(20)]
    plan.update(g)
    after = [plan.submit(i=index(3)) for _ in range(20)]
    plan.free()
    assert all(np.array_equal(run.result(SECONDS)["y"], TABLE[[3]]) for run in before)
    assert all(run.result(SECONDS)["y"].tolist() == [4] for run in after)


def test_closing_the_session_ends_what_waits(daemon: DaemonUrls) -> None:
    session = hg.connect(daemon.tcp)
    plan = session.compile(rows())
    paused = plan.submit(i=index(1), taps="*", pause=True)
    taps = paused.taps(SECONDS)
    next(taps)
    runs = [plan.submit(i=index(1)) for _ in range(10)]
    session.close()
    for run in runs:
        with pytest.raises(hg.SessionClosedError):
            run.result(SECONDS)
    with pytest.raises(hg.SessionClosedError):
        plan.run(i=index(1))


def test_threads_share_a_plan(session: hg.Session) -> None:
    plan, wrong = session.compile(rows()), list[int]()

    def work(number: int) -> None:
        for _ in range(100):
            if not np.array_equal(plan.run(i=index(number))["y"], TABLE[[number]]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong


# The client's core: what goes together


def inline_core(limits: Limits | None = None) -> ClientCore:
    core = ClientCore(limits or Limits())
    core.speaks_bytes = True
    return core


class _Spec:
    """What an inline run needs of its plan."""

    def source_of(self, _number: int) -> str:
        return ""

    def what(self) -> str:
        return "the run"


def send_inline(core: ClientCore, size_bytes: int = 4) -> Any:
    spec: Any = _Spec()
    return core.send_inline(InlineRun(RunForm(1, [(0, 4)], [0]), [b"abcd"]), size_bytes, spec)


def test_what_is_queued_leaves_in_one_message_in_order() -> None:
    core = inline_core()
    sent = [send_inline(core), core.send(c.Record(5)), send_inline(core)]
    core.release(7)
    taken = core.take(2**20)
    assert [type(one).__name__ for one in taken] == ["InlineRun", "Command", "InlineRun", "Command"]
    assert [one.sequence for one in taken] == [1, 2, 3, 4] == [*(one.sequence for one in sent), 4]
    assert not core.take(2**20)


def test_a_core_says_when_so_much_is_queued_that_it_should_leave() -> None:
    core = inline_core()
    for _ in range(63):
        send_inline(core)
    assert not core.is_full
    send_inline(core)
    assert core.is_full and len(core.take(2**20)) == 64 and not core.is_full


def test_credit_bounds_what_is_in_flight() -> None:
    core = inline_core(Limits(in_flight_bytes=100))
    first = send_inline(core, 60)
    assert first is not None and send_inline(core, 60) is None
    core.take(2**20)
    core.apply(c.CompletionBatch(1))
    assert first.done and send_inline(core, 60) is not None


def test_an_inline_run_goes_the_ordinary_way_where_something_is_before_it() -> None:
    core = inline_core()
    gate = core.open_gate()
    assert send_inline(core) is None
    core.close_gate(gate)
    assert send_inline(core) is not None
    core.speaks_bytes = False
    assert send_inline(core) is None


# The daemon's core: where runs are done

SMALL = tensor_type("f32", (4,))
NEG = Graph((Leaf(LeafKind.INPUT, "x", SMALL),), (Node("neg", (0,), SMALL),), (Output("y", 1),))
FORM = RunForm(100, [(0, 16)], [0])


class Attached:
    """A session with a plan, and what it answers."""

    def __init__(self) -> None:
        self.host = Host(Registry.of(CpuDevice(threads=1)))
        self.session: Session = self.host.session(self.host.open_session("test").session)
        self.changed = threading.Condition()
        self.done: dict[int, c.Completion | InlineResult] = {}
        self.given: list[InlineResult] = []
        self.session.attach(self.take, at_once=lambda: True)
        self.session.compile(CompileRequest(100, NEG))

    def take(self, batch: c.CompletionBatch) -> None:
        with self.changed:
            self.done.update((one.sequence, one) for one in batch.completions)
            self.changed.notify_all()

    def wait(self, sequence: int) -> c.Completion | InlineResult:
        with self.changed:
            assert self.changed.wait_for(lambda: sequence in self.done, SECONDS)
            return self.done[sequence]

    @property
    def short_run(self) -> Any:
        (found,) = self.session._core.plans.plans
        return found.plan.short_run()


def run_of(sequence: int, form: RunForm = FORM) -> InlineRun:
    return InlineRun(form, [bytes(size) for _, size in form.inputs], sequence)


@pytest.fixture
def attached() -> Iterator[Attached]:
    made = Attached()
    yield made
    made.session.close()
    assert made.host.statistics() == HostStatistics()
    made.host.close()


def test_a_short_run_is_done_where_it_arrives(attached: Attached) -> None:
    assert attached.session.answer(run_of(1), attached.given.append) and not attached.done
    (result,) = attached.given
    assert result.sequence == 1 and result.outputs[0][1][3] == 0x80
    attached.session.submit([run_of(2), run_of(3)])
    assert list(attached.done) == [2, 3] and attached.session.commands == 3


def test_one_behind_others_is_not_begun_before_them(attached: Attached) -> None:
    device_lock = next(iter(attached.host._device_locks.values()))
    with device_lock._door:
        attached.session.submit([run_of(1)])
        assert not attached.session.answer(run_of(2), attached.given.append)
        attached.session.submit([run_of(2)])
        assert not attached.done and not attached.given
    attached.wait(2)
    assert list(attached.done) == [1, 2]


def test_one_is_not_begun_while_completions_are_on_their_way_to_the_client(attached: Attached) -> None:
    attached.session.submit([run_of(1)])
    asked: list[bool] = []

    def is_blocked() -> bool:
        # Asked once every earlier completion was delivered, so none can come in between.
        asked.append(1 in attached.done)
        return False

    assert not attached.session.answer(run_of(2), attached.given.append, is_blocked)
    assert asked == [True] and not attached.given
    attached.session.submit([run_of(2)])
    assert list(attached.done) == [1, 2]


def test_one_that_fails_is_an_error_of_its_command_and_of_the_next_mark(attached: Attached) -> None:
    def fail() -> None:
        raise ComputeFailedError("no")

    attached.short_run._compute = fail
    assert attached.session.answer(run_of(1), attached.given.append) and not attached.given
    assert attached.done[1].error is not None and attached.done[1].error.origin.sequence == 1
    attached.session.submit([c.Command(2, c.Record(7), notify=True)])
    assert attached.wait(2).error is not None


@pytest.mark.parametrize(
    "form",
    [
        RunForm(99, [(0, 16)], [0]),
        RunForm(100, [(0, 12)], [0]),
        RunForm(100, [(0, 16), (0, 16)], [0]),
        RunForm(100, [(1, 16)], [0]),
        RunForm(100, [], [0]),
        RunForm(100, [(0, 16)], [1]),
        RunForm(100, [(0, 16)], [0, 0]),
    ],
)
def test_one_that_fits_no_plan_is_refused_as_any_command_is(attached: Attached, form: RunForm) -> None:
    attached.session.submit([run_of(1, form)])
    found = attached.wait(1).error
    attached.session.submit([InlineRun(form, run_of(2, form).inputs, 2).command()])
    expected = attached.wait(2).error
    assert found is not None and expected is not None
    assert (type(found), found.message) == (type(expected), expected.message)


def test_a_plan_whose_runs_take_long_after_all_goes_to_the_devices_thread(attached: Attached) -> None:
    short = attached.short_run
    for _ in range(20):
        short.note(1_000.0)
        short.note(5.0)
    assert attached.short_run is short
    for _ in range(20):
        short.note(1_000.0)
    assert attached.short_run is None
    assert not attached.session.answer(run_of(1), attached.given.append)


# The daemon's core: where small copies are done


class SlowForm:
    """An order of a weight's bytes that takes long to make."""

    size_bytes = SMALL.nbytes

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def pack(self, memory: Bytes) -> None:
        self.begun.set()
        assert self.goes_on.wait(SECONDS)

    def unpack(self, memory: Bytes) -> None:
        pass

    def read(self, memory: Bytes, offset_bytes: int, out: memoryview) -> None:
        np.frombuffer(out, np.uint8)[:] = memory[offset_bytes : offset_bytes + out.nbytes]

    def write(self, memory: Bytes, offset_bytes: int, data: memoryview) -> None:
        memory[offset_bytes : offset_bytes + data.nbytes] = np.frombuffer(data, np.uint8)


def buffer_of(attached: Attached, tensor: int, usage: Usage = Usage.ANY) -> Any:
    """Allocate a tensor, and a plain one of the next number, by two commands; return its buffer."""
    plain = c.Command(2, c.Allocate(tensor + 1, SMALL), notify=True)
    attached.session.submit([c.Command(1, c.Allocate(tensor, SMALL, usage=usage)), plain])
    attached.wait(2)
    storage = attached.session._core.handles.get(tensor, TensorHandle).storage
    assert storage is not None
    return storage.buffer


@pytest.mark.parametrize("kind", [c.GetTensor(7, 0, 16), c.SetTensor(7, 0, bytes(16)), c.CopyTensor(7, 8)])
def test_a_small_copy_keeps_nobody_waiting_while_its_weight_is_packed(
    attached: Attached, kind: c.CommandKind
) -> None:
    weight, form = buffer_of(attached, 7, Usage.WEIGHTS), SlowForm()
    packing = threading.Thread(target=weight.hold, args=(0, SMALL.nbytes, form), name="packing")
    packing.start()
    assert form.begun.wait(SECONDS)
    attached.session.submit([c.Command(3, kind, notify=True)])
    assert 3 not in attached.done
    form.goes_on.set()
    assert attached.wait(3).error is None
    packing.join(SECONDS)


@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_small_read_is_done_where_it_arrives_if_its_bytes_lie_together(
    has_gaps: bool, attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements of a view with gaps may be on a page each."""
    buffer, readers = buffer_of(attached, 7), set[int]()
    for method in (buffer.get, buffer.array):

        def told(*arguments: Any, method: Callable[..., Any] = method) -> Any:
            readers.add(threading.get_ident())
            return method(*arguments)

        monkeypatch.setattr(buffer, method.__name__, told)
    view = c.View(9, 7, 0, tensor_type("f32", (2,)), (8,) if has_gaps else ())
    attached.session.submit([c.Command(3, view), c.Command(4, c.GetTensor(9, 0, 8), notify=True)])
    assert attached.wait(4).error is None
    assert (threading.get_ident() in readers) is not has_gaps
    assert len(readers) == 1


# Acknowledgements


def through_of(data: bytes | None) -> tuple[int, list[int]]:
    assert data is not None
    batch = decode_completions(command_pb2.CompletionBatch.FromString(data))
    return batch.completed_through, [one.sequence for one in batch.completions]


def test_what_nobody_waits_for_rides_with_the_next_completion() -> None:
    async def scenario() -> None:
        outbox = CompletionWriter(asyncio.get_running_loop())
        for number in range(1, 10):
            outbox.put(c.CompletionBatch(number))
        outbox.put(c.CompletionBatch(10, (c.Completion(10, data=b"x"),)))
        outbox.put(c.CompletionBatch(12))
        assert through_of(await outbox.take()) == (12, [10])

    asyncio.run(scenario())


def test_what_nobody_waits_for_is_acknowledged_soon_all_the_same() -> None:
    async def scenario() -> None:
        outbox = CompletionWriter(asyncio.get_running_loop())
        outbox.put(c.CompletionBatch(1))
        outbox.put(c.CompletionBatch(2))
        assert through_of(await asyncio.wait_for(outbox.take(), SECONDS)) == (2, [])
        outbox.put(c.CompletionBatch(3))
        outbox.finish_at(3)
        assert through_of(await asyncio.wait_for(outbox.take(), SECONDS)) == (3, [])
        assert await outbox.take() is None

    asyncio.run(scenario())


def test_many_that_nobody_waits_for_are_acknowledged_at_once() -> None:
    async def scenario() -> None:
        outbox = CompletionWriter(asyncio.get_running_loop())
        outbox.put(c.CompletionBatch(LATE_COMMANDS))
        taken: Coroutine[Any, Any, bytes | None] = outbox.take()
        with pytest.raises(StopIteration) as stop:
            taken.send(None)
        assert through_of(stop.value.value) == (LATE_COMMANDS, [])

    asyncio.run(scenario())


def test_an_answer_goes_past_the_queue_only_where_that_is_empty() -> None:
    async def scenario() -> None:
        outbox = CompletionWriter(asyncio.get_running_loop())
        assert outbox.may_write()
        outbox.begin_write(1, b"")
        assert not outbox.may_write()
        outbox.put(c.CompletionBatch(2, (c.Completion(2, data=b"x"),)))
        taking = asyncio.ensure_future(outbox.take())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not taking.done()
        outbox.end_write(0)
        assert through_of(await taking) == (2, [2])
        assert not outbox.may_write()

    asyncio.run(scenario())


# Writes that begin at once


def test_a_write_begins_at_once_and_is_told_when_it_ends() -> None:
    async def scenario() -> None:
        loop, ended = asyncio.get_running_loop(), list[BaseException | None]()
        first, second = loop.create_future(), loop.create_future()
        began = Outcome()

        async def write(fails: bool) -> None:
            began.finish()
            await first
            await second
            if fails:
                raise ConnectionResetError

        begin(write(False), ended.append)
        begin(write(True), ended.append)
        assert began.done and not ended
        first.set_result(None)
        await asyncio.sleep(0)
        assert not ended
        second.set_result(None)
        await asyncio.sleep(0)
        assert ended[0] is None and isinstance(ended[1], ConnectionResetError)

        async def none() -> None: ...

        begin(none(), ended.append)
        assert ended[2] is None

    asyncio.run(scenario())
