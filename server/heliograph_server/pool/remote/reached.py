"""The link from one member to another: whether it works, and when to probe it again. Pure.

direct ──(a probe or a run finds no link)──▸ relayed ──(a probe finds it)──▸ direct
"""

from __future__ import annotations

from dataclasses import dataclass

#: The interval between probes of a relayed link.
RETRY_SECONDS = 10.0
#: The longest one, for a link that probes find and runs do not, again and again.
LONGEST_RETRY_SECONDS = 600.0
#: A compile probes a relayed link at once, unless the last probe was so recent.
COMPILE_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class KnownLink:
    """A link in one direction. Times are those of one monotonic clock."""

    #: None: not known yet.
    is_there: bool | None = None
    #: The reason if it is not.
    why: str = ""
    #: When it was found missing, and when it was last probed.
    since: float = 0.0
    probed: float = 0.0
    #: The number of runs that found no link after a probe had found one.
    breaks: int = 0

    def found(self) -> bool:
        """Record a probe that found the link. Return True if it was relayed before."""
        was_relayed, self.is_there, self.why = self.is_there is False, True, ""
        return was_relayed

    def missing(self, why: str, now: float) -> bool:
        """Record that the link is missing. Return True if that is news."""
        is_news = self.is_there is not False
        if is_news:
            self.since = now
        self.is_there, self.why = False, why
        return is_news

    def broke(self, why: str, now: float) -> None:
        """Record that a run found no link."""
        self.breaks += self.missing(why, now)
        self.probed = now

    def is_due(self, now: float) -> bool:
        """True if it is relayed, and its next probe is due."""
        return self.is_there is False and now - self.probed >= self._pause

    def is_due_for_compile(self, now: float) -> bool:
        """True if a compile should probe it."""
        pause = COMPILE_RETRY_SECONDS if self.breaks <= 1 else self._pause
        return self.is_there is False and now - self.probed >= pause

    @property
    def _pause(self) -> float:
        return float(min(RETRY_SECONDS * 2 ** min(max(0, self.breaks - 1), 16), LONGEST_RETRY_SECONDS))
