"""Where the adapters of published weights go in the buffers of vLLM's layers."""

from types import SimpleNamespace

import pytest
import torch

from reshard import ReshardError
from reshard.core.boxes import Box
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.engines.vllm.adapters.compat import Buffers
from reshard.engines.vllm.adapters.live import VllmAdapter
from reshard.engines.vllm.adapters.stages import Slice
from reshard.engines.vllm.adapters.targets import Target, _of_layer, find_targets


def test_rows_of_gate_and_up_in_turn_have_no_place_and_are_named():
    """As gpt-oss has them in vLLM; one above the other they have one."""
    buffers = Buffers(torch.zeros(2, 1, 8, 6), torch.zeros(2, 1, 4, 8))

    def places(order: str) -> dict:
        rows = {"gate": 0, "up": 0}
        parts = []
        for start, name in enumerate({"g": "gate", "u": "up"}[letter] for letter in order):
            parts.append((6 * start, Part(name, Box((rows[name], 0), (1, 6)), (start, 0))))
            rows[name] += 1
        return _of_layer("experts", [buffers], parts, dict.fromkeys(rows, (2, 6)), 0)

    gate, up = places("gguu").values()
    assert [(one.part, one.at, one.rows) for one in (gate, up)] == [(0, 0, (0, 2)), (1, 2, (0, 2))]
    with pytest.raises(ReshardError, match="rows of gate and up in turn in experts"):
        places("gugu")


def test_rows_that_the_loader_puts_in_another_order_have_no_place():
    """As Llama 4's queries: the even ones of each head before the odd ones."""
    buffers = Buffers(torch.zeros(2, 1, 8, 6), torch.zeros(2, 1, 4, 8))

    def places(*order: int) -> dict:
        parts = [(6 * at, Part("q", Box((row, 0), (1, 6)), (0, 0))) for at, row in enumerate(order)]
        return _of_layer("qkv", [buffers], parts, {"q": (4, 6)}, 0)

    assert places(0, 1, 2, 3)["q"].rows == (0, 4)
    with pytest.raises(ReshardError, match="rows of q that do not follow each other"):
        places(0, 2, 1, 3)


def test_a_weight_that_is_served_transposed_has_no_place_and_is_named():
    part = Part("c.weight", Box((0, 0), (4, 4)), (0, 0))
    placement = Placement.of({"c.weight": (4, 4)}, [LocalTensor(("c.weight", 0), (4, 4), (part,))])
    regions = {("c.weight", 0): Region(torch.zeros(4, 4), 0, 4)}
    wrappers = {"c": torch.nn.Linear(4, 4)}
    targets, reasons = find_targets(placement, regions, wrappers, turned={("c.weight", 0)})
    assert not targets and "vLLM serves c transposed to what is published" in reasons["c.weight"]


def test_weights_that_are_rows_of_one_tensor_bring_its_a_to_each_slice():
    """As queries, keys and values of Qwen3.5's linear attention, for which vLLM has a slice each."""
    adapter = VllmAdapter.__new__(VllmAdapter)
    adapter.dtype, adapter.base = torch.bfloat16, SimpleNamespace(device=torch.device("cpu"))
    slices = []
    for rows in ("[0:2]", "[2:4]"):
        buffers = Buffers(torch.zeros(2, 1, 8, 6), torch.zeros(2, 1, 2, 8))
        box = Box((0, 0), (2, 6))
        target = Target("in_proj", buffers, 0, 0, box, (2, 6), (0, 2), 0, (0, 8))
        slices.append(Slice("in_proj", buffers, {f"in_proj.weight{rows}": target}, 4, 2.5))
    adapter._take_slices(slices)
    published = [tensor.parts[0].name for tensor in adapter.placement.tensors.values()]
    assert published.count("base_model.model.in_proj.lora_A.weight") == 2 and len(published) == 4
    assert len({region.address for region in adapter.regions.values()}) == 4
