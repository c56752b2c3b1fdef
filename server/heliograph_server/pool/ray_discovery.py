"""Members that Ray places and restarts: `ray:[NAME][@ADDRESS]`, of the pool NAME in the cluster at
ADDRESS.

Ray runs in an agent process that is restarted when it ends: Ray terminates processes that lose
their cluster, while a head must keep the members that it has.
"""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

from heliograph_proto.errors import (
    ConfigurationError,
    HeliographError,
    InvalidArgumentError,
    UnavailableError,
)
from heliograph_server.launchers.ray.address import AUTO, check_reach, endpoint
from heliograph_server.launchers.ray.engine import check_installed, error_of, start_agent
from heliograph_server.launchers.specification import DEFAULT_NAME, check_name
from heliograph_server.pool.discovery import Changed, Failed, ListedMember, MembershipSource

logger = logging.getLogger(__name__)

#: The first and the longest pause between attempts to reach a cluster.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
#: The time that `close` waits for the thread.
CLOSE_SECONDS = 10.0

#: Starts an agent with a task.
Start: TypeAlias = Callable[[Mapping[str, Any]], "subprocess.Popen[str]"]

_ADVICE = "members that answer stay in use; `heliograph pool status` shows the engine's state"


def _start(task: Mapping[str, Any]) -> subprocess.Popen[str]:
    check_installed()
    check_reach(task["address"])
    return start_agent(task, subprocess.DEVNULL)


class RaySource(MembershipSource):
    """The serving members, from the pool's registry.

    They are named NAME-0, NAME-1, and so on, by their rank in the pool. They keep it when they are
    restarted or move to another node.
    """

    prefix = "ray"

    def __init__(self, name: str = DEFAULT_NAME, address: str = AUTO, start: Start = _start) -> None:
        self._name, self._address, self._start_agent = name, address, start
        self._wake = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._agent: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._urls: dict[int, str] = {}
        self._reported: tuple[ListedMember, ...] | None = None
        self._is_absent = False

    @classmethod
    def parse(cls, text: str) -> Self:
        name, _, address = text.partition("@")
        check_installed()
        check_name(name or DEFAULT_NAME)
        try:
            endpoint(address or AUTO)
        except InvalidArgumentError as error:
            raise ConfigurationError(error.message, advice=error.advice) from None
        return cls(name or DEFAULT_NAME, address or AUTO)

    def start(self, changed: Changed, failed: Failed) -> None:
        self._thread = threading.Thread(
            target=self._watch, args=(changed, failed), name="heliograph-ray", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._agent is not None:
                self._agent.kill()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _watch(self, changed: Changed, failed: Failed) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closed:
            try:
                if self._follow(changed, failed):
                    pause = FIRST_PAUSE_SECONDS
                raise UnavailableError("the agent of Ray has ended", advice=_ADVICE)
            except Exception as error:  # including malformed output of the agent, which is reported too
                self._fail(error, changed, failed)
            self._wake.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _follow(self, changed: Changed, failed: Failed) -> bool:
        """Report an agent's output until it ends. Return True if it listed the members.

        Raises the errors that the agent reports.
        """
        with self._lock:
            if self._closed:
                return False
            task = {"do": "watch", "name": self._name, "address": self._address}
            self._agent = agent = self._start_agent(task)
        has_listed = False
        try:
            assert agent.stdout is not None
            for line in agent.stdout:
                has_listed = self._handle(json.loads(line), changed, failed) or has_listed
        finally:
            agent.kill()
            with self._lock, agent:
                # Leaving the context waits for its end, and closes its pipe.
                self._agent = None
        return has_listed

    def _handle(self, message: Mapping[str, Any], changed: Changed, failed: Failed) -> bool:
        if "error" in message:
            raise error_of(message["error"])
        if "absent" in message:
            self._fail(UnavailableError(message["absent"]), changed, failed)
            return False
        if self._is_absent:
            logger.info("the pool %r of Ray is available again", self._name)
        self._is_absent = False
        found = {one["rank"]: one["url"] for one in message["members"] if one["url"]}
        # A restarted registry has not heard from all members yet.
        self._urls = found if message["is_settled"] else self._urls | found
        self._report(changed)
        return True

    def _fail(self, error: Exception, changed: Changed, failed: Failed) -> None:
        """Report why the members are unknown: once, until they are known again."""
        if self._reported is None:
            self._report(changed)
        if not self._is_absent and not self._closed:
            self._is_absent = True
            why = error.message if isinstance(error, HeliographError) else str(error)
            failed(UnavailableError(f"the pool {self._name!r} of Ray: {why}", advice=_ADVICE))

    def _report(self, changed: Changed) -> None:
        found = tuple(ListedMember(f"{self._name}-{rank}", url) for rank, url in sorted(self._urls.items()))
        if found != self._reported and not self._closed:
            self._reported = found
            changed(found)
