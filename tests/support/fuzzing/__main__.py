"""`python -m fuzzing`: plays mutated conversations against a daemon, and looks at it after every batch."""

from __future__ import annotations

import argparse
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np
import psutil

import heliograph as hg
from fuzzing.conversations import METHODS, Conversation
from fuzzing.direct import play_direct
from fuzzing.mutation import Mutator
from fuzzing.playing import Outcome, Player, Verdict
from fuzzing.programs import DEVICE, X, record, record_pool, small_graph
from heliograph import admin
from heliograph.testing import serving
from heliograph_server.auth.tokens import Token, add_token, hash_of, new_token
from heliograph_server.resources.principals import Right

#: Conversations between two looks at the daemon, and how many are played at once.
BATCH, AT_ONCE = 200, 4
#: What the daemon may hold more after a batch than after the first ones: caches, and the allocator's slack.
SLACK_BYTES, SLACK_DESCRIPTORS, SLACK_THREADS = 48 * 2**20, 16, 24
#: The share of conversations that are not mutations, but one call filled at random.
INVENTED = 0.1
#: The conversations on direct connections, for each other one.
DIRECT = 0.5
#: The most conversations that are kept for their new outcomes.
MOST_KEPT = 3000
#: With an operator's token too, these would end the daemon or the sessions of the one who looks at it.
DESTRUCTIVE = ("AdminService/Drain", "AdminService/EndSession", "AdminService/UndoDrain")


@dataclass
class Report:
    """What was played, and what must never have been."""

    cases: int = 0
    #: Those on direct connections.
    direct: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    kept: int = 0


class Daemon:
    """A daemon with a token for users and one for operators, and a session that computes all the time."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        tokens = folder / "tokens.toml"
        self.user, self.operator = new_token(), new_token()
        for name, token, rights in (
            ("user", self.user, {Right.USE, Right.POOL}),
            ("operator", self.operator, {Right.USE, Right.ADMIN}),
        ):
            add_token(tokens, Token(name, hash_of(token), name, frozenset(rights), None))
        self.log = stack.enter_context((folder / "log").open("w+"))
        command = [sys.executable, "-m", "heliograph.cli", "serve", "--device", DEVICE]
        command += ["--listen", "grpc://127.0.0.1:0", "--tokens", str(tokens)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.url = stack.enter_context(serving(self.process))
        self.target = self.url.removeprefix("grpc://")
        self._witness = stack.enter_context(hg.connect(self.url, token=self.operator, shared_memory=False))
        g = hg.Graph()
        g.output("y", g.input("x", (4, 8), "f32") @ g.weight("w", np.full((8, 8), 0.25, np.float32)))
        self._plan = self._witness.compile(g)
        self._answer = self._plan.run(x=X)["y"].tobytes()
        self._process = psutil.Process(self.process.pid)
        self._base: tuple[int, int, int] | None = None

    def look(self) -> list[str]:
        """Return what is wrong with the daemon after a batch."""
        faults = []
        if self._plan.run(x=X, timeout=20)["y"].tobytes() != self._answer:
            faults.append("the witness got a wrong answer")
        with hg.connect(self.url, token=self.user, shared_memory=False) as session:
            found = session.compile(small_graph()).run(x=X, timeout=20)["y"]
            if not (found == 4.0).all():
                faults.append("a new session got a wrong answer")
        with admin.connect(self.url, token=self.operator) as operator:
            end = time.monotonic() + 20
            while len(left := operator.sessions()) > 1 and time.monotonic() < end:
                time.sleep(0.2)
            if len(left) > 1:
                faults.append(f"{len(left) - 1} sessions are left")
        return faults + self._growth()

    def _growth(self) -> list[str]:
        now = self._process.memory_info().rss, self._process.num_fds(), self._process.num_threads()
        if self._base is None:
            self._base = now
        names = ("bytes of memory", "descriptors", "threads")
        slack = (SLACK_BYTES, SLACK_DESCRIPTORS, SLACK_THREADS)
        return [
            f"{after - before:,} {name} more than after the first batches"
            for name, before, after, most in zip(names, self._base, now, slack, strict=True)
            if after - before > most
        ]

    def settle(self) -> None:
        """What the daemon holds now is what it may hold."""
        self._base = None

    def tracebacks(self) -> list[str]:
        """Return the first line of each unexpected exception in the log."""
        self.log.seek(0)
        lines = self.log.read().splitlines()
        return sorted(
            {lines[place - 1][:200] for place, line in enumerate(lines) if line.startswith("Traceback")}
        )


class Fuzzer:
    """The corpus: recorded conversations, and those that led to something new."""

    def __init__(self, seed: int, corpus: Path | None) -> None:
        self.chance = self._chance = random.Random(seed)
        self._mutator = Mutator(self._chance)
        self._folder = corpus
        self.recorded: list[Conversation] = []
        self.kept: list[Conversation] = []
        self._seen: set[Outcome] = set()
        if corpus is not None:
            corpus.mkdir(parents=True, exist_ok=True)
            self.kept = [Conversation.from_json(path.read_text()) for path in sorted(corpus.glob("*.json"))]

    def next(self) -> Conversation:
        """Make the next case."""
        if self._chance.random() < INVENTED:
            return self._mutator.invented(self._chance.choice([*METHODS]))
        pool = self.kept if self.kept and self._chance.random() < 0.5 else self.recorded
        return self._mutator.mutated(self._chance.choice(pool), self.recorded)

    def learn(self, case: Conversation, verdict: Verdict) -> None:
        """Keep a case that led to something new."""
        new = set(verdict.outcomes) - self._seen
        if not new or len(self.kept) >= MOST_KEPT:
            return
        self._seen |= new
        self.kept.append(case)
        if self._folder is not None:
            text = case.to_json()
            (self._folder / f"{sha256(text.encode()).hexdigest()[:16]}.json").write_text(text)


def play(case: Conversation, players: dict[str, Player]) -> Verdict:
    """Play a case with the operator's token if that does no harm."""
    is_operators = any("AdminService" in method for method in case.methods)
    harms = any(method.endswith(DESTRUCTIVE) for method in case.methods)
    return players["operator" if is_operators and not harms else "user"].play(case)


def fuzz(count: int, seed: int, corpus: Path | None = None, *, pool: bool = True) -> Report:
    """Play `count` cases. Stops after a batch with faults."""
    report, fuzzer = Report(), Fuzzer(seed, corpus)
    if pool:
        fuzzer.recorded += record_pool()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        daemon = Daemon(Path(folder), stack)
        fuzzer.recorded += record(daemon.target, daemon.user, daemon.operator)
        threads = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        made = [
            {"user": Player(daemon.target, daemon.user), "operator": Player(daemon.target, daemon.operator)}
            for _ in range(AT_ONCE)
        ]
        stack.callback(lambda: [player.close() for one in made for player in one.values()])
        while report.cases < count and not report.faults:
            cases = [fuzzer.next() for _ in range(min(BATCH, count - report.cases))]
            parts = [cases[number::AT_ONCE] for number in range(AT_ONCE)]
            work = [
                threads.submit(lambda part, players: [play(one, players) for one in part], part, players)
                for part, players in zip(parts, made, strict=True)
            ]
            for part, done in zip(parts, work, strict=True):
                for case, verdict in zip(part, done.result(), strict=True):
                    fuzzer.learn(case, verdict)
                    report.outcomes.update(f"{one.code} {one.error}".strip() for one in verdict.outcomes)
                    report.faults += [f"{fault}; case: {case.to_json()[:3000]}" for fault in verdict.faults]
            report.cases += len(cases)
            report.direct += (most := round(len(cases) * DIRECT))
            report.faults += play_direct(daemon.url, daemon.user, fuzzer.chance, most)
            report.faults += daemon.look()
            if report.cases <= 5 * BATCH:
                daemon.settle()
        report.faults += [f"in the log: {line}" for line in daemon.tracebacks()]
        report.kept = len(fuzzer.kept)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="cases (default: 20,000)")
    parser.add_argument("--seed", type=int, default=None, help="of the mutations (default: random)")
    parser.add_argument(
        "--corpus", type=Path, default=None, help="a folder for cases that led to something new"
    )
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    report = fuzz(arguments.count, seed, arguments.corpus)
    print(
        f"{report.cases:,} cases, and {report.direct:,} on direct connections, "
        f"in {time.monotonic() - began:.0f} s, {report.kept:,} kept for something new"
    )
    for name, count in report.outcomes.most_common():
        print(f"{count:9,} {name}")
    for fault in report.faults[:10]:
        print(f"FAULT: {fault}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
