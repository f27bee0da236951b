"""Engines that vLLM serves from checkpoints in nvfp4: a refit makes codes and both kinds of scales
as compressed-tensors makes them, and leaves what vLLM makes of its checkpoints."""

import json
import re
import zlib
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from reshard import ReshardError, mcore_to_hf
from reshard.quantization import channels_torch, nvfp4_torch
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.by_compressed_tensors import EXPERTS, IGNORED, MADE_UP, hard, sides
from tests.tools.nvfp4_checkpoints import _plain_torch  # noqa: F401
from tests.tools.refits import refit

HOW = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", symmetric=True, dynamic=False, group_size=16,
                       scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn)  # fmt: skip
WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "symmetric": True,
    "dynamic": False,
    "group_size": 16,
}
# What vLLM multiplies at once, and what therefore shares a scale.
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
         "q_a_proj": "qkv_a", "kv_a_proj_with_mqa": "qkv_a"}  # fmt: skip


def fused(name: str) -> str:
    before, _, layer = name.removesuffix(".weight").rpartition(".")
    return f"{before}.{FUSED.get(layer, layer)}"


def packaged(weight: torch.Tensor, one: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a matrix is stored as, by the package's own functions and the ends of names, beside the
    scale of all of it."""
    groups = weight.unflatten(1, (-1, 16))
    scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), HOW, global_scale=one)
    plain = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros, "weight_global_scale": one}
    made = NVFP4PackedCompressor.compress(plain, QuantizationScheme(targets=["Linear"], weights=HOW))
    assert made.keys() == {"weight_packed", "weight_scale", "weight_global_scale"}
    return {end: made[f"weight{end}"].contiguous() for end in ("_packed", "_scale", "_global_scale")}


def cases(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return matrices that are hard to quantize."""
    values = hard(dtype)
    edges = (torch.arange(-112, 112).view(14, 16) / 8).to(dtype)  # what lies on and between two codes
    edges[:, 0] = 6 * 448
    matrices = [values, values[44:], values[8:16] * 1e-3, values[:1], values[:2], values[3:4], values[:, :16],
                0 * values, edges]  # fmt: skip
    return [weight.contiguous() for weight in matrices]


def beside(weight: torch.Tensor) -> list[torch.Tensor]:
    """The largest magnitude of a matrix, and one that it could have together with another."""
    return [weight.abs().max().view(1), 3 * weight.abs().max().view(1)]


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_compressed_tensors(dtype, monkeypatch):
    scaling = nvfp4_torch.CompressedTensors()
    for number, weight in enumerate(cases(dtype)):
        for largest in beside(weight):
            if (
                dtype == torch.float16 and 0 < largest.item() < 0.04
            ):  # where the package's would overflow, and scales be lost
                with pytest.raises(
                    ReshardError, match="for which float16 holds no scale of nvfp4: serve in bf16"
                ):
                    nvfp4_torch.encode(weight, largest, scaling)
                continue
            wanted = packaged(weight, generate_gparam(-largest, largest))
            made = nvfp4_torch.encode(weight, largest, scaling)
            assert made.keys() == wanted.keys()
            for end, theirs in wanted.items():
                assert (made[end].shape, made[end].dtype) == (theirs.shape, theirs.dtype), (number, end)
                assert torch.equal(made[end].view(torch.uint8), theirs.view(torch.uint8)), (number, end)
    # Other divisors, scales and signs make something else.
    weight = cases(dtype)[1]
    [largest, _], wanted = beside(weight), packaged(weight, generate_gparam(*torch.aminmax(weight)))
    half = nvfp4_torch.encode(weight, 2 * largest, scaling)
    assert all(not torch.equal(half[end], wanted[end]) for end in wanted if end != "_packed")
    assert not torch.equal(nvfp4_torch.encode(-weight, largest, scaling)["_packed"], wanted["_packed"])
    # Matrices below each other, each with its own; and a few rows at a time.
    twice = nvfp4_torch.encode(torch.cat([weight, weight]), torch.cat([largest, 2 * largest]), scaling)
    for end in wanted:
        assert torch.equal(
            twice[end].view(torch.uint8), torch.cat([wanted[end], half[end]]).view(torch.uint8)
        )
    monkeypatch.setattr(channels_torch, "ELEMENTS_AT_ONCE", 96 * 5)
    assert torch.equal(nvfp4_torch.encode(weight, largest, scaling)["_packed"], wanted["_packed"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_modelopt(dtype):
    """Return what that package makes of the same weights, as `tests.tools.modelopt_reference` writes it down."""
    recorded = json.loads((Path(__file__).parent.parent / "tools" / "modelopt_reference.json").read_text())
    for number, weight in enumerate(cases(dtype)):
        for largest in beside(weight):
            made = nvfp4_torch.encode(weight, largest, nvfp4_torch.ModelOpt())
            checksums = [zlib.crc32(one.view(torch.uint8).numpy().tobytes()) for one in made.values()]
            if largest.item() == 0:  # of which ModelOpt's scales are NaN
                assert (
                    made["_scale_2"].item() == 1
                    and not made[""].any()
                    and (made["_scale"].float() == 1).all()
                )
            else:
                assert checksums == recorded[str(dtype)].pop(0), number
    assert recorded[str(dtype)] == []


def config_of(inputs: bool = False, modelopt: bool = False, **more) -> dict:
    """The ``quantization_config`` of a checkpoint, as those are published, where inputs are
    quantized too or not."""
    if modelopt:
        ignored = {"ignore": ["lm_head", "*.mlp.gate"]} | more
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
            "group_size": 16,
        } | ignored
    group = {"targets": ["Linear"], "weights": WEIGHTS, "output_activations": None,
             "input_activations": WEIGHTS | {"dynamic": "local"} if inputs else None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": IGNORED,
        "config_groups": {"group_0": group},
    } | more


def published(
    directory: str,
    folder: Path,
    inputs: bool = False,
    seed: int = 0,
    only: str = "_proj",
    modelopt: bool = False,
    **more,
) -> str:
    """A checkpoint as llm-compressor writes it, quantized by the package's own functions, or as
    ModelOpt does: weights with `only` in their names."""
    folder.mkdir(parents=True)
    for file in Path(directory).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(Path(directory) / "model.safetensors")
    weights = {
        name: one
        for name, one in tensors.items()
        if re.search(only, name) and name.endswith(".weight") and one.ndim == 2
    }
    most: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        own = weight.abs().max().view(1)
        most[fused(name)] = torch.maximum(most.get(fused(name), own), own)
    for name in weights:
        weight, largest = tensors.pop(name), most[fused(name)]
        made = (
            nvfp4_torch.encode(weight, largest, nvfp4_torch.ModelOpt())
            if modelopt
            else packaged(weight, generate_gparam(-largest, largest))
        )
        tensors |= {name + end: one.clone() for end, one in made.items()}
        if inputs:
            number = zlib.crc32(f"{seed} {fused(name)}".encode()) / 2**32 + 0.01
            scale, value = ("input_scale", number) if modelopt else ("input_global_scale", 1000 * number)
            tensors[f"{name.removesuffix('weight')}{scale}"] = torch.tensor([value])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(directory) / "config.json").read_text())
    config["quantization_config"] = config_of(inputs, modelopt, **more)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return str(folder)


# MLA's projections that vLLM multiplies at once, and no others.
LATENT = {
    "only": "a_proj",
    "ignore": [*IGNORED, r"re:.*(b|o|gate|up|gate_up|down)_proj$", "re:.*mlp.experts.*"],
}
# Fused layers that are one rank's and several ranks', whole experts and parts of them, MLA's fused
# projections, with biases; with inputs that a kernel quantizes, whose scales an engine that started
# with dummy weights has not, and that Marlin ignores.
CASES = [
    ("llama-bias", False, "", 1, {}, 1, True, {}),
    ("qwen3", False, f"{TP} 2", 2, {"tp": 2}, 2, True, {"round_bytes": 50_000}),
    ("qwen2", True, f"{PP} 2", 2, {"tp": 2}, 2, False, {"round_bytes": 1, "bucket_bytes": 1 << 20}),
    (
        "qwen3-moe",
        False,
        f"{EP} 2 {ETP} 1",
        2,
        {"tp": 2, **EXPERTS},
        2,
        True,
        {"round_bytes": 1, "moving": True},
    ),
    ("qwen3-moe", True, f"{TP} 2", 2, {}, 1, False, {}),
    ("served-int8", False, f"{TP} 2", 2, {"tp": 2}, 2, True, {}),
    ("deepseek-v3", False, f"{TP} 2", 2, {"tp": 2}, 2, True, LATENT),
    ("qwen3", False, f"{TP} 2", 2, {"tp": 2}, 2, True, {"modelopt": True}),
    ("qwen3-moe", True, f"{EP} 2 {ETP} 1", 2, {"tp": 2, **EXPERTS}, 2, True, {"modelopt": True}),
]


@pytest.mark.parametrize("variant, inputs, parallel, trainers, engine, engines, together, options", CASES)
def test_a_refit_leaves_what_vllm_loads_from_a_checkpoint_in_nvfp4(
    variant, inputs, parallel, trainers, engine, engines, together, options, converted, tmp_path
):
    checkpoints = converted(variant)
    only = {name: options[name] for name in ("only", "ignore", "modelopt") if name in options}
    options = {name: value for name, value in options.items() if name not in only}
    directories = [
        published(hf, tmp_path / f"hf {n}", inputs, **only) for n, (hf, _) in enumerate(checkpoints)
    ]
    only.pop("only", None)
    engine = engine | {"hf_overrides": {"quantization_config": config_of(inputs, **only)}}
    made_up = [*MADE_UP, "input_global_scale", "input_scale", "input_global_scale_inv", "alpha"]
    options = {"published": directories, "ignored": made_up} | options
    refit(checkpoints, parallel, trainers, engine, engines, together, tmp_path / "run", **options)


# Attention of MLA, of whose kv_b_proj it derives matrices.
MLA = {"only": r"self_attn\.(?!q_b_proj).*proj", "ignore": ["lm_head", "re:.*mlp.*", "re:.*q_b_proj$"]}
INPUTS = [
    ("qwen3-moe", "moe_backend", "emulation", {}),
    ("served-int8", "moe_backend", "cutlass", {}),
    ("served-int8", "moe_backend", "flashinfer_cutlass", {}),
    ("served-moe-halves", "moe_backend", "flashinfer_trtllm", {}),
    ("served-moe-halves", "moe_backend", "flashinfer_cutedsl", {}),
    ("qwen3", "linear_backend", "emulation", {}),
    ("served-blocks", "linear_backend", "flashinfer_cutlass", {}),
    ("served-blocks", "linear_backend", "flashinfer_trtllm", {"modelopt": True}),
    ("qwen3", "linear_backend", "emulation", {"modelopt": True}),
    ("served-deepseek-v3", "linear_backend", "emulation", MLA),
]


@pytest.mark.parametrize("variant, kernels, name, options", INPUTS)
def test_scales_of_inputs_stay_as_they_were_loaded(variant, kernels, name, options, converted, tmp_path):
    (first, _), (second, mcore) = converted(variant)
    made = [(first, 0), (second, 0), (second, 1)]  # weights, and the inputs' scales
    directories = [
        published(hf, tmp_path / str(n), True, seed, **options) for n, (hf, seed) in enumerate(made)
    ]
    engine = {"tp": 1, "hf_overrides": {}, kernels: name}
    [[held, loaded, described, again, dummy, (kept, woken), anew]] = run_on_ranks(
        1,
        "static_inputs",
        sides(tmp_path, 1),
        flags_at(Path(mcore), ""),
        mcore,
        directories,
        engine,
        module="refit_reloads_on_cpu",
    )
    assert held == loaded[0] and again == "no error"
    other = {name for name in held if held[name] != loaded[1][name]}
    assert other and all(
        name.endswith(
            ("input_global_scale", "_inv", "alpha", "W_UV", "W_UK_T", "weight_scale_2", "g1_scale_c")
        )
        for name in other
    )
    assert woken and (kept > 0) == ("moe" in kernels), "also what kernels of experts keep"
    assert anew == loaded[1], "with the inputs' scales of what it has loaded since"
    assert any(
        "nvfp4, a scale for each group of 1x16 and one for all of it, scales of the input as they were loaded"
        in one["how"]
        for one in described
    )
    assert "quantizes its input by a scale that comes with a checkpoint and that no trainer has" in dummy


@pytest.mark.parametrize("modelopt", [False, True])
def test_infinities_and_nan_in_the_trainer_are_named_by_all_ranks(modelopt, converted, tmp_path):
    checkpoint = converted("qwen3")[0]
    engine = {"tp": 2, "hf_overrides": {"quantization_config": config_of(modelopt=modelopt)}}
    arguments = sides(tmp_path, 2), flags_at(Path(checkpoint[1]), f"{TP} 2"), checkpoint, engine, torch.nan
    for (message, whole), after in run_on_ranks(
        2, "of_infinities", *arguments, module="refit_reloads_on_cpu"
    ):
        assert "for model.layers.0.mlp.down_proj.weight hold infinities or NaN" in message and not whole
        assert after == ("no error", True)


RESHARD = {"load_format": "reshard"}


def test_an_engine_that_loads_a_megatron_checkpoint_holds_what_it_has_of_the_one_in_nvfp4(
    converted, tmp_path
):
    cases = []
    latent = {name: LATENT[name] for name in ("only", "ignore")}
    for variant, modelopt, only, parallel in (
        ("qwen3-moe", False, {}, {"tp": 2, **EXPERTS}),
        ("deepseek-v3", False, latent, {"tp": 2}),
        ("qwen3", True, {}, {"tp": 2}),
        ("qwen3-moe", True, {}, {"tp": 1}),
    ):
        (hf, mcore), (_, other) = converted(variant)
        folder, ignored = tmp_path / f"{variant} {modelopt}", {"ignore": only["ignore"]} if only else {}
        package = published(hf, folder / "package", modelopt=modelopt, **only)
        served = RESHARD | {"hf_overrides": {"quantization_config": config_of(modelopt=modelopt, **ignored)}}
        directories = {
            "package": (package, {"hf_overrides": {}}),
            "megatron": (mcore, served),
            "other": (other, served),
        }
        if not modelopt and not only:
            mcore_to_hf(mcore, folder / "converted", quantize="nvfp4")
            directories |= {
                "converted": (folder / "converted", {"hf_overrides": {}}),
                "by our loader": (package, RESHARD | {"hf_overrides": {}}),
                "by its config": (mcore, RESHARD | {"hf_config_path": package, "hf_overrides": {}}),
            }
        cases.append((parallel, directories))
    for rank in run_on_ranks(2, "loaded", cases, module="serving_on_cpu"):
        for engines in rank:
            wanted, *_ = engines.pop("package")
            other, *_ = engines.pop("other")
            assert other != wanted and other.keys() == wanted.keys()
            wrong = {which: differing(held, wanted) for which, (held, *_) in engines.items()}
            assert {which: names for which, names in wrong.items() if names} == {}


def test_configs_that_no_megatron_checkpoint_can_serve_are_refused_in_one_sentence(converted, tmp_path):
    mcore = converted("qwen3")[0][1]
    sentences = {
        "wants activations of group_0 quantized by scales that come with a checkpoint": config_of(
            inputs=True
        ),
        "wants weights quantized by modelopt as 'MXFP8', and of these reshard makes W4A16_NVFP4 alone": {
            "quant_method": "modelopt",
            "quantization": "MXFP8",
        },
        "wants weights quantized by modelopt as 'NVFP4', and of these reshard makes W4A16_NVFP4": config_of(
            True, modelopt=True
        ),
        "lm_head is loaded by ModelOptNvFp4W4A16LinearMethod, for which reshard cannot quantize": config_of(
            modelopt=True, ignore=["*.mlp.gate"]
        ),
    }
    cases = []
    for number, quantization in enumerate(sentences.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = json.loads((Path(mcore) / "hf" / "config.json").read_text()) | {
            "quantization_config": quantization
        }
        (folder / "config.json").write_text(json.dumps(config))
        cases.append((mcore, RESHARD | {"hf_config_path": str(folder), "hf_overrides": {}}))
    [messages] = run_on_ranks(1, "refused", cases, module="serving_on_cpu")
    for sentence, message in zip(sentences, messages, strict=True):
        assert sentence in message and "\n" not in message, message


def differing(held: dict, wanted: dict) -> list[str]:
    """Names of what is not the same, but for scales of inputs that a layer with plain inputs has
    room for, and nobody fills."""
    return [name for name in wanted if held.get(name) != wanted[name] and "input_" not in name]
