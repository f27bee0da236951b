"""The parity gate: the same model passes, at any layout; what cannot be compared is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, hf_to_mcore, mcore_to_hf
from reshard.models.family import families
from reshard.parity import Limits, Scores, metrics_of, parity
from reshard.parity.prompts import random_prompts
from reshard.parity.routing import compare_routing
from reshard.parity.systems.base import ScoringOptions, System
from reshard.parity.systems.huggingface import HuggingFace
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import VARIANTS
from tests.tools.parity_runs import run

# A variant, the layout that it is written at, and the one that it is loaded and run at: each family, and each
# axis of a layout, once.
SAME = [
    ("llama", MegatronLayout(tp=2), dict(pp=2, vpp=2)),
    ("llama-rope-tied", MegatronLayout(pp=2), dict(tp=2, pp=2)),
    ("llama-bias", MegatronLayout(), dict(tp=2)),
    ("mistral", MegatronLayout(tp=4), dict(pp=2, num_layers_in_first_pipeline_stage=1)),
    ("qwen2", MegatronLayout(pp=2), dict(tp=4)),
    ("qwen3", MegatronLayout(tp=2, pp=2), dict(tp=2)),
    ("qwen3-moe", MegatronLayout(ep=4, etp=1), dict(tp=2, ep=2, etp=1)),
    ("qwen3-moe-mixed", MegatronLayout(tp=2, ep=2, etp=2), dict(pp=2, ep=2, etp=1)),
    ("qwen3-moe-step", MegatronLayout(pp=2), dict(tp=2, etp=2)),
    ("deepseek-v3", MegatronLayout(tp=2, ep=2, etp=1), dict(tp=2, pp=2, ep=2, etp=1)),
    ("deepseek-v3-no-q-lora", MegatronLayout(pp=2), dict(ep=2, etp=1)),
    ("glm4-moe", MegatronLayout(tp=2, ep=2, etp=1), dict(tp=2, ep=2, etp=1)),
    ("mixtral", MegatronLayout(pp=2, ep=2, etp=1), dict(ep=2, etp=1)),
    ("seed-oss", MegatronLayout(pp=2), dict(tp=4)),
    ("phi3", MegatronLayout(pp=2), dict(tp=4)),
    ("qwen2-moe", MegatronLayout(pp=2, ep=2, etp=1), dict(tp=4, ep=2, etp=1)),
    ("minimax-m2", MegatronLayout(tp=2, ep=2, etp=1), dict(tp=4, ep=2, etp=1)),
    ("olmoe", MegatronLayout(pp=2, ep=2, etp=1), dict(tp=2, ep=2, etp=1)),
    ("dots1", MegatronLayout(pp=2, ep=2, etp=1), dict(tp=4, ep=2, etp=1)),
    ("ernie", MegatronLayout(pp=2, ep=2, etp=1), dict(tp=2, ep=2, etp=1)),
    ("gpt-oss", MegatronLayout(pp=2, ep=2, etp=1), dict(tp=2, ep=2, etp=1)),
    ("glm4-moe-lite", MegatronLayout(pp=2), dict(tp=2, ep=2, etp=1)),
    ("deepseek-v32", MegatronLayout(tp=2, ep=2, etp=1), dict(ep=2, etp=1)),
    ("glm-moe-dsa-shared", MegatronLayout(pp=2), dict(pp=2)),
]


@pytest.mark.parametrize(("variant", "written", "loaded"), SAME, ids=lambda v: str(v))
def test_a_converted_model_passes_at_any_layout(variant, written, loaded, megatron_of):
    hf, mcore = megatron_of(variant, written)
    report = run(hf, mcore, loaded, batch_size=2)
    assert report["ok"] and report["overall"]["tokens"] == 2 * (8 + 32) and len(report["prompts"]) == 4
    assert report["overall"]["max_abs"] < 1e-4 and report["overall"]["mean_abs"] < 1e-6
    assert report["overall"]["argmax_agreement"] == 1.0 and report["overall"]["kl"] < 1e-7
    assert all(".experts." in name for name in report["not_looked_at"]), "what a prompt of text runs through"
    if families()[VARIANTS[variant].model_type].has_experts:
        config = VARIANTS[variant].to_dict()
        dense = config.get("first_k_dense_replace", 0)
        layers = {"qwen3-moe-mixed": 3, "qwen3-moe-step": 2, "ernie": 2}.get(variant, 4 - dense)
        assert report["routing"]["choices"] == layers * 80 and report["routing"]["differing"] == 0
    else:
        assert report["routing"] is None


@pytest.mark.parametrize("variant, way", [("qwen3-moe", "fp8_per_channel"), ("qwen3", "nvfp4")])
def test_weights_by_compressed_tensors_are_compared_dequantized(variant, way, megatron_of, tmp_path):
    _, mcore = megatron_of(variant)
    mcore_to_hf(mcore, tmp_path / "quantized", quantize=way, dtype="bf16")
    hf_to_mcore(tmp_path / "quantized", tmp_path / "mcore", transformer_impl="local")
    report = run(tmp_path / "quantized", tmp_path / "mcore")
    assert report["ok"] and report["overall"]["max_abs"] < 1e-4 and report["overall"]["tokens"] == 80
    assert not run(tmp_path / "quantized", mcore)["ok"], "other weights: those before they were quantized"


def test_padding_changes_nothing(megatron_of):
    hf, mcore = megatron_of("qwen3")
    alone, padded = run(hf, mcore), run(hf, mcore, batch_size=4)
    assert abs(alone["overall"]["mean_abs"] - padded["overall"]["mean_abs"]) < 1e-6


def test_packed_prompts_do_not_see_each_other(megatron_of):
    hf, mcore = megatron_of("qwen3-moe")
    alone, packed = (run(mcore, hf, batch_size=n, packed=n > 1) for n in (1, 3))
    assert "cannot run packed prompts: leave out --packed" in packed
    system = HuggingFace(hf, "fp32")
    prompts = random_prompts(4, 1000, [9, 33, 21])
    one, other = (
        system.score(prompts, ScoringOptions(routing=True)),
        system.score(prompts, ScoringOptions(batch_size=3, packed=True, routing=True)),
    )
    metrics = metrics_of(one, other)
    assert metrics.max_abs < 1e-5 and metrics.tokens == sum(map(len, prompts)) - 4 and alone["ok"]
    assert not compare_routing([s.choices for s in one], [s.choices for s in other]).differing


def test_noise_scores_the_same_system_again_and_in_bf16(megatron_of):
    noise = run(*megatron_of("llama"), noise=True)["noise"]
    assert noise["A again"]["max_abs"] == 0 and 1e-4 < noise["A in bf16"]["mean_abs"] < 0.02
    assert 1.0001 < noise["A in bf16"]["token_mult_prob_error"] < 1.02


def test_weights_that_transformers_misreads_are_refused(megatron_of, tmp_path):
    (dense, mcore), (_, experts) = megatron_of("qwen3"), megatron_of("qwen3-moe")
    mcore_to_hf(experts, tmp_path / "experts", quantize="nvfp4", dtype="bf16")
    with pytest.raises(
        ReshardError,
        match="experts in nvfp4 without their global scale, as those of .*experts: compare the Mega",
    ):
        parity(str(tmp_path / "experts"), str(experts))
    (tmp_path / "modelopt").mkdir()
    config = json.loads((Path(dense) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "modelopt" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ReshardError,
        match="does not read weights that ModelOpt has quantized, as those of .*modelopt: compare",
    ):
        parity(str(tmp_path / "modelopt"), str(mcore))


def test_both_systems_are_opened_before_either_is_scored(megatron_of, tmp_path):
    hf, _ = megatron_of("qwen3")
    (tmp_path / "config-alone").mkdir()
    shutil.copy(hf / "config.json", tmp_path / "config-alone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReshardError, match="empty is not a checkpoint: it has no config.json"):
        parity(str(tmp_path / "config-alone"), str(tmp_path / "empty"))


def test_other_vocabularies_and_missing_processes_are_refused(megatron_of, tmp_path):
    hf, mcore = megatron_of("qwen3")
    config = json.loads((hf / "config.json").read_text(encoding="utf-8")) | {"vocab_size": 999}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(hf / "model.safetensors")
    tensors |= {name: tensors[name][:999].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert "A has a vocabulary of 999 tokens, B of 1000" in run(tmp_path / "hf", mcore)
    assert "A is a LlamaForCausalLM, B a Qwen3ForCausalLM" in run(megatron_of("llama")[0], mcore)
    [error] = run_on_ranks(1, "run", str(hf), str(mcore), {"tp": 2}, {"prompts": 1}, module="parity_on_cpu")
    assert (
        "TP2 needs 2 processes or a multiple of them, and there are 1: start it with torchrun --nproc-per-node 2"
        in error
    )
    assert "prompt 0 has 257 tokens, more than the model's context of 256" in run(
        hf, mcore, prompts=[[1] * 257]
    )


def test_a_refused_comparison_does_not_break_the_next_one(megatron_of):
    hf, mcore = megatron_of("qwen3")
    [(error, report)] = run_on_ranks(1, "again", str(mcore), str(hf), module="parity_on_cpu")
    assert "prompt 0 has 1 token" in error and report["ok"], (error, report)


class ConstantSystem(System):
    """A system that gives every prompt of three tokens the same scores, with distributions if it
    `keeps` them."""

    spread = False

    def __init__(self, directory, keeps=True):
        self.name, self.model, self.keeps = "constant", HuggingFace(directory, "fp32").model, keeps

    def score(self, prompts, options):
        kept = options.kept_of(len(prompts)) if self.keeps else [0] * len(prompts)
        size = self.model.symbols["V"]
        rows = np.full((2, size), -np.log(size))
        return [Scores(np.full(2, -1.0), np.zeros(2, int), rows[:n] if n else None) for n in kept]

    def close(self):
        pass


def test_a_limit_on_a_figure_that_was_not_measured_fails_unless_it_is_a_default(checkpoint):
    def compare(limits=None, **options):
        a, b = ConstantSystem(checkpoint("qwen3")), ConstantSystem(checkpoint("qwen3"), **options)
        return parity(a, b, [[1, 2, 3]] * 3, dtype="fp32", limits=limits)

    whole, without = compare(), compare(keeps=False)
    assert whole.ok and whole.overall.kl_tokens == 6 and whole.unmeasured == []
    assert without.ok and without.overall.kl is None, "a default limit"
    [sentence] = without.unmeasured
    assert sentence.startswith("kl was not measured") and without.to_dict()["unmeasured"] == [sentence]
    assert not compare(Limits(kl=1e-3), keeps=False).ok and compare(Limits(kl=1e-3)).ok
    assert not compare(lambda dtype: Limits.of_dtype(dtype, routing_margin=0.1)).ok, (
        "this model has no experts"
    )
