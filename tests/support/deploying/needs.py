"""Prints what the image and the demo need by pyproject.toml, one requirement a line, for `pip download`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("server", "models", "cli")


def main() -> None:
    found = tomllib.loads(Path("pyproject.toml").read_text())
    project = found["project"]
    needed = [*found["build-system"]["requires"], *project["dependencies"]]
    for extra in EXTRAS:
        needed += project["optional-dependencies"][extra]
    for one in needed:
        if not one.startswith("heliograph["):
            print(re.sub(r"\s|;.*", "", one))


if __name__ == "__main__":
    main()
