"""The services of a host and its tenants' accounts for one session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from heliograph_proto.sessions import Limits
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.fair_queue import FairFlow
from heliograph_server.resources.measurements import TenantTimes
from heliograph_server.resources.membership import SessionDevices
from heliograph_server.resources.quotas import Holding
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.timers import Deadlines
from heliograph_server.weights.session_weights import SessionWeights


@dataclass(frozen=True, slots=True)
class SessionServices:
    """The services of one session, shared by its compiler and its executor."""

    limits: Limits
    devices: SessionDevices
    #: The lock of each device, by name.
    device_locks: Mapping[str, DeviceLock]
    deadlines: Deadlines
    room: MemoryReclaim
    exchange: LiveExchange
    contents: SessionWeights
    #: The measured times of the tenant's runs.
    times: TenantTimes
    #: The session's share of its tenant's account.
    holding: Holding
    #: The owner of its share of devices and of compiles.
    flow: FairFlow
    #: Called when work found a device of this host lost.
    found_lost: Callable[[], None] = lambda: None
    #: True if images of the session are taken, for which plans keep their requests.
    keeps_requests: bool = False
    #: True if the session outlives a broken connection.
    is_leased: bool = False
