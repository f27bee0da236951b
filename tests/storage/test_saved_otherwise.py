"""Checkpoints as trainers, merge tools and other options of transformers save them: the same models, under other
names and with other configs than published ones."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, mcore_to_hf
from tests.storage.test_wrapped import kimi_k25, published
from tests.tools.checkpoints import make
from tests.tools.oracle import hf_tensors, megatron_tensors, same, stored_tensors

LAYOUT = MegatronLayout(tp=2, pp=2)
LAYER = "model.layers.0."


def directory(folder, tensors: dict[str, torch.Tensor], config: dict):
    """A Hugging Face directory of these tensors, in one file."""
    folder.mkdir()
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def notices(source, plain, out, layout=LAYOUT) -> str:
    """Convert a directory there and back, see that it is the model in `plain`, and return what was said."""
    report = hf_to_mcore(source, out / "mcore", layout)
    expected = megatron_tensors(plain, 1024)
    assert same(stored_tensors(out / "mcore" / "release"), expected) == []
    mcore_to_hf(out / "mcore", out / "back")
    tied = {"lm_head.weight"} if "lm_head.weight" not in hf_tensors(plain) else set()
    back = {name: tensor for name, tensor in hf_tensors(out / "back").items() if name not in tied}
    assert same(back, hf_tensors(plain)) == [] and check(out / "back").ok
    return " ".join(report.notices)


@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral", "minimax-m2", "olmoe", "nemotron-h-moe"])
def test_a_model_that_is_saved_with_its_names_in_memory_is_the_published_one(variant, checkpoint, tmp_path):
    """All experts of a layer are in one tensor then, and Mixtral's and Nemotron's names are others."""
    plain, source = checkpoint(variant), tmp_path / "hf"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.save_pretrained(source, save_original_format=False)
    shutil.copy(plain / "config.json", source)
    tensors = load_file(source / "model.safetensors")
    fused = [name for name, tensor in tensors.items() if tensor.ndim == 3 and ".experts." in name]
    assert fused and not tensors.keys() & {n for n in hf_tensors(plain) if ".experts." in n}
    notices(source, plain, tmp_path, MegatronLayout(tp=2, ep=2, etp=1))
    # Controls: another order of rows, a tensor that is no expert's, an expert too few.
    config, name = json.loads((plain / "config.json").read_text()), fused[0]
    turned = directory(tmp_path / "turned", tensors | {name: tensors[name].roll(1, 1)}, config)
    assert not diff(plain, turned).equal
    strange = directory(tmp_path / "strange", tensors | {"another": torch.ones(8)}, config)
    with pytest.raises(ReshardError, match=r"holds 1 that \w+ does not have: another$"):
        hf_to_mcore(strange, tmp_path / "never")
    fewer = directory(tmp_path / "fewer", tensors | {name: tensors[name][1:]}, config)
    with pytest.raises(ReshardError, match=r"experts\.\w+ has shape \[7, .*\], expected \[8, "):
        hf_to_mcore(fewer, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def starting(prefix: str):
    """A change of names that begin with ``model.``."""
    return lambda tensors: {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }


def in_wrappers(tensors):
    """Names as FSDP, activation checkpointing and torch.compile leave them."""
    return {
        "_orig_mod." + name.replace(".mlp.", "._checkpoint_wrapped_module.mlp."): tensor
        for name, tensor in tensors.items()
    }


def with_buffers(tensors):
    """What older versions computed once, and saved."""
    names = (
        f"{LAYER}self_attn.rotary_emb.inv_freq",
        f"{LAYER}self_attn.rotary_emb.cos_cached",
        "model.rotary_emb.inv_freq",
    )
    return tensors | {name: torch.ones(8) for name in names}


def output_layer_alone(tensors):
    """As `safetensors.torch.save_model` keeps one of two names of a tensor."""
    return {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}


def output_layer_too(tensors):
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}


OTHERWISE = {
    "a base model": (starting(""), {"architectures": ["LlamaModel"]}, "embed_tokens.weight is read as model.embed"),
    "a language model": (starting("model.language_model."), {}, "is read as model.embed_tokens.weight, and the others"),
    "FSDP": (in_wrappers, {"architectures": ["FSDPLlamaForCausalLM"]}, "_orig_mod.* is read as "),
    "DDP": (lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()}, {},
            "module.* is read as model"),
    "no architectures": (dict, {"architectures": None}, ""),
    "buffers": (with_buffers, {}, "ignored on purpose: .*cos_cached.*"),
    "the output layer alone": (output_layer_alone, {}, "one tensor is not named as published: lm_head.weight is read"),
    "the output layer too": (output_layer_too, {}, ""),
    "merged after QLoRA": (dict, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
                           "quantization_config of 'bitsandbytes', but no weight is quantized"),
}  # fmt: skip


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_model_that_is_saved_otherwise_is_the_published_one(how, checkpoint, tmp_path):
    change, fields, said = OTHERWISE[how]
    plain = checkpoint("llama-rope-tied", dtype=torch.bfloat16)
    config = json.loads((plain / "config.json").read_text()) | fields
    tensors = load_file(plain / "model.safetensors")
    source = directory(tmp_path / "hf", change(tensors), config)
    told = notices(source, plain, tmp_path)
    for written in ("back/config.json", "mcore/hf/config.json"):
        [architecture] = json.loads((tmp_path / written).read_text())["architectures"] or [None]
        assert architecture == (
            "LlamaForCausalLM" if how == "FSDP" else config["architectures"] and config["architectures"][0]
        )
    assert re.search(said, told) and ("published" in told) == ("read as" in said or "is read" in said)
    # Control: one number.
    name = f"{LAYER}mlp.up_proj.weight"
    wrong = change(tensors | {name: tensors[name] + 1})
    assert not diff(plain, directory(tmp_path / "wrong", wrong, config)).equal


def test_embeddings_in_fp32_leave_the_dtype_that_the_config_says(checkpoint, tmp_path):
    """As they are where adapters were merged whose embeddings were trained too."""
    plain = checkpoint("llama", dtype=torch.bfloat16)
    tensors = {n: t if ".layers." in n else t.float() for n, t in hf_tensors(plain).items()}
    source = directory(tmp_path / "hf", tensors, json.loads((plain / "config.json").read_text()))
    hf_to_mcore(source, tmp_path / "mcore", LAYOUT)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), tensors) == []
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_names_that_would_stand_for_one_tensor_and_a_base_model_without_an_output_layer_are_refused(
    checkpoint, tmp_path
):
    plain = checkpoint("llama", dtype=torch.bfloat16)
    config, tensors = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")
    twice = directory(tmp_path / "twice", tensors | in_wrappers(tensors), config)
    with pytest.raises(ReshardError, match="that llama does not have: _orig_mod.lm_head.weight"):
        hf_to_mcore(twice, tmp_path / "out")
    base = {name: tensor for name, tensor in starting("")(tensors).items() if name != "lm_head.weight"}
    base = directory(tmp_path / "base", base, config | {"architectures": ["LlamaModel"]})
    with pytest.raises(
        ReshardError, match="lm_head.weight: this is a base model, and a model without an output"
    ):
        hf_to_mcore(base, tmp_path / "out")
    other = tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}
    tied = directory(tmp_path / "tied", other, config | {"tie_word_embeddings": True})
    with pytest.raises(
        ReshardError, match='lm_head.weight differs .*: if they are two, say "tie_word_embeddings": false'
    ):
        hf_to_mcore(tied, tmp_path / "out")
    awq = config | {"quantization_config": {"quant_method": "awq"}}
    codes = directory(
        tmp_path / "awq", tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int32)}, awq
    )
    with pytest.raises(ReshardError, match="weights quantized as 'awq' are not supported"):
        hf_to_mcore(codes, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("variant", ["deepseek-v3", "glm4-moe"])
def test_an_mtp_layer_that_the_config_does_not_announce_is_carried_along(variant, tmp_path):
    """Trainers have it left out by `num_nextn_predict_layers` alone."""
    source = make(tmp_path / "hf", variant, torch.bfloat16, mtp=True)
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    config["num_nextn_predict_layers"] = 0
    (source / "config.json").write_text(json.dumps(config))
    mtp = f"model.layers.{config['num_hidden_layers']}."
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(mtp)}
    assert len(plain) < len(tensors)
    report = hf_to_mcore(source, tmp_path / "mcore", LAYOUT)
    told = f"carried along, since config.json announces no MTP layer: {mtp}"
    assert any(told in notice for notice in report.notices)
    expected = megatron_tensors(source, 1024, plain)
    assert same(stored_tensors(tmp_path / "mcore" / "release"), expected) == []
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), tensors) == [] and check(tmp_path / "mcore").ok
    # Control: a layer too many is not one for MTP.
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    more = {name.replace(last, mtp): tensor for name, tensor in plain.items() if name.startswith(last)}
    with pytest.raises(ReshardError, match=f"that {config['model_type']} does not have: {mtp}"):
        hf_to_mcore(directory(tmp_path / "more", plain | more, config), tmp_path / "never")


def test_kimi_k25_that_transformers_has_saved_again_is_the_published_one(tmp_path):
    """Its class has another name, and its names in files are others: ``blocks`` for layers, and of the tower."""
    source = kimi_k25(tmp_path / "published")
    config = json.loads((source / "config.json").read_text())
    # As transformers' class has the fields of the small tower.
    vision = {"model_type": "kimi_k25_vision", "pos_emb_height": 4, "pos_emb_width": 4, "num_attention_heads": 4,
              "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}  # fmt: skip
    config |= {"vision_config": vision, "projection_hidden_size": 32, "tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(config))
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.bfloat16)
    language = {n: t for n, t in hf_tensors(source).items() if n.startswith("language_model.")}
    for original in (True, False):
        again, out = tmp_path / f"again-{original}", tmp_path / f"out-{original}"
        out.mkdir()
        model.save_pretrained(again, save_original_format=original)
        saved = json.loads((again / "config.json").read_text())
        assert saved["architectures"] == ["Kimi_K25ForConditionalGeneration"]
        assert not hf_tensors(again).keys() & {name for name in language if ".layers." in name}
        report = hf_to_mcore(again, out / "mcore", MegatronLayout(tp=2, ep=2, etp=1))
        assert not [notice for notice in report.notices if "does not read" in notice]
        mcore_to_hf(out / "mcore", out / "back")
        back = hf_tensors(out / "back")
        inner = {n: t for n, t in back.items() if n.startswith("language_model.")}
        assert {n: t.float().tolist() for n, t in inner.items()} == {
            n: t.float().tolist() for n, t in language.items()
        }
        theirs = AutoModelForImageTextToText.from_pretrained(out / "back", dtype=torch.bfloat16).state_dict()
        assert same(theirs, model.state_dict()) == [], "the tower too"


def test_the_language_model_of_a_larger_one_alone_comes_back_alone(tmp_path):
    whole = published(tmp_path / "whole", moe=False)
    config = json.loads((whole / "config.json").read_text())
    tensors = {n: t for n, t in hf_tensors(whole).items() if not n.startswith("model.visual.")}
    source = directory(tmp_path / "hf", tensors, config)
    hf_to_mcore(source, tmp_path / "mcore", LAYOUT)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), tensors) == []
