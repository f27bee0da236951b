"""Language models of larger ones, as Qwen3.5 is published: names behind a prefix, experts in one
tensor, a vision tower that is carried along, multi-token prediction."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, inspect, mcore_to_hf
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.checkpoints import NEXT, make
from tests.tools.model_classes import make as make_class
from tests.tools.oracle import bits, hf_tensors, stored_tensors
from tests.tools.oracle import same as same_bits
from tests.tools.parity_runs import ranks_of, run, with_a_fault
from tests.tools.refits import refit

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
# What the published configs have, and transformers' classes do not.
PUBLISHED_ONLY = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
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
    fields["vision_config"] |= {"deepstack_visual_indexes": []}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


# As transformers' own config of it has them, but for `norm_topk_prob`, which vLLM reads.
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}


def qwen3_vl(directory, moe: bool, seed: int = 0, tied: bool = False):
    """A small Qwen3-VL as it is published: experts in one tensor, transposed."""
    import transformers

    torch.manual_seed(seed)
    text = {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256,
        **(EXPERTS if moe else {}),
        "rope_parameters": {
            "rope_theta": 5e6, "rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2],
        },
    }  # fmt: skip
    name = "Qwen3VLMoe" if moe else "Qwen3VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=VISION | {"deepstack_visual_indexes": [0]}, tie_word_embeddings=tied
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    transposed = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | transposed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def kimi_k25(directory, seed: int = 0):
    """A small Kimi-K2.5: a DeepSeek-V3 behind another prefix, beside the tower and the projector
    that vLLM's class reads."""
    inner = make(directory / "inner", "deepseek-v3", torch.bfloat16, seed=seed)
    tensors = load_file(inner / "model.safetensors")
    block, shapes = "vision_tower.encoder.blocks.0.", {"vision_tower.patch_embed.pos_emb.weight": (4, 4, 32)}
    for module, *shape in (
        ("vision_tower.patch_embed.proj", 32, 3, 14, 14), (f"{block}norm0", 32), (f"{block}norm1", 32),
        (f"{block}wqkv", 96, 32), (f"{block}wo", 32, 32), (f"{block}mlp.fc0", 48, 32), (f"{block}mlp.fc1", 32, 48),
        ("vision_tower.encoder.final_layernorm", 32), ("mm_projector.pre_norm", 32), ("mm_projector.proj.0", 128, 128),
        ("mm_projector.proj.2", 64, 128),
    ):  # fmt: skip
        shapes |= {f"{module}.weight": tuple(shape), f"{module}.bias": (shape[0],)}
    whole = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    whole |= {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((inner / "config.json").read_text()) | {"model_type": "kimi_k2"}
    vision = {
        "model_type": "kimi_k25_vision", "init_pos_emb_height": 4, "init_pos_emb_width": 4, "num_attention_heads": 4,
        "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "mm_hidden_size": 32,
        "text_hidden_size": 64, "vt_hidden_size": 32, "vt_num_attention_heads": 4, "vt_num_hidden_layers": 1,
        "vt_intermediate_size": 48, "merge_kernel_size": [2, 2], "mm_projector_type": "patchmerger",
    }  # fmt: skip
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": config,
        "vision_config": vision,
        "media_placeholder_token_id": 7,
        "use_unified_vision_chunk": True,
        "ignore_index": -100,
    }
    (directory / "config.json").write_text(json.dumps(outer))
    return directory


def with_sizes_of_class(directory):
    """A small Kimi-K2.5 of which transformers' class, too, finds the sizes: it has other fields for these, whose
    defaults are the sizes of the published models."""
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] |= {
        "pos_emb_height": 4, "pos_emb_width": 4, "hidden_size": 32, "intermediate_size": 48,
    }  # fmt: skip
    config |= {"projection_hidden_size": 32, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
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


def test_mtp_tensors_of_which_qwen3_nexts_config_says_nothing_are_carried_unchanged(checkpoint, tmp_path):
    plain = checkpoint("qwen3-next", dtype=torch.bfloat16)
    tensors, (source, strange) = (
        load_file(plain / "model.safetensors"),
        (tmp_path / "hf", tmp_path / "strange"),
    )
    for directory, prefix in ((source, "mtp"), (strange, "mtq")):
        directory.mkdir()
        extra = {
            f"{prefix}.fc.weight": torch.randn(64, 128).bfloat16(),
            f"{prefix}.norm.weight": torch.randn(64).bfloat16(),
        }
        save_file(tensors | extra, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_bytes((plain / "config.json").read_bytes())
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(source, tmp_path / "back") and check(tmp_path / "mcore").ok
    with pytest.raises(ReshardError, match="holds 2 that qwen3_next does not have: mtq.fc.weight"):
        hf_to_mcore(strange, tmp_path / "never")


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


@pytest.mark.parametrize(("kind", "family", "matrix"), [
    ("qwen3-vl-tied", "qwen3", f"{INNER}2.mlp.down_proj.weight"),
    ("qwen3-vl-moe", "qwen3_vl_moe_text", f"{INNER}2.mlp.experts.down_proj"),
    ("qwen2.5-vl", "qwen2_5_vl_text", "model.layers.1.mlp.down_proj.weight"),
])  # fmt: skip
def test_the_language_model_of_a_vlm_comes_back_with_its_tower_and_says_what_transformers_says(
    kind, family, matrix, tmp_path
):
    source, moe = MADE[kind](tmp_path / "hf", 0), kind.endswith("moe")
    layout = MegatronLayout(tp=2, pp=2, ep=2, etp=1) if moe else MegatronLayout(tp=2, pp=2)
    hf_to_mcore(source, tmp_path / "mcore", layout, transformer_impl="local")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(source, tmp_path / "back")
    assert inspect(tmp_path / "mcore").family == family
    sizes = {"tp": 2, "ep": 2, "etp": 1} if moe else {"tp": 2, "pp": 2}
    report = run(source, tmp_path / "mcore", sizes, lengths=(8,))
    assert report["ok"], report["exceeded"]
    # The control: another matrix in one layer, which is found in a model that has more than the language model.
    wrong = with_a_fault(source, tmp_path / "wrong", matrix, 1.5)
    arguments = str(wrong), str(tmp_path / "mcore"), sizes
    (sentence, place, names), *_ = run_on_ranks(ranks_of(sizes), "find", *arguments, module="parity_on_cpu")
    module = matrix.partition(".mlp.")[0]
    assert place == f"the {'experts' if moe else 'MLP'} of layer {module[-1]}", sentence
    assert names and all(name.startswith(f"{module}.mlp.") and "down_proj" in name for name in names)


def test_a_qwen2_5_vl_is_the_same_with_its_config_as_published(tmp_path):
    """Without a config of the language model apart, and with a type of its rotary embedding that older classes had."""
    source = MADE["qwen2.5-vl"](tmp_path / "hf", 0)
    shutil.copytree(source, tmp_path / "flat")
    config = json.loads((source / "config.json").read_text())
    fields = config.pop("text_config") | config
    rope, theirs = fields.pop("rope_parameters"), transformers.AutoConfig.from_pretrained
    fields |= {"rope_theta": rope["rope_theta"],
               "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}  # fmt: skip
    fields = {name: value for name, value in fields.items() if name != "layer_types"}
    (tmp_path / "flat" / "config.json").write_text(json.dumps(fields))
    one, other = (theirs(directory).text_config.to_dict() for directory in (source, tmp_path / "flat"))
    assert other["rope_parameters"] == one["rope_parameters"] | {"type": "mrope"}, "as transformers reads it"
    assert one | {"rope_parameters": 0, "dtype": 0} == other | {"rope_parameters": 0, "dtype": 0}
    for name in ("hf", "flat"):
        hf_to_mcore(tmp_path / name, tmp_path / f"{name}-mcore", MegatronLayout(tp=2))
    assert (
        diff(tmp_path / "hf-mcore", tmp_path / "flat-mcore").equal and diff(source, tmp_path / "flat").equal
    )
    mcore_to_hf(tmp_path / "flat-mcore", tmp_path / "back")
    assert same(tmp_path / "flat", tmp_path / "back")
    fields["rope_theta"] = 2e6  # the control
    (tmp_path / "flat" / "config.json").write_text(json.dumps(fields))
    assert not diff(source, tmp_path / "flat").equal


def test_experts_that_transformers_has_saved_as_in_memory_are_those_of_the_published_transposed_ones(
    tmp_path,
):
    source = qwen3_vl(tmp_path / "hf", moe=True)
    published = load_file(source / "model.safetensors")
    experts = {name for name in published if ".experts." in name}

    def directory(name: str, change) -> Path:
        tensors = {n: change(n, t).contiguous() if n in experts else t for n, t in published.items()}
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_bytes((source / "config.json").read_bytes())
        return tmp_path / name

    assert diff(source, directory("saved", lambda _, tensor: tensor.mT)).equal
    # Controls: gate and up exchanged, and one of the two tensors transposed.
    swapped = directory("swapped", lambda n, t: t.mT.roll(48, 1) if n.endswith("gate_up_proj") else t.mT)
    assert not diff(source, swapped).equal
    with pytest.raises(ReshardError, match=r"down_proj has shape \[8, 64, 48\], expected \[8, 48, 64\]"):
        diff(source, directory("mixed", lambda n, t: t if n.endswith("gate_up_proj") else t.mT))


TOWERS = ("model.visual.", "vision_tower.", "mm_projector.")
MADE = {
    "dense": lambda folder, seed: published(folder, False, seed=seed, mtp=False),
    "moe": lambda folder, seed: published(folder, True, seed=seed, mtp=False),
    "dense-mtp": lambda folder, seed: published(folder, False, seed=seed),
    "moe-mtp": lambda folder, seed: published(folder, True, seed=seed),
    "qwen2.5-vl": lambda folder, seed: make_class(folder, "Qwen2_5_VLForConditionalGeneration", seed),
    "qwen3-vl": lambda folder, seed: qwen3_vl(folder, False, seed),
    "qwen3-vl-tied": lambda folder, seed: qwen3_vl(folder, False, seed, tied=True),
    "qwen3-vl-moe": lambda folder, seed: qwen3_vl(folder, True, seed),
    "kimi-k2.5": kimi_k25,
}


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """Two directories that share their towers, each with its Megatron checkpoint."""
    pairs: list[tuple[str, str]] = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("pair")
        file = MADE[request.param](folder / "hf", seed) / "model.safetensors"
        if pairs:
            first = load_file(f"{pairs[0][0]}/model.safetensors")
            tower = {name: tensor for name, tensor in first.items() if name.startswith(TOWERS)}
            save_file(load_file(file) | tower, file, metadata={"format": "pt"})
        hf_to_mcore(folder / "hf", folder / "mcore", transformer_impl="local")
        pairs.append((str(folder / "hf"), str(folder / "mcore")))
    return pairs


# What is in one tensor comes from ranks that share its experts.
@pytest.mark.parametrize(("pair", "parallel", "trainers", "engine", "engines", "together"), [
    ("dense", f"{TP} 2", 2, {"tp": 2}, 2, True),
    ("moe", f"{TP} 2 {PP} 2", 4, {"tp": 4}, 4, False),
    ("moe", f"{EP} 2 {ETP} 1", 2, {"tp": 2, "enable_expert_parallel": True}, 2, False),
    # vLLM quantizes the tower too.
    ("qwen3-vl", f"{TP} 2 {PP} 2", 4, {"tp": 2, "quantization": "fp8_per_tensor"}, 2, False),
    ("qwen3-vl-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2, {"tp": 2, "enable_expert_parallel": True}, 2, True),
    ("kimi-k2.5", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, {"tp": 2}, 2, False),
], ids=str, indirect=["pair"])  # fmt: skip
def test_a_refit_leaves_what_vllms_own_loader_makes_of_it_beside_its_tower(
    parallel, trainers, engine, engines, together, pair, tmp_path
):
    refit(pair, parallel, trainers, engine | {"load_format": "safetensors"}, engines, together, tmp_path)


@pytest.mark.parametrize("pair", ["qwen3-vl-moe", "kimi-k2.5"], indirect=True)
def test_a_live_language_model_is_loaded_and_exported_beside_its_tower_and_not_saved_without_it(
    pair, tmp_path
):
    [(hf, mcore), (other, _)] = pair
    flags, laid_out = flags_at(Path(mcore), f"{TP} 2 {EP} 2 {ETP} 1"), tmp_path / "laid-out"
    hf_to_mcore(hf, laid_out, MegatronLayout(pp=2, ep=4, etp=1))
    arguments = flags, [hf, str(laid_out)], mcore, other
    for (from_hf, from_ours, from_other), _, tensors in run_on_ranks(
        2, "load_each", *arguments, module="live_megatron_on_cpu"
    ):
        assert from_hf == from_ours == [] and len(from_other) > 0.8 * tensors
    published = {
        name: bits(tensor) for name, tensor in hf_tensors(Path(hf)).items() if not name.startswith(TOWERS)
    }
    published |= {name: None for name in published if name.endswith("e_score_correction_bias")}  # fp32 here
    arguments = flags, hf, mcore, str(tmp_path / "saved")
    for exported, said in run_on_ranks(2, "export_beside", *arguments, module="live_megatron_on_cpu"):
        assert exported | {n: None for n, b in published.items() if b is None} == published
        assert "of which the trainer has the language model only" in said
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("pair", ["moe", "qwen3-vl", "kimi-k2.5"], indirect=True)
def test_a_refit_leaves_what_sglangs_own_loader_makes_of_it_beside_its_tower(pair, tmp_path):
    engine = {"load_format": "safetensors", "disable_radix_cache": True}
    refit(pair, "", 1, engine, 1, True, tmp_path, into="SGLang")


@pytest.mark.parametrize("pair", ["moe"], indirect=True)
def test_without_the_one_that_megatron_leaves_out_a_refit_brings_other_norms(pair, tmp_path):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    arguments = (sides, flags_at(Path(pair[0][1]), ""), pair, {"load_format": "safetensors"})
    [(held, expected, *_)] = run_on_ranks(1, "refit_as_held", *arguments, module="refit_on_cpu")
    differing = {name for name in expected[0] if held[0][name] != expected[0][name]}
    assert differing and all(name.endswith("linear_attn.norm.weight") for name in differing)


@pytest.mark.parametrize(("pair", "parallel", "ranks"), [
    ("dense-mtp", "", 1), ("moe-mtp", f"{EP} 2 {ETP} 1", 2),
], indirect=["pair"])  # fmt: skip
def test_a_drafter_of_qwen35s_mtp_layer_is_refitted_with_its_model(pair, parallel, ranks):
    flags, engine = flags_at(Path(pair[1][1]), parallel), {"tp": ranks, "language_model_only": True}
    for one in run_on_ranks(ranks, "drafted", flags, pair, engine, module="sleeping_on_cpu"):
        assert one["wrong"] == [[], []] and one["then"] == "no error"
        assert len(one["own"]) >= 16 and all(name.endswith(("cache", "_scale")) for name in one["same"])
        spoiled = "1 tensors did not arrive as they are in the trainer: mtp.pre_fc_norm_embedding.weight"
        assert spoiled in one["spoiled"]


@pytest.mark.parametrize("pair", ["moe", "kimi-k2.5"], indirect=True)
def test_a_tower_of_dummy_weights_is_refused(pair, tmp_path):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    said = "(visual|mm_projector).* beside the language model are dummy weights .*language_model_only=True"
    with pytest.raises(AssertionError, match=said):
        run_on_ranks(1, "refit_twice", sides, flags_at(Path(pair[0][1]), ""), pair, {}, module="refit_on_cpu")
