"""The image and the compose files, for real: built and run by a container engine that the tests start.

`make test-deploy` does, in namespaces of its own. A test says what it was skipped for.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from deploying import Container, Engine, why_not
from deploying.engine import BASE, DEMO_IMAGE, IMAGE, KSERVE_IMAGE, PREPARED, SECONDS, tries

import heliograph as hg
from heliograph.testing import wait_until_serving

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(400)]

COMPOSE, KSERVE_COMPOSE = "deploy/compose.yaml", "deploy/kserve/compose.yaml"
BUF = PREPARED / "node_modules/.bin/buf"
#: Some seconds of work.
WIDTH, STEPS = 512, 1000
STARTS = 5
#: More than any container here has room for.
MOST_TENSORS = 64
#: What `filled` gives when the daemon is gone.
LOST = -1
MOST_MEGABYTES, MOST_SECONDS = 300.0, 3.0
Figure = Callable[[str, float, float], None]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A container engine, with the image of the daemon."""
    if reason := why_not():
        pytest.skip(reason)
    made = Engine(Path(os.environ["DEPLOY_SCRATCH"]), os.environ["DEPLOY_GROUP"])
    try:
        made.wait_until_ready()
        made.make_base()
        made.build(IMAGE, "runtime")
        yield made
    finally:
        made.close()


@pytest.fixture
def figure(capsys: pytest.CaptureFixture[str]) -> Figure:
    """Prints one: what, how much it is, and how much it may be."""

    def show(what: str, found: float, most: float) -> None:
        with capsys.disabled():
            print(f"\n{'ok   ' if found <= most else 'short'} {what}: {found:.2f} (at most {most:g})")

    return show


def doubling(width: int) -> hg.Graph:
    """A product with the identity, and one more; as a step of a loop it counts."""
    g = hg.Graph()
    x = g.input("x", (width, width), "f32")
    g.output("y", x @ g.weight("w", np.eye(width, dtype=np.float32)) + 1.0)
    return g


def ones(width: int) -> np.ndarray:
    return np.ones((width, width), np.float32)


def test_the_image_is_small(engine: Engine, figure: Figure) -> None:
    above = engine.image_bytes(IMAGE) - engine.image_bytes(BASE)
    figure("deploy-image: MB above the base", above / 1e6, MOST_MEGABYTES)
    assert above < MOST_MEGABYTES * 1e6


def test_a_container_serves_soon(engine: Engine, figure: Figure) -> None:
    took = []
    for _ in range(STARTS):
        begun = time.perf_counter()
        with engine.running() as one:
            wait_until_serving(one.url, SECONDS)
            took.append(time.perf_counter() - begun)
            assert "compiling the CPU kernels" not in one.log
    figure("deploy-start: s from `docker run` to SERVING, median", statistics.median(took), MOST_SECONDS)


def test_the_health_check_turns_healthy_and_a_stop_is_an_end_with_zero(engine: Engine) -> None:
    with engine.running() as one:
        one.until("Health", "healthy")
        engine.docker("stop", "--time", "30", one.name)
        assert one.state["ExitCode"] == 0, one.log


def test_the_health_check_turns_unhealthy_when_the_daemon_says_nothing(engine: Engine) -> None:
    quickly = ("--health-interval", "1s", "--health-timeout", "2s", "--health-retries", "1")
    with engine.running(*quickly, "--health-start-period", "0s") as one:
        one.until("Health", "healthy")
        engine.docker("kill", "--signal", "STOP", one.name)
        one.until("Health", "unhealthy")
        engine.docker("kill", "--signal", "CONT", one.name)
        one.until("Health", "healthy")


def test_the_daemon_is_nobody_and_can_write_nowhere(engine: Engine) -> None:
    with engine.running() as one, one.connect() as session:
        assert session.compile(doubling(8)).run(x=ones(8))["y"][0, 0] == 2
        assert one.execute("id", "-u").strip() == "10001"
        for folder in ("/", "/opt/heliograph", "/tmp", "/opt/heliograph/lib"):
            assert "touch:" in one.execute("touch", f"{folder}/x", check=False)
        assert one.execute("ls", "/tmp", "/dev/shm").split() == ["/dev/shm:", "/tmp:"]
        assert "CapEff:\t0000000000000000" in one.execute("cat", "/proc/1/status")


def test_no_other_host_is_served_before_it_is_said_how(engine: Engine) -> None:
    with engine.running(serve=()) as one:
        one.until("Status", "exited")
        assert one.state["ExitCode"] == 1 and "--insecure" in one.log


def test_a_stop_lets_running_work_end(engine: Engine) -> None:
    with engine.running() as one, one.connect() as session:
        plan = session.compile(doubling(WIDTH))
        loop = plan.loop(x=ones(WIDTH), steps=STEPS, carry={"y": "x"}, taps=["y"])
        first = next(loop.taps())
        stopping = threading.Thread(target=engine.docker, args=("stop", "--time", "60", one.name))
        stopping.start()
        try:
            assert first.step == 0
            assert loop.result(timeout=SECONDS)["y"][0, 0] == STEPS + 1
        finally:
            stopping.join()
        assert one.state["ExitCode"] == 0 and "draining" in one.log


def filled(session: hg.Session) -> int:
    """Puts tensors of 32 MiB there until it has no room; the bytes that it had room for."""
    held = []
    with pytest.raises(hg.HeliographError) as caught:
        for _ in range(MOST_TENSORS):
            tensor = session.put(np.random.default_rng(0).random(2**23, np.float32))
            # A refusal comes with the first result that is waited for.
            tensor[:1].get()
            held.append(tensor)
    if isinstance(caught.value, hg.errors.ConnectionError):
        return LOST
    assert isinstance(caught.value, hg.OutOfMemoryError), caught.value
    return sum(tensor.nbytes for tensor in held)


def test_a_container_that_is_full_says_so(engine: Engine) -> None:
    with engine.running("--memory", "1g") as one:
        with one.connect() as session:
            assert filled(session) > 400 * 2**20
        with one.connect() as session:
            assert session.compile(doubling(8)).run(x=ones(8))["y"][0, 0] == 2
        assert one.state["Status"] == "running"


def test_a_container_that_is_killed_for_memory_is_noticed_and_others_live(engine: Engine) -> None:
    small = ("--memory", "320m", "--memory-swap", "320m")
    with (
        engine.running(*small, serve=("--insecure", "--device", "cpu:memory=4GiB")) as promised,
        engine.running() as other,
        other.connect() as there,
        promised.connect() as here,
    ):
        assert filled(here) == LOST
        promised.until("Status", "exited")
        assert promised.state["OOMKilled"] and promised.state["ExitCode"] == 137
        assert there.compile(doubling(8)).run(x=ones(8))["y"][0, 0] == 2


@pytest.fixture
def pool(engine: Engine) -> Iterator[tuple[Container, Container]]:
    """A head and a member, on a network that leads nowhere."""
    engine.docker("network", "create", "--internal", "members")
    try:
        with engine.running("--network", "members", "--network-alias", "left") as member:
            wait_until_serving(member.url, SECONDS)
            serve = ("--insecure", "--pool", "static:left=left:7070")
            with engine.running("--network", "members", serve=serve) as head:
                yield head, member
    finally:
        engine.docker("network", "rm", "members")


def test_a_member_that_is_killed_is_named_and_its_head_lives(
    engine: Engine, pool: tuple[Container, Container]
) -> None:
    head, member = pool
    with head.connect() as session:
        with session.watch() as watch:
            while len(session.devices) < 2:
                assert watch.next(timeout=SECONDS)
        there = session.compile(doubling(8), ["left/cpu0"])
        either = session.compile(doubling(8), ["left/cpu0", "cpu0"], on_loss="rebuild")
        assert there.run(x=ones(8))["y"][0, 0] == either.run(x=ones(8))["y"][0, 0] == 2
        engine.docker("kill", member.name)
        with pytest.raises(hg.MemberLostError, match="left"):
            for _ in range(1000):
                there.run(x=ones(8), timeout=SECONDS)
        assert either.run(x=ones(8), timeout=SECONDS)["y"][0, 0] == 2
        assert head.state["Status"] == "running"


def test_a_client_of_another_make_lists_devices_and_asks_for_health(engine: Engine) -> None:
    if not BUF.exists():
        pytest.skip("no buf: npm could not install it")
    call = [str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc"]
    with engine.running() as one:
        wait_until_serving(one.url, SECONDS)
        url = one.url.replace("grpc://", "http://")
        assert "heliograph.v1.DeviceService/ListDevices" in engine.told(*call, "--list-methods", url)
        assert '"cpu0"' in engine.told(*call, "-d", "{}", f"{url}/heliograph.v1.DeviceService/ListDevices")
        assert '"SERVING"' in engine.told(*call, "-d", "{}", f"{url}/grpc.health.v1.Health/Check")


PROMETHEUS = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: heliograph
    static_configs: [{targets: ["%s:9464"]}]
"""


def test_prometheus_scrapes_a_container(engine: Engine, tmp_path: Path) -> None:
    command = shutil.which("prometheus")
    if command is None:
        pytest.skip("no prometheus command: install prometheus")
    serve = ("--insecure", "--metrics-listen", "0.0.0.0:9464")
    with engine.running(serve=serve) as one, one.connect() as session:
        session.compile(doubling(8)).run(x=ones(8))
        (tmp_path / "prometheus.yml").write_text(PROMETHEUS % one.address)
        data = f"--storage.tsdb.path={tmp_path / 'data'}"
        listen = "--web.listen-address=127.0.0.1:9090"
        with process(command, f"--config.file={tmp_path / 'prometheus.yml'}", data, listen):
            assert until_told("up") == 1
            assert until_told("heliograph_sessions") == 1


@contextmanager
def process(*command: str) -> Iterator[None]:
    """One that runs meanwhile, and is ended."""
    with open(os.devnull, "wb") as nowhere:
        started = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        yield
    finally:
        started.terminate()
        started.wait(SECONDS)


def until_told(name: str) -> float:
    """The sum over a metric that Prometheus has, once it has one of it."""
    for _ in tries(SECONDS):
        try:
            with urlopen(f"http://127.0.0.1:9090/api/v1/query?query=sum({name})", timeout=SECONDS) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            continue  # it is starting
        if found:
            return float(found[0]["value"][1])
    raise AssertionError(f"Prometheus has no {name}")


@pytest.fixture
def compose() -> str:
    """The command docker-compose."""
    found = shutil.which("docker-compose")
    if found is None:
        pytest.skip("no docker-compose command: install docker-compose")
    return found


def until_client_ends(engine: Engine, compose: str, file: str, project: str) -> str:
    """The output of the containers of a compose file, until its client ends well."""
    command = [compose, "--file", file, "--project-name", project]
    try:
        return engine.told(
            *command, "up", "--no-build", "--no-color", "--exit-code-from", "client", both=True
        )
    finally:
        engine.told(*command, "down", "--timeout", "40")


def test_the_demo_of_the_compose_file_succeeds(
    engine: Engine, compose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.build(DEMO_IMAGE, "demo")
    said = until_client_ends(engine, compose, COMPOSE, "shown")
    assert "the same bits as in one process" in said
    with capsys.disabled():
        print("\n" + "\n".join(line for line in said.splitlines() if line.startswith("client")))


@pytest.mark.long
def test_a_client_of_the_open_inference_protocol_gets_scores_from_a_container(
    engine: Engine, compose: str
) -> None:
    engine.build(KSERVE_IMAGE, "runtime", "kserve")
    said = until_client_ends(engine, compose, KSERVE_COMPOSE, "served")
    assert "scores: [36.0, 36.0, 36.0, 36.0]" in said
