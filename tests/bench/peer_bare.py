"""The floor of served models: servers of gRPC in Python with a handler and nothing else, in a process of
their own.

`aio|threads PATH` serves the ONNX model of a file with grpc.aio, or with gRPC's server that has threads. The
handler's thread runs the plan. A request whose id is `echo` gets an answer of that size at once. Says its
port.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from peer_lines import end_with_parent, say
from tritonclient.grpc import service_pb2 as pb

import heliograph as hg
from heliograph_proto.addresses import parse_address
from heliograph_server.inprocess.blocking import LocalShell

#: The id of a request that is answered at once.
ECHO = "echo"
MOST_ROWS, THREADS = 32, 8


def answering(path: str) -> Any:
    """The handler, which has a session of its own."""
    session = hg.Session(LocalShell(parse_address("local:"), computes=True))
    plan = hg.onnx.load(path).compile(session, batch=(1, MOST_ROWS))
    known = list[pb.ModelInferResponse]()

    def infer(request: Any) -> Any:
        if request.id == ECHO and known:
            return known[0]
        feeds = {
            one.name: np.frombuffer(raw, np.int64).reshape(tuple(one.shape))
            for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        answer = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        for name, array in plan.run(feeds).items():
            answer.outputs.add(name=name, datatype="FP32", shape=array.shape)
            answer.raw_output_contents.append(array.tobytes())
        known[:] = [answer]
        return answer

    return infer


def add_to(server: Any, infer: Any) -> int:
    """Add the handler and a port to a server, and return the port."""
    codec = pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer, *codec)}
    name = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    port: int = server.add_insecure_port("127.0.0.1:0")
    return port


async def serve_aio(infer: Any) -> None:
    async def handle(request: Any, context: Any) -> Any:
        return infer(request)

    server = grpc.aio.server()
    port = add_to(server, handle)
    await server.start()
    say(port)
    await server.wait_for_termination()


def serve_threads(infer: Any) -> None:
    server = grpc.server(ThreadPoolExecutor(THREADS))
    port = add_to(server, lambda request, context: infer(request))
    server.start()
    say(port)
    server.wait_for_termination()


def main() -> None:
    kind, path = sys.argv[1:]
    end_with_parent()

    def serve() -> None:
        import uvloop

        infer = answering(path)
        uvloop.run(serve_aio(infer)) if kind == "aio" else serve_threads(infer)

    # The main thread handles signals, so it hands its runs to others.
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
