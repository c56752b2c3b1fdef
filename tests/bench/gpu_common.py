"""What the benchmarks on a GPU share: a device, plans on it, and times taken in turns with a peer's.

A time is of a call and of waiting for the device, ours and the peer's alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from figures import paired_medians, seconds_of

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor
from heliograph_backends.cuda import CudaBackend, CudaDevice
from heliograph_proto.graph import DIGEST_BYTES, Graph, Leaf, LeafKind, Node, Output, validate
from heliograph_proto.ops.table import infer
from heliograph_proto.sessions import Limits
from heliograph_proto.types import DTYPES, TensorType

ROUNDS, RUNS = 7, 5
#: Of the copy that tells the bandwidth: several times what a GPU's cache holds.
COPY_BYTES = 2 * 2**30

Call = Callable[[], object]


class MissingError(Exception):
    """What a benchmark compares with is not here."""


@contextmanager
def gpu(**parameters: int) -> Iterator[CudaDevice]:
    """The first GPU as a device of ours."""
    backend = CudaBackend([parameters])
    if not backend.devices():
        raise MissingError(backend.why_unavailable())
    device = backend.devices()[0]
    try:
        yield device
    finally:
        device.close()


def torch() -> Any:
    """PyTorch with a GPU. Raises MissingError."""
    try:
        import torch as found
    except ImportError as error:
        raise MissingError(f"PyTorch: {error}") from None
    if not found.cuda.is_available():
        raise MissingError("PyTorch sees no GPU")
    return found


def tensor(device: CudaDevice, type: TensorType, seed: int) -> Tensor:
    """Random numbers, or random bytes where there is no array type for them, on the device."""
    made = Tensor(type, device.buffer_type.allocate(type.nbytes))
    xp = device.driver.xp
    with device.queue():
        random = xp.random.RandomState(seed)
        array = made.array
        if type.dtype.kind == "quantized":
            array[...] = blocks(xp, random, type)
        elif type.dtype.name == "bf16":
            # The upper halves of f32 numbers.
            values = random.standard_normal(type.shape, dtype=xp.float32)
            array[...] = (values.view(xp.uint32) >> 16).astype(xp.uint16)
        else:
            array[...] = random.standard_normal(type.shape, dtype=xp.float32).astype(array.dtype)
    return made


def blocks(xp: Any, random: Any, type: TensorType) -> Any:
    """Blocks whose quanta are random, and whose scales are such that products have numbers of their operands'
    size, however many there are behind one another."""
    dtype = type.dtype
    # The root of the elements' mean square for scales of 1; q4_k's second scale makes their mean nearly 0.
    size, heads = {"q4_0": (4.6, (1,)), "q8_0": (74, (1,)), "q4_k": (258, (1, 7.5))}[dtype.name]
    rows = xp.asarray(random.randint(0, 256, type.storage_shape), dtype=xp.uint8)
    found = rows.reshape(*type.storage_shape[:-1], -1, dtype.block_bytes)
    for place, times in enumerate(heads):
        for first, sign in enumerate((1, -1)):
            scale = np.float16(sign * times / size / type.shape[-1] ** 0.5)
            part = xp.asarray(np.frombuffer(scale.tobytes(), np.uint8))
            found[..., first::2, 2 * place : 2 * place + 2] = part
    return found.reshape(type.storage_shape)


class Planned:
    """One plan with its tensors."""

    def __init__(
        self,
        device: CudaDevice,
        leaves: Sequence[tuple[LeafKind, TensorType]],
        nodes: Sequence[tuple[str, tuple[int, ...], dict[str, Any]]],
    ) -> None:
        types = [type for _, type in leaves]
        made = []
        for op, operands, attributes in nodes:
            result, complete = infer(op, [types[value] for value in operands], attributes)
            made.append(Node(op, operands, result, complete))
            types.append(result)
        named = tuple(
            Leaf(kind, f"x{n}", type, bytes(DIGEST_BYTES) if kind is LeafKind.WEIGHT else b"")
            for n, (kind, type) in enumerate(leaves)
        )
        graph = validate(Graph(named, tuple(made), (Output("y", len(types) - 1),)), Limits())
        self.tensors = [tensor(device, type, number) for number, (_, type) in enumerate(leaves)]
        weights = {n: self.tensors[n] for n, (kind, _) in enumerate(leaves) if kind is LeafKind.WEIGHT}
        self.inputs = [self.tensors[n] for n, (kind, _) in enumerate(leaves) if kind is LeafKind.INPUT]
        self.output = Tensor(types[-1], device.buffer_type.allocate(types[-1].nbytes))
        self.plan = device.compile(graph, LeafBindings(weights, {}), DeviceCompileOptions())
        self._abort = Abort()

    def run(self) -> None:
        """Once, to the end."""
        self.plan.compute(self.inputs, [self.output], self._abort)

    def free(self) -> None:
        """Gives all memory back."""
        self.plan.free()
        for one in (*self.tensors, self.output):
            one.buffer.free()


@contextmanager
def planned(device: CudaDevice, *arguments: Any) -> Iterator[Planned]:
    """A plan that is freed afterwards."""
    made = Planned(device, *arguments)
    try:
        yield made
    finally:
        made.free()


def in_turns(ours: Call, peer: Call) -> tuple[float, float]:
    """Medians in seconds."""
    return paired_medians(lambda n: seconds_of(ours, n), lambda n: seconds_of(peer, n), ROUNDS, RUNS)


def copy_seconds_per_byte(device: CudaDevice) -> float:
    """Of a large copy on the card, for each byte that is read or written."""
    source, target = (device.buffer_type.allocate(COPY_BYTES) for _ in range(2))
    driver = device.driver
    try:
        with device.queue() as queue:

            def copy() -> None:
                driver.copy(target.address, source.address, COPY_BYTES, queue)
                device.settle(queue)

            found = statistics.median(seconds_of(copy, ROUNDS * RUNS))
    finally:
        source.free()
        target.free()
    return found / (2 * COPY_BYTES)


def type_of(name: str, *shape: int) -> TensorType:
    """A tensor's type by its data type's name."""
    return TensorType(DTYPES[name], shape)
