"""The places of state, a folder and the memory of another daemon: stores and sessions see no difference."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from core_client import CoreClient
from keepers import KeeperPlace, Place, keeper_place, place
from state_hosts import F4, PLAN, TENSOR, W, X, abandon, adder, product, state_host
from waiting import until

from heliograph.admin import connect as connect_admin
from heliograph.cli.common.status_view import frame
from heliograph_backends.cpu import CpuDevice
from heliograph_proto import commands as c
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import ConfigurationError, SnapshotFailedError
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import keeper_pb2
from heliograph_server.links import keeping
from heliograph_server.links.keeping import KeeperError, KeeperMedium
from heliograph_server.runtime.keeper import KeptBytes
from heliograph_server.state.image import Image, ImageOwner, ImageStorage
from heliograph_server.state.links import KeptLink, KeptLinks
from heliograph_server.state.medium import Medium, MediumLostError
from heliograph_server.state.store import StateStore

__all__ = ["place"]

OWNER = ImageOwner("client", b"tenant", "name", (), "shown", "key", 1, (), 60_000, 500)
SECRET = digest_of(b"secret")


def image(number: int, data: bytes, secret: bytes = SECRET) -> Image:
    storage = ImageStorage(len(data), 64, "cpu0", "cpu", 1, (digest_of(data),))
    return Image(secret, OWNER, number, storages=(storage,))


def put(store: StateStore, number: int, data: bytes, secret: bytes = SECRET) -> int:
    """Commit an image of these bytes; the bytes that were written."""
    with store.pinned() as pins:
        pins.add(memoryview(data)).result()
        store.commit(image(number, data, secret), pins)
    store.tidy(secret)
    return pins.written_bytes


def files(store: StateStore) -> list[str]:
    return [one for folder in ("contents", "sessions", "parts") for one in store.medium.paths(folder)]


@contextmanager
def cut(medium: Medium) -> Iterator[None]:
    """Cut the connection to a keeper, which is there again at the end; a folder has none."""
    if not isinstance(medium, KeeperMedium):
        yield
        return
    wanted, real = threading.Event(), medium._hold
    medium._hold = lambda: (wanted.wait(20), real())  # type: ignore[method-assign, assignment]
    link = medium._link
    assert link is not None
    link.close()
    until(lambda: not medium.is_reachable)
    yield
    medium._hold = real  # type: ignore[method-assign]
    wanted.set()
    until(lambda: medium.is_reachable)


# Stores


def test_images_and_contents_are_there_for_the_next_daemon(place: Place) -> None:
    store, data = StateStore(place.open()), bytes(range(256)) * 2**16
    assert put(store, 1, data) == len(data) and put(store, 2, data) == 0
    store.close()
    again = StateStore(place.open())
    (found,), broken = again.load()
    assert found.last_sequence == 2 and not broken
    assert b"".join(map(bytes, again.read_all((digest_of(data), digest_of(data))))) == 2 * data
    again.close()


def test_what_no_image_names_is_removed(place: Place) -> None:
    store = StateStore(place.open())
    for number in range(1, 5):
        put(store, number, bytes([number]) * 1000)
        assert len(files(store)) == 2 * min(number, 2)
    with store.pinned() as pins:
        pins.add_whole(b"never named")
    assert len(files(store)) == 4
    store.forget(SECRET)
    assert files(store) == [] and store.size_bytes() < 100
    store.close()


def test_contents_that_could_not_be_removed_stay_once_another_session_has_them(place: Place) -> None:
    store, other = StateStore(place.open()), digest_of(b"other")
    put(store, 1, b"weights")
    with cut(store.medium):
        store.forget(SECRET)
        assert files(store) == [] and store.medium.size_of(f"sessions/{SECRET.hex()}/1.image") is None
    put(store, 1, b"weights", other)
    assert store.holds(digest_of(b"weights")) and len(files(store)) == 2
    store.close()
    store = StateStore(place.open())
    ((found,), broken) = store.load()
    assert found.secret_digest == other and not broken and store.whole(digest_of(b"weights")) == b"weights"
    store.close()


def test_what_a_killed_daemon_left_unnamed_is_removed_at_the_start(place: Place) -> None:
    killed = StateStore(place.open())
    put(killed, 1, b"named")
    part = killed.medium.write((memoryview(b"written"),), 7)
    other = killed.medium.write((memoryview(b"content"),), 7)
    name = digest_of(b"content").hex()
    killed.medium.name({other: f"contents/{name[:2]}/{name}"})
    killed.close()
    store = StateStore(place.open())
    assert store.medium.size_of(part) is None and store.holds(digest_of(b"content"))
    assert len(store.load()[0]) == 1 and not store.holds(digest_of(b"content"))
    store.close()


def test_an_image_whose_contents_are_gone_gives_way_to_the_one_before(place: Place) -> None:
    store = StateStore(place.open())
    put(store, 1, b"one")
    put(store, 2, b"two")
    name = digest_of(b"two").hex()
    store.medium.remove([f"contents/{name[:2]}/{name}"])
    (found,), broken = store.load()
    assert found.last_sequence == 1 and not broken
    with store.pinned() as pins, pytest.raises(SnapshotFailedError, match="is gone"):
        store.commit(image(3, b"three"), pins)
    with pytest.raises(SnapshotFailedError, match="is gone"):
        store.whole(digest_of(b"two"))
    store.close()


def test_an_image_whose_name_may_have_been_given_is_removed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(place.open())
    put(store, 1, b"one")
    real = store.medium.name

    def unknown(parts: Mapping[str, str]) -> None:
        real(parts)
        if any(path.startswith("sessions/") for path in parts.values()):
            raise OSError(errno.EIO, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(store.medium, "name", unknown)
        with pytest.raises(SnapshotFailedError, match="no answer"):
            put(store, 2, b"two")
    assert len(files(store)) == 2
    put(store, 3, b"three")
    assert [one.last_sequence for one in store.load()[0]] == [3] and len(files(store)) == 4
    store.close()


def test_the_newest_image_has_the_highest_number_also_above_one_that_is_damaged(place: Place) -> None:
    store, folder = StateStore(place.open()), f"sessions/{SECRET.hex()}"
    put(store, 1, b"one")
    part = store.medium.write((memoryview(b"damaged"),), 7)
    store.medium.name({part: f"{folder}/7.image"})
    assert [one.last_sequence for one in store.load()[0]] == [1]
    put(store, 2, b"two")
    assert [one.last_sequence for one in store.load()[0]] == [2]
    for number in (3, 4):
        put(store, number, b"more")
    assert [path.rpartition("/")[2] for path in store.medium.paths(folder)] == ["10.image", "9.image"]
    store.close()


def test_two_daemons_do_not_share_a_place(place: Place) -> None:
    store = StateStore(place.open())
    with pytest.raises(ConfigurationError, match="another daemon keeps the state of its sessions in"):
        place.open()
    put(store, 1, b"goes on")
    store.close()
    place.open().close()


def test_bytes_that_cannot_be_read_leave_nothing(place: Place) -> None:
    store = StateStore(place.open())
    put(store, 1, b"good")
    before = files(store)

    def broken() -> Iterator[memoryview]:
        yield memoryview(bytes(2**21))
        raise SnapshotFailedError("the device is gone")

    with store.pinned() as pins, pytest.raises(SnapshotFailedError, match="the device is gone"):
        store.add(digest_of(b"x"), 2**22, broken(), pins)
    with store.pinned() as pins, pytest.raises(SnapshotFailedError, match="bytes changed"):
        pins.add_checked(digest_of(b"x"), 3, [memoryview(b"abc")])
    assert files(store) == before and len(store.load()[0]) == 1
    store.close()


def test_pieces_of_any_size_are_written(place: Place) -> None:
    store = StateStore(place.open())
    sizes = (1, 0, 4095, 4096, 2**20 - 1, 2**20, 2**20 + 1, 5, 3 * 2**20 + 7, 2**20 - 5000, 5001, 2, 3)
    for last in range(1, len(sizes) + 1):
        pieces = [np.full(size, size % 251, np.uint8).data for size in sizes[:last]]
        data = b"".join(pieces)
        with store.pinned() as pins:
            pins.add_checked(digest_of(data), len(data), pieces)
            storages = (ImageStorage(len(data), 64, "cpu0", "cpu", 1, (digest_of(data),)),)
            store.commit(Image(SECRET, OWNER, last, storages=storages), pins)
        assert store.whole(digest_of(data)) == data
        store.tidy(SECRET)
    store.close()


def test_links_to_members_are_kept_for_the_next_head(place: Place) -> None:
    store = StateStore(place.open())
    assert store.read_links() == b""
    KeptLinks(store).keep("m0", b"one", b"secret")
    store.close()
    store = StateStore(place.open())
    assert KeptLinks(store).earlier == {"m0": KeptLink(b"one", b"secret")}
    store.close()


def test_several_threads_write_equal_and_other_contents_once(place: Place) -> None:
    store = StateStore(place.open())
    data = [np.full(2**20, number % 7, np.uint8).data for number in range(40)]
    with store.pinned() as pins:
        digests = [one.result() for one in [pins.add(one) for one in data]]
        storages = tuple(ImageStorage(2**20, 64, "cpu0", "cpu", 1, (one,)) for one in digests)
        store.commit(Image(SECRET, OWNER, 1, storages=storages), pins)
    assert pins.written_bytes == 7 * 2**20 and len(store.medium.paths("contents")) == 7
    assert [b"".join(map(bytes, store.read(one))) for one in digests] == [bytes(one) for one in data]
    store.close()


# Sessions


def run(client: CoreClient, x: np.ndarray = X) -> list[float]:
    sent = client.send(c.RunCommand(PLAN, (c.InputBinding(0, x.tobytes()),), (c.OutputBinding(0, 0, True),)))
    done = client.wait(sent)
    if done.error is not None:
        raise done.error
    found: list[float] = np.frombuffer(done.outputs[0][1], np.float32).tolist()
    return found


def test_a_session_goes_on_from_either_place(place: Place) -> None:
    with state_host(place.open(), CpuDevice()) as host:
        client = CoreClient(host=host, durable=True)
        client.compile(PLAN, adder())
        client.do(c.Allocate(TENSOR, F4))
        client.do(c.SetTensor(TENSOR, 0, X.tobytes()))
        run(client)
        assert host.snapshots is not None
        host.snapshots.take(client.session)
        abandon(host)
    with state_host(place.open(), CpuDevice()) as host:
        client = CoreClient(host=host, token=client.token)
        assert run(client) == (2 * X).tolist() and client.get(TENSOR, F4).tolist() == X.tolist()
        client.session.close()
        assert host.snapshots is not None
        until(lambda: not files(host.snapshots.store))  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["images", "contents"])
def test_a_daemon_whose_place_does_not_answer_does_not_start_without_its_sessions(
    place: Place, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with state_host(place.open(), CpuDevice()) as host:
        client = CoreClient(host=host, durable=True)
        client.do(c.Allocate(TENSOR, F4))
        client.do(c.SetTensor(TENSOR, 0, X.tobytes()))
        assert host.snapshots is not None
        host.snapshots.take(client.session)
        abandon(host)

    def away(*how: object) -> Any:
        raise MediumLostError("it does not answer")

    medium = place.open()
    with monkeypatch.context() as patch:
        patch.setattr(medium, "read" if what == "images" else "blocks", away)
        with pytest.raises(SnapshotFailedError, match="does not answer"), state_host(medium, CpuDevice()):
            pass
    with state_host(place.open(), CpuDevice()) as host:
        assert CoreClient(host=host, token=client.token).get(TENSOR, F4).tolist() == X.tolist()


def test_weights_come_back_from_either_place(place: Place) -> None:
    with state_host(place.open(), CpuDevice()) as host:
        client = CoreClient(host=host, durable=True)
        client.compile(PLAN, product(client.upload(W.tobytes())))
        expected = run(client)
        assert host.snapshots is not None
        host.snapshots.take(client.session)
        abandon(host)
    with state_host(place.open(), CpuDevice()) as host:
        assert run(CoreClient(host=host, token=client.token)) == expected


def test_only_what_changed_is_written_to_either_place(place: Place) -> None:
    big = tensor_type("f32", (2**15,))
    with state_host(place.open(), CpuDevice()) as host, CoreClient(host=host, durable=True) as client:
        assert host.snapshots is not None
        for number in (1, 2):
            client.do(c.Allocate(number, big))
            for start in range(0, big.nbytes, 2**16):
                client.do(c.SetTensor(number, start, bytes([number]) * 2**16))
        first = host.snapshots.take(client.session)
        assert first.written_bytes == first.size_bytes == 2 * big.nbytes
        assert host.snapshots.take(client.session).written_bytes == 0
        client.do(c.SetTensor(2, 0, b"abcd"))
        assert host.snapshots.take(client.session).written_bytes == big.nbytes


# The other daemon


@pytest.fixture
def keeper() -> Iterator[KeeperPlace]:
    with keeper_place() as made:
        yield made


def test_a_state_takes_no_more_memory_than_its_keeper_gives() -> None:
    with keeper_place(kept_state_size=300_000) as keeper:
        store = StateStore(keeper.open())
        put(store, 1, bytes(100_000))
        with pytest.raises(SnapshotFailedError, match="no room for") as caught:
            put(store, 2, b"x" * 250_000)
        assert "--kept-state-size" in caught.value.advice and "runs go on" in caught.value.advice
        assert len(store.load()[0]) == 1 and store.whole(digest_of(bytes(100_000))) == bytes(100_000)
        assert keeper.keeper.figures().refused == 1
        put(store, 2, b"y" * 150_000)
        assert 250_000 < keeper.keeper.figures().used_bytes < 300_000
        store.forget(SECRET)
        store.close()
        until(lambda: keeper.keeper.figures().used_bytes == 0)


def test_a_daemon_that_keeps_nothing_says_how_to_have_it_keep_something() -> None:
    with (
        keeper_place(kept_state_size=0) as keeper,
        pytest.raises(ConfigurationError, match="keeps no state") as caught,
    ):
        keeper.open()
    assert "--kept-state-size" in caught.value.advice


def test_a_daemon_does_not_keep_its_own_state(keeper: KeeperPlace) -> None:
    with pytest.raises(ConfigurationError, match="cannot keep its own state"):
        keeper.open(own=keeper.keeper.identity)


def test_a_keeper_that_is_not_there_is_waited_for_and_then_named() -> None:
    with keeper_place() as keeper:
        pass
    with pytest.raises(ConfigurationError, match="cannot reach") as caught:
        keeper.open(start_seconds=0.3)
    assert "start that daemon" in caught.value.advice


def test_states_of_other_names_and_their_owners_do_not_meet(keeper: KeeperPlace) -> None:
    one, other = StateStore(keeper.open()), StateStore(KeeperPlace(keeper.daemon, "other").open())
    put(one, 1, b"one")
    assert files(other) == [] and other.load() == ([], [])
    put(other, 1, b"other")
    other.forget(SECRET)
    assert len(one.load()[0]) == 1
    one.close()
    other.close()


def test_operators_see_the_states_that_a_daemon_keeps(keeper: KeeperPlace) -> None:
    store = StateStore(keeper.open())
    put(store, 1, bytes(10_000))
    with connect_admin(keeper.daemon.url) as admin:
        (state,) = admin.snapshot().kept_states
        assert (state.name, state.held, state.files) == ("state", True, 2) and state.size_bytes > 10_000
        shown = [text for text, _ in frame(admin.snapshot(), "here", 120)]
        assert any(line.startswith("state of") for line in shown)
        store.close()
        until(lambda: admin.snapshot().kept_states[0].away_seconds > 0)


def test_a_state_is_forgotten_after_its_time_and_a_later_owner_finds_nothing() -> None:
    with keeper_place(kept_state_seconds=1.0) as keeper:
        store = StateStore(keeper.open())
        put(store, 1, b"data")
        store.close()
        until(lambda: keeper.keeper.figures().forgotten == 1)
        assert keeper.keeper.figures().used_bytes == 0
        again = StateStore(keeper.open())
        assert again.load() == ([], []) and again.medium.losses == 0
        again.close()


def test_an_owner_whose_stream_broke_comes_back_to_what_it_had(keeper: KeeperPlace) -> None:
    store = StateStore(keeper.open())
    put(store, 1, b"data")
    link = store.medium._link  # type: ignore[attr-defined]
    link.close()
    until(lambda: store.medium.is_reachable and store.medium._link is not link)  # type: ignore[attr-defined]
    put(store, 2, b"more")
    assert store.medium.losses == 0 and len(files(store)) == 4
    store.close()


def test_an_image_that_is_written_after_an_unnoticed_loss_counts(keeper: KeeperPlace) -> None:
    store = StateStore(keeper.open())
    for number in range(1, 4):
        put(store, number, bytes([number]))
    with store.pinned() as pins:
        with cut(store.medium):
            # As if it was restarted.
            keeper.keeper._states.clear()
            keeper.keeper.identity = b"another run"
        pins.add_whole(b"four")
        store.commit(image(4, b"four"), pins)
    assert store.medium.losses == 1 and [one.last_sequence for one in store.load()[0]] == [4]
    put(store, 5, b"five")
    assert [one.last_sequence for one in store.load()[0]] == [5] and len(files(store)) == 4
    store.forget(SECRET)
    assert files(store) == []
    store.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_refused_read_is_not_asked_for_again_and_again(
    keeper: KeeperPlace, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = StateStore(keeper.open()), []
    put(store, 1, b"data")

    def refused(*what: object) -> Any:
        asked.append(what)
        raise KeeperError(number, "it is refused", "give it a token")

    monkeypatch.setattr(store.medium, "_pieces", refused)
    monkeypatch.setattr(keeping, "READ_SECONDS", 0.3)
    with pytest.raises(MediumLostError, match="refused") as caught:
        store.whole(digest_of(b"data"))
    assert "give it a token" in caught.value.advice
    assert len(asked) <= 5 if number == errno.ESTALE else len(asked) == 1
    store.close()


def test_a_keeper_that_sends_more_than_was_asked_for_is_not_read(
    keeper: KeeperPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(keeper.open())
    put(store, 1, bytes(100_000))
    monkeypatch.setattr(KeptBytes, "read", lambda *_: itertools.repeat(memoryview(bytes(2**16))))
    with pytest.raises(MediumLostError, match="more than was asked"):
        store.whole(digest_of(bytes(100_000)))
    store.close()


def test_an_owner_that_missed_an_answer_comes_back(keeper: KeeperPlace) -> None:
    store = StateStore(keeper.open())
    put(store, 1, b"data")
    medium: Any = store.medium
    came, missed = medium._came, []

    def miss(link: Any, listed: dict[str, int]) -> None:
        if missed:
            came(link, listed)
        else:
            missed.append(link)
            link.close()

    medium._came = miss
    medium._link.close()
    until(lambda: missed and medium.is_reachable)
    put(store, 2, b"more")
    assert not medium.is_taken_over and medium.losses == 0 and len(files(store)) == 4
    store.close()


def test_a_session_that_was_closed_while_the_keeper_was_away_does_not_come_back(keeper: KeeperPlace) -> None:
    store = StateStore(keeper.open())
    put(store, 1, bytes(100_000))
    with cut(store.medium):
        store.forget(SECRET)
        assert keeper.keeper.figures().used_bytes > 100_000
    until(lambda: keeper.keeper.figures().used_bytes == 0)
    assert store.medium.losses == 0
    store.close()


def test_the_next_owner_removes_what_one_could_not_that_ended_while_the_keeper_was_away(
    keeper: KeeperPlace,
) -> None:
    """Contents that no image names, and images that newer ones have replaced; those of a session that was
    closed are the next owner's, who has it until its lease ends."""
    store, closed = StateStore(keeper.open()), digest_of(b"closed")
    medium: Any = store.medium
    for number in range(1, 4):
        put(store, number, bytes([number]) * 1000)
    put(store, 1, b"closed", closed)
    with store.pinned() as pins:
        pins.add_whole(bytes([3]) * 1000)
        store.commit(image(4, bytes([3]) * 1000), pins)
        pins.add_whole(b"never named")
        store.medium.name({pins.parts.pop(digest_of(b"never named")): "contents/00/00"})
        # The keeper goes, and the owner ends before it is back.
        medium._hold = lambda: None
        medium._link.close()
        until(lambda: not medium.is_reachable)
        store.tidy(SECRET)
        store.forget(closed)
        store.close()
    (state,) = keeper.keeper.states
    assert len(state.files) == 8
    store = StateStore(keeper.open())
    images, broken = store.load()
    assert {one.secret_digest for one in images} == {SECRET, closed} and not broken
    store.tidy(SECRET)
    store.forget(closed)
    name = SECRET.hex()
    assert [one for one in files(store) if name in one] == [f"sessions/{name}/{one}.image" for one in (3, 4)]
    assert len(state.files) == len(files(store)) == 3
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_acknowledged_snapshots_stay_and_closed_sessions_go_whatever_answers_are_lost(
    keeper: KeeperPlace, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions share a few contents, and the stream ends after calls that the keeper has done."""
    chance, store, kept = random.Random(seed), StateStore(keeper.open()), dict[bytes, int]()
    medium: Any = store.medium
    real = medium._call
    monkeypatch.setattr(keeping, "WRITE_SECONDS", 0.0)

    def unanswered(link: Any, method: str, request: bytes) -> None:
        real(link, method, request)
        if chance.random() < 0.15:
            medium._end(link)
            link.close()
            raise KeeperError(errno.EHOSTUNREACH, "no answer")

    medium._call = unanswered
    secrets = [digest_of(bytes([one])) for one in range(3)]
    for number in range(1, 50):
        if chance.random() < 0.7:
            until(lambda: medium.is_reachable)
        secret, data = chance.choice(secrets), bytes([chance.randrange(3)]) * 100
        if chance.random() < 0.4:
            store.forget(secret)
            kept.pop(secret, None)
            continue
        try:
            put(store, number, data, secret)
        except SnapshotFailedError:
            continue
        kept[secret] = number
    medium._call = real
    until(lambda: medium.is_reachable)
    medium.remove(())
    assert medium.losses == 0 and not medium.is_taken_over
    store.close()
    store = StateStore(keeper.open())
    images, broken = store.load()
    assert not broken and {one.secret_digest: one.last_sequence for one in images} == kept
    for one in images:
        assert len(store.whole(one.storages[0].pieces[0])) == 100
    store.close()


def test_a_content_whose_stream_is_torn_leaves_the_last_image(keeper: KeeperPlace) -> None:
    store = StateStore(keeper.open())
    put(store, 1, b"good")
    used = keeper.keeper.figures().used_bytes

    def torn() -> Iterator[memoryview]:
        yield memoryview(bytes(2**21))
        until(lambda: keeper.keeper.figures().used_bytes > used)
        store.medium._link.close()  # type: ignore[attr-defined]
        yield memoryview(bytes(2**21))

    with store.pinned() as pins, pytest.raises(SnapshotFailedError, match="cannot be reached"):
        store.add(digest_of(b"x"), 2**22, torn(), pins)
    until(lambda: keeper.keeper.figures().used_bytes == used)
    assert [one.last_sequence for one in store.load()[0]] == [1] and len(files(store)) == 2
    put(store, 2, b"more")
    store.close()


@pytest.mark.parametrize("method", ["Put", "Rename", "Get", "Remove"])
def test_requests_of_an_ended_stream_change_and_read_nothing(keeper: KeeperPlace, method: str) -> None:
    store = StateStore(keeper.open())
    put(store, 1, b"good")
    before, (path, *_) = files(store), files(store)
    held = store.medium._link.state  # type: ignore[attr-defined]
    stale = keeper_pb2.KeptState(name=held.name, epoch=held.epoch + 1)
    requests = {
        "Put": keeper_pb2.PutRequest(state=stale, file=keeper_pb2.KeptFile(path="parts/x")),
        "Rename": keeper_pb2.RenameRequest(state=stale, files=[keeper_pb2.Renaming(path=path, to="x")]),
        "Get": keeper_pb2.GetRequest(state=stale, path=path, size_bytes=4),
        "Remove": keeper_pb2.RemoveRequest(state=stale, paths=[path]),
    }
    with grpc.insecure_channel(keeper.daemon.url.removeprefix("grpc://")) as channel:
        call: Any = channel.stream_stream(f"/heliograph.v1.KeeperService/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([requests[method].SerializeToString()]), timeout=20))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert files(store) == before and store.whole(digest_of(b"good")) == b"good"
    store.close()


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        ("Hold", []),
        ("Hold", [b"\xff" * 10]),
        ("Hold", [bytes(2**20 + 1)]),
        ("Put", [b""]),
        ("Rename", [b"\x0a\xff"]),
        ("Get", [b""]),
        ("Remove", [keeper_pb2.RemoveRequest(paths=["x"] * 1001).SerializeToString()]),
    ],
)
def test_what_is_no_request_is_refused_with_an_error(
    keeper: KeeperPlace, method: str, messages: list[bytes]
) -> None:
    with grpc.insecure_channel(keeper.daemon.url.removeprefix("grpc://")) as channel:
        call: Any = channel.stream_stream(f"/heliograph.v1.KeeperService/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter(messages), timeout=20))
        error: Any = caught.value
        assert error_from_metadata(tuple(error.trailing_metadata())) is not None
    assert keeper.keeper.figures().used_bytes == 0


def test_pieces_beyond_the_file_or_too_large_are_refused(keeper: KeeperPlace) -> None:
    store = StateStore(keeper.open())
    state = store.medium._link.state  # type: ignore[attr-defined]
    file = keeper_pb2.KeptFile(path="parts/x", size_bytes=2**22)
    first = keeper_pb2.PutRequest(state=state, file=file).SerializeToString()
    for pieces in ([2**20 + 2000], [0], [2**20] * 5, [2**20]):
        messages = [keeper_pb2.PutRequest(data=bytes(one)).SerializeToString() for one in pieces]
        with grpc.insecure_channel(keeper.daemon.url.removeprefix("grpc://")) as channel:
            call: Any = channel.stream_stream("/heliograph.v1.KeeperService/Put")
            with pytest.raises(grpc.RpcError):
                list(call(iter([first, *messages]), timeout=20))
        until(lambda: keeper.keeper.figures().used_bytes == 0)
    store.close()


def test_an_owner_that_was_cut_off_finds_that_another_has_taken_over(keeper: KeeperPlace) -> None:
    old = StateStore(keeper.open())
    put(old, 1, b"old")
    # As if its connection to the keeper was cut: it comes back later than the other one begins.
    medium = old.medium
    wanted = threading.Event()
    hold = medium._hold  # type: ignore[attr-defined]
    medium._hold = lambda: (wanted.wait(20), hold())  # type: ignore[attr-defined]
    medium._link.close()  # type: ignore[attr-defined]
    new = StateStore(keeper.open())
    assert [one.last_sequence for one in new.load()[0]] == [1]
    put(new, 2, b"new")
    wanted.set()
    until(lambda: medium.is_taken_over)
    with pytest.raises(SnapshotFailedError, match="taken over|taken it over"):
        put(old, 3, b"other bytes")
    with pytest.raises(SnapshotFailedError, match="taken over"):
        old.write_links(b"x")
    old.forget(SECRET)
    put(new, 4, b"more")
    assert [one.last_sequence for one in new.load()[0]] == [4] and len(files(new)) == 4
    old.close()
    new.close()
