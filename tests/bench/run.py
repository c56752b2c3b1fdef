"""`make bench`: one line a figure, ours beside a peer or a limit measured in the same run.

A short figure does not fail the command. `--only` takes patterns, `--json` a file for the same as JSON.
Those of pools, which take minutes, are `make bench-pool`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attention
import bandwidth
import compiling
import decoder
import deploy_metrics
import deploy_tls
import fairness
import hosts
import limits
import loops
import minilm
import plan_cost
import planes
import planes_latency
import planes_shared
import planner
import pool_joining
import pool_kills
import pool_runs
import pool_transfer
import quantized
import scheduler
import startup
import traces
import uploading
from figures import Figure
from rich.console import Console
from rich.table import Table

#: Every benchmark, by the name that its figures begin with.
BENCHMARKS: dict[str, Callable[[], Iterator[Figure]]] = {
    "limits": limits.figures,
    "attention": attention.figures,
    "bandwidth": bandwidth.figures,
    "compile": compiling.figures,
    "decoder": decoder.figures,
    "deploy-traces": traces.figures,
    "deploy-fair": fairness.fair,
    "deploy-metrics": deploy_metrics.figures,
    "deploy-tls": deploy_tls.figures,
    "hosts": hosts.figures,
    "loops": loops.figures,
    "minilm": minilm.figures,
    "plan-cost": plan_cost.figures,
    "planes-upload": planes.uploads,
    "planes-download": planes.downloads,
    "planes-shared": planes_shared.figures,
    "planes-latency": planes_latency.latency,
    "planes-near": planes_latency.near,
    "planes-pipelined": planes_latency.pipelined,
    "planner": planner.figures,
    "pool-chain": pool_runs.chain,
    "pool-joining": pool_joining.figures,
    "pool-kills": pool_kills.figures,
    "pool-pipeline": pool_runs.pipeline,
    "pool-single": pool_runs.single,
    "pool-transfer": pool_transfer.figures,
    "quantized": quantized.figures,
    "scheduler": scheduler.figures,
    "startup-import": startup.imports,
    "startup-help": startup.help_,
    "startup-health": startup.health,
    "startup-cold": startup.cold,
    "memory": minilm.memory,
    "uploads-hash": uploading.hashing,
    "uploads-second": uploading.second_upload,
}


def chosen(patterns: list[str]) -> list[str]:
    """The benchmarks that a pattern names; without patterns all but those of pools."""
    if not patterns:
        return [name for name in BENCHMARKS if not name.startswith("pool-")]
    found = [name for name in BENCHMARKS if any(fnmatch.fnmatch(name, one) for one in patterns)]
    if not found:
        raise SystemExit(f"no benchmark matches {patterns}; there are: {', '.join(BENCHMARKS)}")
    return found


def table_of(found: list[Figure]) -> Table:
    table = Table()
    for title in ("figure", "ours", "peer", "unit", "ratio", "bar", "", "against", "note"):
        table.add_column(title, justify="right" if title in ("ours", "peer", "ratio", "bar") else "left")
    for one in found:
        verdict = "[green]ok[/green]" if one.ok else "[red]short[/red]"
        numbers = (f"{one.ours:.3f}", f"{one.peer:.3f}", one.unit, f"{one.ratio:.3f}", f"{one.bar:.2f}")
        table.add_row(one.name, *numbers, verdict, one.against, one.note)
    return table


def as_json(found: list[Figure]) -> str:
    rows = [
        {"name": f.name, "ours": f.ours, "peer": f.peer, "ratio": f.ratio, "bar": f.bar, "ok": f.ok}
        for f in found
    ]
    return json.dumps(rows, indent=2) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found: list[Figure] = []
    for name in chosen(arguments.only):
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        for figure in BENCHMARKS[name]():
            found.append(figure)
            print(f"  {figure.name}: {figure.ours:.3f} {figure.unit}, {figure.ratio:.3f}", file=sys.stderr)
    width = 160 if not sys.stdout.isatty() else None
    Console(width=width).print(table_of(found))
    if arguments.json:
        arguments.json.write_text(as_json(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
