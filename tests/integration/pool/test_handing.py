"""Members that drain while a program trains: what they hold goes to other members, and runs go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from member_factory import FactoryMember, MemberFactory
from pool_daemons import wait_for_devices
from waiting import until

import heliograph as hg
import heliograph.admin
from heliograph_proto.devices import MemberState

SECONDS = 30.0
SIZE = 16
#: A head as a daemon, and a pool of the client's own.
TRANSPORTS = ["head", "list"]


def training(stages: int = 2) -> hg.Graph:
    """Products one after the other, each with a variable that every run changes: another order of runs
    gives other bits."""
    generator = np.random.default_rng(11)
    g = hg.Graph()
    value = g.input("x", (SIZE, SIZE), "f32")
    for number in range(stages):
        weight = generator.standard_normal((SIZE, SIZE)).astype(np.float32) / 4
        with g.scope(f"stage{number}"):
            total = g.variable("total", (SIZE, SIZE), "f32")
            value = hg.assign(total, total * 0.5 + hg.tanh(value @ g.weight("w", weight)))
    g.output("y", value + 1.0)
    return g


GIVEN = [np.random.default_rng(n).standard_normal((SIZE, SIZE)).astype(np.float32) for n in range(12)]


@pytest.fixture(scope="module")
def calm() -> list[np.ndarray]:
    with hg.connect("local:#cpu:threads=1") as session:
        plan = session.compile(training())
        return [plan.run(x=one)["y"] for one in GIVEN]


class Pool:
    """Members under names of their own, and the address of their pool."""

    def __init__(self, factory: MemberFactory, transport: str, devices: list[str]) -> None:
        self.members = [factory.start("--device", one) for one in devices]
        hosts = [f"{one.host}:{one.port}" for one in self.members]
        self.names = [f"{host}/cpu0" for host in hosts]
        self.own: list[str] = []
        self.head: FactoryMember | None = None
        self.address: str | list[str] = [one.url for one in self.members]
        if transport == "head":
            own = "cpu:threads=1,memory=1MiB"
            self.head = factory.start("--device", own, "--pool", f"static:{','.join(hosts)}")
            self.address, self.own = self.head.url, ["cpu0"]
        self._all = [*self.members, *([self.head] if self.head else [])]

    @contextmanager
    def connect(self) -> Iterator[hg.Session]:
        with hg.connect(self.address, timeout=SECONDS) as session:
            wait_for_devices(session, *self.own, *self.names)
            yield session

    def drain(self, place: int, seconds: float = SECONDS) -> heliograph.admin.DrainStatus:
        with heliograph.admin.connect(self.members[place].url) as admin:
            return admin.drain(seconds)

    def is_gone(self, session: hg.Session, place: int) -> bool:
        return bool(session.device(self.names[place]).lost)

    def end(self) -> None:
        for one in self._all:
            try:
                one.kill()
            except ProcessLookupError:
                pass


@pytest.fixture(scope="module")
def factory() -> Iterator[MemberFactory]:
    with MemberFactory() as made:
        yield made


@pytest.fixture(params=TRANSPORTS)
def pool(request: pytest.FixtureRequest, factory: MemberFactory) -> Iterator[Pool]:
    made = Pool(factory, request.param, ["cpu:threads=1,memory=64MiB"] * 3)
    try:
        yield made
    finally:
        made.end()


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_training_goes_on_with_the_same_bits_when_its_member_drains(
    pool: Pool, calm: list[np.ndarray]
) -> None:
    with pool.connect() as session:
        plan = session.compile(training(), pool.names[:2], pins={"stage0/*": pool.names[0]})
        found = [plan.run(x=one)["y"] for one in GIVEN[:3]]
        runs = [plan.submit(x=one) for one in GIVEN[3:7]]
        pool.drain(0)
        found += [one.result(SECONDS)["y"] for one in runs]
        until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
        found += [plan.run(x=one)["y"] for one in GIVEN[7:]]
    assert same(found, calm)
