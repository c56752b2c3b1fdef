"""The operators' pages of a secure host and a secure pool, followed step by step on loopback."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from forked_daemons import serve
from paths import ROOT

import heliograph as hg

PAGES = ROOT / "docs/operate"
SECONDS = 60.0


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def shell(script: str, folder: Path, **variables: str) -> str:
    """What a block prints, with this checkout's `heliograph`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path} | variables
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextmanager
def running(config: str, folder: Path, name: str) -> Iterator[None]:
    """A daemon with a page's settings."""
    file = folder / f"{name}.toml"
    file.write_text(config)
    daemon = serve("--config", str(file), "--device", "cpu:threads=1", stdout=subprocess.PIPE)
    try:
        assert daemon.stdout is not None and "grpcs://" in daemon.stdout.readline()
        yield
    finally:
        daemon.terminate()
        daemon.wait(SECONDS)
        daemon.stdout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the certificates of the first page."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command: install openssl")
    shell(blocks("secure-host.md", "shell")[0], tmp_path)
    return tmp_path


def test_the_page_of_a_secure_host_gives_one_that_asks_for_tokens_over_tls(folder: Path) -> None:
    _, tokens, client = blocks("secure-host.md", "shell")
    assert "alice" in shell(tokens, folder)
    (config,) = blocks("secure-host.md", "toml")
    port = free_port()
    config = config.replace("0.0.0.0:7070", f"127.0.0.1:{port}")
    config = re.sub(r"127\.0\.0\.1:(7071|9464)", lambda _: f"127.0.0.1:{free_port()}", config)
    with running(config, folder, "heliograph"):
        printed = shell(client.replace("localhost:7070", f"localhost:{port}"), folder)
        assert "cpu0" in printed and "round trip" in printed
        with pytest.raises(hg.UnauthenticatedError):
            hg.connect(f"grpcs://localhost:{port}", ca=str(folder / "ca.pem"))


def test_the_page_of_a_secure_pool_gives_one_whose_members_trust_each_other_alone(folder: Path) -> None:
    (tokens,) = blocks("secure-pool.md", "shell")
    shell(tokens, folder)
    member, head = blocks("secure-pool.md", "toml")
    ports = {f"10.0.0.{number}:7070": free_port() for number in (1, 2, 3)}

    def here(config: str) -> str:
        for address, port in ports.items():
            config = config.replace(address, f"127.0.0.1:{port}")
        config = config.replace("10.0.0.0/24", "127.0.0.0/8")
        return config

    first, *others = ports
    with ExitStack() as stack:
        for number, address in enumerate(others):
            stack.enter_context(running(here(member.replace(others[0], address)), folder, f"member{number}"))
        stack.enter_context(running(here(head), folder, "head"))
        token = (folder / "alice.token").read_text().strip()
        url = f"grpcs://127.0.0.1:{ports[first]}"
        session = stack.enter_context(hg.connect(url, token=token, ca=str(folder / "ca.pem")))
        with session.watch() as watch:
            while len(session.devices) < 3:
                assert watch.next(timeout=SECONDS)
        graph = hg.Graph()
        x = graph.input("x", (2, 4), "f32")
        for side in ("left", "right"):
            with graph.scope(side):
                x = hg.tanh(x @ graph.weight("w", np.eye(4, dtype=np.float32)))
        graph.output("y", x)
        pins = {f"{side}/*": f"{side}/cpu0" for side in ("left", "right")}
        plan = session.compile(graph, ["left/cpu0", "right/cpu0"], pins=pins)
        x = np.ones((2, 4), np.float32)
        assert np.allclose(plan.run(x=x, timeout=SECONDS)["y"], np.tanh(np.tanh(x)))
