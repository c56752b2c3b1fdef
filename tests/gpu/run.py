"""`make test-gpu`: the conformance suite on a GPU, the GPU beside the CPU, and both through a daemon.

    python tests/gpu/run.py --out FOLDER [--quick]

Needs a checkout with generated code (`make proto`), and a Python that has CuPy and what pyproject.toml has
for the extra `server`; it installs and fetches nothing. Prints a table and writes report.json and table.txt;
the status is 1 if anything failed or could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import checkout

checkout.use("tests/support", "tests/bench")

#: The ops that a checker of CUDA's runs: kernels that share memory in a block, or compute places.
CHECKED = (
    "conv_2d", "conv_2d_dw", "conv_3d", "conv_transpose_1d", "conv_transpose_2d", "pool_1d", "pool_2d",
    "pool_2d_back", "im2col", "im2col_back", "col2im_1d", "pad", "pad_reflect_1d", "roll", "upscale",
    "argsort", "top_k", "argmax", "cumsum", "cumprod", "get_rows", "get_rows_back", "set_rows", "add_rows",
    "soft_max", "norm", "group_norm", "reduce_sum", "cont", "rope", "mul_mat",
)  # fmt: skip
#: The checkers of compute-sanitizer, and how long one may take.
CHECKERS, MOST_SECONDS = ("memcheck", "racecheck", "synccheck"), 1800
#: The environment variable with which this file runs under one of them.
UNDER_CHECKER = "HELIOGRAPH_UNDER_CHECKER"
#: The most normalised error of layers beside the definition.
MOST_ERROR = {"f32": 1e-9, "f16": 1e-6}

#: Of what one part found: whether it is well, a line for people, and all of it.
Found = tuple[bool, str, Any]


def environment(_quick: bool) -> Found:
    """What there is here, and whether there is a GPU at all."""
    if why := checkout.why_not():
        return False, why, {"python": platform.python_version()}
    from heliograph_backends.cuda import CudaBackend

    backend = CudaBackend()
    facts = {"python": platform.python_version(), **backend.features()}
    if not backend.devices():
        return False, backend.why_unavailable(), facts
    for device in backend.devices():
        facts |= {"gpu": device.description, "pci": device.id, **device.features()}
        facts["memory_bytes"] = device.memory().total_bytes
        device.close()
    return True, ", ".join(f"{name} {value}" for name, value in facts.items()), facts


def conformance(quick: bool) -> Found:
    """Every case on the device, without a daemon."""
    from heliograph_backends.conformance.runner import run
    from heliograph_backends.cuda import CudaBackend

    device = CudaBackend().devices()[0]
    try:
        report = run(device, quick=quick)
    finally:
        device.close()
    return report.ok, _words(report), report.as_json()


def through_a_daemon(quick: bool) -> Found:
    """The same through a daemon on this machine: the quick part, since each case is many round trips."""
    from heliograph.testing import running_daemon
    from heliograph_backends.conformance.runner import run
    from heliograph_server.pool import RemoteBackend

    with running_daemon(*checkout.serving_cuda()) as url:
        backend = RemoteBackend([{"url": url}])
        if not backend.devices():
            return False, backend.why_unavailable(), {}
        report = run(backend.devices()[0], quick=True)
        for device in backend.devices():
            device.close()
    return report.ok, _words(report), report.as_json()


def beside_the_cpu(_quick: bool) -> Found:
    """A model of random weights on both: the outputs' normalised mean squared error."""
    import numpy as np

    import heliograph as hg
    from heliograph.models.bert import BertConfig, BertEncoder, join_attention_weights, weight_shapes
    from heliograph.testing import running_daemon

    config = BertConfig(
        vocab_size=2000, hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536,
        max_position_embeddings=64, layer_norm_eps=1e-12,
    )  # fmt: skip
    rng = np.random.default_rng(11)
    weights = {
        name: rng.standard_normal(shape, np.float32) * np.float32(0.05)
        for name, shape in weight_shapes(config).items()
    }
    ids = rng.integers(0, config.vocab_size, (4, 32)).astype(np.int32)
    joined, outputs = join_attention_weights(weights, config), {}
    for name, arguments in {"cuda": checkout.serving_cuda(), "cpu": ("--device", "cpu")}.items():
        with running_daemon(*arguments) as url, hg.connect(url) as session:
            plan = session.compile(BertEncoder(config, joined).sentence_embeddings(4, 32))
            given = dict(zip(plan.inputs, (ids, np.ones((4, 32), np.float32)), strict=True))
            for _ in range(3):  # the third run is a replay
                (outputs[name],) = plan.run(**given).values()
            explained = str(plan.explain())
    difference = np.float64(outputs["cuda"]) - outputs["cpu"]
    error = float((difference**2).sum() / (np.float64(outputs["cpu"]) ** 2).sum())
    return error < 1e-7, f"normalised error {error:.2e}", {"error": error, "explained": explained}


def chains(_quick: bool) -> Found:
    """Every operation, data type and way to read, in a chain's own kernel and interpreted: the same bits."""
    import numpy as np
    from chain_graphs import FIVES, READINGS, computing, graphs, reading_it

    from heliograph_backends.cuda import CudaDevice
    from heliograph_backends.cuda.driver.cupy_driver import open_gpu

    rng, types = np.random.default_rng(12), ("f32", "f16", "bf16")
    made = list(graphs(rng))
    made += [computing(ops, dtype, rng) for ops in FIVES for dtype in types]
    made += [reading_it(reading, dtype, rng) for reading in READINGS for dtype in types]
    driver, differing = open_gpu(0), []
    devices = CudaDevice("own", driver, 2**30, least_generated=1), CudaDevice("interpreted", driver, 2**30)
    for one in made:
        (bits, note), (wanted, _) = (_ran(device, one) for device in devices)
        if bits != wanted or "kernels of their own" not in note:
            differing.append({"ops": [op for op, *_ in one.nodes], "types": [str(n[3]) for n in one.nodes]})
    driver.close()
    return not differing, f"{len(made) - len(differing)} of {len(made)} the same", differing


def _ran(device: Any, made: Any) -> tuple[bytes, str]:
    """The one output's bytes of a graph of inputs alone, and what the plan says of itself."""
    from heliograph_backends.contract import (
        Abort,
        DeviceCompileOptions,
        LeafBindings,
        Tensor,
        access,
        host_bytes,
    )

    graph = made.graph()
    types = [*(leaf.type for leaf in graph.leaves), graph.type_of(graph.outputs[0].value)]
    tensors = [Tensor(type, device.buffer_type.allocate(max(1, type.nbytes))) for type in types]
    for tensor, array in zip(tensors, made.arrays, strict=False):
        access.write(tensor, 0, host_bytes(array))
    plan = device.compile(graph, LeafBindings({}, {}), DeviceCompileOptions())
    plan.compute(tensors[:-1], tensors[-1:], Abort())
    found = bytearray(types[-1].nbytes)
    tensors[-1].buffer.get(0, memoryview(found))
    note = plan.note
    plan.free()
    for tensor in tensors:
        tensor.buffer.free()
    return bytes(found), note


def layers(quick: bool) -> Found:
    """Layers of models of images beside the definition on the same GPU, and their bits run for run."""
    from image_layers import convolutions, others

    from heliograph_backends.cuda import CudaBackend

    device, worst, wrong = CudaBackend().devices()[0], {}, []
    try:
        for name in ("f32", "f16"):
            for layer in (*convolutions(1 if quick else 3), *others(2)):
                error, same = layer_error(device, layer, name)
                worst[f"{layer.name} {name}"] = error
                if not error <= MOST_ERROR[name] or not same:
                    wrong.append(f"{layer.name} {name}: {error:.1e}{'' if same else ', other bits'}")
    finally:
        device.close()
    words = "; ".join(wrong) or f"{len(worst)} layers, error at most {max(worst.values()):.1e}"
    return not wrong, words, worst


def layer_error(device: Any, layer: Any, name: str) -> tuple[float, bool]:
    """The normalised error of a layer beside the definition, and whether two runs have the same bits."""
    import numpy as np
    from gpu_common import planned

    from heliograph_backends.reference import define
    from heliograph_proto.graph import LeafKind

    leaves = [(LeafKind.INPUT, type) for type in layer.types(name)]
    nodes = [(layer.op, tuple(range(len(leaves))), layer.attributes)]
    with planned(device, leaves, nodes) as ours:
        node, found = ours.plan.graph.nodes[0], []
        for _ in range(2):
            ours.run()
            found.append(bytearray(ours.output.type.nbytes))
            ours.output.buffer.get(0, memoryview(found[-1]))
        types = [one.type.dtype for one in ours.tensors]
        kernel = define(node.op, node.attributes, device.driver.xp, operands=types, result=node.type.dtype)
        with device.queue():
            kernel(*(one.array for one in ours.tensors), ours.output.array)
        wanted = bytearray(ours.output.type.nbytes)
        ours.output.buffer.get(0, memoryview(wanted))
    one, other = (
        np.frombuffer(bits, node.type.dtype.numpy).astype(np.float64) for bits in (found[0], wanted)
    )
    error = float(((one - other) ** 2).sum() / max((other**2).sum(), 1e-30))
    return error, found[0] == found[1]


def checked(quick: bool) -> Found:
    """Conformance under compute-sanitizer, which sees races and accesses outside of memory."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        return False, "compute-sanitizer is not in PATH: it is part of CUDA's toolkit", {}
    found = {}
    for checker in CHECKERS[: 1 if quick else None]:
        command = [program, "--tool", checker, "--error-exitcode", "86", sys.executable, __file__]
        done = subprocess.run(
            [*command, "--out", os.devnull], env={**os.environ, UNDER_CHECKER: "1"}, capture_output=True,
            text=True, timeout=MOST_SECONDS, check=False,
        )  # fmt: skip
        found[checker] = {"status": done.returncode, "end": (done.stdout + done.stderr)[-4000:]}
    wrong = [name for name, one in found.items() if one["status"]]
    words = f"{', '.join(wrong)}: see report.json" if wrong else f"{', '.join(found)} found nothing"
    return not wrong, words, found


def under_checker() -> int:
    """The quick conformance of the kernels that a checker looks at; the status of the process."""
    from heliograph_backends.conformance.runner import run
    from heliograph_backends.cuda import CudaBackend

    device = CudaBackend().devices()[0]
    reports = [run(device, op=op, quick=True) for op in CHECKED]
    device.close()
    print("\n".join(map(_words, reports)))
    return 0 if all(one.ok for one in reports) else 1


def machine_code(_quick: bool) -> Found:
    """The kernels as machine code of sm_80 and sm_90, with CUDA's compiler."""
    from cupy.cuda import nvrtc

    from heliograph_backends.cuda.driver.sources import MODULES, options_of, text_of

    sizes = {}
    for architecture in ("sm_80", "sm_90"):
        for module in MODULES:
            program = nvrtc.createProgram(text_of(module), f"{module}.cu", (), ())
            nvrtc.compileProgram(program, (*options_of(module), f"--gpu-architecture={architecture}"))
            sizes[f"{module} {architecture}"] = len(nvrtc.getCUBIN(program))
            nvrtc.destroyProgram(program)
    return True, f"{len(sizes)} modules", sizes


PARTS: dict[str, Callable[[bool], Found]] = {
    "environment": environment,
    "machine code": machine_code,
    "chains": chains,
    "conformance": conformance,
    "layers": layers,
    "checked": checked,
    "cuda beside cpu": beside_the_cpu,
    "through a daemon": through_a_daemon,
}


def _words(report: Any) -> str:
    failed = "; ".join(f"{one.id}: {one.detail}" for one in report.failures[:20])
    return f"{report}{': ' + failed if failed else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="only the first case of every kind")
    arguments = parser.parse_args()
    if os.environ.get(UNDER_CHECKER):
        return under_checker()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for name, part in PARTS.items():
        if name != "environment" and not found["environment"]["ok"]:
            found[name] = {"ok": False, "words": "not run: see environment", "seconds": 0.0, "detail": {}}
        else:
            found[name] = _one(name, part, arguments.quick)
        (arguments.out / "report.json").write_text(json.dumps(found, indent=2, default=str) + "\n")
    lines = [
        f"{name:<18}{'ok' if one['ok'] else 'FAILED':<8}{one['seconds']:>7.1f} s  {one['words']}"
        for name, one in found.items()
    ]
    (arguments.out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if all(one["ok"] for one in found.values()) else 1


def _one(name: str, part: Callable[[bool], Found], quick: bool) -> dict[str, Any]:
    """Whatever goes wrong in one part, the others are run."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        ok, words, detail = part(quick)
    except Exception as error:
        traceback.print_exc()
        ok, words, detail = False, f"{type(error).__name__}: {error}", {}
    return {"ok": ok, "words": words, "seconds": time.monotonic() - began, "detail": detail}


if __name__ == "__main__":
    raise SystemExit(main())
