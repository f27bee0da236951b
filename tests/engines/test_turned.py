"""What an engine's loader transposes is written from a slab as that loader writes it, element by element."""

import math
from collections.abc import Callable

import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.core.placement import Placement
from reshard.engines.placing import turned
from reshard.engines.placing.rules import PlacedTensors, place_by_trace
from reshard.engines.placing.turned import TurnedMatrices
from reshard.engines.tracing.trace import trace_load
from reshard.engines.tracing.views import StoredViews
from reshard.engines.vllm.weights.exchanged import exchange
from reshard.models.row_runs import storage_id

E, H, INNER = 3, 4, 6
# By what a loader does: the published tensors' shapes by name, the parameter's shape, and the loader.
Loaded = Callable[[torch.Tensor, dict[str, torch.Tensor]], object]
LOADERS: dict[str, tuple[dict[str, tuple[int, ...]], tuple[int, ...], Loaded]] = {
    "a matrix": ({"w": (H, INNER)}, (INNER, H), lambda p, of: p.copy_(of["w"].t())),
    "a rank's columns": ({"w": (H, INNER)}, (2, H), lambda p, of: p.copy_(of["w"].t().narrow(0, 2, 2))),
    "a rank's rows": ({"w": (H, INNER)}, (INNER, 2), lambda p, of: p.copy_(of["w"].t()[:, 2:])),
    "two below each other": (
        {"a": (H, 2), "b": (H, 4)},
        (6, H),
        lambda p, of: (p[:2].copy_(of["a"].t()), p[2:].copy_(of["b"].t())),
    ),
    "rows that become columns": (
        {"a": (1, INNER), "b": (1, INNER)},
        (INNER, 2),
        lambda p, of: (p[:, :1].copy_(of["a"].t()), p[:, 1:].copy_(of["b"].t())),
    ),
    "experts": (
        {f"w[{e}]": (H, INNER) for e in range(E)},
        (E, INNER, H),
        lambda p, of: p.copy_(of["w"].permute(0, 2, 1).contiguous()),
    ),
    "a rank's experts and columns": (
        {f"w[{e}]": (H, INNER) for e in range(E)},
        (2, 2, H),
        lambda p, of: p.copy_(of["w"][1:, :, 4:].permute(0, 2, 1).contiguous()),
    ),
    "gate and up": (
        {f"w[{e}]": (H, INNER) for e in range(E)},
        (E, 4, H),
        lambda p, of: [
            p[e, 2 * half : 2 * half + 2].copy_(of["w"][e].t().chunk(2)[half][1:])
            for e in range(E)
            for half in (0, 1)
        ],
    ),
}  # fmt: skip


def placed(name: str, parameter: torch.Tensor) -> PlacedTensors:
    """The places of what a loader writes into a parameter, by the record of it."""
    shapes, shape, load = LOADERS[name]
    stand_in, views = torch.empty(shape, device="meta"), StoredViews(shapes)
    stored = {tensor: (size, torch.float32) for tensor, size in views.stored.items()}
    trace = trace_load(
        "it", lambda weights: load(stand_in, dict(weights)), stored, {storage_id(stand_in): "matrix"}
    )
    turned_too = views.of_trace(trace, turned_too=True)
    with pytest.raises(ReshardError, match="turns or spreads"):
        views.of_trace(trace)
    return place_by_trace("it", turned_too, views.matrices, {"matrix": parameter})


@pytest.mark.parametrize("round_bytes", [1, 1 << 20], ids=["matrix by matrix", "all at once"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_slab_becomes_what_the_loader_writes(name, round_bytes, monkeypatch):
    monkeypatch.setattr(turned, "ROUND_BYTES", round_bytes)
    shapes, shape, load = LOADERS[name]
    parameter, expected = torch.full(shape, math.nan), torch.full(shape, math.nan)
    places = placed(name, parameter)
    matrices = TurnedMatrices.of(places, 5)
    assert matrices.staged.keys() == places.turned.keys() == matrices.rounds.keys() and not places.regions
    stored = {
        tensor: torch.randn(size, generator=torch.Generator().manual_seed(seed))
        for seed, (tensor, size) in enumerate(StoredViews(shapes).stored.items())
    }
    load(expected, stored)
    numbers = sorted(set(matrices.rounds.values()))
    assert numbers == [*range(5, 5 + (len(places.turned) if round_bytes == 1 else 1))]
    for number in numbers:
        for identity, staged in matrices.staged.items():
            [part] = places.placement.tensors[identity].parts
            tensor, _, index = part.name.partition("[")
            whole = stored[tensor][int(index[:-1])] if index else stored[tensor]
            if matrices.rounds[identity] == number:
                memory = staged.tensor[staged.offset :].as_strided(part.box.lengths, (staged.pitch, 1))
                memory.copy_(whole[tuple(map(slice, part.box.offsets, part.box.ends))])
        matrices.write(number)
        assert matrices.mismatches(number) == []
    assert torch.equal(parameter, expected)
    # Controls: a change is seen where it is, and what was written is neither as published nor the slab's.
    parameter.view(-1)[-1] += 1
    last = max(matrices.rounds, key=lambda identity: matrices.matrices[identity].served.offset)
    assert matrices.mismatches(numbers[-1]) == [last]
    if name == "a matrix":
        assert not torch.equal(expected.flatten(), stored["w"].flatten())


def test_a_loader_that_fills_a_turned_matrix_twice_is_refused():
    stand_in, views = torch.empty(4, H, device="meta"), StoredViews({"w": (H, 4)})

    def load(weights) -> None:
        [(_, tensor)] = weights
        for half in (0, 0):
            stand_in[half : half + 2].copy_(tensor.t()[half : half + 2])

    trace = trace_load("it", load, {"w": ((H, 4), torch.float32)}, {storage_id(stand_in): "matrix"})
    with pytest.raises(ReshardError, match="it's loader does not fill matrix exactly once"):
        place_by_trace(
            "it", views.of_trace(trace, turned_too=True), views.matrices, {"matrix": torch.empty(4, H)}
        )


def test_columns_that_are_spread_are_refused():
    stand_in, views = torch.empty(4, 2 * H, device="meta"), StoredViews({"w": (H, 4)})

    def load(weights) -> None:
        [(_, tensor)] = weights
        stand_in[:, ::2].copy_(tensor.t())

    trace = trace_load("it", load, {"w": ((H, 4), torch.float32)}, {storage_id(stand_in): "matrix"})
    with pytest.raises(ReshardError, match="turns or spreads w"):
        views.of_trace(trace, turned_too=True)


def test_gate_and_up_that_vllm_exchanges_are_written_where_it_serves_them():
    """As its function does it: up above gate. A matrix of both at once is refused."""
    _, shape, load = LOADERS["gate and up"]
    layer = "layers.0.experts"
    parameter, expected = torch.zeros(shape), torch.zeros(shape)
    places = placed("gate and up", parameter)
    renamed = [
        one._replace(id=(f"{layer}.w13_weight", *one.id[1:])) for one in places.placement.tensors.values()
    ]
    regions = {(f"{layer}.w13_weight", *identity[1:]): region for identity, region in places.turned.items()}
    moved = exchange(PlacedTensors(Placement.of(places.placement.shapes, renamed), {}, regions), [layer])
    matrices = TurnedMatrices.of(moved)
    stored = torch.randn(E, H, INNER)
    for identity, staged in matrices.staged.items():
        [part] = moved.placement.tensors[identity].parts
        whole = stored[int(part.name[2:-1])]
        memory = staged.tensor[staged.offset :].as_strided(part.box.lengths, (staged.pitch, 1))
        memory.copy_(whole[tuple(map(slice, part.box.offsets, part.box.ends))])
    matrices.write(0)
    load(expected, {"w": stored})
    assert torch.equal(parameter, torch.cat(expected.chunk(2, 1)[::-1], 1))
    assert not torch.equal(parameter, expected)
    both = placed("experts", torch.zeros(E, INNER, H))
    regions = {(f"{layer}.w13_weight", *identity[1:]): region for identity, region in both.turned.items()}
    renamed = [
        one._replace(id=(f"{layer}.w13_weight", *one.id[1:])) for one in both.placement.tensors.values()
    ]
    with pytest.raises(ReshardError, match="rows of gate and up together"):
        exchange(PlacedTensors(Placement.of(both.placement.shapes, renamed), {}, regions), [layer])


def test_a_matrix_that_an_engine_has_replaced_is_written_in_its_new_place():
    parameter, other = torch.zeros(INNER, H), torch.zeros(INNER, H)
    matrices = TurnedMatrices.of(placed("a matrix", parameter))
    followed = matrices.replaced(parameter, other)
    assert matrices.replaced(other, parameter) is matrices
    [staged] = followed.staged.values()
    staged.tensor.copy_(torch.arange(staged.tensor.numel()))
    followed.write(0)
    assert other.flatten().tolist() == torch.arange(H * INNER).view(H, INNER).t().flatten().tolist()
    assert not parameter.any()
