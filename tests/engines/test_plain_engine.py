"""A new engine has to give five things: then it is refitted bit for bit, and refuses to serve
weights that are not whole."""

import ast
import math
from pathlib import Path

import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.engines.placing.rules import place_by_trace
from reshard.engines.tracing.trace import storage_id, trace_load
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
