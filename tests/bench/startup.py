"""How long it takes until one can begin: importing the client, and a daemon that answers health."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from figures import Figure

from heliograph.testing import running_daemon

LIMIT_SECONDS = 0.1
HEALTH_SECONDS = 2.0
RUNS = 9

#: What `import heliograph` may cost beyond: NumPy, gRPC, and what protobuf's generated modules import.
BASE = (
    "import numpy, grpc, google.protobuf.descriptor, google.protobuf.descriptor_pool, "
    "google.protobuf.symbol_database, google.protobuf.internal.builder, google.protobuf.runtime_version"
)
OURS = f"{BASE}\nimport heliograph"
CHECK = (
    "import sys, heliograph; bad = [m for m in ('numba', 'heliograph_server', 'uvloop', 'rich') "
    "if m in sys.modules]; assert not bad, bad"
)


def import_seconds(code: str) -> float:
    """Wall time of an interpreter that runs these imports."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def imports() -> Iterator[Figure]:
    """`import heliograph` above what it stands on."""
    subprocess.run([sys.executable, "-c", CHECK], check=True)
    differences = [import_seconds(OURS) - import_seconds(BASE) for _ in range(RUNS)]
    ours = max(statistics.median(differences), 0.0)
    yield Figure("startup/import", ours, LIMIT_SECONDS, 1.0, "s", "0.1 s above numpy and grpc")


def health() -> Iterator[Figure]:
    """From starting `heliograph serve` to its health service saying SERVING, kernels cached."""
    found = []
    for number in range(6):
        start = time.perf_counter()
        with running_daemon("--log-level", "warning"):
            # The first one warms the caches.
            if number:
                found.append(time.perf_counter() - start)
    ours = statistics.median(found)
    yield Figure("startup/health", ours, HEALTH_SECONDS, 1.0, "s", "2 s with warm caches")
