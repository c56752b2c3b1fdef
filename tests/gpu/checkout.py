"""A checkout as it is, without being installed: where its packages are, for this process and for daemons
it starts."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def use(*more: str) -> None:
    """Makes the packages importable, and folders of tests that are named."""
    paths = [str(ROOT / one) for one in ("proto", "server", "client", "backends", *more)]
    sys.path[:0] = paths
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([before] if before else [])])
    if not list((ROOT / "proto").rglob("*_pb2.py")):
        raise SystemExit(
            "there is no generated code: run `make proto` where there is a network, and bring it along"
        )


def serving_cuda() -> tuple[str, ...]:
    """Arguments of a daemon with one GPU: without an entry point the backend is named as a plugin."""
    known = {point.name for point in metadata.entry_points(group="heliograph.backends")}
    plugin = () if "cuda" in known else ("--backend", "heliograph_backends.cuda")
    return (*plugin, "--device", "cuda")
