"""Errors on their way from a member to our own clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from heliograph_proto.errors import HeliographError


@contextmanager
def at_the_edge() -> Iterator[None]:
    """The number of a member's command means nothing here: the error gets that of our own command."""
    try:
        yield
    except HeliographError as error:
        if not error.origin.sequence:
            raise
        raise error.at(replace(error.origin, sequence=0)) from None
