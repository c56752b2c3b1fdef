"""`heliograph generate`: continue a prompt with a language model."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import heliograph as hg
from heliograph.cli.common.language_models import (
    add_model_arguments,
    given,
    load_model,
    options_of,
    report,
    show,
    standard_input,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --prompt, --json and the options of an answer."""
    add_model_arguments(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON at its end")


def run(arguments: argparse.Namespace) -> int:
    """Print a prompt's continuation as it comes, and its figures to stderr."""
    prompt = given(lambda: standard_input().read()) if arguments.prompt is None else arguments.prompt
    if arguments.prompt is None and not prompt:
        raise hg.InvalidArgumentError("there is no prompt", advice="give --prompt TEXT, or standard input")
    with hg.connect(arguments.server) as session:
        llm = load_model(session, arguments)
        answer = llm.generate(prompt, **options_of(arguments))
        if arguments.json:
            result = answer.result()
            found: dict[str, Any] = {
                "text": result.text,
                "tokens": result.tokens,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "tokens_per_second": round(result.tokens_per_second, 2),
                "seed": answer.seed,
            }
            if result.speculation is not None:
                found["speculation"] = asdict(result.speculation)
            print(json.dumps(found, ensure_ascii=False))
            return 0
        show(answer)
        print(flush=True)
        report(answer)
    return 0
