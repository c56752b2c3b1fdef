"""A session of the core, driven by plain commands from a test's own thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from plan_options import plan_options

from heliograph_backends.contract import Device
from heliograph_backends.registry import Registry
from heliograph_proto import commands as c
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import HeliographError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import CompileRequest, PlanInfo, RowSplit
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType
from heliograph_server.resources.principals import ANYBODY, Principal
from heliograph_server.runtime.host import Host, HostStatistics
from heliograph_server.session.session import Session

SECONDS = 10.0


class CoreClient:
    """A host of some devices and one session of it. As a context, it checks that nothing is left."""

    def __init__(
        self,
        *devices: Device,
        limits: Limits | None = None,
        host: Host | None = None,
        principal: Principal = ANYBODY,
        secret: bytes = b"",
        durable: bool = False,
        token: bytes = b"",
    ) -> None:
        """`host`: one that others use as well. `token`: of a session that the host has restored."""
        self.host = host or Host(Registry.of(*devices), limits)
        opened = (
            None
            if token
            else self.host.open_session("test", secret=secret, principal=principal, durable=durable)
        )
        self.token = token if opened is None else opened.session
        self.session: Session = self.host.session(self.token)
        self._changed = threading.Condition()
        self._done: dict[int, c.Completion] = {}
        #: Of observed nodes, in the order in which they came.
        self.taps: list[c.TapPiece] = []
        self._sequence = self.session.commands
        #: Commands up to this one are on disk.
        self.durable_through = 0
        self.session.attach(self._take)

    def __enter__(self) -> CoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        memory = [(device, device.memory().total_bytes) for device in self.host._registry.devices]
        self.session.close()
        assert self.host.statistics() == HostStatistics()
        for device, total in memory:
            assert device.memory().free_bytes == total, f"memory of {device.name} is lost"
        self.host.close()

    def _take(self, batch: c.CompletionBatch) -> None:
        with self._changed:
            self.taps += batch.taps
            self.durable_through = max(self.durable_through, batch.durable_through)
            self._done.update((one.sequence, one) for one in batch.completions)
            self._changed.notify_all()

    def send(self, kind: c.CommandKind, stream: int = 0) -> int:
        """Sends a command; its sequence number."""
        return self.send_all(kind, stream=stream)[0]

    def send_all(self, *kinds: c.CommandKind, stream: int = 0) -> list[int]:
        """Sends commands in one message; their sequence numbers."""
        numbers = [self._sequence + 1 + place for place in range(len(kinds))]
        self._sequence += len(kinds)
        both = zip(numbers, kinds, strict=True)
        self.session.submit([c.Command(number, kind, stream, notify=True) for number, kind in both])
        return numbers

    def wait(self, sequence: int) -> c.Completion:
        """Its completion, whatever it is."""
        with self._changed:
            assert self._changed.wait_for(lambda: sequence in self._done, SECONDS)
            return self._done[sequence]

    def wait_for_taps(self, count: int) -> list[c.TapPiece]:
        """All pieces of observed nodes so far, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.taps) >= count, SECONDS)
            return list(self.taps)

    def do(self, kind: c.CommandKind) -> c.Completion:
        """Sends a command and waits for it. Raises its error."""
        done = self.wait(self.send(kind))
        if done.error is not None:
            raise done.error
        return done

    def refused(self, kind: c.CommandKind) -> HeliographError:
        """The error that a command ends with."""
        error = self.wait(self.send(kind)).error
        assert error is not None, f"{kind} was not refused"
        return error

    def compile(
        self,
        plan: int,
        graph: Graph,
        bindings: Mapping[int, int] | None = None,
        updates: int = 0,
        devices: Sequence[str] = (),
        pins: Mapping[int, str] | None = None,
        memory: Mapping[str, int] | None = None,
        pipeline: int = 1,
        splits: Mapping[int, RowSplit] | None = None,
        buffer_types: Mapping[str, str] | None = None,
        taps: Sequence[int] = (),
        **options: Any,
    ) -> PlanInfo:
        """Compiles a graph."""
        return self.session.compile(
            CompileRequest(
                plan,
                graph,
                plan_options(
                    devices=devices,
                    pins=pins,
                    memory=memory,
                    pipeline=pipeline,
                    splits=splits,
                    buffer_types=buffer_types,
                    taps=taps,
                    **options,
                ),
                bindings or {},
                updates,
            )
        )

    def upload(self, data: bytes) -> bytes:
        """A content of the session; its digest."""
        digest = digest_of(data)
        receiver = self.session.begin_upload(digest, len(data))
        receiver.write(0, data)
        receiver.finish()
        return digest

    def get(self, tensor: int, type: TensorType) -> np.ndarray[Any, Any]:
        """A tensor's elements."""
        data = self.do(c.GetTensor(tensor, 0, type.nbytes)).data
        return np.frombuffer(data, type.dtype.numpy).reshape(type.shape)
