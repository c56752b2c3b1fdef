"""The outcomes of cases, and the exceptions that report them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CaseOutcome(Enum):
    """The outcome of a case."""

    PASSED = "passed"
    #: The device reports that it cannot run the case, which is no failure.
    NOT_SUPPORTED = "not supported"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one case."""

    #: The case's id.
    id: str
    #: The op or the part of the contract that it tests.
    group: str
    outcome: CaseOutcome
    #: The reason why it is not supported, or the failure: what, where first, and by how much.
    detail: str = ""
    #: The largest normalised mean squared error of its outputs; 0 if they are exact.
    error: float = 0.0
    seconds: float = 0.0
    #: The ops that a case which is not supported needs, and the device lacks.
    missing_ops: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.id}: {self.outcome.value}{': ' + self.detail if self.detail else ''}"


class NotSupportedError(Exception):
    """The device cannot run this case; the message says why."""

    def __init__(self, why: str, missing_ops: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        #: The unsupported ops of the case's graph.
        self.missing_ops = missing_ops


class MismatchError(Exception):
    """The device violates the contract or the op table; the message says how."""


class LostError(MismatchError):
    """Work did not end in time and may never end."""


def require(holds: bool, what: str) -> None:
    """Raise MismatchError unless the condition holds."""
    if not holds:
        raise MismatchError(what)
