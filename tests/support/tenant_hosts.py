"""Hosts that several tenants use, and what each has of them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
from core_client import CoreClient

from heliograph_backends.contract import Device
from heliograph_backends.registry import Registry
from heliograph_proto import commands as c
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Quota, TenantUsage
from heliograph_proto.types import tensor_type
from heliograph_server.resources.principals import Principal
from heliograph_server.runtime.host import MOST_IN_ALL, Host

F4 = tensor_type("f32", (4,))
X = np.arange(4, dtype=np.float32)
PLAN = 100


def chain(length: int = 2) -> Graph:
    """x, negated so often."""
    nodes = tuple(Node("neg", (place,), F4) for place in range(length))
    return Graph((Leaf(LeafKind.INPUT, "x", F4),), nodes, (Output("y", length),))


def run_of(plan: int = PLAN, *, pause: bool = False) -> c.RunCommand:
    """A run on X, whose output comes in the completion."""
    return c.RunCommand(plan, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),), pause)


class TenantHost:
    """As a context, it checks that nothing of anybody is left: of devices, and on the accounts."""

    def __init__(self, *devices: Device, total: Quota = MOST_IN_ALL, **quotas: Quota) -> None:
        self.host = Host(Registry.of(*devices), total=total)
        self.quotas = quotas
        self.clients: list[CoreClient] = []
        self._devices = devices

    def client(self, tenant: str = "", secret: bytes = b"") -> CoreClient:
        """One more session of a tenant."""
        principal = Principal(tenant, quota=self.quotas.get(tenant, Quota()))
        made = CoreClient(host=self.host, principal=principal, secret=secret)
        self.clients.append(made)
        return made

    def usage(self, tenant: str = "") -> TenantUsage:
        return next(one for one in self.host.tenants() if one.tenant == tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self.clients:
            client.session.close()
        self.host.store.drop_kept()
        left = [one for one in self.host.tenants() if not one.is_idle]
        free = [(one.name, one.memory()) for one in self._devices]
        self.host.close()
        if error is None:
            assert not left
            assert all(memory.free_bytes == memory.total_bytes for _, memory in free), free
