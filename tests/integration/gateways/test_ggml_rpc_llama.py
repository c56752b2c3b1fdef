"""llama.cpp itself, through the client of ggml's RPC backend that `make peers` builds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
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

#: llama.cpp of the later version, as a program.
NEXT = PEERS / "llama" / "llama-tokens"

is_built = pytest.mark.skipif(
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


@is_built
def test_llama_cpp_generates_the_tokens_of_its_own_cpu_with_all_layers_here(
    model: Path, daemons: list[ThreadDaemon]
) -> None:
    expected = tokens_of(started(model))
    assert tokens_of(started(model, daemons[0])) == expected


@is_built
def test_two_daemons_are_two_devices_of_one_llama_cpp(model: Path, daemons: list[ThreadDaemon]) -> None:
    expected = tokens_of(started(model))
    assert tokens_of(started(model, *daemons)) == expected


@is_built
def test_several_clients_use_a_daemon_at_once(model: Path, daemons: list[ThreadDaemon]) -> None:
    expected = tokens_of(started(model))
    clients = [started(model, daemons[0]) for _ in range(3)]
    assert [tokens_of(one) for one in clients] == [expected] * 3


@pytest.mark.skipif(not NEXT.exists(), reason="llama.cpp is not built: `make test-clients` builds it")
@pytest.mark.parametrize("count", [1, 2])
def test_llama_cpp_of_the_next_version_generates_the_tokens_of_its_own_cpu(model: Path, count: int) -> None:
    def tokens(*endpoints: str) -> list[str]:
        command = [NEXT, model, str(TOKENS), *endpoints]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        return done.stdout.splitlines()

    version = backend_ops.BUILDS["xllamacpp"].version
    assert version == "8.0"
    with ExitStack() as stack:
        options: dict[str, Any] = {"ggml_rpc": "127.0.0.1:0", "ggml_rpc_version": version}
        started = [stack.enter_context(thread_daemon(**options)) for _ in range(count)]
        found = tokens(*(f"127.0.0.1:{one.ggml_rpc_port}" for one in started))
    assert found == tokens() and len(found) == 2
    assert len(found[0].split()) == TOKENS
