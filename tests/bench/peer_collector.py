"""A collector of traces that counts the spans it is sent: `count` gives how many came so far."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from peer_lines import say


class Counting(trace_service_pb2_grpc.TraceServiceServicer):
    """Looks at no span."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            self.spans += sum(len(scope.spans) for scope in group.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def main() -> None:
    counting = Counting()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(counting, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    say(f"http://127.0.0.1:{port}")
    for _ in sys.stdin:
        say(counting.spans)
    server.stop(None)


if __name__ == "__main__":
    main()
