"""The cases of ggml's test-backend-ops with a daemon as RPC device: each one that ggml's own server
passes, passes.

`make test-clients` runs 8 of each op, spread over all of them; CASES=0 all, in an hour or two.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from daemon_threads import thread_daemon
from paths import ROOT
from peers import backend_ops

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif(
        not backend_ops.PROGRAM.exists(), reason="the program is not built: `make test-clients` builds it"
    ),
]
CASES = int(os.environ.get("CASES") or 8)
PASSED = ("ok", "skip")
#: ggml's CPU takes the rows of a transposed matrix as if their elements lay side by side, and adds up others.
KNOWN = {"SUM(type=f32,ne=[33,256,1,1],permute=[1,0,2,3])"}


@contextmanager
def own_server() -> Iterator[str]:
    """ggml's own server over its CPU. It has no end but its process's."""
    command = [sys.executable, str(ROOT / "tests" / "bench" / "peer_rpc.py"), "server", "2"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def test_cases_that_ggmls_own_server_passes_pass_here() -> None:
    names = backend_ops.cases()
    with thread_daemon(ggml_rpc="127.0.0.1:0", ggml_rpc_version=backend_ops.version()) as daemon:
        endpoint = f"127.0.0.1:{daemon.ggml_rpc_port}"
        found = dict(backend_ops.results(endpoint, backend_ops.chosen(names, CASES)))
    counts: dict[str, Counter[str]] = {}
    for number, result in found.items():
        counts.setdefault(names[number].partition("(")[0], Counter())[result] += 1
    for op, of_op in sorted(counts.items()):
        print(f"{op}: {', '.join(f'{count} {result}' for result, count in of_op.most_common())}")
    failed = [number for number, result in found.items() if result not in PASSED]
    with own_server() as endpoint:
        theirs = dict(backend_ops.results(endpoint, failed))
    missed = [
        f"{found[one]}: {names[one]}" for one in failed if theirs[one] in PASSED and names[one] not in KNOWN
    ]
    assert not missed, "\n".join(missed)
    assert sum(result == "ok" for result in found.values()) > len(found) / 2
