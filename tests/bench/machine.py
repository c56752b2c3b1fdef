"""The machine that figures are measured on, and the commit that they are of."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from heliograph_backends.cpu.backend import processor_name
from heliograph_backends.cpu.facts import instruction_set
from heliograph_backends.cpu.kernels.runtime.native import source_digest
from heliograph_backends.host_memory.buffers import machine_memory_bytes

ROOT = Path(__file__).parents[2]


def about() -> dict[str, str]:
    """Return what a reader of figures needs to know."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = [f"{name} {metadata.version(name)}" for name in ("numpy", "grpcio", "llvmlite")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "processor": processor_name(),
        "processors": str(processors),
        "instruction set": instruction_set(),
        "memory": f"{machine_memory_bytes() / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "kernels": source_digest(),
    }


def commit() -> str:
    """Return the checkout's commit, with a + where files have changed; empty outside of a checkout."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.stdout.strip()
