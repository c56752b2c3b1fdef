"""Between the messages of the contract and the dataclasses that live inside client and server.

Decoding trusts nothing but checks little: what a graph or a command means is checked where it is
used. What is checked here is what a dataclass cannot express, such as an unknown data type.
"""

from heliograph_proto.messages.commands import decode_command, encode_command
from heliograph_proto.messages.completions import decode_completions, encode_completions
from heliograph_proto.messages.devices import (
    decode_answers,
    decode_device,
    decode_device_list,
    decode_memory,
    decode_placement,
    decode_probed,
    decode_query,
    decode_session,
    decode_traffic,
    decode_ways,
    encode_answers,
    encode_device,
    encode_device_list,
    encode_memory,
    encode_placement,
    encode_probed,
    encode_queries,
    encode_session,
    encode_traffic,
    encode_ways,
)
from heliograph_proto.messages.graphs import decode_graph, encode_graph, graph_digest
from heliograph_proto.messages.logs import decode_lines, encode_lines
from heliograph_proto.messages.models import decode_model, encode_model
from heliograph_proto.messages.plans import (
    decode_estimate,
    decode_offers,
    decode_plan,
    decode_report,
    decode_reserved,
    encode_estimate,
    encode_offers,
    encode_plan,
    encode_report,
    encode_reserved,
)
from heliograph_proto.messages.portions import decode_portion, encode_portion
from heliograph_proto.messages.types import (
    decode_checked_type,
    decode_dtype,
    decode_error,
    decode_type,
    encode_error,
    encode_type,
)

__all__ = [
    "decode_answers",
    "decode_checked_type",
    "decode_command",
    "decode_completions",
    "decode_device",
    "decode_device_list",
    "decode_dtype",
    "decode_error",
    "decode_estimate",
    "decode_graph",
    "decode_lines",
    "decode_memory",
    "decode_model",
    "decode_offers",
    "decode_placement",
    "decode_probed",
    "decode_plan",
    "decode_portion",
    "decode_query",
    "decode_report",
    "decode_reserved",
    "decode_session",
    "decode_traffic",
    "decode_type",
    "decode_ways",
    "encode_answers",
    "encode_command",
    "encode_completions",
    "encode_device",
    "encode_device_list",
    "encode_error",
    "encode_estimate",
    "encode_graph",
    "encode_lines",
    "encode_memory",
    "encode_model",
    "encode_offers",
    "encode_placement",
    "encode_probed",
    "encode_plan",
    "encode_portion",
    "encode_queries",
    "encode_report",
    "encode_reserved",
    "encode_session",
    "encode_traffic",
    "encode_type",
    "encode_ways",
    "graph_digest",
]
