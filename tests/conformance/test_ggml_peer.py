"""Our ops against ggml itself: the conformance cases, and blocks of quantized types.

ggml's library is no dependency: `make test-peers` gets it and runs this module. Without it all is
skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from peers import ggml, ggml_blocks, ggml_trial
from peers.ggml_compare import SEED, compare_op
from peers.ggml_names import without_counterpart
from peers.ggml_ops import COUNTERPARTS
from peers.ggml_process import GgmlProcess

from heliograph_proto.ops.table import OPS

pytestmark = pytest.mark.skipif(
    ggml.library_path() is None, reason="ggml's library is not installed: `make test-peers` gets it"
)
#: Ops that have their counterpart here before they are in the op table.
COMPARED = [op for op in COUNTERPARTS if op in OPS]


@pytest.fixture(scope="module")
def peer() -> Iterator[GgmlProcess]:
    process = GgmlProcess()
    yield process
    process.close()


@pytest.mark.parametrize("op", COMPARED)
def test_ggml_computes_what_our_definition_says(peer: GgmlProcess, op: str) -> None:
    found = peer(compare_op, op)
    listed = "\n".join(found.differences)
    assert not found.differences, f"seed {SEED}: ggml differs in\n{listed}"
    assert found.compared, f"ggml took none of the cases: {dict(found.not_taken)}"


def test_every_op_with_a_name_of_ggmls_is_compared_with_it(peer: GgmlProcess) -> None:
    """A new op needs a row in COUNTERPARTS, or a reason in ggml_names."""
    assert peer(without_counterpart) == []


@pytest.mark.parametrize("name", ggml_blocks.ENCODED)
def test_blocks_have_the_bits_of_ggmls_reference(peer: GgmlProcess, name: str) -> None:
    assert peer(ggml_blocks.different_bytes, name) == 0


@pytest.mark.parametrize("name", ggml_blocks.DECODED)
def test_blocks_stand_for_the_same_floats_as_in_ggml(peer: GgmlProcess, name: str) -> None:
    assert peer(ggml_blocks.different_floats, name) == 0


@pytest.mark.parametrize("name", ggml_blocks.DECODED)
def test_products_of_blocks_are_within_ggmls_tolerance(peer: GgmlProcess, name: str) -> None:
    """ggml rounds the activations to blocks of 8 bits first, and ours does not."""
    peer(ggml_blocks.product_error, name)


def test_a_graph_is_planned_by_ggmls_allocator_and_run(peer: GgmlProcess) -> None:
    """Elementwise nodes take over the product's memory, unless it is an output; weights are not
    counted."""
    size, (chain, two_outputs), error = peer(ggml_trial.planned_and_run)
    assert (chain, two_outputs) == (size + 8 * 64 * 4, size + 2 * 8 * 64 * 4)
    assert error < 1e-3


def test_a_process_that_ggml_ended_is_started_anew(peer: GgmlProcess) -> None:
    with pytest.raises(RuntimeError, match="ended with -6"):
        peer(os.abort)
    assert peer(ggml.version)
