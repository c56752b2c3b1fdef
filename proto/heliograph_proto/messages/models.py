"""Models on the server as messages."""

from __future__ import annotations

from heliograph_proto.description import ModelInfo, ModelTensor
from heliograph_proto.messages.types import decode_checked_type, encode_type
from heliograph_proto.v1 import model_pb2


def encode_model(info: ModelInfo) -> model_pb2.DescribeModelResponse:
    return model_pb2.DescribeModelResponse(
        name=info.name,
        tensors=[
            model_pb2.ModelTensor(name=one.name, type=encode_type(one.type), digest=one.digest)
            for one in info.tensors
        ],
        left_out=info.left_out,
    )


def decode_model(message: model_pb2.DescribeModelResponse) -> ModelInfo:
    """Raises InvalidArgumentError for types that are none."""
    tensors = [ModelTensor(one.name, decode_checked_type(one.type), one.digest) for one in message.tensors]
    return ModelInfo(message.name, tuple(tensors), tuple(message.left_out))
