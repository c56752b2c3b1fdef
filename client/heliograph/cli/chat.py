"""`heliograph chat`: talk to a language model. Ctrl-C ends an answer, and at the prompt the talk."""

from __future__ import annotations

import argparse
import sys

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
from heliograph.llm import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --system and the options of an answer."""
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="message that steers the whole talk")


def run(arguments: argparse.Namespace) -> int:
    """Answer the lines of standard input, each with all before it, until its end."""
    options = options_of(arguments)
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with hg.connect(arguments.server) as session:
        llm = load_model(session, arguments)
        # A model without a template is an error before the first line.
        assert llm.chat_template
        while (line := _line()) is not None:
            if not line.strip():
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = llm.chat(asked, **options)
            except hg.LimitExceededError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            _finish(answer)
            messages = [*asked, {"role": "assistant", "content": answer.so_far.text}]
    return 0


def _line() -> str | None:
    """Return the next line of standard input, None at its end or after Ctrl-C on a terminal."""
    is_terminal = standard_input().isatty()
    try:
        return given(lambda: input("> " if is_terminal else ""))
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print()
        return None


def _finish(answer: Answer) -> None:
    """Print an answer. Ctrl-C ends it, and leaves what was printed."""
    try:
        show(answer)
    except KeyboardInterrupt:
        answer.close()
        print(" [interrupted]", end="")
    print(flush=True)
    report(answer)
