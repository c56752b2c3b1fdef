"""`hg.einsum` against NumPy's, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import heliograph as hg

SEED = 11
#: Subscripts and the operands' shapes.
CASES: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ij,jk->ik", [(2, 3), (3, 4)]), ("ij,jk", [(2, 3), (3, 4)]), ("ij,kj->ki", [(2, 3), (4, 3)]),
    ("bij,bjk->bik", [(5, 2, 3), (5, 3, 4)]), ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("ij->ji", [(2, 3)]), ("ji", [(2, 3)]), ("ij->", [(2, 3)]), ("ij->i", [(2, 3)]), ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]), ("iij->j", [(3, 3, 2)]), ("iii->i", [(3, 3, 3)]), ("ijij->ij", [(2, 3, 2, 3)]),
    ("i,j->ij", [(2,), (3,)]), ("i,i", [(4,), (4,)]), ("i,i->i", [(4,), (4,)]), (",", [(), ()]),
    (",ij->ji", [(), (2, 3)]), ("i,ij,j->", [(2,), (2, 3), (3,)]),
    ("ab,bc,cd,de->ae", [(2, 9), (9, 3), (3, 8), (8, 2)]),
    ("...ij,...jk->...ik", [(5, 1, 2, 3), (4, 3, 2)]),
    ("...i->...", [(2, 3, 4)]), ("i...->...i", [(2, 3, 4)]),
    ("...,...", [(2, 3), (3,)]), ("i...,i...->...", [(2, 3), (2, 3)]), ("...ij->...ji", [(2, 3)]),
    ("ijk,k->ij", [(2, 3, 4), (4,)]), ("ijk,jil->kl", [(3, 4, 5), (4, 3, 2)]), ("ij,ij->j", [(2, 3), (2, 3)]),
    ("ij,jk->ik", [(2, 1), (3, 4)]), ("bi,bi->b", [(1, 3), (5, 3)]), ("ij,jk->ik", [(2, 0), (0, 4)]),
    (" ij , jk -> i k ", [(2, 3), (3, 4)]), ("aB,Bc->ca", [(2, 3), (3, 4)]), ("ij,kl->il", [(2, 3), (4, 5)]),
]  # fmt: skip


@pytest.mark.parametrize(("subscripts", "shapes"), CASES, ids=[f"{a} {b}" for a, b in CASES])
def test_sums_are_those_of_numpy(local: hg.Session, subscripts: str, shapes: list[tuple[int, ...]]) -> None:
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    arrays = [random.standard_normal(shape) for shape in shapes]
    g = hg.Graph()
    values = [g.input(f"x{place}", one.shape, "f64") for place, one in enumerate(arrays)]
    g.output("y", hg.einsum(subscripts, *values))
    found = local.compute(g, {f"x{place}": one for place, one in enumerate(arrays)})["y"]
    if subscripts == "ij,jk->ik" and shapes[0] == (2, 1):
        # NumPy's own stretches a dimension of 1 as well, in some versions.
        arrays[0] = np.broadcast_to(arrays[0], (2, 3))
    np.testing.assert_allclose(found, np.einsum(subscripts, *arrays), rtol=1e-12, atol=1e-12)


def test_integers_stay_integers(local: hg.Session) -> None:
    g = hg.Graph()
    x = g.constant(np.arange(6, dtype=np.int32).reshape(2, 3))
    g.output("y", hg.einsum("ij,kj->ik", x, x))
    found = local.compute(g)["y"]
    assert found.dtype == np.int32 and found.tolist() == [[5, 14], [14, 50]]


def test_a_chain_is_multiplied_from_its_cheap_end() -> None:
    g = hg.Graph()
    big, small = g.input("big", (64, 64), "f32"), g.input("v", (64,), "f32")
    y = hg.einsum("ij,jk,k->i", big, big, small)
    assert y.shape == (64,)
    assert all(max(one.size for one in [value]) <= 64 * 64 for value in g.find("matmul_*"))
    assert all(value.size <= 64 for value in g.find("matmul_*"))


def test_subscripts_that_do_not_fit_are_refused() -> None:
    g = hg.Graph()
    x, y = g.input("x", (2, 3), "f32"), g.input("y", (4, 3), "f32")
    for message, call in {
        "names 2 operands, not 1": lambda: hg.einsum("ij,jk", x),
        "'ijk' for f32": lambda: hg.einsum("ijk->i", x),
        "'j' is 3 and 4": lambda: hg.einsum("ij,jk", x, y),
        "no operand has 'z'": lambda: hg.einsum("ij->z", x),
        "the result has no '...' for 1 dimensions": lambda: hg.einsum("...i->i", x),
        "has a letter twice": lambda: hg.einsum("ij->ii", x),
        r"'\.' is no letter": lambda: hg.einsum("i.j->ij", x),
        "'1' is no letter": lambda: hg.einsum("i1->i", x),
        "are no subscripts": lambda: hg.einsum(x, "ij"),
    }.items():
        with pytest.raises(hg.InvalidGraphError, match=message) as caught:
            call()
        assert "test_einsum.py" in caught.value.origin.source
