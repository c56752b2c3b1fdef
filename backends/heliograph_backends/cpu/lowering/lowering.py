"""Lowers groups of nodes to steps of a native program.

Pure: the kernel of a node depends only on op, types and strides. Nodes without a kernel run on the
definition.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Protocol, TypeAlias

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.builder import Step
from heliograph_backends.cpu.kernels.program.elements import BRAIN, HALF
from heliograph_backends.cpu.kernels.program.words import AS_THEY_LIE
from heliograph_backends.cpu.lowering import (
    attention,
    copies,
    experts,
    images,
    moves,
    reductions,
    rope,
    searches,
    typed,
    windows,
)
from heliograph_backends.cpu.lowering import rows as row_ops
from heliograph_backends.cpu.lowering.copies import copy
from heliograph_backends.cpu.lowering.elementwise import (
    ELEMENTWISE,
    GATED,
    ElementwiseForm,
    Ref,
    digits,
    form_of,
    instructions_of,
)
from heliograph_backends.cpu.lowering.products import (
    can_cut,
    cut_body,
    cut_operand,
    cut_sizes,
    is_stored_product,
    repeats,
    stored_operand,
)
from heliograph_backends.planning.fusion import CHAINS, other_operand
from heliograph_backends.planning.groups import Group, Role
from heliograph_backends.planning.layout import ValuePlace, value_types, view
from heliograph_backends.planning.storage import StorageLayout
from heliograph_proto.graph import Graph, LeafKind, Node
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import F32, TensorType

#: Rotary embedding and its gradient.
ROTATIONS = ("rope", "rope_back")
#: Ops whose steps are appended by other modules; that of experts also asks for their order.
APPENDED = {
    **dict.fromkeys(attention.OPS, attention.append),
    **dict.fromkeys(ROTATIONS, rope.append),
    **dict.fromkeys(row_ops.OPS, row_ops.append),
    **dict.fromkeys(reductions.OPS, reductions.append),
    **dict.fromkeys(searches.OPS, searches.append),
    **dict.fromkeys(images.OPS, images.append),
    **dict.fromkeys(copies.PARTS, copies.append),
    **dict.fromkeys(moves.COPIES | moves.INDEXED, moves.append),
    "philox": moves.append_random,
}

#: Ops whose modules decide by themselves whether a kernel runs a node.
DECIDED = {
    **dict.fromkeys(attention.OPS, attention.has_kernel),
    "upscale": images.has_kernel,
    **dict.fromkeys(ROTATIONS, rope.has_kernel),
    **dict.fromkeys(row_ops.OPS, row_ops.has_kernel),
    **dict.fromkeys(reductions.OPS, reductions.has_kernel),
    **dict.fromkeys(windows.OPS, windows.has_kernel),
    **dict.fromkeys(searches.OPS, searches.has_kernel),
    **dict.fromkeys(images.OPS, images.has_kernel),
    **dict.fromkeys(copies.PARTS, copies.has_kernel),
}

#: Floats of 16 bits, which elementwise kernels stage as f32, and all data types that they accept.
NARROW = {"f16": HALF, "bf16": BRAIN}
STAGED = frozenset({"f32", *NARROW})
#: An operand and the conversions of its elements, see `elements`; 0: none.
Stored: TypeAlias = tuple[k.Operand, int]
#: The sources of values, by their numbers, and of staged ones by their conversions, too.
Known: TypeAlias = dict[int | tuple[int, int], Ref]

#: Bytes of an instruction's value.
VALUE_BYTES = 4
#: Ops beside moves whose operands have indices.
CHECKED = frozenset({"mul_mat_id", "flash_attn_paged"})
#: Matrix products; mul_mat's first operand is the transposed right side.
PRODUCTS = frozenset({"matmul", "mul_mat"})


class Located(Protocol):
    """The places of values."""

    def locate(self, value: int) -> tuple[int, int, tuple[int, ...]]:
        """Return the slot, offset and strides of a value."""


class _Numbered:
    """The places of a group's values, with their numbers as slots."""

    def __init__(self, places: Sequence[ValuePlace], numbers: Mapping[int, int]) -> None:
        self._places = places
        self._numbers = numbers

    def locate(self, value: int) -> tuple[int, int, tuple[int, ...]]:
        return self._numbers[value], 0, self._places[value].strides


class CpuLowering:
    """Appends the steps of one graph to program builders."""

    def __init__(self, graph: Graph, places: tuple[ValuePlace, ...]) -> None:
        self.graph = graph
        self.places = places
        self.leaves = len(graph.leaves)
        self.types = value_types(graph)
        self._is_f32 = [found.dtype is F32 for found in self.types]
        #: The role of each node in fusion and whether it has a kernel, and those of each form of a node.
        self._roles: dict[int, tuple[Role, bool]] = {}
        self._roles_of_forms: dict[Hashable, tuple[Role, bool]] = {}
        self._weights = {n for n, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.WEIGHT}
        #: Constants that instructions can hold: each `fill` of one element.
        self._scalars = {
            value: digits(node.attributes["value"])
            for value, node in enumerate(graph.nodes, self.leaves)
            if node.op == "fill" and node.type.size == 1 and node.type.dtype is F32
        }
        #: The steps of each form of a group, whose operands' slots are numbers of its values.
        self._steps_of_forms: dict[Hashable, list[Step]] = {}
        # Equal steps are encoded once, and equal instructions are the same object.
        self._encodings = k.Encodings()
        self._instructions: dict[tuple[ElementwiseForm, ...], tuple[k.Instruction, ...]] = {}

    def builder(self) -> k.ProgramBuilder:
        """Return a builder for steps of this graph."""
        return k.ProgramBuilder(self._encodings)

    # Kernels of nodes

    def role(self, number: int) -> Role:
        """Return the role of a node in fusion."""
        if self.graph.nodes[number].op in ELEMENTWISE and self._is_f32_alone(number):
            return "elementwise"
        return self._role_and_kernel(number)[0]

    def has_kernel(self, number: int) -> bool:
        """True if a native step runs this node."""
        if self.graph.nodes[number].op in ELEMENTWISE and self._is_f32_alone(number):
            return True
        return self._role_and_kernel(number)[1]

    def _role_and_kernel(self, number: int) -> tuple[Role, bool]:
        """Return the role of a node that is not elementwise on f32, and whether it has a kernel."""
        found = self._roles.get(number)
        if found is None:
            node, places, types = self.graph.nodes[number], self.places, self.types
            if node.op == "assign":
                form: Hashable = number
            else:
                around = [(id(types[value]), places[value][2]) for value in node.operands]
                # The graph keeps types and attributes alive, so an id is that of one object.
                attributes = id(node.attributes) if node.attributes else 0
                form = node.op, attributes, id(node.type), places[self.leaves + number][2], *around
            found = self._roles_of_forms.get(form)
            if found is None:
                has_kernel = self._find_kernel(number)
                role = self._role_of_native(node) if has_kernel else "other"
                found = self._roles_of_forms[form] = role, has_kernel
            self._roles[number] = found
        return found

    def _role_of_native(self, node: Node) -> Role:
        if self._typed(node) is not None:
            return "mixed" if node.type.dtype.name in typed.REGISTERS else "other"
        if node.type.dtype is not F32:
            return "other"
        if node.op in PRODUCTS:
            return "matmul"
        if node.op in windows.OPS:
            return "windows"
        return "norm" if node.op in ("norm", "rms_norm") else "other"

    def _is_f32_alone(self, number: int) -> bool:
        """True if a node reads and writes nothing but f32."""
        is_f32 = self._is_f32
        values = self.graph.nodes[number].operands
        return is_f32[self.leaves + number] and False not in [is_f32[value] for value in values]

    def is_native(self, group: Group) -> bool:
        """True if native steps run a group."""
        return group.role != "other" or self.has_kernel(group.nodes[-1])

    def may_join(self, group: Group) -> bool:
        """True if a group may run beside others. Ops with indices may not: the runner checks all
        indices before any worker starts.
        """
        op = self.graph.nodes[group.last].op
        return self.is_native(group) and op not in moves.INDEXED and op not in CHECKED

    def _find_kernel(self, number: int) -> bool:
        node = self.graph.nodes[number]
        if node.op in DECIDED:
            return DECIDED[node.op](node, *self._around(number))
        if node.op == "philox":
            return self.places[self.leaves + number].strides == node.type.strides
        if self._typed(node) is not None:
            return True
        plain = self._is_f32[self.leaves + number]
        if node.op == "mul_mat_id":
            return plain and experts.has_kernel(*self._around(number))
        if node.op in moves.INDEXED or (node.op in moves.COPIES and not (plain and node.op == "cont")):
            return self._moves(number)
        if not plain:
            return self._is_narrow(node) or self._moves_bytes(node)
        if self._is_stored_product(node):
            return True
        if not self._is_f32_alone(number):
            return False
        if node.op in ("matmul", "concat"):
            return True
        if node.op == "mul_mat":
            return can_cut(*(self.types[value] for value in node.operands))
        if node.op == "assign":
            return self.places[node.operands[1]].root != self.places[node.operands[0]].root
        return OPS[node.op].is_view

    def _around(self, number: int) -> tuple[list[TensorType], list[tuple[int, ...]]]:
        """Return the types of a node's operands, and the strides of operands and result."""
        values = self.graph.nodes[number].operands
        strides = [self.places[value].strides for value in (*values, self.leaves + number)]
        return [self.types[value] for value in values], strides

    def _moves(self, number: int) -> bool:
        node, (types, strides) = self.graph.nodes[number], self._around(number)
        move = moves.move_of(node, types)
        return move is not None and moves.fits(node, move, types, strides)

    def _typed(self, node: Node) -> typed.Typed | None:
        """Return the instructions of a node on truth values, integers or several data types."""
        if node.op not in typed.OPS:
            return None
        return typed.typed(node, [self.types[value] for value in node.operands])

    def _is_narrow(self, node: Node) -> bool:
        """True for elementwise nodes on f16 or bf16. Each of them computes in f32 and rounds
        once."""
        names = [self.types[value].dtype.name for value in node.operands]
        return node.op in ELEMENTWISE and node.type.dtype.name in NARROW and STAGED.issuperset(names)

    def _moves_bytes(self, node: Node) -> bool:
        """True if a node of a type other than f32 is copied by the byte."""
        if node.type.dtype.kind == "quantized":
            return False
        if node.op == "assign":
            return self.places[node.operands[1]].root != self.places[node.operands[0]].root
        return node.op == "concat" or OPS[node.op].is_view

    def _is_stored_product(self, node: Node) -> bool:
        if node.op != "mul_mat":
            return False
        types = [self.types[value] for value in node.operands]
        return is_stored_product(node.op, types, *(self.places[value] for value in node.operands))

    def is_row_operand(self, value: int) -> bool:
        """True if norms can take this value as their weight or bias."""
        return self._is_f32[value] and self._has_contiguous_rows(value)

    def _has_contiguous_rows(self, value: int) -> bool:
        found = self.types[value]
        return found.ndim > 0 and (found.shape[-1] == 1 or self.places[value].strides[-1] == 4)

    # Steps

    def append(
        self,
        builder: k.ProgramBuilder,
        group: Group,
        storage: StorageLayout,
        packed: Container[int],
        member: int,
    ) -> None:
        """Append the steps of one group. `packed`: the weights that lie in their packed form;
        `member`: the set of steps that the group may run with, if it is one step.

        Groups of one form have the same steps, in which only the places of values differ.
        """
        if group.role == "other" and not self._has_form(self.graph.nodes[group.last]):
            with builder.member_of(member):
                self._move(builder, group.last, storage)
            return
        form, values = self._form_of(group, packed)
        places, regions = self.places, storage.regions
        found: list[tuple[int, int]] = []
        for value in values:
            root, offset, _ = places[value]
            region = regions[root]
            found.append((region[0], region[1] + offset) if offset else region)
        numbers: Sequence[int] = range(len(found))
        if len(set(found)) < len(found):
            # Values at one place have one number: a step that runs in place is another one.
            firsts: dict[tuple[int, int], int] = {}
            numbers = [firsts.setdefault(place, number) for number, place in enumerate(found)]
            form = form, *numbers
        steps = self._steps_of_forms.get(form)
        if steps is None:
            steps = self._steps_of_forms[form] = []
            numbered = _Numbered(places, dict(zip(values, numbers, strict=True)))
            self._append(k.ProgramBuilder(self._encodings, steps), group, numbered, packed)
        if len(steps) > 1:
            # They run one after the other.
            member = k.ALONE
        for encoding, operands in steps:
            located = [
                (found[number][0], found[number][1] + more) if more else found[number]
                for number, more in operands
            ]
            builder.append(encoding, located, member)

    def _has_form(self, node: Node) -> bool:
        """True if the steps of a node follow from its op, attributes, types and strides."""
        found = node.op in APPENDED or node.op == "mul_mat_id" or self._is_narrow(node)
        return found or self._typed(node) is not None

    def _form_of(self, group: Group, packed: Container[int]) -> tuple[Hashable, list[int]]:
        """Return all that decides the steps of a group, and its values: operands, then the
        result."""
        role, nodes = group
        #: The numbers of operands, and below 0 those of the group's own values.
        numbers: dict[int, int] = {}
        values: list[int] = []
        form: list[Hashable] = [role]
        all_nodes, leaves, places, types = self.graph.nodes, self.leaves, self.places, self.types
        for place, number in enumerate(nodes):
            node = all_nodes[number]
            form += (node.op, id(node.attributes) if node.attributes else 0, id(node.type))
            for value in node.operands:
                if value in numbers:
                    form.append(numbers[value])
                    continue
                root, _, strides = places[value]
                form += (id(types[value]), strides)
                if root < leaves and root in self._weights:
                    form.append("packed" if root in packed else "weight")
                if value in self._scalars:
                    form.append(self._scalars[value])
                numbers[value] = len(values)
                values.append(value)
            numbers[leaves + number] = -1 - place
        values.append(leaves + nodes[-1])
        form.append(places[values[-1]][2])
        return tuple(form), values

    def _append(
        self, builder: k.ProgramBuilder, group: Group, storage: Located, packed: Container[int]
    ) -> None:
        """Append the steps of a group that has a form."""
        node = self.graph.nodes[group.last]
        if (lying := self._body_as_they_lie(group.nodes, storage)) is not None:
            builder.elementwise((node.type.nbytes // VALUE_BYTES,), lying)
        elif group.role in CHAINS or self._typed(node) is not None:
            body = self._body(group.nodes, storage, product=None)
            builder.elementwise(node.type.shape, body)
        elif group.role == "matmul":
            self._matmul(builder, group, storage, packed)
        elif group.role == "windows":
            self._windows(builder, group, storage, packed)
        elif group.role == "norm":
            self._norm(builder, group, storage)
        elif node.op in APPENDED or node.op == "mul_mat_id":
            types = [self.types[value] for value in node.operands]
            values = (*node.operands, self.leaves + group.last)
            operands = [self.operand(storage, value) for value in values]
            if node.op == "mul_mat_id":
                grouped = self.places[values[0]].root in packed
                experts.append(builder, types, operands, grouped=grouped)
            else:
                APPENDED[node.op](builder, node, types, operands)
        else:
            builder.elementwise(node.type.shape, self._body(group.nodes, storage, product=None))

    def operand(self, storage: Located, value: int) -> k.Operand:
        """Return a value as an operand of a step. Dimensions of size 1 have stride 0, so that they
        repeat."""
        slot, offset, strides = storage.locate(value)
        return k.Operand(slot, offset, repeating(self.types[value].shape, strides))

    def _result(self, storage: Located, number: int) -> k.Operand:
        return self.operand(storage, self.leaves + number)

    def _body(self, nodes: tuple[int, ...], storage: Located, product: int | None) -> k.Elementwise:
        """Return the instructions of elementwise nodes; `product` is a value that is already in
        place."""
        result = self.leaves + nodes[-1]
        last = self._typed(self.graph.nodes[nodes[-1]])
        written = last.written if last else NARROW.get(self.types[result].dtype.name, 0)
        operands = [(self.operand(storage, result), written)]
        sources: Known = {} if product is None else {product: 0}
        forms = []
        for place, number in enumerate(nodes):
            node = self.graph.nodes[number]
            is_plain = node.op in ELEMENTWISE and self._is_f32_alone(number)
            found = None if is_plain else self._typed(node)
            if found is None:
                forms.append(form_of(node, self._sources(node, sources, operands, storage)))
            else:
                read = self._typed_sources(node, found.reads, sources, operands, storage)
                forms.append(ElementwiseForm(node.op, read, (), found.recipe))
            sources[self.leaves + number] = -1 - place
        instructions = self._instructions_of(tuple(forms))
        narrow = tuple([each for _, each in operands])
        return k.Elementwise(
            tuple([each for each, _ in operands]), instructions, narrow if any(narrow) else ()
        )

    def _instructions_of(self, forms: tuple[ElementwiseForm, ...]) -> tuple[k.Instruction, ...]:
        """Return the instructions of nodes; those of equal ones are one object."""
        found = self._instructions.get(forms)
        if found is None:
            found = self._instructions[forms] = instructions_of(forms)
        return found

    def _body_as_they_lie(self, nodes: tuple[int, ...], storage: Located) -> k.Elementwise | None:
        """Return the instructions of nodes on elements that lie side by side, of which a value of
        the results is several; None for others."""
        type = self.graph.nodes[nodes[-1]].type
        together = VALUE_BYTES // type.dtype.block_bytes
        if together < 2 or type.nbytes % VALUE_BYTES:
            return None
        recipes = [self._recipe_as_they_lie(number, type.dtype.block_bytes) for number in nodes]
        if None in recipes:
            return None
        operands = [self._values(storage, self.leaves + nodes[-1], together)]
        known: dict[int, Ref] = {}
        forms = []
        for place, (number, recipe) in enumerate(zip(nodes, recipes, strict=True)):
            node = self.graph.nodes[number]
            for value in node.operands:
                if value not in known:
                    known[value] = len(operands)
                    operands.append(self._values(storage, value, together))
            sources = tuple([known[value] for value in node.operands])
            forms.append(ElementwiseForm(node.op, sources, (), recipe or ()))
            known[self.leaves + number] = -1 - place
        narrow = tuple([AS_THEY_LIE if each.strides != (VALUE_BYTES,) else 0 for each in operands])
        instructions = self._instructions_of(tuple(forms))
        return k.Elementwise(tuple(operands), instructions, narrow if any(narrow) else ())

    def _recipe_as_they_lie(self, number: int, size: int) -> typed.Recipe | None:
        """Return the instructions of a node on several elements at a time; None if its result's
        elements do not have so many bytes, or they do not lie side by side in the same order
        everywhere."""
        node = self.graph.nodes[number]
        if node.type.dtype.block_bytes != size or node.op not in typed.OPS or not node.operands:
            return None
        types, strides = self._around(number)
        if any(mine != each.strides for mine, each in zip(strides, (*types, node.type), strict=True)):
            return None
        return typed.as_they_lie(node, types)

    def _values(self, storage: Located, value: int, together: int) -> k.Operand:
        """Return elements that lie side by side, so many in a value, as a vector of values."""
        slot, offset, _ = storage.locate(value)
        return k.Operand(slot, offset, (together * self.types[value].dtype.block_bytes,))

    def _sources(self, node: Node, known: Known, operands: list[Stored], storage: Located) -> tuple[Ref, ...]:
        """Return the sources of a node's instructions, and append new operands."""
        if node.op in GATED and len(node.operands) == 1:
            found: tuple[Ref, ...] = self._halves(node, operands, storage)
        else:
            for value in node.operands:
                if value not in known:
                    known[value] = self._source(value, operands, storage)
            found = tuple([known[value] for value in node.operands])
        return found[::-1] if node.op in GATED and node.attributes["swap"] else found

    def _typed_sources(
        self,
        node: Node,
        reads: Sequence[tuple[int, int]],
        known: Known,
        operands: list[Stored],
        storage: Located,
    ) -> tuple[Ref, ...]:
        """Return the sources of a typed node's instructions, and append new operands. A value may
        be staged as several."""
        found = []
        for place, read in reads:
            value = node.operands[place]
            # A value of the group is a register, and one that is not staged is known by itself.
            key = value if value in known or not read else (value, read)
            if key not in known:
                known[key] = self._source(value, operands, storage, read)
            found.append(known[key])
        return tuple(found)

    def _source(self, value: int, operands: list[Stored], storage: Located, read: int | None = None) -> Ref:
        number = self._scalars.get(value)
        if number is not None:
            return number
        narrow = NARROW.get(self.types[value].dtype.name, 0) if read is None else read
        operands.append((self.operand(storage, value), narrow))
        return len(operands) - 1

    def _halves(self, node: Node, operands: list[Stored], storage: Located) -> tuple[Ref, Ref]:
        """Append the halves of the rows of a gated unit's single operand, and return their
        sources."""
        slot, offset, strides = storage.locate(node.operands[0])
        steps = repeating(node.type.shape, strides)
        second = offset + node.type.shape[-1] * strides[-1]
        narrow = NARROW.get(node.type.dtype.name, 0)
        operands += [(k.Operand(slot, at, steps), narrow) for at in (offset, second)]
        return len(operands) - 2, len(operands) - 1

    def _matmul(
        self, builder: k.ProgramBuilder, group: Group, storage: Located, packed: Container[int]
    ) -> None:
        product = next(n for n in group.nodes if self.graph.nodes[n].op in PRODUCTS)
        node = self.graph.nodes[product]
        left, right = node.operands if node.op == "matmul" else reversed(node.operands)
        *batch, rows, columns = node.type.shape
        rest = tuple(number for number in group.nodes if number != product)
        epilogue = self._body(rest, storage, self.leaves + product) if rest else None
        leading = batch if node.op == "matmul" else self.types[right].shape[:-2]
        cuts = repeats(leading, batch)
        right_operand: k.Operand | k.PackedOperand | k.StoredOperand
        in_form = self.places[right].root in packed
        if in_form and self._is_f32[right]:
            right_operand = k.PackedOperand(storage.locate(right)[0])
        elif self._is_stored_product(node) or self._is_weight_of_rows(node):
            stored, dtype = self.operand(storage, right), self.types[right].dtype.name
            integers = not self._is_f32[left]
            right_operand = stored_operand(stored, dtype, cuts, grouped=in_form, integers=integers)
        else:
            right_operand = self.operand(storage, right)
            if node.op == "mul_mat":
                right_operand = transposed(cut_operand(right_operand, cuts, repeat=True))
        depth = self.types[left].shape[-1]
        result = cut_operand(self._result(storage, group.last), cuts)
        left_operand = cut_operand(self.operand(storage, left), cuts)
        sizes, body = cut_sizes(batch, cuts), cut_body(epilogue, cuts)
        builder.gemm(rows, columns, depth, left_operand, right_operand, result, sizes, body)

    def _windows(
        self, builder: k.ProgramBuilder, group: Group, storage: Located, packed: Container[int]
    ) -> None:
        first = next(n for n in group.nodes if self.graph.nodes[n].op in windows.OPS)
        node = self.graph.nodes[first]
        rest = tuple(number for number in group.nodes if number != first)
        epilogue = self._body(rest, storage, self.leaves + first) if rest else None
        places = [self.operand(storage, value) for value in (*node.operands, self.leaves + group.last)]
        types, root = [self.types[value] for value in node.operands], self.places[node.operands[0]].root
        windows.append(builder, node, types, places, epilogue, packed=root in packed)

    def _is_weight_of_rows(self, node: Node) -> bool:
        """True for a product with a weight that lies in its own order, row by row."""
        place = self.places[node.operands[0]]
        return node.op == "mul_mat" and place.root in self._weights and place.strides[-1] == 4

    def _norm(self, builder: k.ProgramBuilder, group: Group, storage: Located) -> None:
        first = self.graph.nodes[group.nodes[0]]
        rows: list[k.Operand | None] = [None, None]
        value = self.leaves + group.nodes[0]
        for place, number in enumerate(group.nodes[1:]):
            row = other_operand(self.graph.nodes[number].operands, value)
            slot, offset, strides = storage.locate(row)
            rows[place] = k.Operand(slot, offset, strides[-1:])
            value = self.leaves + number
        source, target = self.operand(storage, first.operands[0]), self._result(storage, group.last)
        epsilon = float(first.attributes["eps"])
        if first.op == "norm":
            builder.layer_norm(first.type.shape, source, target, rows[0], rows[1], epsilon)
        else:
            builder.rms_norm(first.type.shape, source, target, rows[0], epsilon)

    def _move(self, builder: k.ProgramBuilder, number: int, storage: StorageLayout) -> None:
        """Append a copy: cont, concat, assign, and views that strides cannot express."""
        node = self.graph.nodes[number]
        if node.op == "concat":
            self._concat(builder, number, storage)
            return
        value = node.operands[-1]
        source_type = self.types[value]
        # An assignment writes its variable, wherever its result is read.
        target = self.operand(storage, node.operands[0] if node.op == "assign" else self.leaves + number)
        if node.op == "reshape":
            # In the source's shape the target is contiguous.
            plain = k.Operand(target.slot, target.offset, source_type.strides)
            copy(builder, source_type.shape, self.operand(storage, value), plain, node.type.dtype)
            return
        source = self.operand(storage, value)
        if OPS[node.op].is_view:
            moved = view(node.op, node.attributes, source_type, node.type, self.places[value])
            assert moved is not None, "only a reshape can be impossible by strides"
            base = storage.regions[moved.root]
            source = k.Operand(base.slot, base.offset_bytes + moved.offset_bytes, moved.strides)
        copy(builder, node.type.shape, source, target, node.type.dtype)

    def _concat(self, builder: k.ProgramBuilder, number: int, storage: StorageLayout) -> None:
        node = self.graph.nodes[number]
        slot, offset, strides = storage.locate(self.leaves + number)
        axis = node.attributes["axis"] % node.type.ndim
        for value in node.operands:
            found = self.types[value]
            target = k.Operand(slot, offset, strides)
            copy(builder, found.shape, self.operand(storage, value), target, found.dtype)
            offset += found.shape[axis] * strides[axis]


def repeating(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, with 0 in dimensions of size 1."""
    if 1 not in sizes:
        return strides
    return tuple(0 if size == 1 else step for size, step in zip(sizes, strides, strict=True))


def transposed(operand: k.Operand) -> k.Operand:
    """Return a matrix operand with rows and columns exchanged."""
    *leading, row, column = operand.strides
    return k.Operand(operand.slot, operand.offset, (*leading, column, row))
