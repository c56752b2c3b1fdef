"""Modules that are exported, compiled and run: shapes, weights, inputs, outputs and errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from torch import nn  # noqa: E402
from torch_modules import block, convolutional, perceptron  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_near(found: object, wanted: object, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.function(self, *args, **options)


def run(module: nn.Module, *inputs: Any, session: hg.Session) -> Any:
    return hg.torch.export(module, inputs).compile(session)(*inputs)


@pytest.mark.parametrize("make", [perceptron, convolutional, block])
def test_a_small_model_is_within_1e_5_of_eager(make: Any, session: hg.Session) -> None:
    torch.manual_seed(1)
    module, inputs = make()
    with torch.no_grad():
        assert_near(run(module, *inputs, session=session), module(*inputs))


# Shapes


def test_sizes_that_vary_are_bound_by_the_first_run(local: hg.Session) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    model = hg.torch.export(module, torch.randn(2, 4), dynamic={"input": {0: "batch"}})
    assert model.inputs == (hg.torch.Argument("input", "f32", ("batch", 4)),)
    assert model.outputs == (hg.torch.Argument("output", "f32", ("3*batch",)),)
    plan = model.compile(local)
    assert not plan.plans
    for batch in (5, 1, 5):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert_near(plan(x), module(x))
    assert len(plan.plans) == 2


def test_a_plan_is_made_at_once_where_all_sizes_are_given(local: hg.Session) -> None:
    model = hg.torch.export(nn.Linear(4, 3), torch.randn(2, 4), dynamic={"input": {0: "batch"}})
    assert len(model.compile(local, {"batch": 7}).plans) == 1
    assert len(model.compile(local, {"input": (7, 4)}).plans) == 1
    with pytest.raises(hg.InvalidArgumentError, match="no input or dimension 'width'"):
        model.compile(local, {"width": 7})
    with pytest.raises(hg.InvalidArgumentError, match=r"input 'input' has shape \['batch', 4\]"):
        model.compile(local, {"input": (7, 5)})


def test_every_dimension_may_vary(local: hg.Session) -> None:
    module = Calls(lambda self, x, y: (x @ y.T, x.new_ones(x.shape[0]), x.reshape(-1), x[1:]))
    model = hg.torch.export(module, (torch.randn(3, 4), torch.randn(5, 4)), dynamic=True)
    plan = model.compile(local)
    for rows, others, width in ((2, 3, 4), (6, 2, 9)):
        x, y = torch.randn(rows, width), torch.randn(others, width)
        assert_near(plan(x, y), module(x, y))


def test_plans_are_kept_for_the_last_shapes_alone(local: hg.Session) -> None:
    model = hg.torch.export(nn.ReLU(), torch.randn(2), dynamic=True)
    plan = model.compile(local)
    for size in range(1, 20):
        plan(torch.randn(size))
    assert len(plan.plans) == 16


# Weights


def test_a_weight_with_two_names_is_in_the_graph_once() -> None:
    module, inputs = block()
    weights = [one for one in hg.torch.export(module, inputs).graph().find("*") if one.op == "weight"]
    assert sum(one.shape == (50, 32) for one in weights) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_float_and_any_strides_are_taken(dtype: Any, local: hg.Session) -> None:
    module = Calls(
        lambda self, x: (x @ self.weight + self.buffer, self.sliced.sum(1)),
        weight=nn.Parameter(torch.randn(3, 5, dtype=dtype).T),
        sliced=nn.Parameter(torch.randn(4, 9, dtype=dtype)[:, 1::2]),
    )
    module.register_buffer("buffer", torch.randn(1, dtype=dtype).expand(3))
    x = torch.randn(2, 5, dtype=dtype)
    near = {torch.bfloat16: 3e-2, torch.float16: 5e-3}.get(dtype, 1e-5)
    with torch.no_grad():
        assert_near(run(module, x, session=local), module(x), near)


def test_a_later_compile_sees_weights_that_changed(local: hg.Session) -> None:
    module = nn.Linear(4, 3)
    model, x = hg.torch.export(module, torch.randn(2, 4)), torch.randn(2, 4)
    with torch.no_grad():
        module.weight.mul_(2)
        assert_near(model.compile(local)(x), module(x))


def test_weights_that_are_nan_are_refused_by_name() -> None:
    module = nn.Linear(4, 3)
    with torch.no_grad():
        module.weight[1, 2] = float("nan")
    with pytest.raises(hg.InvalidModelError, match="weight 'weight' has elements that are NaN"):
        hg.torch.export(module, torch.randn(2, 4)).graph()


# Inputs and outputs


def test_results_have_the_structure_and_the_names_of_what_forward_returns(local: hg.Session) -> None:
    module = Calls(lambda self, x, more, flag: {"y": x + more["z"], "all": [x, (None, x.sum())], "three": 3})
    given = (torch.randn(2), {"z": torch.ones(2)}, True)
    model = hg.torch.export(module, given)
    assert [one.name for one in model.outputs] == ["y", "all_0", "all_1_1"]
    plan = model.compile(local)
    found = plan(*given)
    assert_near(found["y"], given[0] + 1)
    assert_near(found["all"], [given[0], (None, given[0].sum())])
    assert found["three"] == 3
    by_name = dict(zip([one.name for one in model.inputs], [given[0], given[1]["z"]], strict=True))
    assert_near(plan.run(by_name)["y"], given[0] + 1)
    with pytest.raises(hg.InvalidInputError, match=r"'args\[1\]' was of type dict .* and is missing"):
        plan(torch.randn(2))


def test_arrays_give_arrays_and_tensors_give_tensors(local: hg.Session) -> None:
    import ml_dtypes

    plan = hg.torch.export(nn.ReLU(), torch.randn(2, 3, dtype=torch.bfloat16)).compile(local)
    x = torch.randn(2, 3).bfloat16()
    (found,) = plan.run(input=x).values()
    assert torch.equal(found, x.relu())
    (array,) = plan.run(input=x.float().numpy().astype(ml_dtypes.bfloat16)).values()
    assert isinstance(array, np.ndarray) and array.dtype == ml_dtypes.bfloat16


def test_inputs_that_do_not_fit_are_refused(local: hg.Session) -> None:
    plan = hg.torch.export(nn.Linear(4, 3), torch.randn(2, 4)).compile(local)
    with pytest.raises(hg.InvalidInputError, match="'input' is missing"):
        plan.run()
    with pytest.raises(hg.InvalidInputError, match="no input 'x'"):
        plan.run(x=torch.randn(2, 4))
    with pytest.raises(hg.InvalidInputError, match=r"has shape \[2, 4\], and \[3, 4\] is given"):
        plan(torch.randn(3, 4))
    with pytest.raises(hg.InvalidInputError, match=r"of torch.float32, and torch.float64 is given"):
        plan(torch.randn(2, 4).double())
    with pytest.raises(hg.InvalidInputError, match="an array of f16 for f32"):
        plan.run(input=np.zeros((2, 4), np.float16))


def test_arguments_that_are_no_tensors_keep_the_values_of_the_export(local: hg.Session) -> None:
    def scaled(self: nn.Module, x: torch.Tensor, count: int, mask: Any = None) -> torch.Tensor:
        return x * count if mask is None else x * count * mask

    x = torch.ones(3)
    plan = hg.torch.export(Calls(scaled), (x, 4, None)).compile(local)
    assert_near(plan(x, 4, None), x * 4)
    with pytest.raises(hg.InvalidInputError, match="was 4 when the module was exported, and is 5"):
        plan(x, 5, None)
    with pytest.raises(hg.InvalidInputError):
        plan(x, 4, x)


def test_random_numbers_follow_torchs_seed(local: hg.Session) -> None:
    def numbers(self: nn.Module, x: torch.Tensor) -> Any:
        return torch.native_dropout(x, 0.25, True)[0], torch.rand(4000), torch.randn(4000), torch.randperm(9)

    module = Calls(numbers)
    plan = hg.torch.export(module, torch.ones(4000)).compile(local)
    torch.manual_seed(5)
    first, second = plan(torch.ones(4000)), plan(torch.ones(4000))
    torch.manual_seed(5)
    again = plan(torch.ones(4000))
    for one, other, same in zip(first, second, again, strict=True):
        assert torch.equal(one, same) and not torch.equal(one, other)
    dropped, uniform, normal, order = first
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.03) and 0 <= uniform.min() <= uniform.max() < 1
    assert normal.mean().item() == pytest.approx(0, abs=0.08) and normal.std().item() == pytest.approx(
        1, abs=0.06
    )
    assert sorted(order.tolist()) == list(range(9))


def test_places_are_drawn_by_their_weights(local: hg.Session) -> None:
    weights = torch.tensor([0.0, 3.0, 1.0]).repeat(3000, 1)
    torch.manual_seed(5)
    for count, replacement in ((1, False), (2, False), (5, True)):
        found = run(Calls(lambda self, w: torch.multinomial(w, count, replacement)), weights, session=local)  # noqa: B023
        assert found.shape == (3000, count) and found.min() >= 1 and found.max() <= 2
        if count != 2:
            assert (found == 1).float().mean().item() == pytest.approx(0.75, abs=0.03)
        else:
            assert (found.sum(1) == 3).all()


def test_the_largest_so_far_is_nan_from_the_first_one_on(local: hg.Session) -> None:
    x = torch.tensor([[1.0, float("nan"), 3.0, float("nan")], [2.0, 2.0, 1.0, 2.0]])
    module = Calls(lambda self, x: (x.cummax(1), x.cummin(1), x.median(1), x.nanmedian(1), x.nanmedian()))
    for found, wanted in zip(
        torch.utils._pytree.tree_leaves(run(module, x, session=local)),
        torch.utils._pytree.tree_leaves(module(x)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_number_that_a_run_computes_scales_a_tensor(local: hg.Session) -> None:
    module, x = Calls(lambda self, x: x * x.sum().item()), torch.randn(3)
    assert_near(run(module, x, session=local), module(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, i: nn.functional.cross_entropy(x, i),
        lambda self, x, i: x.gather(1, i[:, None]),
        lambda self, x, i: x.scatter(1, i[:, None], 0.0),
        lambda self, x, i: x[i, i],
        lambda self, x, i: x.index_put((i, i), torch.zeros(2)),
    ],
)
def test_an_index_outside_of_its_dimension_is_an_error_of_the_run(function: Any, local: hg.Session) -> None:
    torch.manual_seed(4)
    module, x, fit = Calls(function), torch.randn(2, 2), torch.tensor([1, 0])
    plan = hg.torch.export(module, (x, fit)).compile(local)
    assert_near(plan(x, fit), module(x, fit))
    for outside in (torch.tensor([2, 0]), torch.tensor([0, 3])):
        with pytest.raises(hg.OutOfRangeError) as caught:
            plan(x, outside)
        assert re.search(r"test_modules\.py:\d+ in ", caught.value.origin.source)


# Refused modules


def test_control_flow_that_depends_on_data_is_refused_with_its_line() -> None:
    module = Calls(lambda self, x: x if x.sum() > 0 else -x)
    with pytest.raises(hg.UnsupportedError, match=r"control flow depends on data, .*test_modules.py:\d+"):
        hg.torch.export(module, torch.randn(3))


def test_a_shape_that_a_run_decides_is_refused_with_its_line() -> None:
    module = Calls(lambda self, x: x[x > 0])
    (missing,) = hg.torch.supported(module, torch.randn(3))
    assert missing.op == "aten.index.Tensor" and "test_modules.py" in missing.source
    with pytest.raises(hg.UnsupportedError, match=r"aten.index.Tensor, .*test_modules.py:\d+"):
        hg.torch.export(module, torch.randn(3)).graph()


def test_ops_without_a_rule_are_named_with_their_lines() -> None:
    module = Calls(lambda self, x: (torch.linalg.svdvals(x), torch.fft.rfft(x), x.nonzero(), x + 1))
    found = hg.torch.supported(module, torch.randn(3, 3))
    assert [one.op for one in found] == [
        "aten._linalg_svd.default",
        "aten._fft_r2c.default",
        "aten.nonzero.default",
    ]
    assert all("test_modules.py" in one.source and one.reason for one in found)
    with pytest.raises(hg.UnsupportedError, match=r"_linalg_svd.*test_modules.py:\d+.*no decompositions"):
        hg.torch.export(module, torch.randn(3, 3)).graph()
    assert hg.torch.supported(nn.Linear(3, 3), torch.randn(3, 3)) == ()


def test_a_module_that_changes_its_buffers_is_refused() -> None:
    with pytest.raises(hg.UnsupportedError, match=r"'running_mean': the module changes it.*\n?.*eval"):
        hg.torch.export(nn.BatchNorm1d(3), torch.randn(4, 3))
    (first, *_) = hg.torch.supported(nn.BatchNorm1d(3), torch.randn(4, 3))
    assert first.node == "running_mean" and "changes" in first.reason


def test_a_module_with_a_hook_is_refused_unless_the_hook_is_a_part_of_it(local: hg.Session) -> None:
    module = nn.Sequential(nn.ReLU())
    module[0].register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(hg.UnsupportedError, match=r"module '0' has a hook, .*test_modules.py:\d+"):
        hg.torch.export(module, torch.randn(3))
    x = torch.randn(3)
    model = hg.torch.export(module, x, trace_hooks=True)
    assert_near(model.compile(local)(x), module(x))


def test_inputs_that_forward_does_not_take_are_refused() -> None:
    with pytest.raises(hg.InvalidArgumentError, match="do not fit forward"):
        hg.torch.export(nn.ReLU(), (torch.randn(3), torch.randn(3)))
    with pytest.raises(hg.InvalidArgumentError, match="no argument 'x'"):
        hg.torch.export(nn.ReLU(), torch.randn(3), dynamic={"x": {0: "n"}})
    with pytest.raises(hg.InvalidArgumentError, match=r"function is no torch.nn.Module"):
        hg.torch.export(lambda x: x, torch.randn(3))


def test_complex_and_sparse_tensors_are_refused() -> None:
    with pytest.raises(hg.UnsupportedError, match=r"no data type for torch.complex64"):
        hg.torch.export(nn.Identity(), torch.randn(3, dtype=torch.complex64)).graph()
    module = Calls(lambda self, x: x + self.weight, weight=nn.Parameter(torch.randn(3, device="meta")))
    with pytest.raises(hg.InvalidArgumentError, match="the weight 'weight' on 'meta'"):
        hg.torch.export(module, torch.randn(3)).graph()
