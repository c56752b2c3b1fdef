"""Whole plans on a GPU: a thousand small nodes beside PyTorch's CUDA graph, and a model of MiniLM's
shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from checkout import serving_cuda
from figures import Figure
from gpu_common import Call, gpu, in_turns, planned, torch, type_of

import heliograph as hg
from heliograph.models.bert import BertConfig, BertEncoder, join_attention_weights, weight_shapes
from heliograph.testing import running_daemon
from heliograph_proto.graph import LeafKind

NODES, WIDTH = 1000, 256
NODES_BAR, MODEL_BAR = 1.2, 1.0
#: And in all, whatever PyTorch takes.
MOST_MS = 5.0
BATCH, TOKENS = 256, 128
CONFIG = BertConfig(
    vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
    max_position_embeddings=512, layer_norm_eps=1e-12,
)  # fmt: skip


def nodes() -> Iterator[Figure]:
    """Milliseconds of a thousand nodes that depend on each other and that nothing fuses."""
    library = torch()
    x = library.randn(WIDTH, WIDTH, device="cuda")
    static = x.clone()

    def eager() -> Any:
        y = static
        for _ in range(NODES):
            y = library.softmax(y, -1)
        return y

    eager()
    library.cuda.synchronize()
    recorded = library.cuda.CUDAGraph()
    with library.cuda.graph(recorded):
        eager()

    def peer() -> None:
        static.copy_(x)
        recorded.replay()
        library.cuda.synchronize()

    steps = [("soft_max", (number,), {}) for number in range(NODES)]
    with gpu() as device, planned(device, [(LeafKind.INPUT, type_of("f32", WIDTH, WIDTH))], steps) as ours:
        medians = [seconds * 1e3 for seconds in in_turns(ours.run, peer)]
        note = ours.plan.note
    against = f"PyTorch {library.__version__}, CUDA graph"
    yield Figure("gpu-nodes/graph", *medians, NODES_BAR, "ms", against, note)
    yield Figure("gpu-nodes/most", medians[0], MOST_MS, 1.0, "ms", "5 ms")


def model() -> Iterator[Figure]:
    """Milliseconds of a batch of sentences through the daemon in f16, beside PyTorch in the same process."""
    library = torch()
    rng = np.random.default_rng(5)
    weights = {
        name: (rng.standard_normal(shape, np.float32) * 0.05).astype(np.float16)
        for name, shape in weight_shapes(CONFIG).items()
    }
    ids = rng.integers(0, CONFIG.vocab_size, (BATCH, TOKENS))
    mask = np.ones((BATCH, TOKENS), np.float32)
    eager, compiled = _peers(library, weights, ids)
    with running_daemon(*serving_cuda()) as url, hg.connect(url) as session:
        plan = session.compile(
            BertEncoder(CONFIG, join_attention_weights(weights, CONFIG)).sentence_embeddings(BATCH, TOKENS)
        )
        given = dict(zip(plan.inputs, (ids.astype(np.int32), mask), strict=True))
        medians = [seconds * 1e3 for seconds in in_turns(lambda: plan.run(**given), eager)]
        yield Figure(
            "gpu-model/eager", *medians, MODEL_BAR, "ms", f"PyTorch {library.__version__}, f16 eager"
        )
        fast = [seconds * 1e3 for seconds in in_turns(lambda: plan.run(**given), compiled)]
        # No bar: it is printed beside.
        yield Figure("gpu-model/compiled", *fast, float("inf"), "ms", "torch.compile")


def _peers(library: Any, weights: dict[str, Any], ids: Any) -> tuple[Call, Call]:
    """The same sizes in PyTorch's own layers, on the GPU, in f16, as it is and compiled.

    Ids come from the host with each call, and the result goes back.
    """
    functional = library.nn.functional
    on_card = {name: library.from_numpy(array).cuda() for name, array in weights.items()}
    given = library.from_numpy(ids)
    heads, size = CONFIG.num_attention_heads, CONFIG.head_size

    def dense(name: str, x: Any) -> Any:
        return functional.linear(x, on_card[f"{name}.weight"], on_card[f"{name}.bias"])

    def norm(name: str, x: Any) -> Any:
        return functional.layer_norm(
            x,
            (CONFIG.hidden_size,),
            on_card[f"{name}.weight"],
            on_card[f"{name}.bias"],
            CONFIG.layer_norm_eps,
        )

    class Model(library.nn.Module):  # type: ignore[misc]
        def forward(self) -> Any:
            token = given.cuda()
            x = on_card["embeddings.word_embeddings.weight"][token]
            x = x + on_card["embeddings.token_type_embeddings.weight"][0]
            x = norm("embeddings.LayerNorm", x + on_card["embeddings.position_embeddings.weight"][:TOKENS])
            for layer in range(CONFIG.num_hidden_layers):
                prefix = f"encoder.layer.{layer}."
                parts = [
                    dense(f"{prefix}attention.self.{name}", x)
                    .view(BATCH, TOKENS, heads, size)
                    .transpose(1, 2)
                    for name in ("query", "key", "value")
                ]
                found = functional.scaled_dot_product_attention(*parts)
                joined = found.transpose(1, 2).reshape(BATCH, TOKENS, -1)
                x = norm(
                    f"{prefix}attention.output.LayerNorm",
                    x + dense(f"{prefix}attention.output.dense", joined),
                )
                inner = functional.gelu(dense(f"{prefix}intermediate.dense", x))
                x = norm(f"{prefix}output.LayerNorm", x + dense(f"{prefix}output.dense", inner))
            return functional.normalize(x.mean(1), dim=-1).float().cpu()

    made = Model()
    made.eval()
    compiled = library.compile(made)
    return library.no_grad()(made), library.no_grad()(compiled)
