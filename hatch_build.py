"""Build hook: the generated protobuf code is written before a wheel, an sdist or an editable install.

A wheel also gets the compiled CPU kernels of the folder in $HELIOGRAPH_KERNEL_OBJECTS, see `make wheel`.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OBJECTS = "heliograph_backends/cpu/kernels/objects"


class AddGenerated(BuildHookInterface):  # type: ignore[type-arg]
    """Runs proto/generate.py, so that every way of installing has the generated modules, and adds kernels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        runpy.run_path(str(Path(self.root, "proto", "generate.py")), run_name="__main__")
        objects = os.environ.get("HELIOGRAPH_KERNEL_OBJECTS")
        if objects and self.target_name == "wheel" and version == "standard":
            build_data["force_include"][str(Path(objects).resolve())] = OBJECTS
