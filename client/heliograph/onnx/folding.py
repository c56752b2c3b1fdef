"""Constants are computed on the host: nodes whose inputs are all known before a run.

NumPy computes them through ONNX's reference implementation. A node that might take long or much
memory is left to the device, and so is one that the reference fails on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, defs, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from heliograph.onnx.elements import Array, Item, element_of_array
from heliograph.onnx.rules import DOMAINS, REFUSED, RULES


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: The most elements of a result that is computed on the host.
MOST_ELEMENTS = 2**24
#: The most elements that ops of many steps for each element are given.
MOST_HEAVY = 2**14
#: The most elements of an input whose values decide a shape.
_MOST_SHAPE_DATA = 1024
_HEAVY = _words(
    """
    AveragePool Attention Col2Im Conv ConvInteger ConvTranspose CumProd CumSum DFT DeformConv
    Det Einsum FlexAttention GRU Gemm GridSample LRN LSTM LinearAttention LpPool MatMul
    MatMulInteger MaxPool MaxUnpool NonMaxSuppression QLinearConv QLinearMatMul RNN Resize RoiAlign STFT
    ScatterElements ScatterND TopK TfIdfVectorizer TreeEnsemble Upsample
    """
)
#: Ops whose result may be larger than all inputs together: of these the shape must be known.
_GROWING = _words(
    """
    BlackmanWindow CenterCropPad ConstantOfShape Expand EyeLike Gather GatherElements GatherND
    HammingWindow HannWindow MelWeightMatrix OneHot Pad Range Tile
    """
)
#: Ops without a rule that are computed here.
_ONLY_HERE = _words("BlackmanWindow ConstantOfShape HammingWindow HannWindow MelWeightMatrix Range")
#: Ops that a rule must see, though the reference could compute them.
_NEVER = _words(
    """
    If Loop Scan SequenceMap SequenceConstruct SequenceEmpty SequenceInsert SequenceErase
    SequenceAt SequenceLength SplitToSequence ConcatFromSequence Optional OptionalHasElement
    OptionalGetElement Shape Size Identity RandomNormal RandomNormalLike RandomUniform
    RandomUniformLike Bernoulli Multinomial Dropout
    """
)


def fold(node: NodeProto, items: Sequence[Item], opsets: Mapping[str, int]) -> list[Item] | None:
    """Compute a node on the host. Returns None if that is not possible."""
    if not _is_wanted(node) or not all(one is None or isinstance(one, np.ndarray) for one in items):
        return None
    arrays = {
        name: item for name, item in zip(node.input, items, strict=True) if isinstance(item, np.ndarray)
    }
    try:
        if not _fits(node, arrays, opsets):
            return None
        return _evaluate(node, arrays, opsets)
    except Exception:
        # The node's rule finds the fault again, and names the node.
        return None


def _is_wanted(node: NodeProto) -> bool:
    op = node.op_type
    if node.domain not in DOMAINS or op in _NEVER or (op in REFUSED and op not in _ONLY_HERE):
        return False
    return op in RULES or op in _ONLY_HERE


def _fits(node: NodeProto, arrays: Mapping[str, Array], opsets: Mapping[str, int]) -> bool:
    given = sum(array.size for array in arrays.values())
    if node.op_type in _HEAVY and given > MOST_HEAVY:
        return False
    inferred = _inferred(node, arrays, opsets)
    if inferred is None:
        return node.op_type not in _GROWING and given <= MOST_ELEMENTS
    return inferred <= MOST_ELEMENTS


def _inferred(node: NodeProto, arrays: Mapping[str, Array], opsets: Mapping[str, int]) -> int | None:
    """Return the number of elements of all outputs, or None if it is not known."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    schema = defs.get_schema(node.op_type, opsets.get(node.domain, 1), domain)
    types = {name: _type_of(array) for name, array in arrays.items()}
    small = {
        name: numpy_helper.from_array(array)
        for name, array in arrays.items()
        if array.size <= _MOST_SHAPE_DATA
    }
    imports = [helper.make_opsetid(name, version) for name, version in opsets.items()]
    found = shape_inference.infer_node_outputs(schema, node, types, small, opset_imports=imports)
    total = 0
    for one in found.values():
        tensor = one.tensor_type
        if not tensor.HasField("shape") or not all(size.HasField("dim_value") for size in tensor.shape.dim):
            return None
        total += math.prod(size.dim_value for size in tensor.shape.dim)
    return total


def _type_of(array: Array) -> TypeProto:
    element = element_of_array(array)
    return helper.make_tensor_type_proto(element or TensorProto.FLOAT, list(array.shape))


def _evaluate(node: NodeProto, arrays: Mapping[str, Array], opsets: Mapping[str, int]) -> list[Item]:
    names = [name for name in node.output if name]
    graph = helper.make_graph(
        [node],
        "constant",
        [helper.make_value_info(name, TypeProto()) for name in arrays],
        [helper.make_value_info(name, TypeProto()) for name in names],
    )
    imports = [helper.make_opsetid(name, version) for name, version in opsets.items()]
    evaluator: Any = ReferenceEvaluator(helper.make_model(graph, opset_imports=imports))
    with np.errstate(all="ignore"):
        found = dict(zip(names, evaluator.run(None, dict(arrays)), strict=True))
    results: list[Item] = [_checked(found.get(name)) for name in node.output]
    return results


def _checked(result: Any) -> Item:
    """Return a result as an array. Raises TypeError for other things."""
    if result is None:
        return None
    if not isinstance(result, (np.ndarray, np.generic)):
        raise TypeError(f"a {type(result).__name__}")
    return np.asarray(result)


def is_folded_only(node: NodeProto) -> bool:
    """True for an op that runs only where all of its inputs are constant."""
    return node.domain in DOMAINS and node.op_type in _ONLY_HERE
