"""Core ATen op by op, beside eager torch: several data types, strides and views."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from torch_cases import CASES, Case, core_ops, filled, tensors_in  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

#: Core ops that are refused by name: complex numbers, shapes that a run computes, and memory that
#: changes its size.
REFUSED = {"_fft_c2r", "_fft_r2c", "nonzero", "resize_"}
#: Those of the backward pass, which `test_training` has.
BACKWARD = {name.partition(".")[0] for name in core_ops() if "backward" in name}
#: Random numbers, whose tests are below, and questions about sizes, which `test_modules` asks.
APART = {"native_dropout", "rand", "randn", "randperm", "_local_scalar_dense", "empty", "empty_strided"}
SIZES = {name.partition(".")[0] for name in core_ops() if name.startswith("sym_")}
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


#: Ops that take contiguous tensors alone, or look at their memory.
PLAIN = {
    "_embedding_bag",
    "_int_mm",
    "_pdist_forward",
    "as_strided",
    "native_group_norm",
    "native_group_norm_backward",
    "view",
}
#: Ops whose further results only their gradient reads.
FIRST = {"_embedding_bag", "adaptive_max_pool2d", "adaptive_max_pool3d"}


def twisted(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in memory of another order, with gaps."""
    if not tensor.ndim:
        return tensor
    wide = torch.zeros([2 * size + 1 for size in reversed(tensor.shape)], dtype=tensor.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)].permute(*reversed(range(tensor.ndim)))
    return view.copy_(tensor)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which a module cuts off the first elements."""
    return torch.cat([tensor[..., :1], tensor], -1).movedim(-1, 0).contiguous() if tensor.ndim else tensor


def cut(tensor: torch.Tensor) -> torch.Tensor:
    """The opposite of `widened`, as views."""
    return tensor[1:].movedim(0, -1) if tensor.ndim else tensor


FORMS = {"as it is": lambda tensor: tensor, "twisted": twisted, "cut": widened}


class Cases(torch.nn.Module):
    """An op applied to all of its cases, to some of them in views that are made here."""

    def __init__(self, op: str, cases: list[tuple[Case, str]]) -> None:
        super().__init__()
        self.packet, _, overload = op.partition(".")
        self.op = getattr(getattr(torch.ops.aten, self.packet), overload)
        self.cases = cases

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        found = []
        left = iter(tensors)
        for one, form in self.cases:
            given = [next(left) for _ in tensors_in(one.arguments)]
            given = [cut(tensor) for tensor in given] if form == "cut" else given
            result = self.op(*filled(one.arguments, iter(given)), **one.options)
            found.append(result[0] if self.packet in FIRST else result)
        return found


def cases_of(op: str) -> tuple[list[tuple[Case, str]], list[torch.Tensor]]:
    """Each case in each data type; in the first one also of tensors of other strides."""
    torch.manual_seed(7)
    cases, inputs = [], []
    for one in CASES[op]:
        for number, dtype in enumerate(one.dtypes):
            made = [of.make(dtype) for of in tensors_in(one.arguments)]
            for form in FORMS if number == 0 and op.partition(".")[0] not in PLAIN else ("as it is",):
                cases.append((one, form))
                inputs += [FORMS[form](tensor) for tensor in made]
    return cases, inputs


@pytest.mark.parametrize("op", sorted(CASES))
def test_an_op_gives_what_eager_torch_gives(op: str, local: hg.Session) -> None:
    cases, inputs = cases_of(op)
    module = Cases(op, cases)
    wanted = torch.utils._pytree.tree_leaves(module(*inputs))
    found = torch.utils._pytree.tree_leaves(hg.torch.export(module, inputs).compile(local)(*inputs))
    assert len(found) == len(wanted)
    for number, (mine, eager) in enumerate(zip(found, wanted, strict=True)):
        near = TOLERANCES.get(eager.dtype, 0)
        torch.testing.assert_close(
            mine, eager, rtol=near, atol=near, equal_nan=True, check_stride=False,
            msg=lambda text, number=number: f"{op}, result {number}: {text}",
        )  # fmt: skip


def test_nearly_all_of_core_aten_has_cases() -> None:
    core = {name.partition(".")[0] for name in core_ops()}
    covered = {name.partition(".")[0] for name in CASES}
    assert core - covered == (REFUSED | BACKWARD | APART | SIZES) & core - covered
    assert len(core - REFUSED) >= 145
