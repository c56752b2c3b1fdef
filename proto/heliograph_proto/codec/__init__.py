"""Conversion between the messages of the contract and the dataclasses of client and server.

Decoders accept untrusted input but check only what a dataclass cannot express, such as an unknown
data type. The meaning of a graph or a command is checked where it is used.
"""

from __future__ import annotations

from heliograph_proto.codec.commands import (
    decode_command,
    decode_completions,
    encode_command,
    encode_completions,
)
from heliograph_proto.codec.fields import decode, decode_all, encode, encode_all
from heliograph_proto.codec.graphs import (
    decode_graph,
    decode_query,
    encode_graph,
    encode_queries,
    graph_bytes,
    received_graph,
)
from heliograph_proto.codec.plans import (
    decode_compile_request,
    decode_estimate_request,
    decode_options,
    decode_reserve_request,
    encode_compile_request,
    encode_estimate_request,
    encode_options,
    encode_place_contents_request,
    encode_reserve_request,
)
from heliograph_proto.codec.types import (
    decode_checked_type,
    decode_dtype,
    decode_error,
    decode_type,
    encode_error,
    encode_type,
)

__all__ = [
    "decode",
    "decode_all",
    "decode_checked_type",
    "decode_command",
    "decode_compile_request",
    "decode_completions",
    "decode_dtype",
    "decode_error",
    "decode_estimate_request",
    "decode_graph",
    "decode_options",
    "decode_query",
    "decode_reserve_request",
    "decode_type",
    "encode",
    "encode_all",
    "encode_command",
    "encode_compile_request",
    "encode_completions",
    "encode_error",
    "encode_estimate_request",
    "encode_graph",
    "encode_options",
    "encode_place_contents_request",
    "encode_queries",
    "encode_reserve_request",
    "encode_type",
    "graph_bytes",
    "received_graph",
]
