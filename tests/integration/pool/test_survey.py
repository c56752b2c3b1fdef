"""The ways between the members of a pool are measured once they are there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from member_factory import MemberFactory

from heliograph_server.pool.discovery import open_source
from heliograph_server.pool.pool import Pool
from heliograph_server.resources.membership import MembershipChange

SECONDS = 30.0
OWN = bytes(16)


class Seen:
    """Who is told of ways, and of members that came or are gone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.links: dict[frozenset[str], tuple[float, float]] = {}
        self.forgotten: list[str] = []

    def note_link(self, a: str, b: str, round_trip_s: float, bytes_per_s: float = 0.0) -> None:
        with self._changed:
            self.links[frozenset((a, b))] = round_trip_s, bytes_per_s
            self._changed.notify_all()

    def forget_site(self, name: str) -> None:
        with self._changed:
            self.forgotten.append(name)
            self.links = {pair: way for pair, way in self.links.items() if name not in pair}
            self._changed.notify_all()

    def wait_for(self, *pairs: tuple[str, str]) -> None:
        wanted = set(map(frozenset, pairs))
        with self._changed:
            assert self._changed.wait_for(lambda: wanted <= set(self.links), SECONDS), self.links

    def wait_for_loss(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.forgotten, SECONDS)


@pytest.fixture
def factory() -> Iterator[MemberFactory]:
    with MemberFactory() as made:
        yield made


def test_every_pair_is_measured_once_and_again_in_another_life(factory: MemberFactory) -> None:
    first, second = (factory.start("--device", "fake") for _ in range(2))
    seen = Seen()
    pool = Pool(open_source(f"static:first={first.host}:{first.port},second={second.host}:{second.port}"))
    pool.start(lambda: OWN, _ignore, seen)
    try:
        seen.wait_for(("", "first"), ("", "second"), ("first", "second"))
        trip, speed = seen.links[frozenset(("first", "second"))]
        assert 0 < trip < SECONDS and speed > 0
        assert all(0 < trip < SECONDS for trip, _ in seen.links.values())
        second.kill()
        seen.wait_for_loss("second")
        factory.start("--device", "fake", port=second.port)
        seen.wait_for(("", "second"), ("first", "second"))
    finally:
        pool.close()
    assert not [one for one in threading.enumerate() if one.name == "heliograph-survey"]


def _ignore(change: MembershipChange) -> None:
    pass
