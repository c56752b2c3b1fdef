"""Tensor types and errors as messages."""

from __future__ import annotations

from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    MovedError,
    Origin,
    Reason,
    class_for,
)
from heliograph_proto.types import DType, TensorType, dtype_from_number, shape_problem
from heliograph_proto.v1 import error_pb2, tensor_pb2


def encode_type(found: TensorType) -> tensor_pb2.TensorType:
    return tensor_pb2.TensorType(data_type=found.dtype.number, shape=found.shape)


def decode_dtype(number: int) -> DType:
    """Raise InvalidArgumentError for an unknown number, perhaps of a newer peer."""
    found = dtype_from_number(number)
    if found is None:
        raise InvalidArgumentError(f"data type number {number} is unknown")
    return found


def decode_type(message: tensor_pb2.TensorType) -> TensorType:
    return TensorType(decode_dtype(message.data_type), tuple(message.shape))


def decode_checked_type(message: tensor_pb2.TensorType) -> TensorType:
    """Decode the type of a tensor to create. Raises InvalidArgumentError for an invalid shape."""
    found = decode_type(message)
    if problem := shape_problem(found):
        raise InvalidArgumentError(problem)
    return found


def encode_error(error: HeliographError) -> error_pb2.Error:
    origin = error.origin
    message = error_pb2.Error(reason=error.reason, message=error.message, advice=error.advice)
    if origin.op or origin.sequence:
        message.origin.op = origin.op
        message.origin.node = origin.node
        message.origin.node_name = origin.node_name
        message.origin.operands.extend(map(encode_type, origin.operands))
        message.origin.sequence = origin.sequence
    if error.retry_after_seconds is not None:
        message.retry_after_ms = min(2**32 - 1, max(1, round(error.retry_after_seconds * 1e3)))
    if isinstance(error, MovedError):
        message.moved.url, message.moved.proof = error.url, error.proof
    return message


def decode_error(message: error_pb2.Error) -> HeliographError:
    kind = class_for(message.reason)
    known = [one for one in message.origin.operands if dtype_from_number(one.data_type)]
    origin = Origin(
        op=message.origin.op,
        node=message.origin.node,
        node_name=message.origin.node_name,
        operands=tuple(map(decode_type, known)),
        sequence=message.origin.sequence,
    )
    found = kind(
        message.message or Reason.Name(kind.reason),
        advice=message.advice,
        origin=origin,
        retry_after_seconds=message.retry_after_ms / 1e3 or None,
    )
    return found.to(message.moved.url, message.moved.proof) if isinstance(found, MovedError) else found
