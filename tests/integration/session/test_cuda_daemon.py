"""The CUDA backend on an emulated GPU through a daemon: a model's runs, replays, and what is said of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from cuda_emulation import compile_all, why_not
from forked_daemons import running_daemon
from paths import SUPPORT

import heliograph as hg
from heliograph.models.bert import BertConfig, BertEncoder, join_attention_weights, weight_shapes

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

CONFIG = BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
    max_position_embeddings=16, layer_norm_eps=1e-12,
)  # fmt: skip
SEED = 20251121


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    compile_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
        devices = ("--device", "emulated", "--device", "cpu:threads=1,memory=1GiB,reference=1")
        with running_daemon("--backend", "cuda_emulation.plugin", *devices) as found:
            yield found


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-9), (np.float16, 1e-4)])
def test_a_model_gives_what_it_gives_on_the_cpu_and_is_replayed(
    url: str, dtype: type, tolerance: float
) -> None:
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    weights = {
        name: (rng.standard_normal(shape, np.float32) * 0.05).astype(dtype)
        for name, shape in weight_shapes(CONFIG).items()
    }
    graph = BertEncoder(CONFIG, join_attention_weights(weights, CONFIG)).sentence_embeddings(3, 8)
    ids = rng.integers(0, CONFIG.vocab_size, (3, 8)).astype(np.int32)
    given = {"ids": ids, "mask": np.ones((3, 8), np.float32)}
    with hg.connect(url) as session:
        plan = session.compile(graph, devices=["emulated0"])
        found = [plan.run(**given)["embedding"] for _ in range(4)]
        (wanted,) = session.compile(graph, devices=["cpu0"]).run(**given).values()
        explained = str(plan.explain())
    assert all(np.array_equal(found[0], one) for one in found[1:])
    assert float(((found[0] - wanted) ** 2).sum() / (wanted**2).sum()) < tolerance
    assert "on emulated0" in explained and "replayed as 1 CUDA graph" in explained


def test_an_index_outside_is_an_error_of_the_run_and_the_session_lives_on(url: str) -> None:
    with hg.connect(url) as session:
        graph = hg.Graph()
        rows = graph.input("rows", (4, 8), "f32")
        graph.output("y", hg.ops.get_rows(rows, graph.input("ids", (2,), "i32")))
        plan = session.compile(graph, devices=["emulated0"])
        table = np.ones((4, 8), np.float32)
        with pytest.raises(hg.OutOfRangeError, match="index 9 is not one of 4 rows"):
            plan.run(rows=table, ids=np.array([0, 9], np.int32))
        assert np.array_equal(plan.run(rows=table, ids=np.array([0, 3], np.int32))["y"], table[:2])


def test_a_client_maps_memory_that_a_gpu_copies_from_and_to(url: str) -> None:
    with hg.connect(url) as session:
        mapped = session.empty((64, 33), "f32", "emulated0", buffer_type="shared")
        there = session.empty((64, 33), "f32", "emulated0")
        given = np.arange(64 * 33, dtype=np.float32).reshape(64, 33)
        array = mapped.map()
        array[:] = given
        assert mapped.copy_and_wait(there) is hg.CopyPath.DESTINATION
        array[:] = 0
        assert there.copy_and_wait(mapped) is hg.CopyPath.SOURCE
        assert np.array_equal(array, given)


def test_a_run_reads_and_writes_what_a_client_maps(url: str) -> None:
    graph = hg.Graph()
    graph.output("y", hg.exp(graph.input("x", (8, 16), "f32")))
    with hg.connect(url) as session:
        plan = session.compile(graph, devices=["emulated0"])
        x, y = (session.empty((8, 16), "f32", "emulated0", buffer_type="shared") for _ in range(2))
        x.map()[:] = 1
        plan.run(x=x, out={"y": y})
        assert np.allclose(y.map(), np.e)
