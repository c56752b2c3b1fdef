"""The words of a convolution with a packed kernel: three operands, whose rows are channels, then
these words, the geometry, and the epilogue's body; see `words`."""

from __future__ import annotations

from typing import Final

from heliograph_backends.cpu.kernels.program.words import GEOMETRY_WORDS, OPERAND_WORDS, STEP_HEADER_WORDS

CONVOLVED_WEIGHTS: Final = STEP_HEADER_WORDS
CONVOLVED_OF: Final = CONVOLVED_WEIGHTS + OPERAND_WORDS
CONVOLVED: Final = CONVOLVED_OF + OPERAND_WORDS
CONVOLVED_CHANNELS: Final = CONVOLVED + OPERAND_WORDS  # of the image
CONVOLVED_TOGETHER: Final = CONVOLVED_CHANNELS + 1  # channels that are added to all sums of a block
CONVOLVED_PLANES_AT: Final = CONVOLVED_CHANNELS + 2  # offset in the packing area, as the next
CONVOLVED_SUMS_AT: Final = CONVOLVED_CHANNELS + 3
CONVOLVED_HAS_EPILOGUE: Final = CONVOLVED_CHANNELS + 4  # 1: an elementwise body; 2: a chain
CONVOLVED_GEOMETRY: Final = CONVOLVED_CHANNELS + 5
CONVOLVED_EPILOGUE: Final = CONVOLVED_GEOMETRY + GEOMETRY_WORDS
