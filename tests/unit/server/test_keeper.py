"""The states of other daemons in memory: who holds which, what is in them, and when they are forgotten."""

from __future__ import annotations

import tracemalloc

import pytest

from heliograph_proto.codec.bulk import decode_piece, encode_piece
from heliograph_proto.errors import (
    HandleExistsError,
    InvalidArgumentError,
    LimitExceededError,
    ProtocolError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.v1 import keeper_pb2
from heliograph_server.runtime import keeper as keeper_module
from heliograph_server.runtime.keeper import Coming, Keeper, Ownership, TakenOverError

ME, OTHER = b"m" * 16, b"o" * 16
KEEP_SECONDS = 100.0


@pytest.fixture
def keeper() -> Keeper:
    return Keeper(100_000, KEEP_SECONDS, b"keeper")


def hold(keeper: Keeper, owner: bytes = ME, epoch: int = 0, now: float = 0.0, name: str = "a") -> Ownership:
    return keeper.hold("tenant", name, owner, epoch, b"", now)


def take(coming: Coming, data: memoryview) -> None:
    coming.came(data.nbytes)
    coming.keep(data)


def put(keeper: Keeper, held: Ownership, path: str, data: bytes) -> None:
    state = held.state
    coming = keeper.begin(state.tenant, state.name, held.epoch, path, len(data))
    if data:
        take(coming, memoryview(data))
    coming.finish()


def read(keeper: Keeper, held: Ownership, path: str, offset: int = 0, size_bytes: int = 1000) -> bytes:
    file = keeper.file(held.state.tenant, held.state.name, held.epoch, path)
    return b"".join(file.read(offset, size_bytes))


def test_a_file_is_there_once_all_its_bytes_came(keeper: Keeper) -> None:
    held, data = hold(keeper), bytes(range(1, 251)) * 40
    coming = keeper.begin("tenant", "a", held.epoch, "parts/x", len(data))
    for begin in (0, 4096):
        take(coming, memoryview(data)[begin : begin + 4096])
    with pytest.raises(UnknownHandleError):
        read(keeper, held, "parts/x")
    with pytest.raises(ProtocolError, match="ended after 8,192"):
        coming.finish()
    with pytest.raises(ProtocolError, match="after 8,192 of 10,000"):
        take(coming, memoryview(bytes(4096)))
    take(coming, memoryview(data)[8192:])
    coming.finish()
    edges = (0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 9999, 10_000, 10_001)
    for begin in edges:
        for count in edges:
            assert read(keeper, held, "parts/x", begin, count) == data[begin : begin + count]


def test_a_small_piece_is_the_last_one_or_refused(keeper: Keeper) -> None:
    held = hold(keeper)
    coming = keeper.begin("tenant", "a", held.epoch, "parts/x", 5000)
    with pytest.raises(ProtocolError, match="4,096 are the fewest"):
        take(coming, memoryview(bytes(4095)))
    for size in (4096, 904):
        take(coming, memoryview(bytes(size)))
    coming.finish()
    assert [one.nbytes for one in coming.file.read(4095, 2)] == [1, 1]
    assert [one.nbytes for one in coming.file.read(10, 1)] == [1]


def test_a_piece_is_charged_with_at_least_what_it_takes() -> None:
    keeper, count = Keeper(2**30, KEEP_SECONDS, b"keeper"), 1000
    held = hold(keeper)
    message = encode_piece(bytes(4096))
    tracemalloc.start()
    coming = keeper.begin("tenant", "a", held.epoch, "parts/x", 4096 * count)
    for _ in range(count):
        piece = decode_piece(bytes(bytearray(message)))
        assert piece is not None
        take(coming, piece)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= coming.file.charged_bytes < 1.1 * taken


def test_a_file_that_is_removed_is_read_no_more_and_takes_no_memory(keeper: Keeper) -> None:
    held = hold(keeper)
    coming = keeper.begin("tenant", "a", held.epoch, "parts/x", 8192)
    for number in (1, 2):
        take(coming, memoryview(bytes([number]) * 4096))
    coming.finish()
    reading = coming.file.read(0, 8192)
    first = next(reading)
    keeper.remove("tenant", "a", held.epoch, ["parts/x"])
    assert bytes(first) == b"\1" * 4096
    with pytest.raises(UnknownHandleError, match="removed while it was read"):
        next(reading)
    assert keeper.figures().used_bytes == 0


def test_files_are_renamed_all_or_none_and_replace_others(keeper: Keeper) -> None:
    held = hold(keeper)
    for path in ("parts/1", "parts/2", "kept"):
        put(keeper, held, path, path.encode())
    used = keeper.figures().used_bytes
    with pytest.raises(UnknownHandleError):
        keeper.rename("tenant", "a", held.epoch, [("parts/1", "x"), ("parts/3", "y")])
    with pytest.raises(InvalidArgumentError, match="twice"):
        keeper.rename("tenant", "a", held.epoch, [("parts/1", "x"), ("parts/1", "y")])
    assert sorted(held.state.files) == ["kept", "parts/1", "parts/2"]
    keeper.rename("tenant", "a", held.epoch, [("parts/1", "kept"), ("parts/2", "new")])
    assert read(keeper, held, "kept") == b"parts/1" and sorted(held.state.files) == ["kept", "new"]
    assert keeper.figures().used_bytes < used
    keeper.remove("tenant", "a", held.epoch, ["kept", "new", "never"])
    assert keeper.figures().used_bytes == 0


def test_one_owner_at_a_time_holds_a_state_and_an_earlier_one_is_refused(keeper: Keeper) -> None:
    first = hold(keeper)
    put(keeper, first, "kept", b"data")
    with pytest.raises(HandleExistsError, match="another daemon"):
        hold(keeper, OTHER)
    keeper.let_go(first, 1.0)
    second = hold(keeper, OTHER, now=2.0)
    assert read(keeper, second, "kept") == b"data" and second.epoch > first.epoch
    for call in (
        lambda: put(keeper, first, "x", b"late"),
        lambda: read(keeper, first, "kept"),
        lambda: keeper.remove("tenant", "a", first.epoch, ["kept"]),
        lambda: keeper.rename("tenant", "a", first.epoch, [("kept", "x")]),
    ):
        with pytest.raises(HandleExistsError):
            call()
    with pytest.raises(TakenOverError):
        hold(keeper, ME, first.epoch)
    keeper.let_go(second, 3.0)
    with pytest.raises(TakenOverError):
        hold(keeper, ME, first.epoch)


def test_an_owner_comes_back_in_a_new_epoch_before_its_old_stream_is_found_dead(keeper: Keeper) -> None:
    first = hold(keeper)
    put(keeper, first, "kept", b"data")
    put(keeper, first, "parts/x", b"part")
    late = keeper.begin("tenant", "a", first.epoch, "parts/late", 0)
    again = hold(keeper, ME, first.epoch)
    assert first.is_replaced and sorted(again.state.files) == ["kept"]
    with pytest.raises(HandleExistsError):
        late.finish()
    late.give_up()
    keeper.let_go(first, 5.0)
    assert keeper.figures().held == 1
    put(keeper, again, "more", b"")


def test_an_owner_that_missed_answers_is_still_the_owner(keeper: Keeper) -> None:
    hold(keeper)
    first = hold(keeper)
    put(keeper, first, "kept", b"data")
    missed = hold(keeper, ME, first.epoch)
    for is_gone in (False, True):
        if is_gone:
            keeper.let_go(missed, 2.0)
        missed = hold(keeper, ME, first.epoch, 3.0)
        assert read(keeper, missed, "kept") == b"data"
    with pytest.raises(HandleExistsError, match="another daemon keeps"):
        hold(keeper, OTHER)
    keeper.let_go(missed, 4.0)
    other = hold(keeper, OTHER, now=5.0)
    with pytest.raises(TakenOverError):
        hold(keeper, ME, first.epoch, 6.0)
    assert keeper.figures().held == 1 and not other.is_replaced


def test_a_state_without_its_owner_is_forgotten_after_its_time(keeper: Keeper) -> None:
    held = hold(keeper)
    put(keeper, held, "kept", b"data")
    empty = hold(keeper, name="empty")
    keeper.let_go(empty, 10.0)
    keeper.let_go(held, 10.0)
    assert keeper.figures().waiting == 1
    assert not keeper.forget_due(10.0 + KEEP_SECONDS - 1)
    assert [one.name for one in keeper.forget_due(10.0 + KEEP_SECONDS)] == ["a"]
    found = keeper.figures()
    assert (found.used_bytes, found.forgotten, found.waiting) == (0, 1, 0)
    # The owner that comes back finds a new and empty one.
    assert not hold(keeper, ME, held.epoch, 200.0).state.files


def test_memory_is_bounded_with_what_files_take_besides_their_bytes(keeper: Keeper) -> None:
    held = hold(keeper)
    with pytest.raises(LimitExceededError, match="no room") as caught:
        put(keeper, held, "parts/x", bytes(100_000))
    assert "--kept-state-size" in caught.value.advice and keeper.figures().refused == 1
    with pytest.raises(LimitExceededError):
        for number in range(1000):
            put(keeper, held, f"parts/{number}", b"")
    coming = len(held.state.files)
    assert 50 < coming < 100 and keeper.figures().used_bytes <= 100_000
    keeper.remove("tenant", "a", held.epoch, list(held.state.files))
    small = keeper.begin("tenant", "a", held.epoch, "parts/small", 95_000)
    with pytest.raises(LimitExceededError):
        for _ in range(95_000 // 4096):
            take(small, memoryview(bytes(4096)))
    small.give_up()
    assert keeper.figures().used_bytes == 0


def test_a_tenant_s_quota_leaves_room_for_the_others(keeper: Keeper) -> None:
    held, quota = hold(keeper), 10_000
    other = keeper.hold("other", "a", OTHER, 0, b"", 0.0)
    first = keeper.begin("tenant", "a", held.epoch, "parts/1", 4096, quota)
    take(first, memoryview(bytes(4096)))
    first.finish()
    with pytest.raises(LimitExceededError, match="quota of tenant 'tenant' is 10,000 bytes") as caught:
        keeper.begin("tenant", "a", held.epoch, "parts/2", 4096, quota)
    assert "kept_state_bytes" in caught.value.advice and keeper.figures().refused == 1
    keeper.begin("other", "a", other.epoch, "parts/1", 50_000, 60_000)
    found = keeper.figures()
    assert set(found.by_tenant) == {"tenant", "other"} and sum(found.by_tenant.values()) == found.used_bytes
    # Pieces count for it, too.
    second = keeper.begin("tenant", "a", held.epoch, "parts/2", 3000, quota)
    with pytest.raises(LimitExceededError, match="quota of tenant"):
        take(second, memoryview(bytes(3000)))
    second.give_up()
    keeper.remove("tenant", "a", held.epoch, ["parts/1"])
    assert keeper.figures().by_tenant["tenant"] == 0
    # What all take together is bounded all the same.
    with pytest.raises(LimitExceededError, match="for states of other daemons are taken"):
        keeper.begin("tenant", "a", held.epoch, "parts/3", 60_000)
    keeper.let_go(other, 0.0)
    keeper.let_go(held, 0.0)
    assert not keeper.states


def test_states_of_tenants_have_nothing_in_common(keeper: Keeper) -> None:
    held = hold(keeper)
    put(keeper, held, "kept", b"data")
    other = keeper.hold("other", "a", OTHER, 0, b"", 0.0)
    assert not other.state.files
    for tenant, epoch in (("other", held.epoch), ("tenant", other.epoch), ("nobody", held.epoch)):
        with pytest.raises(HandleExistsError, match="not held"):
            keeper.file(tenant, "a", epoch, "kept")


def test_what_cannot_be_a_state_or_a_file_is_refused(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "a\nb", "x" * 256):
        with pytest.raises(InvalidArgumentError, match="no name"):
            hold(keeper, name=name)
    with pytest.raises(InvalidArgumentError, match="16 bytes"):
        hold(keeper, b"short")
    with pytest.raises(InvalidArgumentError, match="its own state"):
        keeper.hold("tenant", "a", ME, 0, b"keeper", 0.0)
    with pytest.raises(UnsupportedError, match="keeps no state"):
        Keeper(0, 1.0, b"keeper").hold("tenant", "a", ME, 0, b"", 0.0)
    held = hold(keeper)
    for path in ("", "/", "a//b", "../x", "a/.", "a\0b", "x" * 256):
        with pytest.raises(InvalidArgumentError, match="no path"):
            put(keeper, held, path, b"")
    put(keeper, held, "x", b"")
    with pytest.raises(InvalidArgumentError, match="there already"):
        put(keeper, held, "x", b"")
    monkeypatch.setattr(keeper_module, "MOST_STATES", 1)
    with pytest.raises(LimitExceededError, match="the most"):
        hold(keeper, name="more")


def test_one_tenant_leaves_states_to_the_others(keeper: Keeper) -> None:
    for number in range(keeper_module.MOST_OF_TENANT):
        hold(keeper, name=f"a{number}")
    with pytest.raises(LimitExceededError, match="256 states of tenant 'tenant'"):
        hold(keeper, name="more")
    # It comes back to one that it has, and others begin theirs.
    hold(keeper, name="a0")
    keeper.hold("other", "a", OTHER, 0, b"", 0.0)
    assert keeper.figures().refused == 1


@pytest.mark.parametrize("size", [1, 127, 128, 2**20])
def test_pieces_are_encoded_as_protobuf_does(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    message = keeper_pb2.PutRequest(data=data).SerializeToString()
    assert encode_piece(data) == message == keeper_pb2.GetResponse(data=data).SerializeToString()
    assert decode_piece(message) == data
    for other in (message[:-1], message + b"\x7a\x00", b"", b"\x7a", b"\x0a\x00" + message):
        assert decode_piece(other) is None
