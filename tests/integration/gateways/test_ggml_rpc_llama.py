"""llama.cpp itself, through the client of ggml's RPC backend that `make peers` builds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from ggml_rpc_client import warm_up
from gguf_files import write_model
from paths import ROOT
from peers import backend_ops

PEERS = ROOT / ".venv-peers"
SCRIPT = ROOT / "tests" / "support" / "peers" / "llama_rpc.py"
SECONDS = 100
TOKENS = 20

pytestmark = pytest.mark.skipif(
    not backend_ops.HEADER.exists(), reason="llama.cpp with ggml-rpc is not built: `make peers` builds it"
)


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[ThreadDaemon]]:
    options: dict[str, Any] = {"ggml_rpc": "127.0.0.1:0", "ggml_rpc_version": backend_ops.version()}
    with thread_daemon(**options) as one, thread_daemon(**options) as other:
        for each in (one, other):
            warm_up(each)
        yield [one, other]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama.gguf", "llama", "f16")


def started(model: Path, *daemons: ThreadDaemon) -> subprocess.Popen[str]:
    endpoints = [f"127.0.0.1:{one.ggml_rpc_port}" for one in daemons]
    command = [PEERS / "bin" / "python", SCRIPT, model, TOKENS, 2, *endpoints]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*map(str, command)], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def tokens_of(process: subprocess.Popen[str]) -> list[list[int]]:
    """Return the tokens that it generated in each of two runs."""
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors[-3000:]
    found: list[list[int]] = json.loads(out.splitlines()[-1])["tokens"]
    assert len(found) == 2 and all(len(one) == TOKENS for one in found)
    return found


def test_llama_cpp_generates_the_tokens_of_its_own_cpu_with_all_layers_here(
    model: Path, daemons: list[ThreadDaemon]
) -> None:
    expected = tokens_of(started(model))
    assert tokens_of(started(model, daemons[0])) == expected


def test_two_daemons_are_two_devices_of_one_llama_cpp(model: Path, daemons: list[ThreadDaemon]) -> None:
    expected = tokens_of(started(model))
    assert tokens_of(started(model, *daemons)) == expected


def test_several_clients_use_a_daemon_at_once(model: Path, daemons: list[ThreadDaemon]) -> None:
    expected = tokens_of(started(model))
    clients = [started(model, daemons[0]) for _ in range(3)]
    assert [tokens_of(one) for one in clients] == [expected] * 3
