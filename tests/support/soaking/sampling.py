"""Samples of daemons: every second for a record, and at quiet points for the trends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import IO

import psutil

from heliograph import admin
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import Snapshot
from soaking.plugin import measure
from soaking.trends import LEAST_SAMPLES, Bound, Judgement, judge

MIB = 2**20
#: The most that a daemon may grow, by series.
BOUNDS = {
    "heap": Bound(32 * MIB, 4 * MIB),
    "blocks": Bound(200_000, 20_000),
    # The allocator keeps up to 128 MiB of freed memory, and as much as it had in use at once.
    "rss": Bound(64 * MIB, 160 * MIB),
    "descriptors": Bound(8, 3),
    "threads": Bound(8, 3),
    "device": Bound(MIB, MIB / 4),
}
#: The most descriptors and threads that a daemon may hold at the end beyond those after its warm-up.
END_SLACK = {"descriptors": 8, "threads": 8}
#: The time in which a daemon forgets the work of paused clients.
SETTLE_SECONDS = 20.0
#: Two equal looks this far apart show that connections have ended.
EQUAL_SECONDS = 0.05


@dataclass(frozen=True)
class Sample:
    """The state of a daemon at one time of the monotonic clock."""

    time: float
    rss: int
    descriptors: int
    threads: int
    #: Bytes of its own devices beyond those that sessions account for.
    device: int
    sessions: int
    staged: int
    in_flight: int
    #: At quiet points: bytes in use in the C library, and blocks in use in Python's allocator.
    heap: int = 0
    blocks: int = 0


@dataclass
class Watched:
    """One life of a daemon, and its samples."""

    name: str
    pid: int
    operator: admin.Admin
    #: Sessions that heads keep with a member.
    of_heads: int = 0
    quiet: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._process = psutil.Process(self.pid)

    def look(self) -> Sample:
        """Take a sample. Raises HeliographError and psutil.Error."""
        found = self.operator.snapshot()
        with self._process.oneshot():
            return Sample(
                time.monotonic(),
                self._process.memory_info().rss,
                self._process.num_fds(),
                self._process.num_threads(),
                _own_bytes(found) - sum(one.device_bytes for one in found.sessions),
                len(found.sessions),
                sum(one.staging_bytes for one in found.tenants),
                sum(one.commands_in_flight for one in found.sessions),
            )

    def settle(self, sessions: int) -> str:
        """Wait until only paused sessions are left, and keep a sample. Return what is wrong."""
        end, before = time.monotonic() + SETTLE_SECONDS, None
        while True:
            found = self.look()
            is_quiet = found.sessions <= sessions and not found.staged and not found.in_flight
            now = found.descriptors, found.threads, found.device
            if is_quiet and now == before:
                break
            if time.monotonic() > end:
                if is_quiet:
                    break
                return (
                    f"{self.name} has {found.sessions} sessions instead of {sessions}, {found.staged} bytes"
                    f" staged and {found.in_flight} commands, {SETTLE_SECONDS:g} s after the last call"
                )
            before = now
            time.sleep(EQUAL_SECONDS)
        heap, blocks = measure(self.pid)
        self.quiet.append(replace(self.look(), heap=heap, blocks=blocks))
        return ""

    def judgements(self, warm: int) -> dict[str, Judgement]:
        """Judge each series after the samples of the warm-up; none if too few are left."""
        rest = self.quiet[warm:]
        if len(rest) < 2 * LEAST_SAMPLES:
            return {}
        times = [one.time for one in rest]
        return {name: judge(times, [getattr(one, name) for one in rest], BOUNDS[name]) for name in BOUNDS}

    def left(self, warm: int) -> list[str]:
        """Return what the daemon has not given back at the end."""
        if len(self.quiet) <= warm:
            return [f"{self.name} has no sample after the warm-up"]
        start, base, last = self.quiet[0], self.quiet[warm], self.quiet[-1]
        found = [
            f"{self.name} ends with {getattr(last, name):,} {name}, after {getattr(base, name):,}"
            for name, most in END_SLACK.items()
            if getattr(last, name) - getattr(base, name) > most
        ]
        if last.device != start.device:
            found.append(
                f"{self.name} ends with {last.device:,} bytes of its devices, after {start.device:,}"
            )
        return found


def _own_bytes(found: Snapshot) -> int:
    own = [one.memory for one in found.devices if "/" not in one.name]
    return sum(one.total_bytes - one.free_bytes for one in own)


class Recorder:
    """A thread that samples every second, into a file of JSON lines."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        self._watched: Sequence[Watched] = ()
        self._ended = threading.Event()
        self.count = 0
        #: The largest of each series, by the name of the daemon.
        self.most: dict[str, dict[str, float]] = {}
        self._thread = threading.Thread(target=self._record, name="recorder", daemon=True)
        self._thread.start()

    def watch(self, watched: Sequence[Watched]) -> None:
        """Sample these from now on."""
        self._watched = tuple(watched)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(30)

    def _record(self) -> None:
        while not self._ended.wait(1.0):
            for one in self._watched:
                # A member may be dead or stopped.
                with suppress(HeliographError, psutil.Error, ValueError):
                    self._keep(one.name, one.look())

    def _keep(self, name: str, found: Sample) -> None:
        self.count += 1
        values = asdict(found)
        most = self.most.setdefault(name, {})
        for series, value in values.items():
            most[series] = max(value, most.get(series, value))
        if self._file is not None:
            self._file.write(json.dumps({"daemon": name, **values}) + "\n")
