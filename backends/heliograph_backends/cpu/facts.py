"""What the host's processor and the libraries for it are. Looked up once."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np

from heliograph_backends.cpu import kernels

#: What decides about the speed of kernels, as Linux writes it, for x86 and Arm.
INSTRUCTIONS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl",
    "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


def known_instructions(cpuinfo: str) -> tuple[str, ...]:
    """Those of INSTRUCTIONS that the first processor of a /proc/cpuinfo has."""
    for line in cpuinfo.splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            found = set(flags.split())
            return tuple(one for one in INSTRUCTIONS if one in found)
    return ()


@cache
def instruction_set() -> str:
    """The instruction sets that matter here; empty where the system does not tell."""
    try:
        return " ".join(known_instructions(Path("/proc/cpuinfo").read_text()))
    except OSError:
        return ""


@cache
def blas_library() -> str:
    """The BLAS that NumPy was built with, and its version."""
    built: dict[str, dict[str, dict[str, str]]] = np.show_config(mode="dicts")  # type: ignore[assignment]
    blas = built.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


@cache
def native_compiler() -> str:
    """What compiles the native kernels; empty if it is not installed."""
    return f"numba {metadata.version('numba')}" if kernels.available() else ""
