"""Who may look on: those whose token has the right "admin", and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_threads import ThreadDaemon, thread_daemon

import heliograph as hg
import heliograph.admin
from heliograph.cli import main
from heliograph_proto.v1 import admin_pb2
from heliograph_server.auth.interceptor import NEEDED
from heliograph_server.auth.tokens import hash_of, new_token, remove_token
from heliograph_server.resources.principals import Right

USER, OPERATOR = new_token(), new_token()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ThreadDaemon]:  # type: ignore[override]
    """One that knows a user and an operator."""
    file = tmp_path / "tokens.toml"
    file.write_text(
        f'[[token]]\nname = "laptop"\ntenant = "alice"\nhash = "{hash_of(USER)}"\nrights = ["use"]\n'
        f'[[token]]\nname = "ops"\ntenant = "ops"\nhash = "{hash_of(OPERATOR)}"\nrights = ["admin"]\n'
    )
    file.chmod(0o600)
    with thread_daemon(tokens=str(file)) as found:
        yield found


def test_every_method_needs_the_right_of_an_operator() -> None:
    (service,) = admin_pb2.DESCRIPTOR.services_by_name.values()
    needed = {method.name: NEEDED.get(f"/{service.full_name}/{method.name}") for method in service.methods}
    assert set(needed.values()) == {Right.ADMIN}, needed


def test_a_user_may_neither_look_on_nor_end_anything(daemon: ThreadDaemon) -> None:
    with (
        hg.connect(daemon.url, token=USER) as session,
        heliograph.admin.connect(daemon.url, token=USER) as admin,
    ):
        for refused in (
            admin.sessions,
            admin.snapshot,
            admin.drain,
            admin.undo_drain,
            lambda: admin.end_session(1),
            lambda: admin.set_log_level("debug"),
        ):
            with pytest.raises(hg.PermissionDeniedError):
                refused()
        assert session.devices[0].memory().total_bytes


def test_nobody_without_a_token_may_look_on(daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HELIOGRAPH_TOKEN", raising=False)
    with heliograph.admin.connect(daemon.url) as admin, pytest.raises(hg.UnauthenticatedError):
        admin.snapshot()


def test_an_operator_sees_tenants_and_by_which_token_they_came(daemon: ThreadDaemon) -> None:
    with hg.connect(daemon.url, token=USER), heliograph.admin.connect(daemon.url, token=OPERATOR) as admin:
        found = admin.snapshot()
        assert [(one.tenant, one.credential) for one in found.sessions] == [("alice", "laptop")]
        assert [one.tenant for one in found.tenants if one.sessions] == ["alice"]


def test_an_operators_token_may_come_from_the_environment(
    daemon: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELIOGRAPH_TOKEN", OPERATOR)
    assert main(["sessions", "ls", "--server", daemon.url]) == 0
    assert main(["top", "--once", "--server", daemon.url]) == 0
    monkeypatch.setenv("HELIOGRAPH_TOKEN", USER)
    assert main(["sessions", "ls", "--server", daemon.url]) == 1
    assert "error:" in capsys.readouterr().err


def test_whoever_looks_on_is_told_no_more_once_the_token_is_taken_back(
    daemon: ThreadDaemon, tmp_path: Path
) -> None:
    with heliograph.admin.connect(daemon.url, token=OPERATOR) as admin:
        looking = admin.watch(interval=0.1)
        next(looking)
        remove_token(tmp_path / "tokens.toml", "ops")
        with pytest.raises(hg.UnauthenticatedError, match="'ops' was revoked"):
            for _ in looking:
                pass
