"""Convolutional networks and their layers on one thread, against onnxruntime: CPU time, in turns.

Run by itself, it takes the peer's interpreter and patterns of names:
`python tests/bench/convolutions.py --python PATH resnet* layer-*`.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from convolution_models import MODELS, Build, Net
from figures import Figure, paired_medians
from peer_process import PEER_PYTHON, PeerProcess

import heliograph as hg
import heliograph.onnx

ROUNDS, RUNS, LAYER_BAR = 3, 3, 1.5
#: Layers in a row, so that what a run takes beside them counts little: 0.15 ms of CPU time, as much
#: as six of the smallest depthwise ones.
REPEATS, DEPTHWISE_REPEATS = 16, 128
#: Channels, size of the image, window, and whether each channel is convolved by itself.
LAYERS: dict[str, tuple[int, int, int, bool]] = {
    "vgg-224": (64, 224, 3, False),
    "resnet-56": (64, 56, 3, False),
    "resnet-28": (128, 28, 3, False),
    "resnet-14": (256, 14, 3, False),
    "resnet-7": (512, 7, 3, False),
    "squeezenet-56": (64, 56, 1, False),
    "densenet-28": (128, 28, 1, False),
    "mobilenet-14": (576, 14, 1, False),
    "mobilenet-7": (960, 7, 1, False),
    "inception-17": (192, 17, 7, False),
    "depthwise-112": (96, 112, 3, True),
    "depthwise-56": (144, 56, 3, True),
    "depthwise-28": (120, 28, 5, True),
    "depthwise-14": (576, 14, 3, True),
    "depthwise-7": (960, 7, 5, True),
}


def repeats(is_depthwise: bool) -> int:
    """Return the number of layers in a row."""
    return DEPTHWISE_REPEATS if is_depthwise else REPEATS


def _layers(channels: int, size: int, kernel: int, is_depthwise: bool) -> Build:
    """Layers whose input and result are a number for each channel, since moving images takes
    longer."""

    def build(net: Net, x: str) -> str:
        plane = np.random.default_rng(5).standard_normal((1, channels, size, size), np.float32)
        x = net.add("Add", x, net.weight(plane))
        for _ in range(repeats(is_depthwise)):
            x = net.conv(x, channels, kernel, groups=channels if is_depthwise else 1, act="Relu")
        return net.add("GlobalAveragePool", x)

    return build


def cases() -> Iterator[tuple[str, Build, tuple[int, ...], float]]:
    """Yield names, networks, shapes of their input, and bars."""
    for name, (build, size, bar) in MODELS.items():
        yield name, build, (1, 3, size, size), bar
    for name, (channels, size, kernel, is_depthwise) in LAYERS.items():
        yield f"layer-{name}", _layers(channels, size, kernel, is_depthwise), (1, channels, 1, 1), LAYER_BAR


def figures(patterns: Sequence[str] = ("*",), python: Path = PEER_PYTHON) -> Iterator[Figure]:
    """Milliseconds of CPU time a run."""
    with (
        tempfile.TemporaryDirectory() as folder,
        hg.connect("local:") as session,
        PeerProcess(
            "peer_convolutions.py", folder, python=python, environment={"OMP_NUM_THREADS": "1"}
        ) as peer,
    ):
        for name, build, shape, bar in cases():
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                yield _figure(session, peer, Path(folder) / "model.onnx", (name, build, shape, bar))


def _figure(
    session: hg.Session, peer: PeerProcess, path: Path, case: tuple[str, Build, tuple[int, ...], float]
) -> Figure:
    name, build, shape, bar = case
    path.write_bytes(Net().model(build, shape).SerializeToString())
    x = np.random.default_rng(3).standard_normal(shape, np.float32)
    np.save(path.with_name("x.npy"), x)
    version = peer.ask("load")
    plan = hg.onnx.load(path).compile(session, threads=1)
    found = _only(plan.run(x=x))
    expected = np.load(path.with_name("y.npy"))
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error < 1e-3:
        raise RuntimeError(f"{name}: the results differ by {error:.1e}")
    ours, theirs = paired_medians(
        lambda runs: cpu_seconds(lambda: _only(plan.run(x=x)), runs),
        lambda runs: peer.seconds("run", runs),
        ROUNDS,
        RUNS,
    )
    note = f"error {error:.0e}"
    if name.startswith("layer-"):
        note += f", {repeats(LAYERS[name.removeprefix('layer-')][3])} layers"
    against = f"onnxruntime {version}, 1 thread"
    return Figure(f"convolutions/{name}", ours * 1e3, theirs * 1e3, bar, "ms CPU", against, note)


def _only(found: dict[str, Any]) -> np.ndarray:
    (value,) = found.values()
    return np.asarray(value)


def cpu_seconds(call: Callable[[], object], runs: int, warmup: int = 1) -> list[float]:
    """Return the CPU time of each of `runs` calls."""
    for _ in range(warmup):
        call()
    found = []
    for _ in range(runs):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, default=PEER_PYTHON)
    parser.add_argument("patterns", nargs="*", default=["*"])
    arguments = parser.parse_args()
    ratios = []
    for one in figures(arguments.patterns, arguments.python):
        verdict = "ok" if one.ok else "short"
        print(
            f"{one.name:34s} {one.ours:9.3f} {one.peer:9.3f} {one.unit}  {one.ratio:5.2f} of {one.bar:.1f}"
            f"  {verdict:5s}  {one.note}",
            flush=True,
        )
        ratios.append(one.ratio)
    if ratios:
        print(f"{len(ratios)} figures, geometric mean {statistics.geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
