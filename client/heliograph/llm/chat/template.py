"""`ChatTemplate`: messages to the text that a model was trained with, by the template in its file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from heliograph.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidModelError,
    LimitExceededError,
    UnsupportedError,
)
from heliograph.llm.chat.guard import MARK, Guard
from heliograph.llm.chat.process import MAX_TEXT, MEMORY_BYTES, RenderingProcess
from heliograph_proto.gguf import GgufHeader

if TYPE_CHECKING:
    from heliograph.llm.tokenizers import Tokenizer

#: The longest template, in characters.
MAX_TEMPLATE = 2**20
#: The time that one rendering may take, the start of its process included.
SECONDS = 10.0

_KEY = "tokenizer.chat_template"
#: The template of a file with several that takes tools.
_FOR_TOOLS = "tool_use"
_DEFAULT = "default"


def read_chat_template(
    header: GgufHeader, template: str | None = None, *, seconds: float = SECONDS
) -> ChatTemplate:
    """Make the chat template of a GGUF file, or of the text of another `template` for its model.

    Raises UnsupportedError for a file without one, InvalidModelError for one that is too long,
    InvalidArgumentError for what is no text, and ConfigurationError without the package `jinja2`.
    """
    if not isinstance(template, str | None):
        raise InvalidArgumentError(
            f"chat_template is {template!r:.60}", advice="it is the text of a template"
        )
    found = _templates(header) if template is None else {_DEFAULT: template}
    if not found:
        raise UnsupportedError(
            f"{header.name} has no chat template, and which one its model was trained with is unknown",
            advice="give it: chat_template='{% for message in messages %}...', or complete text",
        )
    for name, text in found.items():
        if len(text) > MAX_TEMPLATE:
            raise InvalidModelError(
                f"{header.name}: the chat template {name!r:.40} has {len(text):,} characters; "
                f"at most {MAX_TEMPLATE:,} are supported"
            )
    if find_spec("jinja2") is None:
        raise ConfigurationError(
            "the package 'jinja2' is not installed", advice="pip install 'heliograph[llm]'"
        )
    return ChatTemplate(header.name, found, _words(header), RenderingProcess(seconds))


def _templates(header: GgufHeader) -> dict[str, str]:
    """The templates of a file by name; most have the one that is called "default" here."""
    found = {}
    for key in header.metadata:
        if key == _KEY:
            found[_DEFAULT] = header.value(key, str)
        elif key.startswith(_KEY + "."):
            found[key.removeprefix(_KEY + ".")] = header.value(key, str)
    return found


def _words(header: GgufHeader) -> dict[str, str]:
    """The words of the tokens that templates name, as `bos_token`."""
    found = {"bos_token": "", "eos_token": ""}
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    if "tokenizer.ggml.tokens" not in header.metadata:
        return found
    words = header.words("tokenizer.ggml.tokens")
    for name, role in keys.items():
        number = header.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if type(number) is int and 0 <= number < len(words):
            found[name] = words[number]
    return found


class ChatTemplate:
    """The chat templates of a model. Made by `read_chat_template`. Thread-safe.

    A template runs in a process of its own, in Jinja's sandbox, with bounds for its time, memory
    and text. The process starts at the first rendering and ends with this object.
    """

    def __init__(
        self, file: str, templates: Mapping[str, str], words: Mapping[str, str], process: RenderingProcess
    ) -> None:
        #: The name of the file in errors.
        self.file = file
        #: The texts of the templates by name; "default" unless the file has several.
        self.templates = dict(templates)
        self._words = dict(words)
        self._process = process

    def __repr__(self) -> str:
        return f"<ChatTemplate of {self.file}: {', '.join(self.templates)}>"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of messages.

        Blocks, for a millisecond if the process runs already. For a model's prompt, use `tokens`:
        in the text, control words of the template and of the messages look the same.

        Args:
            messages: Mappings as {"role": "user", "content": "Hello!"}.
            tools: Functions that the model may call, as JSON schemas; passed to the template as
                they are.
            add_generation_prompt: Whether the text ends where the model's answer begins.
            variables: Further variables of the template, such as {"enable_thinking": False}.

        Raises InvalidArgumentError for messages that the template refuses, InvalidModelError for a
        broken template or one that leaves the sandbox, and LimitExceededError for one over its
        bounds.
        """
        return self._render(
            checked(messages, "messages", needs_role=True),
            checked(tools, "tools", needs_role=False) if tools else None,
            add_generation_prompt,
            _checked_variables(variables or {}),
        )

    def tokens(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of messages, as the model was trained with them.

        Control words become control tokens where the template writes them, and stay text in
        messages and tools, so a message cannot end its own turn. Arguments and errors are those of
        `render`.
        """
        guard = Guard(tokenizer.control_words)
        text = self._render(
            guard.cut(checked(messages, "messages", needs_role=True)),
            guard.cut(checked(tools, "tools", needs_role=False)) if tools else None,
            add_generation_prompt,
            _checked_variables(variables or {}),
        )
        return tokenizer.encode_parts(text.split(MARK))

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:
        name = _FOR_TOOLS if tools and _FOR_TOOLS in self.templates else _DEFAULT
        if name not in self.templates:
            name = next(iter(self.templates))
        found = self._process.ask(
            self.templates[name],
            {
                **self._words,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": bool(add_generation_prompt),
                **variables,
            },
            self.file,
        )
        if "text" in found:
            return found["text"]
        self._refuse(found["fault"], found["why"])

    def close(self) -> None:
        """End the process. A later `render` starts another."""
        self._process.close()

    def _refuse(self, fault: str, why: str) -> NoReturn:
        """Raise the error of a fault that the process tells."""
        limits = {
            "text": f"makes a text of more than {MAX_TEXT:,} characters",
            "memory": f"takes more than {MEMORY_BYTES >> 20} MiB of memory",
            "depth": "calls itself too deeply",
        }
        if fault in limits:
            raise LimitExceededError(f"{self.file}: the chat template {limits[fault]}", advice=_OTHER)
        if fault == "refused":
            raise InvalidArgumentError(
                f"the chat template of {self.file} refuses the messages: {why}",
                advice="change the messages as it says",
            )
        if fault == "failed":
            raise InvalidArgumentError(
                f"the chat template of {self.file} cannot take the messages: {why}",
                advice="check the messages' fields, and that each content is a text",
            )
        what = "is malformed" if fault == "syntax" else "does what is forbidden to it"
        raise InvalidModelError(f"{self.file}: the chat template {what}: {why}", advice=_OTHER)


_OTHER = "give another template: chat_template=..."


def checked(found: object, what: str, *, needs_role: bool) -> list[dict[str, Any]]:
    """Return a copy of messages or tools as JSON has them. Raises InvalidArgumentError."""
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Sequence):
        raise InvalidArgumentError(f"{what} are {found!r:.60}", advice=f"give a list of {what}")
    for number, one in enumerate(found):
        if not isinstance(one, Mapping) or (needs_role and not isinstance(one.get("role"), str)):
            raise InvalidArgumentError(
                f"{what}[{number}] is {one!r:.60}",
                advice='a message is as {"role": "user", "content": "Hello!"}'
                if needs_role
                else "a tool is a mapping, as JSON has it",
            )
    copied: list[dict[str, Any]] = [_as_json(dict(one), f"{what}[{at}]") for at, one in enumerate(found)]
    return copied


def _checked_variables(variables: object) -> dict[str, Any]:
    if not isinstance(variables, Mapping):
        raise InvalidArgumentError(
            f"the variables of the template are {variables!r:.60}", advice="give a mapping by name"
        )
    for name in variables:
        if not isinstance(name, str) or name in ("messages", "tools", "add_generation_prompt"):
            raise InvalidArgumentError(f"a variable of the template is named {name!r:.60}")
    return {name: _as_json(value, name) for name, value in variables.items()}


def _as_json(value: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{what} cannot be written as JSON: {error}", advice="use texts, numbers, lists and dicts"
        ) from None
