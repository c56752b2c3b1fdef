"""Where things of the checkout are, for tests and for the programs that they start."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TESTS = ROOT / "tests"
#: What tests share; pytest has it on the path of modules, and processes that tests start need it there.
SUPPORT = TESTS / "support"
#: Files with results of other implementations, and messages of other versions.
GOLDEN = SUPPORT / "golden"


def kept_folder(name: str) -> Path:
    """A folder of this user's for what takes long to compile and is kept from run to run."""
    folder = Path(tempfile.gettempdir(), f"heliograph-tests-{os.getuid()}", name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
