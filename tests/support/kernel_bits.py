"""Prints what the CPU computes in the cases of conformance, as a digest of bits for each case.

    python kernel_bits.py

One line of JSON: the digests, the number of kernels that were compiled, their folder, and whether
numba was imported. So two installations can be compared, whose kernels came in different ways.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from heliograph_backends.conformance.harness.execution import LoadedRecipe
from heliograph_backends.conformance.runner import Suite, select
from heliograph_backends.cpu import CpuDevice, kernels


def main() -> None:
    """Run the cases of ops, and print."""
    digest: Any = None
    read = LoadedRecipe.read

    def noted(self: LoadedRecipe) -> Any:
        found = read(self)
        for content in found[0]:
            digest.update(content.raw.tobytes())
        return found

    LoadedRecipe.read = noted  # type: ignore[method-assign]
    found: dict[str, str] = {}
    suite = Suite(CpuDevice())
    for case in select(quick=True):
        digest = hashlib.sha256()
        result = suite.run(case)
        found[case.id] = f"{result.outcome.value} {digest.hexdigest()[:16]}"
    suite.close()
    state = kernels.cache_state()
    about = {"compiled": state.compiled, "folder": str(state.folder), "numba": "numba" in sys.modules}
    print(json.dumps({"bits": found, **about}))


if __name__ == "__main__":
    main()
