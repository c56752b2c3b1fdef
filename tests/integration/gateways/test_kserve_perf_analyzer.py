"""Triton's perf_analyzer measures a served model, by gRPC, by HTTP, in streams and in shared memory."""

from __future__ import annotations

import csv
import getpass
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from kserve_folders import ServedModels, add_perceptron, served
from paths import ROOT

#: tritonclient's wheel has the program.
PROGRAM = Path(sysconfig.get_path("scripts")) / "perf_analyzer"
CUDA = [*(ROOT / ".venv-peers").glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")]
ENVIRONMENT = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, CUDA))}


def why_not() -> str:
    """The reason why the program does not start; "" if it does."""
    if not PROGRAM.exists():
        return "tritonclient's wheel has no perf_analyzer for this system"
    found = subprocess.run(
        [PROGRAM, "--version"], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    return "" if found.returncode == 0 else found.stderr.strip()


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(
    bool(WHY_NOT), reason=f"{WHY_NOT}: `make peers` has CUDA's runtime, Debian's libb64-0d the other"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModels]:
    folder = tmp_path_factory.mktemp("models")
    add_perceptron(folder)
    with served(folder, "--kserve-shared-memory", getpass.getuser()) as found:
        yield found


@pytest.mark.parametrize(
    "options",
    [
        ["-i", "grpc"],
        ["-i", "grpc", "-b", "4", "--concurrency-range", "8"],
        ["-i", "grpc", "--streaming", "--concurrency-range", "4"],
        ["-i", "http", "--concurrency-range", "4"],
        ["-i", "grpc", "--shared-memory", "system"],
    ],
    ids=["grpc", "batches", "streams", "http", "shared memory"],
)
def test_perf_analyzer_measures_a_model(models: ServedModels, tmp_path: Path, options: list[str]) -> None:
    url = models.http_url if "http" in options else models.grpc_url
    report = tmp_path / "report.csv"
    command = [
        str(PROGRAM), "-m", "perceptron", "-u", url, "--measurement-request-count", "40", "-f", str(report),
        "--measurement-mode", "count_windows", "-s", "999", "-r", "10", *options,
    ]  # fmt: skip
    (before,) = models.grpc.get_inference_statistics("perceptron").model_stats
    found = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, (found.stdout + found.stderr)[-3000:]
    with report.open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["Inferences/Second"]) > 0
    (after,) = models.grpc.get_inference_statistics("perceptron").model_stats
    assert after.inference_count - before.inference_count >= 40
    assert after.inference_stats.fail.count == before.inference_stats.fail.count
