"""llama.cpp with the devices of ggml-rpc servers, under its own interpreter.

    llama_rpc.py MODEL TOKENS RUNS [--context N] [ENDPOINT ...]

Prints a JSON object: the tokens that it generates greedily after a prompt of 24, the seconds of
each prompt and of each decoded token, and the names of the devices. Without endpoints it uses its
own CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

PACKAGE = Path(__file__).parents[3] / ".venv-peers" / "ggml-rpc" / "llama_cpp"
PROMPT = 24


def library() -> Any:
    """The functions of llama.cpp; the package's own front, which needs more, is not imported."""
    package = ModuleType("llama_cpp")
    package.__path__ = [str(PACKAGE)]
    sys.modules["llama_cpp"] = package
    from llama_cpp import llama_cpp  # type: ignore[import-not-found]

    return llama_cpp


def devices_at(endpoints: list[str]) -> list[int]:
    """The first device of each server. The client of ggml aborts if there is none."""
    loaded = {}
    for name in ("base", "rpc", ""):
        file = PACKAGE / "lib" / f"libggml{'-' * bool(name)}{name}.so"
        loaded[name] = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    add, get = loaded["rpc"].ggml_backend_rpc_add_server, loaded["base"].ggml_backend_reg_dev_get
    add.restype, add.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    return [get(add(one.encode()), 0) for one in endpoints]


class Model:
    def __init__(self, path: str, endpoints: list[str], context: int) -> None:
        self.lib = lib = library()
        self.quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.quiet, ctypes.c_void_p())
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        devices = devices_at(endpoints)
        self.devices = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        options.n_gpu_layers = 99 if endpoints else 0
        options.use_mmap = False
        options.devices = ctypes.addressof(self.devices) if devices else None
        self.model = lib.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            raise SystemExit("llama.cpp cannot load the model")
        given = lib.llama_context_default_params()
        given.n_ctx, given.n_batch, given.n_ubatch = context, 512, 512
        given.n_threads = given.n_threads_batch = 2
        self.context = lib.llama_init_from_model(self.model, given)
        if not self.context:
            raise SystemExit("llama.cpp has no context")
        self.words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(512, 0, 1)

    def compute(self, tokens: list[int], start: int) -> int:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place == len(tokens) - 1
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp failed")
        found = self.lib.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(found, (self.words,)).argmax())

    def generate(self, count: int, prompt: int) -> tuple[list[int], float, list[float]]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        begin = time.perf_counter()
        tokens = [self.compute([(7 * place + 3) % self.words for place in range(prompt)], 0)]
        prefill, steps = time.perf_counter() - begin, []
        for place in range(count - 1):
            begin = time.perf_counter()
            tokens.append(self.compute([tokens[-1]], prompt + place))
            steps.append(time.perf_counter() - begin)
        return tokens, prefill, steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("tokens", type=int)
    parser.add_argument("runs", type=int)
    parser.add_argument("endpoints", nargs="*")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    given = parser.parse_args()
    model = Model(given.model, given.endpoints, given.context)
    runs = [model.generate(given.tokens, given.prompt) for _ in range(given.runs)]
    print(json.dumps({"tokens": [one[0] for one in runs], "prefill": [one[1] for one in runs],
                      "steps": [one[2] for one in runs]}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
