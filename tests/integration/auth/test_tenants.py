"""Quotas of tenants: what they have over all their sessions, what is refused, and that all comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from access_daemons import Tokens, daemon_with_tokens
from core_client import SECONDS, CoreClient
from graph_arrivals import compile_received
from hypothesis import given, settings
from hypothesis import strategies as st
from tenant_hosts import F4, PLAN, TenantHost, X, chain, run_of

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import CancelledError, HeliographError, LimitExceededError, OutOfMemoryError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Quota
from heliograph_proto.types import tensor_type
from heliograph_server.auth.tokens import Token, add_token, hash_of, new_token
from heliograph_server.resources.principals import Right
from heliograph_server.resources.quotas import Account, QuotaKind
from heliograph_server.runtime.host import NO_QUOTA

KIB = tensor_type("u8", (1024,))
SECRET = bytes(range(32))


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice(memory_bytes=2**20)


@pytest.fixture
def host(fake: FakeDevice) -> Iterator[TenantHost]:
    with TenantHost(fake) as made:
        yield made


def limited(host: TenantHost, **quota: int) -> CoreClient:
    """A session of a tenant "small" with this quota."""
    host.quotas["small"] = Quota(**quota)
    return host.client("small")


def tall() -> Graph:
    """It needs a KiB between its two nodes."""
    of = tensor_type("f32", (16, 16))
    nodes = Node("soft_max", (0,), of), Node("soft_max", (1,), of)
    return Graph((Leaf(LeafKind.INPUT, "x", of),), nodes, (Output("y", 2),))


def check_refusal(error: HeliographError, *words: str) -> None:
    """It says which limit was met, what is used, what to do, and when to come back."""
    assert error.advice and error.retry_after_seconds is not None and error.retry_after_seconds > 0
    for word in ("'small'", *words):
        assert word in str(error), error


def test_sessions_over_the_quota_are_refused_until_one_ends(host: TenantHost) -> None:
    first = limited(host, sessions=1)
    with pytest.raises(LimitExceededError) as refused:
        host.client("small")
    check_refusal(refused.value, "1 sessions", "1 are used", "close a session")
    host.client("other")
    first.session.close()
    host.client("small")
    assert host.usage("small").sessions == 1 and host.usage("small").refused == 1


def test_plans_count_as_long_as_their_handles_live(host: TenantHost) -> None:
    client = limited(host, plans=1)
    client.compile(PLAN, chain())
    with pytest.raises(LimitExceededError) as refused:
        client.compile(PLAN + 1, chain(3))
    check_refusal(refused.value, "1 plans", "free a plan")
    # One that takes another's place is none more.
    client.compile(PLAN + 1, chain(4), updates=PLAN)
    assert host.usage("small").plans == 1
    client.do(c.Free((PLAN + 1,)))
    client.compile(PLAN, chain(3))


def test_plans_of_all_sessions_of_a_tenant_count_together(host: TenantHost) -> None:
    limited(host, plans=1).compile(PLAN, chain())
    with pytest.raises(LimitExceededError):
        host.client("small").compile(PLAN, chain())
    host.client("other").compile(PLAN, chain())


def test_runs_over_the_quota_are_refused_and_the_stream_lives_on(host: TenantHost, fake: FakeDevice) -> None:
    client = limited(host, runs_in_flight=2)
    client.compile(PLAN, chain())
    gate = fake.script.hold("compute")
    held = [client.send(run_of()) for _ in range(2)]
    assert gate.entered.wait(SECONDS)
    check_refusal(client.refused(run_of()), "2 runs in flight", "wait for a run")
    assert host.usage("small").runs_in_flight == 2
    gate.open()
    for sequence in held:
        assert client.wait(sequence).error is None
    assert client.do(run_of()).outputs
    assert host.usage("small").runs_in_flight == 0


def test_a_run_that_is_refused_otherwise_or_cancelled_counts_no_longer_than_it_is_there(
    host: TenantHost, fake: FakeDevice
) -> None:
    client = limited(host, runs_in_flight=1)
    client.compile(PLAN, chain())
    client.refused(run_of(PLAN + 7))
    gate = fake.script.hold("compute")
    held = client.send(run_of())
    assert gate.entered.wait(SECONDS)
    client.do(c.Cancel(held))
    gate.open()
    assert isinstance(client.wait(held).error, CancelledError)
    client.do(c.Synchronize())
    client.do(run_of())


def test_tensors_over_the_quota_are_refused_until_others_are_freed(host: TenantHost) -> None:
    client, other = limited(host, device_memory_bytes=4096), host.client("other")
    for number in range(1, 5):
        client.do(c.Allocate(number, KIB))
    error = client.refused(c.Allocate(5, KIB))
    assert isinstance(error, OutOfMemoryError)
    check_refusal(error, "4,096 bytes of device memory", "4,096 are used", "free tensors")
    other.do(c.Allocate(1, KIB))
    client.do(c.Free((1,)))
    client.do(c.Allocate(6, KIB))
    assert host.usage("small").device_memory_bytes == 4096


def test_what_could_never_be_had_is_refused_without_a_time_to_come_back(host: TenantHost) -> None:
    error = limited(host, device_memory_bytes=512).refused(c.Allocate(1, KIB))
    assert error.retry_after_seconds is None and "ask for less" in error.advice


def test_plans_and_their_outputs_are_memory_of_the_tenant(host: TenantHost) -> None:
    client = limited(host, device_memory_bytes=1024)
    client.compile(PLAN, tall())
    assert host.usage("small").device_memory_bytes == 1024
    with pytest.raises(OutOfMemoryError):
        host.client("small").compile(PLAN, tall())
    client.do(c.Free((PLAN,)))
    client.compile(PLAN, chain())
    taken = host.usage("small").device_memory_bytes
    host.host.set_quota("small", Quota(device_memory_bytes=taken + 2 * F4.nbytes))
    runs = [
        c.RunCommand(PLAN, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, number),))
        for number in (1, 2, 3)
    ]
    client.do(runs[0])
    client.do(runs[1])
    assert host.usage("small").device_memory_bytes == taken + 2 * F4.nbytes
    assert isinstance(client.refused(runs[2]), OutOfMemoryError)
    client.do(c.Free((1, 2, PLAN)))
    assert host.usage("small").device_memory_bytes == 0


def test_contents_are_memory_of_the_tenant_once_for_all_its_sessions(host: TenantHost) -> None:
    client = limited(host, device_memory_bytes=4096)
    client.upload(bytes(3000))
    assert host.usage("small").device_memory_bytes == 3000
    with pytest.raises(OutOfMemoryError) as refused:
        client.upload(bytes(2000))
    check_refusal(refused.value, "3,000 are used")
    client.session.close()
    assert host.usage("small").device_memory_bytes == 0


def test_bytes_on_their_way_count_until_they_have_come(host: TenantHost) -> None:
    client = limited(host, staging_bytes=1000)
    upload = client.session.begin_upload(digest_of(bytes(800)), 800)
    with pytest.raises(LimitExceededError) as refused:
        client.session.begin_upload(1, 300)
    check_refusal(refused.value, "1,000 bytes of transfers and contents", "800 are used")
    upload.write(0, bytes(800))
    upload.finish()
    assert host.usage("small").staging_bytes == 0
    client.session.begin_upload(2, 300)
    assert host.usage("small").staging_bytes == 300


def test_another_quota_holds_for_what_comes_next(host: TenantHost) -> None:
    client = limited(host, device_memory_bytes=1024)
    client.do(c.Allocate(1, KIB))
    client.refused(c.Allocate(2, KIB))
    host.host.set_quota("small", Quota(device_memory_bytes=2048))
    client.do(c.Allocate(3, KIB))
    # Nothing of what is there is taken away.
    host.host.set_quota("small", Quota(device_memory_bytes=1))
    client.refused(c.Allocate(4, KIB))
    assert host.usage("small").device_memory_bytes == 2048


def test_a_daemon_without_tenants_limits_nobody_and_knows_what_all_have(host: TenantHost) -> None:
    for _ in range(2):
        host.client().do(c.Allocate(1, KIB))
    assert host.usage().sessions == 2 and host.usage().device_memory_bytes == 2048
    assert host.usage().quota == NO_QUOTA


def test_refusals_say_to_come_back_as_soon_as_things_were_given_back_lately() -> None:
    now = count()
    account = Account("small", Quota(plans=2), clock=lambda: float(next(now)))
    account.take(QuotaKind.PLANS, 2)
    for _ in range(4):
        account.give(QuotaKind.PLANS)
        account.take(QuotaKind.PLANS)
    with pytest.raises(LimitExceededError) as refused:
        account.take(QuotaKind.PLANS)
    # Four in four seconds.
    assert refused.value.retry_after_seconds == pytest.approx(1.0)


def test_plans_that_nobody_has_any_more_go_before_a_tenant_is_refused_memory(host: TenantHost) -> None:
    client = host.client("small")
    compile_received(client, PLAN, tall())
    client.do(c.Free((PLAN,)))
    assert host.usage("small").device_memory_bytes and client.session.statistics().idle_plans == 1
    host.host.set_quota("small", Quota(device_memory_bytes=1024))
    client.do(c.Allocate(1, KIB))
    assert client.session.statistics().idle_plans == 0


def test_a_client_is_told_of_the_quota_that_it_met(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    quota = {"sessions": 1, "device_memory_bytes": 4096}
    a = new_token()
    add_token(tokens.path, Token("a", hash_of(a), "a", quota=quota))
    with daemon_with_tokens(tokens) as daemon, hg.connect(daemon.url, token=a) as session:
        with pytest.raises(hg.OutOfMemoryError, match="tenant 'a'"):
            session.put(np.ones(4096, np.float32)).get()
        with (
            pytest.raises(hg.LimitExceededError, match="1 sessions") as refused,
            hg.connect(daemon.url, token=a),
        ):
            pass
        assert refused.value.retry_after_seconds is not None
        with hg.connect(daemon.url, token=tokens.of["bob"]) as other:
            tensor = other.put(np.ones(4096, np.float32))
            assert tensor.get().sum() == 4096


def test_a_quota_that_changes_is_in_force_for_sessions_that_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(tmp_path / "tokens", {"bob": (Right.USE,)})
    with daemon_with_tokens(tokens) as daemon, hg.connect(daemon.url, token=tokens.of["bob"]) as session:
        is_told, set_quota = threading.Event(), daemon.host.set_quota

        def told(tenant: str, quota: Quota) -> None:
            set_quota(tenant, quota)
            if quota.plans == 1:
                is_told.set()

        monkeypatch.setattr(daemon.host, "set_quota", told)
        tokens.path.write_text(tokens.path.read_text() + "\n[token.quota]\nplans = 1\n")
        assert is_told.wait(SECONDS)
        g = hg.Graph()
        g.output("y", g.input("x", (4,), "f32") + 1.0)
        plan = session.compile(g)
        h = hg.Graph()
        h.output("y", h.input("x", (5,), "f32") + 1.0)
        with pytest.raises(hg.LimitExceededError, match="1 plans"):
            session.compile(h)
        assert plan.run(x=np.zeros(4, np.float32))["y"].sum() == 4


# Whatever happens, all comes back


class Driven:
    """A tenant's session that does whatever it is told, well or not."""

    def __init__(self, host: TenantHost, tenant: str) -> None:
        self.client = host.client(tenant, SECRET)
        self.tensors = count(1)
        self.made: list[int] = []
        self.plans = count(PLAN)
        self.compiled: list[int] = []

    def allocate(self, size: int) -> None:
        self.made.append(next(self.tensors))
        self.client.send(c.Allocate(self.made[-1], tensor_type("u8", (size * 100,))))

    def free(self, place: int) -> None:
        found = self.made if place % 2 else self.compiled
        if found:
            self.client.send(c.Free((found.pop(place % len(found)),)))

    def compile(self, length: int) -> None:
        self.compiled.append(next(self.plans))
        self.client.compile(self.compiled[-1], chain(1 + length % 4))

    def run(self, place: int) -> None:
        if self.compiled:
            self.client.send(run_of(self.compiled[place % len(self.compiled)]))

    def keep(self, place: int) -> None:
        if self.compiled:
            self.made.append(next(self.tensors))
            inputs, outputs = (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, self.made[-1]),)
            self.client.send(c.RunCommand(self.compiled[place % len(self.compiled)], inputs, outputs))

    def upload(self, size: int) -> None:
        self.client.upload(bytes([size]) * size)

    def break_off(self, size: int) -> None:
        data = bytes([size]) * (size + 10)
        upload = self.client.session.begin_upload(digest_of(data), len(data))
        upload.write(0, data[: size // 2 + 1])
        if size % 2:
            upload.abort(CancelledError("the client left"))

    def transfer(self, number: int) -> None:
        self.client.session.begin_upload(number + 1, 10 * number)

    def close(self, _: int) -> None:
        self.client.session.close()


ACTIONS = ("allocate", "free", "compile", "run", "keep", "upload", "break_off", "transfer", "close")
QUOTAS = (
    Quota(),
    Quota(sessions=2, plans=2, runs_in_flight=2, device_memory_bytes=6000, staging_bytes=300),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(ACTIONS), st.integers(0, 40)), min_size=1, max_size=40
    ),
    st.sampled_from(QUOTAS),
)
def test_when_all_is_over_the_accounts_are_empty(steps: list[tuple[int, str, int]], quota: Quota) -> None:
    with TenantHost(FakeDevice(memory_bytes=20_000), a=quota, b=quota) as host:
        driven = [Driven(host, tenant) for tenant in "aabb"]
        for who, action, number in steps:
            try:
                getattr(driven[who], action)(number)
            except HeliographError:
                continue
            for usage in host.host.tenants():
                for kind in (QuotaKind.SESSIONS, QuotaKind.RUNS, QuotaKind.STAGING):
                    limit = getattr(quota, kind)
                    assert getattr(usage, kind) >= 0 and (not limit or getattr(usage, kind) <= limit)
