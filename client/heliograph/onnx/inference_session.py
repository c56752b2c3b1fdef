"""`hg.onnx.InferenceSession`: onnxruntime's signature on another machine's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import heliograph as hg
from heliograph.onnx.model import Argument, load


class InferenceSession:
    """A model on a server, with the calls of onnxruntime's class of this name.

    Args:
        path_or_bytes: The model's file, or its bytes.
        sess_options, providers, provider_options: Taken and not used.
        server: The server's URL (default: that of the environment, as for `hg.connect`).
        session: A session to use instead, which stays open.
        compiling: Arguments of `Model.compile`, such as batch and devices.
    """

    def __init__(
        self,
        path_or_bytes: str | Path | bytes,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        *,
        server: str | None = None,
        session: hg.Session | None = None,
        **compiling: Any,
    ) -> None:
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

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """Run the model, and return the outputs of these names in their order; None is all.

        Raises InvalidArgumentError for an unknown output, and the errors of `OnnxPlan.run`.
        """
        known = [one.name for one in self._model.outputs]
        wanted = known if output_names is None else list(output_names)
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
