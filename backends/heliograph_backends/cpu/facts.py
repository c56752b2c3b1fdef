"""Facts about the host's processor and its libraries, each looked up once."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np

from heliograph_backends.cpu import kernels

#: Instruction sets of x86 and Arm that affect the speed of kernels, by their names in Linux.
INSTRUCTIONS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl",
    "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


def known_instructions(cpuinfo: str) -> tuple[str, ...]:
    """Return those of INSTRUCTIONS that the first processor in a /proc/cpuinfo has."""
    for line in cpuinfo.splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            found = set(flags.split())
            return tuple(one for one in INSTRUCTIONS if one in found)
    return ()


@cache
def instruction_set() -> str:
    """Return the relevant instruction sets; empty if the system does not report them."""
    try:
        return " ".join(known_instructions(Path("/proc/cpuinfo").read_text()))
    except OSError:
        return ""


@cache
def blas_library() -> str:
    """Return the name and version of the BLAS that NumPy was built with."""
    built: dict[str, dict[str, dict[str, str]]] = np.show_config(mode="dicts")  # type: ignore[assignment]
    blas = built.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


@cache
def native_compiler() -> str:
    """Return the compiler of the native kernels; empty if it is not installed."""
    return f"numba {metadata.version('numba')}" if kernels.available() else ""
