"""Requests of several of Triton's clients share runs, wait in a bounded queue, and have their turn."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as by_grpc
import tritonclient.grpc.aio as by_grpc_aio
from kserve_folders import ServedModels, add_model, add_perceptron, given, given_http, served
from onnx import ModelProto
from onnx_models import model, node, tensor
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException
from waiting import until

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(17)
#: The sides of the matrices of a run that takes long, and of those that wait for it.
LARGE, SMALL, MOST_WAITING = 1024, 1, 4
SLOW = f"max_batch_size = 0\nmax_queue = {MOST_WAITING}\npriorities = 3\ndefault_priority = 2"
ZEROS = np.zeros((SMALL, SMALL), np.float32)


def slow() -> ModelProto:
    """Products of a square matrix of any size with itself."""
    names = ["x", *(f"x{number}" for number in range(59)), "y"]
    nodes = [node("MatMul", f"{one} {one}", other) for one, other in itertools.pairwise(names)]
    return model(nodes, [tensor("x", ["n", "m"])], [tensor("y", ["n", "m"])])


@dataclass(frozen=True, slots=True)
class Batching:
    """The models, and their metrics."""

    models: ServedModels
    metrics_url: str

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 if there is none."""
        with urllib.request.urlopen(self.metrics_url, timeout=30) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        samples = [one for family in families for one in family.samples if one.name == name]
        return sum(one.value for one in samples if labels.items() <= one.labels.items())

    def waiting(self) -> float:
        """The requests of the slow model whose run has not begun."""
        return self.metric("heliograph_model_requests_waiting", model="slow")

    def begun(self) -> float:
        """The runs of the slow model that have begun, with the present one."""
        return self.metric("heliograph_tenant_runs_in_flight", tenant="kserve")

    @contextmanager
    def busy(self, threads: ThreadPoolExecutor) -> Iterator[None]:
        """The slow model computes a request while this lasts, if it takes no longer."""
        large = np.zeros((LARGE, LARGE), np.float32)
        running = threads.submit(self.models.grpc.infer, "slow", given(large))
        until(lambda: self.begun() == 1 or running.done(), "the run has begun")
        yield
        running.result()


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batching]:
    folder = tmp_path_factory.mktemp("models")
    add_perceptron(folder)
    add_model(folder, "slow", slow(), SLOW)
    # Another process could take a port of 127.0.0.1 that is free now.
    number = os.getpid()
    metrics = f"127.{1 + number // 2**16 % 100}.{number // 2**8 % 2**8}.{number % 2**8}:9464"
    with served(folder, "--device", "cpu:threads=1", "--metrics-listen", metrics) as found:
        yield Batching(found, f"http://{metrics}/metrics")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def counts(batching: Batching, name: str) -> tuple[int, int]:
    """The rows and runs of a model."""
    (found,) = batching.models.grpc.get_inference_statistics(name).model_stats
    return found.inference_count, found.execution_count


def test_clients_share_runs_and_have_the_results_of_runs_of_their_own(batching: Batching) -> None:
    requests = [RNG.normal(size=(rows, 8)).astype(np.float32) for rows in (1, 2, 1, 3, 1, 1) * 8]
    alone = [batching.models.grpc.infer("perceptron", given(x)).as_numpy("y") for x in requests]
    before = counts(batching, "perceptron")

    async def run() -> list[Any]:
        async with by_grpc_aio.InferenceServerClient(batching.models.grpc_url) as client:
            return await asyncio.gather(*(client.infer("perceptron", given(x)) for x in requests))

    for found, wanted in zip(asyncio.run(run()), alone, strict=True):
        np.testing.assert_array_equal(found.as_numpy("y"), wanted)
    rows, runs = (new - old for new, old in zip(counts(batching, "perceptron"), before, strict=True))
    assert rows == sum(map(len, requests))
    assert runs < len(requests)


def test_a_full_queue_refuses_and_answers_the_others(batching: Batching, threads: ThreadPoolExecutor) -> None:
    with batching.busy(threads):
        queued = [
            threads.submit(batching.models.grpc.infer, "slow", given(ZEROS)) for _ in range(MOST_WAITING)
        ]
        until(lambda: batching.waiting() == MOST_WAITING or queued[0].done(), "the queue is full")
        with pytest.raises(InferenceServerException, match="4 requests wait for the model") as refused:
            batching.models.grpc.infer("slow", given(ZEROS))
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    for one in queued:
        np.testing.assert_array_equal(one.result().as_numpy("y"), ZEROS)


def test_an_urgent_request_overtakes_others(batching: Batching, threads: ThreadPoolExecutor) -> None:
    # One stream has the answers in the order in which the server gives them.
    answers: queue.Queue[Any] = queue.Queue()
    with by_grpc.InferenceServerClient(batching.models.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put(error or result.get_response().id))
        with batching.busy(threads):
            for priority in (3, 2, 1):
                client.async_stream_infer("slow", given(ZEROS), request_id=str(priority), priority=priority)
            until(lambda: batching.waiting() == 3 or not answers.empty(), "the requests wait")
            assert answers.empty(), "the run that they wait for ended first"
        assert [answers.get(timeout=60) for _ in range(3)] == ["1", "2", "3"]


def test_a_request_whose_time_is_over_fails_in_the_queue(
    batching: Batching, threads: ThreadPoolExecutor
) -> None:
    with batching.busy(threads):
        with pytest.raises(InferenceServerException, match="did not begin within") as refused:
            batching.models.grpc.infer("slow", given(ZEROS), timeout=1000)
        assert refused.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        with pytest.raises(InferenceServerException, match="did not begin within"):
            batching.models.http.infer("slow", given_http(ZEROS), timeout=1000)
        with pytest.raises(InferenceServerException) as late:
            batching.models.grpc.infer("slow", given(ZEROS), client_timeout=0.001)
        assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    until(lambda: batching.waiting() == 0, "nothing waits")


def test_the_requests_of_a_client_that_leaves_are_forgotten(
    batching: Batching, threads: ThreadPoolExecutor
) -> None:
    async def leave() -> None:
        async with by_grpc_aio.InferenceServerClient(batching.models.grpc_url) as client:
            requests = [asyncio.ensure_future(client.infer("slow", given(ZEROS))) for _ in range(3)]
            await asyncio.to_thread(until, lambda: batching.waiting() == 3, "they wait")
            for one in requests:
                one.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    with batching.busy(threads):
        before = counts(batching, "slow")[1]
        asyncio.run(leave())
        until(lambda: batching.waiting() == 0, "they are forgotten")
    assert counts(batching, "slow")[1] - before == 1


def test_the_requests_of_a_client_that_leaves_by_http_are_forgotten(
    batching: Batching, threads: ThreadPoolExecutor
) -> None:
    url, body = "/v2/models/slow/infer", {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0]}
    with batching.busy(threads):
        before = counts(batching, "slow")[1]
        with ExitStack() as connections:
            for _ in range(3):
                host, _, port = batching.models.http_url.rpartition(":")
                connection = connections.enter_context(closing(HTTPConnection(host, int(port), timeout=30)))
                connection.request("POST", url, json.dumps({"inputs": [body]}))
            until(lambda: batching.waiting() == 3, "they wait")
        until(lambda: batching.waiting() == 0, "they are forgotten")
    assert counts(batching, "slow")[1] - before == 1


def test_metrics_tell_of_each_model(batching: Batching) -> None:
    batching.models.grpc.infer("perceptron", given(np.ones((2, 8), np.float32)))
    rows, runs = counts(batching, "perceptron")
    labels = {"model": "perceptron", "version": "1"}
    assert batching.metric("heliograph_model_batch_rows_sum", **labels) == rows
    assert batching.metric("heliograph_model_batch_rows_count", **labels) == runs
    for phase in ("request", "queue", "input", "compute", "output"):
        assert batching.metric("heliograph_model_seconds_count", phase=phase, **labels) >= runs
    with pytest.raises(InferenceServerException):
        batching.models.grpc.infer("perceptron", given(np.ones((99, 8), np.float32)))
    assert batching.metric("heliograph_model_requests_total", outcome="ok", **labels) >= 1
