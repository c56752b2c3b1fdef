"""Attention over pages: the bits of attention over the same keys and values side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from backend_graphs import Array, Maker, loaded, normalised_error, nothing_left, run, same_bits

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.quantization import blocks
from heliograph_proto.quantization.blocks import quantize

TYPES = ("float32", "float16", "bf16", "q8_0", "q4_0")
WIDTH = 64


class Form(NamedTuple):
    """Rows of the batch, queries of each, heads, heads of the keys, pages in all, positions of a
    page, pages of a row."""

    batch: int = 2
    queries: int = 1
    heads: int = 4
    own: int = 2
    count: int = 9
    page: int = 32
    used: int = 5

    @property
    def positions(self) -> int:
        return self.page * self.used


def stored(x: Array, name: str) -> tuple[Array, str]:
    if name == "bf16":
        return np.asarray(blocks.to_bits(x)), name
    return (x.astype(name), "") if name.startswith("float") else (quantize(x, name), name)


class Case:
    """Random operands; keys and values lie as in a cache, in rows of all heads side by side."""

    def __init__(self, random: np.random.Generator, form: Form, name: str = "float16") -> None:
        self.form, self.name, self.sinks = form, name, None
        rows = form.count * form.page
        self.q = random.standard_normal((form.batch, form.heads, form.queries, WIDTH), np.float32)
        self.k, self.v = (random.standard_normal((rows, form.own * WIDTH), np.float32) for _ in range(2))
        self.pages = random.integers(0, form.count, (form.batch, form.used)).astype(np.int32)
        self.lengths = random.integers(form.queries, form.positions + 1, form.batch)
        self.mask = self.shown(self.lengths).astype(np.float16)

    def shown(self, lengths: Array) -> Array:
        """A mask by which the last query of each row sees so many positions."""
        last = lengths[:, None] - self.form.queries + np.arange(self.form.queries)
        hidden = np.arange(self.form.positions) > last[:, :, None]
        return np.where(hidden, -np.inf, 0.0)[:, None]

    def paged(self, **attributes: Any) -> Maker:
        made, form = Maker(), self.form
        found = []
        for each in (self.k, self.v):
            leaf = made.input(*stored(each, self.name))
            apart = made.node("reshape", leaf, shape=(form.count, form.page, form.own, WIDTH))
            found.append(made.node("permute", apart, axes=(0, 2, 1, 3)))
        rest = [made.input(each) for each in (self.mask, self.pages)]
        rest += [made.input(self.sinks)] if self.sinks is not None else []
        attributes = {"scale": WIDTH**-0.5, **attributes}
        made.output(made.node("flash_attn_paged", made.input(self.q), *found, *rest, **attributes))
        return made

    def gathered(self, rows: slice = slice(None), **attributes: Any) -> Maker:
        """The same of some rows of the batch over contiguous keys and values."""
        made, form = Maker(), self.form
        found = []
        for each in (self.k, self.v):
            apart = each.reshape(form.count, form.page, form.own, WIDTH).transpose(0, 2, 1, 3)
            mine = apart[self.pages[rows]].swapaxes(1, 2)
            shape = (mine.shape[0], form.own, form.positions, WIDTH)
            found.append(made.input(*stored(np.ascontiguousarray(mine).reshape(shape), self.name)))
        mask = self.mask if len(self.mask) == 1 else np.ascontiguousarray(self.mask[rows])
        rest = [made.input(mask)] + ([made.input(self.sinks)] if self.sinks is not None else [])
        attributes = {"scale": WIDTH**-0.5, **attributes}
        q = made.input(np.ascontiguousarray(self.q[rows]))
        made.output(made.node("flash_attn_ext", q, *found, *rest, **attributes))
        return made

    def check(self, device: CpuDevice, **attributes: Any) -> Array:
        """The bits of both."""
        (found,) = run(device, self.paged(**attributes))
        (wanted,) = run(device, self.gathered(**attributes))
        assert same_bits(found, wanted)
        return found


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("queries", "heads"), [(1, 2), (1, 4), (1, 16), (3, 4), (7, 2), (70, 2)], ids=str)
def test_pages_give_the_bits_of_contiguous_keys(
    name: str, queries: int, heads: int, device: CpuDevice, random: np.random.Generator
) -> None:
    for page in (32, 64, 128):
        form = Form(queries=queries, heads=heads, page=page, used=max(3, 256 // page))
        Case(random, form, name).check(device)


@pytest.mark.parametrize("page", [1, 5, 16, 48, 100, 160, 256])
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("name", ["float32", "float16", "q8_0"])
def test_pages_of_any_size(
    name: str, queries: int, page: int, device: CpuDevice, random: np.random.Generator
) -> None:
    form = Form(queries=queries, page=page, used=-(-300 // page))
    Case(random, form, name).check(device)


def test_a_row_has_its_bits_among_any_number_of_rows(device: CpuDevice, random: np.random.Generator) -> None:
    whole = Case(random, Form(batch=32, count=40))
    (found,) = run(device, whole.paged())
    for first, count in ((0, 1), (3, 2), (8, 8), (5, 27), (31, 1)):
        rows = slice(first, first + count)
        (alone,) = run(device, whole.gathered(rows))
        assert same_bits(np.ascontiguousarray(found[rows]), alone)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mask", [np.float16, np.float32])
def test_sinks_slopes_and_caps(batch: int, mask: Any, device: CpuDevice, random: np.random.Generator) -> None:
    case = Case(random, Form(batch=batch, queries=2))
    bias = random.standard_normal(case.mask.shape) + case.mask
    case.mask = bias.astype(mask)
    case.check(device, max_bias=8.0)
    case.check(device, logit_softcap=3.0)
    case.sinks = random.standard_normal(4, np.float32)
    case.check(device)
    case.check(device, max_bias=4.0, logit_softcap=2.0)
    case.mask = case.mask[:1]
    case.check(device)


@pytest.mark.parametrize("queries", [1, 9])
def test_a_window_hides_the_first_pages(queries: int, device: CpuDevice, random: np.random.Generator) -> None:
    case = Case(random, Form(queries=queries, used=9))
    case.mask[..., :70] = -np.inf
    case.check(device)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("name", ["float32", "float16", "q8_0"])
def test_pages_that_the_mask_hides_are_not_read(
    name: str, queries: int, device: CpuDevice, random: np.random.Generator
) -> None:
    """Beside shown pages of the same block of keys, and in blocks of their own."""
    case = Case(random, Form(queries=queries, used=9, count=10), name)
    shown = np.zeros(9, bool)
    shown[[0, 2, 6]] = True
    case.mask = np.where(np.repeat(shown, 32), 0, -np.inf).astype(np.float16)[None, None, None]
    case.mask = np.tile(case.mask, (1, 1, queries, 1))
    case.pages[:] = np.where(shown, random.integers(0, 9, (2, 9)), 9)
    expected = case.check(device)
    case.k[9 * 32 :] = case.v[9 * 32 :] = np.nan if name != "q8_0" else 0
    (found,) = run(device, case.paged())
    assert same_bits(found, expected)


def test_rows_share_pages(device: CpuDevice, random: np.random.Generator) -> None:
    case = Case(random, Form(batch=3))
    case.pages[:] = case.pages[0]
    case.check(device)


def test_a_row_that_sees_nothing_is_zero(device: CpuDevice, random: np.random.Generator) -> None:
    case = Case(random, Form(batch=3))
    case.mask[1] = -np.inf
    found = case.check(device)
    assert not found[1].any() and found[0].any()


@pytest.mark.parametrize("wrong", [-1, 9, 2**31 - 1])
@pytest.mark.parametrize("native", [True, False])
def test_a_number_of_no_page_ends_the_run(wrong: int, native: bool, random: np.random.Generator) -> None:
    """Also where the mask hides its positions, and after it the plan runs again."""
    case = Case(random, Form(batch=3))
    case.mask[1] = -np.inf
    right = case.pages[1, 3]
    case.pages[1, 3] = wrong
    message = rf"flash_attn_paged: index {wrong} is not one of 9 pages, at \[1, 3\] of the indices"
    with nothing_left(CpuDevice(threads=2, memory_bytes=2**28, native=native)) as device:
        with pytest.raises(OutOfRangeError, match=message):
            run(device, case.paged())
        case.pages[1, 3] = right
        run(device, case.paged())


@pytest.mark.parametrize("threads", [1, 5])
def test_threads_change_no_bits(threads: int, random: np.random.Generator) -> None:
    case = Case(random, Form(batch=4, heads=8, own=4, used=9))
    with nothing_left(CpuDevice(threads=threads, memory_bytes=2**28)) as device:
        case.check(device)


@pytest.mark.parametrize("name", TYPES)
def test_one_step_reads_pages_in_place(name: str, random: np.random.Generator) -> None:
    made = Case(random, Form(batch=3), name).paged()
    with (
        nothing_left(CpuDevice(threads=1, memory_bytes=2**28)) as device,
        nothing_left(CpuDevice(threads=1, memory_bytes=2**28, native=False)) as definition,
    ):
        (found,), (wanted,) = run(device, made), run(definition, made)
        assert normalised_error(found, wanted) < 1e-11
        with loaded(device, made) as it:
            assert isinstance(it.plan, CpuPlan)
            assert it.plan.steps == len(it.plan._native) == 1
