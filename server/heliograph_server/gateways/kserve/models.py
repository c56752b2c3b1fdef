"""A loaded version of a model: its session, its plans, its inputs and outputs.

A model runs in a session of its own, as a client's would, so that one that fails or is unloaded
takes nothing of another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import heliograph as hg
from heliograph.llm.architectures import ENCODERS
from heliograph_server.gateways.kserve import prompts
from heliograph_server.gateways.kserve.repository import DEFAULT_ROWS, FILES, ModelSettings, platform_of
from heliograph_server.gateways.kserve.tensors import (
    ANY,
    BYTES,
    DATATYPES,
    Array,
    TensorPort,
    datatype_of,
    numpy_of,
)
from heliograph_server.gateways.kserve.writers import Writer
from heliograph_server.inprocess.sessions import ModelSessions

#: The most time of one compile, and of one run.
COMPILE_SECONDS = 600.0
RUN_SECONDS = 600.0
#: The most texts of a run of a language model that embeds, unless settings name another number.
MOST_TEXTS = 16
#: The size that stands for any where the shapes of a model's outputs are looked at.
PROBED = 8
#: The protocol's data types by ONNX's names.
_ONNX = {f"tensor({name.lower()})": name for name in DATATYPES} | {
    "tensor(float)": "FP32", "tensor(double)": "FP64", "tensor(float16)": "FP16", "tensor(bfloat16)": "BF16",
}  # fmt: skip

Run: TypeAlias = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class ModelPorts:
    """The inputs and outputs of a model. With a batch, it is dimension 0 of all of them."""

    platform: str
    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    #: The most rows of a run; 0: there is no batch.
    most_rows: int = 0

    @property
    def file(self) -> str:
        """The name of a version's file."""
        return FILES[self.platform]


class OpenedModel:
    """A version of a model in its session. Thread-safe."""

    def __init__(self, session: hg.Session, ports: ModelPorts, run: Run) -> None:
        self._session, self._run = session, run
        self.ports = ports

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run it, and return its outputs by name. Raises the errors of the run."""
        try:
            return self._run(feeds)
        except hg.ConnectionError as error:
            raise hg.UnavailableError(
                f"the model's session has ended: {error.message}", advice="load the model again"
            ) from None

    @property
    def is_lost(self) -> bool:
        """True if its session has ended."""
        return self._session.closed

    def close(self) -> None:
        """End its session. Blocks for as long as its work needs."""
        self._session.close()


class WritingModel:
    """A version of a language model that writes. Thread-safe."""

    ports = ModelPorts("gguf", prompts.INPUTS, prompts.OUTPUTS)

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.close = writer.close

    @property
    def is_lost(self) -> bool:
        """True if its session has ended."""
        return self.writer.is_lost


AnyModel: TypeAlias = OpenedModel | WritingModel


def open_model(sessions: ModelSessions, path: Path, settings: ModelSettings) -> AnyModel:
    """Load a version of a model into a session, and warm it up. Blocks.

    Raises InvalidModelError, UnsupportedError, and the errors of `session.compile`.
    """
    platform = platform_of(path)
    if platform == "gguf":
        _check_text_settings(settings)
        if _task(path, settings) == "generate":
            return WritingModel(Writer(sessions, path, settings))
    elif settings.task or settings.context or settings.cache_tokens or settings.activations:
        raise hg.InvalidModelError(
            "task, context, cache_tokens and activations are settings of language models"
        )
    openers = {"onnx": _onnx, "hgraph": _hgraph, "gguf": _embedding}
    session = sessions.open()
    try:
        model = OpenedModel(session, *openers[platform](session, path, settings))
        for feeds in _warming(model.ports, settings):
            model.run(feeds)
    except BaseException:
        session.close()
        raise
    return model


def _check_text_settings(settings: ModelSettings) -> None:
    if settings.sequences:
        raise hg.InvalidModelError("a language model has no sequences", advice="leave sequences out")
    if settings.warm_up:
        raise hg.InvalidModelError("a language model has no shapes to warm up", advice="leave warm_up out")


def _task(path: Path, settings: ModelSettings) -> str:
    """Return what a language model is for: an encoder, or one whose file says how it pools, embeds."""
    header = hg.llm.read_header(path)
    embeds = header.architecture in ENCODERS
    if embeds and settings.task == "generate":
        raise hg.InvalidModelError(f"a model of the architecture {header.architecture!r} writes no text")
    pools = f"{header.architecture}.pooling_type" in header.metadata
    return settings.task or ("embed" if embeds or pools else "generate")


def _embedding(session: hg.Session, path: Path, settings: ModelSettings) -> tuple[ModelPorts, Run]:
    options = {"timeout": COMPILE_SECONDS, **settings.loading}
    model = hg.llm.load(session, path, **options)
    # One computes the texts of a run at a time.
    turn = threading.Lock()
    most = MOST_TEXTS if settings.max_batch_size is None else settings.max_batch_size or 1
    texts = TensorPort("text", BYTES, (ANY,))
    vectors = TensorPort("embedding", "FP32", (ANY, model.config.width))

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        given = [prompts.text_of_bytes(one) for one in feeds["text"]]
        with turn:
            return {"embedding": model.embed(given)}

    return ModelPorts("gguf", (texts,), (vectors,), most), run


def _onnx(session: hg.Session, path: Path, settings: ModelSettings) -> tuple[ModelPorts, Run]:
    if settings.sequences:
        raise _no_state()
    model = hg.onnx.load(path)
    ports = ModelPorts(
        "onnx",
        tuple(_port_of(one, "input") for one in model.inputs),
        tuple(_port_of(one, "output") for one in model.outputs),
    )
    options: dict[str, Any] = {"devices": list(settings.devices) or None, "timeout": COMPILE_SECONDS}
    why = _why_no_batch(model)
    if settings.max_batch_size and why:
        raise hg.InvalidModelError(
            f"requests for the model cannot share runs: {why}", advice="max_batch_size = 0 in model.toml"
        )
    most = 0 if why else DEFAULT_ROWS if settings.max_batch_size is None else settings.max_batch_size
    if most:
        plan = model.compile(session, batch=settings.sizes(most), **options)
    else:
        plan = model.compile(session, **options)
    return replace(ports, most_rows=most), lambda feeds: plan.run(feeds, timeout=RUN_SECONDS)


def _no_state() -> hg.InvalidModelError:
    return hg.InvalidModelError(
        "the model has no variables, so there is no state of sequences",
        advice="leave sequences out of model.toml, or save a graph with variables",
    )


def _port_of(argument: hg.onnx.Argument, kind: str) -> TensorPort:
    """The port of an argument of an ONNX model. Raises UnsupportedError."""
    if argument.type not in _ONNX:
        raise hg.UnsupportedError(
            f"{kind} {argument.name!r:.80} is {argument.type}, and the server has no models with such"
        )
    shape = tuple(size if isinstance(size, int) else ANY for size in argument.shape)
    return TensorPort(argument.name, _ONNX[argument.type], shape)


def _why_no_batch(model: hg.onnx.Model) -> str:
    """Return why requests cannot share runs; "" if they can: dimension 0 of every input is one
    symbol, and of every output as many rows."""
    firsts = {one.shape[0] if one.shape else None for one in model.inputs}
    symbol = next(iter(firsts), None)
    if len(firsts) != 1 or not isinstance(symbol, str):
        return "dimension 0 of its inputs is not one symbol"
    others = {size for one in model.inputs for size in one.shape[1:] if isinstance(size, str)}
    if symbol in others or any(size is None for one in model.inputs for size in one.shape):
        return "its shapes are not known"
    try:
        for rows in (PROBED + 1, PROBED + 2):
            graph = model.graph({symbol: rows, **dict.fromkeys(others, PROBED)})
            for name, value in graph.outputs.items():
                if not value.shape or value.shape[0] != rows:
                    return f"dimension 0 of its output {name!r:.80} is no batch"
    except (hg.UnsupportedError, hg.InvalidArgumentError, hg.InvalidModelError) as error:
        return error.message
    return ""


def _hgraph(session: hg.Session, path: Path, settings: ModelSettings) -> tuple[ModelPorts, Run]:
    plan = session.compile(hg.load(path), list(settings.devices) or None, timeout=COMPILE_SECONDS)
    if settings.sequences and not plan.variables:
        raise _no_state()
    ports = ModelPorts("hgraph", _ports_of(plan.inputs, "input"), _ports_of(plan.outputs, "output"))
    most = settings.max_batch_size or 0
    if not most:
        return ports, lambda feeds: plan.run(feeds, timeout=RUN_SECONDS)
    for one in (*ports.inputs, *ports.outputs):
        if not one.shape or one.shape[0] != most:
            raise hg.InvalidModelError(
                f"{one}, so its dimension 0 is no batch of {most}",
                advice="max_batch_size in model.toml is dimension 0 of all inputs and outputs, or 0",
            )
    ports = ModelPorts("hgraph", _with_batch(ports.inputs), _with_batch(ports.outputs), most)

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        rows = len(next(iter(feeds.values())))
        padded = {name: _padded(feed, most) for name, feed in feeds.items()}
        return {name: one[:rows] for name, one in plan.run(padded, timeout=RUN_SECONDS).items()}

    return ports, run


def _ports_of(types: Mapping[str, hg.TensorType], kind: str) -> tuple[TensorPort, ...]:
    """The ports of a plan. Raises UnsupportedError."""
    found = []
    for name, type_ in types.items():
        if not (datatype := datatype_of(type_.dtype.name)):
            raise hg.UnsupportedError(f"{kind} {name!r:.80} is {type_}, which the protocol lacks")
        found.append(TensorPort(name, datatype, type_.shape))
    return tuple(found)


def _with_batch(ports: tuple[TensorPort, ...]) -> tuple[TensorPort, ...]:
    return tuple(replace(one, shape=(ANY, *one.shape[1:])) for one in ports)


def _padded(feed: Array, rows: int) -> Array:
    if len(feed) == rows:
        return feed
    return np.concatenate([feed, np.broadcast_to(feed[-1:], (rows - len(feed), *feed.shape[1:]))])


def _warming(ports: ModelPorts, settings: ModelSettings) -> list[dict[str, Array]]:
    """Zeros for the runs that make the plans before the first request; none where a shape is not
    known. Raises InvalidModelError for shapes that do not fit."""
    names = {port.name for port in ports.inputs}
    if unknown := sorted(settings.warm_up.keys() - names):
        raise hg.InvalidModelError(f"warm_up names {unknown[0]!r:.80}, which is no input of the model")
    shapes: dict[str, tuple[int, ...]] = {}
    for port in ports.inputs:
        declared = port.shape[1:] if ports.most_rows else port.shape
        shape = settings.warm_up.get(port.name, declared)
        if len(shape) != len(declared) or any(
            want not in (ANY, have) for want, have in zip(declared, shape, strict=True)
        ):
            raise hg.InvalidModelError(f"warm_up has {list(shape)} for a row, and input {port}")
        shapes[port.name] = shape
    is_known = not any(ANY in shape for shape in shapes.values())
    if not shapes or not is_known or ports.platform == "gguf":
        return []
    kinds = {port.name: numpy_of(port.datatype) for port in ports.inputs}
    batches: list[tuple[int, ...]] = [(rows,) for rows in settings.sizes(ports.most_rows)] or [()]
    return [
        {name: np.zeros((*batch, *shape), kinds[name]) for name, shape in shapes.items()} for batch in batches
    ]
