"""Refusals of unary calls: a gRPC status, and the typed error in its metadata.

This module does not import grpc: codes are the numbers of google.rpc.Code, which both sides convert
to their library's.
"""

from __future__ import annotations

from heliograph_proto.codec import decode_error, encode_error
from heliograph_proto.errors import HeliographError, Reason
from heliograph_proto.v1 import error_pb2

#: The trailing metadata that holds the encoded Error.
ERROR_KEY = "heliograph-error-bin"

CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 1, 2, 3, 4, 5
ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 6, 7, 8, 9
OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = 11, 12, 13, 14, 15, 16

_CODES = {
    Reason.REASON_INVALID_ARGUMENT: INVALID_ARGUMENT,
    Reason.REASON_INVALID_GRAPH: INVALID_ARGUMENT,
    Reason.REASON_INVALID_INPUT: INVALID_ARGUMENT,
    Reason.REASON_UNKNOWN_OP: INVALID_ARGUMENT,
    Reason.REASON_UNSUPPORTED: UNIMPLEMENTED,
    Reason.REASON_UNKNOWN_HANDLE: NOT_FOUND,
    Reason.REASON_HANDLE_EXISTS: ALREADY_EXISTS,
    Reason.REASON_UNKNOWN_DEVICE: NOT_FOUND,
    Reason.REASON_OUT_OF_RANGE: OUT_OF_RANGE,
    Reason.REASON_OUT_OF_MEMORY: RESOURCE_EXHAUSTED,
    Reason.REASON_LIMIT_EXCEEDED: RESOURCE_EXHAUSTED,
    Reason.REASON_CANCELLED: CANCELLED,
    Reason.REASON_DEADLINE_EXCEEDED: DEADLINE_EXCEEDED,
    Reason.REASON_SESSION_CLOSED: NOT_FOUND,
    Reason.REASON_DRAINING: UNAVAILABLE,
    Reason.REASON_VERSION_MISMATCH: FAILED_PRECONDITION,
    Reason.REASON_INVALID_CONFIGURATION: FAILED_PRECONDITION,
    Reason.REASON_PROTOCOL_VIOLATION: INVALID_ARGUMENT,
    Reason.REASON_MISSING_CONTENT: FAILED_PRECONDITION,
    Reason.REASON_CONTENT_MISMATCH: DATA_LOSS,
    Reason.REASON_INVALID_MODEL: FAILED_PRECONDITION,
    Reason.REASON_INVALID_CONFIGURATION: FAILED_PRECONDITION,
    Reason.REASON_UNAVAILABLE: UNAVAILABLE,
    Reason.REASON_DEVICE_LOST: UNAVAILABLE,
    Reason.REASON_MEMBER_LOST: UNAVAILABLE,
    Reason.REASON_PERMISSION_DENIED: PERMISSION_DENIED,
    Reason.REASON_UNAUTHENTICATED: UNAUTHENTICATED,
    Reason.REASON_LOOP_ENDED: FAILED_PRECONDITION,
    Reason.REASON_SNAPSHOT_FAILED: INTERNAL,
    Reason.REASON_NOT_REPLAYABLE: FAILED_PRECONDITION,
    Reason.REASON_MOVED: FAILED_PRECONDITION,
}


def code_for(error: HeliographError) -> int:
    """Return the gRPC status code of an error."""
    return _CODES.get(error.reason, INTERNAL)


def error_to_metadata(error: HeliographError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata of a refusal."""
    return ((ERROR_KEY, encode_error(error).SerializeToString()),)


def error_from_metadata(metadata: object) -> HeliographError | None:
    """Return the typed error of a refusal; None if the peer sent none, as other servers do."""
    for item in metadata if isinstance(metadata, (list, tuple)) else ():
        key, value = item
        if key == ERROR_KEY:
            return decode_error(error_pb2.Error.FromString(value))
    return None
