"""The pages of a cache of keys and values: who reads them, and which tokens they have. Pure.

A page has the keys and values of PAGE tokens. Those of an answer are listed in its table. A page
that is full is found by its content: by its tokens and those of all pages before it. Answers that
begin with the same tokens share such pages, which count their readers. A page without readers
keeps its tokens until its memory is needed; the one that was not used for the longest time goes
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

#: The tokens of a page.
PAGE = 32
#: The page before, or the owner of a first page; then the page's tokens. A page object never gets
#: another content, so equal keys mean equal tokens from the first one on.
Key: TypeAlias = "tuple[Page | Owner, tuple[int, ...]]"
#: A tenant, and the variant of the model. Pages are shared within one owner.
Owner: TypeAlias = tuple[str, str]


def pages_of(tokens: int) -> int:
    """The pages that so many tokens need."""
    return -(-tokens // PAGE)


@dataclass(eq=False, slots=True)
class Page:
    """A page in use, or one that may be used again."""

    #: Its place in the cache.
    number: int
    #: The tables that list it.
    readers: int = 0
    #: None while its content cannot be found.
    key: Key | None = None


@dataclass(slots=True)
class Table:
    """The pages of an answer, in the order of its tokens."""

    owner: Owner
    pages: list[Page] = field(default_factory=list)
    #: The first pages, whose content can be found. They are not written again.
    found: int = 0

    @property
    def numbers(self) -> list[int]:
        """The places of the pages in the cache."""
        return [page.number for page in self.pages]

    def key(self, tokens: Sequence[int]) -> Key:
        """Return the key of the page after those that are found."""
        before = self.pages[self.found - 1] if self.found else self.owner
        start = self.found * PAGE
        return before, tuple(tokens[start : start + PAGE])


class Pages:
    """All pages of a cache.

    Each is free, or read by tables, or kept: without readers, but with a content that can be found.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        #: Pages without content that a running loop may still write to, until `collect`.
        self._given_back: list[int] = []
        #: Those whose content can be found.
        self._known: dict[Key, Page] = {}
        #: Those without readers, the least recently used first. A table that has a page has those
        #: before it, and gives them back later, so a page goes before the one that it continues.
        self._kept: dict[Page, None] = {}
        #: The pages that several tables list.
        self.shared = 0
        #: The contents that were given up for their memory.
        self.evictions = 0

    @property
    def free(self) -> int:
        """The pages without content."""
        return len(self._free) + len(self._given_back)

    @property
    def kept(self) -> int:
        """The pages without readers whose content can be found."""
        return len(self._kept)

    @property
    def used(self) -> int:
        """The pages that tables list."""
        return self.total - self.free - self.kept

    def fits(self, owner: Owner, tokens: Sequence[int], spare: int) -> bool:
        """True if there are pages for these tokens, and so many more."""
        known = self._find(owner, tokens)
        held = sum(page.readers == 0 for page in known)
        return pages_of(len(tokens)) - len(known) + held + spare <= self.free + self.kept

    def open(self, owner: Owner, tokens: Sequence[int]) -> Table:
        """Return a table with pages for tokens, which fit."""
        table = Table(owner)
        for page in self._find(owner, tokens):
            self._read(page)
            table.pages.append(page)
        table.found = len(table.pages)
        assert self.grow(table, len(tokens)), "the pages were not counted before"
        return table

    def adopt(self, table: Table, tokens: Sequence[int]) -> None:
        """Let a table share what became known of its next pages, which nothing was written to."""
        while table.found < len(table.pages) and (table.found + 1) * PAGE < len(tokens):
            known = self._known.get(table.key(tokens))
            if known is None:
                return
            self._replace(table, known)

    def publish(self, table: Table, tokens: Sequence[int], filled: int) -> None:
        """Make the full pages of a table known, of whose tokens so many are in the cache.

        Of two pages with the same content one stays.
        """
        while (table.found + 1) * PAGE <= filled:
            key = table.key(tokens)
            known, own = self._known.get(key), table.pages[table.found]
            if known is not None:
                self._replace(table, known)
                continue
            own.key, self._known[key] = key, own
            table.found += 1

    def grow(self, table: Table, tokens: int) -> bool:
        """Give a table pages for so many tokens; False, and no change, if there are too few.

        Pages that were given back since the last `collect` do not count.
        """
        missing = pages_of(tokens) - len(table.pages)
        if missing > len(self._free) + self.kept:
            return False
        for _ in range(missing):
            page = Page(self._take())
            self._read(page)
            table.pages.append(page)
        return True

    def close(self, table: Table) -> None:
        """Give back the pages of a table. Their contents can still be found."""
        for page in reversed(table.pages):
            self._give_back(page)
        table.pages.clear()
        table.found = 0

    def collect(self) -> None:
        """Free the pages that were given back, when no loop writes to them any more."""
        self._free += self._given_back
        self._given_back.clear()

    def forget(self) -> None:
        """Note that the cache may have lost everything. No table is open."""
        for page in self._kept:
            self._free.append(page.number)
        self._kept.clear()
        self._known.clear()

    def _find(self, owner: Owner, tokens: Sequence[int]) -> list[Page]:
        """Return the known pages that a sequence begins with, but the one of its last token, which
        is computed once more."""
        table = Table(owner)
        while (table.found + 1) * PAGE < len(tokens):
            page = self._known.get(table.key(tokens))
            if page is None:
                break
            table.pages.append(page)
            table.found += 1
        return table.pages

    def _replace(self, table: Table, known: Page) -> None:
        """List a known page in place of the table's own next one."""
        self._read(known)
        self._give_back(table.pages[table.found])
        table.pages[table.found] = known
        table.found += 1

    def _read(self, page: Page) -> None:
        self._kept.pop(page, None)
        page.readers += 1
        self.shared += page.readers == 2

    def _give_back(self, page: Page) -> None:
        page.readers -= 1
        self.shared -= page.readers == 1
        if page.readers:
            return
        if page.key is None:
            self._given_back.append(page.number)
        else:
            self._kept[page] = None

    def _take(self) -> int:
        """Return a free page, the least recently used one if there is no other."""
        if self._free:
            return self._free.pop()
        page = next(iter(self._kept))
        del self._kept[page]
        assert page.key is not None
        del self._known[page.key]
        self.evictions += 1
        return page.number
