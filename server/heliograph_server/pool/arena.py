"""Memory of a member in which plans lie one after the other."""

from __future__ import annotations

import heliograph as hg
from heliograph_backends.contract import Arena


class RemoteArena(Arena):
    """A reservation on the member, which its plans name when they are compiled."""

    def __init__(self, reservation: hg.Reservation) -> None:
        self.reservation = reservation
        self.size_bytes = reservation.size_bytes

    def __repr__(self) -> str:
        return f"<RemoteArena {self.size_bytes:,} bytes>"

    def free(self) -> None:
        self.reservation.reset()
