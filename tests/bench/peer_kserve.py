"""The peer of the figures of served models: an ONNX model in onnxruntime behind a server of
grpc.aio, as people write it by hand, in a process of its own.

`export FOLDER PATH` writes MiniLM as an ONNX file, with an interpreter that has torch and
transformers; without a FOLDER, as "-", a BERT of the base's width, with random weights. `serve PATH
THREADS` says its port. It takes the messages of the open inference
protocol, so that both servers have the same client.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from peer_lines import end_with_parent, say

TOKENS = 16
#: Of the BERT with random weights: half of the base's.
LAYERS = 6
_DTYPES = {"INT64": np.int64, "FP32": np.float32}


def export(folder: str, path: str) -> None:
    import torch
    from peer_minilm import Whole
    from transformers import BertConfig, BertModel

    warnings.simplefilter("ignore")
    if folder == "-":
        torch.manual_seed(1)
        model = Whole.__new__(Whole)
        torch.nn.Module.__init__(model)
        config = BertConfig(num_hidden_layers=LAYERS, attn_implementation="eager")
        model.model = BertModel(config, add_pooling_layer=False).eval()
    else:
        model = Whole(folder, "eager")
    ids = torch.randint(1000, 20000, (2, TOKENS))
    names = ["ids", "mask"]
    torch.onnx.export(
        model,
        (ids, torch.ones_like(ids)),
        path,
        input_names=names,
        output_names=["y"],
        dynamic_axes={name: {0: "batch"} for name in (*names, "y")},
        dynamo=False,
    )
    say("exported")


async def serve(path: str, threads: int) -> None:
    import grpc
    import onnxruntime
    from tritonclient.grpc import service_pb2 as pb

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    pool = ThreadPoolExecutor(1)

    async def infer(request: Any, context: Any) -> Any:
        feeds = {
            one.name: np.frombuffer(raw, _DTYPES[one.datatype]).reshape(tuple(one.shape))
            for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        (y,) = await asyncio.get_running_loop().run_in_executor(pool, session.run, None, feeds)
        answer = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        answer.outputs.add(name="y", datatype="FP32", shape=y.shape)
        answer.raw_output_contents.append(y.tobytes())
        return answer

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    name = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"ModelInfer": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(port)
    await server.wait_for_termination()


def main() -> None:
    what, path, other = sys.argv[1:]
    if what == "export":
        export(path, other)
        return
    end_with_parent()
    import uvloop

    uvloop.run(serve(str(Path(path)), int(other)))


if __name__ == "__main__":
    main()
