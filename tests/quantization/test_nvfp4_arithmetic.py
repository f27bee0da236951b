"""Each code, scale and number of nvfp4 is the one that compressed-tensors makes."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.core.dtypes import dtype_named
from reshard.engines.vllm.names import VLLM
from reshard.models.model import Model
from reshard.quantization import nvfp4, nvfp4_torch
from tests.tools.by_compressed_tensors import hard
from tests.tools.nvfp4_checkpoints import (  # noqa: F401  fixtures that every test uses
    ENDS,
    _plain_torch,
    _wide_queries,
    by_package,
    in_numpy,
    of_package,
    same_bits,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def by_us(weight: torch.Tensor, number: np.float32) -> dict[str, np.ndarray]:
    codes, scales = nvfp4.encode(in_numpy(weight), number)
    return {"_packed": codes, "_scale": scales}


def of_us(stored: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    codes, scales, number = (in_numpy(stored[end]) for end in ENDS)
    out = np.empty((len(codes), codes.shape[1] * 2), dtype_named(str(dtype)).numpy())
    nvfp4.decode(codes, scales, number[0], True, out)
    return torch.from_numpy(out.view(np.uint8)).view(dtype)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), to=st.sampled_from(DTYPES), rows=st.integers(1, 40), groups=st.integers(1, 6),
    magnitude=st.integers(-42, 38), spread=st.integers(0, 20), zeros=st.sampled_from([0, 0.5, 1]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_code_scale_and_number_is_that_of_the_package(
    dtype, to, rows, groups, magnitude, spread, zeros, seed
):
    torch.manual_seed(seed)
    values = torch.randn(rows, groups * 16, dtype=torch.float64)
    values *= 10.0 ** (magnitude - spread * torch.rand(rows, groups).repeat_interleave(16, 1))
    values[torch.rand(values.shape) < zeros] = -0.0
    weight = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    stored = by_package(weight)
    largest = np.float32(weight.abs().max().float().item())
    number = nvfp4.global_scale(largest, dtype_named(str(dtype)).numpy())
    assert number == stored["_global_scale"].item()
    made = by_us(weight, number)
    assert same_bits(made["_packed"], stored["_packed"]) and same_bits(made["_scale"], stored["_scale"])
    if dtype != torch.float16:  # which may hold no global scale
        in_torch = nvfp4_torch.encode(weight, weight.abs().max().view(1), nvfp4_torch.CompressedTensors())
        assert all(same_bits(in_torch[end], stored[end]) for end in ENDS)
    assert same_bits(of_us(stored, to), of_package(stored, to))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_numbers_are_those_of_the_package(dtype):
    values = hard(dtype)
    ties = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]
    )
    below, above = (torch.nextafter(ties, to) for to in (torch.tensor(-9.0), torch.tensor(9.0)))
    cases = [values, values[44:], 0 * values, values[2:3], -values[44:], ties[None].to(dtype),
             torch.cat([ties, below, above])[None].to(dtype)]  # fmt: skip
    for number, weight in enumerate(cases):
        stored = by_package(weight.contiguous())
        made = by_us(weight.contiguous(), np.float32(stored["_global_scale"].item()))
        assert same_bits(made["_packed"], stored["_packed"]), number
        assert same_bits(made["_scale"], stored["_scale"]), number
    # Negative numbers that are rounded to 0 keep their sign, and -0 has none.
    codes = by_us(torch.tensor([[6.0] + [-0.1] * 7 + [-0.0] * 8], dtype=dtype), np.float32(448))["_packed"]
    assert codes.tolist() == [[0x87, 0x88, 0x88, 0x88, 0, 0, 0, 0]]


def test_another_scale_or_order_makes_other_codes_and_numbers():
    """The controls."""
    weight = hard(torch.bfloat16)[44:]
    stored = by_package(weight)
    number, expected = stored["_global_scale"], of_package(stored)
    another = stored | {"_global_scale": number * 1.01}
    swapped = stored | {"_packed": stored["_packed"] << 4 | stored["_packed"] >> 4}
    following = stored["_scale"].view(torch.uint8).clone()
    following[3, 2] += 1
    following = stored | {"_scale": following.view(torch.float8_e4m3fn)}
    for other in (another, swapped, following):
        ours = of_us(other, torch.bfloat16)
        assert same_bits(ours, of_package(other)) and not same_bits(ours, expected)
    made = by_us(weight, np.float32(another["_global_scale"].item()))
    assert not same_bits(made["_packed"], stored["_packed"])
    assert not same_bits(made["_scale"], stored["_scale"])


TABLES = (
    "llama", "qwen2", "qwen3", "qwen3-moe-mixed", "deepseek-v3", "deepseek-v3-no-q-lora", "glm4-moe", "moonlight",
)  # fmt: skip


@pytest.mark.parametrize("variant", TABLES)
def test_weights_that_share_a_global_scale_are_those_that_vllm_fuses(variant, checkpoint):
    """By the names of vLLM's parameters, which other tests hold against its own loader; of its
    experts each has a scale."""
    config = json.loads((checkpoint(variant) / "config.json").read_text())
    model, groups = Model.from_hf(config), defaultdict(list)
    for block in model.blocks():
        for row in block.rows:
            if row.hf.endswith("proj.weight") or row.hf.endswith("_mqa.weight"):
                for expert in range(model.num_experts if "{expert}" in row.hf else 1):
                    published = f"{block.published}{row.hf}".format(expert=expert)
                    groups[block.published, VLLM.parameter(model, row), expert].append(published)
    names = {name for together in groups.values() for name in together}
    assert {len(together) for together in groups.values()} >= {1, 2}
    for together in groups.values():
        for name in together:
            assert [other for other in nvfp4.fused(name) if other in names] == together


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "q_proj",
                                  "a.my_q_proj.weight", "a.q_proj.x.weight"])  # fmt: skip
def test_what_is_fused_with_nothing_has_a_global_scale_of_its_own(name):
    assert nvfp4.fused(name) == (name,)
