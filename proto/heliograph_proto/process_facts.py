"""Facts of a process that affect its performance: versions and the memory allocator.

Pure: the caller passes the environment.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

#: Packages whose versions are reported, and the names of their distributions.
PACKAGES = {
    "grpc": "grpcio",
    "protobuf": "protobuf",
    "numpy": "numpy",
    "numba": "numba",
    "uvloop": "uvloop",
    "rich": "rich",
}
#: Environment variables that configure glibc's allocator.
ALLOCATOR_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_",
    "MALLOC_ARENA_MAX", "GLIBC_TUNABLES",
)  # fmt: skip
#: Libraries that replace it when preloaded.
ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
#: The maximum length of a reported environment variable.
VALUE_CHARACTERS = 100


def process_facts(environment: Mapping[str, str], told: str = "") -> dict[str, str]:
    """Return the facts of this process by the names of ListDevicesResponse.facts, omitting unknown
    ones.

    `told`: settings of the allocator besides the environment, as NAME=VALUE.
    """
    versions = {name: _version(package) for name, package in PACKAGES.items()}
    found = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **versions,
        "allocator": allocator(environment, " ".join(platform.libc_ver()).strip()),
        "allocator_settings": " ".join(filter(None, (allocator_settings(environment), told))),
    }
    return {name: value for name, value in found.items() if value}


def process_started(stat: str) -> int:
    """Return the start of a process, in clock ticks since the start of the system, from the text of
    /proc/PID/stat; 0 if it has none."""
    try:
        # The name of the process, in parentheses, may contain anything.
        return int(stat.rpartition(")")[2].split()[19])
    except (ValueError, IndexError):
        return 0


def allocator(environment: Mapping[str, str], libc: str) -> str:
    """Return the memory allocator: a preloaded library, else the C library; empty if unknown."""
    preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    files = [path.rpartition("/")[2] for path in preloaded]
    return next((name for file in files for name in ALLOCATORS if name in file), libc)


def allocator_settings(environment: Mapping[str, str]) -> str:
    """Return the environment variables that configure it, as NAME=VALUE separated by spaces."""
    given = {name: environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)}
    return " ".join(f"{name}={printable(value)[:VALUE_CHARACTERS]}" for name, value in given.items())


def printable(text: str) -> str:
    """Make a foreign text safe for logs and terminals."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
