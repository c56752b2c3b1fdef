"""A durable session whose daemon is killed: its program goes on, with the same bits, and nothing is done
twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from durable_client import DurableClient
from state_hosts import F4, OTHER, PLAN, TENSOR, VIEW, X, adder, product

from heliograph.core.feed import LoopFeed, output_key
from heliograph.core.future import Pending
from heliograph_backends.contract import Device
from heliograph_backends.cpu import CpuDevice
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult
from heliograph_proto.errors import (
    CancelledError,
    HeliographError,
    InvalidInputError,
    NotReplayableError,
    SessionClosedError,
)
from heliograph_proto.types import tensor_type


def cpu() -> list[Device]:
    return [CpuDevice()]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[DurableClient]:
    made = DurableClient(tmp_path, cpu)
    yield made
    made.close()


def a_run(x: np.ndarray = X, plan: int = PLAN, fetch: bool = True, tensor: int = 0) -> c.RunCommand:
    outputs = (c.OutputBinding(0, tensor, fetch and not tensor),)
    return c.RunCommand(plan, (c.InputBinding(0, x.tobytes()),), outputs)


def total(client: DurableClient) -> list[float]:
    done = client.do(a_run(0 * X))
    return np.frombuffer(done.outputs[0][1], np.float32).tolist()


def value(client: DurableClient, tensor: int = TENSOR) -> list[float]:
    return np.frombuffer(client.do(c.GetTensor(tensor, 0, 16)).data, np.float32).tolist()


def test_commands_after_the_snapshot_are_done_again(client: DurableClient) -> None:
    client.compile(PLAN, adder())
    client.do(a_run())
    client.snapshot()
    client.do(a_run())
    client.do(a_run())
    client.restart()
    assert total(client) == (3 * X).tolist()
    assert client.session.commands == client.core.last_sent


def test_everything_is_done_again_before_the_first_snapshot_that_was_asked_for(client: DurableClient) -> None:
    client.do(c.Allocate(TENSOR, F4))
    client.do(c.SetTensor(TENSOR, 0, X.tobytes()))
    client.compile(PLAN, adder())
    client.do(a_run())
    client.restart()
    client.restart()
    assert value(client) == X.tolist() and total(client) == X.tolist()


def test_commands_in_the_snapshot_are_not_done_again(client: DurableClient) -> None:
    client.compile(PLAN, adder())
    for _ in range(3):
        client.do(a_run())
        client.snapshot()
        client.restart()
        client.restart()
    assert total(client) == (3 * X).tolist()


def test_answers_that_did_not_arrive_come_after_the_restart(client: DurableClient) -> None:
    client.compile(PLAN, adder())
    client.snapshot()
    runs = [client.send(a_run()) for _ in range(5)]
    while client.step(receives=False):
        pass
    client.restart()
    found = [np.frombuffer(client.wait(run).completion.outputs[0][1], np.float32) for run in runs]  # type: ignore[union-attr]
    assert [one.tolist() for one in found] == [(n * X).tolist() for n in range(1, 6)]
    assert total(client) == (5 * X).tolist()


def test_plans_and_tensors_made_after_the_snapshot_are_made_again_in_order(client: DurableClient) -> None:
    client.snapshot()
    client.do(c.Allocate(TENSOR, tensor_type("f32", (4, 4))))
    client.do(c.SetTensor(TENSOR, 0, np.eye(4, dtype=np.float32).tobytes()))
    client.compile(PLAN, product(b""), bindings={1: TENSOR})
    client.do(c.Free((TENSOR,)))
    client.do(a_run(tensor=7))
    client.compile(OTHER, adder())
    client.do(a_run(plan=OTHER))
    client.restart()
    assert value(client, 7) == X.tolist()
    done = client.do(a_run(plan=OTHER))
    assert np.frombuffer(done.outputs[0][1], np.float32).tolist() == (2 * X).tolist()


def test_a_plan_that_the_snapshot_has_is_not_made_again(client: DurableClient) -> None:
    client.compile(PLAN, adder())
    client.snapshot()
    client.restart()
    client.do(a_run())
    assert total(client) == X.tolist()


def test_a_failed_command_fails_again_and_leaves_the_same_poison(client: DurableClient) -> None:
    client.compile(PLAN, adder())
    client.snapshot()
    bad = client.wait(client.send(c.RunCommand(PLAN, (), (c.OutputBinding(0, 7),))))
    client.restart()
    lost = client.wait(client.send(c.GetTensor(7, 0, 16)))
    assert isinstance(bad.error, InvalidInputError) and isinstance(lost.error, InvalidInputError)
    assert lost.error.origin.sequence == bad.sequence


def test_a_cancelled_run_that_wrote_a_variable_is_named_and_the_rest_lives(client: DurableClient) -> None:
    client.compile(PLAN, adder())
    client.do(c.Allocate(TENSOR, F4))
    client.do(c.SetTensor(TENSOR, 0, X.tobytes()))
    client.snapshot()
    run = client.send(a_run())
    run.error = CancelledError("it was cancelled")
    client.wait(run)
    run.error = CancelledError("it was cancelled")
    client.restart()
    with pytest.raises(NotReplayableError, match="broken off"):
        client.do(a_run())
    assert value(client) == X.tolist()


def test_a_journal_without_room_says_so_and_is_whole_again_after_a_snapshot(tmp_path: Path) -> None:
    client = DurableClient(tmp_path, cpu, journal_bytes=4096)
    client.do(c.Allocate(TENSOR, F4))
    for n in range(40):
        client.do(c.SetTensor(TENSOR, 0, (n * X).tobytes()))
    assert client.core.journal is not None and client.core.journal.given_up
    client.snapshot()
    client.do(c.SetTensor(TENSOR, 0, (99 * X).tobytes()))
    client.restart()
    assert value(client) == (99 * X).tolist()
    for n in range(40):
        client.do(c.SetTensor(TENSOR, 0, (n * X).tobytes()))
    with pytest.raises(SessionClosedError, match="keeps its commands only from"):
        client.restart()
    client.session.close()
    client.host.close()


def loop_of(steps: int) -> c.RunCommand:
    loop = c.Loop(steps, taps=(0,), unread_bytes=4096)
    return c.RunCommand(PLAN, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),), loop=loop)


def loop_feed(steps: int) -> LoopFeed:
    return LoopFeed({output_key(0): F4}, steps, 4096, 1 << 20)


def read(client: DurableClient, run: Pending, count: int) -> list[float]:
    """The first elements of so many values of a loop."""
    found: list[float] = []
    feed = run.feed
    assert feed is not None
    while len(found) < count:
        while feed.ready and len(found) < count:
            found.append(float(feed.take()[2][0]))
            client.core.proceed(run)
        if len(found) < count and not client.step():
            import time

            time.sleep(0.0005)
    return found


def test_each_value_of_a_loop_comes_once_and_in_order(client: DurableClient) -> None:
    steps = 400
    client.compile(PLAN, adder())
    client.do(a_run())
    client.snapshot()
    run = client.send(loop_of(steps))
    run.feed = loop_feed(steps)
    found = []
    for part in (1, 7, 60, 100, 132, 100):
        found += read(client, run, part)
        client.restart()
    client.wait(run)
    assert found == [float(n) for n in range(2, steps + 2)]
    assert total(client) == ((steps + 1) * X).tolist()


@pytest.mark.parametrize("seed", range(12))
def test_a_loop_goes_on_from_snapshots_in_its_middle(client: DurableClient, seed: int) -> None:
    """Messages that were under way are lost with the daemon, and daemons die before a loop begins
    again."""
    chance, steps = random.Random(seed), 400
    client.compile(PLAN, adder())
    client.do(a_run())
    client.snapshot()
    run = client.send(loop_of(steps))
    run.feed = loop_feed(steps)
    found: list[float] = []
    resumed = [0]
    while len(found) < steps:
        found += read(client, run, min(chance.randrange(1, 60), steps - len(found)))
        if chance.random() < 0.6:
            client.snapshot()
        for _ in range(chance.randrange(3)):
            client.restart()
            resumed += [one.steps for one in client.session.resumed_loops]
    client.wait(run)
    assert found == [float(n) for n in range(2, steps + 2)]
    assert total(client) == ((steps + 1) * X).tolist()
    assert max(resumed) > 20, "it goes on from its beginning each time"


def test_a_loop_that_ended_is_done_again_without_its_values(client: DurableClient) -> None:
    client.compile(PLAN, adder())
    client.snapshot()
    run = client.send(loop_of(50))
    run.feed = loop_feed(50)
    read(client, run, 50)
    client.wait(run)
    client.restart()
    assert total(client) == (50 * X).tolist()


PROGRAM_STEPS = 120


def a_program(seed: int, client: DurableClient, disturb: Callable[[], None]) -> list[object]:
    """A random program; everything that its user sees."""
    chance = random.Random(seed)
    seen: list[object] = []
    client.compile(PLAN, adder())
    client.snapshot()
    tensors: list[int] = []
    waiting: list[Pending] = []
    for number in range(10_000, 10_000 + PROGRAM_STEPS):
        x = np.float32([chance.randrange(100) for _ in range(4)])
        match chance.randrange(10):
            case 0 | 1:
                waiting.append(client.send(a_run(x)))
            case 2:
                tensors.append(number)
                client.send(c.Allocate(number, F4))
                client.send(c.SetTensor(number, 0, x.tobytes()))
            case 3 if tensors:
                client.send(c.SetTensor(chance.choice(tensors), 4, x[:2].tobytes()))
            case 4 if tensors:
                waiting.append(client.send(c.GetTensor(chance.choice(tensors), 0, 16)))
            case 5 if tensors:
                client.send(c.Free((tensors.pop(chance.randrange(len(tensors))),)))
            case 6:
                tensors.append(number)
                client.send(a_run(x, tensor=number))
            case 7 if len(tensors) > 1:
                client.send(c.CopyTensor(*chance.sample(tensors, 2)))
            case 8 if chance.random() < 0.3:
                waiting.append(client.send(c.GetTensor(9999, 0, 16)))
            case 9 if chance.random() < 0.3:
                client.compile(10 * number, adder())
        disturb()
    for one in waiting:
        client.wait(one)
        done = one.completion
        assert done is not None
        data = b"" if isinstance(done, InlineResult) else bytes(done.data)
        seen.append(str(one.error) if one.error else (data, [bytes(b) for _, b in done.outputs]))
    seen.append([value(client, one) for one in tensors])
    seen.append(total(client))
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_a_program_sees_the_same_with_any_kills_and_snapshots(tmp_path: Path, seed: int) -> None:
    calm = DurableClient(tmp_path / "calm", cpu)
    expected = a_program(seed, calm, lambda: None)
    calm.close()
    client = DurableClient(tmp_path / "killed", cpu)
    chance = random.Random(-seed - 1)
    kills = 0

    def disturb() -> None:
        nonlocal kills
        for _ in range(chance.randrange(4)):
            client.step(receives=chance.random() < 0.7)
        roll = chance.random()
        if roll < 0.08:
            client.restart()
            kills += 1
        elif roll < 0.18:
            client.snapshot()

    assert a_program(seed, client, disturb) == expected
    assert kills > 3
    client.close()


def test_an_error_of_a_view_of_nothing_stays(client: DurableClient) -> None:
    client.snapshot()
    with pytest.raises(HeliographError):
        client.do(c.View(VIEW, 77, 0, F4))
    client.restart()
    with pytest.raises(HeliographError, match="77"):
        value(client, VIEW)
