"""llama.cpp on the devices of an RPC server, under its own interpreter: prompts and decoded tokens.

    peer_llama_rpc.py MODEL ENDPOINT

Answers `prompt TOKENS RUNS` with the seconds of each prompt, and `decode TOKENS RUNS` with those of
a decoded token in each run, after a prompt of 16 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean

from peer_lines import answer

sys.path.append(str(Path(__file__).parents[1] / "support"))

from peers.llama_rpc import Model

CONTEXT, PROMPT = 512, 16


def main() -> None:
    path, endpoint = sys.argv[1:]
    model = Model(path, [endpoint], CONTEXT)

    def measure(what: str, count: int, runs: int) -> list[float]:
        if what == "prompt":
            return [model.generate(1, count)[1] for _ in range(runs)]
        return [mean(model.generate(count, PROMPT)[2]) for _ in range(runs)]

    answer(measure)


if __name__ == "__main__":
    main()
