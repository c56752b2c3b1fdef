"""Models of ai.onnx.ml, as scikit-learn and XGBoost are exported, against ONNX's reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_models import model, tensor

import heliograph as hg

RNG = np.random.default_rng(11)
ROWS = RNG.normal(size=(40, 5)).astype(np.float32)
MODES = [f"BRANCH_{one}" for one in ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ")]
STRING, INT64 = TensorProto.STRING, TensorProto.INT64


def classical(op: str, outputs: Sequence[tuple[str, int]], inputs: str = "x", **attributes: Any) -> NodeProto:
    names = [name for name, _ in outputs]
    return helper.make_node(op, inputs.split(), names, name=op.lower(), domain="ai.onnx.ml", **attributes)


def made_of(
    nodes: Sequence[NodeProto], outputs: Sequence[tuple[str, int]], x: np.ndarray[Any, Any], version: int = 3
) -> ModelProto:
    element = helper.np_dtype_to_tensor_dtype(x.dtype)
    infos = [tensor(name, None, of) for name, of in outputs]
    made = model(nodes, [tensor("x", ["rows", *x.shape[1:]], element)], infos)
    made.opset_import.append(helper.make_opsetid("ai.onnx.ml", version))
    return made


def check(session: hg.Session, op: str, x: np.ndarray[Any, Any], *outputs: int, **attributes: Any) -> None:
    """Compare one op with the reference."""
    named = [(f"y{number}", of) for number, of in enumerate(outputs or [1])]
    made = made_of([classical(op, named, **attributes)], named, x)
    with np.errstate(all="ignore"):
        wanted = ReferenceEvaluator(made).run(None, {"x": x})
    found = hg.onnx.load(made).compile(session).run(x=x)
    for one, of in zip(wanted, found.values(), strict=True):
        if one.dtype.kind in "USi":
            assert of.tolist() == one.tolist()
        else:
            np.testing.assert_allclose(of, one, rtol=1e-5, atol=1e-6)


def forest(
    kind: str, targets: int, modes: Sequence[str] = MODES[:1], *, trees: int = 5, depth: int = 4
) -> dict[str, Any]:
    """Attributes of random trees of any shape."""
    nodes: list[dict[str, Any]] = []
    leaves: list[dict[str, Any]] = []
    for tree in range(trees):
        levels, count = [(0, 0)], 1
        while levels:
            place, level = levels.pop()
            is_leaf = level == depth or (level > 0 and RNG.random() < 0.3)
            yes, no = (0, 0) if is_leaf else (count, count + 1)
            nodes.append(
                {
                    "treeids": tree,
                    "nodeids": place,
                    "featureids": int(RNG.integers(5)),
                    "values": float(np.float32(RNG.normal())),
                    "modes": "LEAF" if is_leaf else str(RNG.choice(modes)),
                    "truenodeids": yes,
                    "falsenodeids": no,
                    "missing_value_tracks_true": int(RNG.integers(2)),
                }
            )
            if is_leaf:
                ids = [int(RNG.integers(targets))] if kind == "class" or targets == 1 else range(targets)
                leaves += [{"treeids": tree, "nodeids": place, "ids": one} for one in ids]
            else:
                levels += [(yes, level + 1), (no, level + 1)]
                count += 2
    found: dict[str, Any] = {f"nodes_{name}": [one[name] for one in nodes] for name in nodes[0]}
    found |= {f"{kind}_{name}": [one[name] for one in leaves] for name in leaves[0]}
    return found | {f"{kind}_weights": RNG.normal(size=len(leaves)).astype(np.float32).tolist()}


@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 3])
def test_regression_trees_combine_their_leaves(how: str, targets: int, session: hg.Session) -> None:
    attributes = forest("target", targets)
    options = {"n_targets": targets, "aggregate_function": how, "base_values": [0.5] * targets}
    check(session, "TreeEnsembleRegressor", ROWS, post_transform="NONE", **options, **attributes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_branches_compare_in_every_mode_and_send_what_is_no_number_one_way(
    dtype: str, here: hg.Session
) -> None:
    rows = np.round(ROWS * 2).astype(dtype)
    rows[RNG.random(rows.shape) < 0.2] = np.nan
    attributes = forest("target", 1, MODES[:5])
    attributes["nodes_values"] = np.round(attributes["nodes_values"]).tolist()
    options = {"n_targets": 1, "aggregate_function": "SUM", "post_transform": "NONE"}
    check(here, "TreeEnsembleRegressor", rows, **options, **attributes)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("classes", [2, 4])
def test_classifying_trees_give_labels_and_scores(transform: str, classes: int, here: hg.Session) -> None:
    attributes = forest("class", classes)
    options = {"post_transform": transform, "classlabels_int64s": [7, 3, 9, 5][:classes]}
    for rows in (ROWS, np.round(ROWS * 2).astype(np.int64)):
        check(here, "TreeEnsembleClassifier", rows, INT64, 1, **options, **attributes)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC"])
def test_weights_of_one_class_decide_between_two(transform: str, here: hg.Session) -> None:
    """As gradient boosting is exported; labels are strings."""
    attributes = forest("class", 1)
    options = {"post_transform": transform, "classlabels_strings": ["no", "yes"], "base_values": [0.25, 0.25]}
    check(here, "TreeEnsembleClassifier", ROWS, STRING, 1, **options, **attributes)


def test_trees_that_are_broken_are_named(here: hg.Session) -> None:
    attributes = forest("target", 1)
    first = attributes["nodes_modes"].index("BRANCH_LEQ")
    for name, value, message in (
        ("nodes_truenodeids", attributes["nodes_nodeids"][first], "its nodes have a cycle"),
        ("nodes_featureids", 5, "it splits at feature 5 of 5"),
        ("nodes_modes", "BRANCH_ODD", "a node has the mode 'BRANCH_ODD'"),
        ("nodes_falsenodeids", 10**6, "node 'treeensembleregressor'"),
    ):
        broken = list(attributes[name])
        broken[first] = value
        made = made_of(
            [classical("TreeEnsembleRegressor", [("y", 1)], n_targets=1, **{**attributes, name: broken})],
            [("y", 1)],
            ROWS,
        )
        with pytest.raises(hg.InvalidModelError, match=message):
            hg.onnx.load(made).compile(here).run(x=ROWS)


@pytest.mark.parametrize(
    ("transform", "scores"),
    [*product(["NONE", "LOGISTIC", "SOFTMAX"], [1, 3]), ("PROBIT", 3)],
)
def test_linear_classifiers(transform: str, scores: int, here: hg.Session) -> None:
    rows = ROWS / 20 + 0.1 if transform == "PROBIT" else ROWS
    coefficients = abs(RNG.normal(size=scores * 5)) / 4
    options = {"coefficients": coefficients.tolist(), "intercepts": [0.1] * scores}
    labels = {"classlabels_ints": [4, 2, 8][: max(2, scores)], "post_transform": transform}
    check(here, "LinearClassifier", rows.astype(np.float32), INT64, 1, **options, **labels)


def test_linear_regression_of_several_targets(here: hg.Session) -> None:
    options = {"coefficients": RNG.normal(size=10).tolist(), "intercepts": [1.0, -1.0], "targets": 2}
    check(here, "LinearRegressor", ROWS, post_transform="NONE", **options)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Scaler", {"offset": [1.0, 2, 3, 4, 5], "scale": [0.5, 1, 2, 4, 8]}),
        ("Scaler", {"offset": [1.0], "scale": [0.5]}),
        ("Normalizer", {"norm": "MAX"}),
        ("Normalizer", {"norm": "L1"}),
        ("Normalizer", {"norm": "L2"}),
        ("Binarizer", {"threshold": 0.3}),
        ("Imputer", {"imputed_value_floats": [1.0, 2, 3, 4, 5], "replaced_value_float": float("nan")}),
        ("Imputer", {"imputed_value_floats": [9.0], "replaced_value_float": 1.0}),
        ("FeatureVectorizer", {"inputdimensions": [7]}),
        ("FeatureVectorizer", {"inputdimensions": [3]}),
    ],
)
def test_features_are_prepared(op: str, attributes: dict[str, Any], here: hg.Session) -> None:
    rows = ROWS.copy()
    rows[3] = [1.0, np.nan if op == "Imputer" else 0.0, 1.0, 0.0, 0.0]
    check(here, op, rows, **attributes)


@pytest.mark.parametrize(
    ("attributes", "of"),
    [
        ({"keys_int64s": [5, 1, 3], "values_floats": [0.5, 0.25, 2.0], "default_float": -2.0}, 1),
        ({"keys_int64s": [5, 1, 3], "values_int64s": [50, 10, 30], "default_int64": 7}, INT64),
        ({"keys_int64s": [5, 1], "values_strings": ["five", "one"], "default_string": "other"}, STRING),
    ],
)
def test_numbers_are_encoded_as_others_or_as_strings(
    attributes: dict[str, Any], of: int, here: hg.Session
) -> None:
    check(here, "LabelEncoder", RNG.integers(0, 7, (4, 6)), of, **attributes)


def test_categories_become_columns(here: hg.Session) -> None:
    check(here, "OneHotEncoder", RNG.integers(0, 4, (6, 2)), cats_int64s=[2, 0, 1], zeros=1)


@pytest.mark.parametrize("labels", [[3, 1, 2], ["cat", "dog", "eel"]])
def test_a_classifier_gives_a_dictionary_for_each_row(labels: list[Any], session: hg.Session) -> None:
    """As skl2onnx writes it; strings pass ops that only move them, and become numbers again."""
    kind = "strings" if isinstance(labels[0], str) else "int64s"
    names, keys = {f"classlabels_{kind}": labels}, {f"keys_{kind}": labels}
    outputs = [("label", STRING if kind == "strings" else INT64), ("each", 1), ("number", INT64)]
    made = made_of(
        [
            classical("TreeEnsembleClassifier", [("l", 1), ("p", 1)], **names, **forest("class", 3)),
            helper.make_node("Reshape", ["l", "flat"], ["label"]),
            classical("LabelEncoder", [("number", 1)], "label", values_int64s=[0, 1, 2], **keys),
            classical("ZipMap", [("each", 1)], "p", **names),
        ],
        outputs,
        ROWS,
    )  # fmt: skip
    made.graph.initializer.append(helper.make_tensor("flat", INT64, [1], [-1]))
    assert hg.onnx.supported(made) == ()
    found = hg.onnx.load(made).compile(session).run(x=ROWS)
    for label, scores, number in zip(found["label"], found["each"], found["number"], strict=True):
        assert list(scores) == labels and max(scores, key=scores.get) == label == labels[number]
