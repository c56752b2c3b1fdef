"""Heads with a state folder that end and come back, here or elsewhere, and what their members keep."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cutting import CutProxy, cut_proxy
from forked_daemons import serve
from pool_daemons import DEVICE, SECONDS, Daemon, daemons, wait_for_devices
from surviving_daemons import SurvivingDaemon

import heliograph as hg
import heliograph.admin
from heliograph.head import members as head_members
from heliograph.head.members import connect_as_head, take_up
from heliograph_proto.digests import digest_of
from heliograph_proto.sessions import SessionStatus, WantedBytes

BOTH = ["m0/cpu0", "m1/cpu0"]
PINS = {"first/*": "m0/cpu0", "second/*": "m1/cpu0"}
SIZE = 512
WEIGHT_BYTES = SIZE * SIZE * 4
X = np.linspace(-1, 1, SIZE, dtype=np.float32).reshape(1, SIZE)
PIECE = 4096


def two_stages() -> hg.Graph:
    """A weight and a variable on each of two members."""
    generator, g = np.random.default_rng(3), hg.Graph()
    value = g.input("x", X.shape, "f32")
    for name in ("first", "second"):
        weight = generator.standard_normal((SIZE, SIZE)).astype(np.float32) / 32
        with g.scope(name):
            total = g.variable("total", X.shape, "f32")
            value = hg.assign(total, total * 0.5 + hg.tanh(value @ g.weight("w", weight)))
    g.output("y", value)
    return g


def undisturbed(runs: int) -> list[np.ndarray[Any, Any]]:
    with hg.connect("local:") as session:
        plan = session.compile(two_stages())
        return [plan.run(x=X)["y"] for _ in range(runs)]


class Site:
    """Two members and a head with a state folder."""

    def __init__(self, members: list[Daemon], folder: Path) -> None:
        self.members = members
        self.listed = ",".join(f"m{number}={one.host}" for number, one in enumerate(members))
        self.arguments = ("--device", DEVICE, "--pool", f"static:{self.listed}", "--log-level", "warning")
        self.head = SurvivingDaemon(folder, *self.arguments)

    def connect(self) -> hg.Session:
        session = self.head.connect()
        wait_for_devices(session, "cpu0", *BOTH)
        return session

    def sessions(self, place: int) -> list[SessionStatus]:
        """The sessions of a member, oldest first."""
        with heliograph.admin.connect(self.members[place].url) as admin:
            return sorted(admin.sessions(), key=lambda one: one.number)


@contextmanager
def restartable(folder: Path) -> Iterator[Site]:
    with daemons(2, "--device", DEVICE) as members:
        site = Site(members, folder)
        with site.head:
            yield site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with restartable(tmp_path / "state") as made:
        yield made


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_head_that_comes_back_takes_up_what_its_members_hold(site: Site, how: str) -> None:
    expected = undisturbed(8)
    with site.connect() as session:
        plan = session.compile(two_stages(), BOTH, pins=PINS)
        kept = session.put(X, "m1/cpu0")
        found = [plan.run(x=X)["y"] for _ in range(3)]
        session.snapshot()
        found += [plan.run(x=X)["y"] for _ in range(2)]
        before = [site.sessions(place)[-1].number for place in range(2)]
        if how == "killed":
            site.head.restart()
        else:
            assert site.head.stop() == 0
            site.head.start()
        found += [plan.run(x=X, timeout=SECONDS)["y"] for _ in range(3)]
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
        assert np.array_equal(kept.get(timeout=SECONDS), X)
        for place in range(2):
            # The weight was not sent again, and the earlier session holds nothing any more.
            (now,) = site.sessions(place)
            assert now.number > before[place] and now.received_bytes < WEIGHT_BYTES <= now.device_bytes


def test_a_member_that_kept_nothing_gets_everything_from_the_folder(site: Site) -> None:
    expected = undisturbed(5)
    with site.connect() as session:
        plan = session.compile(two_stages(), BOTH, pins=PINS)
        found = [plan.run(x=X)["y"] for _ in range(3)]
        session.snapshot()
        site.head.kill()
        site.members[0].restart()
        site.head.start()
        found += [plan.run(x=X, timeout=SECONDS)["y"] for _ in range(2)]
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
        assert site.sessions(0)[-1].received_bytes >= WEIGHT_BYTES > site.sessions(1)[-1].received_bytes


def test_a_head_restores_its_sessions_without_what_it_knew_of_its_members(site: Site) -> None:
    expected = undisturbed(3)
    with site.connect() as session:
        plan = session.compile(two_stages(), BOTH, pins=PINS)
        found = [plan.run(x=X)["y"] for _ in range(2)]
        session.snapshot()
        site.head.kill()
        (site.head.folder / "links" / "members").write_bytes(b"torn")
        site.head.start()
        found.append(plan.run(x=X, timeout=SECONDS)["y"])
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]


def test_a_head_that_is_drained_and_stays_has_its_members_again(site: Site) -> None:
    with site.connect() as session:
        session.compile(two_stages(), BOTH, pins=PINS).run(x=X)
        with heliograph.admin.connect(site.head.url) as admin:
            admin.drain(stay=True)
            admin.undo_drain()
    with site.connect() as session:
        assert session.compile(two_stages(), BOTH, pins=PINS).run(x=X)["y"].shape == X.shape


def test_another_head_takes_over_from_the_folder_and_never_beside_the_first(tmp_path: Path) -> None:
    folder, expected = tmp_path / "state", undisturbed(5)
    with restartable(folder) as site, cut_proxy(site.head.url) as way:
        with hg.connect(way.url, durable=True) as session:
            wait_for_devices(session, "cpu0", *BOTH)
            plan = session.compile(two_stages(), BOTH, pins=PINS)
            found = [plan.run(x=X)["y"] for _ in range(3)]
            session.snapshot()
            listen = "--listen", "grpc://127.0.0.1:0", "--state", str(folder)
            second = serve(*listen, *site.arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert second.stderr is not None and second.stdout is not None
            assert "another daemon keeps the state of its sessions" in second.stderr.read()
            assert second.wait(SECONDS) != 0
            second.stdout.close()
            second.stderr.close()
            assert plan.run(x=X)["y"].tobytes() == expected[3].tobytes()
            site.head.kill()
            with SurvivingDaemon(folder, *site.arguments) as other:
                _lead(way, other)
                assert plan.run(x=X, timeout=SECONDS)["y"].tobytes() == expected[4].tobytes()
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected[:3]]


def _lead(way: CutProxy, head: SurvivingDaemon) -> None:
    way.lead_to(head.url)
    way.cut()


# Taking up, as a head does it


@pytest.fixture(scope="module")
def member() -> Iterator[Daemon]:
    with daemons(1, "--device", DEVICE) as made:
        yield made[0]


@pytest.fixture
def session(member: Daemon) -> Iterator[hg.Session]:
    with connect_as_head(member.url, 10.0, 3.0, None, 60.0) as made:
        yield made


def wanted(data: bytes, device: str = "", piece_bytes: int = PIECE) -> WantedBytes:
    pieces = tuple(digest_of(data[at : at + piece_bytes]) for at in range(0, len(data), piece_bytes))
    return WantedBytes(0, len(data), piece_bytes, pieces, device)


def filled(session: hg.Session, data: bytes) -> hg.Buffer:
    buffer = session.buffer(len(data), "cpu0")
    buffer.place(len(data), "u8").set(np.frombuffer(data, np.uint8))
    session.synchronize()
    return buffer


def test_only_memory_with_the_wanted_bytes_is_taken_up(member: Daemon, session: hg.Session) -> None:
    good, changed = bytes(range(256)) * 40, bytes(256) * 40
    earlier = connect_as_head(member.url, 10.0, 3.0, None, 60.0)
    held = [filled(earlier, good), filled(earlier, changed)]
    secret = earlier.info.session
    head_members.leave(earlier)
    other = b"x" + good[1:]
    found = take_up(session, secret, [wanted(other), wanted(good, "cpu0"), wanted(good), wanted(b"more")])
    assert list(found) == [1]
    buffer, taken = found[1]
    assert taken.device == "cpu0" and buffer.place(len(good), "u8").get().tobytes() == good
    with pytest.raises(hg.SessionClosedError):
        take_up(session, secret, [wanted(good)])
    with heliograph.admin.connect(member.url) as admin:
        assert [one.device_bytes for one in admin.sessions()] == [len(good)]
    assert len(held) == 2


def test_a_session_that_is_under_way_ends_when_it_is_taken_up(member: Daemon, session: hg.Session) -> None:
    g = hg.Graph()
    x = y = g.input("x", (1024, 1024), "f32")
    for _ in range(2000):
        y = y @ x
    g.output("y", y[:1, :1])
    with connect_as_head(member.url, 10.0, 3.0, None, 60.0) as earlier:
        running = earlier.compile(g).submit(x=np.zeros((1024, 1024), np.float32))
        assert take_up(session, earlier.info.session, [wanted(b"none")]) == {}
        with pytest.raises(hg.SessionClosedError, match="taken up by a later one"):
            running.result(timeout=SECONDS)


def test_bad_requests_to_take_up_end_nothing(member: Daemon, session: hg.Session) -> None:
    data = b"12345678" * 1024
    with connect_as_head(member.url, 10.0, 3.0, None, 60.0) as earlier:
        held, secret = filled(earlier, data), earlier.info.session
        good = wanted(data)
        bad = (
            WantedBytes(0, 0, PIECE, ()),
            WantedBytes(0, len(data), 0, good.digests),
            WantedBytes(0, len(data), 1, good.digests),
            WantedBytes(0, len(data), PIECE, good.digests[:1]),
            WantedBytes(0, len(data), PIECE, (b"short", b"short")),
        )
        for want in bad:
            with pytest.raises(hg.InvalidArgumentError, match="digests"):
                take_up(session, secret, [want])
        cuts = [wanted(data, piece_bytes=PIECE + 1024 * number) for number in range(3)]
        with pytest.raises(hg.InvalidArgumentError, match="cut in more than 2 ways"):
            take_up(session, secret, cuts)
        with pytest.raises(hg.InvalidArgumentError, match="itself"):
            take_up(session, session.info.session, [good])
        with pytest.raises(hg.SessionClosedError):
            take_up(session, b"a secret of nobody", [good])
        assert held.place(len(data), "u8").get().tobytes() == data
