"""Greedy decoding on the daemon: one message starts the loop, tokens stream back while it goes on.

A tiny decoder with random weights. Its cache of keys and values is two variables of the session.

    python decoder_loop.py [URL]
"""

import sys

import numpy as np

import heliograph as hg

WORDS, HIDDEN, HEADS, CONTEXT = 100, 32, 2, 64
SIZE = HIDDEN // HEADS
END = 0  # the token that ends an answer


def decoder() -> hg.Graph:
    """Return a graph of one step: from `token` and `position` to `next`, `following` and `done`."""
    random = np.random.default_rng(3)
    graph = hg.Graph()

    def weight(name: str, *shape: int) -> hg.Value:
        return graph.weight(name, random.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5)

    token = graph.input("token", (1,), "i64")
    position = graph.input("position", (1,), "i32")
    words = weight("words", WORDS, HIDDEN)
    x = hg.take(words, token, axis=0)

    q, k, v = ((x @ weight(name, HIDDEN, HIDDEN).mT).reshape((1, HEADS, SIZE)) for name in ("wq", "wk", "wv"))
    q, k = (hg.ops.rope(one, position, n_dims=SIZE) for one in (q, k))
    cache = {}
    for name, row in (("keys", k), ("values", v)):
        variable = graph.variable(name, (CONTEXT, HIDDEN), "f32")
        kept = hg.assign(variable, hg.ops.set_rows(variable, row.reshape((1, HIDDEN)), position))
        cache[name] = hg.permute_dims(kept.reshape((CONTEXT, HEADS, SIZE)), (1, 0, 2)).reshape(
            (1, HEADS, CONTEXT, SIZE)
        )
    places = graph.constant(np.arange(CONTEXT, dtype=np.int32))
    mask = hg.where(places <= position, 0.0, -np.inf).reshape((1, 1, 1, CONTEXT))
    q = hg.permute_dims(q, (1, 0, 2)).reshape((1, HEADS, 1, SIZE))
    attended = hg.ops.flash_attn_ext(q, cache["keys"], cache["values"], mask, scale=SIZE**-0.5)
    x = x + attended.reshape((1, HIDDEN)) @ weight("wo", HIDDEN, HIDDEN).mT

    following = hg.astype(hg.argmax(x @ weight("head", WORDS, HIDDEN).mT, axis=-1), "i64")
    graph.output("next", following)
    graph.output("following", position + 1)
    graph.output("done", hg.equal(following, END))
    return graph


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "local:"
    with hg.connect(url) as session:
        plan = session.compile(decoder())
        loop = plan.loop(
            token=np.array([7]),
            position=np.array([0], np.int32),
            steps=CONTEXT,
            carry={"next": "token", "following": "position"},
            until="done",
            taps=["next"],
        )
        tokens = [int(tap.value[0]) for tap in loop.taps()]  # each as soon as it is computed
        print(f"{loop.steps} steps:", *tokens)
