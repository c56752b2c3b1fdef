"""`heliograph run`: run a graph from a file on a server, with arrays from files."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import heliograph as hg
from heliograph import raw
from heliograph.cli.common import npy
from heliograph.cli.common.arguments import add_json_argument
from heliograph.cli.common.graph_files import (
    add_graph_arguments,
    put_inputs,
    read_graph,
    read_inputs,
    require_inputs,
)
from heliograph.cli.common.placement import add_placing_arguments, placing
from heliograph.cli.common.tables import print_table
from heliograph_proto.quantization import blocks
from heliograph_proto.types import TensorType, size_text

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Ran:
    """The results of `heliograph run`."""

    device: str
    compile_seconds: float
    #: The time of each run until it is computed; inputs are uploaded before, and outputs stay
    #: there.
    run_seconds: list[float]
    #: The file of each output, by name; empty without a folder.
    files: dict[str, str]
    #: The observed nodes of the last run.
    taps: list[dict[str, Any]]
    #: With --profile: the measured steps as a table and as the JSON objects of an explanation.
    step_table: str
    steps: list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a graph file and of a placement, --output, --repeat, --tap, --profile,
    --dry-run, --json."""
    add_graph_arguments(parser)
    add_placing_arguments(parser)
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="write outputs to DIR/OUTPUT.npy (default: do not)"
    )
    parser.add_argument(
        "--repeat", metavar="N", type=_positive, default=1, help="number of runs (default: 1)"
    )
    parser.add_argument(
        "--tap",
        metavar="PATTERN",
        action="append",
        default=[],
        help="print nodes with matching names (as in fnmatch) of the last run as they are computed; "
        "repeatable",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="after the runs, measure --repeat more and print the time of each step",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the memory needed; send no weights")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run a graph. Raises InvalidModelError, InvalidInputError, the run's errors."""
    graph = read_graph(arguments)
    frozen = graph._freeze()
    # All local errors come before anything is sent.
    inputs = read_inputs(frozen, arguments.input)
    if arguments.dry_run:
        return dry_run(graph, arguments)
    require_inputs(frozen, inputs)
    outputs = {one.name: frozen.type_of(one.value) for one in frozen.outputs}
    with hg.connect(arguments.server) as session:
        ran = measure(session, graph, inputs, arguments)
    if arguments.json:
        print(json.dumps(_as_json(ran, outputs), indent=2))
    else:
        rows = [[name, str(of), f"{of.nbytes:,}", ran.files.get(name, "-")] for name, of in outputs.items()]
        print_table(["output", "type", "bytes", "file"], rows)
        print(summary(ran))
        if ran.step_table:
            print(f"\n{ran.step_table}")
    return 0


def dry_run(graph: hg.Graph, arguments: argparse.Namespace) -> int:
    """Print the memory that a plan of the graph would need on each device."""
    where = placing(arguments)
    for name, option in (("split", "--split"), ("buffer_types", "--buffer-type")):
        if where.pop(name):
            raise hg.InvalidArgumentError(f"--dry-run does not support {option}", advice="omit one of them")
    with hg.connect(arguments.server) as session:
        found = session.estimate(graph, timeout=arguments.timeout, **where)
    if arguments.json:
        print(json.dumps({**asdict(found), "total_bytes": found.total_bytes}, indent=2))
        return 0
    for one in found.devices:
        memory = {
            "weights": one.weights_bytes,
            "variables": one.variables_bytes,
            "intermediate results": sum(one.compute_bytes),
            "beside the weights": one.extra_bytes,
            "total": one.total_bytes,
        }
        rows = [[name, f"{size:,}", size_text(size)] for name, size in memory.items()]
        print_table([f"memory on {one.name}", "bytes", ""], rows)
    return 0


def measure(
    session: hg.Session, graph: hg.Graph, inputs: Mapping[str, Array], arguments: argparse.Namespace
) -> Ran:
    """Compile, run --repeat times, and write the outputs of the last run."""
    timeout = arguments.timeout
    start = time.perf_counter()
    plan = session.compile(graph, timeout=timeout, **placing(arguments))
    compiled = time.perf_counter() - start
    tensors = put_inputs(session, plan, inputs, timeout)
    session.synchronize(timeout)
    seconds: list[float] = []
    results: dict[str, Any] = {}
    taps: list[dict[str, Any]] = []
    for left in reversed(range(arguments.repeat)):
        results.clear()
        is_observed = arguments.tap and not left
        # Observing compiles the plan once more, which does not count as part of the run.
        run = plan.submit(tensors, fetch=False, timeout=timeout, taps=arguments.tap) if is_observed else None
        start = time.perf_counter()
        if run is not None:
            taps = _observed(run, timeout, quiet=arguments.json)
        results.update(run.result() if run else plan.run(tensors, fetch=False, timeout=timeout))
        seconds.append(time.perf_counter() - start)
    files = {} if arguments.output is None else _write(arguments.output, results, timeout)
    table, steps = "", []
    if arguments.profile:
        profile = plan.profile(tensors, runs=arguments.repeat, timeout=timeout)
        table, steps = profile.step_table(), json.loads(profile.json())["steps"]
    return Ran(plan.device, compiled, seconds, files, taps, table, steps)


def _observed(run: hg.RunFuture, timeout: float, *, quiet: bool) -> list[dict[str, Any]]:
    """Collect name, type, shape and figures of each observed node of a run, and print each as it
    comes unless `quiet`. Raises the run's error."""
    rows = []
    for node, array in raw.taps(run, timeout):
        found = _figures(array, node.type)
        rows.append({"name": node.name, "type": node.dtype.name, "shape": node.shape, **found})
        if not quiet:
            figures = (f"{name} {value:.6g}" for name, value in found.items())
            print("  ".join([node.name, str(node.type), *figures]), flush=True)
    return rows


def _figures(array: Array, type_: TensorType) -> dict[str, float]:
    """Minimum, mean and maximum of raw elements; nothing without elements, or for blocks."""
    if type_.dtype.kind == "quantized" or not array.size:
        return {}
    floats = (blocks.from_bits(array) if type_.dtype.name == "bf16" else array).astype(np.float64)
    return {"min": float(floats.min()), "mean": float(floats.mean()), "max": float(floats.max())}


def _write(folder: Path, results: Mapping[str, hg.Tensor], timeout: float) -> dict[str, str]:
    """Write each output to a file in the folder, with one in memory at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise hg.InvalidArgumentError(f"cannot make the folder {folder}: {error.strerror}") from None
    files = {}
    for name, file in npy.file_names(list(results)).items():
        tensor = results[name]
        npy.write(folder / file, raw.get(tensor, timeout), tensor.type)
        files[name] = str(folder / file)
    return files


def summary(ran: Ran) -> str:
    """The times as a text."""
    compiled = f"{ran.device}: compiled in {_time(ran.compile_seconds)}"
    times = ran.run_seconds
    if len(times) == 1:
        return f"{compiled}, ran in {_time(times[0])}"
    spread = f"from {_time(min(times))} to {_time(max(times))}"
    return f"{compiled}, ran {len(times)} times: median {_time(statistics.median(times))}, {spread}"


def _as_json(ran: Ran, outputs: Mapping[str, TensorType]) -> dict[str, Any]:
    rows = [
        {"name": name, "type": type_.dtype.name, "shape": type_.shape, "file": ran.files.get(name)}
        for name, type_ in outputs.items()
    ]
    found = asdict(ran)
    del found["files"], found["step_table"]
    return {**found, "median_seconds": statistics.median(ran.run_seconds), "outputs": rows}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number
