"""Clients that want everything: a client of another tenant is served, and they get typed errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_daemons import running_daemon
from greed_victims import VICTIMS, Victim, attack, tenants_with_tokens

#: What cannot succeed for ever.
REFUSED = {"sessions": "LimitExceededError", "staged": "LimitExceededError"}
CALLS = 3


@pytest.mark.slow
@pytest.mark.parametrize("case", list(VICTIMS))
def test_a_greedy_client_leaves_enough_for_another_tenant(case: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    tokens = tenants_with_tokens(path)
    found: dict[str, dict[str, int]] = {}
    with running_daemon("--tokens", str(path), "--staging-size", "256MiB") as url:
        victim = Victim(f"{url}?token={tokens['victim']}")
        with attack(case, url, tokens["attacker"], found):
            for name in VICTIMS[case]:
                for _ in range(CALLS):
                    victim.call(name)()
        victim.session.close()
    assert not [error for error in found["refused"] if error.startswith("untyped")]
    if case in REFUSED:
        assert found["refused"][REFUSED[case]] > 0
