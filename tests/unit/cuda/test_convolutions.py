"""Convolutions on the CUDA backend, emulated: every kernel and every way to distribute one, over
odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Maker, normalised_error, run
from cuda_emulation import EmulatedDriver, why_not
from image_layers import Layer, convolutions, others

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.lowering.images import convolution
from heliograph_backends.cuda.lowering.launch import Launch, Located
from heliograph_backends.cuda.lowering.lowering import CudaLowering
from heliograph_backends.cuda.lowering.target import Asked, CudaTarget, OwnSlots
from heliograph_backends.planning.fusion import group_nodes
from heliograph_backends.planning.layout import place_values
from heliograph_backends.planning.storage import plan_storage
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output, validate
from heliograph_proto.ops.table import infer
from heliograph_proto.quantization import blocks
from heliograph_proto.sessions import Limits
from heliograph_proto.types import DTYPES, TensorType

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

device = cuda_fixtures.device
definition = cuda_fixtures.definition
rng = cuda_fixtures.rng

#: An H100, and how a grid of it is bounded.
TARGET = CudaTarget(shared_bytes=232448, multiprocessors=132)
MOST_GRID = (2**31 - 1, 65535, 65535)


def of_type(made: Maker, rng: np.random.Generator, name: str, *shape: int) -> int:
    """An input of random numbers."""
    array = rng.standard_normal(shape, np.float32)
    if name == "bf16":
        return made.input(blocks.to_bits(array), "bf16")
    return made.input(array.astype({"f32": np.float32, "f16": np.float16}[name]))


def agrees(device: CudaDevice, definition: CpuDevice, made: Maker) -> bool:
    (found,), (wanted,) = run(device, made), run(definition, made)
    return normalised_error(np.asarray(found), np.asarray(wanted)) < 1e-10


@pytest.mark.parametrize("names", [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f16", "f32")])
@pytest.mark.parametrize(
    ("kernel", "data", "attributes", "tile"),
    [
        ((5, 3, 3, 3), (2, 3, 9, 7), {"padding": (1, 1)}, "tiles"),
        ((70, 5, 3, 1), (1, 5, 11, 13), {"stride": (2, 1), "dilation": (2, 1)}, "tiles"),
        ((65, 17, 1, 1), (3, 17, 5, 6), {"stride": (2, 3)}, "tiles"),
        ((64, 8, 2, 3), (1, 16, 6, 9), {"groups": 2, "padding": (0, 2)}, "tiles"),
        ((130, 4, 3, 3), (1, 4, 17, 21), {"padding": (1, 1)}, "large"),
    ],
)
def test_tiles_of_every_type_have_the_definitions_sums(
    kernel: tuple[int, ...],
    data: tuple[int, ...],
    attributes: dict[str, Any],
    tile: str,
    names: tuple[str, str],
    device: CudaDevice,
    definition: CpuDevice,
    rng: np.random.Generator,
) -> None:
    made = Maker()
    values = [of_type(made, rng, name, *shape) for name, shape in zip(names, (kernel, data), strict=True)]
    made.output(made.node("conv_2d", *values, **attributes))
    assert agrees(device, definition, made)
    form = names[0] if names[0] == names[1] else "f32"
    assert device.driver.launched == [f"convolution_{form}_{tile}"]


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_sums_over_a_deep_window_are_split_and_added_in_order(
    name: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    values = of_type(made, rng, name, 20, 61, 3, 3), of_type(made, rng, name, 2, 61, 5, 6)
    made.output(made.node("conv_2d", *values, padding=(1, 0)))
    assert agrees(device, definition, made)
    assert device.driver.launched == [f"convolution_{name}_tiles", "convolution_merge"]
    again = run(device, made)
    assert np.asarray(again[0]).tobytes() == np.asarray(run(device, made)[0]).tobytes()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("taps", [3, 5])
@pytest.mark.parametrize("step", [1, 2])
def test_a_channel_by_itself_has_results_below_each_other(
    step: int, taps: int, name: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    for height, width in ((42, 45), (41, 47)):
        made = Maker()
        values = of_type(made, rng, name, 3, 1, taps, taps), of_type(made, rng, name, 2, 3, height, width)
        attributes = {"stride": (step, step), "padding": (taps // 2, 1)}
        made.output(made.node("conv_2d_dw", *values, **attributes))
        assert agrees(device, definition, made)
    assert device.driver.launched == [f"convolution_below_{taps}_{step}"] * 2


@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((6, 1, 3, 3), {"groups": 3, "padding": (1, 1)}),  # two results of each channel
        ((6, 1, 2, 4), {"groups": 3, "dilation": (2, 1)}),
        ((3, 1, 3, 3), {"groups": 3, "stride": (1, 2), "padding": (3, 0)}),
    ],
)
def test_groups_of_few_channels_have_a_thread_for_each_result(
    kernel: tuple[int, ...],
    attributes: dict[str, Any],
    device: CudaDevice,
    definition: CpuDevice,
    rng: np.random.Generator,
) -> None:
    made = Maker()
    values = of_type(made, rng, "f32", *kernel), of_type(made, rng, "f32", 2, 3, 8, 9)
    made.output(made.node("conv_2d", *values, **attributes))
    assert agrees(device, definition, made)
    assert device.driver.launched == ["convolution_direct"]


def test_single_taps_are_a_product_for_cublas(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    values = of_type(made, rng, "f32", 40, 6, 1, 1), of_type(made, rng, "f32", 3, 12, 5, 7)
    made.output(made.node("conv_2d", *values, groups=2))
    assert agrees(device, definition, made)
    # A call for each group, with all images.
    assert device.driver.launched == [] and len(device.driver.multiplied) == 2


@pytest.mark.parametrize("name", ["f32", "f16"])
@pytest.mark.parametrize(("stride", "launches"), [(1, 1), (2, 4), (3, 9), (5, 20)])
def test_a_transposed_convolution_has_a_part_for_each_place_modulo_its_stride(
    stride: int,
    launches: int,
    name: str,
    device: CudaDevice,
    definition: CpuDevice,
    rng: np.random.Generator,
) -> None:
    """Also where the stride leaves gaps, which are 0."""
    made = Maker()
    values = of_type(made, rng, name, 3, 4, 4, 3), of_type(made, rng, name, 2, 3, 1, 6)
    made.output(made.node("conv_transpose_2d", *values, stride=stride))
    assert agrees(device, definition, made)
    assert len(device.driver.launched) == launches


def test_more_parts_than_launches_are_worth_are_the_definitions(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    values = of_type(made, rng, "f32", 2, 2, 100), of_type(made, rng, "f32", 2, 3)
    made.output(made.node("conv_transpose_1d", *values, stride=100))
    assert agrees(device, definition, made)
    assert device.driver.launched == []


def test_volumes_and_views_are_read_where_they_lie(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    kernel, data = of_type(made, rng, "f32", 3, 2, 3, 8), of_type(made, rng, "f32", 7, 4, 5, 6)
    turned = made.node("permute", kernel, axes=(3, 0, 1, 2)), made.node("permute", data, axes=(1, 0, 3, 2))
    made.output(
        made.node("conv_3d", *turned, channels=2, padding=(1, 0, 2), stride=(2, 1, 1), dilation=(1, 1, 2))
    )
    assert agrees(device, definition, made)
    assert device.driver.launched == ["convolution_f32_tiles"]


@pytest.fixture
def strict() -> Iterator[CudaDevice]:
    """A device whose blocks have no more shared memory than any of these GPUs gives unasked."""
    yield from cuda_fixtures.closing(CudaDevice("cuda0", EmulatedDriver(shared_bytes=48 * 2**10)))


def test_convolutions_take_no_more_shared_memory_than_a_block_has_unasked(
    strict: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    values = of_type(made, rng, "f16", 130, 4, 3, 3), of_type(made, rng, "f16", 1, 4, 17, 21)
    made.output(made.node("conv_2d", *values))
    assert agrees(strict, definition, made)


# The demands of launches on a device


def launches(op: str, kernel: tuple[int, ...], data: tuple[int, ...], **attributes: Any) -> list[Launch]:
    """The launches on a large GPU; none if it runs on the definition or is a product."""
    types = [TensorType(DTYPES["f16"], shape) for shape in (kernel, data)]
    result, complete = infer(op, types, attributes)
    node = Node(op, (0, 1), result, complete)
    values = [Located(type, slot, 0, type.strides) for slot, type in enumerate(types)]
    asked = Asked(0, node, values, Located(result, 2, 0, result.strides), OwnSlots(3, 4), TARGET)
    return [one for one in convolution.convolution(asked) or () if isinstance(one, Launch)]


@pytest.mark.parametrize(
    ("kernel", "data", "attributes", "expected"),
    [
        # ResNet50's, of one image and of many.
        ((64, 3, 7, 7), (1, 3, 224, 224), {"stride": (2, 2), "padding": (3, 3)}, ("tiles", 196, 1)),
        ((512, 512, 3, 3), (1, 512, 7, 7), {"padding": (1, 1)}, ("tiles", 8, 16)),
        ((256, 256, 3, 3), (64, 256, 14, 14), {"padding": (1, 1)}, ("large", 196, 1)),
    ],
)
def test_tiles_fill_the_device_and_no_grid_overflows(
    kernel: tuple[int, ...],
    data: tuple[int, ...],
    attributes: dict[str, Any],
    expected: tuple[str, int, int],
) -> None:
    launch = launches("conv_2d", kernel, data, **attributes)[0]
    assert (launch.kernel.rsplit("_", 1)[1], launch.grid[0], launch.grid[2]) == expected
    assert all(size <= most for size, most in zip(launch.grid, MOST_GRID, strict=True))


@pytest.mark.parametrize("side", [7, 14, 28, 56])
@pytest.mark.parametrize("images", [1, 2, 9, 64])
@pytest.mark.parametrize("channels", [20, 64, 130, 512, 2048])
def test_parts_of_sums_take_little_memory(channels: int, images: int, side: int) -> None:
    types = [TensorType(DTYPES["f32"], shape) for shape in ((channels, 512, 3, 3), (images, 512, side, side))]
    result, complete = infer("conv_2d", types, {"padding": (1, 1)})
    found = convolution.workspace_bytes(Node("conv_2d", (0, 1), result, complete), types, TARGET)
    assert found <= TARGET.multiprocessors * 128 * 2**10


@pytest.mark.parametrize("images", [1, 2**16])
def test_channels_and_images_beyond_a_grids_second_dimension_are_walked(images: int) -> None:
    (launch,) = launches("conv_2d_dw", (70, 1, 3, 3), (images, 70, 16, 16), padding=(1, 1))
    assert launch.kernel == "convolution_direct"
    (launch,) = launches("conv_2d_dw", (70, 1, 3, 3), (images // 32 + 1, 70, 112, 112), padding=(1, 1))
    assert launch.kernel == "convolution_below_3_1" and launch.grid[1] <= 65535


def test_results_that_are_not_counted_in_32_bits_are_the_definitions() -> None:
    assert launches("conv_2d", (2**12, 8, 3, 3), (1, 8, 1000, 1000)) == []
    assert launches("conv_2d", (16, 1, 3, 3), (1, 1, 5, 5), padding=(2**30, 0)) == []


@pytest.mark.parametrize("name", ["f32", "f16"])
@pytest.mark.parametrize("layer", [*convolutions(32), *others(32)], ids=lambda layer: layer.name)
def test_layers_of_models_have_kernels_whose_grids_a_gpu_takes(layer: Layer, name: str) -> None:
    """The layers that `make test-gpu` and `make bench-gpu` run."""
    types = layer.types(name)
    result, complete = infer(layer.op, types, layer.attributes)
    leaves = tuple(Leaf(LeafKind.INPUT, f"x{number}", type, b"") for number, type in enumerate(types))
    node = Node(layer.op, tuple(range(len(types))), result, complete)
    graph = validate(Graph(leaves, (node,), (Output("y", len(types)),)), Limits())
    places = place_values(graph)
    lowering = CudaLowering(graph, places, TARGET)
    groups = group_nodes(graph, places, lowering, fusion=True)
    storage = plan_storage(graph, places, groups, 2**40, alignment=256)
    work = lowering.work(groups[0], storage, OwnSlots(90, 91))
    assert work
    for one in work:
        if isinstance(one, Launch):
            assert all(0 < size <= most for size, most in zip(one.grid, MOST_GRID, strict=True))
            assert one.threads <= 1024 and one.shared_bytes <= TARGET.shared_bytes
