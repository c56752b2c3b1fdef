"""Settings of the documentation site: `make docs`."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / name) for name in ("proto", "server", "client", "backends")]

project = "Heliograph"
author = "Heliograph developers"
release = version = importlib.metadata.version("heliograph")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_external_toc",
]
external_toc_path = "_toc.yml"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Docstrings name code between single backquotes.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# PyTorch is not installed for the documentation.
autodoc_mock_imports = ["torch"]
autodoc_default_options = {"members": True, "show-inheritance": False}
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Keys", "params_style")]

html_theme = "furo"
html_title = f"Heliograph {version}"
html_copy_source = False
html_show_sphinx = False

#: A relative link of a page, and its target.
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s#]+)(#[^)]*)?\)")


def _without_files_beyond(app: Any, name: str, source: list[str]) -> None:
    """Name files of the repository that pages link to: they are no pages of the site."""
    folder = Path(app.srcdir, name).parent

    def shown(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        return found[0] if target.is_relative_to(HERE) else f"{found[1]} (`{target.relative_to(ROOT)}`)"

    source[0] = _LINK.sub(shown, source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _without_files_beyond)
