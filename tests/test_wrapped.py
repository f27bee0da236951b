"""Language models of larger ones, as Qwen3.5 is published: names behind a prefix, experts in one
tensor, a vision tower that is carried along, multi-token prediction."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, inspect, mcore_to_hf
from tests.checkpoints import NEXT, make
from tests.oracle import same as same_bits
from tests.oracle import stored_tensors
from tests.parity_runs import parity_command
from tests.ranks import free_port, run_on_ranks
from tests.refits import refit
from tests.test_logits import EP, ETP, PP, TP, flags_at

VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip
# What the published configs have, and transformers' classes do not.
PUBLISHED_ONLY = {
    "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}  # fmt: skip
INNER = "model.language_model.layers."


def published(directory, moe: bool, dtype: torch.dtype = torch.bfloat16, seed: int = 0, mtp: bool = True):
    """A small Qwen3.5 with all that a published directory has, experts packed; without `mtp` it has
    no layer for it."""
    from transformers import (
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
    )

    torch.manual_seed(seed)
    other = "intermediate_size" if moe else "norm_topk_prob"
    sizes = {
        name: value
        for name, value in NEXT.items()
        if name != other and (moe or not ("exp" in name or "moe" in name))
    }
    kind, config = (
        (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig)
        if moe
        else (Qwen3_5ForConditionalGeneration, Qwen3_5Config)
    )
    model = kind(config(text_config=sizes, vision_config=VISION))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.1 + (1.0 if "linear_attn.norm" in name else 0.0)
                )
    model.to(dtype).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    last = f"{INNER}{sizes['num_hidden_layers'] - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        made = torch.randn(tensors[name].shape).mul(0.05).to(dtype)
        tensors[f"mtp.layers.0.{name.removeprefix(last)}"] = made
    hidden = sizes["hidden_size"]
    shapes = {
        "fc": (hidden, 2 * hidden),
        "norm": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
    }
    tensors |= {
        f"mtp.{name}.weight": torch.randn(shape).mul(0.05).to(dtype) for name, shape in shapes.items()
    }
    if not mtp:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(packed(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    fields["text_config"] |= PUBLISHED_ONLY | {"mtp_num_hidden_layers": int(mtp)}
    fields["text_config"]["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def qwen3_vl(directory, seed: int = 0, tied: bool = False):
    """A small Qwen3-VL, dense, as transformers saves it."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    text = {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_theta": 5e6, "rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2],
        },
    }  # fmt: skip
    vision = VISION | {"deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def kimi_k25(directory, seed: int = 0):
    """A small Kimi-K2.5: a DeepSeek-V3 behind another prefix, beside a tower and a projector of
    which only the names matter here."""
    inner = make(directory / "inner", "deepseek-v3", torch.bfloat16, seed=seed)
    tensors = load_file(inner / "model.safetensors")
    whole = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    whole |= {
        "vision_tower.patch_embed.proj.weight": torch.randn(32, 3, 2, 2).bfloat16(),
        "mm_projector.linear_1.weight": torch.randn(64, 32).bfloat16(),
    }
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((inner / "config.json").read_text()) | {"model_type": "kimi_k2"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16", "text_config": config,
             "vision_config": {"model_type": "kimi_k25_vision"}, "media_placeholder_token_id": 7, "use_unified_vision_chunk": True,
             "ignore_index": -100}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(outer))
    return directory


def test_kimi_k25_is_a_deepseek_v3_behind_another_prefix(tmp_path):
    source = kimi_k25(tmp_path / "hf")
    layout = MegatronLayout(tp=2, pp=2, ep=2, etp=1)
    hf_to_mcore(source, tmp_path / "mcore", layout)
    hf_to_mcore(source / "inner", tmp_path / "inner", layout)
    assert (
        same_bits(
            stored_tensors(tmp_path / "mcore" / "release"), stored_tensors(tmp_path / "inner" / "release")
        )
        == []
    )
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(source, tmp_path / "back") and check(tmp_path / "back").ok
    mcore_to_hf(tmp_path / "mcore", tmp_path / "codes", quantize="fp8_per_channel")
    fields = json.loads((tmp_path / "codes" / "config.json").read_text())
    # As it is published: its quantization stands with the language model.
    fields["text_config"]["quantization_config"] = fields.pop("quantization_config")
    (tmp_path / "codes" / "config.json").write_text(json.dumps(fields))
    (tmp_path / "codes" / "reshard.json").unlink()
    hf_to_mcore(tmp_path / "codes", tmp_path / "dequantized", layout)
    mcore_to_hf(tmp_path / "dequantized", tmp_path / "plain")
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    name = "language_model.model.layers.1.mlp.experts.0.down_proj.weight"
    before, after = (
        load_file(tmp_path / where / "model.safetensors")[name].float() for where in ("back", "plain")
    )
    assert 0 < (before - after).abs().max() < 0.2 * before.abs().max()


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with all experts of a layer in two."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:

        def of(name, layer=layer):
            return [
                tensors[f"{layer}.experts.{expert}.{name}_proj.weight"]
                for expert in range(NEXT["num_experts"])
            ]

        out[f"{layer}.experts.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(of("gate"), of("up"), strict=True)]
        )
        out[f"{layer}.experts.down_proj"] = torch.stack(of("down"))
    return out


def same(a, b) -> bool:
    """Whether two directories have the same tensors, by the safetensors library."""
    one, other = (load_file(directory / "model.safetensors") for directory in (a, b))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_published_model_comes_back_with_its_tower_bit_for_bit(moe, tmp_path):
    source = published(tmp_path / "hf", moe)
    layout = MegatronLayout(tp=2, pp=2, ep=2, etp=1) if moe else MegatronLayout(tp=4)
    report = hf_to_mcore(source, tmp_path / "mcore", layout)
    assert not [notice for notice in report.notices if "tokenizer" not in notice]
    tower = load_file(tmp_path / "mcore" / "hf" / "towers.safetensors")
    assert tower and all(name.startswith("model.visual.") for name in tower)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(source, tmp_path / "back")
    assert (source / "config.json").read_bytes() == (tmp_path / "back" / "config.json").read_bytes()
    assert diff(source, tmp_path / "mcore").equal and diff(tmp_path / "back", tmp_path / "mcore").equal
    assert check(tmp_path / "mcore").ok and check(tmp_path / "back").ok
    assert inspect(source).parameters == inspect(tmp_path / "mcore").parameters
    # Controls: one wrong number, in an expert and in the tower.
    for name in ("mlp.experts.down_proj" if moe else "mlp.down_proj.weight", "patch_embed.proj.weight"):
        tensors = load_file(source / "model.safetensors")
        wrong = next(key for key in tensors if key.endswith(name))
        tensors[wrong].view(-1)[-1] += 1
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_bytes((source / "config.json").read_bytes())
        assert not diff(tmp_path / name, tmp_path / "mcore").equal


def test_experts_that_a_directory_has_one_by_one_come_back_so(checkpoint, tmp_path):
    source = checkpoint("qwen3.5-moe", dtype=torch.bfloat16)
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(ep=2, etp=1))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(source, tmp_path / "back")


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_megatron_gives_the_logits_of_the_whole_model_on_text(moe, tmp_path):
    from transformers import AutoModelForImageTextToText

    source = published(tmp_path / "hf", moe, torch.float32)
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2), transformer_impl="local")
    torch.manual_seed(1)
    tokens = torch.randint(0, 1000, (2, 24))
    with torch.no_grad():
        expected = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)(tokens).logits
    config, layout = json.loads((source / "config.json").read_text()), {"tp": 2}
    outputs = run_on_ranks(2, "build_and_run", config, layout, str(tmp_path / "mcore" / "release"), tokens)
    assert expected.std() > 0.05
    assert all((output[..., :1000] - expected).abs().max() < 2e-5 for output in outputs)


def test_a_checkpoint_without_the_tower_takes_it_from_the_directory_that_is_named(tmp_path):
    """As a trainer writes it, which has the language model only."""
    source = published(tmp_path / "hf", False)
    hf_to_mcore(source, tmp_path / "mcore")
    (tmp_path / "mcore" / "hf" / "towers.safetensors").unlink()
    (tmp_path / "mcore" / "reshard.json").unlink()
    with pytest.raises(
        ReshardError, match="has the language model of Qwen3_5ForConditionalGeneration only: pass --hf-config"
    ):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", hf_config=source)
    assert same(source, tmp_path / "back")


def test_a_norm_that_megatron_cannot_hold_less_one_is_refused_by_name_and_held_in_fp32(tmp_path):
    source = published(tmp_path / "hf", False)
    tensors = load_file(source / "model.safetensors")
    name = f"{INNER}0.linear_attn.norm.weight"
    tensors[name][0] = 0.302734375  # which less 1 takes more digits than bf16 has
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ReshardError, match=f"Megatron holds {name} less 1, and 1 of its numbers .*: pass --dtype fp32"
    ):
        hf_to_mcore(source, tmp_path / "mcore")
    hf_to_mcore(source, tmp_path / "mcore", dtype="fp32")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", dtype="bf16")
    assert same(source, tmp_path / "back")


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_the_language_model_of_qwen3_vl_comes_back_with_its_tower_and_says_what_transformers_says(
    tied, tmp_path
):
    source = qwen3_vl(tmp_path / "hf", tied=tied)
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2), transformer_impl="local")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(source, tmp_path / "back")
    assert inspect(tmp_path / "mcore").family == "qwen3"
    done = parity_command(source, tmp_path / "mcore", "--random", 2, "--lengths", 8, "--dtype", "fp32")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=["dense", "moe", "qwen3-vl"])
def pair(request, tmp_path_factory):
    """Two directories without MTP that share a vision tower, each with its Megatron checkpoint."""
    pairs: list[tuple[str, str]] = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("pair")
        if request.param == "qwen3-vl":
            source = qwen3_vl(folder / "hf", seed)
        else:
            source = published(folder / "hf", request.param == "moe", seed=seed, mtp=False)
        file = source / "model.safetensors"
        if pairs:
            first = load_file(f"{pairs[0][0]}/model.safetensors")
            tower = {name: tensor for name, tensor in first.items() if name.startswith("model.visual.")}
            save_file(load_file(file) | tower, file, metadata={"format": "pt"})
        hf_to_mcore(folder / "hf", folder / "mcore", transformer_impl="local")
        pairs.append((str(folder / "hf"), str(folder / "mcore")))
    return pairs


@pytest.mark.parametrize(("parallel", "trainers", "engine", "engines", "together"), [
    (f"{TP} 2", 2, {"tp": 2}, 2, True), (f"{TP} 2 {PP} 2", 4, {"tp": 4}, 4, False),
], ids=str)  # fmt: skip
def test_a_refit_leaves_what_vllms_own_loader_makes_of_it_beside_its_tower(
    parallel, trainers, engine, engines, together, pair, tmp_path
):
    refit(pair, parallel, trainers, engine | {"load_format": "safetensors"}, engines, together, tmp_path)


@pytest.mark.parametrize("pair", ["moe"], indirect=True)
def test_experts_in_one_tensor_are_refitted_whole_from_ranks_that_share_them(pair, tmp_path):
    engine = {"tp": 2, "enable_expert_parallel": True, "load_format": "safetensors"}
    refit(pair, f"{EP} 2 {ETP} 1", 2, engine, 2, False, tmp_path)


def test_without_the_one_that_megatron_leaves_out_a_refit_brings_other_norms(pair, tmp_path):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    arguments = (sides, flags_at(Path(pair[0][1]), ""), pair, {"load_format": "safetensors"})
    [(held, expected, *_)] = run_on_ranks(1, "refit_as_held", *arguments, module="refit_on_cpu")
    differing = {name for name in expected[0] if held[0][name] != expected[0][name]}
    if "Qwen3VL" in Path(pair[0][0], "config.json").read_text():
        assert not differing, "it holds none less 1"
        return
    assert differing and all(name.endswith("linear_attn.norm.weight") for name in differing)


def test_a_tower_of_dummy_weights_is_refused(pair, tmp_path):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    with pytest.raises(AssertionError, match="visual.* beside the language model are dummy weights"):
        run_on_ranks(1, "refit_twice", sides, flags_at(Path(pair[0][1]), ""), pair, {}, module="refit_on_cpu")
