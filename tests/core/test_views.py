"""Parts of stored tensors, held against numpy's indexing."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import composite, integers, lists, sampled_from

from reshard import ReshardError
from reshard.core.dtypes import DTYPES
from reshard.core.views import View, tensor_of, tensor_shapes
from reshard.storage.io.boxes import BoxReader
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import StripWriter, TensorInfo, strips_of_view


def by_numpy(tensor: np.ndarray, selections: list[str]) -> np.ndarray:
    """The elements that the text of brackets takes, dim by dim."""
    for dim, text in reversed(list(enumerate(selections))):
        if text == ":":
            continue
        bounds, _, period = text.partition(" in ")
        if ":" not in bounds:
            tensor = tensor.take(int(bounds), axis=dim)
            continue
        start, stop = map(int, bounds.split(":"))
        every = int(period or tensor.shape[dim])
        taken = [first + i for first in range(0, tensor.shape[dim], every) for i in range(start, stop)]
        tensor = tensor.take(taken, axis=dim)
    return tensor


@composite
def views(draw):
    shape, selections = [], []
    for _ in range(draw(integers(1, 3))):
        kind = draw(sampled_from([":", "index", "run", "runs"]))
        size = draw(integers(1, 6))
        start, length = draw(integers(0, 3)), draw(integers(1, 3))
        if kind == ":":
            selections.append(":")
        elif kind == "index":
            selections.append(str(draw(integers(0, size - 1))))
        elif kind == "run":
            size = start + length + draw(integers(0, 2))
            selections.append(f"{start}:{start + length}")
        else:
            period = start + length + draw(integers(0, 2))
            size = period * draw(integers(1, 3))
            selections.append(f"{start}:{start + length} in {period}")
        shape.append(size)
    return shape + draw(lists(integers(1, 4), max_size=2)), selections


@settings(deadline=None)
@given(views())
def test_the_pieces_of_a_view_are_its_elements_in_order(case):
    shape, selections = case
    tensor = np.arange(np.prod(shape)).reshape(shape)
    view = View.parse(f"t[{', '.join(selections)}]")
    flat = tensor.reshape(-1)
    pieces = [flat[piece.start : piece.start + piece.length] for piece in view.pieces(tuple(shape))]
    expected = by_numpy(tensor, selections)
    assert np.array_equal(np.concatenate(pieces), expected.reshape(-1))
    assert all(a >= b for a, b in zip(shape, view.tensor_shape(expected.shape), strict=True))


@composite
def stored_views(draw):
    """The shape of a stored tensor, and brackets that strips can have: rows, or columns of a matrix."""
    experts, other = draw(integers(1, 3)), draw(integers(3, 5))
    start, length = draw(integers(0, 2)), draw(integers(1, 2))
    period = start + length + draw(integers(0, 2))
    size = period * draw(integers(1, 4))
    run = f"{start}:{start + length}"
    some = draw(sampled_from([":", run, f"{run} in {period}"]))
    index = str(draw(integers(0, experts - 1)))
    if draw(sampled_from([False, True])):
        return [experts, other, size], [index, draw(sampled_from([":", "1:3"])), some], ".T"
    return [experts, size, other], [index, some], ""


@settings(deadline=None)
@given(stored_views(), integers(1, 3), sampled_from(["uint8", "float16", "float32"]))
def test_strips_read_what_numpy_takes(case, rows, dtype):
    shape, selections, transposed = case
    tensor = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    expected = by_numpy(tensor, selections)
    expected = expected.T if transposed else expected
    name, info = f"t[{', '.join(selections)}]{transposed}", TensorInfo(expected.shape, DTYPES[dtype])
    with TemporaryDirectory() as folder, OpenFiles() as files:
        path = Path(folder) / "file"
        path.write_bytes(b"head" + tensor.tobytes())
        strips = strips_of_view(name, tuple(shape), path, 4, tensor.itemsize)
        reader = BoxReader({name: info}, files, lambda _: strips)
        slabs = info.slabs(rows * info.columns * info.dtype.size)
        read = [reader.rows(name, *slab).copy() for slab in slabs]
    assert np.array_equal(np.concatenate(read), expected)
    one_of_each = selections[-1].startswith(("0:1 ", "1:2 ", "2:3 "))
    assert len(strips) == 1 or not one_of_each, "a strip for each row would be slow"


@settings(deadline=None)
@given(sampled_from([((2, 5, 6), ("0:1 in 2", "1:2 in 2")), ((3, 4, 6), ("0:2 in 3", "2:3 in 3")),
                     ((2, 3, 4), (":",))]),
       integers(1, 3))  # fmt: skip
def test_columns_of_a_transposed_matrix_are_written_together(case, rows):
    shape, selections = case
    tensor = np.random.default_rng(0).integers(0, 99, shape).astype(np.float16)
    names = {f"t[1, :, {selection}].T": by_numpy(tensor, ["1", ":", selection]).T for selection in selections}
    with TemporaryDirectory() as folder, OpenFiles.of_destination(write=True) as files:
        path = Path(folder) / "file"
        path.write_bytes(b"head" + bytes(tensor.nbytes) + b"tail")
        writer = StripWriter({name: strips_of_view(name, shape, path, 4, 2) for name in names}, files)

        def write(names: dict[str, np.ndarray]) -> None:
            with writer.whole_matrices():
                for name, part in names.items():
                    for start in range(0, len(part), rows):
                        writer.write_rows(name, start, np.ascontiguousarray(part[start : start + rows]))

        if len(names) > 1:  # a matrix with holes is no tensor of anybody
            with pytest.raises(AssertionError, match="numbers of a matrix are missing"):
                write(dict([*names.items()][:1]))
        write(names)
        expected = (
            b"head" + bytes(tensor[0].nbytes) + tensor[1].tobytes() + bytes(tensor[2:].nbytes) + b"tail"
        )
        assert path.read_bytes() == expected


def test_views_give_the_shape_of_the_tensor_that_they_cover():
    experts = {f"e[{i}, {part}:{part + 4}]": (4, 6) for i in range(3) for part in (0, 4)}
    gated = {"q[0:2 in 4]": (6, 5), "q[2:4 in 4]": (6, 5)}
    turned = {f"u[{i}, :, {part}:{part + 1} in 2].T": (4, 6) for i in range(3) for part in (0, 1)}
    assert tensor_shapes(turned) == {"u": (3, 6, 8)}
    assert tensor_shapes({"first": (2,)} | experts | gated) == {"first": (2,), "e": (3, 8, 6), "q": (12, 5)}
    assert tensor_of("e[3, 0:4]") == "e" and tensor_of("first") == "first"


@pytest.mark.parametrize(("shapes", "sentence"), [
    ({"q[0:2 in 4]": (6, 5)}, "do not have every element"),
    ({"q[0:2 in 4]": (6, 5), "q[1:3 in 4]": (6, 5)}, "two of its views have the same elements"),
    ({"e[0]": (3,), "e[2]": (3,)}, "take some indexes of"),
    ({"q[0:3]": (4,)}, "a view of shape .4. cannot be"),
    ({"q[:, 0:1 in 2].T": (3, 4)}, "do not have every element"),
    ({"q[:, 0:1 in 2].T": (3, 4), "q[:, 1:2 in 2].T": (3, 5)},
     "a view of shape .3, 4. is not .3, 5., as another needs"),
    ({"q[0].T": (4,)}, "not a matrix that .T could swap"),
])  # fmt: skip
def test_views_that_do_not_cover_a_tensor_once_are_refused_by_its_name(shapes, sentence):
    with pytest.raises(ReshardError, match=rf"^{next(iter(shapes))[0]}: .*{sentence}"):
        tensor_shapes(shapes)


@pytest.mark.parametrize(
    "name", ["q[0:2 of 4]", "q[]", "q[2:1]", "q[0:5 in 4]", "q[0:2", "q[0:2].t", "q[-1]"]
)
def test_brackets_that_say_nothing_are_an_error(name):
    with pytest.raises(ValueError):
        View.parse(name)


def test_a_view_of_some_columns_has_no_strips():
    """Strips of whole rows would leave what is read unfilled."""
    with pytest.raises(ReshardError, match="takes some columns"):
        strips_of_view("w[1, :, 0:1 in 2]", (2, 3, 4), Path("file"), 0, 2)
