"""The process that uses Ray: it does one task, and writes its progress to stdout, a JSON object a
line.

    python -m heliograph_server.launchers.ray.agent '{"do": "up", "address": "auto", ...}'

The output is `{"progress": TEXT}` any number of times, then `{"result": ...}` or `{"error":
{...}}`. `watch` never ends by itself: it writes `{"members": [...], "is_settled": ...}` when they
change, and `{"absent": TEXT}` when they are unknown. Output of Ray goes to stderr.
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

#: The interval of `watch`, and the timeout of each of its calls.
WATCH_SECONDS = 1.0
ANSWER_SECONDS = 3.0

Write = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """Do the task, and return the exit status: 0 with a result."""
    write = _writer(_take_stdout())
    task = json.loads(sys.argv[1])
    try:
        result = _do(task, write)
    except HeliographError as error:
        write({"error": {"reason": int(error.reason), "message": error.message, "advice": error.advice}})
        return 1
    except Exception as error:  # unexpected errors of Ray
        text = f"Ray: {type(error).__name__}: {error}"
        write({"error": {"reason": int(InternalError.reason), "message": text, "advice": ""}})
        return 1
    write({"result": result})
    return 0


def _take_stdout() -> TextIO:
    """Return the original stdout, and redirect later output to stderr."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def _writer(stream: TextIO) -> Write:
    def write(line: Mapping[str, Any]) -> None:
        stream.write(json.dumps(line) + "\n")
        stream.flush()

    return write


def _do(task: Mapping[str, Any], write: Write) -> Any:
    # Imported on demand: it imports Ray, which takes a second.
    from heliograph_server.launchers.ray import cluster

    def progress(text: str) -> None:
        write({"progress": text})

    cluster.join(task["address"])
    match task["do"]:
        case "up":
            specification = specification_from_json(task["specification"])
            return cluster.up(specification, task["seconds"], progress).as_json()
        case "status":
            return cluster.status(task["name"]).as_json()
        case "down":
            return asdict(cluster.down(task["name"], task["seconds"], progress))
        case "watch":
            _watch(task["name"], write)
    raise InternalError(f"an agent cannot do {task['do']!r}")


def _watch(name: str, write: Write) -> None:
    """Write the members, or why they are unknown, whenever that changes."""
    from heliograph_server.launchers.ray.cluster import watched

    last: Mapping[str, Any] | None = None
    for found in watched(name, ANSWER_SECONDS):
        if found != last:
            write(found)
            last = found
        time.sleep(WATCH_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
