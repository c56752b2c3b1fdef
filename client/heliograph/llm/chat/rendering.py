"""The process that renders chat templates: a program of its own, which knows nothing of Heliograph.

A template is a program from a file of unknown origin. Jinja's sandbox keeps it away from Python's
inside, and the limits of this process keep it from time and memory. One request is a line of JSON
on the standard input, one answer a line on the standard output; the process ends with its input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

#: Renders a text, or raises.
Render = Callable[..., str]


class _Refusal(Exception):
    """The template's own refusal, by `raise_exception`."""


class _TooLong(Exception):
    """The text is over the limit."""


def _raise(message: object = "") -> None:
    raise _Refusal(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the library transformers writes it, without HTML's escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> Any:
    """Return Jinja's environment with what templates of models expect of it."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag "generation" marks the answers in training; its body is text like any other."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


def render(made: Any, template: str, variables: dict[str, Any], most: int) -> str:
    """Return the text, of `most` characters at most."""
    parts, count = [], 0
    for part in made.from_string(template).generate(**variables):
        count += len(part)
        if count > most:
            raise _TooLong
        parts.append(part)
    return "".join(parts)


def answer(made: Any, request: dict[str, Any]) -> dict[str, str]:
    """Return {"text": ...}, or {"fault": kind, "why": ...}."""
    from jinja2.exceptions import SecurityError, TemplateSyntaxError

    try:
        text = render(made, request["template"], request["variables"], request["most_characters"])
    except _Refusal as error:
        return {"fault": "refused", "why": str(error)}
    except TemplateSyntaxError as error:
        return {"fault": "syntax", "why": f"{error.message} (line {error.lineno})"}
    except (SecurityError, OverflowError) as error:
        return {"fault": "forbidden", "why": str(error)}
    except _TooLong:
        return {"fault": "text", "why": ""}
    except MemoryError:
        return {"fault": "memory", "why": ""}
    except RecursionError:
        return {"fault": "depth", "why": ""}
    except Exception as error:  # whatever an expression of a template raises
        return {"fault": "failed", "why": f"{type(error).__name__}: {error}"}
    return {"text": text}


def limit(memory_bytes: int) -> Callable[[int], None]:
    """Bound this process's memory and files, and return a function that bounds its CPU time from
    now on."""
    try:
        import resource
    except ImportError:  # no such limits on this system: the other side's clock remains
        return lambda seconds: None
    for kind, most in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(kind, (most, most))

    def bound(seconds: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, hard))

    return bound


def main() -> None:
    """Answer requests until the input ends. The first line has this process's own settings."""
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    made = environment()
    bound = limit(settings["memory_bytes"])
    for line in sys.stdin:
        bound(settings["seconds"])
        found = answer(made, json.loads(line))
        if len(why := found.get("why", "")) > settings["most_why"]:
            found["why"] = why[: settings["most_why"]] + "..."
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
