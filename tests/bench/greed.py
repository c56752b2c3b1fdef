"""The cost of a client that wants everything, for a client of another tenant.

    make greed                  every case
    make greed GREED='--short'  a second or so for each

Attacker and victim are processes of their own, and so is the daemon. Calm and under greed, the
victim's calls are timed in the same run. A line is `ok` if its 99th percentile under greed is
within five times the calm one; ten for compiles.

An attacker also takes processors from everything else on the machine. So the same calls are timed
on a second daemon, which has no other client, during the attack on the first: a line that is short
there too says `machine`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from greed_victims import VICTIMS, Victim, attack, tenants_with_tokens

import heliograph as hg
from heliograph.testing import serving

#: How many times its calm value the victim's 99th percentile may be.
BAR, COMPILE_BAR = 5.0, 10.0
#: How long an attack goes on before the victim is timed.
ATTACK_SECONDS = 1.0


@dataclass(frozen=True)
class Line:
    """One row of the table. Times in milliseconds."""

    case: str
    calm: tuple[float, float]
    beside: tuple[float, float]
    greedy: tuple[float, float]
    bar: float
    refused: dict[str, int]
    failed: str = ""

    @property
    def ratio(self) -> float:
        return self.greedy[1] / self.calm[1]

    @property
    def is_ok(self) -> bool:
        return not self.failed and self.ratio <= self.bar

    @property
    def verdict(self) -> str:
        if self.is_ok:
            return "ok"
        return "machine" if self.beside[1] > self.bar * self.calm[1] else "short"

    def __str__(self) -> str:
        times = (self.calm, self.beside, self.greedy)
        shown = "  ".join(f"{p50:8.2f} / {p99:7.2f}" for p50, p99 in times)
        refused = " ".join(f"{name}={count}" for name, count in self.refused.items())
        return f"{self.case:22} {shown} {self.ratio:7.1f}   {self.verdict:7}  {refused} {self.failed}"


def percentiles(call: Callable[[], None], seconds: float, least: int) -> tuple[float, float]:
    """The 50th and 99th percentile of so many calls, or of those in some seconds, in milliseconds."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < least:
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
        time.sleep(0.001)
    return float(np.percentile(found, 50)), float(np.percentile(found, 99))


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A daemon with default limits that asks for tokens, its URL, and a token for each tenant."""
    path = folder / "tokens.toml"
    tokens = tenants_with_tokens(path)
    command = [sys.executable, "-m", "heliograph.cli", "serve", "--listen", "grpc://127.0.0.1:0"]
    command += ["--tokens", str(path), "--log-level", "error"]
    with serving(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as url:
        yield url, tokens


def lines_of(case: str, seconds: float, least: int) -> Iterator[Line]:
    """The rows of a case, with daemons of its own."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        (url, tokens), other = (stack.enter_context(daemon(folder)) for folder in folders)
        victim, elsewhere = (
            Victim(f"{url}?token={tokens['victim']}") for url, tokens in ((url, tokens), other)
        )
        names = VICTIMS[case]
        calm: dict[str, tuple[float, float]] = {}
        for name in names:
            percentiles(victim.call(name), 0.2, 3)
            calm[name] = percentiles(victim.call(name), seconds, least)
        outcome: dict[str, dict[str, int]] = {}
        beside: dict[str, tuple[float, float]] = {}
        found: dict[str, tuple[tuple[float, float], str]] = {}
        with attack(case, url, tokens["attacker"], outcome):
            # Until it holds what it wants.
            time.sleep(ATTACK_SECONDS)
            for name in names:
                beside[name] = percentiles(elsewhere.call(name), seconds, least)
                try:
                    found[name] = percentiles(victim.call(name), seconds, least), ""
                except hg.HeliographError as error:
                    found[name] = (float("inf"), float("inf")), f"{type(error).__name__}: {error.message}"
        for name, (times, failed) in found.items():
            bar = COMPILE_BAR if name == "compile" else BAR
            yield Line(
                f"{case}/{name}", calm[name], beside[name], times, bar, outcome.get("refused", {}), failed
            )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a second for each figure")
    parser.add_argument("--only", nargs="*", default=list(VICTIMS), choices=list(VICTIMS))
    given = parser.parse_args()
    columns = "".join(f"{name:>20}" for name in ("calm p50 / p99 [ms]", "other daemon", "under greed"))
    print(f"{'case':22}{columns}   ratio   ok", flush=True)
    is_ok = True
    for case in given.only:
        for line in lines_of(case, 1.0 if given.short else 5.0, 5):
            print(line, flush=True)
            is_ok = is_ok and line.is_ok
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
