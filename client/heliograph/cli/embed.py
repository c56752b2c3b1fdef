"""`heliograph embed`: embed texts with a sentence-transformers model; one JSON object a line."""

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

#: The number of texts that are embedded and written at a time.
BATCH = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, --model, FILE."""
    add_server_argument(parser)
    parser.add_argument("--model", metavar="DIR", type=Path, required=True, help="folder of the model")
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default="-",
        help="file with one text a line, or .json file with an array of strings (default: standard input)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Embed the texts of a file."""
    texts = read_texts(arguments.file)
    # The first texts are read before connecting, so that a missing file is an error at once.
    batch = list(islice(texts, BATCH))
    with hg.connect(arguments.server) as session:
        embedder = Embedder(session, arguments.model)
        while batch:
            write(batch, embedder.embed(batch))
            batch = list(islice(texts, BATCH))
    return 0


def read_texts(file: str) -> Iterator[str]:
    """Yield the texts of a file. Raises InvalidArgumentError."""
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
        raise hg.InvalidArgumentError(
            f"cannot read {file}: {error.strerror}", advice="FILE has one text a line; - is standard input"
        ) from None
    except UnicodeDecodeError as error:
        raise hg.InvalidArgumentError(f"{file} is not UTF-8 text: {error}") from None


def parse_texts(file: str, content: str) -> list[str]:
    """Parse a JSON array of strings. Raises InvalidArgumentError."""
    advice = 'write ["one text", "another"], or one text a line in a file of another name'
    try:
        found = json.loads(content)
    except ValueError as error:
        raise hg.InvalidArgumentError(f"{file} is not JSON: {error}", advice=advice) from None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise hg.InvalidArgumentError(f"{file} is not a JSON array of strings", advice=advice)
    return found


def write(texts: Sequence[str], embeddings: Any) -> None:
    """Print one JSON object a line; numbers are f32 in their shortest form."""
    for text, embedding in zip(texts, embeddings, strict=True):
        numbers = [float(str(number)) for number in embedding]
        print(json.dumps({"text": text, "embedding": numbers}, ensure_ascii=False))
