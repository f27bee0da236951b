"""Every seeded fault fails the parity gate and is located; nothing diverges in the same model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.starting.ranks import run_on_ranks
from tests.tools.parity_runs import change_config, ranks_of, run, with_a_fault


def swapped(tensors, one: str, two: str) -> None:
    tensors[one], tensors[two] = tensors[two].clone(), tensors[one].clone()


def gate_and_up(tensors, config):
    swapped(tensors, "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")


def one_head(tensors, config):
    q = tensors["model.layers.2.self_attn.q_proj.weight"]
    size = config["head_dim"]
    tensors["model.layers.2.self_attn.q_proj.weight"] = torch.cat(
        [q[size : 2 * size], q[:size], q[2 * size :]]
    )


def rope_base(tensors, config):
    config["rope_parameters"]["rope_theta"] *= 2


def partial_rotary(tensors, config):
    config["rope_parameters"]["partial_rotary_factor"] = 0.25


def query_norm(tensors, config):
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones_like(
        tensors["model.layers.0.self_attn.q_norm.weight"]
    )


def router_bias(tensors, config):
    for name in [n for n in tensors if n.endswith("e_score_correction_bias")]:
        tensors[name] = torch.zeros_like(tensors[name])


def top_k_scaling(tensors, config):
    config["routed_scaling_factor"] = 1.0


def one_expert(tensors, config):
    for name in [name for name in tensors if "layers.3" in name and ".experts.0." in name]:
        swapped(tensors, name, name.replace(".experts.0.", ".experts.1."))


def sinks(tensors, config):
    tensors["model.layers.1.self_attn.sinks"] = tensors["model.layers.1.self_attn.sinks"].roll(1)


def not_transposed(tensors, config):
    name = "model.layers.2.mlp.experts.down_proj"  # as wide as high
    tensors[name] = tensors[name].mT.contiguous()


def shared_gate(tensors, config):
    tensors["model.layers.2.mlp.shared_expert_gate.weight"] *= -1


def heads_in_turn(tensors, config):
    """Queries, keys and values as Megatron has them, each group's in turn."""
    name = "model.layers.1.self_attn.qkv_proj.weight"
    q, k, v = (t.reshape(2, -1, 8, 64) for t in tensors[name].split([64, 16, 16]))
    tensors[name] = torch.cat([q, k, v], dim=1).reshape(96, 64)


def value_bias(tensors, config):
    tensors["model.layers.1.self_attn.v_proj.bias"] *= -1


def vocabulary(tensors, config):
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)


@pytest.mark.parametrize(("variant", "fault", "layout", "place", "differing"), [
    ("qwen3", gate_and_up, {"tp": 2}, "the MLP of layer 1", ["gate_proj", "up_proj"]),
    ("qwen3", one_head, {"pp": 2}, "the attention of layer 2", ["q_proj"]),
    ("seed-oss", value_bias, {"tp": 4}, "the attention of layer 1", ["v_proj.bias"]),
    ("phi4", heads_in_turn, {"tp": 2}, "the attention of layer 1", ["qkv_proj"]),
    ("qwen3", rope_base, {}, "the attention of layer 0", []),
    ("qwen3", query_norm, {"tp": 2, "pp": 2}, "the attention of layer 0", ["q_norm"]),
    ("deepseek-v3", router_bias, {}, "the experts of layer 1", ["gate.e_score_correction_bias"]),
    ("deepseek-v3", top_k_scaling, {"ep": 2, "etp": 1}, "the experts of layer 1", []),
    ("glm4-moe", partial_rotary, {"tp": 2}, "the attention of layer 0", []),
    ("glm4-moe", router_bias, {}, "the experts of layer 1", ["gate.e_score_correction_bias"]),
    ("qwen3-moe", one_expert, {"ep": 2, "etp": 1}, "the experts of layer 3", ["experts.0.", "experts.1."]),
    ("mixtral", one_expert, {}, "the experts of layer 3", ["experts.0.", "experts.1."]),
    ("qwen2-moe", shared_gate, {"tp": 2, "ep": 2, "etp": 1}, "the experts of layer 2", ["shared_expert_gate"]),
    ("minimax-m2", query_norm, {"tp": 2}, "the attention of layer 0", ["q_norm"]),
    ("minimax-m2", router_bias, {"pp": 2}, "the experts of layer 0", ["e_score_correction_bias"]),
    ("olmoe", query_norm, {"tp": 2}, "the attention of layer 0", ["q_norm"]),
    ("olmoe", one_expert, {"ep": 2, "etp": 1}, "the experts of layer 3", ["experts.0.", "experts.1."]),
    ("dots1", query_norm, {"tp": 2}, "the attention of layer 0", ["q_norm"]),
    ("dots1", router_bias, {"pp": 2}, "the experts of layer 1", ["gate.e_score_correction_bias"]),
    ("ernie", router_bias, {"tp": 2}, "the experts of layer 1", ["e_score_correction_bias"]),
    ("gpt-oss", sinks, {"tp": 2, "etp": 1}, "the attention of layer 1", ["sinks"]),
    ("gpt-oss", not_transposed, {"pp": 2}, "the experts of layer 2", ["down_proj.weight"]),
    ("qwen3", vocabulary, {"tp": 2}, "the embedding", ["embed_tokens"]),
])  # fmt: skip
def test_a_seeded_fault_is_caught_and_located(
    variant, fault, layout, place, differing, megatron_of, tmp_path
):
    hf, mcore = megatron_of(variant)
    shutil.copytree(hf, tmp_path / "hf")
    tensors, config = (
        load_file(hf / "model.safetensors"),
        json.loads((hf / "config.json").read_text(encoding="utf-8")),
    )
    fault(tensors, config)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    report = run(tmp_path / "hf", mcore, layout)
    assert not report["ok"] and any(sentence.startswith("max_abs") for sentence in report["exceeded"])
    if variant == "deepseek-v3":
        # A bias that is gone sends tokens elsewhere; a scale does in later layers, whose inputs it
        # has changed.
        assert report["routing"]["differing"] and any(
            sentence.startswith("routing_margin") for sentence in report["exceeded"]
        )
    places = run_on_ranks(
        ranks_of(layout), "find", str(tmp_path / "hf"), str(mcore), layout, module="parity_on_cpu"
    )
    sentence, diverging_place, names = places[0]
    assert diverging_place == place and all(other == places[0] for other in places), sentence
    assert all(any(part in name for name in names) for part in differing) and all(
        any(part in name for part in differing) for name in names
    )
    assert differing or "equal bit for bit, and the configs differ in" in sentence


def test_nothing_diverges_in_the_same_model(megatron_of):
    for variant, layout in (("deepseek-v3", {"tp": 2, "pp": 2}), ("llama-rope-tied", {"pp": 2, "vpp": 2}),
                            ("llama-bias", {"tp": 2}), ("gpt-oss", {"tp": 2, "ep": 2, "etp": 1})):  # fmt: skip
        hf, mcore = megatron_of(variant)
        assert (
            run_on_ranks(ranks_of(layout), "find", str(mcore), str(hf), layout, module="parity_on_cpu")[0]
            is None
        )


def test_config_fields_that_make_two_models_fail_by_name(megatron_of, tmp_path):
    hf, mcore = megatron_of("llama-rope-tied")
    shutil.copytree(hf, tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    plain = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    change_config(tmp_path / "hf", rope_parameters=plain)
    report = run(tmp_path / "hf", mcore, lengths=(9,))
    sentence = "the configs make two models of the same weights: rope_type is 'default' in A, 'llama3' in B"
    assert not report["ok"] and report["exceeded"][0] == sentence and "factor" in report["fields"]
    change_config(tmp_path / "hf", rope_parameters=config["rope_parameters"], rms_norm_eps=1e-6 * (1 + 1e-7))
    report = run(tmp_path / "hf", mcore)
    assert report["ok"] and report["fields"] == {}, "the same number in two spellings"


def test_another_number_of_experts_for_each_token_fails_by_name(megatron_of, tmp_path):
    hf, mcore = megatron_of("qwen3-moe")
    shutil.copytree(hf, tmp_path / "hf")
    change_config(tmp_path / "hf", num_experts_per_tok=1)
    report = run(tmp_path / "hf", mcore, lengths=(9,))
    assert not report["ok"] and report["routing"] is None
    assert report["exceeded"][0].startswith(
        "the configs make two models of the same weights: num_experts_per_tok is 1 in A"
    )
    assert any(
        note.startswith("the experts were not compared, since the configs differ")
        for note in report["unmeasured"]
    )


def test_the_assertion_says_where_the_two_diverge(megatron_of, tmp_path):
    hf, mcore = megatron_of("qwen3")
    name = "model.layers.2.self_attn.o_proj.weight"
    wrong = with_a_fault(hf, tmp_path / "wrong", name, 1.5)
    (sentence,) = run_on_ranks(1, "assertion", str(wrong), str(mcore), module="parity_on_cpu")
    assert "the attention of layer 2 diverges first" in sentence and name in sentence
    assert "max_abs is" in sentence
