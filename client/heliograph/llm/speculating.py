"""Speculation: tokens are proposed, and one run of the model checks several of them.

A row's bits do not depend on the number of rows, and the noise of a choice comes from the seed and
the position alone. So the choice after each proposed token is the one that the model makes without
proposals, as long as all before it were right. The text does not change, only the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import heliograph as hg
from heliograph.llm.configuration import Configuration
from heliograph.llm.effects import Ask, Give, Procedure
from heliograph.llm.generating import AnyPieces, Array, Engine, Request, Result, Speculation, is_over, take
from heliograph.llm.graphs import Decoder, carries
from heliograph.llm.sampling import Form, is_within
from heliograph_proto.gguf import GgufHeader

#: The tokens that are proposed at a time: with the one before them, rows that kernels are made for.
COUNTS = (1, 3, 7)
#: The most tokens that are proposed at a time.
MOST = 15
#: The choices that a draft notes: one more than it proposes.
NOTED = MOST + 1
#: The draft that is the text so far.
LOOKUP = "prompt"
#: The tokens without proposals that are measured first.
MEASURED = 8
#: The tokens without proposals after proposals that did not pay, which double each time.
PAUSE, LONGEST_PAUSE = 16, 256
#: The weight of a round in the next one's estimates.
DECAY = 0.9
#: A time that was not measured lately is expected to be less, until it is tried again.
FADE = 0.99
#: The lengths of the beginnings that are looked up, the longest first.
LENGTHS = (4, 3, 2)
#: The tokens without proposals where none are found.
UNFOUND = 4


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposer of the tokens of answers: `hg.llm.load(session, file, draft=...)`."""

    #: A path, a file on the server (`session.server_weights("small.gguf")`), or "prompt": the text
    #: so far.
    file: str | Path | hg.ServerWeights
    #: The number of tokens that are proposed at a time, 1 to 15. The default changes with what
    #: pays.
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and not is_within(self.tokens, Integral, 1, MOST):
            raise hg.InvalidArgumentError(
                f"the tokens of a draft are {self.tokens!r:.40}", advice=f"1 to {MOST}, or None"
            )


@dataclass
class Pace:
    """Decides how many tokens are proposed, by the share that was right and by measured times.
    Pure."""

    #: A number that does not change, or None.
    fixed: int | None = None
    #: Seconds of a round by its proposals; 0: of a token without any.
    seconds: dict[int, float] = field(default_factory=dict)
    #: Proposals that were right, and those that were right or the first wrong one, lately.
    _right: float = 1.5
    _tried: float = 2.0
    _pause: int = PAUSE
    _left: int = 0
    _is_trial: bool = False
    #: The share of the measured time that is expected.
    _hopes: dict[int, float] = field(default_factory=dict)

    def count(self, room: int) -> int:
        """Return the number of tokens to propose; 0: none, for `plain` tokens."""
        if self.fixed:
            return self.fixed if self.fixed <= room else 0
        fitting = [count for count in COUNTS if count <= room]
        if self._left or not fitting or 0 not in self.seconds:
            return 0
        best = max(fitting, key=self._rate)
        if self._is_trial or self._rate(best) > self._rate(0):
            self._is_trial = False
            return best
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return 0

    @property
    def plain(self) -> int:
        """The tokens to write without proposals."""
        return self._left or MEASURED

    def wrote(self, count: int, seconds: float) -> None:
        """Note tokens that were written without proposals."""
        self._measure(0, seconds / max(count, 1))
        if self._left:
            self._left = max(self._left - count, 0)
            self._is_trial = not self._left

    def checked(self, proposed: int, accepted: int, seconds: float | None) -> None:
        """Note a round; its time is None if something was compiled."""
        if seconds is not None:
            self._measure(proposed, seconds)
        self._right = DECAY * self._right + accepted
        self._tried = DECAY * self._tried + min(accepted + 1, proposed)
        if accepted == proposed:
            self._pause = PAUSE

    def _measure(self, count: int, seconds: float) -> None:
        """Note a time. Short ones count for more: others had the machine in the long ones."""
        known = self.seconds.get(count, seconds)
        self.seconds[count] = min(seconds, DECAY * known + (1 - DECAY) * seconds)
        self._hopes = {other: hope * FADE for other, hope in self._hopes.items()} | {count: 1.0}

    def _rate(self, count: int) -> float:
        """The tokens of a second that are expected."""
        share = min(self._right / self._tried, 0.99)
        # A number that was never tried is worth a try where its proposals would be right.
        seconds = self.seconds.get(count, self.seconds[0] * (1 + 0.1 * count))
        return (1 - share ** (count + 1)) / (1 - share) / (seconds * self._hopes.get(count, 1.0))


class Lookup:
    """Finds the tokens that came after the last ones when these were there before. Pure."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._found: int | None = None
        self.add(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            self._tokens.append(token)
            keys = [tuple(self._tokens[-length:]) for length in LENGTHS if length <= len(self._tokens)]
            places = [self._after[key] for key in keys if key in self._after]
            self._found = places[0] if places else None
            self._after.update(dict.fromkeys(keys, len(self._tokens)))

    def following(self, count: int) -> list[int] | None:
        """Return so many tokens, or None where the last ones are new."""
        if self._found is None:
            return None
        found = self._tokens[self._found : self._found + count]
        while len(found) < count:
            # The last tokens repeat themselves.
            found += found[: count - len(found)]
        return found


class Checked(Protocol):
    """A model that checks proposals: an engine, or a server for one of its answers."""

    @property
    def config(self) -> Configuration:
        """The sizes of the model."""

    def checking(self, form: Form, count: int, proposer: Decoder | None, most: int) -> Procedure[Any, Any]:
        """Return the plan of `Decoder.check`."""

    def given(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs of such a plan with those of the model."""


class Speculator:
    """Writes the answers of an engine with proposals of a second model, or of the text so far."""

    def __init__(self, engine: Engine, proposer: Engine | None, count: int | None = None) -> None:
        self._engine = engine
        self._proposer = proposer
        #: Decides how many tokens are proposed.
        self.pace = Pace(count)

    @property
    def looks_up(self) -> bool:
        """True if the text so far proposes."""
        return self._proposer is None

    @property
    def room(self) -> int:
        """The tokens for which there may be proposals."""
        return self._proposer.context if self._proposer else self._engine.context

    @property
    def _plans(self) -> int:
        return len(self._engine.plans) + (len(self._proposer.plans) if self._proposer else 0)

    def prepare(self) -> Procedure[Any, None]:
        """Compile the plan of the second model, which has all weights."""
        if self._proposer is not None:
            yield from self._proposing(self._proposer, Form(1))

    def close(self) -> Procedure[Any, None]:
        """Free the plans and the cache of the second model."""
        if self._proposer is not None:
            yield from self._proposer.close()

    def write(
        self,
        plain: Callable[[Request, int], Procedure[str, None]],
        request: Request,
        steps: int,
        pieces: AnyPieces,
        result: Result,
    ) -> Procedure[str, None]:
        """Give the text of an answer, in rounds of proposals or without any, by what pays."""
        speculation = result.speculation = result.speculation or Speculation()
        tokens, lookup = list(request.tokens), None if self._proposer else Lookup(request.tokens)
        while not is_over(pieces, result, steps):
            written, began = len(result.tokens), time.perf_counter()
            left = steps - written
            count = self.pace.count(min(left, self.room - len(tokens)) - 1)
            found = lookup.following(count) if lookup and count else None
            if count and (found or lookup is None):
                plans = self._plans
                rows = yield from self.round(self._engine, request, tokens, count, found)
                now = time.perf_counter()
                is_compiled = self._plans > plans
                accepted = self.note(rows, speculation, None if is_compiled else now - began)
                result.seconds += now - began
                yield from self._take(rows[: accepted + 1, 1:], request, pieces, result)
            else:
                most = UNFOUND if count else self.pace.plain
                yield from plain(replace(request, tokens=tokens), min(most, left))
                self.pace.wrote(len(result.tokens) - written, time.perf_counter() - began)
            new = result.tokens[written:]
            tokens += new
            if lookup:
                lookup.add(new)

    def _take(self, rows: Array, request: Request, pieces: AnyPieces, result: Result) -> Procedure[str, None]:
        """Take the chosen tokens up to the one that ends the answer, and give their text."""
        text = ""
        for row in rows:
            token = take(row, result)
            if token in request.ends:
                result.finish_reason = "stop"
                break
            text += pieces.add(token)
            if pieces.is_stopped:
                break
        result.text += text
        if text:
            yield Give(text)

    def note(self, rows: Array, speculation: Speculation, seconds: float | None) -> int:
        """Note a round, and return the number of proposals that were right. `seconds` is None if
        something was compiled."""
        count, accepted = len(rows) - 1, agreeing(rows)
        speculation.runs += 1
        speculation.proposed += count
        speculation.accepted += accepted
        self.pace.checked(count, accepted, seconds)
        return accepted

    def round(
        self,
        checked: Checked,
        request: Request,
        tokens: Sequence[int],
        count: int,
        found: list[int] | None,
    ) -> Procedure[Any, Array]:
        """Propose tokens and check them, in messages that wait for nothing in between. Returns the
        rows of `Decoder.check`."""
        proposer, form = self._proposer, request.settings.form
        inputs = {
            **Engine.place_of(tokens),
            **request.settings.inputs(checked.config.vocabulary, list(tokens)),
        }
        futures = []
        try:
            decoder = None if proposer is None else proposer.decoder
            plan = yield from checked.checking(form, count, decoder, NOTED)
            given = inputs
            if proposer is None:
                given = {**inputs, "proposals": np.array(found, np.int32)}
            else:
                yield from proposer.fill(list(tokens[:-1]))
                drafting = yield from self._proposing(proposer, form)
                futures.append(drafting.loop(inputs, steps=count + 1, carry=carries(form), fetch=()))
            futures.append(plan.submit(checked.given(given), fetch=["chosen"]))
            outputs = yield Ask(futures[-1].result)
            rows: Array = outputs["chosen"]
            if proposer is not None:
                # Its cache has the right ones too; the others are written over.
                proposer.has([tokens[-1], *rows[: agreeing(rows), 0].tolist()])
            return rows
        finally:
            for future in futures:
                future.cancel()

    def _proposing(self, proposer: Engine, form: Form) -> Procedure[Any, Any]:
        build = partial(proposer.decoder.propose, form, NOTED)
        return proposer.plan(("propose", form), build)


def agreeing(rows: Array) -> int:
    """Return the number of proposals, the first column, that the choices, the second, agree with
    from the first on."""
    # The last row has no proposal.
    return int((rows[:, 0] != rows[:, 1]).argmax())


def check_same_words(model: GgufHeader, draft: GgufHeader) -> None:
    """Raises InvalidModelError for a draft whose tokens are others."""
    words, others = (header.words("tokenizer.ggml.tokens") for header in (model, draft))
    if len(words) != len(others):
        why = f"{len(others)} tokens, not {len(words)}"
    else:
        pairs = enumerate(zip(words, others, strict=True))
        place = next((place for place, (word, other) in pairs if word != other), None)
        if place is None:
            return
        why = f"{others[place]!r:.40} as token {place}, not {words[place]!r:.40}"
    raise hg.InvalidModelError(
        f"{draft.name} cannot draft for {model.name}: its vocabulary has {why}",
        advice="take a smaller model of the same family",
    )
