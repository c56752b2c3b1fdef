"""Devices that several tenants want: whose run is next, on gates; and what holds no turn while it waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from core_client import SECONDS, CoreClient
from tenant_hosts import PLAN, TenantHost, chain, run_of

from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import CancelledError
from heliograph_proto.sessions import Quota


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice(memory_bytes=2**20)


@pytest.fixture
def host(fake: FakeDevice) -> Iterator[TenantHost]:
    with TenantHost(fake) as made:
        yield made


def ready(host: TenantHost, tenant: str, secret: bytes = b"", **compiling: object) -> CoreClient:
    client = host.client(tenant, secret)
    client.compile(PLAN, chain(), **compiling)  # type: ignore[arg-type]
    return client


def ended(client: CoreClient, sequences: list[int]) -> int:
    return sum(1 for one in sequences if one in client._done)


def wait_until_waiting(host: TenantHost, device: str = "fake0") -> None:
    """Until a run waits for its turn."""
    turns = host.host._device_locks[device].turns
    tries = threading.Event()
    for _ in range(1000):
        if turns._queue._waiting:
            return
        tries.wait(0.01)
    raise AssertionError("no run waits for its turn")


def check_next(host: TenantHost, fake: FakeDevice, greedy: CoreClient, modest: CoreClient) -> None:
    """The second of two has the device's next turn, though the first has ten runs queued."""
    first, second = fake.script.hold("compute"), fake.script.hold("compute")
    many = [greedy.send(run_of()) for _ in range(10)]
    assert first.entered.wait(SECONDS)
    one = modest.send(run_of())
    wait_until_waiting(host)
    first.open()
    assert second.entered.wait(SECONDS)
    assert greedy.wait(many[0]).error is None and ended(greedy, many) == 1 and not ended(modest, [one])
    second.open()
    assert modest.wait(one).error is None
    for sequence in many:
        assert greedy.wait(sequence).error is None


def test_the_next_turn_is_the_other_tenants_however_many_runs_one_has(
    host: TenantHost, fake: FakeDevice
) -> None:
    check_next(host, fake, ready(host, "greedy"), ready(host, "modest"))
    assert host.usage("greedy").device_seconds > host.usage("modest").device_seconds > 0


@pytest.mark.parametrize("secrets", [(b"", b""), (bytes(range(32)), bytes(range(1, 33)))])
def test_where_nobody_has_a_name_secrets_and_sessions_take_turns(
    host: TenantHost, fake: FakeDevice, secrets: tuple[bytes, bytes]
) -> None:
    check_next(host, fake, ready(host, "", secrets[0]), ready(host, "", secrets[1]))


def test_sessions_of_one_tenant_compute_at_the_same_time(host: TenantHost, fake: FakeDevice) -> None:
    gates = [fake.script.hold("compute") for _ in range(2)]
    clients = [ready(host, "one") for _ in gates]
    sent = [client.send(run_of()) for client in clients]
    assert all(gate.entered.wait(SECONDS) for gate in gates)
    for gate in gates:
        gate.open()
    for client, sequence in zip(clients, sent, strict=True):
        assert client.wait(sequence).error is None


def test_a_run_that_waits_for_its_turn_can_be_cancelled(host: TenantHost, fake: FakeDevice) -> None:
    one, other = ready(host, "one"), ready(host, "other")
    gate = fake.script.hold("compute")
    held = one.send(run_of())
    assert gate.entered.wait(SECONDS)
    waits = other.send(run_of())
    wait_until_waiting(host)
    other.do(c.Cancel(waits))
    assert isinstance(other.wait(waits).error, CancelledError)
    # Its stream goes on while the device is still taken.
    other.do(c.Synchronize())
    gate.open()
    assert one.wait(held).error is None
    other.do(run_of())


def test_a_session_that_ends_while_its_run_waits_gives_its_place_up(
    host: TenantHost, fake: FakeDevice
) -> None:
    one, other = ready(host, "one"), ready(host, "other")
    gate = fake.script.hold("compute")
    held = one.send(run_of())
    assert gate.entered.wait(SECONDS)
    other.send(run_of())
    wait_until_waiting(host)
    other.session.close()
    assert host.usage("other").is_idle
    gate.open()
    assert one.wait(held).error is None


def test_a_run_that_waits_for_its_client_has_no_turn(host: TenantHost) -> None:
    looking, other = ready(host, "looking", taps=(0,)), ready(host, "other")
    paused = looking.send(run_of(pause=True))
    assert looking.wait_for_taps(1)
    other.do(run_of())
    looking.do(c.Continue(paused))
    assert looking.wait(paused).error is None


def test_a_loop_gives_the_device_to_others_between_its_steps(host: TenantHost, fake: FakeDevice) -> None:
    looping, other = ready(host, "looping"), ready(host, "other")
    gate = fake.script.hold("compute")
    steps = c.Loop(100_000, carries=(c.Carry(0, 0),))
    inputs, outputs = (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 0, True),)
    loop = looping.send(c.RunCommand(PLAN, inputs, outputs, loop=steps))
    assert gate.entered.wait(SECONDS)
    sent = other.send(run_of())
    wait_until_waiting(host)
    gate.open()
    assert other.wait(sent).error is None
    looping.do(c.Cancel(loop))
    assert isinstance(looping.wait(loop).error, CancelledError)


def test_plans_over_two_devices_that_want_them_crosswise_all_end() -> None:
    devices = [FakeDevice(name, memory_bytes=2**20) for name in ("fake0", "fake1")]
    both, quotas = ("fake0", "fake1"), {"a": Quota(weight=3.0), "b": Quota()}
    with TenantHost(*devices, **quotas) as host:
        crosswise = {"a": {0: "fake0", 1: "fake1"}, "b": {0: "fake1", 1: "fake0"}}
        clients = [
            ready(host, name, devices=both, pins=pins, pipeline=pipeline)
            for name, pins in crosswise.items()
            for pipeline in (1, 2)
        ]
        for client in clients:
            client.compile(PLAN + 1, chain(), devices=["fake1"])
        sent = [(client, client.send(run_of(PLAN + n % 2))) for n in range(40) for client in clients]
        for client, sequence in sent:
            assert client.wait(sequence).error is None
