"""The pictures of plans on the pages are those that the library draws now."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from paths import ROOT

PAGES = ROOT / "docs/guide"
NAMES = ("plan.svg", "plan_memory.svg")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pictures as they are drawn now."""
    spec = importlib.util.spec_from_file_location("plan_pictures", ROOT / "docs/plan_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("pictures")
    module.write(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_pictures_on_the_pages_are_current(drawn: Path, name: str) -> None:
    assert (PAGES / name).read_text() == (drawn / name).read_text(), "make plan-pictures"
    xml.parse(PAGES / name)


def test_the_pictures_are_on_a_page() -> None:
    page = (PAGES / "plans.md").read_text()
    assert all(f"]({name})" in page for name in NAMES)
