"""A Prometheus with the settings of `deploy`, which scrapes a head and its member at work."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from paths import DEPLOY, SUPPORT
from pool_daemons import DEVICE, Daemon

from heliograph.testing import wait_until_serving

RULES = DEPLOY / "prometheus" / "alerts.yaml"
SECONDS = 60.0
QUERY_SECONDS = 40.0
#: What Grafana puts in the places of its variables; rates are over the last seconds of this site.
VARIABLES = {"$instance": ".+", "$__rate_interval": "15s", "$__range": "1m"}


@dataclass
class Site:
    """A Prometheus, and what it finds."""

    url: str
    #: The clients of the daemons.
    clients: list[subprocess.Popen[str]] = field(default_factory=list)
    #: The daemons by their addresses for metrics.
    names: dict[str, str] = field(default_factory=dict)

    def numbers_in_time(self, query: str) -> list[float]:
        """The numbers of a query, once there are some: a rate is there after two scrapes."""
        end = time.monotonic() + QUERY_SECONDS
        while not (found := self.numbers(query)) or not all(map(math.isfinite, found)):
            assert all(one.poll() is None for one in self.clients), "a client has ended"
            assert time.monotonic() < end, f"{query}: {found}"
            time.sleep(0.5)
        return found

    def ask(self, path: str, **arguments: str) -> Any:
        """The data of an answer of its HTTP interface."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=SECONDS) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def numbers(self, query: str) -> list[float]:
        """The numbers that a query gives now, a series each."""
        return [float(one["value"][1]) for one in self.ask("query", query=query)["result"]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def working_site(folder: Path) -> Iterator[Site]:
    """Daemons at work and the Prometheus that scrapes them, which keeps its data in a folder."""
    metrics = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    member = Daemon("--device", DEVICE, "--metrics-listen", metrics[0])
    head = Daemon("--device", DEVICE, "--pool", f"static:m0={member.host}", "--metrics-listen", metrics[1])
    try:
        wait_until_serving(head.url)
        with load(member.url, head.url) as clients, prometheus(folder, metrics) as found:
            found.clients, found.names = clients, dict(zip(metrics, ("member", "head"), strict=True))
            yield found
    finally:
        head.end()
        member.end()


@contextmanager
def load(*urls: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Clients at work, in processes of their own."""
    command = [sys.executable, str(SUPPORT / "dashboard_load.py")]
    clients = [subprocess.Popen([*command, url], stderr=subprocess.PIPE, text=True) for url in urls]
    try:
        yield clients
    finally:
        for one in clients:
            one.kill()
            one.communicate(timeout=SECONDS)


class prometheus:
    """A running Prometheus with the settings and the rules of `deploy`, but scraping each second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        given = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        (job,) = given["scrape_configs"]
        job |= {"scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": [{"targets": targets}]}
        given |= {"global": {"evaluation_interval": "1s"}, "rule_files": [str(RULES)]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(given))
        self._address = f"127.0.0.1:{free_port()}"
        self._command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self._address}",
            "--log.level=warn",
        ]

    def __enter__(self) -> Site:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        site, end = Site(f"http://{self._address}"), time.monotonic() + SECONDS
        while True:
            assert self._process.poll() is None and time.monotonic() < end
            with suppress(OSError):
                if len(site.numbers("heliograph_serving")) == 2:
                    return site
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)


def filled(query: str) -> str:
    """A query with values for Grafana's variables."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
