"""The answer to an attach, also to a session that had an earlier daemon, or was moved. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heliograph_proto.commands import Attach, Attached, ResumedLoop


@dataclass(frozen=True, slots=True)
class Attaching:
    """The facts of a session that decide an attach."""

    #: That of the daemon.
    incarnation: bytes
    #: True if an earlier daemon had the session, and if another one gave it to this one.
    is_restored: bool = False
    has_moved_here: bool = False
    #: The last message that the earlier daemon wrote, as of the image.
    restored_messages: int = 0

    def is_of_restart(self, attach: Attach) -> bool:
        """True if the client knows the session of an earlier daemon."""
        is_from_before = self.is_restored and not self.has_moved_here
        return is_from_before and attach.incarnation != self.incarnation

    def received(self, attach: Attach) -> int:
        """The messages that the client has.

        Those that an earlier daemon wrote after the snapshot do not count."""
        if self.is_of_restart(attach):
            return min(attach.received, self.restored_messages)
        return attach.received

    def answer(self, attach: Attach, commands: int, loops: Sequence[ResumedLoop] = ()) -> Attached:
        """Return the answer to an attach, after so many commands."""
        next_message = self.received(attach) + 1
        restored = self.is_of_restart(attach)
        return Attached(commands, next_message, restored, self.incarnation, tuple(loops))
