"""The peer of the MiniLM figures: transformers' BertModel in PyTorch, in a process of its own.

Run by the benchmark with an interpreter that has torch and transformers. Reads lines
"ATTENTION BATCH RUNS" and answers each with a JSON list of seconds; tokens are ready before the clock
starts, and pooling and normalisation are inside it, as they are for us.
"""

from __future__ import annotations

import sys
import time

import torch
from peer_lines import answer
from transformers import BertModel

TOKENS = 16


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    models = {
        name: BertModel.from_pretrained(folder, attn_implementation=name).eval() for name in ("eager", "sdpa")
    }

    def seconds(attention: str, batch: int, runs: int) -> list[float]:
        ids = torch.randint(1000, 20000, (batch, TOKENS))
        return measure(models[attention], ids, torch.ones_like(ids), runs)

    answer(seconds)


def measure(model, ids, mask, runs: int) -> list[float]:  # type: ignore[no-untyped-def]
    """Seconds of each run. The first ones, which warm caches up, are not among them."""
    seconds = []
    with torch.inference_mode():
        for number in range(runs + 3):
            start = time.perf_counter()
            hidden = model(ids, attention_mask=mask).last_hidden_state
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            torch.nn.functional.normalize(pooled)
            if number >= 3:
                seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
