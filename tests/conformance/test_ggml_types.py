"""Whatever data types ggml's CPU computes an op for, we take them, and the comparison with ggml has them.

Every combination is tried in a process of its own, which takes minutes: `make test-peer-types` runs this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from peers import ggml, ggml_child, ggml_types
from peers.ggml_ops import COUNTERPARTS
from peers.ggml_process import GgmlProcess

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        ggml.library_path() is None, reason="ggml's library is not installed: `make test-peer-types` gets it"
    ),
]


@pytest.fixture(scope="module")
def peer() -> Iterator[GgmlProcess]:
    process = GgmlProcess()
    yield process
    process.close()


@pytest.mark.parametrize("op", COUNTERPARTS)
def test_we_take_and_compare_what_ggml_computes(peer: GgmlProcess, op: str) -> None:
    found = peer(ggml_types.types_of, op)
    print(f"seed {ggml_types.SEED}: ggml computes {len(found.computed)} of {found.tried}")
    assert not found.refused
    assert not found.left_out
    assert found.computed or op == "arange", "ggml takes none of the types"


def raised() -> object:
    return ggml_child.in_child(lambda: ggml.Graph(8).weight("f32", (1,) * 5))


def ended() -> object:
    return ggml_child.in_child(os.abort)


@pytest.mark.parametrize("trial", [raised, ended])
def test_a_trial_that_fails_is_none(peer: GgmlProcess, trial: Callable[[], object]) -> None:
    assert peer(trial) is None
