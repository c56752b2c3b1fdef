"""Results whose size a run decides, and random numbers, on a server."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto
from onnx_models import constant, model, node, tensor

import heliograph as hg

INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
RNG = np.random.default_rng(5)


def compiled(session: hg.Session, made: ModelProto, **options: object) -> hg.onnx.OnnxPlan:
    return hg.onnx.load(made.SerializeToString()).compile(session, **options)


def test_one_plan_gives_results_of_every_size(session: hg.Session) -> None:
    """The plan pads to the most; the host cuts to the number that the run found."""
    made = model([node("NonZero", "x", "y")], [tensor("x", [4, 5])], [tensor("y", None, INT64)])
    plan = compiled(session, made)
    for share in (0.0, 0.3, 1.0):
        x = (RNG.random((4, 5)) < share).astype(np.float32)
        assert np.array_equal(plan.run(x=x)["y"], np.stack(np.nonzero(x)))
    assert len(plan.plans) == 1


def test_elements_are_picked_where_a_condition_of_the_run_is_true(session: hg.Session) -> None:
    made = model(
        [node("Compress", "x c", "y", axis=1), node("Compress", "x c", "z")],
        [tensor("x", [3, 4]), tensor("c", [4], BOOL)],
        [tensor("y", None), tensor("z", None)],
    )
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    plan = compiled(session, made)
    for condition in ([True, False, True, True], [False] * 4):
        found = plan.run(x=x, c=np.array(condition))
        assert np.array_equal(found["y"], np.compress(condition, x, 1))
        assert np.array_equal(found["z"], np.compress(condition, x))


@pytest.mark.parametrize("in_order", [0, 1])
def test_different_elements_are_found_with_their_places_and_numbers(here: hg.Session, in_order: int) -> None:
    made = model(
        [node("Unique", "x", "y first group size", sorted=in_order)],
        [tensor("x", [60])],
        [tensor("y", None), *(tensor(one, None, INT64) for one in ("first", "group", "size"))],
    )
    x = RNG.integers(-6, 6, 60).astype(np.float32)
    found = compiled(here, made).run(x=x)
    wanted, first, group, size = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    order = np.arange(len(wanted)) if in_order else np.argsort(first)
    assert np.array_equal(found["y"], wanted[order]) and np.array_equal(found["first"], first[order])
    assert np.array_equal(found["size"], size[order])
    assert np.array_equal(found["y"][found["group"]], x) and group.shape == found["group"].shape


def test_a_size_of_the_run_goes_through_ops_that_need_not_know_it(here: hg.Session) -> None:
    """The places of elements, transposed, gather these; what they give has the same size."""
    made = model(
        [
            node("Greater", "x zero", "c"),
            node("NonZero", "c", "places"),
            node("Transpose", "places", "turned"),
            node("GatherND", "x turned", "found"),
            node("Mul", "found two", "double"),
            node("Unsqueeze", "double axis", "y"),
        ],
        [tensor("x", [6, 7])],
        [tensor("y", None)],
        [
            constant("zero", np.float32(0)),
            constant("two", np.float32(2)),
            constant("axis", np.array([0])),
        ],
    )
    x = RNG.normal(size=(6, 7)).astype(np.float32)
    assert np.array_equal(compiled(here, made).run(x=x)["y"], 2 * x[x > 0][None])


def test_boxes_are_gathered_by_the_places_of_the_selected_ones(here: hg.Session) -> None:
    """As exporters write it: the last column of the selection, flat, as indices."""
    made = model(
        [
            node("NonMaxSuppression", "boxes scores most", "chosen"),
            node("Slice", "chosen two three one", "column"),
            node("Reshape", "column flat", "places"),
            node("Squeeze", "boxes zero", "table"),
            node("Gather", "table places", "y"),
        ],
        [tensor("boxes", [1, 6, 4]), tensor("scores", [1, 1, 6])],
        [tensor("y", None)],
        [
            constant(name, np.array([number]))
            for name, number in (("most", 9), ("two", 2), ("three", 3), ("one", 1), ("flat", -1), ("zero", 0))
        ],
    )
    boxes = np.array([[[place // 2, 0, place // 2 + 1, 1] for place in range(6)]], np.float32)
    scores = np.array([[[0.2, 0.9, 0.4, 0.3, 0.5, 0.1]]], np.float32)
    found = compiled(here, made).run(boxes=boxes, scores=scores)["y"]
    assert np.array_equal(found, boxes[0, [1, 4, 2]])


def test_an_op_that_needs_a_size_of_the_run_is_refused_by_name(here: hg.Session) -> None:
    made = model(
        [node("NonZero", "x", "places"), node("ReduceSum", "places", "y", "total")],
        [tensor("x", [5])],
        [tensor("y", None, INT64)],
    )
    with pytest.raises(hg.UnsupportedError, match=r"'total' \(ReduceSum\): only a run knows the size"):
        compiled(here, made, shapes={"x": [5]})


@pytest.mark.parametrize("shape", [[0], [], [2, 0], [1]])
@pytest.mark.parametrize("op", ["NonZero", "Unique", "Compress"])
def test_nothing_is_selected_from_nothing(op: str, shape: list[int], here: hg.Session) -> None:
    made = model(
        [node(op, "x c" if op == "Compress" else "x", "y")],
        [tensor("x", shape), tensor("c", [1], BOOL)],
        [tensor("y", None, INT64 if op == "NonZero" else TensorProto.FLOAT)],
    )
    x = np.zeros(shape, np.float32)
    found = compiled(here, made).run(x=x, c=np.array([False]))["y"]
    wanted = {"NonZero": np.zeros((len(shape), 0)), "Unique": np.unique(x), "Compress": np.zeros(0)}[op]
    assert found.shape == wanted.shape


@pytest.mark.parametrize("op", ["NonZero", "Unique"])
def test_a_selection_from_too_many_is_refused(op: str, here: hg.Session) -> None:
    made = model([node(op, "x", "y", "much")], [tensor("x", [2**20, 2**8])], [tensor("y", None)])
    with pytest.raises(hg.UnsupportedError, match="'much'.*too large"):
        hg.onnx.load(made.SerializeToString()).graph()


def suppressed(boxes: np.ndarray, scores: np.ndarray, most: int, overlap: float) -> list[int]:
    """The places of the boxes with the largest scores that do not overlap."""
    kept: list[int] = []
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    for place in np.argsort(-scores, kind="stable"):
        low = np.maximum(boxes[kept, :2], boxes[place, :2])
        high = np.minimum(boxes[kept, 2:], boxes[place, 2:])
        shared = np.prod(np.maximum(high - low, 0), axis=1)
        if len(kept) < most and not (shared / (areas[kept] + areas[place] - shared) > overlap).any():
            kept.append(int(place))
    return kept


def test_the_best_boxes_that_do_not_overlap_are_selected(session: hg.Session) -> None:
    made = model(
        [node("NonMaxSuppression", "boxes scores most overlap", "y")],
        [tensor("boxes", [2, 40, 4]), tensor("scores", [2, 3, 40])],
        [tensor("y", None, INT64)],
        [constant("most", np.array(7)), constant("overlap", np.float32(0.3))],
    )
    corners = RNG.uniform(0, 4, (2, 40, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + RNG.uniform(0.5, 2, (2, 40, 2)).astype(np.float32)], 2)
    scores = RNG.random((2, 3, 40)).astype(np.float32)
    found = compiled(session, made).run(boxes=boxes, scores=scores)["y"]
    wanted = [
        [batch, kind, place]
        for batch in range(2)
        for kind in range(3)
        for place in suppressed(boxes[batch], scores[batch, kind], 7, 0.3)
    ]
    assert found.tolist() == wanted


@pytest.mark.parametrize(("most", "overlap"), [(100, 0.3), (2**62, 0.0), (64, 1.0)])
def test_many_boxes_are_selected_in_a_loop_as_in_one_graph(
    most: int, overlap: float, session: hg.Session
) -> None:
    """Some scores are equal, and some are too small; a class may have fewer boxes than are wanted."""
    constants = [("most", np.array(most)), ("overlap", np.float32(overlap)), ("least", np.float32(0.2))]
    made = model(
        [node("NonMaxSuppression", "boxes scores most overlap least", "y")],
        [tensor("boxes", [2, 300, 4]), tensor("scores", [2, 3, 300])],
        [tensor("y", None, INT64)],
        [constant(*one) for one in constants],
    )
    corners = RNG.uniform(0, 8, (2, 300, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + RNG.uniform(0.5, 2, (2, 300, 2)).astype(np.float32)], 2)
    scores = RNG.random((2, 3, 300)).round(2).astype(np.float32)
    plan = compiled(session, made)
    found = plan.run(boxes=boxes, scores=scores)["y"]
    assert len(plan.plans) == 3
    wanted = [
        [batch, kind, place]
        for batch in range(2)
        for kind in range(3)
        for place in suppressed(boxes[batch], scores[batch, kind], most, overlap)
        if scores[batch, kind, place] > np.float32(0.2)
    ]
    assert found.tolist() == wanted
    if most <= 1024:
        one = session.compile(hg.onnx.load(made).graph()).run(boxes=boxes, scores=scores)
        assert np.array_equal(one["y"][: int(one["y.count"])], found)


def test_random_numbers_are_others_in_each_run_and_follow_a_seed(session: hg.Session) -> None:
    made = model(
        [
            node("RandomNormal", "", "a", shape=[2000], mean=3.0, scale=2.0),
            node("RandomUniformLike", "a", "b", low=-1.0, high=1.0),
            node("RandomUniformLike", "a", "c", low=-1.0, high=1.0),
        ],
        [],
        [tensor(one, None) for one in "abc"],
    )
    first, again = (compiled(session, made, seed=11) for _ in range(2))
    runs = [first.run(), first.run(), again.run()]
    assert all(np.array_equal(runs[0][one], runs[2][one]) for one in "abc")
    drawn = [one.tobytes() for run in runs[:2] for one in run.values()]
    drawn.append(compiled(session, made).run()["a"].tobytes())
    with pytest.raises(hg.InvalidArgumentError, match="seed is -1"):
        compiled(session, made, seed=-1)
    assert len(set(drawn)) == 7
    assert abs(runs[0]["a"].mean() - 3) < 0.2 and abs(runs[0]["a"].std() - 2) < 0.2
    assert abs(runs[0]["b"].mean()) < 0.1 and abs(runs[0]["b"]).max() <= 1


def test_dropout_in_training_leaves_a_share_out_and_scales_the_rest(here: hg.Session) -> None:
    made = model(
        [node("Dropout", "x ratio train", "y kept")],
        [tensor("x", [5000])],
        [tensor("y", None), tensor("kept", None, BOOL)],
        [constant("ratio", np.float32(0.25)), constant("train", np.array(True))],
    )
    x = RNG.normal(size=5000).astype(np.float32)
    found = compiled(here, made, seed=1).run(x=x)
    assert abs(found["kept"].mean() - 0.75) < 0.05
    np.testing.assert_allclose(found["y"], np.where(found["kept"], x / 0.75, 0), rtol=1e-6)


def test_classes_are_drawn_as_often_as_their_weights_say(here: hg.Session) -> None:
    made = model(
        [node("Multinomial", "x", "y", sample_size=4000)],
        [tensor("x", [2, 3])],
        [tensor("y", None, TensorProto.INT32)],
    )
    weights = np.array([[0.2, 0.5, 0.3], [0.0, 0.1, 0.9]], np.float32)
    with np.errstate(divide="ignore"):
        found = compiled(here, made, seed=2).run(x=np.log(weights))["y"]
    shares = np.stack([(found == kind).mean(1) for kind in range(3)], 1)
    assert np.abs(shares - weights).max() < 0.05 and found.dtype == np.int32


def test_a_run_says_how_many_boxes_and_whether_dropout_trains(here: hg.Session) -> None:
    """Of few boxes a run may select any number, and one plan trains and does not."""
    made = model(
        [node("NonMaxSuppression", "boxes scores most", "y"), node("Dropout", "boxes _ train", "z kept")],
        [
            tensor("boxes", [1, 5, 4]),
            tensor("scores", [1, 1, 5]),
            tensor("most", [1], INT64),
            tensor("train", [], BOOL),
        ],
        [tensor("y", None, INT64), tensor("z", None), tensor("kept", None, BOOL)],
    )
    plan = compiled(here, made, seed=3)
    boxes = np.array([[[place, 0, place + 1, 1] for place in range(5)]], np.float32)
    scores = np.array([[[0.1, 0.9, 0.3, 0.7, 0.5]]], np.float32)
    for most in (0, 2, 9):
        feeds = {"boxes": boxes, "scores": scores, "most": np.array([most])}
        found = plan.run({**feeds, "train": np.array(False)})
        assert found["y"][:, 2].tolist() == [1, 3, 4, 2, 0][:most]
        assert np.array_equal(found["z"], boxes) and found["kept"].all()
        found = plan.run({**feeds, "train": np.array(True)})
        assert np.array_equal(found["z"], np.where(found["kept"], 2 * boxes, 0)) and not found["kept"].all()
    assert len(plan.plans) == 1
