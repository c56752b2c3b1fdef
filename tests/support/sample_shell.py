"""Run shell samples of the documentation by bash, with a `heliograph` command that starts quickly.

The command is a small script in the folder `bin` of a sample's sandbox. It hands its arguments,
environment and streams to the process of the tests, which forks the command from a loaded process
(see `forked_daemons`). `heliograph serve` and `llm-serve` return when they listen; they end with
the block, and must end with status 0. `make` is a dry run, which fails for an unknown target. A block
that starts daemons has free ports in place of those that it names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from forked_daemons import ForkedCommand, fork
from paths import ROOT

_COMMAND = """\
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect({path!r})
what = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(asked, [json.dumps(what).encode()], [0, 1, 2])
sys.exit(int(asked.recv(16) or b"1"))
"""
#: Addresses of the samples, and what they are here.
_HOSTS = {"0.0.0.0": "127.0.0.1", "10.0.0.": "127.0.0.", "gpu.example": "localhost"}
_PORT = re.compile(r"(?<=[.\w\]]:)(\d{4,5})\b")
_LISTENS = re.compile(r"^heliograph (llm-)?serve\b(?!.*--print-config)", re.MULTILINE)
_STARTS_A_DAEMON = re.compile(r"^heliograph serve\b(?!.*--print-config)", re.MULTILINE)
_MESSAGE_BYTES = 2**18
_STOP_SECONDS = 40.0
COMMAND_SECONDS = 60.0


class SampleShell:
    """Runs blocks of shell commands in a folder, against a daemon."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._daemons: list[tuple[ForkedCommand, IO[str]]] = []
        self._bin = folder / "bin"
        self._bin.mkdir()
        path = str(folder / "commands")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        program = self._bin / "command.py"
        program.write_text(_COMMAND.format(path=path))
        self._write("heliograph", f'{sys.executable} -I -S {program} "$@"')
        self._write("make", f'{shutil.which("make")} -n -C {ROOT} "$@" > /dev/null')
        self._thread = threading.Thread(target=self._serve, name="commands of samples")
        self._thread.start()

    def close(self) -> None:
        """Ends the thread that starts commands."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def run(self, script: str) -> str:
        """The output of a block. Raises AssertionError unless all commands succeed, daemons
        included."""
        ports: dict[str, int] = {}
        server = self._url
        if _LISTENS.search(script):
            script = _PORT.sub(lambda found: str(ports.setdefault(found[1], free_port())), script)
        if _STARTS_A_DAEMON.search(script):
            server = f"grpc://127.0.0.1:{ports.setdefault('7070', free_port())}"
        for host, here in _HOSTS.items():
            script = script.replace(host, here)
        script = script.replace("grpc://127.0.0.1:7070", server)
        environment = {
            **os.environ,
            "HELIOGRAPH_SERVER": server,
            "PATH": f"{self._bin}:{os.environ['PATH']}",
        }
        # Files, since daemons keep them open.
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
            try:
                ended = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", script],
                    cwd=self._folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=said,
                    timeout=COMMAND_SECONDS,
                )
            finally:
                statuses = self._end_daemons()
            for file in (printed, said):
                file.seek(0)
            output, log = printed.read(), said.read()
        assert ended.returncode == 0, f"{script}\n{output}{log}"
        assert not any(statuses), f"{script}\na daemon ended with {statuses}\n{log}"
        return output

    def _write(self, name: str, line: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def _end_daemons(self) -> list[int]:
        daemons, self._daemons = self._daemons, []
        for daemon, _ in reversed(daemons):
            daemon.terminate()
        statuses = [daemon.wait(_STOP_SECONDS) for daemon, _ in daemons]
        for _, said in daemons:
            said.close()
        return statuses

    def _serve(self) -> None:
        while True:
            try:
                asked, _ = self._listener.accept()
            except OSError:
                return
            with asked:
                data, streams, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, 3)
                status = 1
                try:
                    status = self._command(json.loads(data), streams)
                except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                    os.write(streams[2], f"{error!r}\n".encode())
                finally:
                    for one in streams:
                        os.close(one)
                asked.send(str(status).encode())

    def _command(self, what: dict[str, object], streams: list[int]) -> int:
        arguments = [str(one) for one in what["arguments"]]  # type: ignore[attr-defined]
        listens = arguments[:1] in (["serve"], ["llm-serve"])
        starts = listens and not {"--print-config", "--help"} & set(arguments)
        environment = dict(what["environment"])  # type: ignore[call-overload]
        if not starts:
            return fork(arguments, environment, str(what["folder"]), streams).wait(COMMAND_SECONDS)
        if arguments[0] == "serve":
            address = environment.pop("HELIOGRAPH_SERVER")
            if "--listen" not in arguments and "--config" not in arguments:
                environment["HELIOGRAPH_LISTEN"] = address
        reading, writing = os.pipe()
        try:
            daemon = fork(arguments, environment, str(what["folder"]), [streams[0], writing, streams[2]])
        finally:
            os.close(writing)
        said = os.fdopen(reading)
        self._daemons.append((daemon, said))
        line = said.readline()
        os.write(streams[1], line.encode())
        return 0 if line else 1


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def sample_shell(folder: Path, url: str) -> Iterator[SampleShell]:
    """One in a folder, against the daemon of a URL, for blocks that start none."""
    made = SampleShell(folder, url)
    try:
        yield made
    finally:
        made.close()


def commands_of(console: str) -> list[tuple[str, list[str]]]:
    """The commands of a console sample, which follow "$ ", each with the lines of output below
    it."""
    found: list[tuple[str, list[str]]] = []
    lines = iter(console.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = command[:-1] + next(lines).strip()
            found.append((command, []))
        elif line.strip():
            assert found, f"output before a command: {line}"
            found[-1][1].append(line)
    return found


def check_output(expected: list[str], printed: str) -> None:
    """Every expected line is printed, in order. Numbers may differ, and "..." stands for
    anything."""
    rest = iter(printed.splitlines())
    for line in expected:
        words = re.sub(r"[\d,.]*\d", "#", " ".join(line.split()))
        pattern = re.escape(words).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, re.sub(r"[\d,.]*\d", "#", " ".join(one.split()))) for one in rest), (
            f"no line is as {line!r} in\n{printed}"
        )
