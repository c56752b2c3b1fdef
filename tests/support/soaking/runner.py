"""A soak: rounds of work and disturbances, a quiet point after each, and the verdict at the end."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from soaking.clients import Failure
from soaking.disturbances import Disturber
from soaking.sampling import BOUNDS, Recorder, Watched
from soaking.site import ClientProcess, Site
from soaking.trends import HOUR_SECONDS, LEAST_SAMPLES, Judgement

#: The share of a soak before the first sample that counts.
WARM_UP = 0.25
#: The work between two quiet points.
ROUND_SECONDS, LONGEST_ROUND_SECONDS = 2.0, 10.0
#: A soak of more rounds has longer ones.
MOST_ROUNDS = 200
#: The most time that a slow machine gets beyond that of the soak, for the samples that a trend needs.
EXTRA_SECONDS = 20.0


@dataclass
class Report:
    """The work and the disturbances, and the faults: anything that must never happen."""

    seconds: float = 0.0
    rounds: int = 0
    samples: int = 0
    #: Programs that ended well, by kind of client and program.
    done: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    disturbances: Counter[str] = field(default_factory=Counter)
    #: Errors that a disturbance explains, by client and class.
    explained: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    deaths: int = 0
    wrong_answers: int = 0
    faults: list[str] = field(default_factory=list)
    #: The judgement of each series, by daemon and name.
    series: dict[str, dict[str, Judgement]] = field(default_factory=dict)
    most: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def growing(self) -> set[str]:
        """The series that grow, as DAEMON.SERIES."""
        return {
            f"{name}.{series}"
            for name, found in self.series.items()
            for series, one in found.items()
            if one.grows
        }


class _Soak:
    def __init__(self, site: Site, seed: int, report: Report, *, is_disturbed: bool) -> None:
        self.site, self.report = site, report
        self.disturber = Disturber(site, random.Random(f"{seed} disturbances")) if is_disturbed else None

    def round(self, seconds: float) -> None:
        """Let the clients work, pause them, and take a sample of each daemon."""
        for client in self.site.clients.values():
            client.tell("go")
        if self.disturber is not None:
            self.disturber.disturb(seconds)
        else:
            threading.Event().wait(seconds)
        for client in self.site.clients.values():
            client.tell("pause")
        sessions, failures = self._collect()
        self._judge_failures(failures)
        for one in self.site.watched:
            self._settle(one, sessions if one.name == "daemon" else 0)
        self.report.rounds += 1

    def _collect(self) -> tuple[int, list[Failure]]:
        """Take the reports. Return the number of sessions that are kept, and the failures."""
        sessions, failures = 0, list[Failure]()
        for name, client in self.site.clients.items():
            tally = client.report()
            if tally is None:
                self._lost(name, client)
                continue
            sessions += tally.has_session
            failures += tally.failures
            for program, count in tally.done.items():
                self.report.done[f"{name} {program}"] += count
            slowest = max(tally.slowest.values(), default=0)
            self.report.slowest_seconds = max(self.report.slowest_seconds, slowest)
        return sessions, failures

    def _lost(self, name: str, client: ClientProcess) -> None:
        if client.is_alive:
            self.report.hangs += 1
            self.report.faults.append(f"the client {name} hangs; its threads are in the log")
            client.signal(signal.SIGUSR1)
            time.sleep(1.0)
        else:
            self.report.deaths += 1
            self.report.faults.append(f"the client {name} died: {client.process.exitcode}")
        client.kill()
        client.revive(paused=True)

    def _judge_failures(self, failures: list[Failure]) -> None:
        wild = failures if self.disturber is None else self.disturber.unexplained(failures)
        for one in failures:
            if one not in wild:
                self.report.explained[f"{one.client} {one.error}"] += 1
        for one in wild:
            self.report.wrong_answers += one.error == "WrongAnswerError"
            seconds = one.ended - one.began
            self.report.faults.append(f"{one.client} {one.program}, {seconds:.1f} s: {one.error}: {one.text}")
        if self.disturber is not None:
            self.report.faults += self.disturber.faults
            self.disturber.faults = []
            self.disturber.forget(time.monotonic() - 60)

    def _settle(self, one: Watched, sessions: int) -> None:
        try:
            wrong = one.settle(sessions + one.of_heads)
        except Exception as error:
            wrong = f"{one.name} does not answer: {error!r}"
        if wrong:
            self.report.faults.append(wrong)

    def end(self, warm: int) -> None:
        """End all clients, and judge the samples, of which so many belong to the warm-up."""
        for name, client in self.site.clients.items():
            if status := client.end():
                self.report.deaths += 1
                self.report.faults.append(f"the client {name} ended with {status}")
        dead = self.site.deaths()
        self.report.deaths += len(dead)
        self.report.faults += dead
        for one in self.site.watched:
            if not dead:
                self._settle(one, 0)
            self.report.series[one.name] = one.judgements(warm)
            self.report.faults += one.left(warm)
            if not self.report.series[one.name]:
                least = 2 * LEAST_SAMPLES
                self.report.faults.append(f"{one.name} has fewer than {least} samples after the warm-up")
        self.report.faults += [f"{one} grows" for one in sorted(self.report.growing)]


def soak(
    seconds: float,
    seed: int,
    *,
    plants: Sequence[str] = (),
    round_seconds: float | None = None,
    log: Path | None = None,
    samples: Path | None = None,
) -> Report:
    """Soak for a time. With `plants`, a daemon alone leaks these, and is not disturbed."""
    report, began = Report(), time.monotonic()
    length = round_seconds or min(LONGEST_ROUND_SECONDS, max(ROUND_SECONDS, seconds / MOST_ROUNDS))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(_log(log or Path(folder, "log")))
        file = stack.enter_context(samples.open("w")) if samples is not None else None
        site = Site(stack, Path(folder), seed, plants)
        recorder = Recorder(file)
        stack.callback(recorder.close)
        recorder.watch(site.watched)
        running = _Soak(site, seed, report, is_disturbed=not plants)
        for one in site.watched:
            running._settle(one, 0)
        warm, ready = 1, time.monotonic()
        while not _is_broken(report):
            seconds_done = time.monotonic() - ready
            warm += seconds_done < WARM_UP * seconds
            is_enough = report.rounds + 1 - warm >= 2 * LEAST_SAMPLES
            if seconds_done > (seconds if is_enough else seconds + EXTRA_SECONDS):
                break
            running.round(length)
        running.end(warm)
        recorder.close()
        if running.disturber is not None:
            report.disturbances = running.disturber.counts
        report.samples, report.most = recorder.count, recorder.most
        for one in site.watched:
            for series in BOUNDS:
                quiet = max((getattr(sample, series) for sample in one.quiet), default=0)
                most = report.most.setdefault(one.name, {})
                most[series] = max(quiet, most.get(series, 0))
        report.faults += [f"in the log: {line}" for line in _tracebacks(log or Path(folder, "log"))]
    report.seconds = time.monotonic() - began
    return report


def _is_broken(report: Report) -> bool:
    return len(report.faults) > 20 or report.hangs > 2


@contextmanager
def _log(path: Path) -> Iterator[None]:
    """Send the standard error of this process and its children to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def _tracebacks(path: Path) -> list[str]:
    lines = path.read_text(errors="replace").splitlines()
    found = (lines[max(0, place - 1)] for place, line in enumerate(lines) if "Traceback" in line)
    return sorted({line[:300] for line in found})[:10]


def table(report: Report) -> Iterator[str]:
    """Yield a line for each series: its slope by the hour, the limit of that, and the bound."""
    titles = ("slope/h", "at least/h", "bound/h", "largest")
    yield f"{'series':20} samples    tau {' '.join(f'{title:>14}' for title in titles)}"
    for name, found in report.series.items():
        for series, one in found.items():
            bound = BOUNDS[series].over(one.whole.seconds) / one.whole.seconds
            slopes = (HOUR_SECONDS * slope for slope in (one.whole.slope, one.whole.least, bound))
            numbers = (*slopes, report.most[name][series])
            shown = " ".join(f"{number:14,.0f}" for number in numbers)
            verdict = "GROWS" if one.grows else "ok"
            yield f"{name + '.' + series:20} {one.whole.count:7} {one.whole.tau:6.2f} {shown} {verdict}"
