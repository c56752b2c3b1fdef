"""The time until a user can begin: importing the client, the help of the command line, a daemon
that answers health with warm and with empty caches, a first embedding without compiled kernels, and
both from a wheel in a new environment.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path

from figures import Figure, shared

from heliograph.demo import find_model
from heliograph.testing import running_daemon, serving

ROOT = Path(__file__).parents[2]

LIMIT_SECONDS = 0.1
HELP_SECONDS = 0.15
HEALTH_SECONDS = 1.0
COLD_SECONDS = 3.0
EMBEDDING_SECONDS = 15.0
RUNS = 15

#: The imports that `import heliograph` is compared with.
BASE = "import numpy, grpc"
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
    differences = [import_seconds(OURS) - import_seconds(BASE) for _ in range(shared(RUNS))]
    ours = max(statistics.median(differences), 0.0)
    yield Figure("startup/import", ours, LIMIT_SECONDS, 1.0, "s", "0.1 s above numpy and grpc")


def help_() -> Iterator[Figure]:
    """`heliograph --help`, the whole process."""
    found = []
    for _ in range(shared(RUNS)):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "heliograph", "--help"], check=True, stdout=subprocess.DEVNULL)
        found.append(time.perf_counter() - start)
    yield Figure("startup/help", statistics.median(found), HELP_SECONDS, 1.0, "s", "0.15 s")


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
    yield Figure("startup/health", ours, HEALTH_SECONDS, 1.0, "s", "1 s with warm caches")


@contextmanager
def _no_kernels() -> Iterator[None]:
    """Name an empty folder as the kernels' cache."""
    name = "HELIOGRAPH_KERNEL_CACHE"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def cold() -> Iterator[Figure]:
    """A first start in a checkout: until health says SERVING, and until `heliograph embed` has an
    embedding."""
    with _no_kernels():
        served, embedded = _first(sys.executable, os.environ)
    yield Figure("startup/cold-health", served, COLD_SECONDS, 1.0, "s", "3 s without kernels")
    # A checkout compiles its kernels, which a wheel has; it is measured, and has no bar.
    yield Figure("startup/cold-embedding", embedded, EMBEDDING_SECONDS, inf, "s", "15 s, the wheel's bar")


def wheel() -> Iterator[Figure]:
    """The same from the wheel of `make wheel`: no kernel is compiled, all bytecode of Python is."""
    found = sorted(ROOT.glob("dist/heliograph-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit("there is no wheel: run `make wheel`")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        python = _installed(found[-1], Path(folder, "venv"))
        home = {"HOME": folder, "PATH": os.environ["PATH"]}
        served, embedded = _first(str(python), home)
    yield Figure("startup/wheel-health", served, COLD_SECONDS, 1.0, "s", "3 s, all caches empty")
    yield Figure("startup/wheel-embedding", embedded, EMBEDDING_SECONDS, 1.0, "s", "15 s, all caches empty")


def _installed(wheel: Path, folder: Path) -> Path:
    """Return the interpreter of a new environment that has the wheel."""
    uv, python = str(Path(sys.executable).with_name("uv")), folder / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", str(python), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, f"{wheel}[demo]"], check=True)
    return python


def _first(python: str, environment: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds from a daemon's start until it serves, and until there is an embedding."""
    heliograph = [python, "-m", "heliograph.cli"]
    serve = [*heliograph, "serve", "--listen", "grpc://127.0.0.1:0", "--log-level", "warning"]
    model = str(find_model())
    start = time.perf_counter()
    with serving(subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, text=True)) as url:
        served = time.perf_counter() - start
        embed = [*heliograph, "embed", "--model", model, "--server", url]
        subprocess.run(
            embed, env=environment, input="A sentence.", text=True, check=True, stdout=subprocess.DEVNULL
        )
        return served, time.perf_counter() - start
