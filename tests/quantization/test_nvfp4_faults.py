"""Checkpoints in nvfp4 that do not add up are refused in one sentence."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import diff, hf_to_mcore, inspect
from reshard.quantization import compressed_tensors
from tests.storage.test_faults import refused
from tests.tools.nvfp4_checkpoints import (  # noqa: F401  fixtures that every test uses
    ENDS,
    FORMS,
    INPUTS,
    NAME,
    _plain_torch,
    _wide_queries,
    by_modelopt,
    config_of,
    directory,
    extra,
    of_part,
    stored_by_package,
    without,
)
from tests.tools.oracle import hf_tensors


@pytest.fixture(scope="module")
def published(checkpoint, tmp_path_factory):
    """A checkpoint in nvfp4 that nobody spoils."""
    hf, folder = checkpoint("qwen3", dtype=torch.bfloat16), tmp_path_factory.mktemp("published")
    return directory(hf, folder / "nvfp4", stored_by_package(hf_tensors(hf)), config_of())


def of_group(**weights):
    return lambda config, tensors: config["config_groups"]["group_0"]["weights"].update(weights)


INSTEAD = (
    "of compressed-tensors reshard reads fp8 and int8 weights with symmetric scales .* and nvfp4: convert "
    "the checkpoint that"
)
FAULTS = {
    "no scales": (
        without("_scale"),
        f"holds {NAME}_packed without {NAME}_scale, and nvfp4 weights need both",
    ),
    "no global scale": (
        without("_global_scale"),
        f"holds {NAME}_packed without {NAME}_global_scale, and nvfp4",
    ),
    "no codes": (without("_packed"), f"{NAME}_global_scale does not belong to codes, {NAME}_packed"),
    "scales alone": (
        lambda config, tensors: [without(end)(config, tensors) for end in ("_packed", "_global_scale")],
        f"{NAME}_scale does not belong to codes, {NAME}_packed",
    ),
    "plain beside packed": (
        extra(NAME, torch.ones(64, 256)),
        f"holds both {NAME} and {NAME}_packed: remove one of them",
    ),
    "codes in words": (
        of_part("_packed", lambda codes: codes.view(torch.int32)),
        rf"{NAME}_packed is int32 \[64, 32\], which are not codes of nvfp4: those are uint8",
    ),
    "columns that 16 does not divide": (
        of_part("_packed", lambda codes: codes[:, :-4].contiguous()),
        r"_packed is uint8 \[64, 124\], which are not codes of nvfp4",
    ),
    "codes of one dim": (
        of_part("_packed", torch.flatten),
        r"_packed is uint8 \[8192\], which are not codes",
    ),
    "half the codes": (
        of_part("_packed", lambda codes: codes[:, ::2].contiguous()),
        rf"{NAME}_scale is float8_e4m3fn \[64, 16\], expected float8_e4m3fn \[64, 8\] for nvfp4 "
        r"weights of \[64, 128\]",
    ),
    "scales in bf16": (
        of_part("_scale", lambda scale: scale.bfloat16()),
        rf"{NAME}_scale is bfloat16 \[64, 16\], expected float8_e4m3fn \[64, 16\]",
    ),
    "scales of mxfp4": (of_part("_scale", lambda scale: scale.view(torch.uint8)), "_scale is uint8"),
    "scales of other rows": (
        of_part("_scale", lambda scale: scale[1:].clone()),
        r"_scale is float8_e4m3fn \[63, 16\], expected",
    ),
    "a scale that is no number": (
        of_part("_scale", lambda scale: torch.full_like(scale, math.nan)),
        f"{NAME}_scale holds infinities or NaN, which are not scales",
    ),
    "a global scale in bf16": (
        of_part("_global_scale", lambda one: one.bfloat16()),
        rf"{NAME}_global_scale is bfloat16 \[1\], not one number in float32",
    ),
    "two global scales": (
        of_part("_global_scale", lambda one: torch.cat([one, one])),
        r"_global_scale is float32 \[2\], not one number",
    ),
    **{
        f"a global scale of {number}": (
            of_part("_global_scale", lambda one, number=number: one * 0 + number),
            f"{NAME}_global_scale is {number}, and what divides all scales of a weight is a "
            "positive number: take",
        )
        for number in (0.0, -3.0, math.inf, math.nan)
    },
    "numbers that no dtype holds": (
        of_part("_global_scale", lambda one: one * 0 + 1e-37),
        f"{NAME} has numbers that are too large for bfloat16 once dequantized",
    ),
    "zero points": (
        extra(f"{NAME}_zero_point", torch.zeros(64, 16)),
        f"holds {NAME}_zero_point, which nvfp4 weights have not, and {INSTEAD}",
    ),
    "a shape": (
        extra(f"{NAME}_shape", torch.tensor([64, 256])),
        f"holds {NAME}_shape, which nvfp4 weights have not",
    ),
    "an order of columns": (extra(f"{NAME}_g_idx", torch.zeros(256)), f"holds {NAME}_g_idx, and {INSTEAD}"),
    "another weight": (
        lambda config, tensors: tensors.update(
            {f"model.x.weight{end}": tensors[NAME + end].clone() for end in ENDS}
        ),
        "holds 1 that qwen3 does not have: model.x.weight",
    ),
    "another shape than the config's": (
        lambda config, tensors: tensors.update(
            {NAME + end: tensors[NAME + end][:32].clone() for end in ENDS}
        ),
        rf"{NAME} has shape \[32, 256\], expected \[64, 256\]",
    ),
    **{
        f"{name} {value}": (
            of_group(**{name: value}),
            f"group_0 quantizes weights as .*'{name}': {value!r:.5}.*, and {INSTEAD}",
        )
        for name, value in (
            ("num_bits", 8),
            ("type", "int"),
            ("strategy", "group"),
            ("group_size", 32),
            ("group_size", None),
            ("symmetric", False),
            ("actorder", "group"),
        )
    },
    "mxfp4": (
        lambda config, tensors: config["config_groups"]["group_0"].update(format="mxfp4-pack-quantized"),
        "group_0 format is 'mxfp4-pack-quantized'",
    ),
}
READ_LATER = (
    "a scale that is no number",
    "numbers that no dtype holds",
    *(name for name in FAULTS if name.startswith("a global scale of")),
)


@pytest.mark.parametrize("what", FAULTS)
def test_what_does_not_add_up_is_refused_in_one_sentence(what, published, tmp_path):
    change, message = FAULTS[what]
    source = Path(shutil.copytree(published, tmp_path / "source"))
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    change(config["quantization_config"], tensors)
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors")
    refused(lambda: hf_to_mcore(source, tmp_path / "out"), message)
    if what not in READ_LATER:
        refused(lambda: inspect(source), message)
    refused(lambda: diff(published, source), message)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


WANTED = {
    "plain activations": (config_of(), None),
    "its own activations": (
        config_of(**INPUTS),
        "wants activations of group_0 quantized by scales .*: serve it with a config whose "
        "input_activations are null",
    ),
    "fp8 activations": (
        config_of(num_bits=8, type="float", strategy="token", dynamic=True),
        "whose input_activations are null",
    ),
    **{
        f"{name} {value}": (
            ({**config_of()}, name, value),
            f"quantized by compressed-tensors as .*{value}.*, all symmetric, and nvfp4 with "
            "plain activations$",
        )
        for name, value in (("group_size", 32), ("num_bits", 8), ("symmetric", False), ("type", "int"))
    },
    "another order": (
        ({**config_of()}, "actorder", "group"),
        "all symmetric, and nvfp4 with plain activations$",
    ),
}


@pytest.mark.parametrize("what", WANTED)
def test_of_a_megatron_checkpoint_nvfp4_is_served_with_plain_activations(what):
    config, message = WANTED[what]
    if isinstance(config, tuple):
        config, name, value = config
        config["config_groups"]["group_0"]["weights"][name] = value
    if message is None:
        compressed_tensors.check_can_quantize(config, "the config")
    else:
        refused(lambda: compressed_tensors.check_can_quantize(config, "the config"), message)


OF_NVIDIA = (
    "of modelopt reshard reads NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN: convert the checkpoint "
    "that this one was made of"
)
NVIDIA_FAULTS = {
    "awq": (
        lambda config, tensors: config.update(quant_algo="W4A8_AWQ"),
        f"its quant_algo is 'W4A8_AWQ', and {OF_NVIDIA}",
    ),
    "fp8": (
        lambda config, tensors: config.update(quant_algo="FP8"),
        "weight_scale does not belong to a matrix in fp8",
    ),
    "no algorithm": (lambda config, tensors: config.pop("quant_algo"), "its quant_algo is None, and"),
    "an algorithm that is a list": (
        lambda config, tensors: config.update(quant_algo=["NVFP4"]),
        r"its quant_algo is \['NVFP4'\], and",
    ),
    "a quantization that is text": (
        lambda config, tensors: config.update(quantization="NVFP4"),
        "its quant_algo is None, and",
    ),
    "other groups": (
        lambda config, tensors: config.update(group_size=32),
        f"its group_size is 32, not 16, and {OF_NVIDIA}",
    ),
    "no scales": (without("_scale"), f"holds {NAME} without {NAME}_scale, and nvfp4 weights need both"),
    "no second scale": (
        without("_scale_2"),
        f"holds {NAME} without {NAME}_scale_2, and nvfp4 weights need both",
    ),
    "codes alone": (
        lambda config, tensors: [without(end)(config, tensors) for end in ("_scale", "_scale_2")],
        f"holds {NAME} without {NAME}_scale",
    ),
    "no codes": (without(""), f"{NAME}_scale(_2)? does not belong to codes, {NAME}"),
    "a plain weight": (
        of_part("", lambda codes: torch.ones(64, 256)),
        rf"{NAME} is float32 \[64, 256\], which are not codes of nvfp4",
    ),
    "a second scale of 0": (
        of_part("_scale_2", lambda one: one * 0),
        f"{NAME}_scale_2 is 0.0, and what multiplies all scales of a weight is a positive number",
    ),
    "what awq multiplies by": (
        extra("model.layers.1.self_attn.o_proj.pre_quant_scale", torch.ones(256)),
        "holds 1 that qwen3 does not have",
    ),
}


@pytest.mark.parametrize("what", NVIDIA_FAULTS)
def test_what_does_not_add_up_of_nvidia_is_refused_in_one_sentence(what, checkpoint, tmp_path):
    change, message = NVIDIA_FAULTS[what]
    hf = checkpoint("qwen3", dtype=torch.bfloat16)
    tensors, quantization = by_modelopt(stored_by_package(hf_tensors(hf)), True), {**FORMS["flat"]}
    change(quantization, tensors)
    source = directory(hf, tmp_path / "source", tensors, quantization)
    refused(lambda: hf_to_mcore(source, tmp_path / "out"), message)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
