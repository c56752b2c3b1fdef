"""What runs on the nodes: the registry, and the supervisors of the members."""

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

#: Of Ray: where all our actors have their names.
NAMESPACE = "heliograph"
#: How often a member tells the registry what it is; at once when it is another.
TELL_SECONDS = 1.0
#: How long one telling may take.
ANSWER_SECONDS = 2.0


def member_name(pool: str, rank: int) -> str:
    """The name of a member's actor."""
    return f"{pool}/{rank}"


class PoolRegistry:
    """What a pool is to be, and what its members said last.

    After a restart it knows only the former, until each member has told: `is_settled` says whether who is
    missing is missing.
    """

    def __init__(self, specification: dict[str, Any], token: str) -> None:
        self._specification = specification
        self._token = token
        self._told: dict[int, tuple[float, dict[str, Any]]] = {}
        self._since = time.monotonic()

    def specification(self) -> dict[str, Any]:
        """As `asdict` tells it."""
        return self._specification

    def token(self) -> str:
        """What whoever made this pool made up: so it knows that it did."""
        return self._token

    def tell(self, rank: int, status: dict[str, Any]) -> None:
        """A member says what it is."""
        self._told[rank] = (time.monotonic(), status)

    def members(self) -> dict[str, Any]:
        """`members`: by rank, those that told of themselves of late; `is_settled`: whether these are all."""
        now = time.monotonic()
        found = []
        for _, (at, status) in sorted(self._told.items()):
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
        threading.Thread(target=self._tell_on, name="heliograph-telling", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """A MemberStatus, as `asdict` tells it."""
        return asdict(member_status(self._rank, self._node, self._supervisor.child))

    def process(self) -> int:
        """The id of this actor's own process."""
        return os.getpid()

    def stop(self, seconds: float) -> bool:
        """Ends the daemon for good. Whether it ended by itself in time."""
        return self._supervisor.stop(seconds)

    def _on_change(self, child: SupervisedDaemon) -> None:
        self._changed.set()

    def _tell_on(self) -> None:
        registry: Any = None
        while True:
            self._changed.wait(TELL_SECONDS)
            self._changed.clear()
            try:
                if registry is None:
                    registry = ray.get_actor(self._specification.name, namespace=NAMESPACE)
                ray.get(registry.tell.remote(self._rank, self.status()), timeout=ANSWER_SECONDS)
            except Exception as error:  # whatever Ray raises: the registry may be restarting, or made anew
                logger.debug("the registry was not told: %s", error)
                registry = None


def member_status(rank: int, node: str, child: SupervisedDaemon) -> MemberStatus:
    """What a supervisor tells of its daemon."""
    return MemberStatus(rank, str(child.phase), child.url, node, child.pid, child.starts, child.why)


def serve_arguments(specification: PoolSpecification, node: str) -> list[str]:
    """What a member's daemon is started with, on the node of this address."""
    url = Address("grpc", host=node, port=specification.port)
    return [*specification.serve, "--listen", str(url)]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """A daemon's environment: Ray's number of threads is meant for its own tasks."""
    return {name: value for name, value in given.items() if name != "OMP_NUM_THREADS"}
