"""`make bench-gpu`: the figures on a GPU, with nothing but a checkout and a Python that has what it needs.

    python tests/bench/gpu_run.py --out FOLDER [--only PATTERN ...]

Prints a table and writes figures.json and table.txt. A figure whose peer is missing, or that fails, is in the
table with the reason; a short figure does not fail the command, one that could not be taken does.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import checkout

checkout.use("tests/bench")

from figures import Figure  # noqa: E402

#: By name: the module and function that measure it.
BENCHMARKS = {
    "gpu-products": ("gpu_products", "figures"),
    "gpu-stored": ("gpu_products", "stored"),
    "gpu-attention": ("gpu_attention", "figures"),
    "gpu-convolutions": ("gpu_images", "figures"),
    "gpu-rows": ("gpu_images", "rows"),
    "gpu-chain": ("gpu_memory", "chain"),
    "gpu-nodes": ("gpu_plans", "nodes"),
    "gpu-model": ("gpu_plans", "model"),
    "gpu-host": ("gpu_memory", "host"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN")
    arguments = parser.parse_args()
    if why := checkout.why_not():
        raise SystemExit(f"this Python cannot take the figures: {why}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[Figure] = []
    missing: dict[str, str] = {}
    for name, (module, function) in BENCHMARKS.items():
        if any(fnmatch.fnmatch(name, one) for one in arguments.only):
            _measure(name, module, function, found, missing)
            _write(arguments.out, found, missing)
    print(table(found, missing))
    return 1 if missing else 0


def _measure(name: str, module: str, function: str, found: list[Figure], missing: dict[str, str]) -> None:
    """Whatever goes wrong in one figure, the others are taken."""
    print(f"measuring {name} ...", file=sys.stderr, flush=True)
    try:
        for figure in getattr(importlib.import_module(module), function)():
            found.append(figure)
            print(f"  {figure.name}: {figure.ours:.3f} {figure.unit}, {figure.ratio:.3f}", file=sys.stderr)
    except Exception as error:
        traceback.print_exc()
        missing[name] = f"{type(error).__name__}: {error}"


def table(found: list[Figure], missing: dict[str, str]) -> str:
    """A line for each figure, and for each that is missing."""
    lines = [f"{'figure':<28}{'ours':>11}{'peer':>11} {'unit':<5}{'ratio':>8}{'bar':>7}  verdict"]
    for one in found:
        numbers = f"{one.ours:>11.3f}{one.peer:>11.3f} {one.unit:<5}{one.ratio:>8.3f}{one.bar:>7.2f}"
        lines.append(f"{one.name:<28}{numbers}  {'ok' if one.ok else 'short'}: {one.against}. {one.note}")
    lines += [f"{name:<28} not measured: {why}" for name, why in missing.items()]
    return "\n".join(lines)


def _write(out: Path, found: list[Figure], missing: dict[str, str]) -> None:
    rows = [
        {
            "name": f.name,
            "ours": f.ours,
            "peer": f.peer,
            "ratio": f.ratio,
            "bar": f.bar,
            "ok": f.ok,
            "note": f.note,
        }
        for f in found
    ]
    (out / "figures.json").write_text(json.dumps({"figures": rows, "missing": missing}, indent=2) + "\n")
    (out / "table.txt").write_text(table(found, missing) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
