"""The peer of the figures of convolutions: onnxruntime, on one thread, in a process of its own.

Run with an interpreter that has onnxruntime. "load" loads the model in the folder, runs it once and
saves the result; "run COUNT" answers with the CPU seconds of so many runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
from peer_lines import answer


def main() -> None:
    folder, options = Path(sys.argv[1]), onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    kept: dict[str, object] = {}

    def load() -> str:
        session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        x = np.load(folder / "x.npy")
        kept["run"] = lambda: session.run(None, {"x": x})[0]
        np.save(folder / "y.npy", kept["run"]())  # type: ignore[operator]
        return onnxruntime.__version__

    def measure(name: str, runs: int = 0) -> object:
        if name == "load":
            return load()
        seconds = []
        for number in range(runs + 2):
            start = time.process_time()
            kept["run"]()  # type: ignore[operator]
            if number >= 2:
                seconds.append(time.process_time() - start)
        return seconds

    answer(measure)


if __name__ == "__main__":
    main()
