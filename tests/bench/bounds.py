"""The bounds of figures that may be short: the work that is left, measured, by patterns of their names."""

from __future__ import annotations

from fnmatch import fnmatchcase

#: The first pattern that fits says it.
BOUNDS = {
    "planes-shared/*-copy": (
        "`set` and `get` copy twice, each side once and at the same time: neither side can write the "
        "other's memory. In processor time each side takes 1.3 of a copy within a process (the shared "
        "pages have 4 KiB, and commands run between two pieces), and a piece 0.4 to 0.8 ms of messages on "
        "both sides together. Through one place of 16 MiB, both copies of 64 MiB take 6.5 ms one after the "
        "other and without messages, beside 3.5 ms of a copy within a process. `map` copies once."
    ),
    "planes-shared/*-mapped": "The copy is the caller's own; what is left are pages of 4 KiB.",
    "quantized/*-q8": "Both sides multiply integers; ours defines the order of the sums.",
    "quantized/*": (
        "Sums in f32 have the bits of the definition, so each weight is converted: three to five vector "
        "instructions for 16 weights, of which two multiply. ggml rounds the row to 8 bits and multiplies "
        "integers. On Zen 5 two of them, a product and a multiply-add, share two units, and so do rotations: "
        "16 weights take at least 1 cycle. Products on one thread take 1.28 (q4_0; ggml 1.37), 1.24 (tq2_0; "
        "0.91), 1.40 (q4_k; 1.17), 1.52 (q2_k; 1.27) and 1.85 (q6_k; 1.42), of which 0.1 to 0.2 are reads "
        "beyond the second-level cache and, of q4_k, 0.1 the scales of a block. Other orders of the "
        "instructions, lookups of two quanta in a word, quanta as digits of a float, cheaper scales, shifts "
        "instead of rotations, more groups side by side, and runs whose shifts are known gained at most 4 % "
        "or lost. On two threads one row takes 1.00 (q4_0), 1.16 (q2_k), 1.22 (q4_k), 1.29 (q6_k) and 1.34 "
        "(tq2_0) of ggml's time. "
        "Zen 4 runs 512-bit instructions in two halves, so 16 weights take at least 2 cycles, and "
        "q4_0 takes 2.75 (six other ways to convert took 2.4 to 3.3): at 3.67 GHz at least 0.57 ms for 4,096 "
        "by 4,096 on one thread, where ggml takes 0.46 (q4_0), 0.41 (q4_k) and 0.29 ms (tq2_0). With "
        "rows in q8_0 one row takes 0.45 to 0.65 of ggml's processor time (q4_0, q4_k, tq2_0). "
        "With 128 rows in f32 a product takes 1.08 of the time of its multiply-adds alone (516 GFLOP/s); "
        "ggml multiplies integers, and with rows in q8_0 ours takes 0.48 to 0.85 of its time."
    ),
    "ggml-rpc/decode-*": (
        "A token reads 200 MB of f16: two processors that do nothing else take 2.6 to 4.2 ms for that, from "
        "one minute to the next, and llama.cpp in process takes 4.5 at its shortest. Beside the "
        "kernels the daemon takes 0.31 ms, in Python whose code has left the caches meanwhile: 0.08 from the "
        "graph's message to its turn, 0.07 to bind memory and free it, 0.1 for the end of turn and command, "
        "and 0.05 for results that lie over what the graph reads."
    ),
    "kserve/batch-1": (
        "A request of 2.45 ms (our own client: 1.9). 0.7 are those of gRPC and its client: 0.22 in the "
        "client, 0.28 from there until the plan's thread runs, of which the event loop works 0.15, and 0.2 "
        "from the plan's end to the client. The plan's thread takes 0.24 until kernels share work, 0.04 to "
        "wake a helper, 1.05 to compute and 0.2 behind that: Python whose code and objects have left the "
        "caches while weights were read takes two to three times as long as in a tight loop. A bare server "
        "whose handler's thread runs the plan takes 1.07 to 1.22 of our own client's time (the note has both "
        "kinds), and grpc.aio with the plan in another thread 1.12 to 1.16: the event loop must not compute. "
        "With gRPC's threads a call without a message, or a stream, would hold a thread."
    ),
    "kserve/clients-full": (
        "A run of 16 rows takes 8 % more for each row than one of 32, since both read the weights once (1.8 "
        "to 2 ms of a run), and the client and gRPC take 0.26 and 0.13 ms of a processor for a request, on "
        "two processors that the plan needs: 0.9 and 0.2 of a row's 0.83. Two runs at a time on a processor "
        "each take longer (1.31 to 1.40 against 1.14 to 1.21 ms)."
    ),
    "kserve/resnet18-*": (
        "Convolutions: an image takes 16.3 ms of one processor here and 15.3 in onnxruntime, and 15.5 and "
        "14.7 in batches of 4, at 240 to 263 GF/s where multiply-adds run at 256 to 280; the chain along k "
        "includes the padding, 3.5 to 18 % of a layer. Runs of 4 follow one another every 35 ms, so most "
        "requests take 72; the longest are those of the first runs: one row, which comes alone, then four, "
        "then the rest: 81 ms, and a run that the system disturbs."
    ),
    "llm-daemon/load": (
        "Two processors share 0.13 s of work after the connection: the client makes a tokenizer (30 to 40 "
        "ms: 17 for merges, which llama.cpp does without, and 11 to 17 in the package `tokenizers`), and the "
        "daemon hashes the file (15 to 20), reads it into new memory and hashes it again (24, of which 10 "
        "clear huge pages and 8 hash), brings weights into the order of the kernels (10) and plans (10), "
        "where llama.cpp maps the file."
    ),
    "llm-daemon/decode": (
        "An answer that is asked for whole takes 70 us of processor time in Python for a token, in both "
        "processes and beside the thread that computes, where one in process takes 95."
    ),
    "llm-daemon/prompt": (
        "A prompt is a run and a loop: the daemon's event loop takes 0.85 ms of one processor for them, and "
        "two threads of the client 0.3, beside 21 ms of the prompt on two processors. Less would take one "
        "message for both, but the end of the prompt is what the answer tells its time by."
    ),
    "llm-delay/token": (
        "The wire of 5 ms is a process on the two processors that compute: it takes 90 us of one for a "
        "token, and the client 40 more than without delay, since messages come evenly, where without delay "
        "some wait up to 20 ms for a processor and come together. A token takes 1.3 ms of both."
    ),
    "llm-form/chosen": (
        "A step keeps both processors for 1.04 ms, in which the grammar is asked. For that and two small "
        "runs, the answer's thread takes 0.46 ms of one for a token, where a free one takes 0.12, and the "
        "grammar's process 0.09: half of their sum is 0.2. The choice waits for the mask and for the step, "
        "and takes 0.25 ms behind it, of which its kernels take 0.06 and two turns of the device the rest. "
        "One observed run in place of both took 0.4 ms more."
    ),
    "llm/*-f32": "As quantized products, which are 96 % of a step.",
    "bandwidth/*": (
        "The polynomials of exp and erf, whose bits are defined: from the first-level cache, sixteen "
        "elements of a `soft_max` take 2.9 ns, and 2.9 from memory, where a copy takes 3.1."
    ),
    "pool-llm/*": (
        "A host takes 0.25 to 0.35 ms of one processor in each step beside computing, in Python whose code "
        "and objects have left the caches while weights were read: 0.03 from the socket to the value, 0.06 "
        "until the thread that computes has it, 0.02 to 0.08 until it computes, 0.06 to 0.14 from there to "
        "the next message, and 0.05 in the system's call that sends it. 4 KiB of activations come 0.2 ms "
        "later than the byte of a ping: 0.07 of that is the wire's rate, and the processes that are wires "
        "share two processors with the daemons, the head and the client."
    ),
    "pool-single/run": (
        "Threads: a client of the member waits at the connection of its commands itself, in 0.06 ms. A run "
        "through the head takes 0.22: 0.06 until the thread of the device's stream runs, 0.1 for the "
        "member's run there, 0.02 of books, and 0.05 until the caller has the result."
    ),
    "planner-time/*": (
        "Python: half of the time joins the nodes of `wide`, 4,400 times: it finds the room under the peak "
        "of memory and takes of it, counts the bytes that wait, and merges."
    ),
    "compile-new/*": "Python: 800 programs that differ are encoded one by one.",
    "scheduler-time/*": (
        "Python: of a tight memory, two schedules, and the devices' own planning of three parts."
    ),
}


def bound_of(figure: str) -> str:
    """Return what bounds a figure; empty if nothing is known."""
    return next((says for pattern, says in BOUNDS.items() if fnmatchcase(figure, pattern)), "")
