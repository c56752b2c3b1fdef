"""A container engine that tests start and that ends with them: Docker's, in namespaces by `alone.sh`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths import ROOT

import heliograph as hg
from heliograph.testing import wait_until_serving

#: What `prepare.sh` filled.
PREPARED = Path(os.environ.get("DEPLOY_PREPARED", ROOT / ".venv-deploy"))
BASE = "python:3.11-slim-bookworm"
IMAGE, DEMO_IMAGE, KSERVE_IMAGE = "heliograph", "heliograph-demo", "heliograph-kserve"
PORT = 7070
WHEELS_PORT = 8099
#: What the base lacks to be what it stands in for: commands named `python` and `pip`.
STAND_IN = (
    f"FROM {BASE}-raw\nRUN python3 -m venv --copies /usr/local && ln -sf python3 /usr/local/bin/python\n"
)
START_SECONDS = 60.0
#: For one command; building an image compiles kernels.
COMMAND_SECONDS = 300.0
#: How long a container may take to answer, and one that drains to end.
SECONDS = 60.0


def why_not() -> str:
    """Why no engine can be started here; empty if one can."""
    if os.getuid():
        return "a container engine needs root"
    for command, package in (("dockerd", "docker.io"), ("docker", "docker.io"), ("iptables", "iptables")):
        if shutil.which(command) is None:
            return f"no {command} command: install {package}"
    if "DEPLOY_SCRATCH" not in os.environ:
        return "not in namespaces of its own: `make test-deploy` runs it in some"
    for name in ("base.tar", "wheels.done"):
        if not (PREPARED / name).exists():
            return f"{PREPARED / name} is missing: see what `make test-deploy` says"
    return ""


@dataclass
class Container:
    """One that runs, or has ended."""

    engine: Engine
    name: str

    def _inspected(self, what: str) -> Any:
        return json.loads(self.engine.docker("inspect", "--format", "{{json " + what + "}}", self.name))

    @property
    def state(self) -> dict[str, Any]:
        """Docker's: Status, ExitCode, OOMKilled, Health."""
        found: dict[str, Any] = self._inspected(".State")
        return found

    @property
    def address(self) -> str:
        """Its address on the engine's network."""
        (network,) = self._inspected(".NetworkSettings.Networks").values()
        return str(network["IPAddress"])

    @property
    def url(self) -> str:
        return f"grpc://{self.address}:{PORT}"

    @property
    def log(self) -> str:
        return self.engine.docker("logs", self.name, both=True)

    def execute(self, *command: str, check: bool = True) -> str:
        """What a command says that runs inside."""
        return self.engine.docker("exec", self.name, *command, check=check, both=True)

    def connect(self) -> hg.Session:
        """A session, once it serves."""
        wait_until_serving(self.url, SECONDS)
        return hg.connect(self.url)

    def until(self, what: str, value: Any) -> None:
        """Waits until its state has this value. Fails after a minute, with its log."""
        for _ in tries(SECONDS):
            state = self.state
            found = state["Health"]["Status"] if what == "Health" else state[what]
            if found == value:
                return
        raise AssertionError(f"{self.name}: {what} is {found!r} and not {value!r}\n{self.log}")


def tries(seconds: float) -> Iterator[None]:
    """Again and again, a tenth of a second apart."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


class Engine:
    """Docker, started for the tests, which no other process knows of."""

    def __init__(self, folder: Path, group: str) -> None:
        self.folder = folder
        self._socket = f"unix://{folder}/socket"
        self.environment = os.environ | {"DOCKER_HOST": self._socket, "DOCKER_BUILDKIT": "0"}
        self._log = open(folder / "engine.log", "wb")  # noqa: SIM115
        where = [
            "--data-root",
            f"{folder}/data",
            "--exec-root",
            f"{folder}/exec",
            "--pidfile",
            f"{folder}/pid",
        ]
        command = ["dockerd", "--host", self._socket, "--cgroup-parent", group, *where]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def wait_until_ready(self) -> None:
        """Until it answers. Fails with its log."""
        for _ in tries(START_SECONDS):
            if self._process.poll() is not None:
                break
            asked = ["docker", "version", "--format", "{{.Server.Version}}"]
            if subprocess.run(asked, env=self.environment, capture_output=True).returncode == 0:
                return
        raise AssertionError(f"the engine did not start:\n{(self.folder / 'engine.log').read_text()[-3000:]}")

    def close(self) -> None:
        """Ends it, and all containers."""
        if self._process.poll() is None:
            left = self.docker("ps", "--all", "--quiet", check=False).split()
            if left:
                self.docker("rm", "--force", *left, check=False)
            self._process.terminate()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(SECONDS)
        self._log.close()

    def docker(self, *arguments: str, check: bool = True, both: bool = False, stdin: str = "") -> str:
        """What a command of Docker's says, on stderr too if `both`. Fails with that."""
        return self.told("docker", *arguments, check=check, both=both, stdin=stdin)

    def told(
        self, *command: str, check: bool = True, both: bool = False, stdin: str = "", **more: str
    ) -> str:
        """The same for any command of this engine's clients; `more` are environment variables."""
        done = subprocess.run(
            command,
            env=self.environment | more,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            cwd=ROOT,
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(command[:4])}: {done.returncode}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
            )
        return done.stdout + done.stderr if both else done.stdout.strip()

    def make_base(self) -> None:
        """The base image, of what `prepare.sh` made, under the name of what it stands in for."""
        self.docker("import", str(PREPARED / "base.tar"), f"{BASE}-raw")
        self.docker("build", "--tag", BASE, "-", stdin=STAND_IN)

    def build(self, image: str, target: str, extras: str = "server") -> str:
        """An image of deploy/Dockerfile, from wheels alone; gives what was said."""
        with _wheels_served() as url:
            given = ["PIP_NO_INDEX=1", f"PIP_FIND_LINKS={url}", f"EXTRAS={extras}"]
            wheels = [part for one in given for part in ("--build-arg", one)]
            what = ["--file", "deploy/Dockerfile", "--target", target, "--tag", image, "--network", "host"]
            return self.docker("build", *what, *wheels, ".")

    def image_bytes(self, image: str) -> int:
        return int(self.docker("image", "inspect", "--format", "{{.Size}}", image))

    @contextmanager
    def running(self, *options: str, serve: tuple[str, ...] = ("--insecure",)) -> Iterator[Container]:
        """A daemon in a container as hard as compose.yaml makes them, with more options of `docker run`."""
        hard = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        listen = ["serve", "--listen", f"grpc://0.0.0.0:{PORT}", *serve]
        name = self.docker("run", "--detach", *hard, *options, IMAGE, *listen)
        try:
            yield Container(self, name)
        finally:
            self.docker("rm", "--force", name, check=False)


@contextmanager
def _wheels_served() -> Iterator[str]:
    """The wheels by HTTP on loopback: a build has no other way to a folder with every engine."""
    serve = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(WHEELS_PORT)]
    process = subprocess.Popen(
        serve, cwd=PREPARED / "wheels", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in tries(START_SECONDS):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", WHEELS_PORT)) == 0:
                    break
        yield f"http://127.0.0.1:{WHEELS_PORT}/"
    finally:
        process.terminate()
        process.wait(SECONDS)
