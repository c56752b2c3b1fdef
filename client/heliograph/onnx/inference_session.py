"""`hg.onnx.InferenceSession`: onnxruntime's signature on another machine's devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import heliograph as hg
from heliograph.onnx.checks import Source
from heliograph.onnx.model import Argument, load

#: The only provider: the devices of a server.
PROVIDER = "HeliographExecutionProvider"


class SessionOptions(SimpleNamespace):
    """Options of onnxruntime. Any are taken, and none is used."""

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Take an entry, which is not used."""
        setattr(self, key, value)


class GraphOptimizationLevel(IntEnum):
    """Levels of onnxruntime. They are taken, and not used."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Modes of onnxruntime. They are taken, and not used."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


def get_available_providers() -> list[str]:
    """Return the only provider."""
    return [PROVIDER]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The description of a model, as its file has it."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


class InferenceSession:
    """A model on a server, with the calls of onnxruntime's class of this name.

    Args:
        path_or_bytes: The model's file, its bytes, or an `onnx.ModelProto`.
        sess_options, providers, provider_options: Taken and not used, with a note the first time.
        server: The server's URL (default: that of the environment, as for `hg.connect`).
        session: A session to use instead, which stays open.
        compiling: Arguments of `Model.compile`, such as batch and devices.
    """

    def __init__(
        self,
        path_or_bytes: Source,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        *,
        server: str | None = None,
        session: hg.Session | None = None,
        **compiling: Any,
    ) -> None:
        if any(one is not None for one in (sess_options, providers, provider_options)):
            warnings.warn(
                "sess_options, providers and provider_options are not used: the model runs on the"
                " server's devices, which devices= chooses",
                stacklevel=2,
            )
        self._options = sess_options
        self._model = load(path_or_bytes)
        self._owned = hg.connect(*([] if server is None else [server])) if session is None else None
        used = session if session is not None else self._owned
        assert used is not None
        try:
            self._plan = self._model.compile(used, **compiling)
        except BaseException:
            self.close()
            raise

    def get_inputs(self) -> list[Argument]:
        """Return the inputs: name, type and shape."""
        return list(self._model.inputs)

    def get_outputs(self) -> list[Argument]:
        """Return the outputs: name, type and shape."""
        return list(self._model.outputs)

    def get_overridable_initializers(self) -> list[Argument]:
        """Return an empty list: a run cannot replace constants of the model."""
        return []

    def get_modelmeta(self) -> ModelMetadata:
        """Return the model's description, with the metadata that its exporter wrote."""
        proto = self._model.proto
        return ModelMetadata(
            proto.producer_name,
            proto.graph.name,
            proto.domain,
            proto.doc_string,
            proto.graph.doc_string,
            proto.model_version,
            {one.key: one.value for one in proto.metadata_props},
        )

    def get_session_options(self) -> Any:
        """Return the options that were given."""
        return self._options

    def get_providers(self) -> list[str]:
        """Return the only provider."""
        return get_available_providers()

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of the only provider, which has none."""
        return {PROVIDER: {}}

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """Run the model, and return the outputs of these names in their order; None is all.

        Raises InvalidArgumentError for an unknown output, and the errors of `OnnxPlan.run`.
        """
        known = [one.name for one in self._model.outputs]
        if not isinstance(output_names, str | Iterable | None):
            raise hg.InvalidArgumentError(
                f"the names of outputs are of type {type(output_names).__name__}",
                advice='a list, or None for all: run(["y"], {"x": array})',
            )
        wanted = [output_names] if isinstance(output_names, str) else list(output_names or known)
        if unknown := [name for name in wanted if name not in known]:
            raise hg.InvalidArgumentError(
                f"there is no output {unknown[0]!r:.80}", advice=f"outputs: {', '.join(known):.400}"
            )
        found = self._plan.run(input_feed)
        return [found[name] for name in wanted]

    def close(self) -> None:
        """End the session, unless it was given."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
