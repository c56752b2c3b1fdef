"""`hg.onnx`: ONNX models as graphs.

    model = hg.onnx.load("model.onnx")
    with hg.connect("grpc://127.0.0.1:7070") as session:
        plan = model.compile(session, shapes={"batch": 8})
        y = plan.run(x=array)["y"]

`supported` lists what a model needs and Heliograph lacks. `InferenceSession` has the signature of
onnxruntime's. The first use imports the package onnx: `pip install 'heliograph[onnx]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph.lowerings.importers import lazy_names

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
__getattr__ = lazy_names("heliograph.onnx", _MODULES, ("onnx", "ml_dtypes"), "pip install 'heliograph[onnx]'")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
