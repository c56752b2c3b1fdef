"""The program that draws one picture of a plan: `PictureProcess` starts it.

It reads a graph and a report from its input, and writes a page to its output. It ends itself when
it takes more time of a processor, or more memory, than its arguments allow.
"""

from __future__ import annotations

import os
import resource
import sys

from heliograph.explain.explanation import explanation
from heliograph.explain.picturing import page_of
from heliograph_proto import codec
from heliograph_proto.graph import Graph
from heliograph_proto.plans import PlanReport
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import plan_pb2

#: The number of bytes in front of each part of the input.
LENGTH_BYTES = 8
#: The status of a program whose picture is too large.
TOO_LARGE = 3


def request_of(graph: Graph, report: PlanReport, title: str) -> bytes:
    """Return the input of the program."""
    told = codec.encode(report, plan_pb2.ExplainResponse).SerializeToString()
    parts = (title.encode(), codec.graph_bytes(graph), told)
    return b"".join(len(one).to_bytes(LENGTH_BYTES) + one for one in parts)


def picture_of(request: bytes) -> str:
    """Return the page for an input."""
    title, graph, told = _parts(request)
    report = codec.decode(plan_pb2.ExplainResponse.FromString(told), PlanReport)
    decoded = codec.decode_graph(graph, Limits())
    return page_of(explanation(decoded, report), decoded, title.decode())


def _parts(request: bytes) -> tuple[bytes, ...]:
    parts, place = list[bytes](), 0
    while place < len(request):
        begin = place + LENGTH_BYTES
        place = begin + int.from_bytes(request[place:begin])
        parts.append(request[begin:place])
    return tuple(parts)


def main() -> None:
    """Draw; arguments: seconds of a processor, bytes of memory, bytes of the page."""
    seconds, memory, most = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # Runs go first.
    os.nice(10)
    page = picture_of(sys.stdin.buffer.read()).encode()
    if len(page) > most:
        sys.exit(TOO_LARGE)
    sys.stdout.buffer.write(page)
