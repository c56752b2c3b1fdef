"""The engine of models that embed texts and write none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

import numpy as np

import heliograph as hg
from heliograph.llm.architectures.bert import Encoding
from heliograph.llm.configuration import Configuration
from heliograph.llm.current_session import CurrentSession
from heliograph.llm.decoding_step import Weights
from heliograph.llm.effects import Ask, Procedure
from heliograph.llm.files.adapters import Scales
from heliograph.llm.generating import built

Array: TypeAlias = "np.ndarray[Any, Any]"

#: The sizes that texts and batches are padded to, a plan for each pair.
LENGTHS = (16, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 4, 16)
#: The runs that are sent before the first is done.
AHEAD = 4


class EncoderEngine:
    """An encoder on a session, with its plans. Runs share nothing, so any number may be in
    progress."""

    def __init__(
        self,
        session: CurrentSession,
        config: Configuration,
        weights: Weights,
        pooling: str,
        options: dict[str, Any],
    ) -> None:
        self.config = config
        self.context = min(config.context, LENGTHS[-1])
        self.plans: dict[Any, Any] = {}
        #: There are none for encoders.
        self.adapters = Scales()
        self.session = session
        #: The number of the session that the plans are of.
        self._number = session.number
        self._weights = weights
        self._pooling = pooling
        self._options = options

    def check(self, tokens: Sequence[int], room: int) -> None:
        """Raises as `Engine.check`, and UnsupportedError where an answer is wanted."""
        if room:
            self.refuse()
        if len(tokens) > self.context:
            raise hg.LimitExceededError(
                f"the text has {len(tokens)} tokens, the context {self.context}", advice="shorten the text"
            )

    def refuse(self, *_: object) -> NoReturn:
        """Raises UnsupportedError."""
        raise hg.UnsupportedError(
            f"{self._weights.name}: a model of the architecture {self.config.architecture!r} writes no text",
            advice="llm.embed(texts) is what it is for",
        )

    def prepare(self) -> Procedure[Any, None]:
        """Compile the smallest plan, which has all weights."""
        yield from self._plan(BATCHES[0], LENGTHS[0])

    def embed(self, texts: Sequence[list[int]]) -> Procedure[Any, Array]:
        """Return a unit vector for each text, f32 [texts, w]."""
        return self.session.kept_up(partial(self._embed, texts))

    def _embed(self, texts: Sequence[list[int]]) -> Procedure[Any, Array]:
        found = np.empty((len(texts), self.config.width), np.float32)
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        futures: list[tuple[list[int], Any]] = []
        try:
            for begin in range(0, len(order), BATCHES[-1]):
                chosen = order[begin : begin + BATCHES[-1]]
                tokens, lengths = padded([texts[place] for place in chosen])
                plan = yield from self._plan(*tokens.shape)
                futures.append((chosen, plan.submit(tokens=tokens, lengths=lengths)))
                if len(futures) > AHEAD:
                    yield from self._take(found, *futures.pop(0))
            while futures:
                yield from self._take(found, *futures.pop(0))
        finally:
            for _, future in futures:
                future.cancel()
        return found

    def _take(self, found: Array, chosen: list[int], future: Any) -> Procedure[Any, None]:
        outputs = yield Ask(future.result)
        found[chosen] = outputs["embedding"][: len(chosen)]

    def _plan(self, batch: int, length: int) -> Procedure[Any, Any]:
        if self._number != self.session.number:
            self._number = self.session.number
            self.plans.clear()
        if (batch, length) not in self.plans:
            graph = built(self._weights, partial(self.graph, batch, length))
            self.plans[batch, length] = yield Ask(partial(self.session.compile, graph, **self._options))
        return self.plans[batch, length]

    def graph(self, batch: int, length: int) -> hg.Graph:
        """A graph from `tokens` (i32 [batch, length]) and `lengths` (i32 [batch]) to `embedding`
        (f32 [batch, w])."""
        graph = hg.Graph()
        tokens = graph.input("tokens", (batch, length), "i32")
        lengths = graph.input("lengths", (batch,), "i32")
        places = graph.constant(np.arange(length, dtype=np.int32))
        is_text = places < hg.expand_dims(lengths, axis=1)
        bias = hg.reshape(hg.where(is_text, 0.0, float("-inf")), (batch, 1, 1, length))
        encoding = Encoding(graph, self.config, self._weights, batch, length)
        rows = encoding.rows(
            hg.reshape(tokens, (batch * length,)), hg.broadcast_to(bias, (batch, 1, length, length))
        )
        rows = hg.reshape(rows, (batch, length, self.config.width))
        if self._pooling == "first":
            pooled = rows[:, 0]
        else:
            last = places == hg.expand_dims(lengths - 1, axis=1)
            share = hg.astype(last if self._pooling == "last" else is_text, "f32")
            pooled = hg.reshape(hg.expand_dims(share, axis=1) @ rows, (batch, self.config.width))
        graph.output("embedding", hg.ops.l2_norm(pooled, eps=1e-12))
        return graph

    answer = rows = refuse

    def close(self) -> Procedure[Any, None]:
        """Free the plans."""
        for plan in self.plans.values():
            plan.free()
        self.plans.clear()
        yield from ()


def padded(texts: Sequence[list[int]]) -> tuple[Array, Array]:
    """Return tokens in the smallest sizes that hold them, and their numbers."""
    length = next(size for size in LENGTHS if size >= max(map(len, texts)))
    batch = next(size for size in BATCHES if size >= len(texts))
    tokens, lengths = np.zeros((batch, length), np.int32), np.ones(batch, np.int32)
    for place, one in enumerate(texts):
        tokens[place, : len(one)] = one
        lengths[place] = len(one)
    return tokens, lengths
