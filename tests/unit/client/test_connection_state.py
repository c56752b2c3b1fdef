"""The decisions of a client whose connection breaks, without one."""

from __future__ import annotations

import pytest

import heliograph as hg
from heliograph.core.connection_state import (
    LONGEST_PAUSE_SECONDS,
    MOST_FOLLOWED,
    ConnectionState,
    Dial,
    Follow,
    GiveUp,
    Reconnecting,
)

BROKE = hg.UnavailableError("the connection broke")


def down(seconds: float = 60.0, chance: float = 0.0) -> Reconnecting:
    made = Reconnecting(seconds, lambda: chance)
    assert made.broke(BROKE, 100.0) == Dial(0.0)
    return made


def pauses(reconnecting: Reconnecting, count: int, now: float = 100.0) -> list[float]:
    found = []
    for _ in range(count):
        reconnecting.dialling()
        instruction = reconnecting.broke(BROKE, now)
        assert isinstance(instruction, Dial)
        found.append(instruction.pause_seconds)
    return found


def test_a_broken_connection_is_dialled_at_once_and_then_ever_more_rarely() -> None:
    reconnecting = down()
    assert reconnecting.state is ConnectionState.DISCONNECTED
    assert pauses(reconnecting, 8) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, LONGEST_PAUSE_SECONDS]


def test_a_head_pauses_no_longer_than_its_runs_should_wait() -> None:
    reconnecting = down()
    reconnecting.longest_pause_seconds = 0.5
    assert pauses(reconnecting, 6) == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_chance_shortens_pauses_by_half_at_most() -> None:
    assert pauses(down(chance=1.0), 3) == [0.025, 0.05, 0.1]


def test_an_attach_resets_the_pauses() -> None:
    reconnecting = down()
    pauses(reconnecting, 5)
    reconnecting.dialling()
    assert reconnecting.state is ConnectionState.ATTACHING
    reconnecting.attached()
    assert reconnecting.state is ConnectionState.CONNECTED
    assert reconnecting.broke(BROKE, 200.0) == Dial(0.0)
    assert (reconnecting.breaks, pauses(reconnecting, 1)) == (2, [0.05])


def test_the_session_is_lost_at_the_end_of_its_lease() -> None:
    reconnecting = down(seconds=10.0)
    reconnecting.dialling()
    assert reconnecting.broke(BROKE, 109.99) == Dial(pytest.approx(0.01))
    reconnecting.dialling()
    end = reconnecting.broke(BROKE, 110.0)
    assert isinstance(end, GiveUp) and "no connection for 10 s" in end.error.message
    assert isinstance(end.error, hg.UnavailableError)
    assert reconnecting.state is ConnectionState.LOST


def test_the_last_pause_ends_with_the_lease() -> None:
    reconnecting = down(seconds=10.0)
    pauses(reconnecting, 8, now=100.0)
    reconnecting.dialling()
    assert reconnecting.broke(BROKE, 109.5) == Dial(0.5)


@pytest.mark.parametrize(
    "error",
    [
        hg.SessionClosedError("the session is unknown"),
        hg.ProtocolError("a gap"),
        hg.UnauthenticatedError("revoked"),
        hg.HandleExistsError("another connection has the session"),
        hg.DrainingError("the server shuts down"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_reason_of_the_server_ends_the_session(error: hg.HeliographError) -> None:
    reconnecting = Reconnecting(60.0, lambda: 0.0)
    assert reconnecting.broke(error, 1.0) == GiveUp(error)


def test_a_refused_attach_ends_the_session() -> None:
    reconnecting, refused = down(), hg.SessionClosedError("the lease has ended")
    reconnecting.dialling()
    end = reconnecting.broke(refused, 101.0)
    assert isinstance(end, GiveUp) and isinstance(end.error, hg.SessionClosedError)
    assert end.error.message == f"{BROKE.message}; and the session was gone afterwards: {refused.message}"


def test_a_daemon_that_drains_may_change_its_mind() -> None:
    reconnecting = down()
    reconnecting.dialling()
    assert isinstance(reconnecting.broke(hg.DrainingError("it drains"), 101.0), Dial)


def test_without_a_lease_a_broken_connection_ends_the_session() -> None:
    assert Reconnecting(0.0, lambda: 0.0).broke(BROKE, 1.0) == GiveUp(BROKE)


def test_a_daemon_that_has_ended_ends_a_session_unless_it_is_durable() -> None:
    reconnecting = down()
    reconnecting.dialling()
    refused = hg.UnavailableError("connection refused")
    assert reconnecting.broke(refused, 101.0, has_died=True) == GiveUp(BROKE)
    durable = down()
    durable.is_durable = True
    durable.dialling()
    assert isinstance(durable.broke(BROKE, 101.0, has_died=True), Dial)


def test_a_closed_session_is_not_dialled() -> None:
    reconnecting = down()
    reconnecting.close()
    assert isinstance(reconnecting.broke(BROKE, 101.0), GiveUp)
    assert not reconnecting.is_down


def moved(port: int = 1) -> hg.MovedError:
    found = hg.MovedError("the session is elsewhere").to(f"grpc://127.0.0.1:{port}", b"proof")
    assert isinstance(found, hg.MovedError)
    return found


def test_a_session_that_went_to_another_daemon_is_followed_from_any_state() -> None:
    up = Reconnecting(60.0, lambda: 0.0)
    found = up.broke(error := moved(), 100.0)
    assert found == Follow(error) and up.state is ConnectionState.DISCONNECTED and up.breaks == 1
    while_down = down()
    while_down.dialling()
    assert while_down.broke(error, 130.0) == Follow(error)
    # The other daemon keeps it for its lease from now on.
    assert while_down.left(130.0) == 60.0
    while_down.dialling()
    while_down.attached()
    assert while_down.state is ConnectionState.CONNECTED


def test_a_session_that_ends_with_its_connection_follows_nobody() -> None:
    assert isinstance(Reconnecting(0.0, lambda: 0.0).broke(moved(), 1.0), GiveUp)
    closed = down()
    closed.close()
    assert isinstance(closed.broke(moved(), 101.0), GiveUp)


def test_daemons_that_send_a_session_round_and_round_lose_its_client() -> None:
    reconnecting = Reconnecting(60.0, lambda: 0.0)
    for port in range(MOST_FOLLOWED):
        assert isinstance(reconnecting.broke(moved(port + 1), 1.0), Follow)
    found = reconnecting.broke(moved(), 1.0)
    assert isinstance(found, GiveUp) and isinstance(found.error, hg.UnavailableError)
    assert reconnecting.state is ConnectionState.LOST
