"""Ops that cannot be expressed, and why. `hg.onnx.supported` and errors give the reason."""

from __future__ import annotations

from heliograph.onnx.node import Node
from heliograph.onnx.rules import REFUSED, Result, rule

_BY_VALUES = "the shape of its result depends on values that a run computes"
_RANDOM = "it makes random numbers"
_STRINGS = "it works on strings, which no device has"

REFUSED.update(
    dict.fromkeys(("NonZero", "Unique", "NonMaxSuppression"), _BY_VALUES)
    | dict.fromkeys(
        [
            "Bernoulli",
            "Multinomial",
            "RandomNormal",
            "RandomNormalLike",
            "RandomUniform",
            "RandomUniformLike",
        ],
        _RANDOM,
    )
    | dict.fromkeys(
        [
            "StringConcat",
            "StringNormalizer",
            "StringSplit",
            "RegexFullMatch",
            "CategoryMapper",
            "DictVectorizer",
            "CastMap",
            "ZipMap",
        ],
        _STRINGS,
    )
    | {"ImageDecoder": "it decodes images"}
)


def _refuse(node: Node) -> Result:
    raise node.refuse(REFUSED[node.op])


rule(*REFUSED)(_refuse)
