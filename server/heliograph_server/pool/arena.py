"""Memory of a member in which plans lie one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import heliograph as hg
from heliograph_backends.contract import Arena

if TYPE_CHECKING:
    from heliograph_server.pool.device import RemoteDevice


class RemoteArena(Arena):
    """A reservation on the member, which its plans name when they are compiled."""

    def __init__(self, device: RemoteDevice, reservation: hg.Reservation) -> None:
        self.device = device
        self.reservation = reservation
        self.size_bytes = reservation.size_bytes

    def __repr__(self) -> str:
        return f"<RemoteArena {self.size_bytes:,} bytes>"

    def free(self) -> None:
        if self.device.lost is None:
            self.reservation.reset()
