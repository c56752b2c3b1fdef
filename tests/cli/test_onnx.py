"""`heliograph run` and `heliograph explain` with an ONNX model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_models import perceptron, perceptron_result

from heliograph.cli import main


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A model of any batch, and an input of three rows beside it."""
    (tmp_path / "model.onnx").write_bytes(perceptron().SerializeToString())
    np.save(tmp_path / "x.npy", np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8))
    return str(tmp_path / "model.onnx")


def test_a_model_runs_with_the_shapes_of_its_inputs_files(path: str, url: str, tmp_path: Path) -> None:
    inputs = ("--input", f"x={tmp_path}/x.npy")
    assert main(["run", path, "--server", url, *inputs, "--output", str(tmp_path / "out")]) == 0
    expected = perceptron_result(perceptron(), np.load(tmp_path / "x.npy"))
    np.testing.assert_allclose(np.load(tmp_path / "out" / "y.npy"), expected, rtol=1e-5)


def test_symbols_are_given_as_sizes(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", path, "--server", "local:", "--shape", "batch=5", "--input", "x=@random"]) == 0
    assert "f32[5, 4]" in capsys.readouterr().out
    assert main(["explain", path, "--server", "local:", "--shape", "x=2,8", "--nodes"]) == 0
    assert "second/" in capsys.readouterr().out


def test_what_is_missing_is_said(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", path, "--server", "local:"]) == 1
    assert "the shape of input 'x' is not known" in capsys.readouterr().err
    assert main(["explain", path, "--server", "local:", "--shape", "x=two"]) == 1
    assert "--shape 'x=two' has no name or sizes" in capsys.readouterr().err
    assert main(["run", path, "--server", "local:", "--input", "X=x.npy"]) == 1
    assert "no input 'X'" in capsys.readouterr().err
    assert main(["run", path, "--server", "local:", "--input", "x=missing.npy"]) == 1
    assert "error: missing.npy is not a file" in capsys.readouterr().err
    assert main(["run", path, "--server", "local:"]) == 1
    assert "--input NAME=FILE.npy" in capsys.readouterr().err
    assert main(["run", "missing.onnx", "--server", "local:"]) == 1
    assert "error: cannot read 'missing.onnx': No such file or directory\n" in capsys.readouterr().err
    (tmp_path / "empty.onnx").write_bytes(b"")
    assert main(["run", str(tmp_path / "empty.onnx"), "--server", "local:"]) == 1
    assert "is no ONNX model" in capsys.readouterr().err
