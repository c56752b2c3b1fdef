"""Transfers: matching the bytes that bulk calls carry with the commands that name them.

Either side may come first, and either may fail. A transfer's number is free again when its command
has retired (uploads) or its bytes were read (downloads).

    upload first:   started ─▸ arrived
                       └──(command)──┴──▸ claimed ─▸ free
    command first:  waiting ──(upload starts)──▸ claimed ─▸ free
    command fails before its upload has come:  refused, until that upload comes and is told why
    upload fails before its command has come:  broken, until that command comes and is told why

A command that claimed its upload may have its turn before all bytes are there: it takes them as they come,
and they tell it if they break off.
"""

from __future__ import annotations

from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    ProtocolError,
)
from heliograph_server.core.ordering import Entry

#: How many failures of one side are kept for the other; the oldest are forgotten first.
MAX_REMEMBERED = 10_000


class Uploads:
    """The uploads of a session and the commands that wait for them. Pure: sizes and errors alone."""

    def __init__(self, limit: int) -> None:
        #: The most that may come or lie here without a command; their bytes are counted elsewhere.
        self._limit = limit
        #: Announced sizes, while the bytes are coming.
        self._started: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._waiting: dict[int, tuple[Entry, int]] = {}
        self._claimed: dict[int, Entry] = {}
        self._refused: dict[int, HeliographError] = {}
        self._broken: dict[int, HeliographError] = {}

    def __repr__(self) -> str:
        coming, arrived = len(self._started), len(self._arrived)
        return f"<Uploads {coming} coming, {arrived} unclaimed, {len(self._waiting)} awaited>"

    def check_free(self, transfer: int) -> None:
        """Raises InvalidArgumentError if another command that is not done names the transfer."""
        if transfer <= 0:
            raise InvalidArgumentError("transfer 0 does not exist", advice="choose a number from 1")
        if transfer in self._waiting or transfer in self._claimed:
            raise InvalidArgumentError(f"transfer {transfer} is awaited by an earlier command")

    def expect(self, entry: Entry, transfer: int, size_bytes: int) -> None:
        """A command came: takes what has arrived or is coming, or adds a blocker until it is."""
        if transfer in self._broken:
            entry.error = self._broken.pop(transfer)
            return
        announced = self._arrived.get(transfer, self._started.get(transfer, size_bytes))
        if announced != size_bytes:
            entry.error = _size_error(transfer, size_bytes, announced)
        is_coming = entry.error is None and transfer in self._started
        if self._arrived.pop(transfer, None) is not None or is_coming:
            self._claimed[transfer] = entry
        elif entry.error is None:
            self._waiting[transfer] = (entry, size_bytes)
            entry.blockers += 1
        else:
            _remember(self._refused, transfer, entry.error)

    def started(self, transfer: int, size_bytes: int) -> Entry | HeliographError | None:
        """An upload began. Returns the command that waited, or why the upload is not wanted.

        Raises ProtocolError for a second one, LimitExceededError.
        """
        if transfer <= 0 or any(transfer in one for one in (self._started, self._arrived, self._claimed)):
            raise ProtocolError(f"transfer {transfer} cannot be uploaded: 0, or uploaded already")
        if transfer in self._refused:
            return self._refused.pop(transfer)
        if len(self._started) + len(self._arrived) >= self._limit:
            raise LimitExceededError(
                f"{self._limit:,} uploads wait for their commands", advice="send the commands"
            )
        self._started[transfer] = size_bytes
        if transfer not in self._waiting:
            return None
        entry, expected = self._waiting[transfer]
        if expected != size_bytes:
            return _size_error(transfer, expected, size_bytes)
        del self._waiting[transfer]
        self._claimed[transfer] = entry
        entry.blockers -= 1
        return entry

    def arrived(self, transfer: int) -> HeliographError | None:
        """All bytes came. Returns why they are not wanted any more, if so."""
        size_bytes = self._started.pop(transfer)
        if transfer in self._refused:
            return self._refused.pop(transfer)
        if transfer not in self._claimed:
            self._arrived[transfer] = size_bytes
        return None

    def broke(self, transfer: int, error: HeliographError) -> Entry | None:
        """The upload failed. Returns the command that it was for; one that is yet to come will fail."""
        if self._started.pop(transfer, None) is None or self._refused.pop(transfer, None) is not None:
            return None
        if transfer in self._claimed:
            return self._claimed[transfer]
        if transfer not in self._waiting:
            _remember(self._broken, transfer, error)
            return None
        entry, _ = self._waiting.pop(transfer)
        entry.blockers -= 1
        return entry

    def is_claimed(self, transfer: int) -> bool:
        """Whether a command that is not done has the bytes."""
        return transfer in self._claimed

    def stop_waiting(self, transfer: int, entry: Entry, error: HeliographError) -> bool:
        """The command failed early. Whether it had been waiting: one blocker less then."""
        if self._waiting.get(transfer, (None, 0))[0] is not entry:
            return False
        del self._waiting[transfer]
        entry.blockers -= 1
        _remember(self._refused, transfer, error)
        return True

    def refuse(self, transfer: int, error: HeliographError) -> bool:
        """A command was refused at once. Whether its bytes had arrived and are to be dropped."""
        if transfer in self._waiting or transfer in self._claimed:
            return False
        if self._arrived.pop(transfer, None) is not None:
            return True
        if self._broken.pop(transfer, None) is None:
            _remember(self._refused, transfer, error)
        return False

    def release(self, transfer: int, entry: Entry) -> bool:
        """The command retired. Whether its bytes are to be dropped; such as still come are refused."""
        if self._claimed.get(transfer) is not entry:
            return False
        del self._claimed[transfer]
        if transfer in self._started and entry.error is not None:
            _remember(self._refused, transfer, entry.error)
        return True

    def clear(self) -> None:
        """Forgets everything: the session is over."""
        self.__init__(self._limit)  # type: ignore[misc]


def _remember(errors: dict[int, HeliographError], transfer: int, error: HeliographError) -> None:
    if len(errors) >= MAX_REMEMBERED:
        del errors[next(iter(errors))]
    errors[transfer] = error


def _size_error(transfer: int, expected: int, announced: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"transfer {transfer} has {announced} bytes, but its command says {expected}")
