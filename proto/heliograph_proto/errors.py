"""Every error that Heliograph raises, on either side of the wire.

    HeliographError
    ├── InvalidArgumentError       a malformed argument; also a ValueError
    │   ├── InvalidGraphError      the graph breaks a rule of the op table or of its own structure
    │   │   └── UnknownOpError     no such op in the table
    │   ├── InvalidInputError      a run's inputs do not match its plan
    │   └── OutOfRangeError        an offset, size or index outside a tensor; also an IndexError
    ├── UnsupportedError           no device of the plan runs this op with these types
    ├── HandleError                a handle, name or content that the session does not have
    │   ├── UnknownHandleError     never made, foreign, or freed
    │   ├── HandleExistsError      made twice
    │   ├── UnknownDeviceError     no device of this name; also a LookupError
    │   └── MissingContentError    a weight that was not uploaded
    ├── ResourceError              a memory or handshake limit is exceeded
    │   ├── OutOfMemoryError       the device's memory; also a MemoryError
    │   └── LimitExceededError     a limit of the handshake
    ├── WorkError                  work started and failed
    │   ├── CancelledError         it was cancelled
    │   ├── DeadlineExceededError  it exceeded its deadline; also a TimeoutError
    │   ├── ComputeFailedError     the device failed
    │   ├── LoopEndedError         a feed came too late: no step of its loop took it
    │   ├── NotReplayableError     the daemon was restarted, and the work cannot be done again
    │   └── DeviceLostError        the device is lost until its daemon restarts
    │       └── MemberLostError    a daemon of the pool is unreachable, or was restarted
    ├── ConnectionError            the session cannot be used; also a builtin ConnectionError
    │   ├── UnavailableError       the server cannot be reached, or the connection broke
    │   ├── NotHeliographError     the address is not a Heliograph server's
    │   ├── DrainingError          the server is shutting down
    │   ├── SessionClosedError     the session was closed or its lease ended
    │   ├── MovedError             another daemon has the session now
    │   ├── VersionMismatchError   no common version of the contract
    │   ├── UnauthenticatedError   the client presented no valid credentials
    │   └── ProtocolError          the other side broke the contract
    ├── SnapshotFailedError        the state of a session could not be written or read
    ├── ContentMismatchError       uploaded bytes do not have the announced digest
    ├── PermissionDeniedError      the caller lacks permission
    ├── InvalidModelError          a model's files are missing or damaged
    ├── ConfigurationError         a configuration file or command line is wrong
    └── InternalError              a defect of Heliograph

Each class has one reason, a number of the contract (`Reason` in error.proto). Programs branch on
the class or the reason; the text is for people.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass, replace
from typing import ClassVar

from heliograph_proto.tracebacks import rendered
from heliograph_proto.types import TensorType
from heliograph_proto.v1 import error_pb2

__all__ = [
    "CancelledError",
    "ComputeFailedError",
    "ConfigurationError",
    "ConnectionError",
    "ContentMismatchError",
    "DeadlineExceededError",
    "DeviceLostError",
    "DrainingError",
    "HandleError",
    "HandleExistsError",
    "HeliographError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidGraphError",
    "InvalidInputError",
    "InvalidModelError",
    "LimitExceededError",
    "LoopEndedError",
    "MemberLostError",
    "MissingContentError",
    "MovedError",
    "NotHeliographError",
    "NotReplayableError",
    "Origin",
    "OutOfMemoryError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ProtocolError",
    "Reason",
    "ResourceError",
    "SessionClosedError",
    "SnapshotFailedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownDeviceError",
    "UnknownHandleError",
    "UnknownOpError",
    "UnsupportedError",
    "VersionMismatchError",
    "WorkError",
]

Reason = error_pb2.Reason


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where an error began."""

    op: str = ""
    #: The node's number in its graph.
    node: int = 0
    node_name: str = ""
    operands: tuple[TensorType, ...] = ()
    #: The sequence number of the command that first failed; 0 outside the command stream.
    sequence: int = 0
    #: "file.py:12 in function: source text" of the user's code that built the node; client only.
    source: str = ""

    def __str__(self) -> str:
        parts = []
        if self.op:
            named = f" {self.node_name!r}" if self.node_name else ""
            parts.append(f"op {self.op}{named}({', '.join(map(str, self.operands))})")
        if self.source:
            parts.append(f"built at {self.source}")
        return ", ".join(parts)


class HeliographError(Exception):
    """The root: every error has a reason, an origin (perhaps empty) and advice (perhaps empty).

    `retry_after_seconds`: the time after which a retry may succeed; None if unknown, or never.
    """

    reason: ClassVar[Reason.ValueType] = Reason.REASON_INTERNAL

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        origin: Origin | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.origin = origin if origin is not None else Origin()
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        lines = [self.message]
        if where := str(self.origin):
            lines.append(f"  where: {where}")
        if self.advice:
            lines.append(f"  advice: {self.advice}")
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks show, without the frames of this library."""
        return rendered(self)

    def in_a_line(self) -> str:
        """Return `str` in one line, for logs."""
        return "; ".join(line.strip() for line in str(self).splitlines())

    def __reduce__(self) -> tuple[object, ...]:
        return (rebuild, (type(self), self.message, self.advice, self.origin, self.retry_after_seconds))

    def at(self, origin: Origin) -> HeliographError:
        """Return a copy with another origin; a copy, since threads share errors."""
        return rebuild(type(self), self.message, self.advice, origin, self.retry_after_seconds)

    def anew(self) -> HeliographError:
        """Return a copy to raise in place of a stored error.

        The traceback of a stored error would grow with each raise, and keep its frames alive.
        """
        return self.at(self.origin)

    def from_command(self, sequence: int) -> HeliographError:
        """Return the error with this command as its origin, unless it has one already."""
        if self.origin.sequence:
            return self
        return self.at(replace(self.origin, sequence=sequence))


class InvalidArgumentError(HeliographError, ValueError):
    """An argument is malformed or out of its domain."""

    reason = Reason.REASON_INVALID_ARGUMENT


class InvalidGraphError(InvalidArgumentError):
    """The graph breaks a rule of the op table or of its own structure."""

    reason = Reason.REASON_INVALID_GRAPH


class UnknownOpError(InvalidGraphError):
    """The op is not in the op table."""

    reason = Reason.REASON_UNKNOWN_OP


class InvalidInputError(InvalidArgumentError):
    """A run's inputs do not match its plan: missing, misnamed, of another shape or data type."""

    reason = Reason.REASON_INVALID_INPUT


class OutOfRangeError(InvalidArgumentError, IndexError):
    """An offset, size or index lies outside the tensor."""

    reason = Reason.REASON_OUT_OF_RANGE


class UnsupportedError(HeliographError):
    """No device of the plan runs this op with these types."""

    reason = Reason.REASON_UNSUPPORTED


class HandleError(HeliographError):
    """A handle, name or content that the session does not have, or has already."""


class UnknownHandleError(HandleError):
    """The handle was never made in this session, or was freed."""

    reason = Reason.REASON_UNKNOWN_HANDLE


class HandleExistsError(HandleError):
    """The handle is in use already."""

    reason = Reason.REASON_HANDLE_EXISTS


class UnknownDeviceError(HandleError, LookupError):
    """No device has this name."""

    reason = Reason.REASON_UNKNOWN_DEVICE


class MissingContentError(HandleError):
    """The plan needs weights that the session does not hold."""

    reason = Reason.REASON_MISSING_CONTENT


class ResourceError(HeliographError):
    """A memory or handshake limit is exceeded."""


class OutOfMemoryError(ResourceError, MemoryError):
    """The device does not have enough memory."""

    reason = Reason.REASON_OUT_OF_MEMORY


class LimitExceededError(ResourceError):
    """A limit of the handshake was exceeded."""

    reason = Reason.REASON_LIMIT_EXCEEDED


class WorkError(HeliographError):
    """Work started and failed."""


class CancelledError(WorkError):
    """The work was cancelled before it was done."""

    reason = Reason.REASON_CANCELLED


class DeadlineExceededError(WorkError, TimeoutError):
    """The work did not end within its timeout."""

    reason = Reason.REASON_DEADLINE_EXCEEDED


class ComputeFailedError(WorkError):
    """The device failed while computing."""

    reason = Reason.REASON_COMPUTE_FAILED


class NotReplayableError(WorkError):
    """The daemon was restarted, and a command since the last snapshot cannot be done again."""

    reason = Reason.REASON_NOT_REPLAYABLE


class SnapshotFailedError(HeliographError):
    """The state of a session could not be written or read. The last good state stays."""

    reason = Reason.REASON_SNAPSHOT_FAILED


class LoopEndedError(WorkError):
    """A feed came too late: its loop ended before one of its steps took it."""

    reason = Reason.REASON_LOOP_ENDED


class DeviceLostError(WorkError):
    """The device is lost until its daemon restarts; the daemon's other devices still work."""

    reason = Reason.REASON_DEVICE_LOST


class MemberLostError(DeviceLostError):
    """A daemon of the pool is unreachable, or was restarted; what it held is lost."""

    reason = Reason.REASON_MEMBER_LOST


class ConnectionError(HeliographError, builtins.ConnectionError):
    """The session cannot be used."""


class UnavailableError(ConnectionError):
    """The server cannot be reached, or the connection broke."""

    reason = Reason.REASON_UNAVAILABLE


class NotHeliographError(ConnectionError):
    """The address is not a Heliograph server's."""

    reason = Reason.REASON_NOT_HELIOGRAPH


class DrainingError(ConnectionError):
    """The server is shutting down and accepts nothing new."""

    reason = Reason.REASON_DRAINING


class SessionClosedError(ConnectionError):
    """The session is unknown, was closed, or its lease has ended."""

    reason = Reason.REASON_SESSION_CLOSED


class MovedError(ConnectionError):
    """Another daemon has the session now; clients follow it by themselves.

    `url`: that daemon's address. `proof`: 16 bytes from which the client makes the session's secret
    there (`moved_secret`); without the secret here they are worth nothing.
    """

    reason = Reason.REASON_MOVED
    url: str = ""
    proof: bytes = b""

    def to(self, url: str, proof: bytes) -> MovedError:
        """Set the place of the session, and return the error."""
        self.url, self.proof = url, proof
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_moved, (self.message, self.advice, self.origin, self.url, self.proof))

    def at(self, origin: Origin) -> MovedError:
        return _rebuild_moved(self.message, self.advice, origin, self.url, self.proof)


def _rebuild_moved(message: str, advice: str, origin: Origin, url: str, proof: bytes) -> MovedError:
    return MovedError(message, advice=advice, origin=origin).to(url, proof)


class VersionMismatchError(ConnectionError):
    """The two sides have no version of the contract in common."""

    reason = Reason.REASON_VERSION_MISMATCH


class UnauthenticatedError(ConnectionError):
    """The client presented no token or certificate, or one that is not in force."""

    reason = Reason.REASON_UNAUTHENTICATED


class ProtocolError(ConnectionError):
    """The other side broke a rule of the contract."""

    reason = Reason.REASON_PROTOCOL_VIOLATION


class ContentMismatchError(HeliographError):
    """Uploaded bytes do not have the announced digest."""

    reason = Reason.REASON_CONTENT_MISMATCH


class PermissionDeniedError(HeliographError):
    """The caller lacks permission."""

    reason = Reason.REASON_PERMISSION_DENIED


class InvalidModelError(HeliographError):
    """A model's files are missing or damaged."""

    reason = Reason.REASON_INVALID_MODEL


class ConfigurationError(HeliographError):
    """A configuration file or a command line is wrong."""

    reason = Reason.REASON_INVALID_CONFIGURATION


class InternalError(HeliographError):
    """A defect of Heliograph; worth a report."""

    reason = Reason.REASON_INTERNAL


def rebuild(
    kind: type[HeliographError],
    message: str,
    advice: str,
    origin: Origin,
    retry_after_seconds: float | None = None,
) -> HeliographError:
    """Construct an error from positional arguments, as copy and pickle need."""
    return kind(message, advice=advice, origin=origin, retry_after_seconds=retry_after_seconds)


def concrete_classes() -> list[type[HeliographError]]:
    """Return every class with a reason of its own, in the order of the tree."""
    found: list[type[HeliographError]] = []
    pending: list[type[HeliographError]] = [HeliographError]
    while pending:
        kind = pending.pop(0)
        pending = kind.__subclasses__() + pending
        if "reason" in vars(kind) and kind is not HeliographError:
            found.append(kind)
    return found


def class_for(reason: int) -> type[HeliographError]:
    """Return the class of a reason; InternalError for an unknown one, perhaps of a newer peer."""
    return next((kind for kind in concrete_classes() if kind.reason == reason), InternalError)
