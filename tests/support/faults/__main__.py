"""`python -m faults`: breaks connections at every message of programs, on every road."""

from __future__ import annotations

import argparse
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from certificates import Authority
from forked_daemons import serve
from fuzzing import programs
from fuzzing.programs import DEVICE, PROGRAMS, X, small_graph, spread
from pool_daemons import wait_for_devices

import heliograph as hg
from faults.proxy import Fault, Kind, Place, Proxy, proxy
from heliograph import admin
from heliograph.transport.direct import opening
from heliograph_proto.addresses import Address
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import DirectOffer

#: The silence after which both sides take the other for lost.
SILENCE_SECONDS = 1.0
#: The bound of each call of a program, which counts where a message is lost and the connection lives.
CALL_SECONDS = 4.0
#: Every program ends in this time, whatever happens.
BOUND_SECONDS = 30.0
#: The lease of a session that its client could not end, since its connection was broken for good.
LEASE_SECONDS = 8
#: The time that a daemon has to forget what broke.
FORGET_SECONDS = 20.0
#: Cases between two looks at the daemon.
BATCH = 25
#: The most messages of one direction that are harmed; of more, some are drawn.
MOST_PLACES = 24
ROADS = ("tcp", "tls", "direct", "pool")
#: The devices of a whole pool.
DEVICES = ("cpu0", "m0/cpu0", "m1/cpu0", "m2/cpu0")


@dataclass
class Report:
    """What was broken, how the programs ended, and what must never have been."""

    cases: int = 0
    #: Cases in which the program never came to the place.
    idle: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    faults: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0


class Setting:
    """A daemon, or a pool of three members, behind a proxy."""

    def __init__(self, road: str, stack: ExitStack, folder: Path) -> None:
        self.road = road
        self._connect: dict[str, Any] = {"silence_seconds": SILENCE_SECONDS, "shared_memory": False}
        options = ["--device", DEVICE, "--silence-seconds", str(SILENCE_SECONDS), "--log-level", "error"]
        options += ["--lease", str(LEASE_SECONDS)]
        if road == "tls":
            authority = Authority(folder)
            pair = authority.server()
            options += ["--tls-certificate", pair.certificate, "--tls-key", pair.key]
            self._connect["ca"] = authority.ca
        scheme = "grpcs" if road == "tls" else "grpc"
        if road == "pool":
            members = [stack.enter_context(_daemon(options, "grpc")) for _ in range(3)]
            self.proxy: Proxy = stack.enter_context(proxy(_target(members[0]), numbered=False))
            named = [f"127.0.0.1:{self.proxy.port}", *map(_target, members[1:])]
            pool = ",".join(f"m{number}={one}" for number, one in enumerate(named))
            self.url = stack.enter_context(
                _daemon([*options, "--pool", f"static:{pool}", "--pool-silence-seconds", "0.5"], "grpc")
            )
            self.programs: dict[str, Callable[[hg.Session], None]] = {"spread": spread}
        elif road == "direct":
            self.url = stack.enter_context(_daemon(options, scheme))
            self._connect["compression"] = "on"
            with hg.connect(self.url, **self._connect) as session:
                offer = session.info.direct
                assert offer is not None and session.command_socket
            self.proxy = stack.enter_context(proxy(f"127.0.0.1:{offer.port}", is_direct=True))
            stack.enter_context(_led_to(self.proxy.port))
            self.programs = {**PROGRAMS, "moving": moving}
        else:
            self.direct = stack.enter_context(_daemon(options, scheme))
            self.proxy = stack.enter_context(proxy(_target(self.direct), road == "tls"))
            self.url = f"{scheme}://localhost:{self.proxy.port}"
            self.programs = dict(PROGRAMS)

    def run(self, program: Callable[[hg.Session], None]) -> None:
        """Run a program in a session of its own."""
        with hg.connect(self.url, timeout=5.0, **self._connect) as session:
            program(session)

    def heal(self) -> None:
        """Break what is there, and wait until everything works again."""
        self.proxy.arm(None)
        self.proxy.drop()
        # A port that stalled once is tried again in the next case.
        opening._avoided.clear()
        if self.road == "pool":
            with hg.connect(self.url, timeout=5.0, **self._connect) as session:
                wait_for_devices(session, *DEVICES, seconds=FORGET_SECONDS)

    def look(self) -> list[str]:
        """Return what is wrong with the daemon once nothing is broken any more."""
        self.heal()
        faults = []
        with hg.connect(self.url, timeout=10.0, **self._connect) as session:
            found = session.compile(small_graph()).run(x=X, timeout=10)["y"]
            if not (found == 4.0).all():
                faults.append("a new session got a wrong answer")
        where = {name: self._connect[name] for name in ("ca",) if name in self._connect}
        with admin.connect(self.url, **where) as operator:
            end = time.monotonic() + FORGET_SECONDS
            while (left := operator.sessions()) and time.monotonic() < end:
                time.sleep(0.2)
            faults += [f"session {one.number} of {one.client} is left" for one in left]
        return faults


def moving(session: hg.Session) -> None:
    """Tensors and weights that go in several pieces, some of them packed."""
    array = np.arange(3 * 2**18, dtype=np.int32)
    tensor = session.put(array, timeout=programs.SECONDS)
    assert np.array_equal(tensor.get(timeout=programs.SECONDS), array)
    g = hg.Graph()
    g.output("y", g.weight("w", array[: 2**18].astype(np.float32)) + 0.0)
    found = session.compile(g, timeout=programs.SECONDS).run(timeout=programs.SECONDS)["y"]
    assert found[-1] == 2**18 - 1


@contextmanager
def _led_to(port: int) -> Iterator[None]:
    """Have the clients of this process open direct connections at another port than the offered one."""
    offered = opening.open_offered

    def elsewhere(address: Address, offer: DirectOffer, *rest: Any) -> socket.socket:
        return offered(address, replace(offer, port=port), *rest)

    opening.open_offered = elsewhere
    try:
        yield
    finally:
        opening.open_offered = offered


@contextmanager
def _daemon(options: list[str], scheme: str) -> Iterator[str]:
    process = serve("--listen", f"{scheme}://127.0.0.1:0", *options, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        yield line.removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def _target(url: str) -> str:
    return url.rpartition("/")[2]


def places(setting: Setting, program: Callable[[hg.Session], None]) -> list[Place]:
    """Run a program without harm, and return the messages that it sends and receives."""
    setting.heal()
    setting.proxy.arm(None)
    setting.run(program)
    return [
        Place(connection, to_daemon, number + 1)
        for (connection, to_daemon), count in sorted(setting.proxy.messages.items())
        for number in range(count)
    ]


def faults_of(found: list[Place], chance: random.Random, *, is_checked: bool) -> list[Fault]:
    """Every kind of harm at every place; of a direction with many messages, at some.

    Bytes are corrupted only where something above TCP would notice it (`is_checked`).
    """
    kinds = [one for one in Kind if one is not Kind.REORDER and (is_checked or one is not Kind.CORRUPT)]
    ways: dict[tuple[int, bool], list[Place]] = {}
    for one in found:
        ways.setdefault((one.connection, one.to_daemon), []).append(one)
    made = []
    for places_ in ways.values():
        drawn = places_ if len(places_) <= MOST_PLACES else chance.sample(places_, MOST_PLACES)
        for place in drawn:
            made += [Fault(kind, place, chance.random() < 0.5) for kind in kinds]
        made.append(Fault(Kind.REORDER, places_[0]))
    return made


def play(setting: Setting, name: str, fault: Fault, report: Report) -> None:
    """Run a program under a fault. It must succeed or raise a typed error, in its time."""
    setting.heal()
    setting.proxy.arm(fault)
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            setting.run(setting.programs[name])
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    began = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND_SECONDS)
    seconds = time.monotonic() - began
    report.cases += 1
    report.slowest_seconds = max(report.slowest_seconds, seconds)
    where = f"{setting.road} {name} {fault}"
    if not ended:
        report.hangs += 1
        report.faults.append(f"{where} did not end in {BOUND_SECONDS:g} s")
        setting.proxy.drop()
        thread.join(BOUND_SECONDS)
        return
    error = ended[0]
    report.idle += not setting.proxy.happened
    report.ends["success" if error is None else type(error).__name__] += 1
    if error is not None and not isinstance(error, HeliographError):
        report.faults.append(f"{where} ended with\n{''.join(traceback.format_exception(error))}")
    if error is not None and not setting.proxy.happened:
        report.faults.append(f"{where} did not happen, and the program ended with {error!r}")


def break_connections(seed: int, roads: tuple[str, ...], share: float = 1.0, most: int = 10**6) -> Report:
    """Play this share of the cases of each road, drawn at random, and at most so many."""
    chance, report = random.Random(seed), Report()
    programs.SECONDS = CALL_SECONDS
    for road in roads:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            setting = Setting(road, stack, Path(folder))
            cases = [
                (name, fault)
                for name, program in setting.programs.items()
                for fault in faults_of(places(setting, program), chance, is_checked=road != "direct")
            ]
            chance.shuffle(cases)
            for number, (name, fault) in enumerate(cases[: min(most, max(1, round(len(cases) * share)))]):
                play(setting, name, fault, report)
                if number % BATCH == BATCH - 1:
                    report.faults += setting.look()
            report.faults += setting.look()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: random)")
    parser.add_argument("--share", type=float, default=1.0, help="the share of the cases (default: all)")
    parser.add_argument("--road", action="append", choices=ROADS, help="one way (default: all)")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    report = break_connections(seed, tuple(arguments.road or ROADS), arguments.share)
    seconds = time.monotonic() - began
    print(f"{report.cases:,} cases in {seconds:.0f} s, {report.hangs} hangs, {report.idle:,} came to no harm")
    print(f"the slowest ended after {report.slowest_seconds:.1f} s")
    for name, count in report.ends.most_common():
        print(f"{count:7,} {name}")
    for fault in report.faults[:20]:
        print(f"FAULT: {fault}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
