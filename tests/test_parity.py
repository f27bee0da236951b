"""The parity gate: the same model passes, at any layout; every seeded fault is caught."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from reshard import MegatronLayout, ReshardError, hf_to_mcore, mcore_to_hf
from reshard.cli.main import cli
from reshard.parity import Limits, Scores, check_rollout, metrics_of, parity
from reshard.parity.huggingface import HuggingFace
from reshard.parity.prompts import check_prompts, random_prompts, read_prompts, tokenizer_of
from reshard.parity.routing import compare_routing
from reshard.parity.systems import Scoring, System
from tests.checkpoints import make
from tests.ranks import run_on_ranks, run_to_the_end, torchrun
from tests.test_report import Parsed, assert_stands_alone
from tests.warm import python_of_trainer

TP1 = MegatronLayout()
# A variant, the layout that it is written at, and the one that it is loaded and run at.
SAME = [
    ("llama", MegatronLayout(tp=2), dict(pp=2, vpp=2)),
    ("llama-rope-tied", MegatronLayout(pp=2), dict(tp=2, pp=2)),
    ("llama-bias", MegatronLayout(), dict(tp=2)),
    ("llama-mha", MegatronLayout(tp=4), dict(pp=2, num_layers_in_first_pipeline_stage=1)),
    ("qwen2", MegatronLayout(pp=2), dict(tp=4)),
    ("qwen2-tied", MegatronLayout(tp=2), dict(pp=2)),
    ("qwen3", MegatronLayout(tp=2, pp=2), dict(tp=2)),
    ("qwen3-tied", MegatronLayout(), dict(tp=2, pp=2)),
    ("qwen3-moe", MegatronLayout(ep=4, etp=1), dict(tp=2, ep=2, etp=1)),
    ("qwen3-moe-mixed", MegatronLayout(tp=2, ep=2, etp=2), dict(pp=2, ep=2, etp=1)),
    ("qwen3-moe-step", MegatronLayout(pp=2), dict(tp=2, ep=2, etp=2)),
    ("deepseek-v3", MegatronLayout(tp=2, ep=2, etp=1), dict(tp=2, pp=2, ep=2, etp=1)),
    ("deepseek-v3-no-q-lora", MegatronLayout(pp=2), dict(ep=4, etp=1)),
    ("glm4-moe", MegatronLayout(tp=2, ep=2, etp=1), dict(tp=2, pp=2, ep=2, etp=1)),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A variant's Hugging Face directory, and its Megatron checkpoint at a layout."""
    made = {}

    def get(variant: str, layout: MegatronLayout = TP1):
        if (variant, layout) not in made:
            folder = tmp_path_factory.mktemp(variant)
            make(folder / "hf", variant)
            hf_to_mcore(folder / "hf", folder / "mcore", layout, transformer_impl="local")
            made[variant, layout] = folder / "hf", folder / "mcore"
        return made[variant, layout]

    return get


def ranks_of(sizes: dict) -> int:
    layout = MegatronLayout(**sizes)
    return layout.pp * max(layout.tp, layout.ep * layout.expert_tp)


def run(a, b, layout=None, **options):
    """The report of the first rank; all ranks have the same."""
    arguments = str(a), str(b), layout or {}, {"prompts": 4, "lengths": (9, 33)} | options
    results = run_on_ranks(ranks_of(layout or {}), "run", *arguments, module="parity_on_cpu")
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize(("variant", "written", "loaded"), SAME, ids=lambda v: str(v))
def test_a_converted_model_is_the_model_at_any_layout(variant, written, loaded, converted):
    hf, mcore = converted(variant, written)
    report = run(hf, mcore, loaded, batch_size=2)
    assert report["ok"] and report["overall"]["tokens"] == 2 * (8 + 32) and len(report["prompts"]) == 4
    assert report["overall"]["max_abs"] < 1e-4 and report["overall"]["mean_abs"] < 1e-6
    assert report["overall"]["argmax_agreement"] == 1.0 and report["overall"]["kl"] < 1e-7
    if "moe" in variant or "deepseek" in variant:
        layers = {"qwen3-moe": 4, "qwen3-moe-step": 2}.get(variant, 3)
        assert report["routing"]["choices"] == layers * 80 and report["routing"]["differing"] == 0
    else:
        assert report["routing"] is None


@pytest.mark.parametrize("variant, way", [("qwen3-moe", "fp8_per_channel"), ("qwen3", "nvfp4")])
def test_of_a_checkpoint_by_compressed_tensors_the_weights_are_compared(variant, way, converted, tmp_path):
    _, mcore = converted(variant)
    mcore_to_hf(mcore, tmp_path / "quantized", quantize=way, dtype="bf16")
    hf_to_mcore(tmp_path / "quantized", tmp_path / "mcore", transformer_impl="local")
    report = run(tmp_path / "quantized", tmp_path / "mcore")
    assert report["ok"] and report["overall"]["max_abs"] < 1e-4 and report["overall"]["tokens"] == 80
    assert not run(tmp_path / "quantized", mcore)["ok"], "other weights: those before they were quantized"


def test_weights_that_transformers_would_read_as_others_are_refused(converted, tmp_path):
    (dense, mcore), (_, experts) = converted("qwen3"), converted("qwen3-moe")
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
    for part in ("gate_proj", "up_proj", "down_proj"):
        swapped(
            tensors,
            f"model.layers.3.mlp.experts.0.{part}.weight",
            f"model.layers.3.mlp.experts.1.{part}.weight",
        )


def vocabulary(tensors, config):
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)


@pytest.mark.parametrize(("variant", "fault", "layout", "place", "differing"), [
    ("qwen3", gate_and_up, {"tp": 2}, "the MLP of layer 1", ["gate_proj", "up_proj"]),
    ("qwen3", one_head, {"pp": 2}, "the attention of layer 2", ["q_proj"]),
    ("qwen3", rope_base, {}, "the attention of layer 0", []),
    ("qwen3", query_norm, {"tp": 2, "pp": 2}, "the attention of layer 0", ["q_norm"]),
    ("deepseek-v3", router_bias, {}, "the experts of layer 1", ["gate.e_score_correction_bias"]),
    ("deepseek-v3", top_k_scaling, {"ep": 2, "etp": 1}, "the experts of layer 1", []),
    ("glm4-moe", partial_rotary, {"tp": 2}, "the attention of layer 0", []),
    ("glm4-moe", router_bias, {}, "the experts of layer 1", ["gate.e_score_correction_bias"]),
    ("qwen3-moe", one_expert, {"ep": 2, "etp": 1}, "the experts of layer 3", ["experts.0.", "experts.1."]),
    ("qwen3", vocabulary, {"tp": 2}, "the embedding", ["embed_tokens"]),
])  # fmt: skip
def test_a_seeded_fault_is_caught_and_located(variant, fault, layout, place, differing, converted, tmp_path):
    hf, mcore = converted(variant)
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
        # A bias that is gone sends tokens elsewhere; a scale does in later layers, whose inputs it has changed.
        assert report["routing"]["differing"] and any(
            sentence.startswith("routing_margin") for sentence in report["exceeded"]
        )
    places = run_on_ranks(
        ranks_of(layout), "find", str(tmp_path / "hf"), str(mcore), layout, module="parity_on_cpu"
    )
    sentence, found, names = places[0]
    assert found == place and all(other == places[0] for other in places), sentence
    assert all(any(part in name for name in names) for part in differing) and all(
        any(part in name for part in differing) for name in names
    )
    assert differing or "equal bit for bit, and the configs differ in" in sentence


def test_nothing_departs_in_the_same_model(converted):
    for variant, layout in (("deepseek-v3", {"tp": 2, "pp": 2}), ("llama-rope-tied", {"pp": 2, "vpp": 2})):
        hf, mcore = converted(variant)
        assert (
            run_on_ranks(ranks_of(layout), "find", str(mcore), str(hf), layout, module="parity_on_cpu")[0]
            is None
        )


def test_padding_changes_nothing(converted):
    hf, mcore = converted("qwen3")
    alone, padded = run(hf, mcore), run(hf, mcore, batch_size=4)
    assert abs(alone["overall"]["mean_abs"] - padded["overall"]["mean_abs"]) < 1e-6


def test_packed_prompts_do_not_see_each_other(converted):
    hf, mcore = converted("qwen3-moe")
    alone, packed = (run(mcore, hf, batch_size=n, packed=n > 1) for n in (1, 3))
    assert "cannot run packed prompts: leave out --packed" in packed
    system = HuggingFace(hf, "fp32")
    prompts = random_prompts(4, 1000, [9, 33, 21])
    one, other = (
        system.score(prompts, Scoring(routing=True)),
        system.score(prompts, Scoring(batch_size=3, packed=True, routing=True)),
    )
    metrics = metrics_of(one, other)
    assert metrics.max_abs < 1e-5 and metrics.tokens == sum(map(len, prompts)) - 4 and alone["ok"]
    assert not compare_routing([s.choices for s in one], [s.choices for s in other]).differing


@pytest.fixture(scope="module")
def trained_pair(trained, tmp_path_factory):
    """A trained model with its tokenizer, and its Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("trained-pair")
    shutil.copytree(trained, folder / "hf")
    change_config(folder / "hf", unk_token_id=None)
    hf_to_mcore(folder / "hf", folder / "mcore", MegatronLayout(pp=2), transformer_impl="local")
    return folder / "hf", folder / "mcore"


def change_config(directory: Path, **fields) -> None:
    """Set fields of a config; those that are None are taken out."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | fields
    kept = {name: value for name, value in config.items() if value is not None or name not in fields}
    path.write_text(json.dumps(kept), encoding="utf-8")


def with_a_fault(source: Path, directory: Path, name: str, factor: float) -> Path:
    """A copy of a Hugging Face directory with one tensor scaled."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensors[name] * factor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


TEXT = (
    "The weights of a language model live in four places, and every one of them has names of its own.",
    "def add(a, b):\n    return a + b\n\nassert add(2, 3) == 5",
    "Paris is the capital of France, and Rome is the capital of Italy.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987",
) * 3  # fmt: skip


def test_a_trained_model_in_bf16_differs_by_rounding_alone_and_a_fault_of_one_percent_does_not(
    trained_pair, tmp_path
):
    hf, mcore = trained_pair
    (tmp_path / "prompts").write_text(
        "\n".join(json.dumps({"text": text}) for text in TEXT), encoding="utf-8"
    )
    command = [python_of_trainer(), "-m", "reshard", "parity", "--dtype", "bf16", "--locate", "--json"]
    command += ["--prompts", str(tmp_path / "prompts"), "--html", str(tmp_path / "page.html")]
    done = subprocess.run([*command, str(hf), str(mcore)], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], done.stderr
    assert report["overall"]["mean_abs"] > 0.01, "in bf16 the two do differ"
    assert 0.5 < report["rounding"]["ratio"] < report["rounding"]["high"] < 1.5
    assert report["rounding"]["in_fp32"] < 0.01 and report["covered"] == "positions up to 8,191 of 8,192"
    page = Parsed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert json.dumps(TEXT[2]) in page.cells, "prompts as text"

    name = "model.layers.15.self_attn.o_proj.weight"
    wrong = with_a_fault(hf, tmp_path / "wrong", name, 1.01)
    done = subprocess.run([*command, str(wrong), str(mcore)], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and "this is no rounding" in done.stderr, done.stderr
    assert report["rounding"]["high"] < 1.5, "bf16 alone does not show it"
    sentence = report["located"]["sentence"]
    assert "the attention of layer 15 departs first" in sentence and name in sentence
    page = Parsed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert f"Where they depart: {sentence}." in page.text


def test_where_a_limit_of_ones_own_is_exceeded_by_rounding_that_is_what_is_said(trained_pair):
    hf, mcore = trained_pair
    command = [python_of_trainer(), "-m", "reshard", "parity", str(hf), str(mcore), "--dtype", "bf16"]
    done = subprocess.run(
        [*command, "--random", "3", "--max-mean-abs", "0.01", "--locate"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "mean_abs is 0.0" in done.stderr, done.stderr
    assert (
        "no module's output departs for the worst prompt: in each the two differ by no more than rounding"
        in done.stdout
    )


def test_too_few_tokens_decide_nothing(trained_pair):
    hf, mcore = trained_pair
    command = [python_of_trainer(), "-m", "reshard", "parity", str(hf), str(mcore), "--dtype", "bf16"]
    done = subprocess.run([*command, "--random", "1"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "A and B cannot be held against the limits: 15 tokens are too few" in done.stderr


def test_configs_that_make_two_models_of_the_same_weights_fail_by_name(converted, tmp_path):
    hf, mcore = converted("llama-rope-tied")
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


def test_what_only_far_positions_show_is_seen_by_a_prompt_of_few_tokens(trained_pair):
    hf, mcore = trained_pair
    (other,) = run_on_ranks(1, "slower", str(hf), str(mcore), module="parity_on_cpu")
    assert other["overall"]["max_abs"] < 1e-3, "not at the first 32 positions"
    assert other["exceeded"] and all(s.startswith("at positions up to 8,191") for s in other["exceeded"])
    assert run(hf, mcore, {}, prompts=2, lengths=(32,))["ok"]


def test_both_systems_are_looked_at_before_either_is_run(converted, tmp_path):
    hf, _ = converted("qwen3")
    (tmp_path / "config-alone").mkdir()
    shutil.copy(hf / "config.json", tmp_path / "config-alone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReshardError, match="empty is no checkpoint: it has no config.json"):
        parity(str(tmp_path / "config-alone"), str(tmp_path / "empty"))


def test_an_assertion_says_where_the_two_depart(converted, tmp_path):
    hf, mcore = converted("qwen3")
    name = "model.layers.2.self_attn.o_proj.weight"
    wrong = with_a_fault(hf, tmp_path / "wrong", name, 1.5)
    (sentence,) = run_on_ranks(1, "assertion", str(wrong), str(mcore), module="parity_on_cpu")
    assert "the attention of layer 2 departs first" in sentence and name in sentence
    assert "max_abs is" in sentence


def test_the_noise_floor_is_the_same_system_again_and_in_bf16(converted):
    noise = run(*converted("llama"), noise=True)["noise"]
    assert noise["A again"]["max_abs"] == 0 and 1e-4 < noise["A in bf16"]["mean_abs"] < 0.02
    assert 1.0001 < noise["A in bf16"]["token_mult_prob_error"] < 1.02


def test_other_vocabularies_and_layouts_without_their_processes_are_refused(converted, tmp_path):
    hf, mcore = converted("qwen3")
    config = json.loads((hf / "config.json").read_text(encoding="utf-8")) | {"vocab_size": 999}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(hf / "model.safetensors")
    tensors |= {name: tensors[name][:999].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert "A has a vocabulary of 999 tokens, B of 1000" in run(tmp_path / "hf", mcore)
    assert "A is a LlamaForCausalLM, B a Qwen3ForCausalLM" in run(converted("llama")[0], mcore)
    [said] = run_on_ranks(1, "run", str(hf), str(mcore), {"tp": 2}, {"prompts": 1}, module="parity_on_cpu")
    assert (
        "TP2 needs 2 processes or a multiple of them, and there are 1: start it with torchrun --nproc-per-node 2"
        in said
    )
    assert "prompt 0 has 257 tokens, more than the model's context of 256" in run(
        hf, mcore, prompts=[[1] * 257]
    )


def test_after_a_mistake_the_next_comparison_of_the_process_goes_well(converted):
    hf, mcore = converted("qwen3")
    [(said, report)] = run_on_ranks(1, "again", str(mcore), str(hf), module="parity_on_cpu")
    assert "prompt 0 has 1 token" in said and report["ok"], (said, report)


class Told(System):
    """A system that says the same of every prompt of three tokens; distributions only where it `keeps` them."""

    spread = False

    def __init__(self, directory, keeps=True):
        self.name, self.model, self.keeps = "told", HuggingFace(directory, "fp32").model, keeps

    def score(self, prompts, how):
        kept = how.kept_of(len(prompts)) if self.keeps else [0] * len(prompts)
        size = self.model.symbols["V"]
        rows = np.full((2, size), -np.log(size))
        return [Scores(np.full(2, -1.0), np.zeros(2, int), rows[:n] if n else None) for n in kept]

    def close(self):
        pass


def test_parity_says_what_it_did_not_measure_and_passes_no_limit_on_it(checkpoint):
    def compare(limits=None, **options):
        a, b = Told(checkpoint("qwen3")), Told(checkpoint("qwen3"), **options)
        return parity(a, b, [[1, 2, 3]] * 3, dtype="fp32", limits=limits)

    try:
        whole, without = compare(), compare(keeps=False)
        assert whole.ok and whole.overall.kl_tokens == 6 and whole.unmeasured == []
        assert without.ok and without.overall.kl is None, "a default limit"
        [sentence] = without.unmeasured
        assert sentence.startswith("kl was not measured") and without.to_dict()["unmeasured"] == [sentence]
        assert not compare(Limits(kl=1e-3), keeps=False).ok and compare(Limits(kl=1e-3)).ok
        assert not compare(lambda dtype: Limits.of_dtype(dtype, routing_margin=0.1)).ok, (
            "this model has no experts"
        )
    finally:
        torch.distributed.destroy_process_group()


def test_prompts_are_read_and_checked(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('{"tokens": [1, 2, 3]}\n\n{"text": "ab"}\nplain words\n', encoding="utf-8")
    assert read_prompts(file, lambda: lambda text: [ord(c) for c in text])[:2] == [[1, 2, 3], [97, 98]]
    for text, sentence in (("", "has no prompts"), ("words", "is text, and neither system has a tokenizer"), ("{1", "begins like JSON"),
                           ('{"tokens": "1"}', "has neither text nor a list of tokens")):  # fmt: skip
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ReshardError, match=sentence):
            read_prompts(file, lambda: None)
    with pytest.raises(ReshardError, match="cannot read the prompts"):
        read_prompts(tmp_path / "absent", lambda: None)
    assert {len(p) for p in random_prompts(4, 10, [3, 5])} == {3, 5}
    for prompts, sentence in (([], "no prompts"), ([[1]], "nothing to predict"), ([[1, 2], []], "prompt 1 has 0 tokens"),
                              ([[1, 10]], "token 10, which a vocabulary of 10")):  # fmt: skip
        with pytest.raises(ReshardError, match=sentence):
            check_prompts(prompts, 10, 100)


def test_the_command_gates(converted):
    hf, mcore = converted("qwen3")
    command = [
        python_of_trainer(),
        "-m",
        "reshard",
        "parity",
        str(hf),
        str(mcore),
        "--random",
        "2",
        "--lengths",
        "9",
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["overall"]["tokens"] == 16, done.stderr
    done = run_to_the_end(
        [*torchrun(2, python_of_trainer()), "-m", "reshard", *command[3:], "--tp", "2"], 600
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "Megatron-Core" in done.stdout and done.stdout.count("  mean_abs") == 1, (
        done.stderr
    )
    limits = "limits: max_abs <= 0.001, mean_abs <= 0.0001, token_mult_prob_error <= 1.0001, kl <= 1e-06"
    assert lines[-2:] == [limits, "A and B hold the same model: every figure is within its limit"]


def with_tokenizer(source: Path, directory: Path, words: list[str]) -> Path:
    """A copy of a Hugging Face directory with a tokenizer of whole words."""
    shutil.copytree(source, directory)
    vocabulary = {word: i for i, word in enumerate(["?", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(directory)
    return directory


def test_text_goes_through_the_tokenizer_that_both_have(converted, tmp_path):
    hf, plain = converted("qwen3")
    one = with_tokenizer(hf, tmp_path / "one", ["weights", "move", "fast"])
    other = with_tokenizer(hf, tmp_path / "other", ["weights", "fast", "move"])
    hf_to_mcore(one, tmp_path / "mcore")
    (tmp_path / "prompts").write_text(
        'weights move fast move\n{"text": "move weights"}\n{"tokens": [5, 6, 7]}\n', encoding="utf-8"
    )
    command = [
        python_of_trainer(),
        "-m",
        "reshard",
        "parity",
        "--prompts",
        str(tmp_path / "prompts"),
        "--json",
    ]
    done = subprocess.run([*command, str(one), str(tmp_path / "mcore")], capture_output=True, text=True)
    assert done.returncode == 0 and [p["tokens"] for p in json.loads(done.stdout)["prompts"]] == [3, 1, 2], (
        done.stderr
    )
    assert tokenizer_of([str(tmp_path / "mcore")])("weights move fast move") == [1, 2, 3, 2]
    assert tokenizer_of([str(hf), str(plain)]) is None
    with pytest.raises(
        ReshardError, match="the tokenizers of .*one and .*other differ: they do not hold the same model"
    ):
        tokenizer_of([str(one), "vllm:" + str(other)])


def test_a_rollout_is_watched():
    torch.manual_seed(0)
    train = -torch.rand(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    engine = train + 0.001
    engine[0, 3:], engine[2, 1:] = float("nan"), float("-inf")  # padding, which does not count
    verdict = check_rollout(train, engine, mask)
    assert verdict.ok and verdict.metrics.tokens == 9 and verdict.to_dict()["ok"] == 1
    assert verdict.metrics.token_mult_prob_error == pytest.approx(np.exp(0.001), rel=1e-4)
    far = check_rollout(train.bfloat16(), engine - 0.5, mask)
    assert not far.ok and far.exceeded[0].startswith("mean_abs is 0.49")
    assert check_rollout([-1.0, -2.0], [-1.0, -2.0]).metrics.tokens == 2
    ragged = [np.array([-1.0, -2.0]), np.array([-3.0])]
    assert check_rollout(ragged, ragged).metrics.tokens == 3
    with pytest.raises(ReshardError, match="B gives the logprob nan for token 4 of prompt 0"):
        check_rollout(train, engine)
    with pytest.raises(ReshardError, match="have shapes"):
        check_rollout(train, engine[:, :4], mask)
    with pytest.raises(ReshardError, match="no token to predict"):
        check_rollout(train, engine, torch.zeros(3, 5))
    for nothing in ([], torch.zeros(0, 5)):
        with pytest.raises(ReshardError, match="there are no prompts"):
            check_rollout(nothing, nothing)


def test_the_example_repository_gates_a_trained_checkpoint(trained_pair, tmp_path):
    example = Path(__file__).parent.parent / "examples" / "ci"
    shutil.copytree(example, tmp_path / "ci")
    command = [
        python_of_trainer(),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path / "ci" / "tests"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MODEL": str(trained_pair[0])},
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout[-3000:]
    workflow = yaml.safe_load((example / ".github" / "workflows" / "parity.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["parity"]["steps"][-1]["run"] == "pytest tests/test_parity.py"


def test_the_page_stands_alone_and_shows_every_token(converted, tmp_path):
    hf, _ = converted("qwen3")
    words = [f"</script><b>{i}" for i in range(999)]
    one = with_tokenizer(hf, tmp_path / "one", words)
    other = with_tokenizer(make(tmp_path / "plain", "qwen3", seed=1), tmp_path / "a<b", words)
    command = [
        python_of_trainer(),
        "-m",
        "reshard",
        "parity",
        str(one),
        str(other),
        "--random",
        "3",
        "--lengths",
        "9",
    ]
    done = subprocess.run([*command, "--html", str(tmp_path / "r.html")], capture_output=True, text=True)
    assert done.returncode == 1 and "Error: A and B do not hold the same model: max_abs is " in done.stderr, (
        done.stderr
    )
    assert "limits: max_abs <= 0.001, mean_abs <= 0.0001" in done.stdout and "A and B hold" not in done.stdout
    parsed = Parsed((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert_stands_alone(parsed)
    assert "a<b" in parsed.text and "max_abs is " in parsed.text and "beyond the limits" in parsed.text
    scatter, histogram, positions = parsed.charts.roots
    for drawn in (scatter, positions):
        data = drawn.renderers[-1].data_source.data
        assert list(zip(data["prompt"], data["token"])) == [(p, t) for p in range(3) for t in range(1, 9)]
        assert all(
            text == json.dumps("?" if i == 0 else words[i - 1]) for i, text in zip(data["id"], data["text"])
        )
        assert np.isfinite(data["a"]).all() and (data["a"] != data["b"]).all()
    assert histogram.renderers[-1].data_source.data["tokens"].sum() == 24
    found = max(abs(data["a"] - data["b"]))
    assert f"max_abs is {found:.6g}, the limit is 0.001" in done.stderr


def test_a_running_engine_s_config_is_read_as_it_was_published():
    """vLLM's class of DeepSeek renames the type of the rotary embedding in place, and transformers adds fields of its own."""
    from types import SimpleNamespace

    from reshard.parity.vllm import LiveVllm
    from tests.checkpoints import VARIANTS

    config = VARIANTS["deepseek-v3"].to_dict() | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "_name_or_path": "x",
    }
    config["rope_parameters"] = config["rope_parameters"] | {"rope_type": "deepseek_yarn"}
    served = SimpleNamespace(
        model="x", dtype=torch.bfloat16, quantization=None, hf_config=SimpleNamespace(to_dict=lambda: config)
    )
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=served)))
    assert LiveVllm(llm).model.family.name == "deepseek_v3"


@pytest.mark.parametrize("place", ["a directory", "no permission", "a full disk"])
def test_a_page_that_cannot_be_written_costs_no_result(place, converted, tmp_path):
    hf, _ = converted("qwen3")
    page = tmp_path / "page.html"
    if place == "a directory":
        page.mkdir()
    elif place == "no permission":
        page.symlink_to("/proc/version")  # which nobody may write, root neither
    else:
        page.symlink_to("/dev/full")  # opens, and fails when it is written
    command = [
        python_of_trainer(),
        "-m",
        "reshard",
        "parity",
        str(hf),
        str(hf),
        "--random",
        "1",
        "--lengths",
        "9",
        "--html",
        str(page),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if place == "a directory":
        assert done.returncode == 2 and "is a directory" in done.stderr
    elif place == "no permission":
        assert (
            done.returncode == 1
            and f"--html: cannot write {page}" in done.stderr
            and list(json.loads(done.stdout)) == ["error", "exit_code"]
        )
    else:
        assert done.returncode == 1 and f"Error: --html: cannot write {page}: No space left" in done.stderr
        assert json.loads(done.stdout)["ok"] and json.loads(done.stdout)["overall"]["tokens"] == 8


@pytest.mark.parametrize("arguments", [
    ("--prompts", "x", "--random", "2"), ("--lengths", "1"), ("--lengths", "a"), ("--random", "0"),
    ("--engine", "tp=0"), ("--engine", "pp=2"), ("--engine", "ep=4"), ("--no-routing", "--max-routing-margin", "0.1"), ("--seed", "-1"),
])  # fmt: skip
def test_a_mistake_in_the_command_line_is_status_2(arguments):
    assert CliRunner().invoke(cli, ["parity", "a", "b", *arguments]).exit_code == 2


def test_what_cannot_be_looked_into_is_not_located():
    said = CliRunner().invoke(cli, ["parity", "a", "vllm:b", "--locate"])
    assert said.exit_code == 2 and "--locate looks inside transformers and Megatron-Core" in said.output
