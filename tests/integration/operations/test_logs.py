"""Lines of a daemon's log: one for each event, which others cannot forge, and without secrets."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import heliograph as hg
from heliograph.testing import wait_until_serving
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError
from heliograph_server.config.config import ServerConfig
from heliograph_server.resources.log_fields import LogOwner, run_fields, session_fields
from heliograph_server.telemetry.logs import (
    MESSAGE_CHARACTERS,
    HumanFormatter,
    JsonFormatter,
    configure,
    log_level,
    one_line,
    set_log_level,
)

SECRET = "a tenant's secret that nobody guesses"
SERVE = (
    "import sys; from heliograph_server.config.config import ServerConfig; "
    "from heliograph_server.daemon.main import run; "
)


def formatted(formatter: logging.Formatter, message: str, *arguments: object, **fields: object) -> str:
    """A line."""
    stream, logger = io.StringIO(), logging.Logger("heliograph_server.tests")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    try:
        raise ValueError("a\nERROR forged")
    except ValueError as error:
        logger.error(message, *arguments, extra=fields, exc_info=error if fields.get("run") else None)
    return stream.getvalue()


def test_a_json_line_has_whose_it_is() -> None:
    fields = run_fields(session_fields(LogOwner(), 3, "team a"), 7, f"00-{'0a' * 16}-{'0b' * 8}-01")
    text = formatted(JsonFormatter(), "it %s", "failed", **fields)
    assert text.count("\n") == 1
    found = json.loads(text)
    assert (found["session"], found["run"], found["tenant"], found["trace"]) == (3, 7, "team a", "0a" * 16)
    assert (found["level"], found["message"]) == ("error", "it failed")
    assert found["time"].endswith("Z") and "ValueError" in found["traceback"] and "owner" not in found


def test_a_line_for_people_names_the_tenant_of_its_session() -> None:
    fields = session_fields(LogOwner(), 3, "team a")
    assert formatted(HumanFormatter(), "it came", **fields).endswith("it came (tenant team a)\n")
    assert formatted(HumanFormatter(), "it came", **session_fields(LogOwner(), 3, "")).endswith("it came\n")


@pytest.mark.parametrize("kind", ["human", "json"])
def test_times_of_lines_rise_in_whatever_order_threads_made_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    handler = logging_handler(kind, stream, monkeypatch)
    records = [logging.makeLogRecord({"msg": f"line {number}", "levelno": 20}) for number in range(3)]
    for number, record in enumerate(reversed(records)):
        record.created = 1e9 - number
        handler.handle(record)
    handler.flush()
    handler.close()
    length = len("2026-01-31 12:00:00,123")
    times = [
        json.loads(line)["time"] if kind == "json" else line[:length]
        for line in stream.getvalue().splitlines()
    ]
    assert len(times) == 3 and times == sorted(times)


def logging_handler(kind: str, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> logging.Handler:
    """Return the handler that a daemon's log has."""
    made: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda handlers: made.extend(handlers))
    before = logging.getLogger().level
    configure("info", kind, stream)
    logging.getLogger().setLevel(before)
    return made[0]


def test_what_others_chose_begins_no_line() -> None:
    said = "x\n2026-01-01 00:00:00,000 ERROR forged\r\x1b[2J\u2028y"
    for formatter in (HumanFormatter(), JsonFormatter()):
        text = formatted(formatter, "somebody said %s", said)
        assert text.count("\n") == 1 and "\x1b" not in text and "\r" not in text


def test_no_token_is_in_a_traceback() -> None:
    for formatter in (HumanFormatter(), JsonFormatter()):
        stream, logger = io.StringIO(), logging.Logger("heliograph_server.tests")
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        logger.error("it failed", exc_info=ValueError("authorization: Bearer abc.def"))
        assert "ValueError" in stream.getvalue() and "abc" not in stream.getvalue()


def test_a_traceback_for_people_is_indented() -> None:
    text = formatted(HumanFormatter(), "it failed", run=1)
    assert all(line.startswith("    ") for line in text.splitlines()[1:])


def test_lines_are_bounded_and_tokens_are_left_out() -> None:
    text = one_line("x" * 10 * MESSAGE_CHARACTERS)
    assert len(text) < 2 * MESSAGE_CHARACTERS and "characters more" in text
    for secret in (
        "a client named hgt_abc-def",
        "authorization: Bearer abc.def",
        "?token=abc.def&x",
        "bearer  abc.def",
    ):
        assert "abc" not in one_line(secret)


def test_the_level_can_be_changed_and_a_wrong_one_is_refused() -> None:
    before = logging.getLogger().level
    try:
        set_log_level("debug")
        assert log_level() == "debug" and logging.getLogger("heliograph_server").isEnabledFor(logging.DEBUG)
        set_log_level("error")
        assert not logging.getLogger("heliograph_server").isEnabledFor(logging.WARNING)
        with pytest.raises(InvalidArgumentError, match="loud"):
            set_log_level("loud")
        with pytest.raises(ConfigurationError, match="xml"):
            configure("info", "xml")
    finally:
        logging.getLogger().setLevel(before)


@pytest.fixture
def stderr() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "stderr")


def test_a_daemon_writes_json_lines_without_secrets(stderr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOGRAPH_TENANT", SECRET)
    assert ServerConfig(log_format="json").log_format == "json"
    code = SERVE + (
        "sys.exit(run(ServerConfig(('grpc://127.0.0.1:0',), devices=('cpu:threads=1,memory=64MiB',),"
        " log_format='json', log_level='debug')))"
    )
    with stderr.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=written, text=True
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("listening on ").strip()
            wait_until_serving(url)
            with hg.connect(url) as session:
                g = hg.Graph()
                g.output("y", g.input("x", (4,), "f32") + 1)
                session.compile(g).run(x=np.ones(4, np.float32))
                token = session._shell.info.session
        finally:
            process.terminate()
            process.communicate(timeout=30)
    lines = [json.loads(line) for line in stderr.read_text().splitlines()]
    compiled = next(line for line in lines if "compiled" in line["message"])
    assert compiled["session"] == 1 and compiled["level"] == "info"
    assert [line["message"] for line in lines][-1] == "stopped"
    text = stderr.read_text()
    assert "its connection broke" not in text, "of a session that its client has closed"
    assert SECRET not in text and token.hex() not in text and repr(token) not in text


def test_a_daemon_whose_log_nobody_reads_goes_on_and_tells_of_lost_lines() -> None:
    code = SERVE + (
        "import heliograph_server.telemetry.logs as logs; logs.UNWRITTEN_LINES = 20; "
        "sys.exit(run(ServerConfig(('grpc://127.0.0.1:0',), devices=('cpu:threads=1,memory=64MiB',),"
        " log_level='debug')))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        url = process.stdout.readline().removeprefix("listening on ").strip()
        wait_until_serving(url)
        for _ in range(40):
            with hg.connect(url) as session:
                assert session.devices
        process.terminate()
        read = process.communicate(timeout=30)[1]
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert "lines of the log were lost" in read
    # What came while nobody read is whole: no line is cut.
    assert all(line.startswith("20") for line in read.splitlines())


def of_a_process(code: str) -> tuple[list[str], str]:
    """Return the lines of the log of a process, and what it printed."""
    begin = (
        "import logging, os, sys, threading; from heliograph_server.telemetry import logs; "
        "logs.configure('info', 'human'); log = logging.getLogger('test')\n"
    )
    ended = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=60)
    return ended.stderr.splitlines(), ended.stdout


def test_the_child_of_a_fork_writes_its_own_lines_and_none_of_its_parent() -> None:
    code = """
log.info("of the parent")
if not (child := os.fork()):
    log.info("of the child")
    logging.shutdown()
    os._exit(0)
os.waitpid(child, 0)
"""
    lines, _ = of_a_process(code)
    assert sorted(line.rpartition(": ")[2] for line in lines) == ["of the child", "of the parent"]


def test_lines_of_many_threads_are_all_written_before_the_end_of_the_process() -> None:
    code = """
def tell(who):
    for number in range(2000):
        log.info("%d %d", who, number)
threads = [threading.Thread(target=tell, args=(who,)) for who in range(4)]
for one in threads:
    one.start()
for one in threads:
    one.join()
raise SystemError("a crash")
"""
    lines, _ = of_a_process(code)
    found = [line.rpartition(": ")[2].split() for line in lines if " test: " in line]
    assert len(found) == 8000
    for who in "0123":
        assert [int(number) for one, number in found if one == who] == list(range(2000))
    assert "SystemError: a crash" in lines


class Broken(io.StringIO):
    """Breaks for the first line in a way that is no error of the system."""

    def write(self, text: str) -> int:
        if "first" in text:
            raise RuntimeError("broken")
        return super().write(text)


def test_a_stream_that_breaks_once_gets_the_later_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Broken()
    handler = logging_handler("human", stream, monkeypatch)
    for text in ("first", "second"):
        handler.handle(logging.makeLogRecord({"msg": text, "levelno": 20}))
        handler.flush()
    handler.close()
    assert "second" in stream.getvalue()


def test_a_daemon_that_is_started_without_stderr_serves_and_ends_well() -> None:
    """Otherwise a descriptor of gRPC gets its number, and messages of libraries go there."""
    code = SERVE + (
        "sys.exit(run(ServerConfig(('grpc://127.0.0.1:0',), devices=('cpu:threads=1,memory=64MiB',))))"
    )
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening on ").strip()
        wait_until_serving(url)
        with hg.connect(url) as session:
            assert session.devices
        process.terminate()
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert process.returncode == 0
