"""How much code a reader meets on the way of one value: functions of ours that a client and a daemon enter.

    python tests/bench/call_paths.py [--names] [--json PATH]

A daemon is started over TCP with a profile function in each of its threads, and so is this process. Each
operation is done twice before it is counted, so that caches are warm. A function counts once however often
it is entered; generated code and other libraries do not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(str(ROOT / part) for part in ("proto/heliograph_proto", "client", "backends", "server"))
Function = tuple[str, str, int]


class Recorder:
    """The functions of ours that the threads of this process enter while it is switched on."""

    def __init__(self) -> None:
        self._seen: set[CodeType] | None = None

    def install(self) -> None:
        """Watches this thread, and every thread that starts from now on."""
        threading.setprofile(self._entered)
        sys.setprofile(self._entered)

    def start(self) -> None:
        self._seen = set()

    def stop(self) -> list[Function]:
        """What was entered since `start`: file, qualified name, line."""
        seen, self._seen = self._seen or set(), None
        found = {(one.co_filename, one.co_qualname, one.co_firstlineno) for one in seen}
        return sorted(one for one in found if one[0].startswith(PACKAGES) and "_pb2" not in one[0])

    def _entered(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (seen := self._seen) is not None:
            seen.add(frame.f_code)


def serve() -> None:
    """The daemon's process: obeys lines of its standard input in a thread of its own."""
    recorder = Recorder()

    def obey() -> None:
        for line in sys.stdin:
            if line.strip() == "start":
                recorder.start()
                print("started", file=sys.stderr, flush=True)
            else:
                print(json.dumps(recorder.stop()), file=sys.stderr, flush=True)

    threading.Thread(target=obey, daemon=True).start()
    recorder.install()
    from heliograph.cli import main

    sys.exit(main(["serve", "--listen", "grpc://127.0.0.1:0", "--device", "cpu:threads=2,memory=2GiB"]))


@contextmanager
def watched_daemon() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A daemon that counts, and its URL."""
    command = [sys.executable, __file__, "--serve"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdout is not None
    try:
        from heliograph.testing import wait_until_serving

        url = process.stdout.readline().removeprefix("listening on ").strip()
        wait_until_serving(url)
        yield url, process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def answer(process: subprocess.Popen[str], command: str) -> str:
    """What the daemon's recorder says to a command; lines of its log are passed over."""
    assert process.stdin is not None and process.stderr is not None
    stream: IO[str] = process.stderr
    process.stdin.write(command + "\n")
    process.stdin.flush()
    while not (line := stream.readline()).startswith(("started", "[")):
        if not line:
            raise RuntimeError("the daemon has ended")
    return line


def operations(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each operation by its name; it returns when the daemon has done it."""
    import numpy as np

    import heliograph as hg

    graph = hg.Graph()
    x = graph.input("x", (16,), "f32")
    graph.output("y", x * 2.0)
    small = np.ones(16, np.float32)
    large = np.ones(2**24, np.float32)
    with hg.connect(url, shared_memory=False, direct=False) as session:
        plan = session.compile(graph)
        tensor = session.put(small)
        big = session.put(large)
        numbers = iter(range(100))

        def compile_anew() -> None:
            other = hg.Graph()
            value = other.input("x", (16, 8 + next(numbers)), "f32")
            other.output("y", hg.softmax(value * 2.0, axis=-1))
            session.compile(other)

        yield "small run", lambda: plan.run(x=small)
        yield "run with tensors", lambda: plan.run(x=tensor, fetch=False)["y"].get()
        yield "upload", lambda: big.set(large)
        yield "download", big.get
        yield "compile", compile_anew


def figures() -> Iterator[tuple[str, list[Function], list[Function]]]:
    """(operation, the client's functions, the daemon's functions)."""
    recorder = Recorder()
    recorder.install()
    with watched_daemon() as (url, process):
        for name, operation in operations(url):
            operation()
            operation()
            answer(process, "start")
            recorder.start()
            operation()
            client = recorder.stop()
            yield name, client, [tuple(one) for one in json.loads(answer(process, "stop"))]
    sys.setprofile(None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--names", action="store_true", help="print the functions, too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all names to a file")
    options = parser.parse_args()
    if options.serve:
        serve()
    found = {}
    print(f"{'':18} {'client':>18} {'daemon':>18} {'together':>18}   (functions / files)")
    for name, client, daemon in figures():
        found[name] = {"client": client, "daemon": daemon}
        sides = (client, daemon, client + daemon)
        print(f"{name:18}" + "".join(f"{len(one):13} /{len({file for file, *_ in one}):4}" for one in sides))
        if options.names:
            for side, functions in (("client", client), ("daemon", daemon)):
                for file, function, line in functions:
                    print(f"    {side} {Path(file).relative_to(ROOT)}:{line} {function}")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
