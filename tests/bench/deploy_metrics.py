"""What it costs to be watched: a plan of one op with metrics and without, over TCP on loopback."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from figures import Figure, paired_medians, seconds_of
from planes_latency import VALUE, _aio_seconds, one_op

import heliograph as hg
from heliograph.testing import running_daemon

#: Short rounds: what else the machine does is to meet both.
ROUNDS, RUNS = 60, 100
#: Times the same without.
BAR = 1.05
#: As Prometheus does by default four times a minute.
SCRAPE_SECONDS = 1.0


def figures() -> Iterator[Figure]:
    """Microseconds from a run's call to its outputs, waited for one by one, while somebody scrapes."""
    quiet = "--log-level", "warning"
    where = f"127.0.0.1:{free_port()}"
    with (
        running_daemon(*quiet) as plain,
        running_daemon(*quiet, "--metrics-listen", where) as watched,
        scraping(f"http://{where}/metrics"),
    ):
        for name, measured in (("blocking", _blocking), ("aio", _aio)):
            ours, theirs = measured(watched, plain)
            yield Figure(f"deploy-metrics/{name}", ours * 1e6, theirs * 1e6, BAR, "us", "without metrics")


def free_port() -> int:
    """One that was free just now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


@contextmanager
def scraping(url: str) -> Iterator[None]:
    """Somebody asks for metrics again and again."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_SECONDS):
            with urllib.request.urlopen(url, timeout=10) as answer:
                answer.read()

    scraper = threading.Thread(target=scrape, name="scraper")
    scraper.start()
    try:
        yield
    finally:
        over.set()
        scraper.join()


def _blocking(watched: str, plain: str) -> tuple[float, float]:
    with (
        hg.connect(watched, shared_memory=False, direct=False) as first,
        hg.connect(plain, shared_memory=False, direct=False) as second,
    ):
        one, other = first.compile(one_op()), second.compile(one_op())
        return paired_medians(
            lambda runs: seconds_of(lambda: one.run(x=VALUE), runs, warmup=50),
            lambda runs: seconds_of(lambda: other.run(x=VALUE), runs, warmup=50),
            ROUNDS,
            RUNS,
        )


def _aio(watched: str, plain: str) -> tuple[float, float]:
    with asyncio.Runner() as runner:
        sessions = [runner.run(_opened(url)) for url in (watched, plain)]
        one, other = (runner.run(session.compile(one_op())) for session in sessions)
        found = paired_medians(
            lambda runs: runner.run(_aio_seconds(one, runs)),
            lambda runs: runner.run(_aio_seconds(other, runs)),
            ROUNDS,
            RUNS,
        )
        for session in sessions:
            runner.run(session.close())
        return found


async def _opened(url: str) -> hg.aio.Session:
    return await hg.aio.connect(url, shared_memory=False, direct=False)
