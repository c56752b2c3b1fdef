"""Completions as messages."""

from __future__ import annotations

from heliograph_proto import commands as c
from heliograph_proto.description import CopyRoad
from heliograph_proto.messages.devices import decode_change, encode_change
from heliograph_proto.messages.types import decode_error, encode_error
from heliograph_proto.v1 import command_pb2

_ROADS = {road.value: road for road in CopyRoad}


def encode_completions(batch: c.CompletionBatch) -> command_pb2.CompletionBatch:
    return command_pb2.CompletionBatch(
        completed_through=batch.completed_through,
        completions=[
            command_pb2.Completion(
                sequence=one.sequence,
                error=encode_error(one.error) if one.error else None,
                data=bytes(one.data),
                outputs=[
                    command_pb2.OutputValue(output=place, data=bytes(data)) for place, data in one.outputs
                ],
                device_us=one.device_us,
                road=command_pb2.CopyRoad.ValueType(one.road.value if one.road else 0),
                steps=one.steps,
            )
            for one in batch.completions
        ],
        taps=[
            command_pb2.TapPiece(
                sequence=one.sequence,
                node=one.node,
                offset_bytes=one.offset_bytes,
                data=bytes(one.data),
                last=one.last,
                step=one.step,
                output=one.output,
            )
            for one in batch.taps
        ],
        changes=map(encode_change, batch.changes),
    )


def decode_completions(message: command_pb2.CompletionBatch) -> c.CompletionBatch:
    return c.CompletionBatch(
        completed_through=message.completed_through,
        completions=tuple(
            c.Completion(
                sequence=one.sequence,
                error=decode_error(one.error) if one.HasField("error") else None,
                data=one.data,
                outputs=tuple((value.output, value.data) for value in one.outputs),
                device_us=one.device_us,
                road=_ROADS.get(one.road),
                steps=one.steps,
            )
            for one in message.completions
        ),
        taps=tuple(map(_decode_piece, message.taps)),
        changes=tuple(map(decode_change, message.changes)),
    )


def _decode_piece(piece: command_pb2.TapPiece) -> c.TapPiece:
    output = piece.output if piece.HasField("output") else None
    return c.TapPiece(
        piece.sequence, piece.node, piece.offset_bytes, piece.data, piece.last, piece.step, output
    )
