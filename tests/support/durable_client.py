"""The client's core over hosts with state, one after the other: what a shell and a wire would carry, in
one process and in order. A daemon may be killed between any two messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core_client import SECONDS
from state_hosts import abandon

from heliograph.core.future import Pending
from heliograph.core.protocol import ClientCore
from heliograph.core.replay.journal import CommandJournal, MadePlan
from heliograph_backends.contract import Device
from heliograph_backends.registry import Registry
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_runs import CompletionReader, encode_results
from heliograph_proto.errors import HandleExistsError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import CompileRequest, PlanInfo, PlanOptions
from heliograph_server.runtime.host import Host
from heliograph_server.session.session import Session
from heliograph_server.state.folder import FolderMedium
from heliograph_server.state.snapshots import Snapshots
from heliograph_server.state.store import StateStore

#: The most bytes of commands in one message here: a few commands.
MESSAGE_BYTES = 4096


class DurableClient:
    """A durable session. `restart` kills its daemon and starts another one on its folder."""

    def __init__(
        self, folder: Path, devices: Callable[[], Sequence[Device]], journal_bytes: int = 2**30
    ) -> None:
        self._folder, self._devices = folder, devices
        self.host = self._start()
        opened = self.host.open_session("test", durable=True, lease_ms=60_000)
        assert opened.durable
        self.token = opened.session
        self.core = ClientCore(opened.limits)
        self.core.has_lease = True
        self.core.journal = CommandJournal(journal_bytes)
        #: Messages of the daemon that did not arrive yet. A killed daemon's are lost.
        self.arriving: deque[c.CompletionBatch] = deque()
        self.session = self._attach()

    def _start(self) -> Host:
        host = Host(Registry.of(*self._devices()))
        host.lease_seconds = 60.0
        host.snapshots = Snapshots(StateStore(FolderMedium(self._folder)), 0)
        host.recover()
        return host

    def _attach(self) -> Session:
        session = self.host.session(self.token)
        arriving = self.arriving
        session.attach(arriving.append)
        session.keep_messages = lambda: (self.core.received, tuple(map(encode_results, arriving)))
        return session

    def close(self) -> None:
        self.session.close()
        self.host.close()

    def snapshot(self) -> int:
        """Take a snapshot; the number of the last command in it."""
        return self.host.snapshot(self.session).sequence

    def restart(self) -> None:
        """Kill the daemon, with what it has not sent; the next one goes on."""
        abandon(self.host)
        self.host.close()
        self.arriving = deque()
        self.host = self._start()
        self.core.detached()
        self.session = self._attach()
        acknowledged, kept = self.session.kept_messages
        received = min(self.core.received, acknowledged + len(kept))
        answer = c.Attached(self.session.commands, received + 1, True, loops=self.session.resumed_loops)
        self.core.apply(c.CompletionBatch(0, attached=answer))
        self.arriving.extendleft(map(CompletionReader().read, reversed(kept[received - acknowledged :])))

    # Messages

    def send(self, kind: c.CommandKind, **how: Any) -> Pending:
        """Queue a command."""
        return self.core.send(kind, observed=True, **how)

    def step(self, *, receives: bool = True) -> bool:
        """Carry one message of each side. False if there was none."""
        commands = self.core.take(MESSAGE_BYTES)
        if commands:
            self.session.submit(commands)
        elif self._remake():
            return True
        came = receives and bool(self.arriving)
        if came:
            self.core.apply(self.arriving.popleft())
            for outcome in self.core.take_settled():
                outcome.fire()
        return bool(commands) or came

    def _remake(self) -> bool:
        made = self.core.repetition.plan()
        if made is None or not made.due.done:
            return False
        try:
            assert isinstance(made.request, CompileRequest)
            self.session.compile(made.request)
        except HandleExistsError:
            pass  # the snapshot has it
        self.core.repetition.made(made)
        return True

    def wait(self, pending: Pending) -> Pending:
        """Carry messages until a command is done."""
        import time

        end = time.monotonic() + SECONDS
        while not pending.done:
            if not self.step():
                assert time.monotonic() < end, f"{pending} is not done"
                time.sleep(0.001)
        return pending

    def do(self, kind: c.CommandKind, **how: Any) -> c.Completion:
        """Send a command and wait for it. Raises its error."""
        pending = self.wait(self.send(kind, **how))
        pending.raise_error()
        assert isinstance(pending.completion, c.Completion | None)
        return pending.completion or c.Completion(pending.sequence)

    def compile(self, plan: int, graph: Graph, taps: Sequence[int] = (), **how: Any) -> PlanInfo:
        """Compile a graph."""
        # As a client's procedure, which waits until everything before has arrived.
        self.do(c.Cancel(0))
        after = self.core.last_sent
        request = CompileRequest(plan, graph, PlanOptions(taps=tuple(taps)), **how)
        info = self.session.compile(request)
        assert self.core.journal is not None
        self.core.journal.has_variables(plan, tuple(one.tensor for one in info.variables))
        self.core.journal.made(MadePlan(request, {}, after, self.core.last_sent))
        return info
