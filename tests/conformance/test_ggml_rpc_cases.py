"""The cases of ggml's test-backend-ops with a daemon as RPC device: each one that ggml's own server
passes, passes.

`make test-clients` runs 8 of each op, spread over all of them; CASES=0 all, in about an hour. The
daemon is a process with its compiled kernels, as `heliograph serve` is.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from peers.backend_ops import BUILDS, Build, chosen
from waiting import until

from heliograph.testing import serving

CASES = int(os.environ.get("CASES") or 8)
PASSED = ("ok", "skip")
#: ggml's CPU takes the rows of a transposed matrix as if their elements lay side by side, and adds up others.
KNOWN = {"SUM(type=f32,ne=[33,256,1,1],permute=[1,0,2,3])"}
WARM_SECONDS = 600.0

pytestmark = [pytest.mark.peers, pytest.mark.timeout(4 * 3600)]


@contextmanager
def daemon(version: str) -> Iterator[str]:
    """A daemon with compiled kernels, and the address of its RPC devices."""
    heliograph = [sys.executable, "-m", "heliograph.cli"]
    subprocess.run([*heliograph, "warmup"], stdout=subprocess.DEVNULL, timeout=WARM_SECONDS, check=True)
    command = [*heliograph, "serve", "--listen", "grpc://127.0.0.1:0", "--log-level", "warning"]
    command += ["--ggml-rpc", "127.0.0.1:0", "--ggml-rpc-version", version]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with serving(process):
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]


@contextmanager
def own_server(build: Build) -> Iterator[str]:
    """ggml's own server over its CPU. It has no end but its process's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen([build.program, "serve", endpoint], stderr=subprocess.DEVNULL)
    try:
        host, port = endpoint.split(":")
        until(lambda: socket.create_connection((host, int(port)), timeout=1).close() is None)
        yield endpoint
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("name", list(BUILDS))
def test_cases_that_ggmls_own_server_passes_pass_here(name: str) -> None:
    build = BUILDS[name]
    if not build.program.exists():
        pytest.skip("the program is not built: `make test-clients` builds it")
    names = build.cases()
    with daemon(build.version) as endpoint:
        found = dict(build.results(endpoint, chosen(names, CASES)))
    counts: dict[str, Counter[str]] = {}
    for number, result in found.items():
        counts.setdefault(names[number].partition("(")[0], Counter())[result] += 1
    for op, of_op in sorted(counts.items()):
        print(f"{op}: {', '.join(f'{count} {result}' for result, count in of_op.most_common())}")
    print(f"{len(found):,} of {len(names):,} cases: {dict(Counter(found.values()))}")
    failed = [number for number, result in found.items() if result not in PASSED]
    with own_server(build) as endpoint:
        theirs = dict(build.results(endpoint, failed))
    missed = [
        f"{found[one]}: {names[one]}" for one in failed if theirs[one] in PASSED and names[one] not in KNOWN
    ]
    assert not missed, "\n".join(missed)
    assert sum(result == "ok" for result in found.values()) > len(found) / 2
