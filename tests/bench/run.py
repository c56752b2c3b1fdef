"""`make bench`: one line a figure, ours beside a peer or a limit measured in the same run.

A short figure does not fail the command, and neither does a benchmark that cannot be measured
here: the reason is printed. `--only` takes patterns, `--json` a file for `report.py`. Benchmarks of
pools, language models, the dashboard and starts with empty caches, which take minutes, have targets
of their own.

Each benchmark has a process of its own: beside the objects and threads that others left behind, one
that plans in Python took twice its time.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure
from machine import about
from rich.console import Console
from rich.table import Table

#: Every benchmark, by the name that its figures begin with: its module and function.
BENCHMARKS = {
    "limits": "limits:figures",
    "attention": "attention:figures",
    "bandwidth": "bandwidth:figures",
    "compile": "compiling:figures",
    "convolutions": "convolutions:figures",
    "decoder": "decoder:figures",
    "deploy-traces": "traces:figures",
    "deploy-fair": "fairness:fair",
    "deploy-metrics": "deploy_metrics:figures",
    "deploy-tls": "deploy_tls:figures",
    "ggml-rpc": "ggml_rpc:figures",
    "hosts": "hosts:figures",
    "kserve": "kserve:figures",
    "links": "packed_links:figures",
    "llm": "language_models:figures",
    "llm-daemon": "llm_daemon:figures",
    "llm-delay": "llm_hosts:delay",
    "llm-form": "constrained_answers:figures",
    "llm-pages": "llm_pages:figures",
    "llm-rows": "llm_rows:figures",
    "llm-served": "llm_served:figures",
    "llm-serving": "llm_serving:figures",
    "loops": "loops:figures",
    "minilm": "minilm:figures",
    "plan-cost": "plan_cost:figures",
    "planes-upload": "planes:uploads",
    "planes-download": "planes:downloads",
    "planes-shared": "planes_shared:figures",
    "planes-latency": "planes_latency:latency",
    "planes-near": "planes_latency:near",
    "planes-pipelined": "planes_latency:pipelined",
    "pictures": "pictures:figures",
    "planner": "planner:figures",
    "pool-chain": "pool_runs:chain",
    "pool-joining": "pool_joining:figures",
    "pool-kills": "pool_kills:figures",
    "pool-llm": "llm_hosts:hosts",
    "pool-pipeline": "pool_runs:pipeline",
    "pool-single": "pool_runs:single",
    "pool-transfer": "pool_transfer:figures",
    "quantized": "quantized:figures",
    "rows": "rows:figures",
    "scheduler": "scheduler:figures",
    "startup-import": "startup:imports",
    "startup-help": "startup:help_",
    "startup-health": "startup:health",
    "startup-cold": "startup:cold",
    "startup-wheel": "startup:wheel",
    "memory": "minilm:memory",
    "training": "training:figures",
    "web": "web:figures",
    "web-page": "web_page:figures",
    "uploads-hash": "uploading:hashing",
    "uploads-second": "uploading:second_upload",
}
#: Those of `make bench-quick`: one of each kind, that are soon measured and tell most.
QUICK = (
    "limits",
    "loops",
    "minilm",
    "planes-latency",
    "planes-near",
    "planes-pipelined",
    "startup-import",
    "startup-help",
    "startup-health",
    "uploads-hash",
)
#: The beginnings of names of benchmarks of `make bench-pool`, which `make figures` leaves out too
#: since they need rights, and of `make bench-llm`, `make bench-web` and `make bench-start`.
POOLS, APART = ("pool-",), ("llm-", "web", "startup-cold", "startup-wheel")
#: How long a benchmark that is interrupted may take to end its daemons and peers.
END_SECONDS = 30
#: The share of the rounds that benchmarks name which are measured: in `make bench`, and in a quick
#: one.
SHARE, QUICK_SHARE = 0.4, 0.15


@dataclass
class Measured:
    """One figure in every round, and the benchmark that it came from."""

    benchmark: str
    rounds: list[Figure] = field(default_factory=list)

    @property
    def last(self) -> Figure:
        return self.rounds[-1]

    @property
    def ratios(self) -> list[float]:
        return [one.ratio for one in self.rounds]

    @property
    def ok(self) -> bool:
        return median(self.ratios) <= self.last.bar

    @property
    def numbers(self) -> dict[str, float]:
        ours, peer = (median(getattr(one, who) for one in self.rounds) for who in ("ours", "peer"))
        return {"ours": ours, "peer": peer, "ratio": median(self.ratios), "bar": self.last.bar}

    def as_json(self) -> dict[str, Any]:
        """Return the row that `report` reads."""
        spread = {"least": min(self.ratios), "most": max(self.ratios)}
        words = {key: getattr(self.last, key) for key in ("name", "unit", "against", "note")}
        return words | self.numbers | spread | {"ok": self.ok, "benchmark": self.benchmark}


class Run:
    """Some benchmarks, measured in rounds."""

    def __init__(self) -> None:
        self.found: dict[str, Measured] = {}
        #: Reasons of benchmarks that could not be measured.
        self.missing: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def measure(self, names: Sequence[str], rounds: int) -> None:
        """Measure all of them once in each round, so that a drift of the machine meets all.

        An interrupt ends it; what was measured until then is kept.
        """
        for number in range(rounds):
            for name in names:
                if name not in self.missing:
                    print(f"measuring {name} ({number + 1}/{rounds}) ...", file=sys.stderr, flush=True)
                    try:
                        self._measure(name)
                    except KeyboardInterrupt:
                        print("interrupted", file=sys.stderr)
                        rest = [one for one in names[names.index(name) :] if one not in self.seconds]
                        self.missing |= dict.fromkeys(rest, "interrupted")
                        return

    def _measure(self, name: str) -> None:
        begun = time.monotonic()
        try:
            for figure in figures_of(name):
                said = f"  {figure.name}: {figure.ours:.3f} {figure.unit}, {figure.ratio:.3f}"
                self.found.setdefault(figure.name, Measured(name)).rounds.append(figure)
                print(said, file=sys.stderr)
        except RuntimeError as error:
            self.missing[name] = str(error)
            print(f"  not measured: {self.missing[name]}", file=sys.stderr)
        took = time.monotonic() - begun
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        print(f"  {took:.1f} s", file=sys.stderr)

    def table(self) -> Table:
        """All figures; with several rounds, their medians and the ratio's least and most."""
        table = Table()
        for title in ("figure", "ours", "peer", "unit", "ratio", "spread", "bar", "", "against", "note"):
            right = title in ("ours", "peer", "ratio", "spread", "bar")
            table.add_column(title, justify="right" if right else "left")
        for name, one in self.found.items():
            verdict = "[green]ok[/green]" if one.ok else "[red]short[/red]"
            ours, peer, ratio, bar = one.numbers.values()
            spread = f"{min(one.ratios):.2f}-{max(one.ratios):.2f}" if len(one.rounds) > 1 else ""
            numbers = (f"{ours:.3f}", f"{peer:.3f}", one.last.unit, f"{ratio:.3f}", spread, f"{bar:.2f}")
            table.add_row(name, *numbers, verdict, one.last.against, one.last.note)
        return table

    def as_json(self) -> str:
        """The figures, what is missing, and the machine."""
        figures = [one.as_json() for one in self.found.values()]
        rest = {"missing": self.missing, "seconds": self.seconds}
        return json.dumps({"about": about(), "figures": figures, **rest}, indent=2) + "\n"


def figures_of(name: str) -> Iterator[Figure]:
    """Measure a benchmark in a process of its own.

    Errors: RuntimeError says why it could not be measured.
    """
    command = [sys.executable, __file__, "--alone", name]
    # In a session of its own: an interrupt reaches it once, from here.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said = json.loads(line)
                if "why" in said:
                    raise RuntimeError(said["why"])
                yield Figure(**said)
        except BaseException:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"its process ended with {process.returncode}")


def measure_alone(name: str) -> None:
    """Measure a benchmark in this process, and print its figures as lines of JSON."""
    # What a benchmark prints by itself is no figure.
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        module, function = BENCHMARKS[name].split(":")
        try:
            for figure in getattr(importlib.import_module(module), function)():
                print(json.dumps(asdict(figure)), file=lines, flush=True)
        except (Exception, SystemExit) as error:
            print(json.dumps({"why": f"{type(error).__name__}: {error}"}), file=lines)


def chosen(patterns: Sequence[str], *, everything: bool = False) -> list[str]:
    """The benchmarks that a pattern names; without patterns all but those that have a target of
    their own, or all but those of pools."""
    if not patterns:
        apart = POOLS if everything else POOLS + APART
        return [name for name in BENCHMARKS if not name.startswith(apart)]
    found = [name for name in BENCHMARKS if any(fnmatch.fnmatch(name, one) for one in patterns)]
    if not found:
        raise SystemExit(f"no benchmark matches {patterns}; there are: {', '.join(BENCHMARKS)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--all", action="store_true", help="also those with targets of their own, but pools")
    parser.add_argument("--alone", choices=BENCHMARKS, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="some figures, in a minute")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="measure all N times (1)")
    parser.add_argument("--share", type=float, metavar="X", help=f"of each benchmark's rounds ({SHARE})")
    arguments = parser.parse_args()
    # As Ctrl-C, so that daemons and peers are ended too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.alone:
        measure_alone(arguments.alone)
        return 0
    share = arguments.share or (QUICK_SHARE if arguments.quick else SHARE)
    # For the processes of benchmarks, and of their peers.
    os.environ["BENCH_SHARE"] = str(share)
    begun = time.monotonic()
    run = Run()
    patterns = arguments.only or (QUICK if arguments.quick else ())
    run.measure(chosen(patterns, everything=arguments.all), arguments.rounds)
    width = 170 if not sys.stdout.isatty() else None
    Console(width=width).print(run.table())
    for name, why in run.missing.items():
        print(f"{name} was not measured: {why}")
    barred = [one for one in run.found.values() if isfinite(one.last.bar)]
    ok = sum(one.ok for one in barred)
    print(f"{ok} of {len(barred)} figures ok, in {time.monotonic() - begun:.0f} s")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(run.as_json())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
