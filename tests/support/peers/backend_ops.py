"""The cases of ggml's test-backend-ops on an RPC server: those that pass, and those that do not.

    backend_ops.py ENDPOINT [--build NAME] [--most N] [--only REGEX]

`--most` takes so many cases of each op, spread over all of them. Prints a JSON object: a result for
each case, by its name. "ok"; "fail"; "skip": ggml's own CPU does not support it; "gone": the server
hung up, which ends ggml's client; "late".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PEERS = ROOT / ".venv-peers"
#: The most time of one case: ggml's client quantizes the weights of the largest in minutes.
CASE_SECONDS = 600.0


@dataclass(frozen=True)
class Build:
    """A build of ggml with its RPC client, and the program of `backend_ops.cpp` with its cases."""

    program: Path
    header: Path

    @property
    def version(self) -> str:
        """The version of the protocol that it speaks."""
        found = dict(re.findall(r"RPC_PROTO_(MAJOR|MINOR)_VERSION +(\d+)", self.header.read_text()))
        return f"{found['MAJOR']}.{found['MINOR']}"

    def cases(self) -> list[str]:
        """The names of all cases, in the program's order."""
        listed = subprocess.run(
            [self.program, "list"], capture_output=True, text=True, timeout=60, check=True
        )
        return [line.partition(" ")[2] for line in listed.stdout.splitlines()]

    def results(self, endpoint: str, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Run cases, and yield the result of each. The program is started anew where it ends."""
        left = list(numbers)
        while left:
            for number, result in _run([str(self.program), endpoint], tuple(left)):
                left.remove(number)
                yield number, result


#: By the package that its source comes from.
BUILDS = {
    "llama-cpp-python": Build(PEERS / "backend-ops", PEERS / "ggml-rpc" / "include" / "ggml-rpc.h"),
    "xllamacpp": Build(PEERS / "llama" / "backend-ops", PEERS / "llama" / "ggml" / "include" / "ggml-rpc.h"),
}
#: The build whose libraries llama.cpp and the benchmarks use.
HEADER = BUILDS["llama-cpp-python"].header


def version() -> str:
    """The version of the protocol that the client of that build speaks."""
    return BUILDS["llama-cpp-python"].version


def chosen(names: Sequence[str], most: int) -> list[int]:
    """The numbers of at most so many cases of each op, evenly spread; 0: of all."""
    by_op: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        by_op.setdefault(name.partition("(")[0], []).append(number)
    if not most:
        return list(range(len(names)))
    found: set[int] = set()
    for numbers in by_op.values():
        count = min(most, len(numbers))
        found.update(numbers[len(numbers) * place // count] for place in range(count))
    return sorted(found)


def _run(command: Sequence[str], numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for number in numbers:
            result = _ask(process, number)
            yield number, result
            if result in ("gone", "late"):
                return
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _ask(process: subprocess.Popen[bytes], number: int) -> str:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"%d\n" % number)
        process.stdin.flush()
    except BrokenPipeError:
        return "gone"
    end, line = time.monotonic() + CASE_SECONDS, b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            return "late"
        part = os.read(process.stdout.fileno(), 100)
        if not part:
            return "gone"
        line += part
    return line.decode().split()[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--build", choices=list(BUILDS), default="llama-cpp-python")
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--only", type=re.compile, default=re.compile(""))
    given = parser.parse_args()
    build = BUILDS[given.build]
    names = build.cases()
    numbers = [one for one in chosen(names, given.most) if given.only.search(names[one])]
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for number, result in build.results(given.endpoint, numbers):
        found[names[number]] = result
        counts[result] += 1
        if result not in ("ok", "skip"):
            print(result, number, names[number], file=sys.stderr, flush=True)
    print(json.dumps(found))
    print(dict(counts), file=sys.stderr)


if __name__ == "__main__":
    main()
