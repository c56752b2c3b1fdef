"""Tokens of a language model, beside llama.cpp on the same file with as many threads.

The model has TinyLlama's sizes with fewer layers, random q4_0 weights and 32,000 tokens.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from figures import Figure, paired_medians
from llm_shapes import SHAPES, WORDS, words, write
from peer_process import PEER_PYTHON, PEERS, PeerProcess

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gguf_files import Shape
from llm_followers import followers, mistaken, write_follower
from lora_files import write_adapter

SHAPE = replace(SHAPES["tinyllama"], layers=6)
#: The shape of a draft.
SMALL = Shape("llama", 256, 2, 4, 2, 64, 704, SHAPE.context)
PROMPT, DECODED = 128, 24
#: The most that ours may take of llama.cpp's time.
BARS = {"prompt": 1.0, "decode": 1.0, "prompt-f32": 1.2, "decode-f32": 1.2}
#: The most that a sampled token may take of the likeliest one's time.
SAMPLED_BAR = 1.15
#: The most that a token with an adapter of rank 16 for all matrices of layers may take.
ADAPTED_BAR = 1.25
RANK = 16
#: The most that an answer may take of one without a draft, by the share of wrong proposals.
DRAFTED_BARS = {0.0: 0.85, 0.5: 1.1, 1.0: 1.1}
DRAFTED = 100
ROUNDS = 6


def figures() -> Iterator[Figure]:
    """Milliseconds of a prompt and of a token."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "model.gguf", SHAPE)
        with hg.connect("local:") as session:
            ours = Ours(hg.llm.load(session, path))
            likeliest, sampled = paired_medians(
                lambda runs: ours.decode(runs, temperature=0),
                lambda runs: ours.decode(runs, seed=1),
                ROUNDS,
                1,
            )
            yield Figure(
                "llm/sampled", sampled * 1e3, likeliest * 1e3, SAMPLED_BAR, "ms/token", "the likeliest token"
            )
            yield adapted(session, ours, path)
            yield from drafted(session, Path(folder))
            if not (PEERS / "ggml-rpc" / "llama_cpp" / "lib" / "libllama.so").exists():
                print("no figures beside llama.cpp: `make peers` builds it", file=sys.stderr)
                return
            threads = len(os.sched_getaffinity(0))
            with PeerProcess("peer_llama.py", path, threads, python=PEER_PYTHON) as peer:
                yield from beside(ours, peer)
                wide = Ours(hg.llm.load(session, path, activations="f32"))
                yield from beside(wide, peer, "-f32")


def adapted(session: hg.Session, ours: Ours, path: Path) -> Figure:
    """A token with an adapter, beside the model alone."""
    adapter = write_adapter(
        path.with_name("adapter.gguf"),
        path,
        rank=RANK,
        stored="f16",
        wanted=lambda name: name.startswith("blk."),
    )
    theirs = Ours(hg.llm.load(session, path, adapters=[adapter]))
    alone, with_adapter = paired_medians(
        lambda runs: ours.decode(runs, temperature=0),
        lambda runs: theirs.decode(runs, temperature=0),
        ROUNDS,
        1,
    )
    note = f"rank {RANK}, f16"
    return Figure("llm/adapter", with_adapter * 1e3, alone * 1e3, ADAPTED_BAR, "ms/token", "no adapter", note)


def drafted(session: hg.Session, folder: Path) -> Iterator[Figure]:
    """A token with drafts that are right always, half of the time and never."""
    vocabulary = words()
    following = followers(WORDS)
    big = write_follower(folder / "big.gguf", vocabulary, following, SHAPE, stored="q4_0")
    alone = hg.llm.load(session, big)
    for wrong, bar in DRAFTED_BARS.items():
        proposed = mistaken(following, wrong)
        small = write_follower(folder / "small.gguf", vocabulary, proposed, SMALL, stored="q4_0")
        with_draft = hg.llm.load(session, big, draft=small)
        result = with_draft.generate([500], max_tokens=DRAFTED, temperature=0).result()
        mine, theirs = paired_medians(partial(answered, with_draft), partial(answered, alone), ROUNDS, 1)
        counts = result.speculation
        note = f"{counts.accepted} of {counts.proposed} accepted" if counts else ""
        name = f"llm/draft-{100 * (1 - wrong):.0f}%"
        yield Figure(name, mine * 1e3, theirs * 1e3, bar, "ms/token", "no draft", note)
        with_draft.close()


def answered(llm: hg.llm.LanguageModel, runs: int) -> list[float]:
    """Seconds of a token."""
    answers = (llm.generate([500], max_tokens=DRAFTED, temperature=0).result() for _ in range(runs))
    return [one.seconds / DRAFTED for one in answers]


def beside(ours: Ours, peer: PeerProcess, kind: str = "") -> Iterator[Figure]:
    """Both in turns."""
    prompts = paired_medians(ours.prompt, lambda runs: peer.seconds("prompt", PROMPT, runs), ROUNDS, 1)
    tokens = paired_medians(
        lambda runs: ours.decode(runs, temperature=0),
        lambda runs: peer.seconds("decode", DECODED, runs),
        ROUNDS,
        1,
    )
    for name, unit, (mine, theirs) in (("prompt", "ms", prompts), ("decode", "ms/token", tokens)):
        note = f"{PROMPT} tokens" if name == "prompt" else f"{1 / mine:.0f} tokens/s"
        figure, bar = f"llm/{name}{kind}", BARS[f"{name}{kind}"]
        yield Figure(figure, mine * 1e3, theirs * 1e3, bar, unit, "llama.cpp", note)


class Ours:
    """A model whose answers are measured."""

    def __init__(self, llm: hg.llm.LanguageModel) -> None:
        self._llm = llm
        self._turn = 0

    def prompt(self, runs: int) -> list[float]:
        """Seconds until the first token after a prompt that is new."""
        found = []
        for _ in range(runs):
            self._turn += 1
            tokens = [300 + self._turn, *range(301, 300 + PROMPT)]
            begin = time.perf_counter()
            self._llm.generate(tokens, max_tokens=1, temperature=0).result()
            found.append(time.perf_counter() - begin)
        return found

    def decode(self, runs: int, **options: float) -> list[float]:
        """Seconds of a token."""
        found = []
        for _ in range(runs):
            answer = self._llm.generate(list(range(300, 316)), max_tokens=DECODED, **options)  # type: ignore[arg-type]
            found.append(answer.result().seconds / DECODED)
        return found
