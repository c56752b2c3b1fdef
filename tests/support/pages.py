"""Pages of documentation: their samples, links and anchors."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paths import ROOT

#: A line of this form at the beginning of a sample says why tests do not run it.
NOT_RUN = re.compile(r"# Not run by the tests: (.+)")

_FENCE = re.compile(r"^( *)(```+|~~~+)(\S*)[^\n]*\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """A fenced block of a page."""

    page: Path
    #: Of its first line of code, from 1.
    line: int
    language: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def why_not_run(self) -> str:
        """Empty if tests run it."""
        found = NOT_RUN.match(self.code)
        return found[1] if found else ""


@dataclass(frozen=True)
class Page:
    """A Markdown file of this checkout."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def prose(self) -> str:
        """The text with empty lines for the fenced blocks."""
        return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), self.text)

    def samples(self, *languages: str) -> list[Sample]:
        """The blocks in these languages, or all."""
        found = []
        for block in _FENCE.finditer(self.text):
            line = self.text.count("\n", 0, block.start(4)) + 1
            if block[3] in languages or not languages:
                found.append(Sample(self.path, line, block[3], block[4]))
        return found

    def links(self) -> list[str]:
        """The targets of links, but for those of other sites."""
        return [one for one in _LINK.findall(self.prose) if "://" not in one]

    def anchors(self) -> set[str]:
        """The fragments that links to this page may have, as GitHub makes them of headings."""
        seen: Counter[str] = Counter()
        found = set()
        for heading in _HEADING.findall(self.prose):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
            slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        return found


def pages(*patterns: str) -> list[Page]:
    """The pages that match patterns, as in `Path.glob`, in order."""
    return [Page(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
