"""The bodies of requests, checked. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from heliograph.llm.sampling import ALTERNATIVES
from heliograph.llm.serving.http.errors import ApiError, refused
from heliograph_proto.codec import paced_json

#: The most answers of a request: prompts times `n`.
ANSWERS = 32
#: The most texts of a request for embeddings.
TEXTS = 2048
#: The most stop texts.
STOPS = 16
#: The tokens of a completion that asks for no number, as OpenAI's.
TOKENS = 16

#: Parameters that change nothing here.
_IGNORED = ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
#: Parameters that have one value here, and others that are the same.
_FIXED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_SHARED = (
    "model", "stream", "stream_options", "n", "stop", "seed", "max_tokens", "logprobs", "logit_bias", "top_k",
    "response_format", "grammar", "regex", *_NUMBERS, *_IGNORED, *_FIXED,
)  # fmt: skip
COMPLETION = frozenset(("prompt", *_SHARED))
CHAT = frozenset((
    "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
    "max_completion_tokens", "top_logprobs", *_SHARED,
))  # fmt: skip
EMBEDDINGS = frozenset(("model", "input", "encoding_format", "dimensions", "user"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The way to make and send the answers of a request."""

    #: The options of each answer, but its seed.
    options: dict[str, Any]
    seed: int
    n: int
    is_stream: bool
    has_usage: bool
    #: The alternatives of each token; None: no log-probabilities.
    alternatives: int | None


def parse_body(raw: bytes, known: frozenset[str]) -> dict[str, Any]:
    """Return a body's parameters without those that are null. Raises ApiError."""
    try:
        found = paced_json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}"[:300], code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    if unknown := found.keys() - known:
        name = min(unknown)[:60]
        raise ApiError(400, f"unknown parameter: {name}", name, "unknown_parameter")
    return {name: value for name, value in found.items() if value is not None}


def model_of(body: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the name of the wanted model, of those that are served; the default is the first.
    Raises ApiError."""
    wanted = body.get("model", names[0])
    if wanted not in names:
        known = ", ".join(map(repr, names))
        raise ApiError(404, f"there is no model {short(wanted)}, only {known}", "model", "model_not_found")
    return str(wanted)


def wanted(body: Mapping[str, Any], *, is_chat: bool) -> Wanted:
    """Return how a request's answers are made. Raises ApiError."""
    for name, values in _FIXED.items():
        if name in body and body[name] not in values:
            raise refused(name, f"is {short(body[name])}, which is not supported")
    alternatives = _alternatives(body, is_chat)
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 40}
    options |= {name: _number(body, name) for name in _NUMBERS if name in body}
    if "top_k" in body:
        options["top_k"] = _whole(body, "top_k", 0, 2**31 - 1)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if name in body:
        options["max_tokens"] = _whole(body, name, 1, 2**31 - 1)
    elif not is_chat:
        options["max_tokens"] = TOKENS
    options["stop"] = _stops(body.get("stop", ()))
    options["logit_bias"] = _biases(body.get("logit_bias", {}))
    options["logprobs"] = alternatives is not None
    options |= {name: body[name] for name in ("grammar", "regex") if name in body}
    if (schema := _schema(body)) is not None:
        options["schema"] = schema
    seed = _whole(body, "seed", -(2**63), 2**63 - 1) if "seed" in body else secrets.randbits(62)
    streaming = body.get("stream_options", {})
    if not isinstance(streaming, dict) or set(streaming) - {"include_usage", "include_obfuscation"}:
        raise refused("stream_options", 'is not an object with "include_usage"')
    is_stream = _flag(body, "stream")
    return Wanted(
        options,
        seed % 2**62,
        _whole(body, "n", 1, ANSWERS) if "n" in body else 1,
        is_stream,
        is_stream and _flag(streaming, "include_usage"),
        alternatives,
    )


def prompts(body: Mapping[str, Any], name: str = "prompt", most: int = ANSWERS) -> list[str | list[int]]:
    """Return the texts, or the tokens of each, of a parameter. Raises ApiError."""
    found = body.get(name)
    if isinstance(found, str) or _is_tokens(found):
        found = [found]
    if not isinstance(found, list) or not found:
        raise refused(name, "is not a text, an array of texts, or of tokens")
    if len(found) > most:
        raise refused(name, f"has {len(found):,} texts, of at most {most:,}")
    if not all(isinstance(x, str) or _is_tokens(x) for x in found):
        raise refused(name, "is not a text, an array of texts, or of tokens")
    return found


def messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat, with the texts of parts joined. Raises ApiError."""
    found = body.get("messages")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise refused("messages", "is not an array of messages")
    for place, one in enumerate(found):
        if not isinstance(one.get("role"), str):
            raise refused(f"messages[{place}].role", "is not a text")
    return [{**one, "content": _content(one, place)} for place, one in enumerate(found)]


def is_parallel(body: Mapping[str, Any]) -> bool:
    """Return whether an answer may call several tools. Raises ApiError."""
    return _flag({"parallel_tool_calls": True, **body}, "parallel_tool_calls")


def variables(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the template's further variables. Raises ApiError."""
    found = body.get("chat_template_kwargs")
    if found is not None and not isinstance(found, dict):
        raise refused("chat_template_kwargs", "is not an object")
    return found


def _schema(body: Mapping[str, Any]) -> Any:
    """Return the JSON schema of an answer, None without one."""
    shape = body.get("response_format", {"type": "text"})
    kind = shape.get("type") if isinstance(shape, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = shape.get("json_schema") if kind == "json_schema" else None
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise refused(
            "response_format",
            'is none of {"type": "text"}, {"type": "json_object"} and {"type": "json_schema", '
            '"json_schema": {"name": ..., "schema": {...}}}',
        )
    return described["schema"]


def _content(message: Mapping[str, Any], place: int) -> str | None:
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        # A template would write "None".
        raise refused(f"messages[{place}].content", "is missing")
    if content is None or isinstance(content, str):
        return content
    is_text = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )
    if not is_text:
        raise refused(f"messages[{place}].content", "is neither a text nor an array of parts of text")
    return "".join(part["text"] for part in content)


def _is_tokens(found: Any) -> bool:
    # A body may have two millions of them.
    return isinstance(found, list) and set(map(type, found)) == {int}


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if type(value) not in (int, float):
        raise refused(name, f"is {short(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise refused(name, "is too large a number") from None


def _whole(body: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = body[name]
    if type(value) is not int or not least <= value <= most:
        raise refused(name, f"is {short(value)}, not a whole number from {least} to {most}")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise refused(name, f"is {short(value)}, neither true nor false")
    return value


def _stops(found: Any) -> Sequence[str]:
    stops = [found] if isinstance(found, str) else found
    is_good = isinstance(stops, (list, tuple)) and all(isinstance(one, str) and one for one in stops)
    if not is_good or len(stops) > STOPS:
        raise refused("stop", f"is not a text, or up to {STOPS}")
    return tuple(stops)


def _biases(found: Any) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in found.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise refused("logit_bias", "is not an object of numbers by tokens") from None


def _alternatives(body: Mapping[str, Any], is_chat: bool) -> int | None:
    """Return the alternatives that each token has; None without log-probabilities."""
    if not is_chat:
        return _whole(body, "logprobs", 0, ALTERNATIVES) if "logprobs" in body else None
    wants = _flag(body, "logprobs")
    if "top_logprobs" not in body:
        return 0 if wants else None
    if not wants:
        raise refused("top_logprobs", "needs logprobs: true")
    return _whole(body, "top_logprobs", 0, ALTERNATIVES)
