"""Answers as the JSON of OpenAI's interface. Pure."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from heliograph.llm.generating import Logprob, Reason, Result
from heliograph.llm.serving.answering import Delta
from heliograph.llm.tokenizers import Tokenizer


def event(body: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


#: The last event of a stream.
DONE = b"data: [DONE]\n\n"


def usage(results: Sequence[Result], prompts: int) -> dict[str, Any]:
    """Count the tokens of answers; the first of each prompt's counts its prompt."""
    step = len(results) // prompts
    asked = sum(one.prompt_tokens for one in results[::step])
    written = sum(len(one.tokens) for one in results)
    reused = sum(one.reused_tokens for one in results[::step])
    found: dict[str, Any] = {
        "prompt_tokens": asked,
        "completion_tokens": written,
        "total_tokens": asked + written,
        "prompt_tokens_details": {"cached_tokens": reused},
    }
    if drafted := [one.speculation for one in results if one.speculation is not None]:
        accepted = sum(one.accepted for one in drafted)
        rejected = sum(one.proposed for one in drafted) - accepted
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        found["completion_tokens_details"] = details
    return found


def _message(result: Result) -> dict[str, Any]:
    found = {**result.message, "refusal": None}
    if result.tool_calls:
        found["content"] = result.text or None
    if result.reasoning:
        found["reasoning_content"] = result.reasoning
    return found


def _delta(delta: Delta, calls: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        found["tool_calls"] = [
            {"index": calls + place, **one.as_json} for place, one in enumerate(delta.tool_calls)
        ]
    if delta.text or not found:
        found["content"] = delta.text
    return found


@dataclass(frozen=True, slots=True)
class Form:
    """The bodies of one request's replies."""

    is_chat: bool
    model: str
    tokenizer: Tokenizer
    #: The alternatives of each token; None: no log-probabilities.
    alternatives: int | None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, results: Sequence[Result], prompts: int) -> dict[str, Any]:
        """Return the reply that is not streamed."""
        choices = []
        for index, one in enumerate(results):
            made = {"message": _message(one)} if self.is_chat else {"text": one.text}
            choices.append(self._choice(index, made, one.logprobs, one.finish_reason))
        return {**self._head(False), "choices": choices, "usage": usage(results, prompts)}

    def begin(self, index: int) -> dict[str, Any] | None:
        """Return the first piece of an answer in a stream, if it has one."""
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}}) if self.is_chat else None

    def piece(self, index: int, delta: Delta, calls: int) -> dict[str, Any]:
        """Return a piece of an answer, with `calls` of tools before it."""
        made = {"delta": _delta(delta, calls)} if self.is_chat else {"text": delta.text}
        return self._piece(index, made, [delta.logprob] if delta.logprob else [])

    def end(self, index: int, reason: Reason | None) -> dict[str, Any]:
        """Return the last piece of an answer."""
        return self._piece(index, {"delta": {}} if self.is_chat else {"text": ""}, reason=reason)

    def total(self, results: Sequence[Result], prompts: int) -> dict[str, Any]:
        """Return the usage that ends a stream."""
        return {**self._head(True), "choices": [], "usage": usage(results, prompts)}

    def _piece(
        self, index: int, made: dict[str, Any], logprobs: Sequence[Logprob] = (), reason: Reason | None = None
    ) -> dict[str, Any]:
        return {**self._head(True), "choices": [self._choice(index, made, logprobs, reason)]}

    def _head(self, is_stream: bool) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * is_stream if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(
        self, index: int, made: dict[str, Any], logprobs: Sequence[Logprob], reason: Reason | None
    ) -> dict[str, Any]:
        shown = None
        if self.alternatives is not None and logprobs:
            shown = self._for_chat(logprobs) if self.is_chat else self._for_completion(logprobs)
        return {"index": index, **made, "logprobs": shown, "finish_reason": reason}

    def _word(self, token: int) -> str:
        return self.tokenizer.decode_stream(special=True).put(token) or self.tokenizer.word(token)

    def _for_chat(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            word = self._word(token)
            return {"token": word, "logprob": logprob, "bytes": list(word.encode())}

        return {
            "content": [
                {
                    **entry(one.token, one.logprob),
                    "top_logprobs": [entry(*other) for other in one.alternatives[: self.alternatives]],
                }
                for one in logprobs
            ]
        }

    def _for_completion(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        words = [self._word(one.token) for one in logprobs]
        offsets = [len("".join(words[:place])) for place in range(len(words))]
        top = [
            {self._word(token): value for token, value in one.alternatives[: self.alternatives]}
            for one in logprobs
        ]
        return {
            "tokens": words,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": top if self.alternatives else None,
            "text_offset": offsets,
        }
