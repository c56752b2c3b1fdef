"""Hosts, the bridge between them, and what can happen to the way from one to another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from virtual_hosts.namespaces import END_SECONDS, Namespace, NetworkError, kill, processes_in
from virtual_hosts.wire import Counts, Wire

WIRE_PROGRAM = Path(__file__).with_name("wire.py")
#: Nobody's: what is sent there reaches every host, and none takes it.
NOWHERE = "02:00:00:00:ff:ff"
#: A table of our own, which `mend` removes.
REJECT = """
table inet heliograph {{
  chain arriving {{
    type filter hook input priority 0;
    {match} reject with tcp reset
  }}
}}
"""


class Host:
    """One host: a namespace with the interface `eth0`, an address, and a way to all others of its network."""

    def __init__(self, name: str, number: int, switch: Namespace) -> None:
        self.name = name
        self.address = f"10.77.0.{number}"
        self.link_address = f"02:00:00:00:00:{number:02x}"
        self.namespace = Namespace()
        self.wire: RunningWire | None = None
        self._switch = switch
        self._port = f"port{number}"
        #: What is a port of the bridge: that, or the far end of the wire.
        self._joined = self._port
        self._others: dict[str, str] = {}
        self._rejects = False
        self._processes: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"<Host {self.name} at {self.address}>"

    # Processes

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on this host, as `subprocess.Popen` starts it.

        It is killed when the network ends, or the thread that started it: stop it before, for it to end well.
        """
        process = self.namespace.popen(command, **options)
        self._processes.append(process)
        return process

    def run(
        self, command: Sequence[str], *, timeout: float, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on this host to its end; its output is text.

        Raises CalledProcessError if it fails and `check` says so, TimeoutExpired after `timeout` seconds.
        """
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        self._processes.remove(process)
        if check and process.returncode:
            # Else nobody sees why.
            print(errors, file=sys.stderr)
            raise subprocess.CalledProcessError(process.returncode, command, output, errors)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    # What happens to its way

    def cut(self) -> None:
        """Nothing leaves or reaches this host any more, and nobody is told: its interface stays up."""
        self._switch.ip(f"link set {self._joined} nomaster")

    def cut_towards(self, other: Host) -> None:
        """What this host sends to the other one vanishes; what comes from there arrives."""
        self.namespace.ip(self._neighbour(other.address, NOWHERE))

    def reject(self, port: int | None = None, sender: Host | None = None) -> None:
        """Answers TCP segments that arrive with a reset, as a firewall may: all, or those for a port, from a
        sender. The process that they were for is not told.

        Raises NetworkError where there is no nft.
        """
        match = f"ip saddr {sender.address} " if sender is not None else ""
        match += "meta l4proto tcp" if port is None else f"tcp dport {port}"
        self.namespace.nft(REJECT.format(match=match))
        self._rejects = True

    def mend(self) -> None:
        """Whatever was cut or is rejected at this host works again."""
        self._switch.ip(f"link set {self._joined} master bridge0")
        self.namespace.ip(*(self._neighbour(*other) for other in self._others.items()))
        if self._rejects:
            self.namespace.nft("delete table inet heliograph\n")
            self._rejects = False

    # Made and ended by the network

    def connect(self) -> None:
        """Makes the interface, its port on the switch, and between port and bridge the wire's two ends."""
        own, port = self.namespace, self._port
        self._switch.ip(
            f"link add {port} type veth peer name eth0 netns {own.path}",
            f"link set {port} up",
        )
        own.ip(
            f"link set eth0 address {self.link_address}",
            f"address add {self.address}/24 dev eth0",
            "link set lo up",
            "link set eth0 up",
        )

    def join(self, wire: Wire) -> None:
        """Joins the port to the bridge: a wire that takes no time is none."""
        if wire != Wire():
            near, self._joined = f"{self._port}a", f"{self._port}b"
            self._switch.ip(
                f"link add {near} type veth peer name {self._joined}",
                f"link set {near} up",
                f"link set {self._joined} up",
            )
            self.wire = RunningWire(self._switch, self._port, near, wire)
        self._switch.ip(f"link set {self._joined} master bridge0")

    def meet(self, others: Sequence[Host]) -> None:
        """Knows where the others are, so that nobody has to ask, whose question might be lost."""
        self._others = {other.address: other.link_address for other in others}
        self.namespace.ip(*(self._neighbour(*other) for other in self._others.items()))

    def _neighbour(self, address: str, link_address: str) -> str:
        return f"neighbour replace {address} lladdr {link_address} dev eth0 nud permanent"

    def close(self) -> None:
        """Ends what was started here, and what that has started."""
        with ExitStack() as stack:
            stack.callback(self.namespace.close)
            for process in self._processes:
                stack.enter_context(_ending(process))
                process.kill()
            for pid in processes_in({self.namespace.inode}):
                kill(pid)


class RunningWire:
    """The process that is a host's wire."""

    def __init__(self, switch: Namespace, near: str, far: str, wire: Wire) -> None:
        self.wire = wire
        # Neither site nor the user's environment is of use to it.
        command = [sys.executable, "-I", "-S", str(WIRE_PROGRAM), near, far, json.dumps(asdict(wire))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = switch.popen(command, **pipes, text=True, bufsize=1)

    def begun(self) -> None:
        """Waits until it carries."""
        self._answer()

    def change(self, wire: Wire) -> None:
        """The wire is another for all that is sent from now on."""
        self._ask(json.dumps(asdict(wire)))
        self.wire = wire

    def counts(self) -> tuple[Counts, Counts]:
        """Frames from the host to the bridge, and those from the bridge to the host, so far."""
        return self._ask("")

    def close(self) -> tuple[Counts, Counts]:
        """Ends it; the last counts. What is on its way is lost."""
        with _ending(self._process):
            assert self._process.stdin is not None
            self._process.stdin.close()
            return self._answer()

    def _ask(self, line: str) -> tuple[Counts, Counts]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        return self._answer()

    def _answer(self) -> tuple[Counts, Counts]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise NetworkError(f"the wire ended with {self._process.wait(END_SECONDS)}")
        there, back = (Counts(**one) for one in json.loads(line))
        return there, back


@contextmanager
def _ending(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Waits for the process at the end, kills it if it takes too long, and closes its pipes."""
    try:
        yield
    finally:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_SECONDS)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


class Network:
    """Hosts by name, each with its wire to the bridge: `Network(server=Wire(), client=Wire(loss=0.01))`.

    Between two hosts lie the wires of both; `Wire()` takes no time and is none. A context manager, whose
    hosts are `network["client"]` and so on. Raises NetworkError where the system refuses.
    """

    def __init__(self, **wires: Wire) -> None:
        self._wires = wires
        self.hosts: dict[str, Host] = {}
        #: When the network has ended: the last counts of each host's wire.
        self.counts: dict[str, tuple[Counts, Counts]] = {}
        self._switches: list[Namespace] = []
        self._stack = ExitStack()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __repr__(self) -> str:
        return f"<Network of {', '.join(map(repr, self.hosts.values()))}>"

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            self._make(stack)
            self._stack = stack.pop_all()
        return self

    def _make(self, stack: ExitStack) -> None:
        switch = Namespace()
        self._switches.append(switch)
        stack.callback(switch.close)
        # Without its usual delay: no loops are possible here.
        switch.ip("link add bridge0 type bridge forward_delay 0", "link set bridge0 up")
        for number, (name, wire) in enumerate(self._wires.items(), 1):
            host = self.hosts[name] = Host(name, number, switch)
            stack.callback(host.close)
            host.connect()
            host.join(wire)
            stack.callback(self._end_wire, host)
        for host in self.hosts.values():
            host.meet([other for other in self.hosts.values() if other is not host])
            if host.wire is not None:
                host.wire.begun()

    def _end_wire(self, host: Host) -> None:
        if host.wire is not None:
            self.counts[host.name] = host.wire.close()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def inodes(self) -> set[int]:
        """What the kernel numbers its namespaces by: `processes_in(inodes)` finds what runs there."""
        namespaces = [host.namespace for host in self.hosts.values()]
        return {one.inode for one in (*namespaces, *self._switches)}
