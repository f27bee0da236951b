"""An engine that serves an adapter above quantized weights hands both on: the newcomer then holds the same codes, and
in its slot what vLLM's own loading of PEFT's files puts there."""

import pytest

from tests.engines.test_twins import ONLINE, compressed, without
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.by_compressed_tensors import MADE_UP

# The model, how it is served, and how others are served that get nothing, with what is said of each.
CASES = {
    "fp8 in blocks": (
        "qwen3", ONLINE,
        {"in bf16": ({"quantization": None}, " is UnquantizedLinearMethod here, and Fp8"),
         "lower ranks": ({"max_lora_rank": 1}, "start it with max_lora_rank=4 or more")},
    ),
    "int4 by Marlin": ("llama-bias", compressed("int4", "group 16"), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_newcomer_gets_the_codes_and_the_adapter_above_them_or_neither(case, converted, tmp_path):
    variant, engine, others = CASES[case]
    [(hf, _), _] = converted(variant)
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    options = {name: how for name, (how, _) in others.items()}
    [said] = run_on_ranks(
        1, "brought_up", sides, hf, engine, options, str(tmp_path), module="refit_twins_lora_on_cpu"
    )
    assert said["said"] == "no error" and said["serves"] == [(True, 7)] * 2
    lent, got, before = (without(MADE_UP, said[name]) for name in ("lent", "got", "before"))
    assert got == lent, "codes, scales and the slot"
    assert len([name for name, bits in got.items() if before[name] != bits]) > len(got) // 4
    assert said["slots"] == [said["slot before"]] * 2
    assert said["by vLLM"] == said["slot before"], "what vLLM loads itself of PEFT's files"
    one, other = said["refitted"]
    assert one == other and one[1] != said["slot before"]
    # Controls.
    assert "cannot be served" in said["early"]
    sentence, serves, version = said["spoiled below"]
    assert "1 tensors did not arrive as they are" in sentence and (serves, version) == (False, None)
    sentence, _, version = said["spoiled adapter"]
    assert "lora_A" in sentence and version is None
    for name, (_, expected) in others.items():
        assert expected in said["others"][name] and "\n" not in said["others"][name]
