"""The planner: exact plans, and a proof that refuses every kind of broken one."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from reshard.core import planner
from reshard.core.boxes import Box, first_overlap, whole
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.core.planner import Plan, PlanError, Transfer, make_plan, prove

SHAPES = {"w": (12, 10)}


def split(rows, columns):
    """`w` cut into a grid; local tensors are named by their place in it."""
    r, c = SHAPES["w"][0] // rows, SHAPES["w"][1] // columns
    return Placement.of(
        SHAPES,
        (
            LocalTensor((i, j), (r, c), (Part("w", Box((i * r, j * c), (r, c)), (0, 0)),), holder=(i, j))
            for i in range(rows)
            for j in range(columns)
        ),
    )


def run(plan, values):
    """Carry a plan out on integers."""
    src = {t.id: np.full(t.shape, -1) for t in plan.src.tensors.values()}
    for t in plan.src.tensors.values():
        for part in t.parts:
            src[t.id][slices(part.local_box)] = values[part.name][slices(part.box)]
    dst = {t.id: np.full(t.shape, -1) for t in plan.dst.tensors.values()}
    for t in plan.transfers:
        target = dst[t.dst][slices(Box(t.dst_at, t.box.lengths))]
        assert (target == -1).all()
        target[...] = src[t.src][slices(Box(t.src_at, t.box.lengths))]
    return dst


def slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


@pytest.mark.parametrize("src", [(1, 1), (2, 1), (1, 2), (3, 5), (12, 10)])
@pytest.mark.parametrize("dst", [(1, 1), (4, 1), (1, 5), (6, 2)])
def test_every_element_arrives_where_it_belongs(src, dst):
    values = {"w": np.arange(120).reshape(12, 10)}
    plan = make_plan(split(*src), split(*dst))
    for tensor_id, array in run(plan, values).items():
        [part] = plan.dst.tensors[tensor_id].parts
        assert (array == values["w"][slices(part.box)]).all()


def test_neighboring_rows_are_one_transfer():
    whole_w = Placement.canonical(SHAPES)
    rows = Placement.of(
        SHAPES,
        [LocalTensor("x", (12, 10), tuple(Part("w", Box((i, 0), (1, 10)), (i, 0)) for i in range(12)))],
    )
    assert len(make_plan(rows, whole_w).transfers) == 1
    assert len(make_plan(split(3, 1), whole_w).transfers) == 3


def test_the_nearest_of_several_replicas_is_read():
    copies = Placement.of(
        SHAPES, [LocalTensor(i, (12, 10), (Part("w", whole((12, 10)), (0, 0)),), holder=i) for i in range(4)]
    )
    target = Placement.of(
        SHAPES, [LocalTensor("d", (12, 10), (Part("w", whole((12, 10)), (0, 0)),), holder=2)]
    )
    plan = make_plan(copies, target, distance=lambda a, b: abs(a - b))
    assert {t.src for t in plan.transfers} == {2}


def test_what_nobody_holds_is_refused():
    half = Placement.of(SHAPES, [LocalTensor("x", (6, 10), (Part("w", Box((0, 0), (6, 10)), (0, 0)),))])
    with pytest.raises(PlanError, match="no source holds w at offsets \\(6, 0\\)"):
        make_plan(half, Placement.canonical(SHAPES))


BREAKS = {
    "dropped": (lambda ts: ts[1:], "cover"),
    "doubled": (lambda ts: [*ts, ts[0]], "twice"),
    "other source": (lambda ts: [ts[0]._replace(src=(1, 0)), *ts[1:]], "does not hold w"),
    "no such source": (lambda ts: [ts[0]._replace(src="nowhere"), *ts[1:]], "does not exist"),
    "no such destination": (lambda ts: [ts[0]._replace(dst="nowhere"), *ts[1:]], "does not exist"),
    "shifted read": (
        lambda ts: [ts[0]._replace(src_at=(1, 0), box=Box(ts[0].box.offsets, (1, 5))), *ts[1:]],
        "does not hold w",
    ),
    "shifted write": (
        lambda ts: [ts[0]._replace(dst_at=(1, 0), box=Box(ts[0].box.offsets, (1, 5))), *ts[1:]],
        "does not hold w",
    ),
    "read beyond the end": (lambda ts: [ts[0]._replace(src_at=(11, 9)), *ts[1:]], "leaves source"),
    "write beyond the end": (lambda ts: [ts[0]._replace(dst_at=(11, 9)), *ts[1:]], "leaves destination"),
    "write before the start": (lambda ts: [ts[0]._replace(dst_at=(-1, 0)), *ts[1:]], "leaves destination"),
    "other tensor": (lambda ts: [ts[0]._replace(name="v"), *ts[1:]], "does not hold v"),
    "too short": (
        lambda ts: [ts[0]._replace(box=Box(ts[0].box.offsets, (ts[0].box.lengths[0] - 1, 5))), *ts[1:]],
        "cover",
    ),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_plan_is_refused(how):
    plan = make_plan(split(3, 1), split(2, 2))
    prove(plan)
    change, message = BREAKS[how]
    with pytest.raises(PlanError, match=message):
        prove(replace(plan, transfers=tuple(change(list(plan.transfers)))))


def test_a_broken_placement_is_refused():
    def tensor(*parts, fills=()):
        return Placement.of(SHAPES, [LocalTensor("x", (4, 10), parts, fills)])

    good, hole = Part("w", Box((0, 0), (4, 10)), (0, 0)), Part("w", Box((0, 0), (3, 10)), (0, 0))
    make_plan(Placement.canonical(SHAPES), tensor(good))
    make_plan(Placement.canonical(SHAPES), tensor(hole, fills=(Box((3, 0), (1, 10)),)))
    for wrong, message in (
        (tensor(hole), "cover 30 of its 40"),
        (tensor(good, Part("w", Box((5, 0), (1, 10)), (3, 0))), "twice"),
        (tensor(good, fills=(Box((3, 0), (1, 10)),)), "twice"),
        (tensor(hole, fills=(Box((4, 0), (1, 10)),)), "leave its shape"),
        (tensor(Part("w", Box((10, 0), (4, 10)), (0, 0))), "no source holds"),
    ):
        with pytest.raises(PlanError, match=message):
            make_plan(Placement.canonical(SHAPES), wrong)


boxes = st.builds(lambda a, b, c, d: Box((a, b), (c, d)), *[st.integers(0, 5)] * 2, *[st.integers(1, 4)] * 2)


@settings(deadline=None)
@given(boxes, boxes)
def test_box_arithmetic_agrees_with_marked_cells(a, b):
    grid = np.zeros((3, 10, 10), int)
    for i, box in enumerate((a, b)):
        grid[i][slices(box)] = 1
    common = a.intersect(b)
    assert (common.volume if common else 0) == (grid[0] & grid[1]).sum()
    for rest in a.minus(b):
        grid[2][slices(rest)] += 1
    assert (grid[2] == (grid[0] & ~grid[1])).all()
    assert (first_overlap([a, b]) is not None) == (common is not None)
    assert a.contains(b) == ((grid[0] & grid[1]).sum() == b.volume)


def one_transfer(part, box, at, extra):
    """A source of one tensor with these parts, a destination that wants `box` of it, and one
    transfer that reads it from `at`."""
    src = LocalTensor("s", (9, 9), tuple(Part("w", box, place) for box, place in (part, *extra)))
    dst = LocalTensor("d", box.lengths, (Part("w", box, (0, 0)),))
    transfer = Transfer("w", box, "s", at, "d", (0, 0))
    return Plan(Placement.of({"w": (9, 9)}, [src]), Placement.of({"w": (9, 9)}, [dst]), (transfer,))


cells = st.integers(0, 3)
small_boxes = st.builds(
    lambda a, b, c, d: Box((a, b), (c, d)), cells, cells, st.integers(1, 4), st.integers(1, 4)
)
# Mostly parts that lie in the source as they do in `w`, so that they overlap there as they do here;
# some shifted by a row.
placed_parts = st.builds(
    lambda box, shift: (box, (box.offsets[0] + shift, box.offsets[1])),
    small_boxes,
    st.sampled_from([0, 0, 0, 1]),
)
reads = st.builds(
    lambda parts, box, shift: one_transfer(parts[0], box, (box.offsets[0] + shift, box.offsets[1]), parts[1:]),
    st.lists(placed_parts, min_size=1, max_size=4), small_boxes, st.sampled_from([0, 0, 0, 1]),
)  # fmt: skip


def held_cell_by_cell(plan):
    """Whether each element of the plan's one transfer is somewhere in the source's parts at the
    very place where it is read."""
    [transfer], [tensor] = plan.transfers, plan.src.tensors.values()
    places = {
        (tuple(np.add(part.box.offsets, cell)), tuple(np.add(part.at, cell)))
        for part in tensor.parts for cell in np.ndindex(part.box.lengths)
    }  # fmt: skip
    return all(
        (tuple(np.add(transfer.box.offsets, cell)), tuple(np.add(transfer.src_at, cell))) in places
        for cell in np.ndindex(transfer.box.lengths)
    )


def held_by_volume(plan):
    """The same, as one might count it: the volumes of what each part has. It counts twice what two
    parts have."""
    [transfer], [tensor] = plan.transfers, plan.src.tensors.values()
    shift = tuple(np.subtract(transfer.src_at, transfer.box.offsets))
    found = [
        part.box.intersect(transfer.box)
        for part in tensor.parts
        if shift == tuple(np.subtract(part.at, part.box.offsets))
    ]
    return sum(box.volume for box in found if box is not None) == transfer.box.volume


def accepted(plan):
    try:
        prove(plan)
    except PlanError as error:
        assert "does not hold w" in str(error)
        return False
    return True


@settings(deadline=None, max_examples=300)
@given(reads)
def test_a_read_is_proven_if_and_only_if_the_source_holds_every_element_there(plan):
    assert accepted(plan) == held_cell_by_cell(plan)


def test_the_reads_above_tell_a_proof_that_counts_overlapping_parts_twice():
    """The control: among those plans are some that such a proof gets wrong, in both directions."""
    assert find(reads, lambda plan: held_by_volume(plan) and not held_cell_by_cell(plan))
    assert find(reads, lambda plan: not held_by_volume(plan) and held_cell_by_cell(plan))


def test_a_transfer_of_no_elements_or_of_other_dims_is_refused():
    plan = one_transfer((Box((0, 0), (4, 4)), (0, 0)), Box((0, 0), (4, 4)), (0, 0), ())
    prove(plan)
    [good] = plan.transfers
    for box in (
        Box((0, 0), (-4, -4)),
        Box((0, 0), (0, 4)),
        Box((0,), (4,)),
        Box((0, 0), (4,)),
        Box((0, 0, 0), (4, 4, 1)),
    ):
        with pytest.raises(PlanError, match="is not a box of elements"):
            prove(replace(plan, transfers=(good, good._replace(box=box))))


def test_the_planner_imports_nothing_but_boxes_and_placements():
    tree = ast.parse(Path(planner.__file__).read_text())
    names = {n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= {
        "collections",
        "collections.abc",
        "dataclasses",
        "functools",
        "operator",
        "typing",
        "reshard.core.boxes",
        "reshard.core.placement",
    }
