"""Prints what the images and the demo need by pyproject.toml, one requirement a line, for `pip download`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def main() -> None:
    found = tomllib.loads(Path("pyproject.toml").read_text())
    project = found["project"]
    needed = [*found["build-system"]["requires"], *project["dependencies"]]
    extras = project["optional-dependencies"]
    # Extras name others as "heliograph[...]".
    for one in [*needed, "heliograph[demo,kserve]"]:
        for found in required(one, extras):
            print(re.sub(r"\s|;.*", "", found))


def required(requirement: str, extras: dict[str, list[str]]) -> list[str]:
    """A requirement, with those of the extras that it names in place of itself."""
    if not requirement.startswith("heliograph["):
        return [requirement]
    names = requirement.removeprefix("heliograph[").removesuffix("]").split(",")
    return [found for name in names for one in extras[name] for found in required(one, extras)]


if __name__ == "__main__":
    main()
