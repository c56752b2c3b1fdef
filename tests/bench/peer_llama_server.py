"""llama.cpp's server as a peer, under the peers' own interpreter.

    peer_llama_server.py MODEL SLOTS CONTEXT THREADS

It prints its address and the instructions that it is built for, and ends when its standard input
does. The server is that of the package `xllamacpp`, whose library contains it.
"""

from __future__ import annotations

import sys
import threading

from peer_lines import end_with_parent, say
from peer_process import PEERS

sys.path.insert(0, str(PEERS / "ggml"))

import xllamacpp  # type: ignore[import-not-found]


def main(model: str, slots: int, context: int, threads: int) -> None:
    """Serve a model to as many clients at a time as there are slots."""
    options = xllamacpp.CommonParams()
    options.model.path = model
    options.n_parallel, options.n_ctx = slots, slots * context
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.n_gpu_layers, options.verbosity = 0, 0
    # Keeps no copies of the caches of earlier prompts, none of which comes again.
    options.cache_ram_mib = 0
    server = xllamacpp.Server(options)
    built = "AVX-512" if "AVX512 = 1" in xllamacpp.get_system_info() else "AVX2"
    say([server.listening_address, built])
    end_with_parent()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
