"""`hg.onnx`: ONNX models as graphs.

    model = hg.onnx.load("model.onnx")
    with hg.connect("grpc://127.0.0.1:7070") as session:
        plan = model.compile(session, shapes={"batch": 8})
        y = plan.run(x=array)["y"]

`supported` lists what a model needs and Heliograph lacks. `InferenceSession` has the signature of
onnxruntime's. The first use imports the package onnx: `pip install 'heliograph[onnx]'`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from heliograph import ConfigurationError

if TYPE_CHECKING:
    from heliograph.onnx.inference_session import (
        ExecutionMode,
        GraphOptimizationLevel,
        InferenceSession,
        ModelMetadata,
        SessionOptions,
        get_available_providers,
    )
    from heliograph.onnx.model import Argument, Model, load
    from heliograph.onnx.plans import OnnxPlan
    from heliograph.onnx.support import Missing, supported

__all__ = [
    "Argument",
    "ExecutionMode",
    "GraphOptimizationLevel",
    "InferenceSession",
    "Missing",
    "Model",
    "ModelMetadata",
    "OnnxPlan",
    "SessionOptions",
    "get_available_providers",
    "load",
    "supported",
]

_MODULES = {
    **dict.fromkeys(__all__, "inference_session"),
    **dict.fromkeys(("Argument", "Model", "load"), "model"),
    **dict.fromkeys(("Missing", "supported"), "support"),
    "OnnxPlan": "plans",
}


def __getattr__(name: str) -> object:
    """Import a name on first use. Raises ConfigurationError without the extra's packages."""
    if name not in _MODULES:
        raise AttributeError(f"module 'heliograph.onnx' has no attribute {name!r}", name=name, obj=None)
    try:
        module = importlib.import_module(f"heliograph.onnx.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "ml_dtypes"):
            raise
        raise ConfigurationError(
            f"the package {error.name!r} is not installed", advice="pip install 'heliograph[onnx]'"
        ) from None
    found = getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
