"""The peers of the MiniLM figures: transformers' BertModel in PyTorch, compiled by PyTorch, and as
an ONNX model in onnxruntime, in a process of its own.

Run by the benchmark with an interpreter that has torch and transformers. Reads lines "NAME BATCH
RUNS" and answers each with a JSON list of seconds, or with a text that says why there is no such
peer. Tokens are ready before the clock starts, and pooling and normalisation are inside it, as they
are for us.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from peer_lines import answer
from transformers import BertModel

TOKENS = 16
#: Runs that warm caches up, and are not measured.
WARM_RUNS = 3


class Whole(torch.nn.Module):  # type: ignore[misc]
    """The model with pooling and normalisation."""

    def __init__(self, folder: str, attention: str) -> None:
        super().__init__()
        self.model = BertModel.from_pretrained(folder, attn_implementation=attention).eval()

    def forward(self, ids, mask):  # type: ignore[no-untyped-def]
        hidden = self.model(ids, attention_mask=mask).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(pooled)


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    models = {name: Whole(folder, name) for name in ("eager", "sdpa")}
    compiled = torch.compile(models["sdpa"], dynamic=False)
    session = cache(lambda: onnx_session(models["eager"], threads))

    def call_of(name: str, batch: int) -> Callable[[], object]:
        ids = torch.randint(1000, 20000, (batch, TOKENS))
        mask = torch.ones_like(ids)
        if name == "onnxruntime":
            feed = {"ids": ids.numpy(), "mask": mask.numpy()}
            return lambda: session().run(None, feed)
        model = compiled if name == "compile" else models[name]
        return lambda: model(ids, mask)

    def seconds(name: str, batch: int, runs: int) -> list[float] | str:
        try:
            return measure(call_of(name, batch), runs)
        except Exception as error:  # whatever a compiler or an exporter lacks here
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    answer(seconds)


def onnx_session(model: torch.nn.Module, threads: int):  # type: ignore[no-untyped-def]
    """The model in onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    ids = torch.randint(1000, 20000, (2, TOKENS))
    names = ["ids", "mask"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.onnx"))
        torch.onnx.export(
            model,
            (ids, torch.ones_like(ids)),
            path,
            input_names=names,
            output_names=["y"],
            dynamic_axes={name: {0: "batch"} for name in names},
            dynamo=False,
        )
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def measure(call: Callable[[], object], runs: int) -> list[float]:
    """Seconds of each run."""
    seconds = []
    with torch.inference_mode():
        for number in range(runs + WARM_RUNS):
            start = time.perf_counter()
            call()
            if number >= WARM_RUNS:
                seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
