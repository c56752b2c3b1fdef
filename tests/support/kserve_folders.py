"""Folders of models for the open inference protocol, and daemons that serve them to its clients."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc as by_grpc
import tritonclient.http as by_http
from forked_daemons import serve
from onnx_models import perceptron
from waiting import until

import heliograph as hg

#: A client by HTTP closes itself again when it is collected, which gevent refuses on another thread
#: than the client's. `served` closes it.
_ByHttp: Any = by_http.InferenceServerClient
_ByHttp.__del__ = lambda _: None

SECONDS = 30.0
ANYWHERE = "127.0.0.1:0"


def add_model(folder: Path, name: str, made: onnx.ModelProto, settings: str = "", version: int = 1) -> None:
    """An ONNX model."""
    place = folder / name / str(version)
    place.mkdir(parents=True)
    onnx.save_model(made, place / "model.onnx")
    if settings:
        (folder / name / "model.toml").write_text(settings)


def add_perceptron(folder: Path, version: int = 1, settings: str = "") -> onnx.ModelProto:
    """Two layers over rows of 8, an ONNX model whose batch may have any size."""
    made = perceptron(seed=version)
    add_model(folder, "perceptron", made, settings, version)
    return made


def add_graph(folder: Path, name: str, graph: hg.Graph, settings: str = "") -> None:
    """A saved graph."""
    place = folder / name / "1"
    place.mkdir(parents=True)
    hg.save(graph, place / "model.hgraph")
    if settings:
        (folder / name / "model.toml").write_text(settings)


def doubling(shape: tuple[int, ...] = (2, 3), dtype: str = "f32") -> hg.Graph:
    """A graph that doubles x."""
    g = hg.Graph()
    x = g.input("x", shape, dtype)
    g.output("y", x + x)
    return g


def summing() -> hg.Graph:
    """A graph that adds up its inputs."""
    g = hg.Graph()
    total = g.variable("total", (2,), "f32")
    g.output("y", hg.assign(total, total + g.input("x", (2,), "f32")))
    return g


@dataclass(frozen=True, slots=True)
class ServedModels:
    """A daemon that serves a folder, and the real clients of the protocol."""

    process: Any
    folder: Path
    #: Of Heliograph's own clients.
    url: str
    grpc_url: str
    http_url: str
    grpc: by_grpc.InferenceServerClient
    http: by_http.InferenceServerClient


@contextmanager
def served(
    folder: Path, *arguments: str, kserve: str = ANYWHERE, kserve_http: str = ANYWHERE, wait: bool = True
) -> Iterator[ServedModels]:
    """A daemon whose models have been loaded, as far as they can be, if it waits."""
    process = serve(
        "--listen", "grpc://127.0.0.1:0", "--models", str(folder), "--kserve", kserve,
        "--kserve-http", kserve_http, *arguments, stdout=subprocess.PIPE,
    )  # fmt: skip
    clients: list[Any] = []
    try:
        url, grpc_url, http_url = (process.stdout.readline().split()[-1] for _ in range(3))
        grpc_url, http_url = grpc_url.partition("://")[2], http_url.partition("://")[2]
        grpc, http = by_grpc.InferenceServerClient(grpc_url), by_http.InferenceServerClient(http_url)
        clients += [grpc, http]
        if wait:
            until(grpc.is_server_ready, "the models are loaded")
        yield ServedModels(process, folder, url, grpc_url, http_url, grpc, http)
    finally:
        for client in clients:
            client.close()
        process.terminate()
        process.wait(SECONDS)
        process.stdout.close()


def given(array: np.ndarray[Any, Any], datatype: str = "FP32", name: str = "x") -> list[by_grpc.InferInput]:
    """An array as the inputs of a request by gRPC."""
    made = by_grpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return [made]


def given_http(
    array: np.ndarray[Any, Any], datatype: str = "FP32", *, binary: bool = True
) -> list[by_http.InferInput]:
    """The same by HTTP."""
    made = by_http.InferInput("x", list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return [made]


def states(client: by_grpc.InferenceServerClient) -> dict[tuple[str, str], str]:
    """The states of models, by name and version."""
    found = client.get_model_repository_index().models
    return {(one.name, one.version): one.state for one in found}
