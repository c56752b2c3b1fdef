"""Contents in memory: sessions of a tenant share them, tenants know nothing of each other, uploads go on."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from content_clients import ALICE, BOB, Brought, content, free_bytes, host_with

from heliograph_backends.contract import Buffer, Usage
from heliograph_backends.fake import FakeDevice
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import (
    CancelledError,
    ContentMismatchError,
    DeadlineExceededError,
    InvalidArgumentError,
    LimitExceededError,
    MissingContentError,
    OutOfMemoryError,
    ProtocolError,
    SessionClosedError,
)
from heliograph_proto.sessions import Quota
from heliograph_server.resources.quotas import Account
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.runtime.host import Host
from heliograph_server.scheduler.slices import Slice
from heliograph_server.session.bulk import ContentUpload
from heliograph_server.weights import tenant_store
from heliograph_server.weights.session_weights import SessionWeights
from heliograph_server.weights.store import STALLED_SECONDS, ContentStore
from heliograph_server.weights.tenant_store import ScatteredBuffer, TenantContents

ONE, TWO = content(1), content(2)


def test_sessions_of_a_tenant_have_one_copy_between_them() -> None:
    with host_with() as host:
        first, second = Brought(host), Brought(host)
        before = free_bytes(host)
        first.upload(ONE)
        first.compile(ONE)
        assert not second.is_missing(ONE)
        second.compile(ONE)
        assert before - free_bytes(host) < 2 * len(ONE)
        first.leave()
        assert not second.is_missing(ONE)
        second.compile(ONE)


def test_a_plan_keeps_its_weight_when_the_session_that_brought_it_is_gone() -> None:
    with host_with() as host:
        first, second = Brought(host), Brought(host)
        first.upload(ONE)
        second.is_missing(ONE)
        second.compile(ONE)
        first.leave()
        second.compile(ONE)
        second.leave()
        assert Brought(host).is_missing(ONE)


@pytest.mark.parametrize("secret", [BOB, b""], ids=["another tenant", "no secret"])
def test_nobody_else_is_told_of_a_tenants_contents(secret: bytes) -> None:
    with host_with() as host:
        alice, other = Brought(host), Brought(host, secret)
        alice.upload(ONE)
        alice.upload(TWO, until=1000)
        assert other.is_missing(ONE) and other.received(TWO) == 0
        with pytest.raises(MissingContentError):
            other.compile(ONE)
        with pytest.raises(ContentMismatchError):
            other.upload(TWO, start=1000)
        before = free_bytes(host)
        other.upload(ONE)
        # It has its own copy, as if nobody else had one: memory does not tell either.
        assert before - free_bytes(host) == len(ONE)


def test_a_content_that_is_being_added_does_not_give_way_to_other_work() -> None:
    device, digest = FakeDevice("fake0"), digest_of(ONE)
    contents, user = TenantContents(MemoryReclaim(), Account()), object()

    class Contended(ScatteredBuffer):
        """Its device needs memory for other work after each part that is added."""

        def pieces(self) -> Iterator[tuple[Slice, Buffer]]:
            for piece in super().pieces():
                yield piece
                contents.make_room()

    half = len(ONE) // 2
    parts = [device.buffer_type.allocate(half, Usage.WEIGHTS) for _ in range(2)]
    contents.add(digest, Contended(device.buffer_type, parts), user)
    assert contents.has(digest)
    contents.spare([digest], user)
    assert contents.make_room() and not contents.has(digest)
    device.close()


def test_sessions_without_a_secret_do_not_know_each_other() -> None:
    with host_with() as host:
        first, second = Brought(host, b""), Brought(host, b"")
        first.upload(ONE)
        assert second.is_missing(ONE)


@pytest.mark.parametrize("secret", [b"short", bytes(2000)])
def test_a_secret_that_could_be_guessed_or_is_endless_is_refused(secret: bytes) -> None:
    with host_with() as host, pytest.raises(InvalidArgumentError, match="secret"):
        host.open_session("test", secret=secret)


def test_an_upload_goes_on_where_it_broke_off_in_another_session() -> None:
    with host_with() as host:
        first = Brought(host)
        first.upload(ONE, until=1000)
        first.leave(broken=True)
        second = Brought(host)
        assert second.is_missing(ONE) and second.received(ONE) == 1000
        second.upload(ONE, start=1000, until=3000)
        assert second.received(ONE) == 3000
        second.upload(ONE, start=3000)
        second.compile(ONE)
        assert second.received(ONE) == 0


def test_an_upload_that_goes_on_elsewhere_than_where_it_broke_off_is_refused() -> None:
    with host_with() as host:
        client = Brought(host)
        client.upload(ONE, until=1000)
        with pytest.raises(ContentMismatchError, match="bytes before it are gone"):
            client.upload(ONE, start=999)
        client.upload(ONE)
        client.compile(ONE)


def test_a_beginning_that_was_wrong_is_noticed_at_the_end_and_goes() -> None:
    with host_with() as host:
        client = Brought(host)
        wrong = bytes(1000) + ONE[1000:]
        upload = client.session.begin_upload(digest_of(ONE), len(ONE))
        upload.write(0, wrong[:2000])
        client.session._contents.keep(digest_of(ONE), upload._part)  # type: ignore[attr-defined]
        upload._part = None  # type: ignore[attr-defined]
        with pytest.raises(ContentMismatchError):
            client.upload(ONE, start=2000)
        assert client.received(ONE) == 0
        client.upload(ONE)


@pytest.mark.parametrize("target", [7, digest_of(ONE)], ids=["transfer", "content"])
def test_an_upload_says_why_its_session_ended(target: int | bytes) -> None:
    with host_with() as host:
        session = Brought(host).session
        upload = session.begin_upload(target, len(ONE))
        upload.write(0, ONE[:100])
        session.close(SessionClosedError("an operator ended it"))
        with pytest.raises(SessionClosedError, match="an operator ended it"):
            upload.write(100, ONE[100:])
        with pytest.raises(SessionClosedError, match="an operator ended it"):
            upload.finish()


def test_bytes_that_broke_a_rule_are_not_kept() -> None:
    with host_with() as host:
        client = Brought(host)
        upload = client.session.begin_upload(digest_of(ONE), len(ONE))
        upload.write(0, ONE[:100])
        with pytest.raises(ProtocolError):
            upload.write(50, ONE[50:100])
        assert client.received(ONE) == 0


def test_contents_that_no_plan_used_yet_outlive_a_broken_session_but_no_goodbye() -> None:
    with host_with() as host:
        cut, polite = Brought(host), Brought(host)
        cut.upload(ONE)
        polite.upload(TWO)
        cut.leave(broken=True)
        polite.leave()
        again = Brought(host)
        assert not again.is_missing(ONE) and again.is_missing(TWO)


def test_what_is_kept_goes_when_its_time_is_over() -> None:
    now = 0.0
    with host_with(keep_seconds=100, clock=lambda: now) as host:
        client = Brought(host)
        client.upload(ONE, until=1000)
        assert client.received(ONE) == 1000 and host.store.kept_bytes == len(ONE)
        now = 101.0
        host.store.expire()
        assert client.received(ONE) == 0 and host.store.kept_bytes == 0


def test_what_is_kept_has_a_bound_and_the_oldest_goes_first() -> None:
    with host_with(keep_bytes=2 * len(ONE)) as host:
        client = Brought(host)
        three = content(3)
        for data in (ONE, TWO, three):
            client.upload(data, until=1000)
        assert [client.received(data) for data in (ONE, TWO, three)] == [0, 1000, 1000]
        large = content(4, 3 * len(ONE))
        client.upload(large, until=1000)
        assert client.received(large) == 0


def test_what_is_kept_makes_way_for_contents_that_are_needed() -> None:
    with host_with(memory_bytes=6 * 4096) as host:
        client = Brought(host)
        client.upload(content(3, 4 * 4096), until=1000)
        large = content(4, 5 * 4096)
        client.upload(large)
        assert not client.is_missing(large)
        with pytest.raises(OutOfMemoryError):
            client.upload(content(5, 4 * 4096))


def test_a_stalled_upload_makes_way_for_whatever_needs_its_memory() -> None:
    now = 0.0
    with host_with(memory_bytes=6 * 4096, clock=lambda: now) as host:
        client = Brought(host)
        slow, large = content(3, 4 * 4096), content(4, 5 * 4096)
        free = free_bytes(host)
        stalled = client.session.begin_upload(digest_of(slow), len(slow))
        stalled.write(0, slow[:1000])
        now = STALLED_SECONDS - 1
        with pytest.raises(OutOfMemoryError):
            client.upload(large)
        now = STALLED_SECONDS
        client.upload(large)
        assert not client.is_missing(large)
        with pytest.raises(DeadlineExceededError, match="its memory was needed"):
            stalled.write(1000, slow[1000:])
        stalled.abort(CancelledError("the call ended"))
        client.leave()
        assert free_bytes(host) == free


def test_an_upload_that_is_whole_or_has_a_piece_under_way_is_not_stalled() -> None:
    now = 0.0
    with host_with(memory_bytes=6 * 4096, clock=lambda: now) as host:
        client = Brought(host)
        slow, large = content(3, 2 * 4096), content(4, 5 * 4096)
        under_way, whole = (client.session.begin_upload(digest_of(one), len(one)) for one in (slow, ONE))
        whole.write(0, ONE)
        now = STALLED_SECONDS
        under_way.came()
        with pytest.raises(OutOfMemoryError):
            client.upload(large)
        under_way.write(0, slow)
        assert [under_way.finish(), whole.finish()] == [len(slow), len(ONE)]


def test_a_quota_counts_no_stalled_upload() -> None:
    now = 0.0
    device, store = FakeDevice("fake0"), ContentStore(clock=lambda: now)
    account = Account("alice", Quota(device_memory_bytes=5 * 4096))
    weights = SessionWeights(lambda: [device], MemoryReclaim(store), store, account=account)

    def begin(data: bytes) -> ContentUpload:
        return ContentUpload(digest_of(data), len(data), weights, lambda _: None)

    slow, large = content(3, 4 * 4096), content(4, 4 * 4096)
    begin(slow).write(0, slow[:1000])
    with pytest.raises(OutOfMemoryError):
        begin(large)
    now = STALLED_SECONDS
    begin(large).abort(ProtocolError("enough"))
    assert account.usage().device_memory_bytes == 0
    device.close()


def test_a_tenant_may_hold_only_so_many_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_store, "MAX_CONTENTS", 1)
    with host_with() as host:
        first, second = Brought(host), Brought(host, BOB)
        first.upload(ONE)
        second.upload(TWO)
        with pytest.raises(LimitExceededError):
            first.upload(TWO)
        assert first.is_missing(TWO)


def test_a_closed_store_keeps_nothing() -> None:
    store = ContentStore()
    store.close()
    store.close()
    assert store.kept_bytes == 0 and store.received_bytes((ALICE, digest_of(ONE))) == 0


def test_sessions_that_come_compile_and_go_at_once_lose_nothing() -> None:
    """Several threads, two tenants, few contents: whatever they do, each plan has its weight, and at the end
    all memory is free."""

    def live(seed: int, host: Host) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            client = Brought(host, rng.choice((ALICE, BOB)))
            for _ in range(4):
                data = content(rng.randrange(3))
                if client.is_missing(data) and rng.random() < 0.2:
                    client.upload(data, until=1000)
                elif start := client.received(data):
                    with contextlib.suppress(ContentMismatchError):
                        client.upload(data, start=start)
                elif client.is_missing(data):
                    client.upload(data)
                else:
                    client.compile(data)
            client.leave(broken=rng.random() < 0.3)

    with host_with() as host, ThreadPoolExecutor(4) as threads:
        for seed, done in [(seed, threads.submit(live, seed, host)) for seed in range(4)]:
            try:
                done.result(60)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
