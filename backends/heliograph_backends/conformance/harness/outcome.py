"""What becomes of a case, and the exceptions that say so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CaseOutcome(Enum):
    """How a case ended."""

    PASSED = "passed"
    #: The device says that it cannot, which is an answer.
    NOT_SUPPORTED = "not supported"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Result:
    """One case, run."""

    #: The case's id.
    id: str
    #: The op, or the part of the contract, that it tests.
    group: str
    outcome: CaseOutcome
    #: Why it is not supported, or what failed, where first, and by how much.
    detail: str = ""
    #: The largest normalised mean squared error of its outputs; 0 where they are exact.
    error: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.id}: {self.outcome.value}{': ' + self.detail if self.detail else ''}"


class NotSupportedError(Exception):
    """The device cannot run this case; the message says why."""


class MismatchError(Exception):
    """The device did not do what the contract or the op table says; the message says what."""


class LostError(MismatchError):
    """Work did not end in time, and may never."""


def require(holds: bool, what: str) -> None:
    """Raises MismatchError unless the condition holds."""
    if not holds:
        raise MismatchError(what)
