"""llama.cpp as a peer, under its own interpreter: prompts and decoded tokens of a GGUF file.

    peer_llama.py MODEL THREADS [ROWS]

Answers `prompt TOKENS RUNS` with the seconds of each run, and `decode TOKENS RUNS` with the seconds
of a token in each run, after a prompt of 16 tokens. `load TOKENS RUNS` loads the model again, and
computes a prompt. `rows TOKENS RUNS ROWS` decodes as many sequences at a time.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from peer_lines import answer

PACKAGE = Path(__file__).parents[2] / ".venv-peers" / "ggml-rpc" / "llama_cpp"
CONTEXT, PROMPT = 1024, 16


def library() -> Any:
    """The functions of llama.cpp; the package's own front, which needs more, is not imported."""
    package = ModuleType("llama_cpp")
    package.__path__ = [str(PACKAGE)]
    sys.modules["llama_cpp"] = package
    from llama_cpp import llama_cpp  # type: ignore[import-not-found]

    return llama_cpp


class Model:
    """A model and a context of it."""

    def __init__(self, path: str, threads: int, rows: int = 1) -> None:
        self.lib = lib = library()
        self.quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.quiet, ctypes.c_void_p())
        lib.llama_backend_init()
        self.path, self.threads, self.rows = path.encode(), threads, rows
        self.batch = lib.llama_batch_init(512, 0, 1)
        self.load()
        self.words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def load(self) -> None:
        lib, threads = self.lib, self.threads
        self.model = lib.llama_model_load_from_file(self.path, lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT * self.rows, 512, 512
        options.n_seq_max = self.rows
        options.n_threads = options.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit("llama.cpp cannot load the model")

    def compute(self, tokens: list[int], start: int) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place == len(tokens) - 1
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp failed")

    def free(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def compute_rows(self, tokens: list[int], place: int) -> list[int]:
        """Return the likeliest tokens after one of each sequence."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.logits[row] = token, place, True
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, row
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp failed")
        return [self.best(row) for row in range(len(tokens))]

    def best(self, row: int = -1) -> int:
        found = self.lib.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(found, (self.words,)).argmax())

    def measure_rows(self, count: int, runs: int, rows: int) -> list[float]:
        """Return the seconds of a step of each run."""
        found = []
        for _ in range(runs):
            self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
            tokens = list(range(300, 300 + rows))
            for place in range(PROMPT):
                tokens = self.compute_rows(tokens, place)
            begin = time.perf_counter()
            for place in range(count):
                tokens = self.compute_rows(tokens, PROMPT + place)
            found.append((time.perf_counter() - begin) / count)
        return found

    def measure(self, what: str, count: int, runs: int, rows: int = 1) -> list[float]:
        if what == "rows":
            return self.measure_rows(count, runs, rows)
        found = []
        for _ in range(runs):
            self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
            if what == "decode":
                self.compute(list(range(300, 300 + PROMPT)), 0)
                token = self.best()
            if what == "load":
                self.free()
            begin = time.perf_counter()
            if what == "load":
                self.load()
            if what != "decode":
                self.compute(list(range(300, 300 + count)), 0)
                self.best()
            else:
                for place in range(count):
                    self.compute([token], PROMPT + place)
                    token = self.best()
            found.append((time.perf_counter() - begin) / (count if what == "decode" else 1))
        return found


if __name__ == "__main__":
    answer(Model(sys.argv[1], *map(int, sys.argv[2:])).measure)
