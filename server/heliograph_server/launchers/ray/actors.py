"""The actors on the nodes: the registry, and the supervisors of the members."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ray

from heliograph_proto.addresses import Address
from heliograph_server.launchers.specification import (
    FORGOTTEN_SECONDS,
    SILENT_SECONDS,
    MemberStatus,
    PoolSpecification,
    specification_from_json,
)
from heliograph_server.launchers.supervisor import SupervisedDaemon, Supervisor

logger = logging.getLogger(__name__)

#: The namespace of the actors' names in Ray.
NAMESPACE = "heliograph"
#: How often a member reports to the registry; it also reports a change at once.
REPORT_SECONDS = 1.0
#: The timeout of a report.
ANSWER_SECONDS = 2.0


def member_name(pool: str, rank: int) -> str:
    """The name of a member's actor."""
    return f"{pool}/{rank}"


class PoolRegistry:
    """The specification of a pool, and the last reports of its members.

    After a restart it knows only the specification, until each member has reported: `is_settled`
    tells whether a missing report means a missing member.
    """

    def __init__(self, specification: dict[str, Any], token: str) -> None:
        self._specification = specification
        self._token = token
        self._reports: dict[int, tuple[float, dict[str, Any]]] = {}
        self._since = time.monotonic()

    def specification(self) -> dict[str, Any]:
        """The `asdict` of the specification."""
        return self._specification

    def token(self) -> str:
        """A random token of the creator of this pool, by which it knows that it created the
        pool."""
        return self._token

    def report(self, rank: int, status: dict[str, Any]) -> None:
        """Record the status of a member."""
        self._reports[rank] = (time.monotonic(), status)

    def members(self) -> dict[str, Any]:
        """`members`: recent reports by rank; `is_settled`: True if these are all members."""
        now = time.monotonic()
        found = []
        for _, (at, status) in sorted(self._reports.items()):
            if now - at < FORGOTTEN_SECONDS:
                found.append(status if now - at < SILENT_SECONDS else status | {"state": "silent"})
        settled = len(found) == self._specification["members"] or now - self._since > FORGOTTEN_SECONDS
        return {"members": found, "is_settled": settled}


class MemberSupervisor:
    """The supervisor of one daemon. The daemon is its child, and dies with it."""

    def __init__(self, specification: dict[str, Any], rank: int) -> None:
        self._specification = specification_from_json(specification)
        self._rank = rank
        self._node = ray.util.get_node_ip_address()
        self._changed = threading.Event()
        self._supervisor = Supervisor(
            serve_arguments(self._specification, self._node), environment(os.environ), self._on_change
        )
        threading.Thread(target=self._report, name="heliograph-report", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """The `asdict` of a MemberStatus."""
        child = self._supervisor.child
        return asdict(
            MemberStatus(
                self._rank, str(child.phase), child.url, self._node, child.pid, child.starts, child.why
            )
        )

    def process(self) -> int:
        """The id of this actor's process."""
        return os.getpid()

    def stop(self, seconds: float) -> bool:
        """Stop the daemon for good. True if it ended in time."""
        return self._supervisor.stop(seconds)

    def _on_change(self, child: SupervisedDaemon) -> None:
        self._changed.set()

    def _report(self) -> None:
        registry: Any = None
        while True:
            self._changed.wait(REPORT_SECONDS)
            self._changed.clear()
            try:
                if registry is None:
                    registry = ray.get_actor(self._specification.name, namespace=NAMESPACE)
                ray.get(registry.report.remote(self._rank, self.status()), timeout=ANSWER_SECONDS)
            except Exception as error:  # of any type of Ray's: the registry may be restarting, or new
                logger.debug("a report to the registry failed: %s", error)
                registry = None


def serve_arguments(specification: PoolSpecification, node: str) -> list[str]:
    """The arguments of a member's daemon on the node with this address."""
    url = Address("grpc", host=node, port=specification.port)
    return [*specification.serve, "--listen", str(url)]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a daemon, without Ray's number of threads, which is for Ray's tasks."""
    return {name: value for name, value in given.items() if name != "OMP_NUM_THREADS"}
