"""Pictures of plans: layout, drawing and pages, of plain values and without a server."""

from __future__ import annotations

import hashlib
import json
import random
import re
import xml.etree.ElementTree as xml
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from heliograph.explain.parts import ExplainedBlock, ExplainedValue
from heliograph.explain.pictures.coordinates import GAP, Placed, place
from heliograph.explain.pictures.drawing import svg_text
from heliograph.explain.pictures.memory import MemoryPicture, live_bytes, memory_svg
from heliograph.explain.pictures.model import Picture, PictureLeaf, PictureNode
from heliograph.explain.pictures.page import Panel, page, table
from heliograph.explain.pictures.scene import Scene, opened, scene_of
from heliograph.explain.pictures.scopes import MOST_MEMBERS
from heliograph.explain.pictures.words import fitted, heat_of, time_text, width_of
from heliograph_proto.plans import MemoryUse

HOSTILE = '</script><img src=x onerror="x()"><!--\\u003c&amp;\u2028\x00\ud7ff日本 \u202e]]>'
SVG = "{http://www.w3.org/2000/svg}"


def node(name: str, *operands: int, device: int = 0, **others: object) -> PictureNode:
    op = name.rpartition("/")[2] or "op"
    return PictureNode(name, op, "f32[4]", operands, device, device, **others)  # type: ignore[arg-type]


def picture(nodes: list[PictureNode], leaves: int = 1, devices: int = 1) -> Picture:
    found = tuple(PictureLeaf("input", f"x{number}", "f32[4]", 16) for number in range(leaves))
    last = (("y", leaves + len(nodes) - 1),)
    return Picture("plan", "a summary", found, tuple(nodes), last, tuple(f"cpu{n}" for n in range(devices)))


def layers(count: int, inside: int = 8) -> Picture:
    """Layers in which each node reads the one before, and the last also the layer's input."""
    nodes: list[PictureNode] = []
    for layer in range(count):
        first = len(nodes)
        for number in range(inside):
            also = (first,) if number == inside - 1 else ()
            nodes.append(
                node(f"layer{layer}/part{number * 2 // inside}/op{number}", len(nodes), *also, size_bytes=16)
            )
    return picture(nodes)


def wild(seed: int, count: int = 300) -> Picture:
    """Nodes of random scopes and operands, so that folded scopes depend on each other in circles."""
    rng = random.Random(seed)
    nodes = []
    for number in range(count):
        scopes = [rng.choice("abcd") for _ in range(rng.randrange(4))]
        reads = {rng.randrange(max(0, number - 30), number + 2) for _ in range(rng.randrange(1, 4))}
        name = "/".join([*scopes, f"n{number}"])
        nodes.append(
            node(name, *sorted(reads), device=rng.randrange(3), size_bytes=8, is_view=rng.random() < 0.2)
        )
    return replace(picture(nodes, leaves=2, devices=3), copies={(5, 1): "n3: 8 B", (9, 2): "n7: 8 B"})


def shown(scene: Scene, everything: bool = True) -> dict[int, Placed]:
    boxes = scene.layout.tree.boxes
    return place(scene.layout, range(len(boxes)) if everything else opened(scene))


def rectangles(
    scene: Scene, placed: dict[int, Placed], scope: int
) -> list[tuple[float, float, float, float]]:
    return [
        (at.x, at.y, at.x + at.width, at.y + at.height)
        for at in (placed[one] for one in scene.layout.tree.boxes[scope].members)
    ]


EVERY = [
    layers(6),
    wild(1),
    wild(2),
    wild(3),
    layers(120, 2),
    picture([node(f"n{n}", n) for n in range(900)]),
]


@pytest.mark.parametrize("it", EVERY, ids=range(len(EVERY)))
@pytest.mark.parametrize("everything", [True, False], ids=["open", "folded"])
def test_boxes_lie_in_their_scope_and_never_over_each_other(it: Picture, everything: bool) -> None:
    scene = scene_of(it)
    placed = shown(scene, everything)
    for scope, at in placed.items():
        if not at.is_open:
            continue
        found = rectangles(scene, placed, scope)
        for left, top, right, bottom in found:
            assert left >= 0 and top >= 0 and right <= at.width + 1e-6 and bottom <= at.height + 1e-6
        for one, other in pairwise(sorted(found, key=lambda box: (box[1], box[0]))):
            beside = one[2] + GAP <= other[0] + 1e-6 or other[2] + GAP <= one[0] + 1e-6
            assert beside or one[3] <= other[1] or other[3] <= one[1], (one, other)


@pytest.mark.parametrize("it", EVERY[:4], ids=range(4))
def test_a_wire_goes_down_unless_folded_scopes_depend_on_each_other(it: Picture) -> None:
    scene = scene_of(it)
    placed = shown(scene)
    for scope, wires in scene.layout.wiring.wires.items():
        routes = scene.layout.layers[scope].routes
        assert len(routes) == sum(len(wire.targets) for wire in wires)
        for route in routes:
            wire = wires[route.wire]
            source, target = wire.source.box, wire.targets[route.target].box
            if source >= 0 and target >= 0 and not route.is_back:
                assert placed[source].y + placed[source].height < placed[target].y
                assert len(route.bends) == placed[target].row - placed[source].row - 1


def test_layers_have_no_wire_against_the_order() -> None:
    scene = scene_of(layers(6))
    assert not any(route.is_back for found in scene.layout.layers.values() for route in found.routes)


@pytest.mark.parametrize("it", EVERY[:4], ids=range(4))
def test_every_edge_is_drawn_or_named_in_every_scope_that_it_passes(it: Picture) -> None:
    scene = scene_of(it)
    tree, wiring = scene.layout.tree, scene.layout.wiring
    for number, one in enumerate(it.nodes):
        for value in one.operands:
            box, reader = tree.box_of(value, len(it.leaves)), tree.of_node[number]
            if box < 0:
                continue
            named = [value in wiring.named.get(at, []) for at in _outwards(tree.boxes, reader)]
            drawn = [
                any(value in wire.values and any(end.box == at for end in wire.targets) for wire in wires)
                for at in _outwards(tree.boxes, reader)
                for wires in [wiring.wires.get(tree.boxes[at].parent, [])]
            ]
            assert named[0] or drawn[0], (one.name, value)


def _outwards(boxes: list, number: int) -> list[int]:  # type: ignore[type-arg]
    found = []
    while number > 0:
        found.append(number)
        number = boxes[number].parent
    return found


def test_the_same_plan_has_the_same_picture() -> None:
    assert svg_text(scene_of(wild(4)), set()) == svg_text(scene_of(wild(4)), set())


@pytest.mark.parametrize("count", [41, 900, 10_000])
def test_flat_graphs_are_cut_into_groups_of_nodes_that_follow_each_other(count: int) -> None:
    scene = scene_of(picture([node(f"n{number}", number) for number in range(count)]))
    boxes = scene.layout.tree.boxes
    assert max(len(box.members) for box in boxes) <= MOST_MEMBERS
    assert sum(box.kind == "node" for box in boxes) == count
    assert [box.number for box in boxes if box.kind == "node"] == sorted(
        box.number for box in boxes if box.kind == "node"
    )
    # Only a value or two cross from one group to the next.
    assert all(len(ports) <= 2 for ports in scene.layout.wiring.lowers.values())


def test_groups_end_where_splits_end() -> None:
    nodes = [node(f"n{number}", number, device=number // 50) for number in range(100)]
    scene = scene_of(picture(nodes, devices=2))
    groups = [
        label for label, box in zip(scene.labels, scene.layout.tree.boxes, strict=True) if box.kind == "group"
    ]
    assert groups and all(len(group.devices) == 1 for group in groups)


def test_splits_of_one_node_each_share_groups() -> None:
    nodes = [node(f"n{number}", number, device=number % 2) for number in range(2000)]
    scene = scene_of(picture(nodes, devices=2))
    assert max(len(box.members) for box in scene.layout.tree.boxes) <= MOST_MEMBERS


def test_weights_and_views_of_them_stand_at_their_readers() -> None:
    weight = PictureLeaf("weight", "scope/w", "f32[4]", 1024)
    nodes = [node("scope/turn", 1, is_view=True), node("scope/product", 0, 2, size_bytes=16)]
    it = replace(
        picture(nodes), leaves=(PictureLeaf("input", "x", "f32[4]", 16), weight), outputs=(("y", 3),)
    )
    scene = scene_of(it)
    kinds = [box.kind for box in scene.layout.tree.boxes]
    assert kinds.count("node") == 1
    product = scene.labels[scene.layout.tree.of_node[1]]
    assert product.lines == ("◆ w 1.0 KiB",) and product.weights_bytes == 1024
    assert scene.layout.tree.of_node[0] == scene.layout.tree.of_node[1] and product.nodes == 2


def test_a_value_that_many_read_is_named_there_instead_of_wired() -> None:
    scene = scene_of(picture([node("mask", 0), *(node(f"layer{n}/a", 1) for n in range(8))]))
    tree, wiring = scene.layout.tree, scene.layout.wiring
    mask = tree.of_node[0]
    assert wiring.namers == {mask: 8}
    assert not any(wire.source.box == mask for wires in wiring.wires.values() for wire in wires)
    assert all(scene.labels[tree.of_node[number]].lines == ("↳ mask",) for number in range(1, 9))


def test_deep_scopes_and_the_longest_names_are_bounded() -> None:
    deep = "/".join("s" for _ in range(500))
    scene = scene_of(picture([node(f"{deep}/a", 0), node(f"{deep}/b", 1), node("/" * 1000, 2)]))
    assert max(box.depth for box in scene.layout.tree.boxes) <= 20
    xml.fromstring(svg_text(scene, set(range(len(scene.layout.tree.boxes)))))


def test_a_plan_without_nodes_has_a_picture() -> None:
    it = Picture("nothing", "", (PictureLeaf("input", "x", "f32[1]", 4),), (), (("y", 0),), ("cpu0",))
    xml.fromstring(svg_text(scene_of(it), set()))
    xml.fromstring(svg_text(scene_of(replace(it, leaves=(), outputs=())), set()))


# Drawing


def test_svg_is_xml_with_all_names_as_text() -> None:
    it = picture([node(HOSTILE.replace("/", "|"), 0), node("b", 1)])
    root = xml.fromstring(svg_text(scene_of(it), set()))
    tags = {one.tag.removeprefix(SVG) for one in root.iter()}
    assert tags <= {"svg", "title", "style", "defs", "marker", "path", "rect", "text", "g"}
    names = [one.text or "" for one in root.iter(f"{SVG}title")]
    assert any(name.startswith("<|script><img src=x") for name in names)


def test_heat_and_devices_are_drawn_and_in_the_legend() -> None:
    hot, cool = node("hot", 0, time=99.0), node("cool", 1, time=1.0, device=1)
    it = replace(picture([hot, cool], devices=2), timing="measured", copies={(1, 1): "hot: 4 B, relayed"})
    scene = scene_of(it)
    heats = [scene.labels[scene.layout.tree.of_node[number]].heat for number in range(2)]
    assert heats[0] > 0.99 and 0.3 < heats[1] < 0.4
    drawn = svg_text(scene, set())
    assert "measured time" in drawn and "copied to another device" in drawn and "cpu1" in drawn
    assert drawn.count('class="copy"') == 2  # one in the picture, one in the legend
    assert "<title>hot: 4 B, relayed</title>" in drawn


def test_more_is_open_on_request() -> None:
    scene = scene_of(layers(6))
    kinds = [
        sum(scene.layout.tree.boxes[one].kind == "node" for one in place(scene.layout, opened(scene, levels)))
        for levels in (0, 1, 2)
    ]
    assert kinds == [0, 0, 48] and len(opened(scene, 9)) == 18
    assert opened(scene) == opened(scene, 1)


# Pages


class Tags(HTMLParser):
    """The tags and attributes of a page, and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.inside:
            self.inside[self._open].append(data)


def page_of(it: Picture, *panels: Panel) -> str:
    return page(it.title, it.summary, [scene_of(it)], panels)


def test_a_page_asks_no_host_for_anything() -> None:
    found = Tags(page_of(layers(3), Panel("More", table([["a"], ["b"]]))))
    for tag, attributes in found.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img"), tag
        assert not set(attributes) & {"src", "href", "action", "style"}, (tag, attributes)
    whole = page_of(layers(3))
    addresses = set(re.findall(r"https?://[\w./]+", whole))
    assert addresses == {"http://www.w3.org/2000/svg"} and "@import" not in whole and "url(#" in whole
    assert re.findall(r"url\((?!#)", whole) == []


def test_the_policy_of_a_page_allows_its_own_script_and_style_alone() -> None:
    found = Tags(page_of(layers(3)))
    (policy,) = (found["content"] for tag, found in found.tags if found.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; ")

    def digest(text: str) -> str:
        return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    data, script = found.inside["script"]
    (style,) = found.inside["style"]
    assert f"script-src {digest(script)};" in policy and f"style-src {digest(style)};" in policy
    assert json.loads(data)["title"] == "plan"


@pytest.mark.parametrize("where", ["title", "name", "scope", "op", "source", "leaf", "output", "device"])
def test_names_with_markup_stay_text(where: str) -> None:
    it = picture([node("a/b", 0, why="first"), node("a/c", 1)])
    first, *others = it.nodes
    changes = {
        "title": {"title": HOSTILE, "summary": HOSTILE},
        "name": {"nodes": (replace(first, name=f"a/{HOSTILE}"), *others)},
        "scope": {"nodes": (replace(first, name=f"{HOSTILE}/b"), *others)},
        "op": {"nodes": (replace(first, op=HOSTILE, type=HOSTILE, why=HOSTILE), *others)},
        "source": {"nodes": (replace(first, source=HOSTILE), *others)},
        "leaf": {"leaves": (replace(it.leaves[0], name=HOSTILE, type=HOSTILE),)},
        "output": {"outputs": ((HOSTILE, 2),)},
        "device": {"devices": (HOSTILE,)},
    }
    plain, found = Tags(page_of(it)), Tags(page_of(replace(it, **changes[where])))  # type: ignore[arg-type]
    allowed = {tag for tag, _ in plain.tags} | {"g", "rect", "text", "path"}
    assert {tag for tag, _ in found.tags} <= allowed
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert [tag for tag, _ in found.tags].count("script") == 2


def test_a_page_of_ten_thousand_nodes_is_bounded() -> None:
    whole = page_of(wild(5, 10_000))
    assert len(whole) < 8_000_000
    static = whole[: whole.index('<script type="application/json"')]
    assert static.count('class="box') <= 80


# Memory


def memory() -> MemoryPicture:
    values = (
        ExplainedValue(1, "a/x", 0, 0, 64, 0, 1),
        ExplainedValue(1, f"a/{HOSTILE}", 0, 64, 64, 1, 2),
        ExplainedValue(1, "b/z", 0, 0, 32, 2, 3),
    )
    block = ExplainedBlock("cpu0", 128, MemoryUse.RESULTS)
    return MemoryPicture("plan", (block,), values, (("cpu0", (("weights", 4096), ("variables", 0))),))


def test_memory_is_drawn_step_by_step() -> None:
    assert live_bytes(memory().values, 4) == [64, 128, 96, 32]
    root = xml.fromstring(memory_svg(memory()))
    values = [one for one in root.iter(f"{SVG}rect") if one.get("class") == "value" and len(one)]
    assert len(values) == 3
    widths = [float(one.get("width", 0)) for one in values]
    assert widths[0] == widths[1] == widths[2] > 100
    texts = [one.text or "" for one in root.iter(f"{SVG}text")]
    assert any("100% of it at the peak" in text for text in texts)
    assert any("weights 4.0 KiB" in text for text in texts)


def test_a_plan_without_memory_has_a_picture_of_it() -> None:
    xml.fromstring(memory_svg(MemoryPicture("plan", (), (), ())))


# Words


def test_texts_are_cut_in_their_middle_until_they_fit() -> None:
    assert fitted("short", 100, 11) == "short"
    cut = fitted("encoder.layer.0.attention.self.weight", 120, 11)
    assert width_of(cut, 11) <= 120 and cut.startswith("enc") and cut.endswith("eight") and "…" in cut
    assert fitted("any", 0, 11) in ("", "…")


def test_heat_is_the_logarithm_of_a_share() -> None:
    assert [round(heat_of(share), 2) for share in (0, 1e-9, 0.001, 0.01, 0.1, 1, 2)] == [
        0,
        0,
        0,
        0.33,
        0.67,
        1,
        1,
    ]


def test_times_are_in_the_largest_unit_that_fits() -> None:
    assert [time_text(us) for us in (0, 0.5, 12, 3400, 5e6)] == ["-", "0.5 us", "12 us", "3.4 ms", "5 s"]
