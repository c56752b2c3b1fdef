"""`make test-gpu`: the conformance suite on a GPU, the GPU beside the CPU, and both through a daemon.

    python tests/gpu/run.py --out FOLDER [--quick]

Needs a checkout with generated code (`make proto`), and a Python that has CuPy and what pyproject.toml has
for the extra `server`; it installs and fetches nothing. Prints a table and writes report.json and table.txt;
the status is 1 if anything failed or could not be run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import checkout

checkout.use("tests/support")

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
