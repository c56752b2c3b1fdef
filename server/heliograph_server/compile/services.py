"""What a host and its tenants' accounts give to one session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heliograph_proto.sessions import Limits
from heliograph_server.exchange.exchange import LiveExchange
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.measurements import TenantTimes
from heliograph_server.resources.membership import SessionDevices
from heliograph_server.resources.quotas import Holding
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.timers import Deadlines
from heliograph_server.weights.session_weights import SessionWeights


@dataclass(frozen=True, slots=True)
class SessionServices:
    """Those of one session; its compiler and its executor have the same."""

    limits: Limits
    devices: SessionDevices
    #: Who computes on each device, by name.
    device_locks: Mapping[str, DeviceLock]
    deadlines: Deadlines
    room: MemoryReclaim
    exchange: LiveExchange
    contents: SessionWeights
    #: What runs of the tenant took.
    times: TenantTimes
    #: What the session has of its tenant's account.
    holding: Holding
