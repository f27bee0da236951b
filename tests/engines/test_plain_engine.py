"""A new engine has to give five things: then it is refitted bit for bit, and refuses to serve
weights that are not whole."""

import ast
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.engines.placing.rules import place_by_trace
from reshard.engines.tracing.stand_ins import stand_ins
from reshard.engines.tracing.trace import Trace, own_loader, trace_load
from reshard.engines.tracing.views import StoredViews
from reshard.models.row_runs import storage_id
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.checkpoints import make

ENGINES = Path(__file__).parent.parent.parent / "reshard" / "engines"


@pytest.mark.parametrize(("variant", "together"), [("llama-rope-tied", True), ("qwen2", False)])
def test_an_engine_of_five_members_is_refitted_from_fsdp_shards(variant, together, tmp_path):
    checkpoints = [str(make(tmp_path / str(seed), variant, torch.bfloat16, seed=seed)) for seed in (0, 1)]
    sides = {
        "trainer": 2,
        "engine": 2 if together else 1,
        "together": together,
        "folder": str(tmp_path),
        "port": free_port(),
    }
    results = run_on_ranks(
        2 if together else 3, "refit", sides, {"shard": 2}, checkpoints, module="refit_plain_engine_on_cpu"
    )
    engines = [result for result in results if result["outcomes"]]
    assert len(engines) == sides["engine"]
    for engine in engines:
        assert engine["refused"].startswith("a refit would bring nothing into model.norm.bias, ")
        assert engine["before"] == "this transformers holds dummy weights: refit it before it serves"
        assert engine["outcomes"] == [(True, 0), (True, 1)]
        assert engine["half"].startswith("this transformers holds a half-written model")


# Where a loader puts the two halves of a matrix [4, 6]: its first rows and columns, and its lengths.
HALVES = {
    "rows": ([(0, 0), (2, 0)], (2, 6), True),
    "columns": ([(0, 3), (0, 0)], (4, 3), True),
    "the same rows twice": ([(2, 0), (2, 0)], (2, 6), False),
    "the same columns twice": ([(0, 0), (0, 0)], (4, 3), False),
}


@pytest.mark.parametrize("narrowed", [False, True])
def test_a_loader_may_widen_a_tensor_on_its_way_and_not_narrow_it(narrowed):
    published, then = (torch.float32, torch.bfloat16) if narrowed else (torch.bfloat16, torch.float32)
    stand_in = torch.empty(4, 6, device="meta")

    def load(weights) -> None:
        for _, tensor in weights:
            stand_in[:2].copy_(tensor.to(then)[1:3])

    arguments = "it", load, {"bias": ((4, 6), published)}, {storage_id(stand_in): "gate.bias"}
    if narrowed:
        with pytest.raises(
            ReshardError, match="writes aten._to_copy.default of bias into gate.bias, which is not"
        ):
            trace_load(*arguments)
    else:
        [copy] = trace_load(*arguments).copies
        assert (copy.box.offsets, copy.box.lengths, copy.offset) == ((1, 0), (2, 6), 0)


def copied(trace, published: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """What a trace's copies make of published tensors, element by element."""
    flat = torch.full((math.prod(shape),), torch.nan)
    for copy in trace.copies:
        part = published[copy.name]
        for dim, (offset, length) in enumerate(zip(copy.box.offsets, copy.box.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        pitches = (copy.pitch, 1) if part.ndim == 2 else (copy.pitch or 1,)
        flat.as_strided(part.shape, pitches, copy.offset).copy_(part)
    return flat.view(shape)


def rotary(heads: int, tensor: torch.Tensor) -> torch.Tensor:
    """Its rows as Llama 4's loader of vLLM turns them: the even ones of each head before the odd ones."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def fused(heads: int, tensor: torch.Tensor) -> torch.Tensor:
    """Its rows as GPT-NeoX's loader turns them: queries, keys and values of all heads instead of each."""
    return tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("shape", [(48, 6), (48,)], ids=str)
@pytest.mark.parametrize("turn", [rotary, fused])
def test_rows_that_a_loader_turns_are_copied_to_where_it_puts_them(turn, shape, half):
    stand_in = torch.empty(24, *shape[1:], device="meta")

    def load(weights) -> None:
        for _, tensor in weights:
            stand_in.copy_(turn(4, tensor).narrow(0, 24 * half, 24))

    trace = trace_load("it", load, {"rows": (shape, torch.float32)}, {storage_id(stand_in): "matrix"})
    rows = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    found = copied(trace, {"rows": rows}, tuple(stand_in.shape))
    assert torch.equal(found, turn(4, rows)[24 * half :][:24])
    assert not torch.equal(found, rows[24 * half :][:24]), "not turned"
    assert not torch.equal(found, turn(2, rows)[24 * half :][:24]), "turned by another number of heads"


@pytest.mark.parametrize(
    "turn",
    [
        lambda tensor: tensor.view(8, 3, 2).transpose(1, 2).reshape(8, 6),
        lambda tensor: tensor.t().reshape(8, 6),
        lambda tensor: tensor.view(4, 2, 6).transpose(0, 1).reshape(4, 12).view(8, 6)[:, ::2].repeat(1, 2),
    ],
    ids=["within rows", "transposed", "every other column"],
)
def test_elements_that_are_no_whole_rows_are_refused(turn):
    stand_in = torch.empty(8, 6, device="meta")

    def load(weights) -> None:
        for _, tensor in weights:
            stand_in.copy_(turn(tensor))

    with pytest.raises(ReshardError, match="it's (own )?loader"):
        trace_load("it", load, {"rows": ((8, 6), torch.float32)}, {storage_id(stand_in): "matrix"})


def swapped_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of [8, 6], or such a number of elements, in another order, as a loader has them joined anew."""
    return tensor.view(4, 2, -1).transpose(0, 1).reshape(tensor.shape)


class Loaded(torch.nn.Module):
    """A model of one parameter and what its loader has made of it before."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.made, self.inner, self.is_scaled = torch.ones(2), torch.nn.Linear(2, 2), False

    def load(self, write, weights) -> None:
        for _, tensor in weights:
            write(self, self.matrix.data, tensor)


def traced(model: Loaded, write, shape: tuple[int, ...]) -> Trace:
    """The trace of a loader that writes a tensor of this shape into a model's parameter."""
    published = {"rows": (shape, torch.float32)}
    with stand_ins(model) as names:
        trace = trace_load("it", lambda weights: model.load(write, weights), published, names)
    return StoredViews({"rows": shape}).of_trace(trace)


def served(trace: Trace, published: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What the regions of a placement by this trace get of a published tensor."""
    matrix = torch.full(shape, torch.nan)
    matrices = StoredViews({"rows": tuple(published.shape)}).matrices
    placed = place_by_trace("it", trace, matrices, {"matrix": matrix})
    for local in placed.placement.tensors.values():
        region, [part] = placed.regions[local.id], local.parts
        source = published.view(matrices["rows"])
        for dim, (offset, length) in enumerate(zip(part.box.offsets, part.box.lengths, strict=True)):
            source = source.narrow(dim, offset, length)
        pitches = (region.pitch, 1) if source.ndim == 2 else (region.pitch,)
        matrix.view(-1)[region.offset :].as_strided(source.shape, pitches).copy_(source)
    return matrix


def swap_data(model: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(tensor)
    model.matrix.data = matrix * 2


def swap_parameter(model: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(tensor)
    model.matrix = torch.nn.Parameter(matrix.t().contiguous().view(matrix.shape), requires_grad=False)


def make_beside(model: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    """As LongCat's loader of vLLM does, which scales what it has loaded the first time alone."""
    matrix.copy_(tensor)
    model.made = matrix.t().contiguous()
    if not model.is_scaled:
        matrix *= 2
        model.is_scaled = True


def view_bits(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(tensor.view(torch.int32))


def copy_viewed_bits(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(tensor.view(torch.int32).clone())


def join_viewed_bits(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    bits = tensor.view(torch.int32)
    matrix.copy_(torch.cat([bits, bits])[: len(tensor)])


def view_joined_bits(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(torch.cat([tensor, tensor]).view(torch.int32)[: len(tensor)])


def negate(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(torch._neg_view(tensor))


def double_joined(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(swapped_rows(tensor).mul_(2))


def double_below_another(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(torch.cat([tensor, tensor]).mul_(2)[: len(tensor)])


def double_list_of_parameters(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(tensor)
    torch._foreach_mul_([matrix], 2)


def double_list_of_published(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor], 2)
    matrix.copy_(tensor)


def order_by_strides(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(tensor.t().contiguous().as_strided((8, 6), (6, 1)))


def take_columns(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(tensor[:, :, :3])


def flatten(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
    matrix.copy_(tensor.flatten())


REFUSED = [
    (swap_data, (8, 6), (8, 6), "puts another tensor in the place of matrix"),
    (swap_parameter, (8, 6), (8, 6), "puts another tensor in the place of matrix"),
    (view_bits, (8, 6), (8, 6), "takes the bits of rows for those of other numbers"),
    (copy_viewed_bits, (8, 6), (8, 6), "writes aten.clone.default of rows into matrix"),
    (join_viewed_bits, (8, 6), (8, 6), "writes something else than a published tensor into matrix"),
    (view_joined_bits, (8, 6), (8, 6), "takes the bits of joined matrices for those of other numbers"),
    (negate, (8, 6), (8, 6), "takes the bits of rows for those of other numbers"),
    (double_joined, (8, 6), (8, 6), "computes with rows by aten.mul_"),
    (double_joined, (48,), (48,), "computes with rows by aten.mul_"),
    (double_below_another, (8, 6), (8, 6), "computes with rows by aten.mul_"),
    (double_list_of_parameters, (8, 6), (8, 6), "computes matrix by aten._foreach_mul_"),
    (double_list_of_published, (8, 6), (8, 6), "computes with rows by aten._foreach_mul_"),
    (order_by_strides, (8, 6), (8, 6), "by where they lie in a copy of a tensor"),
    (take_columns, (2, 4, 5), (2, 4, 3), "turns or spreads rows on the way into matrix"),
    (take_columns, (2, 4, 4, 5), (2, 4, 3, 5), "turns or spreads rows on the way into matrix"),
    (flatten, (4, 6), (24,), "turns or spreads rows on the way into matrix"),
]


@pytest.mark.parametrize(("write", "shape", "into", "named"), REFUSED)
def test_what_a_loader_makes_of_a_tensor_otherwise_than_by_copies_is_refused(write, shape, into, named):
    model = Loaded(into)
    with pytest.raises(ReshardError, match=named):
        traced(model, write, shape)


def test_zeros_that_a_loader_makes_of_a_tensor_it_has_joined_before_are_not_those_it_copies():
    def write(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
        joined = torch.cat([tensor, tensor])
        tensor.zero_()
        matrix.copy_(joined[:8])

    rows = torch.arange(48.0).view(8, 6)
    assert torch.equal(served(traced(Loaded((8, 6)), write, (8, 6)), rows, (8, 6)), rows)


@pytest.mark.parametrize("into", [(6, 1), (1, 6), (6,)], ids=str)
def test_a_matrix_of_one_column_is_copied(into):
    def write(_: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
        if into == (6, 1):
            matrix[:4].copy_(tensor[:4])
        else:
            matrix.view(-1)[:4].copy_(tensor[:4].view(-1))
        matrix.view(-1)[4:].copy_(tensor[4:].squeeze(1))

    column = torch.arange(6.0).view(6, 1)
    found = served(traced(Loaded(into), write, (6, 1)), column, into)
    assert torch.equal(found.view(-1), column.view(-1))


@pytest.mark.parametrize("is_scaled", [True, False])
def test_what_a_loader_makes_beside_its_parameters_is_refused_and_the_model_goes_on_with_what_it_had(
    is_scaled,
):
    model = Loaded((8, 6))
    model.is_scaled = is_scaled
    matrix, before = model.matrix, dict(vars(model))

    def write(model: Loaded, matrix: torch.Tensor, tensor: torch.Tensor) -> None:
        make_beside(model, matrix, tensor)
        del model.inner

    with pytest.raises(ReshardError, match="makes made of the weights|computes matrix by aten.mul_"):
        traced(model, write, (8, 6))
    assert vars(model) == before and model.matrix is matrix and model.made.tolist() == [1, 1]
    assert model.inner.weight.device.type == "cpu"


def grouped(tensor: torch.Tensor) -> torch.Tensor:
    """Its rows as Falcon's loader puts them: of each of two groups two queries, a key and a value, by their kinds."""
    rows = tensor.view(2, 4, -1, *tensor.shape[1:])
    parts = [rows.narrow(1, first, count) for first, count in ((0, 2), (2, 1), (3, 1))]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts], dim=0)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("shape", [(48, 6), (48,)], ids=str)
def test_rows_that_a_loader_sorts_and_joins_are_copied_to_where_it_puts_them(shape, half):
    stand_in = torch.empty(24, *shape[1:], device="meta")

    def load(weights) -> None:
        for _, tensor in weights:
            stand_in.copy_(grouped(tensor).narrow(0, 24 * half, 24))

    trace = trace_load("it", load, {"rows": (shape, torch.float32)}, {storage_id(stand_in): "matrix"})
    rows = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    found = copied(trace, {"rows": rows}, tuple(stand_in.shape))
    assert torch.equal(found, grouped(rows)[24 * half :][:24])
    assert not torch.equal(found, rows[24 * half :][:24]), "not sorted"


def test_a_weight_whose_value_a_loader_asks_for_is_named():
    stand_in = torch.empty(3, device="meta")

    def load(weights) -> None:
        for _, tensor in weights:
            stand_in.fill_(tensor.item())

    published = {"beta": ((1,), torch.bfloat16)}
    with pytest.raises(
        ReshardError, match="it's loader computes with the value of beta, which is not a plain"
    ):
        trace_load("it", load, published, {storage_id(stand_in): "A"})


def test_parts_of_rows_that_a_loader_joins_are_refused():
    stand_in = torch.empty(8, 3, device="meta")

    def load(weights) -> None:
        for _, tensor in weights:
            stand_in.copy_(torch.cat([tensor[:4, :3], tensor[4:, 3:]]))

    with pytest.raises(ReshardError, match="is not a plain copy"):
        trace_load("it", load, {"rows": ((8, 6), torch.float32)}, {storage_id(stand_in): "matrix"})


ZEROS = {
    "zeros": lambda key: torch.zeros(key.size(0)),
    "zeros without memory": lambda key: torch.zeros(key.size(0), device="meta"),
    "zeros as another": lambda key: torch.zeros_like(key[:, 0]),
    "new zeros in another dtype": lambda key: key.new_zeros(key.size(0)).to(torch.bfloat16),
}
CHANGED = {
    "one more": lambda zeros: zeros + 1,
    "one more in place": lambda zeros: zeros.add_(1),
    "one more in place of several": lambda zeros: (torch._foreach_add_([zeros], 1), zeros)[1],
    "an element of it": lambda zeros: (
        zeros.index_fill_(0, torch.tensor([1], device=zeros.device), 1),
        zeros,
    )[1],
    "through its memory": lambda zeros: (zeros.numpy().__setitem__(1, 1), zeros)[1],
}


def load_fused(change, order: tuple[str, ...] = ("q", "k", "v")):
    """A loader of a fused bias [12], of which keys have none, and the stand-in that it writes into."""
    stand_in = torch.empty(12, device="meta")

    def load(weights) -> None:
        parts = dict(weights)
        parts["k"] = change(parts.pop("k.weight"))
        for part in order:
            stand_in.narrow(0, 4 * "qkv".index(part), 4).copy_(parts[part])

    published = {"q": ((4,), torch.float32), "k.weight": ((4, 6), torch.float32), "v": ((4,), torch.float32)}
    return load, published, {storage_id(stand_in): "qkv.bias"}


@pytest.mark.parametrize("make", ZEROS.values(), ids=ZEROS)
@pytest.mark.parametrize("order", ["qkv", "vkq"])
def test_zeros_that_a_loader_makes_are_filled_in(make, order):
    load, published, names = load_fused(make, tuple(order))
    trace = trace_load("it", load, published, names)
    assert trace.fills == [("qkv.bias", 4, 4)]
    assert sorted((copy.name, copy.offset) for copy in trace.copies) == [("q", 0), ("v", 8)]
    bias = torch.full((12,), torch.nan)
    placed = place_by_trace("it", trace, {"q": (4,), "v": (4,)}, {"qkv.bias": bias})
    filled = [local for local in placed.placement.tensors.values() if not local.parts]
    assert [(local.id, local.shape) for local in filled] == [(("qkv.bias", 4, ""), (4,))]


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_zeros_that_a_loader_changes_are_refused(change):
    load, published, names = load_fused(lambda key: change(torch.zeros(key.size(0))))
    with pytest.raises(ReshardError, match="it's loader (changes zeros|writes something else|writes .* of)"):
        trace_load("it", load, published, names)


@pytest.mark.parametrize("heads", [12, 9])
def test_padding_that_is_not_zero_is_refused_where_there_is_some(heads):
    stand_in = torch.empty(12, device="meta")

    def load(weights) -> None:
        for _, tensor in weights:
            stand_in[:heads].copy_(tensor)
            stand_in[heads:].fill_(-float("inf"))

    with (
        nullcontext()
        if heads == 12
        else pytest.raises(ReshardError, match="fills a part of attn.sinks with -inf")
    ):
        trace = trace_load(
            "it", load, {"sinks": ((heads,), torch.float32)}, {storage_id(stand_in): "attn.sinks"}
        )
        assert [copy.name for copy in trace.copies] == ["sinks"] and trace.fills == []


def test_zeros_over_what_was_copied_are_refused():
    stand_in = torch.empty(12, device="meta")

    def load(weights) -> None:
        for _, tensor in weights:
            stand_in.copy_(tensor)
        stand_in.narrow(0, 4, 2).copy_(torch.zeros(2))

    published = {"bias": ((12,), torch.float32)}
    with pytest.raises(ReshardError, match="it's loader puts zeros over bias in qkv.bias"):
        trace_load("it", load, published, {storage_id(stand_in): "qkv.bias"})


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_parameters_own_loader_computes_is_followed_and_nothing_else(rank):
    stand_in, published = torch.empty(4, 3, device="meta"), {"A_log": ((8, 3), torch.bfloat16)}
    names = {storage_id(stand_in): "A"}

    def load(compute, own: bool = True):
        def own_or_not(weights) -> None:
            for _, tensor in weights:
                if own:
                    with own_loader():
                        stand_in.copy_(compute(tensor).split(4)[rank])
                else:
                    stand_in.copy_(compute(tensor).split(4)[rank])

        return own_or_not

    def decay(log):
        return -torch.exp(log.float())

    [copy] = trace_load("it", load(decay), published, names, {"A"}).copies
    assert (copy.box.offsets, copy.box.lengths) == ((4 * rank, 0), (4, 3))
    for loader, computed in (
        (load(decay, own=False), {"A"}),
        (load(decay), ()),
        (load(lambda log: -torch.exp(log)), {"A"}),  # which rounds to bf16, unlike of a tensor in fp32
        (load(lambda log: decay(log) * 2), {"A"}),
        (load(lambda log: decay(log).cumsum(0)), {"A"}),
    ):
        with pytest.raises(ReshardError, match="into A, which is not a plain copy"):
            trace_load("it", loader, published, names, computed)


@pytest.mark.parametrize(("places", "lengths", "whole"), HALVES.values(), ids=HALVES)
def test_a_loader_has_to_fill_each_element_exactly_once(places, lengths, whole):
    (rows, columns), stand_in = lengths, torch.empty(4, 6, device="meta")
    halves = dict.fromkeys(("first", "second"), (lengths, torch.float32))

    def load(weights) -> None:
        for (row, column), (_, tensor) in zip(places, weights, strict=True):
            stand_in[row : row + rows, column : column + columns].copy_(tensor)

    trace = trace_load("it", load, halves, {storage_id(stand_in): "matrix"})
    shapes = {name: shape for name, (shape, _) in halves.items()}
    matrix = torch.full((4, 6), torch.nan)
    if not whole:
        with pytest.raises(ReshardError, match="it's loader does not fill matrix exactly once"):
            place_by_trace("it", trace, shapes, {"matrix": matrix})
        return
    placed = place_by_trace("it", trace, shapes, {"matrix": matrix})
    for region in placed.regions.values():
        memory = region.tensor.view(-1)[region.offset :]
        memory.as_strided(lengths, (region.pitch, 1)).fill_(1)
    assert matrix.eq(1).all()


def test_a_copy_of_another_parameter_is_taken_only_into_one_that_the_engine_makes_anew():
    weight, with_one = (torch.empty(4, device="meta") for _ in range(2))
    names = {storage_id(weight): "norm.weight", storage_id(with_one): "norm.with_one"}

    def load(weights) -> None:
        for _, tensor in weights:
            weight.copy_(tensor)
            with_one.copy_(weight).add_(1.0)

    published = {"norm": ((4,), torch.float32)}
    trace = trace_load("it", load, published, names, {"norm.with_one"})
    assert [copy.parameter for copy in trace.copies] == ["norm.weight"] and trace.fills == []
    with pytest.raises(ReshardError, match="something else than a published tensor into norm.with_one"):
        trace_load("it", load, published, names)


def test_what_is_not_vllms_imports_nothing_of_vllm():
    for path in sorted(ENGINES.glob("*.py")):
        if path.name == "__init__.py":  # names the engines that there are
            continue
        imported = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
        }
        assert not [name for name in imported if "vllm" in name], path.name
