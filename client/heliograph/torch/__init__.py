"""`hg.torch`: PyTorch's modules as graphs.

    model = hg.torch.export(module, (x,), dynamic={"x": {0: "batch"}})
    with hg.connect("grpc://127.0.0.1:7070") as session:
        plan = model.compile(session)
        y = plan(x)

`torch.compile(module, backend="heliograph")`, or `backend=hg.torch.backend(session)`, runs modules
as they are called. `Trainer` trains a module, whose parameters stay on the server; `AsyncTrainer`
does so in programs of asyncio.
`supported` lists what a module needs and Heliograph lacks. The first use imports torch, which
Heliograph does not install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph.lowerings.importers import lazy_names

if TYPE_CHECKING:
    from heliograph.torch.compiling import backend
    from heliograph.torch.exporting import export
    from heliograph.torch.model import Argument, Model
    from heliograph.torch.plans import TorchPlan
    from heliograph.torch.support import Missing, supported
    from heliograph.torch.training.async_trainer import AsyncTrainer
    from heliograph.torch.training.clipping import Clip
    from heliograph.torch.training.trainer import SentStep, Trainer

__all__ = [
    "Argument",
    "AsyncTrainer",
    "Clip",
    "Missing",
    "Model",
    "SentStep",
    "TorchPlan",
    "Trainer",
    "backend",
    "export",
    "supported",
]

_MODULES = {
    "Argument": "model",
    "AsyncTrainer": "training.async_trainer",
    "Clip": "training.clipping",
    "Missing": "support",
    "Model": "model",
    "SentStep": "training.trainer",
    "TorchPlan": "plans",
    "Trainer": "training.trainer",
    "backend": "compiling",
    "export": "exporting",
    "supported": "support",
}
__getattr__ = lazy_names(
    "heliograph.torch", _MODULES, ("torch",), "install PyTorch: https://pytorch.org/get-started"
)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
