"""Rules of convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import heliograph as hg
from heliograph.lowerings.arrays import channels
from heliograph.lowerings.windows import Window, convolve, convolve_transposed
from heliograph.torch.node import Node, in_f32
from heliograph.torch.ops.pools import batched, spread
from heliograph.torch.rules import rule


@rule("convolution")
def _convolution(
    node: Node,
    x: hg.Value,
    weight: hg.Value,
    bias: hg.Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> hg.Value:
    kernel = weight.shape[2:]
    steps, pads, gaps = (spread(one, len(kernel)) for one in (stride, padding, dilation))
    window = Window(kernel, steps, gaps, pads, pads)
    data, weight = batched(in_f32(x), len(kernel)), in_f32(weight)
    if not groups == data.shape[1] == weight.shape[0]:
        node.parts(groups)
    if transposed:
        found = convolve_transposed(data, weight, window, spread(output_padding, len(kernel)), groups)
    else:
        found = convolve(data, weight, window, groups)
    if bias is not None:
        found = found + channels(in_f32(bias), found.ndim)
    return found if data.ndim == x.ndim else hg.squeeze(found, axis=0)
