"""Published configs: what is accepted, what is refused by name, and in which words."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reshard import ReshardError, diff, hf_to_mcore, ignored_config_fields, inspect
from reshard.megatron.arguments import check_args, megatron_args
from reshard.models.config_defaults import DEFAULTS
from reshard.models.config_fields import KNOWN_CODE, ignore_hint_for
from reshard.models.family import families
from reshard.models.field_tables import DECIDES_ELSEWHERE
from reshard.models.model import Model
from reshard.models.numerics_args import same_value
from tests.standins import bailing
from tests.tools.checkpoints import with_config
from tests.tools.disk import cli

PUBLISHED = [
    json.loads(line) for line in (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()
]
NOT_SUPPORTED = {
    "google/gemma-2-2b": "Gemma2ForCausalLM",
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": "LlamaForSequenceClassification",
}
CONFIGS = {entry["name"]: entry["config"] for entry in PUBLISHED if entry["name"] not in NOT_SUPPORTED}
# What the list's own sources have put into a config.
NOTED = {"context_window_size, prefill_chunk_size": "LlamaForCausalLM", "rotary_emb_base": "Qwen2ForCausalLM"}


def test_there_are_many_of_every_family_each_once():
    assert len({entry["name"] for entry in PUBLISHED}) == len(PUBLISHED)
    assert len(CONFIGS) > 75
    assert all(map(published, families()))


def published(kind: str) -> dict:
    """The first config of a family: its own, or that of a model that it is the language model of."""
    family = families()[kind]
    names = (family.architecture, family.wrapped_in[0])
    found = [config for config in CONFIGS.values() if config["architectures"][0] in names]
    assert found, f"tests/models/published_configs.jsonl has no config of {kind}"
    return found[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_accepted_with_a_note_at_most(name):
    model = Model.from_hf(CONFIGS[name])
    noted = {
        f"config.json: transformers' {kind} does not read {names}, and neither does reshard"
        for names, kind in NOTED.items()
    }
    assert not set(model.notices) - noted and not model.ignored
    config = CONFIGS[name].get("text_config", CONFIGS[name])
    assert model.num_layers == (config.get("num_hidden_layers") or len(config["layers_block_type"]))


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_an_architecture_without_a_table_is_not_taken_for_one_with_a_table(name):
    [config] = [entry["config"] for entry in PUBLISHED if entry["name"] == name]
    kind = NOT_SUPPORTED[name]
    with pytest.raises(
        ReshardError, match=f"config.json: {kind} is not supported; the architectures that are"
    ) as error:
        Model.from_hf(config)
    assert "nearest" not in str(error.value) and "Qwen3MoeForCausalLM" in str(error.value)


# Fields that no class of transformers for these families has, at values that decide something elsewhere.
DECIDING = {
    "rope_interleaved": True, "alibi": True, "clip_qkv": 8.0, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "logit_scale": 0.0625, "scale_depth": 1.4, "query_pre_attn_scalar": 256, "attention_sinks": True,
    "attention_out_bias": True, "lm_head_bias": True, "use_parallel_residual": True, "no_rope_layers": [1, 1, 1, 0],
    "dual_chunk_attention_config": {"chunk_size": 262144}, "is_causal": False, "use_mrope": True,
    "attn_output_gate": True, "moe_router_logit_softcapping": 30.0, "zero_expert_num": 2, "block_configs": [{}],
    "pruned_heads": {"1": [0]}, "attention_chunk_size": 8192, "index_topk": 2048, "swiglu_limit": 7.0,
    "is_encoder_decoder": True,
}  # fmt: skip
OF_FAMILY = {
    "llama": {"use_qk_norm": True, "qkv_bias": True, "bias": True, "sliding_window": 4096, "num_experts": 8,
              "layer_types": ["full_attention", "sliding_attention"]},
    "mistral": {"use_qk_norm": True, "qkv_bias": True, "mlp_bias": True, "num_experts": 8},
    "qwen2": {"qkv_bias": False, "use_qk_norm": True, "mlp_bias": True, "n_routed_experts": 64},
    "qwen2_5_vl_text": {"qkv_bias": False, "use_qk_norm": True, "mlp_bias": True, "n_routed_experts": 64},
    "qwen3": {"qkv_bias": True, "use_qk_norm": False, "mlp_bias": True},
    "qwen2_moe": {"use_qk_norm": True, "mlp_bias": True, "scoring_func": "sigmoid", "n_shared_experts": 2,
                  "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    "qwen3_moe": {"qkv_bias": True, "use_qk_norm": False, "shared_expert_intermediate_size": 512,
                  "scoring_func": "sigmoid", "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    "deepseek_v3": {"rope_interleave": False, "use_expert_bias": True, "moe_router_logit_softcapping": 1.0},
    "bailing_moe_v2": {"use_rmsnorm": False, "norm_head": True, "router_dtype": "bf16", "score_function": "softmax",
                       "moe_router_enable_expert_bias": False, "norm_topk_prob": False},
    "dots1": {"qkv_bias": True, "use_qk_norm": False, "topk_method": "greedy", "moe_layer_freq": 2},
    "seed_oss": {"qkv_bias": True, "use_qk_norm": True, "sliding_window": 4096, "num_experts": 8},
    "phi3": {"qkv_bias": True, "use_qk_norm": True, "mlp_bias": True, "num_experts": 8},
    "glm4_moe": {"scoring_func": "softmax", "sliding_window": 4096},
    "qwen3_next": {"qkv_bias": True, "use_qk_norm": False, "scoring_func": "sigmoid", "layer_scale": True},
    "qwen3_5_text": {"qkv_bias": True, "num_experts": 8, "mtp_use_dedicated_embeddings": True, "layer_scale": True,
                     "mlp_only_layers": [1]},
    "qwen3_5_moe_text": {"qkv_bias": True, "norm_topk_prob": False, "decoder_sparse_step": 2, "layer_scale": True,
                         "mlp_only_layers": [1]},
    "qwen3_vl_moe_text": {"qkv_bias": True, "use_qk_norm": False, "norm_topk_prob": False,
                          "shared_expert_intermediate_size": 512, "scoring_func": "sigmoid"},
    "mixtral": {"qkv_bias": True, "use_qk_norm": True, "scoring_func": "sigmoid", "shared_intermediate_size": 512,
                "rotary_dim": 64},
    "minimax_m2": {"scoring_func": "softmax", "use_qk_norm": False, "qk_norm_type": "per_head",
                   "use_routing_bias": False, "shared_intermediate_size": 512, "attn_type_list": [1, 0],
                   "attention_bias": True, "sliding_window": 4096},
    "olmoe": {"use_qk_norm": False, "scoring_func": "sigmoid", "shared_expert_intermediate_size": 512},
    "ernie4_5_moe": {"use_qk_norm": True, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
                     "first_k_dense_replace": 1},
    "nemotron_h": {"use_qk_norm": True, "sliding_window": 4096, "shared_expert_intermediate_size": 512},
    "gpt_oss": {"use_qk_norm": True, "scoring_func": "sigmoid", "mlp_bias": True,
                "shared_expert_intermediate_size": 512},
    "glm4_moe_lite": {"scoring_func": "softmax", "index_topk": 2048, "moe_layer_freq": 2},
    "deepseek_v32": {"indexer_rope_interleave": True, "rope_interleave": False, "scoring_func": "softmax"},
    "glm_moe_dsa": {"indexer_rope_interleave": False, "rope_interleave": False, "moe_layer_freq": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_that_decide_something_are_refused_and_all_are_named_at_once(name):
    """Negative control of the above."""
    config = CONFIGS[name]
    family = Model.from_hf(config).family
    changes = {field: value for field, value in DECIDING.items() if field not in family.fields}
    assert family.name in OF_FAMILY, f"OF_FAMILY has no fields that make another model of a {family.name}"
    changes |= OF_FAMILY[family.name]
    changes = {field: value for field, value in changes.items() if family.always.get(field) != value}
    for field, value in changes.items():
        with pytest.raises(ReshardError, match=rf"{field} = .* may make another model of the same weights"):
            Model.from_hf(config | {field: value})
    activation = "hidden_act" if "hidden_act" in family.fields else "mlp_hidden_act"
    with pytest.raises(ReshardError) as error:
        Model.from_hf(config | changes | {activation: "gelu"})
    assert all(f"{field} = " in str(error.value) for field in changes), error.value
    assert f"{activation} = gelu cannot be held by Megatron" in str(error.value)
    [names] = re.findall(r"reshard.ignored_config_fields\((.*)\) goes on without them", str(error.value))
    assert {json.loads(quoted) for quoted in names.split(", ")} == set(changes)
    with ignored_config_fields(*changes):
        assert Model.from_hf(config | changes).ignored.keys() == changes.keys()


METADATA = {
    "unk_token_id": 0, "cls_token_id": 1, "image_token_id": 5, "license": "apache-2.0", "trl_version": "0.19.0",
    "unsloth_version": "2025.1", "tokenizer_class": "LlamaTokenizer", "model_name": "mine", "neftune_noise_alpha": 5,
    "internal_version": "7b", "_flash_attn_2_enabled": True,
}  # fmt: skip
HARMLESS = {
    "rope_interleaved": False, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "embedding_multiplier": 1, "logits_scaling": 1.0, "alibi": False, "attention_sinks": False,
    "no_rope_layers": [1, 1], "clip_qkv": None, "is_causal": True, "is_decoder": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", families())
def test_metadata_and_harmless_values_pass_silently_and_unknown_names_are_noted(kind):
    config = published(kind)
    config = {name: value for name, value in config.items() if name != "auto_map"}
    before = Model.from_hf(config)
    assert Model.from_hf(config | METADATA | HARMLESS).notices == before.notices
    made = Model.from_hf(config | {"my_favorite": 7, "another": {"a": 1}, "nothing": None})
    assert made.unread[-2:] == ("my_favorite", "another") and "does not read" in made.notices[-1]
    assert megatron_args(made) == megatron_args(before)


def test_code_of_a_publisher_may_read_any_field_and_known_code_does_not():
    config = next(c for c in CONFIGS.values() if "auto_map" in c)
    assert Model.from_hf(config | {"my_favorite": 7}).unread == ("my_favorite",)
    hub = {kind: f"deepseek-ai/DeepSeek-V3--{name}" for kind, name in config["auto_map"].items()}
    assert Model.from_hf(config | {"auto_map": hub, "my_favorite": 7}).unread == ("my_favorite",)
    other = config | {"auto_map": config["auto_map"] | {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    Model.from_hf(other)
    with pytest.raises(ReshardError, match="my_favorite = 7 may make another model"):
        Model.from_hf(other | {"my_favorite": 7})
    assert set(config["auto_map"].values()) == set(KNOWN_CODE)


# The oracle: what the code of the installed transformers and vLLM reads of a config.

# Of a training loss, of what a call returns, of caches: nothing of what the weights compute.
READ_WITHOUT_EFFECT = {
    "head_dim",  # where the class sets it itself
    "pad_token_id",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "residual_dropout",
    "resid_pdrop",
    "original_max_position_embeddings",  # of Phi-3's caches
    "_attn_implementation",
    # of kernels, and of how weights are made
    "chunk_size",
    "use_mamba_kernels",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_max",
    "time_step_min",  # a caveat of the family's
    # of the larger model that this one is in
    "image_token_id",
    "video_token_id",
}
VLLM_FILES = {"deepseek_v3": "deepseek_v2", "deepseek_v32": "deepseek_v2", "glm_moe_dsa": "deepseek_v2",
              "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5", "ernie4_5_moe": "ernie45_moe",
              "qwen3_vl_moe_text": "qwen3_moe", "phi3": "llama", "qwen2_5_vl_text": "qwen2",
              "bailing_moe_v2": "bailing_moe"}  # fmt: skip
# Families that the installed vLLM has no class for: they convert and train, and it serves none of them.
NOT_IN_VLLM = {"dots1"}
# Families that transformers has no class for, and what stands for the published code.
NOT_IN_TRANSFORMERS = {"bailing_moe_v2": bailing}
# vLLM's own: of other models in the same file, of drafts, or no field.
VLLM_ONLY = {"get_text_config", "get_nemotron_h_config_for_layer", "target_layer_count", "moe_router_dtype",
             "indexer_rope_interleave", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset",
             "max_model_len", "quant_config", "intermediate_size"}  # fmt: skip


def fields_read(path: Path) -> set[str]:
    """The attributes of a config that a module reads."""
    fields = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.search(r"(^|\.)config$", ast.unparse(node.value)):
            fields.add(node.attr)
        if (
            (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("getattr", "hasattr")
                and len(node.args) > 1
            )
            and ast.unparse(node.args[0]).endswith("config")
            and isinstance(node.args[1], ast.Constant)
        ):
            fields.add(node.args[1].value)
    return fields


@pytest.mark.parametrize("kind", families())
def test_every_field_that_transformers_code_reads_is_mapped_or_held_to_its_default(kind):
    import transformers

    family, file = families()[kind], kind.removesuffix("_text")
    folder = Path(transformers.__file__).parent / "models" / file
    if kind in NOT_IN_TRANSFORMERS:
        assert not folder.exists(), f"transformers has {kind} now: see NOT_IN_TRANSFORMERS"
        folder = Path(NOT_IN_TRANSFORMERS[kind].__file__).parent
    read = fields_read(folder / f"modeling_{file}.py")
    if family.wrapped_in[1]:  # whose vision tower is in the same file
        larger = transformers.CONFIG_MAPPING[family.wrapped_in[1]]()
        read -= {"get_text_config", *larger.to_dict(), *larger.vision_config.to_dict()} - family.fields
    assert len(read) > 10
    assert {name for name in read if family.has_no_effect(name)} <= READ_WITHOUT_EFFECT
    methods = {"get_text_config"}
    assert (
        not {name for name in read if not family.has_no_effect(name)}
        - family.fields
        - DEFAULTS[kind].keys()
        - methods
    )


@pytest.mark.parametrize("kind", families())
def test_every_field_that_vllms_code_reads_is_mapped_or_known_to_decide(kind):
    from importlib.util import find_spec

    directory = Path(find_spec("vllm").origin).parent / "model_executor" / "models"
    family = families()[kind]
    file = directory / f"{VLLM_FILES.get(kind, kind)}.py"
    # An entry that a newer vLLM has made untrue is as wrong as one that is missing.
    assert file.exists() != (kind in NOT_IN_VLLM), f"{file.name}: see VLLM_FILES and NOT_IN_VLLM"
    if kind in NOT_IN_VLLM:
        return
    read = fields_read(file)
    assert len(read) >= 8
    known = (
        family.fields | DEFAULTS[kind].keys() | family.always.keys() | DECIDES_ELSEWHERE.keys() | VLLM_ONLY
    )
    assert not {name for name in read if not family.has_no_effect(name)} - known


@pytest.mark.parametrize("kind", families())
def test_what_is_only_noted_is_no_field_of_transformers_class(kind):
    """And a field that its class has at another value than the default is never only noted."""
    from transformers import CONFIG_MAPPING

    family, theirs = families()[kind], CONFIG_MAPPING[kind]().to_dict()
    unmapped = {name for name in theirs if name not in family.fields and not family.has_no_effect(name)}
    assert unmapped == DEFAULTS[kind].keys() and not family.always.keys() & theirs.keys()
    config = published(kind)
    for name in unmapped:
        with pytest.raises(ReshardError, match=f"{name} = 'other' may make another model"):
            Model.from_hf(config | {name: "other"})


@pytest.mark.parametrize("attention_bias", [False, True, None])
def test_qwen2_has_biases_whatever_attention_bias_says(attention_bias):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = next(c for c in CONFIGS.values() if c["architectures"] == ["Qwen2ForCausalLM"])
    model = Model.from_hf(config | {"attention_bias": attention_bias})
    assert megatron_args(model) == megatron_args(Model.from_hf(config)) and model.notices == []
    small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=8)
    made = Qwen2ForCausalLM(Qwen2Config(**small, num_key_value_heads=2, attention_bias=attention_bias))
    biases = {name for name, _ in made.model.layers[0].named_parameters() if name.endswith("bias")}
    assert biases == {f"self_attn.{name}_proj.bias" for name in "qkv"}


# Words


def test_a_sentence_names_the_means_of_the_call_that_was_made(checkpoint, tmp_path):
    source = with_config(checkpoint("qwen3"), tmp_path / "hf", alibi=True, clip_qkv=8.0)
    pasted = "--ignore-config-field alibi --ignore-config-field clip_qkv"
    done = cli("hf-to-mcore", source, tmp_path / "mcore")
    assert (
        done.returncode == 1
        and f"{pasted} goes on without them" in done.stderr
        and "\n" not in done.stderr.strip()
    )
    assert cli("hf-to-mcore", source, tmp_path / "mcore", *pasted.split()).returncode == 0
    with pytest.raises(
        ReshardError, match=r'reshard.ignored_config_fields\("alibi", "clip_qkv"\) goes on without them'
    ):
        hf_to_mcore(source, tmp_path / "other")
    with (
        ignore_hint_for("engine"),
        pytest.raises(ReshardError, match="RESHARD_IGNORE_CONFIG_FIELDS=alibi,clip_qkv in the engine's"),
    ):
        hf_to_mcore(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_nobody_reads_is_a_note_also_in_json(checkpoint, tmp_path):
    source = with_config(checkpoint("llama"), tmp_path / "hf", my_favorite=7, unk_token_id=0)
    note = "LlamaForCausalLM does not read my_favorite, and neither does reshard"
    done = cli("hf-to-mcore", source, tmp_path / "mcore", "--json")
    assert done.returncode == 0 and any(note in notice for notice in json.loads(done.stdout)["notices"])
    done = cli("plan", "--model", source, "--trainer", "tp=2", "--engine", "tp=2")
    assert done.returncode == 0 and note in done.stderr


def test_inspect_and_check_answer_whatever_a_config_means(checkpoint, tmp_path):
    other = with_config(checkpoint("qwen3"), tmp_path / "hf", alibi=True)
    found = inspect(other)
    assert found.family == "qwen3" and found.parameters == inspect(checkpoint("qwen3")).parameters
    assert any(
        re.search("cannot be mapped: .*alibi = True may make another model", notice)
        for notice in found.notices
    )
    done = cli("inspect", other)
    assert done.returncode == 0 and "alibi = True" in done.stderr

    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore")
    assert cli("mcore-to-hf", tmp_path / "mcore", tmp_path / "back").returncode == 0
    for directory, config in ((tmp_path / "mcore", "hf/config.json"), (tmp_path / "back", "config.json")):
        path = directory / config
        path.write_text(json.dumps(json.loads(path.read_text()) | {"alibi": True}))
        done = cli("check", directory)  # the bytes of the config are not those that were written
        assert (
            done.returncode == 1 and "alibi = True" in done.stderr and f"changed: {config}" in done.stdout
        ), done
        assert "0 of " in done.stdout


def test_inspect_shows_what_a_directory_of_an_unknown_architecture_holds(tmp_path):
    [gemma] = [entry["config"] for entry in PUBLISHED if entry["name"] == "google/gemma-2-2b"]
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    save_file(
        {"a.weight": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)},
        tmp_path / "model.safetensors",
    )
    found = inspect(tmp_path)
    assert (found.family, found.architecture, found.parameters, found.size_bytes) == (
        "not mapped",
        "Gemma2ForCausalLM",
        17,
        58,
    )
    assert "Gemma2ForCausalLM is not supported" in found.notices[0]
    done = cli("inspect", tmp_path, "--tensors")
    assert done.returncode == 0 and "a.weight" in done.stdout and "is not supported" in done.stderr
    (tmp_path / "config.json").write_text("{")
    assert cli("inspect", tmp_path).returncode == 1


def test_directories_that_are_no_model_are_one_sentence(tmp_path):
    lora, gguf = tmp_path / "lora", tmp_path / "gguf"
    lora.mkdir()
    gguf.mkdir()
    (lora / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B", "peft_type": "LORA"})
    )
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, lora / "adapter_model.safetensors")
    (gguf / "model-q4_k_m.gguf").write_bytes(b"GGUF")
    for directory, sentence in (
        (
            lora,
            r"is a LoRA adapter of Qwen/Qwen3-8B \(adapter_config.json\), not a model: reshard lora-merge adds it"
            r"|adapter_config.json names Qwen/Qwen3-8B, which is neither a directory here nor a model of the hub",
        ),
        (
            gguf,
            (
                r"holds a model in llama.cpp's format \(model-q4_k_m.gguf\), which is not read: name the "
                r"Hugging Face directory"
            ),
        ),
    ):
        for arguments in (("hf-to-mcore", directory, tmp_path / "out"), ("inspect", directory),
                          ("diff", directory, directory), ("memory", "--model", directory, "--tp", "1")):  # fmt: skip
            done = cli(*arguments)
            assert (
                done.returncode == 1
                and re.search(sentence, done.stderr)
                and len(done.stderr.splitlines()) == 1
            ), done
    assert not (tmp_path / "out").exists()


# Amounts


def test_amounts_that_are_the_same_float32_make_the_same_model(checkpoint, tmp_path):
    near = float(torch.tensor(1e-6))
    assert near != 1e-6 and same_value(near, 1e-6) and not same_value(1e-6, 1.0001e-6)
    source = checkpoint("qwen3")
    assert diff(source, with_config(source, tmp_path / "near", rms_norm_eps=near)).equal
    assert diff(source, with_config(source, tmp_path / "far", rms_norm_eps=1.0001e-6)).fields.keys() == {
        "rms_norm_eps"
    }
    model = Model.from_hf(json.loads((source / "config.json").read_text()))
    args = megatron_args(model)
    check_args(model, args | {"layernorm_epsilon": near}, "args", "")
    with pytest.raises(ReshardError, match="layernorm_epsilon is 1.0001e-06"):
        check_args(model, args | {"layernorm_epsilon": 1.0001e-6}, "args", "")
