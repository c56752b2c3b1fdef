"""The daemons and clients of a soak: one daemon with tokens, and a pool of three members."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from access_daemons import Tokens
from faults.proxy import Proxy, proxy
from pool_daemons import Daemon, daemons

import heliograph as hg
from heliograph import admin
from heliograph.testing import wait_until_serving
from heliograph_server.auth.tokens import Token, add_token, hash_of, remove_token
from heliograph_server.resources.principals import Right
from soaking import plugin
from soaking.clients import ClientSpec, Tally, work
from soaking.sampling import Watched

DEVICE = "cpu:threads=1,memory=1GiB"
PLUGIN = ("--backend", str(Path(plugin.__file__)))
OPERATOR, GUEST = "operator", "guest"
MEMBERS = 3
#: The silence after which the head takes a member for lost.
SILENCE_SECONDS = 1.0
#: The time for which a session outlives a client that was killed.
LEASE_SECONDS = 2
#: The bound of a pause: programs end, or they hang.
PAUSE_SECONDS = 60.0
#: The time until a head has its members back.
JOIN_SECONDS = 30.0


class ClientProcess:
    """A client's process. A killed one gets another life."""

    def __init__(self, spec: ClientSpec, seed: int) -> None:
        self.spec, self._seed, self._life = spec, seed, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["soaking.clients"])
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        seed = f"{self._seed} {self.spec.name} {self._life}"
        self.process = self._context.Process(target=work, args=(self.spec, theirs, seed), daemon=True)
        self.process.start()
        theirs.close()
        self._life += 1

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def tell(self, word: str) -> None:
        """Say "go", "pause" or "stop"; a dead client does not hear it."""
        try:
            self._pipe.send(word)
        except OSError:
            pass

    def report(self) -> Tally | None:
        """Return the work until the pause; None if the client is dead or hangs."""
        try:
            return self._pipe.recv() if self._pipe.poll(PAUSE_SECONDS) else None
        except (EOFError, OSError):
            return None

    def signal(self, number: signal.Signals) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)
        self._pipe.close()

    def revive(self, *, paused: bool = False) -> None:
        """Start another life, at work unless it is to be paused."""
        self._start()
        if not paused:
            self.tell("go")

    def end(self) -> int | None:
        """End the client after a pause, and return its exit status."""
        self.tell("stop")
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(30)
        self._pipe.close()
        return self.process.exitcode


class Site:
    """Everything that is at work."""

    def __init__(self, stack: ExitStack, folder: Path, seed: int, plants: Sequence[str] = ()) -> None:
        self.tokens = Tokens(folder / "tokens.toml", {OPERATOR: (Right.USE, Right.ADMIN)})
        socket = f"unix://{folder}/daemon.sock"
        self.specs = _specs(socket, is_whole=not plants)
        for name, spec in self.specs.items():
            if not spec.is_pool:
                self.tokens.add(name)
        options = ["--listen", socket, "--device", DEVICE, "--tokens", str(self.tokens.path)]
        # A session whose client dies before its command stream is there ends after this.
        options += ["--limit", "attach_timeout_ms=5000", "--lease", str(LEASE_SECONDS)]
        stack.enter_context(_variable(plugin.FOLDER, str(folder)))
        with _variable(plugin.PLANTED, ",".join(plants)):
            self.daemon = Daemon(*options, *PLUGIN)
        stack.callback(self.daemon.end)
        wait_until_serving(self.daemon.url)
        self.operator = stack.enter_context(
            admin.connect(self.daemon.url, token=self.tokens.of[OPERATOR], timeout=30.0)
        )
        self.proxy: Proxy = stack.enter_context(proxy(self.daemon.host))
        self.members: list[Daemon] = []
        self.watched = [Watched("daemon", self.daemon.process.pid, self.operator)]
        self.head: Daemon | None = None
        if not plants:
            self.members = stack.enter_context(daemons(MEMBERS, "--device", DEVICE, *PLUGIN))
            pool = "static:" + ",".join(f"m{number}={one.host}" for number, one in enumerate(self.members))
            silence = str(SILENCE_SECONDS)
            options = ["--device", DEVICE, "--pool", pool, "--pool-silence-seconds", silence]
            self.head = Daemon(*options, "--lease", str(LEASE_SECONDS), *PLUGIN)
            stack.callback(self.head.end)
            wait_until_serving(self.head.url)
            for name, one, of_heads in (("head", self.head, 0), ("m0", self.members[0], 1)):
                operator = stack.enter_context(admin.connect(one.url, timeout=30.0))
                self.watched.append(Watched(name, one.process.pid, operator, of_heads))
        #: Clients by name.
        self.clients = {name: ClientProcess(self._at(spec), seed) for name, spec in self.specs.items()}
        stack.callback(lambda: [one.process.kill() for one in self.clients.values()])

    def _at(self, spec: ClientSpec) -> ClientSpec:
        """Return the client with its URL and token."""
        if spec.is_pool:
            assert self.head is not None
            return _with(spec, self.head.url, None)
        urls = {"": self.daemon.url, "proxy": f"grpc://127.0.0.1:{self.proxy.port}"}
        return _with(spec, urls.get(spec.url, spec.url), self.tokens.of[spec.name])

    @property
    def names(self) -> frozenset[str]:
        """The clients of the daemon."""
        return frozenset(name for name, spec in self.specs.items() if not spec.is_pool)

    @property
    def pool_names(self) -> frozenset[str]:
        return frozenset(self.specs) - self.names

    def reload(self) -> None:
        """Have the daemon read its files at once."""
        os.kill(self.daemon.process.pid, signal.SIGHUP)

    def revoke(self, name: str) -> None:
        remove_token(self.tokens.path, name)
        self.reload()

    def admit(self, name: str) -> None:
        token = Token(name, hash_of(self.tokens.of[name]), name, frozenset({Right.USE}), None)
        add_token(self.tokens.path, token)
        self.reload()

    def wait_for_members(self) -> str:
        """Wait until the head has all members. Return what is wrong."""
        if self.head is None:
            return ""
        wanted, end = {f"m{number}/cpu0" for number in range(MEMBERS)}, time.monotonic() + JOIN_SECONDS
        with hg.connect(self.head.url) as session:
            while True:
                found = {one.name for one in session.devices if not one.lost}
                if found >= wanted:
                    return ""
                if time.monotonic() > end:
                    return f"after {JOIN_SECONDS:g} s the head has only {sorted(found)}"
                time.sleep(0.05)

    def deaths(self) -> list[str]:
        """Return the daemons that are dead."""
        named = [("the daemon", self.daemon), *((f"m{n}", one) for n, one in enumerate(self.members))]
        named += [("the head", self.head)] if self.head is not None else []
        return [f"{name} died: {one.process.poll()}" for name, one in named if one.process.poll() is not None]


def _specs(socket: str, *, is_whole: bool) -> dict[str, ClientSpec]:
    found = [ClientSpec("tcp", ""), ClientSpec("shm", socket, shared_memory=True)]
    if is_whole:
        found += [
            ClientSpec("cut", "proxy"),
            ClientSpec("resident", socket, shared_memory="auto", is_resident=True),
            ClientSpec("aio", "", shared_memory="auto", is_async=True),
            ClientSpec(GUEST, ""),
            ClientSpec("pool", "", is_pool=True),
            ClientSpec("pool-shm", "", shared_memory="auto", is_pool=True),
        ]
    return {one.name: one for one in found}


def _with(spec: ClientSpec, url: str, token: str | None) -> ClientSpec:
    return ClientSpec(**{**spec.__dict__, "url": url, "token": token})


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
