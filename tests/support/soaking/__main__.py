"""`python -m soaking`: users, operators and faults at work on daemons, whose samples are judged."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from soaking.plugin import PLANTS
from soaking.runner import Report, soak, table


def show(report: Report) -> None:
    """Print what was done and found."""
    done = sum(report.done.values())
    print(
        f"{done:,} programs in {report.rounds} rounds and {report.seconds:.0f} s; {report.samples:,} samples;"
        f" the slowest took {report.slowest_seconds:.1f} s"
    )
    print(f"{report.deaths} deaths, {report.hangs} hangs, {report.wrong_answers} wrong answers")
    for title, counts in (
        ("done", report.done),
        ("disturbances", report.disturbances),
        ("explained errors", report.explained),
    ):
        print(f"{title}:")
        for name, count in sorted(counts.items()):
            print(f"{count:9,} {name}")
    for line in table(report):
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(prog="soaking", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, help="of work (default: 3600)")
    parser.add_argument("--seed", type=int, default=None, help="of programs and disturbances")
    parser.add_argument("--folder", type=Path, default=None, help="a folder for the log and the samples")
    parser.add_argument("--plant", action="append", choices=[*PLANTS], default=[], help="a leak to find")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    folder: Path | None = arguments.folder
    report = soak(
        arguments.seconds,
        seed,
        plants=arguments.plant,
        log=folder / "log" if folder is not None else None,
        samples=folder / "samples.jsonl" if folder is not None else None,
    )
    show(report)
    for fault in report.faults[:20]:
        print(f"FAULT: {fault}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
