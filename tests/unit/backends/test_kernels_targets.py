"""Kernels compiled for other instruction sets than the machine's widest: the bits are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heliograph_backends.cpu.kernels import available

if not available():
    pytest.skip("numba is not installed", allow_module_level=True)

import llvmlite.binding as llvm

SUPPORT = Path(__file__).parents[2] / "support"
#: Without multiply-adds and conversions of f16, and with them in half the width of AVX-512.
BASELINE = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16")
AVX2 = (*BASELINE, "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
#: Without permutations of bytes.
AVX512 = (*AVX2, "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl")
#: Compiling all that the graphs need, on a loaded machine.
SECONDS = 600


def digests(**environment: str) -> dict[str, Any]:
    """Return the digests of results in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "target_bits.py")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("processor", "features"), [("skylake-avx512", AVX512), ("haswell", AVX2), ("nehalem", BASELINE)]
)
def test_results_have_the_bits_that_they_have_with_the_widest_vectors(
    processor: str, features: tuple[str, ...]
) -> None:
    here = llvm.get_host_cpu_features()
    if not all(here.get(each) for each in features):
        pytest.skip(f"this machine lacks some of {', '.join(features)}")
    narrow = digests(NUMBA_CPU_NAME=processor, NUMBA_CPU_FEATURES=",".join(f"+{each}" for each in features))
    assert narrow == digests()
