"""Requests to language models: a prompt, and the options of its answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from heliograph_proto.errors import InvalidInputError, LimitExceededError
from heliograph_server.gateways.kserve.tensors import BYTES, Array, TensorPort, check_inputs, from_elements

#: The names of the inputs and outputs, those of Triton's language models.
TEXT, STREAM, SAMPLING, PROMPT_IS_LEFT_OUT = (
    "text_input", "stream", "sampling_parameters", "exclude_input_in_output",
)  # fmt: skip
ANSWER, REASON = "text_output", "finish_reason"
INPUTS = (
    TensorPort(TEXT, BYTES, (1,)),
    TensorPort(STREAM, "BOOL", (1,), is_optional=True),
    TensorPort(SAMPLING, BYTES, (1,), is_optional=True),
    TensorPort(PROMPT_IS_LEFT_OUT, "BOOL", (1,), is_optional=True),
)
OUTPUTS = (TensorPort(ANSWER, BYTES, (1,)), TensorPort(REASON, BYTES, (1,)))
#: The most bytes of a text, and the most stop texts, which are looked for with each token.
MOST_TEXT = 2**20
MOST_STOPS = 16
_FLOATS = ("temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
_WHOLES = ("max_tokens", "top_k", "seed")
#: Other servers' names of options.
_OTHERS = {"max_new_tokens": "max_tokens", "repetition_penalty": "repeat_penalty", "stop_words": "stop"}
OPTIONS = frozenset((*_FLOATS, *_WHOLES, *_OTHERS, "stop"))
#: Parameters of requests that are no option of an answer.
_APART = frozenset((
    "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "headers",
    "triton_enable_empty_final_response", "binary_data_output", STREAM, PROMPT_IS_LEFT_OUT,
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text that a model continues."""

    text: str
    #: Options of `hg.llm.Options`.
    options: dict[str, Any] = field(default_factory=dict)
    #: True if pieces of the answer are answers of their own.
    is_stream: bool = False
    #: True if the answer begins with the text.
    has_text: bool = False


def prompt_of(feeds: Mapping[str, Array], parameters: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a request's inputs and parameters. Raises InvalidInputError,
    LimitExceededError."""
    given = {name: value for name, value in parameters.items() if name not in _APART}
    if SAMPLING in feeds:
        given |= _table_of(feeds[SAMPLING].item())
    is_stream = _flag(STREAM, feeds, parameters, otherwise=False)
    is_left_out = _flag(PROMPT_IS_LEFT_OUT, feeds, parameters, otherwise=True)
    return Prompt(text_of_bytes(feeds[TEXT].item()), _options(given), is_stream, not is_left_out)


def feeds_of_json(
    table: Mapping[str, Any], ports: Sequence[TensorPort]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the inputs among the fields of a JSON object, each of one element, and the other
    fields. Raises InvalidInputError."""
    known = {port.name: port for port in ports}
    inputs = [name for name in table if name in known]
    check_inputs(ports, inputs)
    feeds = {name: from_elements(known[name], (1,), [_element(name, table[name])]) for name in inputs}
    return feeds, {name: value for name, value in table.items() if name not in known}


def _element(name: str, value: Any) -> Any:
    """Return the element of a field. Sampling parameters may be an object too."""
    if name == SAMPLING and isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, (list, dict)):
        raise InvalidInputError(f"the field {name!r} is {short(value)}, and no single value")
    return value


def text_of_bytes(data: bytes) -> str:
    """Return a text of an input. Raises InvalidInputError, LimitExceededError."""
    if len(data) > MOST_TEXT:
        raise LimitExceededError(f"the text has {len(data):,} bytes, of at most {MOST_TEXT:,}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidInputError("a text is not UTF-8") from None


def _flag(name: str, feeds: Mapping[str, Array], parameters: Mapping[str, Any], *, otherwise: bool) -> bool:
    if name in feeds:
        return bool(feeds[name].item())
    value = parameters.get(name, otherwise)
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name} is {short(value)}, which is neither true nor false")
    return value


def _table_of(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{SAMPLING} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInputError(f"{SAMPLING} is no JSON object")
    return found


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(given.keys() - OPTIONS):
        raise InvalidInputError(
            f"the parameter {unknown[0]!r:.80} is not taken",
            advice=f"parameters: {', '.join(sorted(OPTIONS))}",
        )
    found: dict[str, Any] = {}
    for name, value in given.items():
        ours = _OTHERS.get(name, name)
        if value is None or value == "":
            continue
        if ours == "stop":
            if isinstance(value, list) and len(value) > MOST_STOPS:
                raise InvalidInputError(f"{name} has {len(value):,} texts, of at most {MOST_STOPS}")
            found[ours] = value
        else:
            found[ours] = _number(name, value, int if ours in _WHOLES else float)
    return found


def _number(name: str, value: Any, kind: type[int] | type[float]) -> int | float:
    """Return a number, which some clients write as a text. Raises InvalidInputError."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or len(str(value)) > 40:
            raise ValueError
        number = kind(value)
        if number != float(value):
            raise ValueError
        return number
    except (ValueError, OverflowError):
        raise InvalidInputError(f"the parameter {name!r} is {short(value)}, and no number") from None
