"""Kinds of processors for which a distribution contains object code.

A wheel has a folder of objects inside this package, made by `shipping`. They are used instead of
the user's cache, so a start from such a wheel compiles nothing and writes nothing. The folder
inside has the digest of the sources as its name, and each file has a digest of its level, so
objects of other sources or settings are never used. Imports no numba.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from heliograph_backends.cpu.kernels.runtime.objects import ObjectFolder

#: The folder of a distribution's objects; a checkout has none.
PACKAGED: Final = Path(__file__).parent.parent / "objects"
#: Settings of numba that choose another processor than this machine's.
TARGET_SETTINGS: Final = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")

_V3: Final = (
    "+avx,+avx2,+bmi,+bmi2,+cmov,+crc32,+cx16,+cx8,+f16c,+fma,+fxsr,+lzcnt,+mmx,+movbe,+popcnt,+sahf,"
    "+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave"
)


@dataclass(frozen=True, slots=True)
class Level:
    """A processor, as LLVM names it, and the features that code for it uses."""

    name: str
    triple: str
    processor: str
    #: Features as LLVM takes them, with + or -.
    features: str

    @property
    def machine(self) -> str:
        """The part of file names that tells whose code it is."""
        settings = "\0".join((self.triple, self.processor, self.features))
        return f"{self.name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"

    def runs_on(self, triple: str, features: dict[str, bool]) -> bool:
        """True if a machine with this triple and these features runs the code."""
        needed = (name[1:] for name in self.features.split(",") if name.startswith("+"))
        same = self.triple.split("-")[0] == triple.split("-")[0]
        return same and all(features.get(name) for name in needed)


#: Of two that a machine runs, the better one is first.
LEVELS: Final = (
    Level(
        "x86-64-v4",
        "x86_64-unknown-linux-gnu",
        "x86-64-v4",
        # LLVM would cut vectors in halves, for processors that slow down with whole ones.
        f"{_V3},+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl,-prefer-256-bit",
    ),
    Level("x86-64-v3", "x86_64-unknown-linux-gnu", "x86-64-v3", _V3),
    Level("aarch64", "aarch64-unknown-linux-gnu", "generic", "+fp-armv8,+neon"),
)


def level_of_machine() -> Level | None:
    """Return the best level that this machine runs; None except on Linux, and where settings of
    numba name another processor."""
    if sys.platform != "linux" or any(os.environ.get(name) for name in TARGET_SETTINGS):
        return None
    binding: Any = importlib.import_module("llvmlite.binding")
    triple, features = binding.get_process_triple(), dict(binding.get_host_cpu_features())
    return next((level for level in LEVELS if level.runs_on(triple, features)), None)


def packaged_objects(sources: str) -> ObjectFolder | None:
    """Return this distribution's objects of these sources for this machine, if all are there."""
    folder = PACKAGED / sources
    level = level_of_machine() if folder.is_dir() else None
    if level is None:
        return None
    objects = ObjectFolder(folder, level.machine, packaged=True)
    return None if objects.missing() else objects
