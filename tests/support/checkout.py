"""A checkout as it is, without being installed: where its packages are, for this process and for daemons
it starts."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata

from paths import ROOT

#: A requirement's name and the least version that it asks for.
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?(?:>=([0-9.]+))?")


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


def why_not() -> str:
    """What this Python lacks of what the packages need, in words; empty if there is nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return lacking([*project["dependencies"], *project["optional-dependencies"]["server"]])


def lacking(requirements: Sequence[str]) -> str:
    """The requirements that are missing here or older than they say, in words."""
    found = []
    for one in requirements:
        # What has a marker is for some systems alone, and nothing here fails without it.
        if ";" in one:
            continue
        match = _REQUIREMENT.match(one)
        assert match is not None, one
        name, least = match[1], match[2] or "0"
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name}>={least} is missing")
            continue
        if _numbers(there) < _numbers(least):
            found.append(f"{name} is {there} and not {least} or newer")
    if not found:
        return ""
    return f"{'; '.join(found)}: bring wheels along, install them into a folder and name it in PYTHONPATH"


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, zeros at the end left away."""
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    found = [int(one) for one in numbers[0].split(".")] if numbers else []
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def serving_cuda() -> tuple[str, ...]:
    """Arguments of a daemon with one GPU: without an entry point the backend is named as a plugin."""
    known = {point.name for point in metadata.entry_points(group="heliograph.backends")}
    plugin = () if "cuda" in known else ("--backend", "heliograph_backends.cuda")
    return (*plugin, "--device", "cuda")
