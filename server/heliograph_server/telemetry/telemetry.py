"""The telemetry of a daemon, from its start to its end. Without `metrics_listen`, nothing is
counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from heliograph_proto.errors import ConfigurationError
from heliograph_server.config.config import ServerConfig
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.runtime.keeper import KeeperFigures
from heliograph_server.telemetry.histograms import RunCounter
from heliograph_server.telemetry.loop_lag import LoopLag

#: The counts of a histogram by upper bound, and the sum.
Buckets = tuple[list[tuple[str, float]], float]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Figures of a version of a served model."""

    model: str
    version: str
    #: Ended requests by outcome.
    requests: Mapping[str, int]
    #: Requests that wait for their run.
    waiting: int
    #: Seconds by phase.
    seconds: Mapping[str, Buckets]
    #: Rows of runs.
    rows: Buckets


class DaemonFacts:
    """Facts of a daemon around its host. All are quick, and callable from any thread."""

    def __init__(self) -> None:
        self.host: Callable[[], Host | None] = lambda: None
        self.refused: Callable[[], Mapping[int, int]] = dict
        self.lag_seconds: Callable[[], float] = lambda: 0.0
        #: The expiry of the daemon's certificate, in seconds since 1970; None without one.
        self.certificate_expiry: Callable[[], float | None] = lambda: None
        #: The reloads of files, by kind and outcome: "ok" and "failed".
        self.reloads: Callable[[], Mapping[tuple[str, str], int]] = dict
        #: By kind, whether the latest content of a file is not in use.
        self.failing: Callable[[], Mapping[str, bool]] = dict
        #: The served models that are loaded.
        self.models: Callable[[], Iterable[ModelFigures]] = tuple
        #: The states of other daemons.
        self.kept: Callable[[], KeeperFigures] = KeeperFigures
        self.scrapes: Counter[str] = Counter(ok=0, refused=0)


class Telemetry:
    """The telemetry of a daemon, which calls the methods in order, on its loop."""

    def __init__(self, config: ServerConfig, slot: HostSlot) -> None:
        self._where = config.metrics_listen
        self._host: Host | None = None
        self._runs = RunCounter()
        self._ends: list[Callable[[], None]] = []
        #: The daemon sets its reloads and its certificate's expiry here.
        self.facts = DaemonFacts()
        self.facts.host = lambda: self._host
        self.facts.refused = slot.refused.copy
        #: The address of the metrics; empty without.
        self.url = ""

    def __repr__(self) -> str:
        return f"<Telemetry at {self.url or 'no address'}>"

    def start(self) -> None:
        """Start the metrics server. Raises ConfigurationError."""
        if not self._where:
            return
        # Imported on demand: the import is slow, and the package is optional.
        try:
            from heliograph_server.telemetry.metrics import Exposition
        except ImportError as error:
            advice = "pip install 'heliograph[server]'"
            raise ConfigurationError(f"metrics_listen needs {error.name}", advice=advice) from None
        from heliograph_server.telemetry.metrics_server import MetricsServer, bind_metrics

        lag = LoopLag(asyncio.get_running_loop())
        exposition = Exposition(self.facts, self._runs)
        self._ends.append(exposition.close)
        server = MetricsServer(bind_metrics(self._where), exposition.text, self.facts.scrapes)
        self._ends.append(server.close)
        server.start()
        lag.start()
        self._ends.append(lag.stop)
        self.facts.lag_seconds = lambda: lag.seconds
        self.url = server.url

    def watch(self, host: Host) -> None:
        """Count the runs of the host."""
        self._host = host
        if self._where:
            host.observers.append(self._runs)

    def stop(self) -> None:
        """Stop all parts, the last one first. Idempotent; waits for the server's thread, for a
        moment."""
        while self._ends:
            self._ends.pop()()
