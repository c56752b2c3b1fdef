"""The process in which Ray lives: it does one thing, and says on stdout what happens, a JSON object a line.

    python -m heliograph_server.launchers.ray.agent '{"do": "up", "address": "auto", ...}'

`{"progress": TEXT}` any number of times, then `{"result": ...}` or `{"error": {...}}`. `watch` never ends by
itself: it says `{"members": [...], "is_settled": ...}` when they are others, and `{"absent": TEXT}` when they
cannot be known. Whatever Ray prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

from heliograph_proto.errors import HeliographError, InternalError
from heliograph_server.launchers.specification import specification_from_json

#: How often a watcher looks.
WATCH_SECONDS = 1.0
#: For one answer to it.
ANSWER_SECONDS = 3.0

Say = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """The process's exit status: 0 if there was a result."""
    say = _sayer(_take_stdout())
    task = json.loads(sys.argv[1])
    try:
        result = _do(task, say)
    except HeliographError as error:
        say({"error": {"reason": int(error.reason), "message": error.message, "advice": error.advice}})
        return 1
    except Exception as error:  # whatever Ray raises that nobody thought of
        text = f"Ray: {type(error).__name__}: {error}"
        say({"error": {"reason": int(InternalError.reason), "message": text, "advice": ""}})
        return 1
    say({"result": result})
    return 0


def _take_stdout() -> TextIO:
    """What stdout was; what is printed from now on goes to stderr."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def _sayer(stream: TextIO) -> Say:
    def say(what: Mapping[str, Any]) -> None:
        stream.write(json.dumps(what) + "\n")
        stream.flush()

    return say


def _do(task: Mapping[str, Any], say: Say) -> Any:
    # Here, since it takes a second, and imports Ray.
    from heliograph_server.launchers.ray import cluster

    def progress(text: str) -> None:
        say({"progress": text})

    cluster.join(task["address"])
    match task["do"]:
        case "up":
            wanted = specification_from_json(task["specification"])
            return cluster.up(wanted, task["seconds"], progress).as_json()
        case "status":
            return cluster.status(task["name"]).as_json()
        case "down":
            return asdict(cluster.down(task["name"], task["seconds"], progress))
        case "watch":
            _watch(task["name"], say)
    raise InternalError(f"an agent cannot do {task['do']!r}")


def _watch(name: str, say: Say) -> None:
    """Says who the members are whenever that changes, and why nobody knows, once."""
    from heliograph_server.launchers.ray.cluster import watched

    last: Mapping[str, Any] | None = None
    for found in watched(name, ANSWER_SECONDS):
        if found != last:
            say(found)
            last = found
        time.sleep(WATCH_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
