"""Modules that are exported, compiled and run, beside what eager torch computes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from torch_modules import block, convolutional, perceptron  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def assert_near(found: object, wanted: object, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", [perceptron, convolutional, block])
def test_a_small_model_is_within_1e_5_of_eager(make, session: hg.Session) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    module, inputs = make()
    with torch.no_grad():
        assert_near(hg.torch.export(module, inputs).compile(session)(*inputs), module(*inputs))
