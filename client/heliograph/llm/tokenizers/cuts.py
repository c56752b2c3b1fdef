"""Places at which words may be cut in two words, found with arrays.

Looking each half up in a dictionary takes most of the time in which a vocabulary is read. Here a
table of bits of hashes leaves out nearly all cuts; those that are left are to be checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

#: A hash is the sum of a word's characters times powers of this number, in 64 bits. It is odd, so a
#: division by a power gives the hash of letters that begin further on.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
#: The bits of a hash that are looked up; a table has as many entries, at least 32 for each word.
_LEAST_BITS = 16
#: The characters that are looked at at once: their arrays stay in the second-level cache.
_GROUP = 2**15


def likely_cuts(words: Sequence[str]) -> tuple[Places, Places]:
    """Return every cut of a word into two of the words, and few others: the places of the words in
    the sequence, in order, and the lengths of their first parts."""
    bits = max(_LEAST_BITS, (32 * len(words)).bit_length())
    table = np.zeros(2**bits, np.bool_)
    shift = np.uint64(64 - bits)
    groups = list(_groups(words))
    for _, group in groups:
        letters = _Letters(group)
        table[(letters.sums[letters.ends] - letters.sums[letters.starts]) >> shift] = True
    owners, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for begin, group in groups:
        letters = _Letters(group)
        hashes = letters.sums[:-1] - letters.sums[letters.starts][letters.owners]
        cuts = np.flatnonzero(table[hashes >> shift] & (letters.places != 0))
        owner, place = letters.owners[cuts], letters.places[cuts]
        rests = letters.sums[letters.ends][owner] - letters.sums[cuts]
        is_likely = table[rests * _powers(_INVERSE, letters.longest)[place] >> shift]
        owners.append(begin + owner[is_likely])
        places.append(place[is_likely])
    return np.concatenate(owners), np.concatenate(places)


def _groups(words: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the words, a number of characters at once, each time with the place of the first."""
    begin = count = 0
    for at, word in enumerate(words):
        count += len(word)
        if count >= _GROUP:
            yield begin, words[begin : at + 1]
            begin, count = at + 1, 0
    if begin < len(words):
        yield begin, words[begin:]


class _Letters:
    """The letters of some words, one after the other."""

    def __init__(self, words: Sequence[str]) -> None:
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        self.ends = lengths.cumsum()
        self.starts = self.ends - lengths
        self.longest = int(lengths.max(initial=0))
        letters = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
        #: The word of each letter, and its place there.
        self.owners = np.repeat(np.arange(len(words)), lengths)
        self.places = np.arange(letters.size) - self.starts[self.owners]
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
