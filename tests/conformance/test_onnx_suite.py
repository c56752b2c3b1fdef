"""A sample of `onnx.backend.test`; `make test-onnx` runs all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx_suite import outcomes, table

import heliograph as hg

#: Every so many cases of the suite of nodes are run.
EVERY = 12


@pytest.mark.parametrize(
    ("kind", "every"), [("node", EVERY), ("pytorch-converted", 4), ("pytorch-operator", 4)]
)
def test_no_case_of_the_suite_is_wrong(kind: str, every: int) -> None:
    """Each passes, or is refused by name."""
    found = list(outcomes(kind, every=every))
    assert not [one for one in found if one.kind == "wrong"], table(found)
    share = sum(one.passed for one in found) / len(found)
    assert share > 0.9, table(found)


@pytest.mark.parametrize("name", ["densenet121", "shufflenet"])
def test_whole_networks_give_the_stored_results(name: str) -> None:
    """Of the package onnx: networks with made-up weights, and what they give for a ramp."""
    folder = Path(onnx.__file__).parent / "backend/test/data/light"
    model = hg.onnx.load(folder / f"light_{name}.onnx")
    ((_, shape),) = [(one.name, one.shape) for one in model.inputs]
    sizes = [size for size in shape if isinstance(size, int)]
    ramp = (np.arange(np.prod(sizes), dtype=np.float32) / np.prod(sizes)).astype(np.float32).reshape(sizes)
    expected = numpy_helper.to_array(
        TensorProto.FromString((folder / f"light_{name}_output_0.pb").read_bytes())
    )
    with hg.connect("local:") as session:
        (found,) = model.compile(session).run({model.inputs[0].name: ramp}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
