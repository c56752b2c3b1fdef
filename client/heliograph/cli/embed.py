"""`heliograph embed`: sentence embeddings, one JSON object a line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import heliograph as hg
from heliograph.cli.common.arguments import add_server_argument
from heliograph.models.minilm import Embedder

#: How many texts are embedded, and written, at once.
BATCH = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--server, --model, the file."""
    add_server_argument(parser)
    parser.add_argument("--model", metavar="DIR", type=Path, required=True, help="the model's folder")
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default="-",
        help="one text a line, or a JSON array of strings if it ends in .json; - is standard input",
    )


def run(arguments: argparse.Namespace) -> int:
    """Embeds the texts of a file."""
    texts = read_texts(arguments.file)
    # The first texts are read before anything is opened, so that a missing file is said at once.
    batch = list(islice(texts, BATCH))
    with hg.connect(arguments.server) as session:
        embedder = Embedder(session, arguments.model)
        while batch:
            write(batch, embedder.embed(batch))
            batch = list(islice(texts, BATCH))
    return 0


def read_texts(file: str) -> Iterator[str]:
    """The texts of a file, one after another. Raises InvalidArgumentError."""
    try:
        if file.endswith(".json"):
            yield from parse_texts(file, Path(file).read_text(encoding="utf-8"))
        elif file == "-":
            sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
            yield from (line.rstrip("\r\n") for line in sys.stdin)
        else:
            with open(file, encoding="utf-8") as lines:
                yield from (line.rstrip("\r\n") for line in lines)
    except OSError as error:
        raise hg.InvalidArgumentError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise hg.InvalidArgumentError(f"{file} is not UTF-8 text: {error}") from None


def parse_texts(file: str, content: str) -> list[str]:
    """A JSON array of strings. Raises InvalidArgumentError."""
    advice = 'write ["one text", "another"], or one text a line in a file of another name'
    try:
        found = json.loads(content)
    except ValueError as error:
        raise hg.InvalidArgumentError(f"{file} is not JSON: {error}", advice=advice) from None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise hg.InvalidArgumentError(f"{file} is no JSON array of strings", advice=advice)
    return found


def write(texts: Sequence[str], embeddings: Any) -> None:
    """One JSON object a line; the numbers are those of f32, in their shortest form."""
    for text, embedding in zip(texts, embeddings, strict=True):
        numbers = [float(str(number)) for number in embedding]
        print(json.dumps({"text": text, "embedding": numbers}, ensure_ascii=False))
