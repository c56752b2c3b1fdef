"""Layers of models of images, and rows in order, on a GPU: our kernels beside the definition on
CuPy, which has no cuDNN either, and beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gpu_common
from figures import Figure
from gpu_common import Call, MissingError, gpu, in_turns, planned
from image_layers import Layer, convolutions, others

from heliograph_backends.cuda import CudaDevice
from heliograph_backends.reference import define
from heliograph_proto.graph import LeafKind

#: Never slower than the definition, and at most this many times PyTorch's time, which has cuDNN.
DEFINITION_BAR, TORCH_BAR = 1.0, 2.0
IMAGES = (1, 32)
NAMES = {"f32": "float32", "f16": "float16"}


def figures() -> Iterator[Figure]:
    """Milliseconds a convolution of ResNet50 and MobileNet."""
    for images in IMAGES:
        for name in NAMES:
            for layer in convolutions(images):
                yield from _beside("gpu-convolutions", layer, name)


def rows() -> Iterator[Figure]:
    """Milliseconds of windows, places and rows in order."""
    for images in IMAGES:
        for layer in others(images):
            yield from _beside("gpu-rows", layer, "f32")


def _beside(figure: str, layer: Layer, name: str) -> Iterator[Figure]:
    leaves = [(LeafKind.INPUT, type) for type in layer.types(name)]
    nodes = [(layer.op, tuple(range(len(leaves))), layer.attributes)]
    where = f"{figure}/{layer.name}-{name}-{layer.images}"
    with gpu() as device, planned(device, leaves, nodes) as ours:
        medians = [seconds * 1e3 for seconds in in_turns(ours.run, _definition(device, ours))]
        yield Figure(where, *medians, DEFINITION_BAR, "ms", "the definition", ours.plan.note)
        try:
            peer = _torch(layer, name)
        except MissingError:
            return
        if peer is not None:
            medians = [seconds * 1e3 for seconds in in_turns(ours.run, peer)]
            yield Figure(f"{where}-torch", *medians, TORCH_BAR, "ms", "PyTorch")


def _definition(device: CudaDevice, ours: gpu_common.Planned) -> Call:
    """Return the definition of a plan's node on CuPy, to the end."""
    node = ours.plan.graph.nodes[0]
    kernel = define(
        node.op, node.attributes, device.driver.xp, operands=[one.type.dtype for one in ours.tensors],
        result=node.type.dtype,
    )  # fmt: skip

    def run() -> None:
        with device.queue() as queue:
            kernel(*(one.array for one in ours.tensors), ours.output.array)
            device.settle(queue)

    return run


def _torch(layer: Layer, name: str) -> Call | None:
    """Return PyTorch's call of a layer, to the end; None if it takes more than one call."""
    library = gpu_common.torch()
    library.backends.cudnn.allow_tf32 = False
    made = PEERS.get(layer.op)
    if made is None:
        return None
    dtype = getattr(library, NAMES[name])
    values = [library.randn(*shape, device="cuda", dtype=dtype) for shape in layer.shapes]

    def run() -> None:
        with library.no_grad():
            made(library, layer.attributes, *values)
        library.cuda.synchronize()

    return run


def _convolved(library: Any, attributes: dict[str, Any], kernel: Any, data: Any) -> Any:
    return library.nn.functional.conv2d(data, kernel, **attributes)


def _pooled(library: Any, attributes: dict[str, Any], x: Any) -> Any:
    functional, own = library.nn.functional, dict(attributes)
    kernel, average = own.pop("kernel"), own.pop("average", False)
    return (functional.avg_pool2d if average else functional.max_pool2d)(x, kernel, **own)


PEERS: dict[str, Callable[..., Any]] = {
    "conv_2d": _convolved,
    "conv_transpose_2d": lambda t, own, kernel, data: t.nn.functional.conv_transpose2d(
        data, kernel, stride=own["stride"]
    ),
    "pool_2d": _pooled,
    "group_norm": lambda t, own, x: t.nn.functional.group_norm(x, own["groups"]),
    "upscale": lambda t, own, x: t.nn.functional.interpolate(x, own["shape"][2:], mode="bilinear"),
    "pad": lambda t, own, x: t.nn.functional.pad(x, (1, 1, 1, 1)),
    "top_k": lambda t, own, x: t.topk(x, own["k"]),
    "argsort": lambda t, own, x: t.argsort(x),
    "argmax": lambda t, own, x: t.argmax(x, -1),
    "cumsum": lambda t, own, x: t.cumsum(x, -1),
}
