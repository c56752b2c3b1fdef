"""Prints what the image and the demo need by pyproject.toml, one requirement a line, for `pip download`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def main() -> None:
    found = tomllib.loads(Path("pyproject.toml").read_text())
    project = found["project"]
    needed = [*found["build-system"]["requires"], *project["dependencies"]]
    extras = project["optional-dependencies"]
    # The demo's is "heliograph[...]", with the names of others.
    for extra in extras["demo"][0].removeprefix("heliograph[").removesuffix("]").split(","):
        needed += extras[extra]
    for one in needed:
        if not one.startswith("heliograph["):
            print(re.sub(r"\s|;.*", "", one))


if __name__ == "__main__":
    main()
