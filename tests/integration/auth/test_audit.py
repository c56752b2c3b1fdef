"""The audit log: who did what to a daemon, and who was refused."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from access_daemons import Tokens
from daemon_threads import ThreadDaemon, thread_daemon

import heliograph as hg
from heliograph import admin
from heliograph_proto.errors import ConfigurationError, PermissionDeniedError
from heliograph_proto.v1 import admin_pb2
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.rpc.audit import MOST_REFUSALS, AuditedService, Refusals
from heliograph_server.telemetry import audit
from heliograph_server.telemetry.audit import Action, AuditLog

SECONDS = 20.0
TENANTS = {"alice": (Right.USE,), "ops": (Right.USE, Right.ADMIN)}


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens", TENANTS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def daemon(tokens: Tokens, path: Path) -> Iterator[ThreadDaemon]:
    with thread_daemon(tokens=str(tokens.path), audit_log=str(path)) as made:
        yield made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_when(path: Path, count: int) -> list[dict[str, Any]]:
    """The lines, once there are so many: the answer of a call may come before its line."""
    end = time.monotonic() + SECONDS
    while len(found := lines(path)) < count:
        assert time.monotonic() < end, found
    return found


def test_an_operators_actions_are_recorded_with_who_and_what(
    daemon: ThreadDaemon, tokens: Tokens, path: Path
) -> None:
    with admin.connect(daemon.url, token=tokens.of["ops"]) as operator:
        level = operator.set_log_level("error")
        operator.set_log_level(level)
        with pytest.raises(hg.SessionClosedError):
            operator.end_session(99, f"enough of\n{tokens.of['alice']}")
        operator.drain(5.0, stay=True)
        operator.undo_drain()
    found = lines_when(path, 5)
    assert [one["method"] for one in found] == [
        "SetLogLevel",
        "SetLogLevel",
        "EndSession",
        "Drain",
        "UndoDrain",
    ]
    assert {(one["principal"], one["tenant"]) for one in found} == {("ops", "ops")}
    assert all(one["peer"].startswith("ipv4:127.0.0.1:") and one["time"].endswith("Z") for one in found)
    assert [one["outcome"] for one in found] == ["ok", "ok", "failed", "ok", "ok"]
    assert found[0]["arguments"] == {"level": "error"} and found[3]["arguments"]["stay"] is True
    assert found[2]["error"].startswith("not_found: session 99")
    assert "hgt_***" in path.read_text() and tokens.of["alice"] not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_a_failed_action_is_recorded_with_its_kind_and_reason(
    daemon: ThreadDaemon, tokens: Tokens, path: Path
) -> None:
    with admin.connect(daemon.url, token=tokens.of["ops"]) as operator:
        with pytest.raises(hg.HeliographError):
            operator.unload_backend("no-such")
        with pytest.raises(hg.HeliographError):
            operator.set_log_level("no-such")
    unloaded, level = lines_when(path, 2)
    assert unloaded["outcome"] == level["outcome"] == "failed"
    assert unloaded["error"].startswith("failed_precondition: ") and "no-such" in unloaded["error"]
    assert level["error"].startswith("invalid_argument: ") and "no-such" in level["error"]


def test_refused_operations_are_recorded_with_who_tried(
    daemon: ThreadDaemon, tokens: Tokens, path: Path
) -> None:
    with admin.connect(daemon.url, token=tokens.of["alice"]) as other:
        for _ in range(MOST_REFUSALS + 3):
            with pytest.raises(PermissionDeniedError):
                other.sessions()
    found = lines(path)
    assert len(found) == MOST_REFUSALS
    assert {(one["method"], one["outcome"], one["principal"]) for one in found} == {
        ("ListSessions", "refused", "alice")
    }
    with hg.connect(daemon.url, token=tokens.of["alice"]):
        assert len(lines(path)) == MOST_REFUSALS  # calls of users are none of an operator's


def test_refusals_that_were_left_out_are_counted(path: Path) -> None:
    log, now = AuditLog(str(path)), [0.0]
    refusals = Refusals(log, lambda: now[0])
    method = "/heliograph.v1.AdminService/Drain"
    for at in (0.0,) * (MOST_REFUSALS + 2) + (60.0,):
        now[0] = at
        refusals.record(method, Principal(), "", PermissionDeniedError("no"))
    log.close()
    assert lines(path)[-1]["arguments"] == {"refused_unrecorded": 2}


class Anything:
    """A service that has every method, and the context of its calls."""

    def __getattr__(self, _name: str) -> Any:
        async def handler(_request: object, _context: object) -> None: ...

        return handler

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


def test_every_method_of_the_service_is_recorded(path: Path) -> None:
    log = AuditLog(str(path))
    audited = AuditedService(Anything(), log)
    (service,) = admin_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods:
        asyncio.run(getattr(audited, method.name)(None, Anything()))
    log.close()
    assert [one["method"] for one in lines(path)] == [one.name for one in service.methods]


def test_files_that_are_read_again_are_recorded(daemon: ThreadDaemon, tokens: Tokens, path: Path) -> None:
    tokens.path.write_text("[[token")
    first = lines_when(path, 1)[0]
    assert (first["method"], first["outcome"], first["arguments"]) == (
        "Reload",
        "failed",
        {"kind": "tokens"},
    )
    assert "not TOML" in first["error"]


def test_without_a_file_the_lines_are_in_the_log_whatever_its_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with thread_daemon() as made, admin.connect(made.url) as operator:
        assert operator.sessions() == ()
        before = operator.set_log_level("error")
        operator.set_log_level(before)
    found = [json.loads(one.message) for one in caplog.records if one.name == "heliograph.audit"]
    assert [one["method"] for one in found] == ["ListSessions", "SetLogLevel", "SetLogLevel"]
    assert found[0]["principal"] == found[0]["tenant"] == ""


def test_a_renamed_file_is_opened_again_and_a_large_one_is_renamed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(str(path))
    log.record(Action("One", "ok"))
    path.rename(path.with_name("kept"))
    log.reopen()
    log.record(Action("Two", "ok"))
    assert [one["method"] for one in lines(path)] == ["Two"]
    monkeypatch.setattr(audit, "MOST_BYTES", 1)
    for number in range(8):
        log.record(Action(f"Further{number}", "ok"))
    log.close()
    assert sorted(one.name for one in path.parent.iterdir()) == [
        "audit.log",
        *(f"audit.log.{number}" for number in range(1, 5)),
        "kept",
    ]
    assert lines(path)[0]["method"] == "Further7" and lines(Path(f"{path}.4"))[0]["method"] == "Further3"


def test_lines_are_bounded_and_have_no_secrets(path: Path) -> None:
    arguments = {"token": "abc", "api_key": "abc", "name": "x" * 10_000, "deep": {"a": ["hgt_abc"]}}
    line = Action("Some", "ok", arguments=arguments).line(0.0)
    assert len(line) < 2000 and "abc" not in line and "\n" not in line
    many = {f"name{number}": "x" * 400 for number in range(100)}
    assert "omitted" in json.loads(Action("Some", "ok", arguments=many).line(0.0))["arguments"]


def test_a_line_that_the_file_does_not_take_is_in_the_log(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog("/dev/full")
    with caplog.at_level(logging.INFO):
        log.record(Action("Drain", "ok"))
    log.close()
    assert "cannot write the audit log /dev/full" in caplog.text and '"method": "Drain"' in caplog.text


def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="cannot write the audit log"),
        thread_daemon(audit_log=str(tmp_path / "none" / "audit.log")),
    ):
        pass
