"""Served ONNX models, timed at Triton's own client: MiniLM beside our own client and beside the plan
of a full batch; MiniLM, a BERT and a ResNet beside onnxruntime behind a server of grpc.aio.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as by_grpc
import tritonclient.grpc.aio as by_grpc_aio
from convolution_models import Net, resnet18
from figures import Figure, paired_medians, seconds_of, shared
from minilm import threads
from peer_bare import ECHO
from peer_process import PEER_PYTHON, PeerProcess
from tritonclient.utils import np_to_triton_dtype

import heliograph as hg
from heliograph.demo import find_model
from heliograph.testing import serving

TOKENS = 16
#: The most of our own client's time; of the time of full batches; of the peer's time and p99.
OWN_BAR, BATCH_BAR, PEER_BAR = 1.15, 1 / 0.85, 1.0
#: Turns of one client, short ones so that both meet the same load.
TURNS, RUNS_OF_TURN = 40, 5
#: The kinds of servers that do nothing but run the plan.
BARE = {"aio": "grpc.aio", "threads": "gRPC's threads"}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A model, and its clients."""

    name: str
    #: Writes the model.
    write: Callable[[Path], None]
    #: The inputs of so many rows.
    feeds: Callable[[int], dict[str, Array]]
    #: Clients that send one request after the other; as many rows are the largest plan.
    clients: int
    requests: int
    rounds: int

    def inputs(self) -> list[by_grpc.InferInput]:
        """The inputs of a request of one row."""
        found = []
        for name, array in self.feeds(1).items():
            datatype = np_to_triton_dtype(array.dtype)
            found.append(by_grpc.InferInput(name, list(array.shape), datatype))
            found[-1].set_data_from_numpy(array)
        return found


def exported(folder: str | Path) -> Callable[[Path], None]:
    """A model that the peer's interpreter writes."""

    def write(path: Path) -> None:
        PeerProcess("peer_kserve.py", "export", folder, path, python=PEER_PYTHON).close()

    return write


def write_resnet(path: Path) -> None:
    made = Net().model(resnet18, ["batch", 3, 224, 224])
    shape = made.graph.output[0].type.tensor_type.shape
    shape.dim.add().dim_param = "batch"
    shape.dim.add().dim_value = 1000
    path.write_bytes(made.SerializeToString())


def tokens(rows: int) -> dict[str, Array]:
    ids = np.random.default_rng(rows).integers(1000, 20000, (rows, TOKENS))
    return {"ids": ids.astype(np.int64), "mask": np.ones((rows, TOKENS), np.int64)}


def images(rows: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, 3, 224, 224), np.float32)}


MINILM = Case("minilm", lambda path: exported(find_model())(path), tokens, 32, 8, 5)
OTHERS = (
    Case("bert", exported("-"), tokens, 16, 8, 3),
    Case("resnet18", write_resnet, images, 8, 16, 3),
)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, str, int]]:
    """A daemon that serves a folder: its URL, the address of Triton's clients, and its process."""
    command = [
        sys.executable,
        "-m",
        "heliograph.cli",
        "serve",
        "--listen",
        "grpc://127.0.0.1:0",
        "--models",
        str(folder),
    ]
    command += ["--kserve", "127.0.0.1:0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with serving(process) as url:
        assert process.stdout is not None
        address = process.stdout.readline().split("://")[1].strip()
        client = by_grpc.InferenceServerClient(address)
        end = time.monotonic() + 120
        while not client.is_server_ready():
            assert time.monotonic() < end, "the model is not loaded"
            time.sleep(0.1)
        client.close()
        yield url, address, process.pid


def crowd(address: str, case: Case) -> list[float]:
    """The seconds of each request of clients that send one after the other."""
    inputs, seconds = case.inputs(), list[float]()

    async def client(triton: Any) -> None:
        for _ in range(case.requests):
            start = time.perf_counter()
            await triton.infer(case.name, inputs)
            seconds.append(time.perf_counter() - start)

    async def run() -> None:
        async with by_grpc_aio.InferenceServerClient(address) as triton:
            await asyncio.gather(*(client(triton) for _ in range(case.clients)))

    asyncio.run(run())
    return seconds


@dataclass(frozen=True)
class Turn:
    """A turn of a crowd, in seconds."""

    #: Of a request, over the clients.
    row: float
    #: The 99th percentile of requests.
    p99: float
    #: The server's processors, for a request.
    cpu: float


def turn(address: str, case: Case, server: int) -> Turn:
    """A turn of a crowd at a server, whose process has this number."""
    times = psutil.Process(server).cpu_times
    before, start = times(), time.perf_counter()
    seconds = crowd(address, case)
    took, after = time.perf_counter() - start, times()
    cpu = after.user + after.system - before.user - before.system
    return Turn(took / len(seconds), float(np.percentile(seconds, 99)), cpu / len(seconds))


@dataclass(frozen=True)
class Servers:
    """A daemon and the peer that serve a model."""

    #: Of our own client.
    url: str
    #: The addresses of Triton's clients, and the processes: the daemon's and the peer's.
    addresses: tuple[str, str]
    processes: tuple[int, int]
    path: Path

    def turns(self, case: Case, between: Callable[[], None] = lambda: None) -> tuple[list[Turn], list[Turn]]:
        """Crowds at both in turns, after one that warms up; `between` is called in each round."""
        found: tuple[list[Turn], list[Turn]] = ([], [])
        for number in range(shared(case.rounds) + 1):
            pairs = zip(self.addresses, self.processes, found, strict=True)
            for address, process, results in pairs:
                one = turn(address, case, process)
                if number:
                    results.append(one)
            between()
        return found


@contextmanager
def both(case: Case) -> Iterator[Servers]:
    """A daemon and the peer that serve a model."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, case.name, "1", "model.onnx")
        path.parent.mkdir(parents=True)
        case.write(path)
        # As many threads as the daemon's CPU device has.
        with (
            served(Path(name)) as (url, address, process),
            PeerProcess("peer_kserve.py", "serve", path, threads(), python=PEER_PYTHON) as peer,
        ):
            addresses = address, f"127.0.0.1:{peer.ready}"
            yield Servers(url, addresses, (process, peer.pid), path)


def figures() -> Iterator[Figure]:
    """One client, and many."""
    with both(MINILM) as servers, hg.connect(servers.url) as session:
        plan = hg.onnx.load(servers.path).compile(session, batch=(1, MINILM.clients))
        yield _alone(MINILM, plan, servers)
        full, batches = MINILM.feeds(MINILM.clients), list[float]()
        found = servers.turns(MINILM, lambda: batches.extend(seconds_of(lambda: plan.run(full), 5)))
        row, batch = median(one.row for one in found[0]), median(batches) / MINILM.clients
        against, note = f"runs of {MINILM.clients} in a row", f"{MINILM.clients} clients"
        yield Figure("kserve/clients-full", row * 1e3, batch * 1e3, BATCH_BAR, "ms", against, note)
        yield from _beside(MINILM, found)
    for case in OTHERS:
        with both(case) as servers:
            yield from _beside(case, servers.turns(case))


def _alone(case: Case, plan: hg.onnx.OnnxPlan, servers: Servers) -> Figure:
    feeds, inputs = case.feeds(1), case.inputs()

    def beside_own(address: str, request_id: str = "") -> tuple[float, float]:
        """The seconds of a request at a server, and of our own client's run in turns with it."""
        with by_grpc.InferenceServerClient(address) as triton:
            mine = triton.infer(case.name, inputs).as_numpy("y")
            np.testing.assert_array_equal(mine, plan.run(feeds)["y"])
            return paired_medians(
                lambda runs: seconds_of(lambda: triton.infer(case.name, inputs, request_id=request_id), runs),
                lambda runs: seconds_of(lambda: plan.run(feeds), runs),
                TURNS,
                RUNS_OF_TURN,
            )

    ours, own = beside_own(servers.addresses[0])
    floors = []
    for kind, named in BARE.items():
        with PeerProcess("peer_bare.py", kind, servers.path) as peer:
            address = f"127.0.0.1:{peer.ready}"
            (bare, its_own), (echo, _) = beside_own(address), beside_own(address, ECHO)
            floors.append(f"{named} {bare / its_own:.2f}, {echo * 1e3:.2f} ms without the plan")
    note = f"of bare servers, {'; '.join(floors)}"
    return Figure("kserve/batch-1", ours * 1e3, own * 1e3, OWN_BAR, "ms", "our own client", note)


def _beside(case: Case, found: tuple[list[Turn], list[Turn]]) -> Iterator[Figure]:
    """The time of a request over the clients, and the 99th percentile."""
    name = "kserve/" + ("" if case is MINILM else f"{case.name}-") + "clients"
    server = "onnxruntime behind grpc.aio"
    cpu = " and ".join(f"{median(one.cpu for one in turns) * 1e3:.3g}" for turns in found)
    note = f"{case.clients} clients; processor time {cpu} ms"
    row, other = (median(one.row for one in turns) * 1e3 for turns in found)
    yield Figure(name, row, other, PEER_BAR, "ms", server, note)
    p99, other = (median(one.p99 for one in turns) * 1e3 for turns in found)
    yield Figure(f"{name}-p99", p99, other, PEER_BAR, "ms", server, f"{case.clients} clients")
