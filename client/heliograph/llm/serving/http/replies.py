"""Answers as the JSON of OpenAI's interface. Pure."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from heliograph.llm.generating import Logprob, Reason, Result
from heliograph.llm.serving.answering import Delta
from heliograph.llm.tokenizers import Tokenizer


def event(body: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + _json(body).encode() + b"\n\n"


def with_list(name: str, items: Iterable[dict[str, Any]], **others: Any) -> bytes:
    """Return an object with a list as JSON. Other threads have their turns between two items."""
    listed = ",".join(map(_json, items))
    return f'{_json(others)[:-1]},"{name}":[{listed}]}}'.encode()


def _json(found: dict[str, Any]) -> str:
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


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


class Offsets:
    """The places at which the tokens of an answer begin in its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = tokenizer.decode_stream(special=True)
        self._end = 0

    def of(self, token: int) -> int:
        """Return the place of the next token; of a part of a character, that of the character."""
        place = self._end
        self._end += len(self._stream.put(token))
        return place


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

    def whole(self, results: Sequence[Result], prompts: int) -> bytes:
        """Return the reply that is not streamed. Takes long where there are log-probabilities."""
        choices = (self._whole_choice(index, one) for index, one in enumerate(results))
        return with_list("choices", choices, **self._head(False), usage=usage(results, prompts))

    def _whole_choice(self, index: int, one: Result) -> dict[str, Any]:
        made = {"message": _message(one)} if self.is_chat else {"text": one.text}
        return self._choice(index, made, self._shown(one.logprobs, self.offsets()), one.finish_reason)

    def offsets(self) -> Offsets:
        """Return those of an answer."""
        return Offsets(self.tokenizer)

    def begin(self, index: int) -> dict[str, Any] | None:
        """Return the first piece of an answer in a stream, if it has one."""
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}}) if self.is_chat else None

    def piece(self, index: int, delta: Delta, calls: int, offsets: Offsets) -> dict[str, Any]:
        """Return a piece of an answer, with `calls` of tools before it. `offsets` are the
        answer's."""
        made = {"delta": _delta(delta, calls)} if self.is_chat else {"text": delta.text}
        return self._piece(index, made, self._shown([delta.logprob] if delta.logprob else [], offsets))

    def end(self, index: int, reason: Reason | None) -> dict[str, Any]:
        """Return the last piece of an answer."""
        return self._piece(index, {"delta": {}} if self.is_chat else {"text": ""}, reason=reason)

    def total(self, results: Sequence[Result], prompts: int) -> dict[str, Any]:
        """Return the usage that ends a stream."""
        return {**self._head(True), "choices": [], "usage": usage(results, prompts)}

    def _piece(
        self, index: int, made: dict[str, Any], logprobs: Any = None, reason: Reason | None = None
    ) -> dict[str, Any]:
        return {**self._head(True), "choices": [self._choice(index, made, logprobs, reason)]}

    def _head(self, is_stream: bool) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * is_stream if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(
        self, index: int, made: dict[str, Any], logprobs: Any, reason: Reason | None
    ) -> dict[str, Any]:
        return {"index": index, **made, "logprobs": logprobs, "finish_reason": reason}

    def _shown(self, logprobs: Sequence[Logprob], offsets: Offsets) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens, if they are asked for."""
        if self.alternatives is None or not logprobs:
            return None
        return self._for_chat(logprobs) if self.is_chat else self._for_completion(logprobs, offsets)

    def _word(self, data: bytes) -> str:
        """Return the text of a token; of a part of a character, its bytes as OpenAI writes them."""
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _for_chat(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            data = self.tokenizer.bytes_of(token)
            return {"token": self._word(data), "logprob": logprob, "bytes": list(data)}

        return {
            "content": [
                {
                    **entry(one.token, one.logprob),
                    "top_logprobs": [entry(*other) for other in one.alternatives[: self.alternatives]],
                }
                for one in logprobs
            ]
        }

    def _for_completion(self, logprobs: Sequence[Logprob], offsets: Offsets) -> dict[str, Any]:
        def word(token: int) -> str:
            return self._word(self.tokenizer.bytes_of(token))

        # Of tokens with the same text the likeliest is shown.
        top = [
            {word(token): value for token, value in reversed(one.alternatives[: self.alternatives])}
            for one in logprobs
        ]
        return {
            "tokens": [word(one.token) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": top if self.alternatives else None,
            "text_offset": [offsets.of(one.token) for one in logprobs],
        }
