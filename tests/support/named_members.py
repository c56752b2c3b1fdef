"""Members of a pool under names of their own, its address, and a graph whose every run counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from member_factory import FactoryMember, MemberFactory
from pool_daemons import wait_for_devices

import heliograph as hg

SECONDS = 30.0
SIZE = 16
#: A head as a daemon, and a pool of the client's own.
TRANSPORTS = ["head", "list"]


def recurrent(stages: int) -> hg.Graph:
    """Products one after the other, named stage0, stage1, ..., each with a variable that every run changes:
    another order of runs gives other bits."""
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


class NamedMembers:
    """Members, and the address of their pool: that of a head, or those of all of them."""

    def __init__(
        self, factory: MemberFactory, transport: str, members: Sequence[Sequence[str]], head: Sequence[str]
    ) -> None:
        """`members`: the options of each, the first of which is its device; `head`: those of a head,
        beside its members."""
        self._factory = factory
        self.members = [factory.start(*one) for one in members]
        hosts = [f"{one.host}:{one.port}" for one in self.members]
        self.head: FactoryMember | None = None
        self.head_options = [*head, "--pool", f"static:{','.join(hosts)}"]
        self.address: str | list[str] = [one.url for one in self.members]
        #: The head's own devices.
        self.own: list[str] = []
        if transport == "head":
            self.head = factory.start(*self.head_options)
            self.address, self.own = self.head.url, [f"{_kind(head)}0"]
        #: The first device of each member.
        self.names = [f"{host}/{_kind(one)}0" for host, one in zip(hosts, members, strict=True)]
        self._all = [*self.members, *([self.head] if self.head else [])]

    def connect(self) -> hg.Session:
        """A session with all devices, once they are there."""
        session = hg.connect(self.address, timeout=SECONDS)
        try:
            wait_for_devices(session, *self.own, *self.names)
        except BaseException:
            session.close()
            raise
        return session

    def restart(self, place: int, *options: str) -> None:
        """Another life of a member that has ended, under its old name."""
        made = self._factory.start(*options, port=self.members[place].port)
        self._all.append(made)
        self.members[place] = made

    def restart_head(self) -> None:
        """Kill the head, and start it again."""
        assert self.head is not None
        self.head.kill()
        self.head = self._factory.start(*self.head_options, port=self.head.port)
        self._all.append(self.head)

    def end(self) -> None:
        """Kill all that are there."""
        for one in self._all:
            try:
                one.kill()
            except ProcessLookupError:
                pass


def _kind(options: Sequence[str]) -> str:
    """The kind of the first device in options, as "cpu" in "--device=cpu:threads=1"."""
    device = next(one for one in options if one != "--device")
    return device.removeprefix("--device=").partition(":")[0]
