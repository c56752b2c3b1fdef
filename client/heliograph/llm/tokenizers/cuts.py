"""Places at which words may be cut in two words, found with arrays.

Looking each half up in a dictionary takes most of the time in which a vocabulary is read. Here a
table of bits of hashes leaves out nearly all cuts; those that are left are to be checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

#: A hash is the sum of characters times powers of this number, in 64 bits. It is odd, so a division
#: by a power gives the hash of letters that begin further on.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
#: The bits of a hash that are looked up; a table has as many entries, at least 32 for each word.
_LEAST_BITS = 16
#: The characters that are looked at at once, which bounds the memory.
_GROUP = 2**18


def likely_cuts(words: Sequence[str], known: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield every cut of a word into two of the known words, and few others, in order."""
    bits = max(_LEAST_BITS, (32 * len(known)).bit_length())
    table = np.zeros(2**bits, np.bool_)
    shift = np.uint64(64 - bits)
    for group in _groups(list(known)):
        letters = _Letters(group)
        table[letters.hashes(letters.starts, letters.ends) >> shift] = True
    for group in _groups(words):
        letters = _Letters(group)
        lengths = letters.ends - letters.starts
        owners = np.repeat(np.arange(len(group)), lengths)
        cuts = np.flatnonzero(np.arange(owners.size) != letters.starts[owners])
        owners = owners[cuts]
        is_likely = table[letters.hashes(letters.starts[owners], cuts) >> shift]
        cuts, owners = cuts[is_likely], owners[is_likely]
        is_likely = table[letters.hashes(cuts, letters.ends[owners]) >> shift]
        cuts, owners = cuts[is_likely], owners[is_likely]
        places = (cuts - letters.starts[owners]).tolist()
        for owner, place in zip(owners.tolist(), places, strict=True):
            yield group[owner], place


def _groups(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the words, a number of characters at once."""
    begin = count = 0
    for at, word in enumerate(words):
        count += len(word)
        if count >= _GROUP:
            yield words[begin : at + 1]
            begin, count = at + 1, 0
    if begin < len(words):
        yield words[begin:]


class _Letters:
    """The letters of some words, one after the other."""

    def __init__(self, words: Sequence[str]) -> None:
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        self.ends = lengths.cumsum()
        self.starts = self.ends - lengths
        letters = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32).astype(np.uint64)
        self._inverses = _powers(_INVERSE, letters.size)
        self._sums = np.zeros(letters.size + 1, np.uint64)
        terms = letters * np.uint64(_BASE >> 1 | 1) * _powers(_BASE, letters.size)[:-1]
        terms.cumsum(dtype=np.uint64, out=self._sums[1:])

    def hashes(self, begins: Any, ends: Any) -> Numbers:
        """Return hashes of letters, which depend on nothing else."""
        found: Numbers = (self._sums[ends] - self._sums[begins]) * self._inverses[begins]
        return found


def _powers(base: int, count: int) -> Numbers:
    """Return the powers from 0 to `count`, in 64 bits."""
    found = np.full(count + 1, base, np.uint64)
    found[0] = 1
    return found.cumprod(dtype=np.uint64)
