"""The words of code and pages: the worst patterns of `prose` occur nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT
from prose import faults, files_of

PLACES = (
    "proto/heliograph_proto",
    "backends/heliograph_backends",
    "server/heliograph_server",
    "client/heliograph",
    "docs",
    "examples",
    "deploy",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "tests/README.md",
)


@pytest.mark.parametrize("place", PLACES)
def test_prose_is_plain(place: str) -> None:
    found = [fault for path in files_of(ROOT / place) for fault in faults(path)]
    assert not found, "\n".join(map(str, found))


def test_the_patterns_are_found(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text('"""Whether nobody\nasks."""\n\n# What is late waits.\nadvice = "ask whoever made it"\n')
    whys = [fault.why for fault in faults(bad)]
    assert whys == [
        "a docstring begins with 'Whether'",
        "says 'nobody'",
        "a text says 'whoever'",
        "a sentence begins with 'What'",
    ]
    good = tmp_path / "good.py"
    good.write_text('"""Return the device. What if it is lost? See `nobody`."""\n\n# A reader waits.\n')
    assert list(faults(good)) == []
