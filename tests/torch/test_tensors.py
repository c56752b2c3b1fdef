"""Tensors and data types of PyTorch in the rest of the API."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

import heliograph as hg  # noqa: E402
from heliograph.torch.elements import DTYPES  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_data_type_of_torch_is_a_data_type(dtype: Any, local: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (2, 3), dtype)
    assert str(x.dtype) == DTYPES[dtype]
    assert str(hg.zeros((2,), dtype=dtype, graph=g).dtype) == DTYPES[dtype]
    assert str(local.empty((2, 3), dtype).dtype) == DTYPES[dtype]
    if dtype != torch.bool:
        assert str(hg.astype(x, torch.float16).dtype) == "f16"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2])
def test_a_data_type_that_only_torch_has_is_refused(dtype: Any) -> None:
    with pytest.raises(hg.InvalidGraphError, match="unknown dtype"):
        hg.Graph().input("x", (2,), dtype)


def made(dtype: Any) -> Any:
    return (torch.arange(6).reshape(3, 2) % 2).to(dtype).T


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_tensor_of_torch_is_an_array(dtype: Any, local: hg.Session) -> None:
    given = made(dtype)
    wanted = given.float().numpy()
    g = hg.Graph()
    x = g.input("x", (2, 3), dtype)
    w, c = g.weight("w", given), g.constant(given)
    for name, value in (("x", x), ("w", w), ("c", c)):
        g.output(name, hg.astype(value, "f32"))
    found = local.compile(g).run(x=given)
    assert all(np.array_equal(one, wanted) for one in found.values())
    tensor = local.put(given)
    assert str(tensor.dtype) == DTYPES[dtype]
    assert np.array_equal(tensor.get().astype(np.float32), wanted)
    tensor.set(torch.zeros(2, 3, dtype=dtype))
    tensor[1] = given[1]
    assert np.array_equal(tensor.get().astype(np.float32), wanted * [[0], [1]])


def test_parameters_and_operands_are_taken(local: hg.Session) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    g = hg.Graph()
    x = g.input("x", (2, 3), torch.float32)
    g.output("y", hg.matmul(x, g.weight("w", weight)) + torch.ones(4))
    given = torch.randn(2, 3, requires_grad=True)
    found = local.compile(g).run(x=given)["y"]
    np.testing.assert_allclose(found, (given @ weight + 1).detach(), rtol=1e-5)


def test_tensors_without_plain_elements_are_refused(local: hg.Session) -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, 3, device="meta")):
        with pytest.raises(hg.InvalidArgumentError, match="has no plain elements"):
            local.put(tensor)
        with pytest.raises(hg.InvalidInputError, match="has no plain elements"):
            local.empty((3, 3), "f32").set(tensor)


def test_another_data_type_is_refused_as_of_arrays(local: hg.Session) -> None:
    with pytest.raises(hg.InvalidInputError, match="an array of f64 for f32"):
        local.empty((3,), "f32").set(torch.zeros(3, dtype=torch.float64))


def test_mapped_tensors_are_shared_with_torch_without_a_copy(local: hg.Session) -> None:
    tensor = local.empty((3, 2), torch.int64, buffer_type="shared")
    tensor.set(torch.ones(3, 2, dtype=torch.int64))
    mine = torch.from_dlpack(tensor)
    assert mine.tolist() == [[1, 1]] * 3
    mine[1] = 7
    assert tensor.get().tolist() == [[1, 1], [7, 7], [1, 1]]
    assert torch.from_dlpack(tensor[:, 1]).tolist() == [1, 7, 1]
    assert np.from_dlpack(tensor).tolist() == mine.tolist()


def test_other_tensors_are_not_shared(local: hg.Session) -> None:
    with pytest.raises(BufferError, match="cannot be mapped"):
        torch.from_dlpack(local.empty((3,), "f32"))


def test_every_exported_name_exists() -> None:
    assert all(hasattr(hg.torch, name) for name in hg.torch.__all__)
    assert set(hg.torch.__all__) == set(dir(hg.torch))


def test_nothing_imports_torch_before_it_is_needed() -> None:
    code = """
import heliograph as hg, numpy as np, sys
with hg.connect("local:") as session:
    tensor = session.put(np.ones(3, np.float32))
    tensor.get()
hg.torch
assert "torch" not in sys.modules
hg.torch.export
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
