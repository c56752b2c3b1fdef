"""Places at which words may be cut in two words, found with arrays.

Looking each half up in a dictionary takes most of the time in which a vocabulary is read. Here a
table of bits of hashes leaves out nearly all cuts; those that are left are to be checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

#: A hash is the sum of a word's characters times powers of this number, in 64 bits. It is odd, so a
#: division by a power gives the hash of letters that begin further on.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
#: The bits of a hash that are looked up; a table has as many entries, at least 32 for each word.
_LEAST_BITS = 16
#: The characters that are looked at at once: their arrays stay in the second-level cache.
_GROUP = 2**15


def likely_cuts(words: Sequence[str], known: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield every cut of a word into two of the known words, and few others, in order."""
    bits = max(_LEAST_BITS, (32 * len(known)).bit_length())
    table = np.zeros(2**bits, np.bool_)
    shift = np.uint64(64 - bits)
    for group in _groups(list(known)):
        letters = _Letters(group)
        table[(letters.sums[letters.ends] - letters.sums[letters.starts]) >> shift] = True
    for group in _groups(words):
        letters = _Letters(group)
        begins = np.repeat(letters.sums[letters.starts], letters.lengths)
        cuts = np.flatnonzero(table[(letters.sums[:-1] - begins) >> shift] & (letters.places != 0))
        owners = np.searchsorted(letters.ends, cuts, "right")
        rests = letters.sums[letters.ends[owners]] - letters.sums[cuts]
        is_likely = table[rests * _powers(_INVERSE, letters.longest)[letters.places[cuts]] >> shift]
        found = map(group.__getitem__, owners[is_likely].tolist())
        yield from zip(found, letters.places[cuts[is_likely]].tolist(), strict=True)


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
        self.lengths = np.fromiter(map(len, words), np.int64, len(words))
        self.ends = self.lengths.cumsum()
        self.starts = self.ends - self.lengths
        self.longest = int(self.lengths.max(initial=0))
        letters = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
        #: The place of each letter in its word.
        self.places = np.arange(letters.size) - np.repeat(self.starts, self.lengths)
        #: Sums of the letters before each one, from the first word on: of letters of one word, the
        #: difference is the hash, but for the power of the place where they begin.
        self.sums = np.zeros(letters.size + 1, np.uint64)
        powers = _powers(_BASE, self.longest) * np.uint64(_BASE >> 1 | 1)
        (letters * powers[self.places]).cumsum(out=self.sums[1:])


def _powers(base: int, count: int) -> Numbers:
    """Return the powers from 0 to `count`, in 64 bits."""
    found = np.full(count + 1, base, np.uint64)
    found[0] = 1
    return found.cumprod(dtype=np.uint64)
