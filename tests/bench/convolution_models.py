"""Convolutional networks with random weights, made in code: the layers of the published ones, as
ONNX.

Batch norms are folded into the convolutions, as exporters do for inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

Build = Callable[["Net", str], str]


class Net:
    """An ONNX graph under construction; methods append a node and return the name of its result."""

    def __init__(self, seed: int = 7) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[object] = []
        self._weights: list[object] = []
        self._channels: dict[str, int] = {}
        self._count = 0

    def add(self, op: str, *inputs: str, channels: int = 0, **attributes: object) -> str:
        """Append a node of one result with so many channels; 0: as many as its first input."""
        self._count += 1
        name = f"v{self._count}"
        self._nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        self._channels[name] = channels or self._channels[inputs[0]]
        return name

    def weight(self, array: np.ndarray) -> str:
        self._count += 1
        name = f"w{self._count}"
        self._weights.append(numpy_helper.from_array(array, name))
        self._channels[name] = 0
        return name

    def channels(self, x: str) -> int:
        return self._channels[x]

    def conv(
        self,
        x: str,
        channels: int,
        kernel: int | tuple[int, int] = 3,
        stride: int = 1,
        groups: int = 1,
        act: str = "",
        padding: int | tuple[int, int] = -1,
    ) -> str:
        """A convolution with bias; without `padding`, the size stays (over the stride)."""
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        pads = tuple(side // 2 for side in sides) if padding == -1 else padding
        pads = (pads, pads) if isinstance(pads, int) else pads
        fan = self._channels[x] // groups * sides[0] * sides[1]
        shape = (channels, self._channels[x] // groups, *sides)
        weights = self._random.standard_normal(shape, np.float32) * np.float32((2 / fan) ** 0.5)
        bias = self._random.standard_normal(channels, np.float32) * np.float32(0.1)
        made = self.add(
            "Conv", x, self.weight(weights), self.weight(bias), channels=channels, group=groups,
            kernel_shape=list(sides), strides=[stride, stride], pads=[*pads, *pads],
        )  # fmt: skip
        return self.act(made, act)

    def act(self, x: str, act: str) -> str:
        if act == "relu6":
            low, high = self.weight(np.float32(0)), self.weight(np.float32(6))
            return self.add("Clip", x, low, high)
        return self.add(act, x) if act else x

    def norm(self, x: str, act: str = "Relu") -> str:
        """A batch norm that no convolution comes before."""
        count = self._channels[x]
        parts = [self._random.uniform(0.5, 1.5, count).astype(np.float32) for _ in range(4)]
        return self.act(self.add("BatchNormalization", x, *map(self.weight, parts)), act)

    def max_pool(self, x: str, kernel: int, stride: int, padding: int = 0, ceil: int = 0) -> str:
        sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [padding] * 4}
        return self.add("MaxPool", x, ceil_mode=ceil, **sizes)

    def average_pool(self, x: str, kernel: int, stride: int, padding: int = 0) -> str:
        sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [padding] * 4}
        return self.add("AveragePool", x, count_include_pad=1, **sizes)

    def split(self, x: str, first: int) -> tuple[str, str]:
        """Cut the channels in two."""
        sizes = self.weight(np.array([first, self._channels[x] - first], np.int64))
        names = (f"{x}a", f"{x}b")
        self._nodes.append(helper.make_node("Split", [x, sizes], names, axis=1))
        self._channels.update(zip(names, (first, self._channels[x] - first), strict=True))
        return names

    def concat(self, *values: str) -> str:
        return self.add("Concat", *values, channels=sum(map(self.channels, values)), axis=1)

    def dense(self, x: str, inputs: int, outputs: int, act: str = "") -> str:
        scale = np.float32(inputs**-0.5)
        weights = self._random.standard_normal((outputs, inputs), np.float32) * scale
        bias = np.zeros(outputs, np.float32)
        named = self.weight(weights), self.weight(bias)
        return self.act(self.add("Gemm", x, *named, channels=outputs, transB=1), act)

    def head(self, x: str, classes: int = 1000) -> str:
        """The mean of each channel, and a dense layer."""
        flat = self.add("Flatten", self.add("GlobalAveragePool", x), axis=1)
        return self.dense(flat, self._channels[x], classes)

    def model(self, build: Build, shape: Sequence[int]) -> ModelProto:
        """Build a model of images [n, c, h, w]."""
        self._channels["x"] = shape[1]
        y = build(self, "x")
        given = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))
        made = helper.make_tensor_value_info(y, TensorProto.FLOAT, None)
        graph = helper.make_graph(self._nodes, "net", [given], [made], self._weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _stem(net: Net, x: str) -> str:
    return net.max_pool(net.conv(x, 64, 7, 2, act="Relu"), 3, 2, 1)


def _basic_block(net: Net, x: str, channels: int, stride: int) -> str:
    y = net.conv(net.conv(x, channels, 3, stride, act="Relu"), channels)
    if stride > 1 or net.channels(x) != channels:
        x = net.conv(x, channels, 1, stride)
    return net.add("Relu", net.add("Add", y, x))


def _bottleneck(net: Net, x: str, channels: int, stride: int) -> str:
    y = net.conv(net.conv(x, channels, 1, act="Relu"), channels, 3, stride, act="Relu")
    y = net.conv(y, 4 * channels, 1)
    if stride > 1 or net.channels(x) != 4 * channels:
        x = net.conv(x, 4 * channels, 1, stride)
    return net.add("Relu", net.add("Add", y, x))


def _resnet(net: Net, x: str, block: Callable[..., str], counts: tuple[int, ...]) -> str:
    x = _stem(net, x)
    for place, count in enumerate(counts):
        for number in range(count):
            x = block(net, x, 64 << place, 2 if place and not number else 1)
    return net.head(x)


def resnet18(net: Net, x: str) -> str:
    return _resnet(net, x, _basic_block, (2, 2, 2, 2))


def resnet50(net: Net, x: str) -> str:
    return _resnet(net, x, _bottleneck, (3, 4, 6, 3))


def _inverted(
    net: Net, x: str, wide: int, out: int, kernel: int, stride: int, act: str, squeeze: int = 0
) -> str:
    y = net.conv(x, wide, 1, act=act) if wide != net.channels(x) else x
    y = net.conv(y, wide, kernel, stride, groups=wide, act=act)
    if squeeze:
        gate = net.conv(net.add("GlobalAveragePool", y), squeeze, 1, act="Relu")
        y = net.add("Mul", y, net.add("HardSigmoid", net.conv(gate, wide, 1), alpha=1 / 6))
    y = net.conv(y, out, 1)
    return net.add("Add", y, x) if stride == 1 and net.channels(x) == out else y


def mobilenet_v2(net: Net, x: str) -> str:
    x = net.conv(x, 32, 3, 2, act="relu6")
    rows = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for factor, out, count, stride in rows:
        for number in range(count):
            x = _inverted(net, x, factor * net.channels(x), out, 3, 1 if number else stride, "relu6")
    return net.head(net.conv(x, 1280, 1, act="relu6"))


def mobilenet_v3(net: Net, x: str) -> str:
    x = net.conv(x, 16, 3, 2, act="HardSwish")
    rows = (
        (3, 16, 16, 0, "Relu", 1), (3, 64, 24, 0, "Relu", 2), (3, 72, 24, 0, "Relu", 1),
        (5, 72, 40, 24, "Relu", 2), (5, 120, 40, 32, "Relu", 1), (5, 120, 40, 32, "Relu", 1),
        (3, 240, 80, 0, "HardSwish", 2), (3, 200, 80, 0, "HardSwish", 1), (3, 184, 80, 0, "HardSwish", 1),
        (3, 184, 80, 0, "HardSwish", 1), (3, 480, 112, 120, "HardSwish", 1),
        (3, 672, 112, 168, "HardSwish", 1), (5, 672, 160, 168, "HardSwish", 2),
        (5, 960, 160, 240, "HardSwish", 1), (5, 960, 160, 240, "HardSwish", 1),
    )  # fmt: skip
    for kernel, wide, out, squeeze, act, stride in rows:
        x = _inverted(net, x, wide, out, kernel, stride, act, squeeze)
    return net.head(net.conv(x, 960, 1, act="HardSwish"))


def _shuffled(net: Net, x: str, size: int) -> str:
    """Exchange the channels of two groups."""
    count = net.channels(x)
    shape = net.weight(np.array([1, 2, count // 2, size, size], np.int64))
    back = net.weight(np.array([1, count, size, size], np.int64))
    turned = net.add("Transpose", net.add("Reshape", x, shape), perm=[0, 2, 1, 3, 4])
    return net.add("Reshape", turned, back)


def shufflenet_v2(net: Net, x: str) -> str:
    x, size = net.max_pool(net.conv(x, 24, 3, 2, act="Relu"), 3, 2, 1), 28
    for out, count in ((116, 4), (232, 8), (464, 4)):
        half = out // 2
        for number in range(count):
            if number:
                first, second = net.split(x, half)
            else:
                first = net.conv(net.conv(x, net.channels(x), 3, 2, net.channels(x)), half, 1, act="Relu")
                second = x
            y = net.conv(second, half, 1, act="Relu")
            y = net.conv(net.conv(y, half, 3, 1 if number else 2, half), half, 1, act="Relu")
            x = _shuffled(net, net.concat(first, y), size)
        size //= 2
    return net.head(net.conv(x, 1024, 1, act="Relu"))


def squeezenet(net: Net, x: str) -> str:
    x = net.max_pool(net.conv(x, 64, 3, 2, act="Relu", padding=0), 3, 2, ceil=1)
    rows = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    for number, (small, large) in enumerate(rows):
        if number in (2, 4):
            x = net.max_pool(x, 3, 2, ceil=1)
        y = net.conv(x, small, 1, act="Relu")
        x = net.concat(net.conv(y, large, 1, act="Relu"), net.conv(y, large, 3, act="Relu"))
    return net.add("GlobalAveragePool", net.conv(x, 1000, 1, act="Relu"))


def densenet121(net: Net, x: str) -> str:
    x = _stem(net, x)
    for place, count in enumerate((6, 12, 24, 16)):
        for _ in range(count):
            y = net.conv(net.norm(x), 128, 1, act="Relu")
            x = net.concat(x, net.conv(y, 32))
        if place < 3:
            x = net.average_pool(net.conv(net.norm(x), net.channels(x) // 2, 1), 2, 2)
    return net.head(net.norm(x))


def vgg16(net: Net, x: str) -> str:
    for count, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            x = net.conv(x, channels, act="Relu")
        x = net.max_pool(x, 2, 2)
    x = net.add("Flatten", x, axis=1)
    x = net.dense(net.dense(x, 512 * 49, 4096, "Relu"), 4096, 4096, "Relu")
    return net.dense(x, 4096, 1000)


def inception_v3(net: Net, x: str) -> str:
    def conv(
        x: str, channels: int, kernel: int | tuple[int, int] = 1, stride: int = 1, padding: int = -1
    ) -> str:
        return net.conv(x, channels, kernel, stride, act="Relu", padding=padding)

    x = conv(conv(conv(x, 32, 3, 2, 0), 32, 3, 1, 0), 64, 3)
    x = net.max_pool(conv(conv(net.max_pool(x, 3, 2), 80), 192, 3, 1, 0), 3, 2)
    for pooled in (32, 64, 64):
        parts = conv(x, 64), conv(conv(x, 48), 64, 5), conv(conv(conv(x, 64), 96, 3), 96, 3)
        x = net.concat(*parts, conv(net.average_pool(x, 3, 1, 1), pooled))
    long = conv(conv(conv(x, 64), 96, 3), 96, 3, 2, 0)
    x = net.concat(conv(x, 384, 3, 2, 0), long, net.max_pool(x, 3, 2))
    for c in (128, 160, 160, 192):
        short = conv(conv(conv(x, c), c, (1, 7)), 192, (7, 1))
        long = conv(conv(conv(conv(conv(x, c), c, (7, 1)), c, (1, 7)), c, (7, 1)), 192, (1, 7))
        x = net.concat(conv(x, 192), short, long, conv(net.average_pool(x, 3, 1, 1), 192))
    short = conv(conv(x, 192), 320, 3, 2, 0)
    long = conv(conv(conv(conv(x, 192), 192, (1, 7)), 192, (7, 1)), 192, 3, 2, 0)
    x = net.concat(short, long, net.max_pool(x, 3, 2))
    for _ in range(2):
        y, z = conv(x, 384), conv(conv(x, 448), 384, 3)
        halves = [conv(one, 384, sides) for one in (y, z) for sides in ((1, 3), (3, 1))]
        x = net.concat(conv(x, 320), *halves, conv(net.average_pool(x, 3, 1, 1), 192))
    return net.head(x)


#: Each network, the size of its images, and the bar of its time over the peer's.
MODELS: Mapping[str, tuple[Build, int, float]] = {
    "resnet18": (resnet18, 224, 1.5),
    "resnet50": (resnet50, 224, 1.5),
    "mobilenet-v2": (mobilenet_v2, 224, 2.0),
    "mobilenet-v3": (mobilenet_v3, 224, 2.0),
    "shufflenet-v2": (shufflenet_v2, 224, 2.0),
    "squeezenet": (squeezenet, 224, 2.0),
    "densenet121": (densenet121, 224, 2.0),
    "inception-v3": (inception_v3, 299, 2.0),
    "vgg16": (vgg16, 224, 2.0),
}
