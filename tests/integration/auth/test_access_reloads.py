"""Files of tokens and certificates that change, in metrics and for callers."""

from __future__ import annotations

import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from access_daemons import Tokens, daemon_with_tls, daemon_with_tokens, works
from certificates import Authority
from daemon_threads import ThreadDaemon

import heliograph as hg
from heliograph_proto.errors import UnauthenticatedError
from heliograph_server.auth.tokens import remove_token

SECONDS = 20.0
METRICS = {"metrics_listen": "127.0.0.1:0"}


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens")


def metrics(daemon: ThreadDaemon) -> dict[str, float]:
    assert daemon._daemon is not None
    with urllib.request.urlopen(daemon._daemon.telemetry.url, timeout=SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def await_metrics(daemon: ThreadDaemon, are_there: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    end = time.monotonic() + SECONDS
    while not are_there(found := metrics(daemon)):
        assert time.monotonic() < end, found
    return found


def failing(kind: str) -> str:
    return f'heliograph_reload_failing{{kind="{kind}"}}'


def reloads(kind: str, outcome: str) -> str:
    return f'heliograph_reloads_total{{kind="{kind}",outcome="{outcome}"}}'


def test_a_removed_file_of_tokens_revokes_nothing_and_is_reported_until_it_is_back(tokens: Tokens) -> None:
    text = tokens.path.read_text()
    with daemon_with_tokens(tokens, **METRICS) as made:
        with hg.connect(made.url, token=tokens.of["alice"]) as alice:
            assert metrics(made)[failing("tokens")] == 0
            tokens.path.unlink()
            found = await_metrics(made, lambda found: found[failing("tokens")] == 1)
            assert found[reloads("tokens", "failed")] == 1 and found[failing("certificates")] == 0
            with hg.connect(made.url, token=tokens.of["bob"]) as bob:
                assert works(bob) and works(alice)
        tokens.path.write_text(text)
        tokens.path.chmod(0o600)
        found = await_metrics(made, lambda found: found[failing("tokens")] == 0)
        assert found[reloads("tokens", "ok")] == 1 and found[reloads("tokens", "failed")] == 1


def test_without_any_token_left_nobody_is_let_in_and_all_sessions_end(tokens: Tokens) -> None:
    with daemon_with_tokens(tokens, **METRICS) as made:
        with hg.connect(made.url, token=tokens.of["alice"]) as alice:
            over = threading.Event()
            made.host.session(alice.info.session).when_closing[over] = lambda _error: over.set()
            for name in tokens.of:
                remove_token(tokens.path, name)
            for token in (*tokens.of.values(), None):
                with pytest.raises(UnauthenticatedError):
                    hg.connect(made.url, token=token)
            assert over.wait(SECONDS)
        assert metrics(made)[failing("tokens")] == 0
        token = tokens.add("carol")
        with hg.connect(made.url, token=token) as carol:
            assert works(carol)


def test_a_broken_certificate_is_reported_without_a_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.server(file="own")
    good = Path(pair.key).read_bytes()
    with daemon_with_tls(authority, pair=pair, **METRICS) as made:
        shutil.copy(authority.server(file="other").key, pair.key)
        found = await_metrics(made, lambda found: found[failing("certificates")] == 1)
        assert found[reloads("certificates", "failed")] == 1
        Path(pair.key).write_bytes(good)
        await_metrics(made, lambda found: found[failing("certificates")] == 0)
        with hg.connect(made.url, ca=authority.ca) as session:
            assert works(session)
