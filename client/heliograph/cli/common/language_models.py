"""Arguments of the commands that use a language model, and what they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path, PurePath
from typing import Any, TextIO, get_args

import heliograph as hg
from heliograph.cli.common.arguments import add_server_argument
from heliograph.cli.common.placement import add_model_placing_arguments, model_placing
from heliograph.llm import Answer, LanguageModel, Result
from heliograph.llm.speculating import LOOKUP
from heliograph_proto.devices import Activations
from heliograph_proto.gguf import part_name

MODEL_HELP = (
    "GGUF file here, any part of one that is split, or the name of one of the server's (serve --models)"
)
#: The options of an answer and their types, with a line of help.
SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "the most tokens of an answer (default: what the context has room for)"),
    "temperature": (float, "randomness; 0 takes the most likely token (default: 0.8)"),
    "top_k": (int, "choose among so many of the most likely tokens; 0: all (default: 40)"),
    "top_p": (float, "choose among the most likely tokens with this share of chances (default: 0.95)"),
    "min_p": (float, "choose among tokens with this share of the first's chance (default: 0.05)"),
    "repeat_penalty": (float, "divide the logits of tokens that were there (default: 1, none)"),
    "seed": (int, "the same seed gives the same text (default: a random one)"),
}


def add_loading_arguments(parser: argparse.ArgumentParser, lora_help: str = "", draft_help: str = "") -> None:
    """Add MODEL, --server, and how the model is loaded. `lora_help` ends the help of --lora, and
    `draft_help` that of --draft."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_server_argument(parser)
    parser.add_argument(
        "--context",
        metavar="N",
        type=int,
        help="tokens of a prompt and its answer (default: the model's, at most 4096)",
    )
    parser.add_argument(
        "--cache",
        metavar="TYPE",
        default="f16",
        choices=("f16", "f32", "bf16", "q8_0", "q4_0"),
        help="type that keys and values are kept in: %(choices)s (default: f16)",
    )
    parser.add_argument(
        "--activations",
        default="auto",
        choices=get_args(Activations),
        help="precision of rows in products with quantized weights. q8 rounds them to q8_0, as llama.cpp "
        "does, which is two to three times as fast on CPUs; auto: q8 where all devices of the model are "
        "CPUs, else f32 (default: auto)",
    )
    parser.add_argument(
        "--lora",
        metavar="FILE[:SCALE]",
        action="append",
        default=[],
        help="LoRA adapter for the model, a GGUF file here or of the server's models, and the factor of "
        f"what it adds (default: 1); may be given several times{lora_help}",
    )
    add_model_placing_arguments(parser)
    parser.add_argument(
        "--draft",
        metavar="FILE",
        help="smaller model with the same vocabulary, which proposes tokens: answers stay the same, and may "
        f'come faster. "{LOOKUP}": the text so far proposes them{draft_help}',
    )
    parser.add_argument(
        "--draft-tokens",
        metavar="N",
        type=int,
        help="tokens that are proposed at a time, 1 to 15 (default: by what pays)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --server, how the model is loaded, and the options of an answer."""
    add_loading_arguments(parser)
    group = parser.add_argument_group("answers")
    for name, (kind, help) in SAMPLING.items():
        flags = ["-n"] if name == "max_tokens" else []
        group.add_argument(*flags, f"--{name.replace('_', '-')}", metavar="N", type=kind, help=help)
    group.add_argument(
        "--stop", metavar="TEXT", action="append", help="text that ends an answer; may be given several times"
    )
    group.add_argument(
        "--json-schema", metavar="FILE", type=Path, help="file with a JSON schema that answers follow"
    )
    group.add_argument(
        "--grammar", metavar="FILE", type=Path, help="file with a grammar that answers follow: Lark's or GBNF"
    )
    group.add_argument("--regex", metavar="PATTERN", help="regular expression that whole answers match")


def scaled(text: str) -> tuple[str, float]:
    """Return the file and the scale of FILE[:SCALE]."""
    file, _, scale = text.rpartition(":")
    try:
        return (text, 1.0) if not file or Path(text).exists() else (file, float(scale))
    except ValueError:
        return text, 1.0


def wanted_draft(arguments: argparse.Namespace) -> str | None:
    """Return what --draft names, or None. Raises InvalidArgumentError for tokens of no draft."""
    if arguments.draft is None and arguments.draft_tokens is not None:
        raise hg.InvalidArgumentError("--draft-tokens is given without --draft", advice="give --draft FILE")
    draft: str | None = arguments.draft
    return draft


def file_of(session: hg.Session, name: str) -> str | hg.ServerWeights:
    """Return a file here, else one of the server's. Raises as `served_model`."""
    return name if Path(name).exists() else session.server_weights(served_model(name, session.models()))


def load_model(session: hg.Session, arguments: argparse.Namespace) -> LanguageModel:
    """Load the model, its adapters and its draft: files here, else the server's."""
    if isinstance(sys.stdout, TextIOWrapper):
        # Letters that the output's encoding lacks are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    adapters = [hg.llm.Adapter(file_of(session, file), scale) for file, scale in map(scaled, arguments.lora)]
    draft = None
    if (wanted := wanted_draft(arguments)) is not None:
        file = file_of(session, wanted) if wanted != LOOKUP else wanted
        draft = hg.llm.Draft(file, arguments.draft_tokens)
    return hg.llm.load(
        session,
        file_of(session, arguments.model),
        context=arguments.context,
        cache=arguments.cache,
        activations=arguments.activations,
        adapters=adapters,
        draft=draft,
        **model_placing(arguments, session),
    )


def served_model(wanted: str, served: Sequence[hg.ModelFile]) -> str:
    """Return the name of a served model: of its file, of any part of one that is split, or without
    the folder and the suffix.

    Raises InvalidArgumentError if none has the name, or several.
    """
    names = [one.name for one in served if one.gguf is not None]
    part = part_name(wanted)
    if wanted in names or (part is not None and part.of(0) in names):
        return wanted
    found = [name for name in names if plain_name(name) == wanted]
    if len(found) > 1:
        raise hg.InvalidArgumentError(
            f"{wanted!r:.80} is the name of {len(found)} models of the server",
            advice=f"name one of {', '.join(found[:5])}",
        )
    if not found:
        listed = f"the server has {', '.join(names[:5])}" + ", ..." * (len(names) > 5)
        raise hg.InvalidArgumentError(
            f"cannot read {wanted:.200}: there is no such file here, and no such model of the server",
            advice=listed if names else "name a file here; the server's are those of serve --models",
        )
    return found[0]


def plain_name(file: str) -> str:
    """Return a model's name: its file's without folder, suffix, and number of a part."""
    part = part_name(PurePath(file).name)
    return part.stem if part is not None else PurePath(file).name.removesuffix(".gguf")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of an answer that were given. Raises InvalidArgumentError."""
    given = {name: getattr(arguments, name) for name in (*SAMPLING, "stop", "regex")}
    if arguments.json_schema is not None:
        given["schema"] = _schema(arguments.json_schema)
    if arguments.grammar is not None:
        given["grammar"] = text_of(arguments.grammar)
    return {name: value for name, value in given.items() if value is not None}


def text_of(path: Path) -> str:
    """Return the text of a file. Raises InvalidArgumentError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise hg.InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise hg.InvalidArgumentError(f"{path} is not UTF-8: {error}") from None


def _schema(path: Path) -> Any:
    text = text_of(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise hg.InvalidArgumentError(f"{path} is not JSON: {error}") from None


def standard_input() -> TextIO:
    """Return standard input, which is read as UTF-8. Raises InvalidArgumentError if it is closed."""
    if sys.stdin is None:
        raise hg.InvalidArgumentError("standard input is closed, and has no prompt", advice="open it")
    # Once: a stream that was read from takes no other encoding.
    is_ready = (sys.stdin.encoding, sys.stdin.errors) == ("utf-8", "strict")
    if isinstance(sys.stdin, TextIOWrapper) and not is_ready:
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin


def given(read: Callable[[], str]) -> str:
    """Return what is read of standard input. Raises InvalidArgumentError if it is no UTF-8."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise hg.InvalidArgumentError(
            f"standard input is not UTF-8: {error}", advice="convert it, as with: iconv -t UTF-8"
        ) from None


def show(answer: Answer) -> None:
    """Print an answer as it comes."""
    is_terminal = sys.stdout.isatty()
    for piece in answer:
        sys.stdout.write(_harmless(piece) if is_terminal else piece)
        sys.stdout.flush()


def _harmless(text: str) -> str:
    """The text without characters that steer a terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else "�" for one in text)


def figures(result: Result) -> Iterator[str]:
    """Yield the parts of a line about an answer's tokens and times."""
    yield f"{len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s"
    computed = result.prompt_tokens - result.reused_tokens
    if result.speculation is not None:
        yield f"{result.speculation.accepted} of {result.speculation.proposed} proposed tokens accepted"
    yield f"prompt of {result.prompt_tokens} tokens, {computed} computed in {result.prompt_seconds:.2f} s"


def report(answer: Answer) -> None:
    """Print a line about an answer to stderr."""
    print(f"[{'; '.join(figures(answer.so_far))}; seed {answer.seed}]", file=sys.stderr)
