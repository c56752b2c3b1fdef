"""Build hook: the generated protobuf code is written before a wheel, an sdist or an editable install."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateProtocol(BuildHookInterface):  # type: ignore[type-arg]
    """Runs proto/generate.py, so that every way of installing has the generated modules."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        runpy.run_path(str(Path(self.root, "proto", "generate.py")), run_name="__main__")
