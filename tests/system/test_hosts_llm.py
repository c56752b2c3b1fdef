"""A language model on one, two and three hosts: the same bits, and the loss of one in an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from gguf_files import write_model
from lora_files import write_adapter
from paths import SUPPORT
from virtual_hosts import Network, Wire, rights

from heliograph.llm import read_header

CLIENT = [sys.executable, str(SUPPORT / "hosts_llm_client.py")]
SERVE = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--device", "cpu:threads=1"]
HOSTS = ("one", "two", "three")
WIRE = Wire(delay_seconds=0.00025, rate_bits_per_second=1e9)
PORT = 7070
SECONDS = 120

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokens come in pairs whose logits differ in the last bits, if at all. Its layers round their
    rows, and logits are of rows in f32."""
    path = tmp_path_factory.mktemp("models") / "ties.gguf"
    write_model(path, "llama", "q8_0", outer="f32", layers=3, context=4096)
    (output,) = (one for one in read_header(path).tensors if one.name == "output.weight")
    rows = np.memmap(path, np.float32, "r+", output.offset_bytes, output.shape)
    pairs = len(rows) // 2 * 2
    rows[1:pairs:2] = rows[0:pairs:2]
    rows[1:pairs:2, ::7] = np.nextafter(rows[1:pairs:2, ::7], np.float32(np.inf))
    rows.flush()
    write_adapter(path.with_name("adapter.gguf"), path)
    return path


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := rights():
        pytest.skip(reason)
    with Network(head=Wire(), **dict.fromkeys(HOSTS, WIRE)) as made:
        yield made


@pytest.fixture(scope="module")
def served(network: Network) -> Iterator[dict[str, subprocess.Popen[str]]]:
    made = {host: serve(network, host) for host in HOSTS}
    listed = ",".join(f"{host}={network[host].address}" for host in HOSTS)
    made["head"] = serve(network, "head", "--pool", f"static:{listed}")
    yield made
    for process in made.values():
        process.terminate()
        process.wait(SECONDS)


def serve(network: Network, host: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*SERVE, "--listen", f"grpc://{network[host].address}:{PORT}", *arguments]
    process = network[host].popen(command, stdout=PIPE, text=True)
    assert process.stdout.readline().startswith("listening on ")
    return process


def client(network: Network, what: str, model: Path, *hosts: str) -> subprocess.Popen[str]:
    url = f"grpc://{network['head'].address}:{PORT}"
    devices = [f"{host}/cpu0" for host in hosts]
    return network["head"].popen([*CLIENT, what, url, str(model), *devices], stdout=PIPE, text=True)


def told(process: subprocess.Popen[str]) -> Any:
    line = process.stdout.readline()
    assert line, f"the client ended: {process.wait(SECONDS)}"
    return json.loads(line)


def test_answers_have_the_same_bits_on_one_two_and_three_hosts(
    network: Network, served: dict[str, subprocess.Popen[str]], model: Path
) -> None:
    """Alone, with 31 others, and after a prompt that begins alike, also where logits are nearly
    tied; with adapters, grammars and proposals."""
    process = client(network, "same", model, *HOSTS)
    found = [told(process) for _ in HOSTS]
    assert process.wait(SECONDS) == 0
    for count, one in enumerate(found, 1):
        assert one["alone"] == one["together"], f"{count} hosts, beside others"
        assert one["hit"] == one["cold"] and one["reused"] > 40, f"{count} hosts, after a hit"
        assert one == found[0], f"{count} hosts"
    steps = [step for _, steps in found[0]["alone"] for step in steps]
    near = [step for step in steps if abs(step[2][1] - step[3][1]) < 1e-5]
    assert steps and near, "no logits were nearly tied"


def test_answers_go_on_without_the_host_that_is_lost(
    network: Network, served: dict[str, subprocess.Popen[str]], model: Path
) -> None:
    process = client(network, "lose", model, *HOSTS[:2])
    assert told(process) == "under way"
    served["two"].kill()
    is_same, tokens = told(process)
    assert is_same and len(tokens) == 10
    assert process.wait(SECONDS) == 0
