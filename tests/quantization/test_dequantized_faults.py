"""Checkpoints by compressed-tensors that do not add up are refused in one sentence."""

import json
import math
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import diff, hf_to_mcore, inspect
from tests.quantization.test_dequantized import INT4, NAME, write
from tests.storage.test_faults import refused


@pytest.fixture(scope="module")
def published(checkpoint, tmp_path_factory):
    """Compressed checkpoints that nobody spoils: of fp8 by channel, and of int4 by group with zero points."""
    hf, folder = checkpoint("qwen3", dtype=torch.bfloat16), tmp_path_factory.mktemp("published")
    return {
        "fp8": write(hf, folder / "fp8", "float", "channel"),
        "int4": write(hf, folder / "int4", "int", "group", **INT4, symmetric=False),
    }


def of_group(**weights):
    return lambda config, tensors: config["config_groups"]["group_0"]["weights"].update(weights)


def of_config(**fields):
    return lambda config, tensors: config.update(fields)


def of_blocks(config, tensors):
    """Two groups of blocks, of other sizes."""
    of_group(strategy="block", block_structure=[32, 32])(config, tensors)
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = group | {"weights": group["weights"] | {"block_structure": [16, 32]}}


def of_scale(change, name=f"{NAME}_scale"):
    return lambda config, tensors: tensors.update({name: change(tensors[name])})


INSTEAD = (
    "of compressed-tensors reshard reads fp8 and int8 weights with symmetric scales by channel, tensor or "
    "block, and packed int4"
)
FAULTS = {
    "no scale": (
        lambda config, tensors: tensors.pop(f"{NAME}_scale"),
        f"{NAME} is float8_e4m3fn without {NAME}_scale",
    ),
    "no codes": (
        lambda config, tensors: tensors.update({NAME: tensors[NAME].bfloat16()}),
        f"{NAME}_scale does not belong to a matrix of codes in float8_e4m3fn",
    ),
    "codes of another type": (
        lambda config, tensors: tensors.update({NAME: tensors[NAME].view(torch.int8)}),
        "does not belong to a matrix",
    ),
    "a scale of nothing": (
        lambda config, tensors: tensors.update({"model.layers.0.x.weight_scale": torch.ones(64, 1)}),
        "x.weight_scale does not belong",
    ),
    "a scale of a norm": (
        lambda config, tensors: tensors.update({"model.norm.weight_scale": torch.ones(64, 1)}),
        "norm.weight_scale does not belong",
    ),
    "a scale for some rows": (
        of_scale(lambda scale: scale[1:].clone()),
        r"o_proj.weight_scale has shape \(63, 1\), expected \(64, 1\) by channel",
    ),
    "a scale for each column": (
        of_scale(lambda scale: scale.new_ones(1, 256)),
        r"has shape \(1, 256\), expected \(64, 1\) by channel",
    ),
    "one scale": (
        of_scale(lambda scale: scale[:1, 0].clone()),
        r"has shape \(1,\), expected \(64, 1\) by channel",
    ),
    "other blocks": (
        of_group(strategy="block", block_structure=[32, 32]),
        r"has shape \(\d+, 1\), expected .* by block",
    ),
    "a scale of whole numbers": (
        of_scale(lambda scale: scale.to(torch.int32)),
        "weight_scale has dtype int32, which is not one of bfloat16, float16, float32",
    ),
    "a scale of 64 bits": (of_scale(lambda scale: scale.double()), "weight_scale has dtype float64"),
    "a scale that is no number": (
        of_scale(lambda scale: scale * math.nan),
        f"{NAME}_scale holds infinities or NaN, which are not scales",
    ),
    "zero points": (
        lambda config, tensors: tensors.update({f"{NAME}_zero_point": torch.zeros(64, 1, dtype=torch.int8)}),
        f"holds {NAME}_zero_point, which none of its config_groups has packed",
    ),
    "packed codes": (
        lambda config, tensors: tensors.update({f"{NAME}_packed": torch.zeros(64, 32, dtype=torch.int32)}),
        f"holds {NAME}_packed, which none of its config_groups has packed",
    ),
    "an order of columns": (
        lambda config, tensors: tensors.update({f"{NAME}_g_idx": torch.zeros(256, dtype=torch.int32)}),
        f"holds {NAME}_g_idx, and {INSTEAD}",
    ),
    "int4": (
        of_group(num_bits=4, type="int", strategy="group", group_size=32),
        f"group_0 quantizes weights as .*'num_bits': 4.*, and {INSTEAD}",
    ),
    "asymmetric": (
        of_group(symmetric=False),
        f"group_0 quantizes weights as .*'symmetric': False.*, and {INSTEAD}",
    ),
    "by group": (of_group(strategy="group", group_size=32), "'strategy': 'group'"),
    "a type that is a list": (of_group(type=["float"]), r"'type': \['float'\]"),
    "blocks of nothing": (
        of_group(strategy="block", block_structure=[0, 32]),
        r"block_structure of group_0 is \[0, 32\], not two positive",
    ),
    "blocks of several sizes": (of_blocks, f"its groups have blocks of several sizes, and {INSTEAD}"),
    "mxfp4": (
        lambda config, tensors: config["config_groups"]["group_0"].update(format="mxfp4-pack-quantized"),
        "group_0 format is 'mxfp4-pack-quantized'",
    ),
    "a format that is a list": (of_config(format=[[]]), r"its format is \[\[\]\]"),
    "sparse": (
        of_config(sparsity_config={"format": "sparse-24-bitmask"}),
        "weights are stored as sparse ones, .*sparse-24-bitmask",
    ),
    "transformed": (
        of_config(transform_config={"config_groups": {"R4": {}}}),
        "weights are transformed, by transform_config",
    ),
    "groups that are a list": (
        of_config(config_groups=[1]),
        r"config_groups is \[1\], not an object with groups",
    ),
    "a group that is text": (of_config(config_groups={"group_0": "FP8"}), "not an object with groups"),
    "no groups": (
        of_config(config_groups={}),
        "its config_groups quantize no weights, and it holds .*weight_scale",
    ),
    "another tensor": (
        lambda config, tensors: tensors.update({"model.layers.0.self_attn.x.weight": torch.ones(2)}),
        "holds 1 that qwen3 does not have",
    ),
}
PACKED_FAULTS = {
    "no packed scale": (
        lambda config, tensors: tensors.pop(f"{NAME}_scale"),
        f"holds {NAME}_packed without {NAME}_scale",
    ),
    "no shape": (
        lambda config, tensors: tensors.pop(f"{NAME}_shape"),
        f"holds {NAME}_packed without {NAME}_shape",
    ),
    "no packed codes": (
        lambda config, tensors: tensors.pop(f"{NAME}_packed"),
        f"{NAME}_shape does not belong to codes, {NAME}_packed",
    ),
    "a plain weight": (
        lambda config, tensors: (
            [tensors.pop(NAME + end) for end in ("_packed", "_shape", "_zero_point")]
            + [tensors.update({NAME: torch.ones(64, 256)})]
        ),
        f"{NAME}_scale does not belong to codes, {NAME}_packed",
    ),
    "plain beside packed": (
        lambda config, tensors: tensors.update({NAME: torch.ones(64, 256)}),
        f"holds both {NAME} and {NAME}_packed: remove one of them",
    ),
    "zero points alone": (
        lambda config, tensors: tensors.update({"model.x.weight_zero_point": torch.ones(2)}),
        "model.x.weight_zero_point does not belong to codes, model.x.weight_packed",
    ),
    "columns by another order": (
        of_group(actorder="group"),
        f"group_0 quantizes weights as .*, and {INSTEAD}",
    ),
    "neither symmetric nor not": (of_group(symmetric="no"), "'symmetric': 'no'"),
    "no zero points": (
        lambda config, tensors: tensors.pop(f"{NAME}_zero_point"),
        rf"{NAME}_packed is int32 \[64, 32\] without zero points, which is no weight of \[64, "
        r"256\] in int4 by groups of 32, asymmetric",
    ),
    "fewer zero points": (
        of_scale(lambda zeros: zeros[1:].clone(), f"{NAME}_zero_point"),
        r"zero_point is int32 \[7, 8\], expected int32 \[8, 8\]",
    ),
    "symmetric": (
        of_group(symmetric=True),
        r"_packed is int32 .* with zero points, which is no weight of .* in int4 by groups of 32",
    ),
    "another shape": (
        of_scale(lambda shape: shape + 8, f"{NAME}_shape"),
        r"which is no weight of \[72, 264\] in int4",
    ),
    "a turned shape": (
        of_scale(lambda shape: shape.flip(0).contiguous(), f"{NAME}_shape"),
        r"which is no weight of \[256, 64\]",
    ),
    "a shape of fractions": (
        of_scale(lambda shape: shape.float(), f"{NAME}_shape"),
        r"_shape is float32 \[2\], not two whole numbers",
    ),
    "a shape of three": (
        of_scale(lambda shape: torch.ones(3, dtype=torch.int64), f"{NAME}_shape"),
        r"_shape is int64 \[3\], not two",
    ),
    "half the words": (
        of_scale(lambda codes: codes[:, ::2].contiguous(), f"{NAME}_packed"),
        r"_packed is int32 \[64, 16\] with zero points, which is no weight",
    ),
    "words of 8 bits": (
        of_scale(lambda codes: codes.to(torch.int8), f"{NAME}_packed"),
        r"_packed is int8 \[64, 32\]",
    ),
    "8 bits": (of_group(num_bits=8), "which is no weight of .* in int8 by groups of 32"),
    "3 bits": (of_group(num_bits=3), f"group_0 quantizes weights as .*'num_bits': 3.*, and {INSTEAD}"),
    "bits that are a fraction": (of_group(num_bits=4.0), "'num_bits': 4.0"),
    "floats": (of_group(type="float"), f"'type': 'float'.*, and {INSTEAD}"),
    "packed blocks": (of_group(strategy="block", block_structure=[32, 32]), "'strategy': 'block'"),
    "groups of another size": (
        of_group(group_size=16),
        r"weight_scale has shape \(\d+, \d+\), expected .* by group",
    ),
    "groups that do not divide": (
        of_group(group_size=40),
        "which is no weight of .* in int4 by groups of 40",
    ),
    "groups of nothing": (of_group(group_size=0), "group_size of group_0 is 0, not a positive whole number"),
    "groups of text": (of_group(group_size="32"), "group_size of group_0 is '32'"),
    "groups of no size": (of_group(group_size=None), "group_size of group_0 is None"),
    "a packed scale for each column": (
        of_scale(lambda scale: scale.T.contiguous()),
        r"has shape \(8, 64\), expected \(64, 8\) by group",
    ),
    "a packed scale that is no number": (
        of_scale(lambda scale: scale * math.inf),
        f"{NAME}_scale holds infinities or NaN",
    ),
    "another weight": (
        lambda config, tensors: tensors.update(
            {
                f"model.layers.0.x.weight{end}": tensors[NAME + end].clone()
                for end in ("_packed", "_scale", "_shape", "_zero_point")
            }
        ),
        "holds 1 that qwen3 does not have: model.layers.0.x.weight",
    ),
    "in no format": (
        lambda config, tensors: [config.pop("format"), config["config_groups"]["group_0"].pop("format")],
        f"group_0 quantizes weights as .*, and {INSTEAD}",
    ),
}
READ_LATER = ("a scale that is no number", "a packed scale that is no number")  # what `inspect` does not read


@pytest.mark.parametrize(
    "way, what", [*(("fp8", what) for what in FAULTS), *(("int4", what) for what in PACKED_FAULTS)]
)
def test_what_does_not_add_up_is_refused_in_one_sentence(way, what, published, tmp_path):
    change, message = (FAULTS | PACKED_FAULTS)[what]
    source = Path(shutil.copytree(published[way], tmp_path / "source"))
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
    refused(lambda: diff(published[way], source), message)
    assert not [one.path for one in psutil.Process().open_files() if one.path.startswith(str(source))]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_numbers_that_fp16_does_not_hold_are_refused(checkpoint, tmp_path):
    source = write(checkpoint("qwen3", dtype=torch.float16), tmp_path / "source", "float", "channel")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{NAME}_scale"][3] = 200.0
    tensors[NAME].view(torch.uint8)[3, 5] = 0x7E  # 448
    save_file(tensors, source / "model.safetensors")
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out"), f"{NAME} has numbers that are too large for float16"
    )
    wide = {name: tensor.float() if name.endswith("_scale") else tensor for name, tensor in tensors.items()}
    save_file(wide, source / "model.safetensors")
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out"), f"{NAME} has numbers that are too large for float16"
    )
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out", dtype="fp16"),
        rf"\d+ numbers of {NAME} are too large for float16",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    hf_to_mcore(source, tmp_path / "out", dtype="bf16")
