"""Named facts of a process that decide how fast it talks: versions, and what makes its memory. Pure: whoever
asks hands in the environment.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

#: Packages whose versions are told, by the names of their distributions.
PACKAGES = {
    "grpc": "grpcio",
    "protobuf": "protobuf",
    "numpy": "numpy",
    "numba": "numba",
    "uvloop": "uvloop",
    "rich": "rich",
}
#: What changes how glibc makes memory.
ALLOCATOR_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_",
    "MALLOC_ARENA_MAX", "GLIBC_TUNABLES",
)  # fmt: skip
#: Libraries that replace it when they are preloaded.
ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
#: The longest value of an environment variable that is told.
VALUE_CHARACTERS = 100


def process_facts(environment: Mapping[str, str], told: str = "") -> dict[str, str]:
    """The facts of this process, as ListDevicesResponse.facts names them; what is unknown is absent.

    `told`: what its allocator was told beside its environment, as NAME=VALUE.
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


def allocator(environment: Mapping[str, str], libc: str) -> str:
    """What makes memory: a library that is preloaded, else the C library; empty if that is unknown."""
    preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    files = [path.rpartition("/")[2] for path in preloaded]
    return next((name for file in files for name in ALLOCATORS if name in file), libc)


def allocator_settings(environment: Mapping[str, str]) -> str:
    """The variables that change it, as NAME=VALUE with spaces between."""
    given = {name: environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)}
    return " ".join(f"{name}={printable(value)[:VALUE_CHARACTERS]}" for name, value in given.items())


def printable(text: str) -> str:
    """A text of somebody else that is safe in a log and on a terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
