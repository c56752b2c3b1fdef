"""The cases of `onnx.backend.test`, run on a device of this process, and what came of each.

python tests/support/onnx_suite.py --kind node
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

import heliograph as hg

#: The possible results of a case, in the order of the table.
KINDS = ("device", "fixed", "folded", "random", "refused", "wrong")
WORDS = {
    "device": "passed strictly on the device",
    "fixed": "passed with the inputs that decide shapes fixed",
    "folded": "passed, computed on the host at import",
    "random": "passed, compared by type, shape and the values that may occur",
    "refused": "refused by name",
    "wrong": "wrong",
}
#: Relative and absolute errors of cases whose expected values are noisy. Of DFT they are 2e-7 where
#: the true value is 0; of attention they are 1.4 units in the last place of float16 off.
NOISE = {
    "test_dft_inverse": (0.0, 1e-6),
    "test_dft_inverse_opset19": (0.0, 1e-6),
    "test_attention_4d_causal_fp16": (2**-9, 0.0),
    "test_attention_4d_causal_fp16_expanded": (2**-9, 0.0),
}
#: Cases with random numbers, whose expected values are those of one generator.
RANDOM = ("test_bernoulli", "test_training_dropout")
#: The least number of cases that pass.
RECORDED = {"node": 1848, "pytorch-converted": 82, "pytorch-operator": 35, "light": 9}


@dataclass(frozen=True)
class Outcome:
    """The result of one case."""

    name: str
    kind: str
    #: The reason of a refusal, or what was wrong.
    detail: str = ""
    op: str = ""

    @property
    def passed(self) -> bool:
        return self.kind in ("device", "fixed", "folded", "random")


@dataclass(frozen=True)
class Light:
    """A case of a whole network, whose weights are made up, and which is given a ramp."""

    path: Path
    rtol: float = 1e-3
    atol: float = 1e-7
    model_dir: None = None

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def model(self) -> onnx.ModelProto:
        return onnx.load(self.path)

    @property
    def data_sets(self) -> list[tuple[list[Any], list[Any]]]:
        constants = {one.name for one in self.model.graph.initializer}
        (info,) = [one for one in self.model.graph.input if one.name not in constants]
        shape = [size.dim_value for size in info.type.tensor_type.shape.dim]
        ramp = np.arange(np.prod(shape)) / np.prod(shape)
        wanted = (self.path.parent / f"{self.name}_output_0.pb").read_bytes()
        return [([ramp.astype(np.float32).reshape(shape)], [onnx.TensorProto.FromString(wanted)])]


def cases(kind: str) -> list[Any]:
    """The cases of a kind, each with a model and its runs."""
    if kind == "light":
        folder = Path(onnx.__file__).parent / "backend/test/data/light"
        return [Light(path) for path in sorted(folder.glob("*.onnx"))]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return list(load_model_tests(kind=kind))


def runs(case: Any) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
    """The model of a case, and the inputs and outputs of its runs."""
    if case.model is not None:
        return case.model, [(_arrays(given), _arrays(wanted)) for given, wanted in case.data_sets]
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    found = []
    for inner in sorted(folder.glob("test_data_set_*")):
        found.append((_read(inner, "input", model.graph.input), _read(inner, "output", model.graph.output)))
    return model, found


def _arrays(found: Any) -> Any:
    """Elements of protobuf messages, also inside of sequences, as arrays."""
    if isinstance(found, onnx.TensorProto):
        return numpy_helper.to_array(found)
    return [_arrays(one) for one in found] if isinstance(found, (list, tuple)) else found


def _read(folder: Path, what: str, infos: Sequence[Any]) -> list[Any]:
    count = len(list(folder.glob(f"{what}_*.pb")))
    arrays = []
    for number, _ in zip(range(count), infos, strict=False):
        tensor = onnx.TensorProto.FromString((folder / f"{what}_{number}.pb").read_bytes())
        arrays.append(numpy_helper.to_array(tensor))
    return arrays


def outcome(session: hg.Session, case: Any) -> Outcome:
    """Run a case, and compare its outputs with the reference's."""
    model, data = runs(case)
    ops = sorted({node.op_type for node in model.graph.node})
    op = ops[0] if len(ops) == 1 else ",".join(ops)[:40]
    kind = "folded"
    rtol, atol = map(max, (case.rtol, case.atol), NOISE.get(case.name, (0.0, 0.0)))
    try:
        loaded = hg.onnx.load(model.SerializeToString())
        plan = loaded.compile(session, seed=7)
        for given, wanted in data:
            feeds = dict(zip((one.name for one in loaded.inputs), given, strict=False))
            found = list(plan.run(feeds, timeout=60).values())
            is_random = case.name.startswith(RANDOM) and "zero_ratio" not in case.name
            compare = difference_of_random if is_random else difference
            if wrong := compare(found, wanted, rtol, atol):
                return Outcome(case.name, "wrong", wrong, op)
            if plan.plans:
                kind = "random" if is_random else "fixed" if plan._fixed else "device"
    except hg.UnsupportedError as error:
        return Outcome(case.name, "refused", error.message, op)
    except Exception as error:
        if os.environ.get("ONNX_RAISE"):
            raise
        return Outcome(case.name, "wrong", f"{type(error).__name__}: {str(error)[:300]}", op)
    return Outcome(case.name, kind, "", op)


def difference_of_random(found: Any, wanted: Any, rtol: float, atol: float) -> str:
    """Say what is wrong with results that are random: each element is 0 or, in order, as wanted
    where that is not 0, and some of many are of either kind."""
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype}{one.shape} instead of {other.dtype}{other.shape}"
        both = (one != 0) & (other != 0)
        if not np.allclose(one[both], other[both], rtol, atol):
            return "other elements than 0 and those that are wanted"
        if one.size > 8 and np.all(one == 0):
            return "nothing but zeros"
    return ""


def difference(found: Any, wanted: Any, rtol: float, atol: float) -> str:
    """Say how two results differ; empty if they do not. Sequences are compared in order."""
    if isinstance(wanted, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
            return f"a sequence of {len(wanted)} was wanted"
        differences = (difference(one, other, rtol, atol) for one, other in zip(found, wanted, strict=True))
        return next((one for one in differences if one), "")
    if wanted is None or found is None:
        return "" if wanted is found else f"{found} instead of {wanted}"
    expected, array = np.asarray(wanted), np.asarray(found)
    if array.shape != expected.shape or array.dtype != expected.dtype:
        return f"{array.dtype}{array.shape} instead of {expected.dtype}{expected.shape}"
    if expected.dtype.kind in "OUSb":
        return "" if np.array_equal(array, expected) else "other elements"
    with np.errstate(all="ignore"):
        if expected.dtype.kind in "iu":
            close = array == expected
        else:
            # Two units in the last place, as in the runner of the suite.
            rtol = max(rtol, 2**-6) if expected.dtype.name == "bfloat16" else rtol
            wide = np.longdouble if expected.dtype == np.float64 else np.float64
            a, b = array.astype(wide), expected.astype(wide)
            close = np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return ""
    place = tuple(int(one[0]) for one in np.nonzero(~close))
    return f"{int((~close).sum())} of {close.size} elements, such as {array[place]} for {expected[place]}"


def outcomes(kind: str, only: str = "", every: int = 1, url: str = "local:") -> Iterator[Outcome]:
    """Run the cases of a kind in turn."""
    with hg.connect(url) as session:
        for case in cases(kind)[::every]:
            if only in case.name:
                yield outcome(session, case)


def table(found: Sequence[Outcome]) -> str:
    """The numbers of cases by what came of them, the refusals by op, and what is wrong."""
    counts = Counter(one.kind for one in found)
    lines = [f"{counts[kind]:6}  {WORDS[kind]}" for kind in KINDS]
    lines.append(f"{sum(one.passed for one in found):6}  passed, of {len(found)}")
    refused = Counter((one.op, one.detail) for one in found if one.kind == "refused")
    lines += [f"        {count:3}  {op}: {detail}" for (op, detail), count in sorted(refused.items())]
    lines += [f"wrong   {one.name} ({one.op}): {one.detail}" for one in found if one.kind == "wrong"]
    return "\n".join(lines)


def main() -> int:
    """Run the suites, print a table of each, and return 1 if a case is wrong or too few pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", action="append", choices=list(RECORDED))
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    failed = False
    for kind in arguments.kind or RECORDED:
        found = list(outcomes(kind, arguments.only))
        passed = sum(one.passed for one in found)
        print(f"{kind}\n{table(found)}", flush=True)
        short = not arguments.only and passed < RECORDED[kind]
        failed |= short or any(one.kind == "wrong" for one in found)
        if short:
            print(f"        fewer than the {RECORDED[kind]} that passed before")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
