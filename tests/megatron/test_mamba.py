"""Models with Mamba layers, which Megatron-Core has in a HybridModel alone: its modules, saves and
loader against what is written and read here, with the scan in torch where its kernels need a GPU."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, VllmLayout, diff, hf_to_mcore, mcore_to_hf, mcore_to_mcore
from reshard.megatron.build import build_megatron
from reshard.models.model import Model
from tests.live.test_live_save import unlike_trees
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.checkpoints import config_of, hf_logits
from tests.tools.oracle import bits, hf_tensors, same
from tests.tools.parity_runs import run
from tests.tools.refits import PATTERN, refit

VARIANT = "nemotron-h-moe"
FORM = {"transformer_impl": "local", "make_vocab_size_divisible_by": 8}
TOKENS = torch.randint(0, 1000, (2, 24), generator=torch.Generator().manual_seed(1))
# Rows of in_proj: z, x, B, C, dt.
INNER, STATE = 96, 40


def exchanged(source, to, first: int, second: int, rows: int):
    """A copy in which so many rows of in_proj have changed places, from these on."""
    shutil.copytree(source, to)
    tensors = load_file(to / "model.safetensors")
    weight = tensors["backbone.layers.0.mixer.in_proj.weight"]
    a, b = weight[first : first + rows].clone(), weight[second : second + rows].clone()
    weight[first : first + rows], weight[second : second + rows] = b, a
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_megatrons_loader_logits_saves_and_live_models_are_those_of_the_published_checkpoint(
    checkpoint, tmp_path
):
    source, layout = checkpoint(VARIANT), MegatronLayout(tp=2, pp=2, ep=2, etp=1)
    wrong = {
        "z and x": exchanged(source, tmp_path / "zx", 0, INNER, INNER),
        "B and C": exchanged(source, tmp_path / "bc", 2 * INNER, 2 * INNER + STATE, STATE),
    }
    hf_to_mcore(source, tmp_path / "ours", MegatronLayout(tp=4, ep=4), **FORM)
    others = [tmp_path / name for name in wrong]
    for directory, to in zip(wrong.values(), others, strict=True):
        hf_to_mcore(directory, to, **FORM)
    theirs = tmp_path / "theirs" / "iter_0000007"
    theirs.mkdir(parents=True)
    (tmp_path / "live").mkdir()
    flags = flags_at(tmp_path / "ours", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", "--hybrid-layer-pattern ME*|M-E")
    arguments = (
        flags,
        str(tmp_path / "ours"),
        list(map(str, others)),
        str(theirs),
        str(source),
        str(tmp_path / "live"),
        TOKENS,
    )
    results = run_on_ranks(4, "mamba", *arguments, module="hybrid_on_cpu")
    (*without, logits), *_ = next(result for result in results if result[0][0] is not None)
    expected = hf_logits(source, TOKENS)
    assert (logits[..., :1000] - expected).abs().max() < 2e-5 and expected.std() > 0.05
    for directory, output in zip(wrong.values(), without, strict=True):
        assert (output[..., :1000] - expected).abs().max() > 1e-3  # the control
        assert (output[..., :1000] - hf_logits(directory, TOKENS)).abs().max() < 2e-5
    published = {name: bits(tensor) for name, tensor in hf_tensors(source).items()}
    for _, differ, weights, exported in results:
        assert differ == [] and weights > 20 and dict(exported) == published
    (theirs.parent / "latest_checkpointed_iteration.txt").write_text("7")
    mcore_to_hf(theirs.parent, tmp_path / "back")  # without the config
    for directory in ("back", "live/hf"):
        assert same(hf_tensors(source), hf_tensors(tmp_path / directory)) == []
    hf_to_mcore(source, tmp_path / "expected", layout, **FORM)
    assert unlike_trees(tmp_path / "live" / "mcore", tmp_path / "expected") == []
    mcore_to_mcore(theirs.parent, tmp_path / "moved", layout, **FORM)
    assert diff(tmp_path / "moved", source).equal and not diff(tmp_path / "moved", others[1]).equal


@pytest.mark.parametrize(("change", "message"), [
    ({"hybrid_override_pattern": "ME*M-X"},
     "hybrid_override_pattern 'ME[*]M-X' does not say of which kind each layer is"),
    ({"layers_block_type": ["mamba"] * 6}, "layers_block_type and hybrid_override_pattern say two things"),
    ({"num_hidden_layers": 7}, "hybrid_override_pattern is of 6 layers, but num_hidden_layers is 7"),
    ({"hybrid_override_pattern": "*E*E*-"}, "has no Mamba layer"),
    ({"hybrid_override_pattern": None}, "has neither layers_block_type nor hybrid_override_pattern"),
    ({"time_step_limit": [0.0, 0.1]}, "time_step_limit = .* Megatron limits no time step"),
    ({"conv_kernel": 3}, "conv_kernel = 3 cannot be held by Megatron"),
])  # fmt: skip
def test_a_config_that_says_no_such_layers_is_refused(change, message):
    config = {"num_hidden_layers": 6, "hybrid_override_pattern": "ME*M-E"}
    config |= {name: value for name, value in config_of(VARIANT).items() if name != "layers_block_type"}
    assert Model.from_hf(config).kinds == ("mamba", "moe", "full", "mamba", "dense", "moe")
    with pytest.raises(ReshardError, match=message):
        Model.from_hf(config | change)


def test_a_refit_leaves_what_vllms_own_loader_makes_of_the_export(converted, tmp_path):
    """Whose parameter A is computed of the published A_log while it loads."""
    checkpoints = converted(VARIANT)
    at_two_stages = f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1 {PATTERN} ME*|M-E"
    refit(checkpoints, at_two_stages, 4, dict(tp=4), 4, True, tmp_path / "split")
    refit(checkpoints, f"{TP} 1", 1, dict(tp=2, enable_expert_parallel=True), 2, False, tmp_path / "joined")


def test_parity_finds_a_fault_in_the_layer_that_has_it_and_none_in_the_same_model(megatron_of, tmp_path):
    hf, mcore = megatron_of(VARIANT, MegatronLayout(tp=2, ep=2, etp=1))
    report = run(hf, mcore, dict(tp=2, ep=2, etp=1), batch_size=2)
    assert report["ok"] and report["overall"]["max_abs"] < 1e-4
    assert report["routing"]["choices"] == 2 * 80 and report["routing"]["differing"] == 0
    wrong = exchanged(hf, tmp_path / "wrong", 2 * INNER, 2 * INNER + STATE, STATE)
    [found] = run_on_ranks(1, "find", str(wrong), str(mcore), {}, module="parity_on_cpu")
    assert found is not None and found[1] == "the mixer of layer 0" and found[2] != []
    assert all("layers.0.mixer.in_proj" in name for name in found[2])


def test_rows_of_the_table_that_change_places_are_found_by_the_trace_of_vllms_loader(checkpoint, tmp_path):
    sides = {"trainer": 0, "engine": 1, "together": False, "folder": str(tmp_path), "port": free_port()}
    sections = [
        ("in_proj.weight.B", "in_proj.weight.C"),
        ("in_proj.weight.z", "in_proj.weight.x"),
        ("conv1d.bias.B", "conv1d.bias.C"),
    ]
    exchanges = [tuple(f"mixer.{name}" for name in pair) for pair in sections]
    arguments = (sides, str(checkpoint(VARIANT, dtype=torch.bfloat16)), exchanges)
    [(accounts, said)] = run_on_ranks(1, "rows_exchanged", *arguments, module="refit_on_cpu")
    # What vLLM makes of others is not kept from before a refit: its view of the convolution, and A.
    derived = {name.partition("mixer.")[2] for name, what in accounts.items() if what == "derived"}
    assert derived == {"A", "conv_weights"}
    for sentence, (one, _) in zip(said, sections, strict=True):
        parameter = one.rpartition(".")[0]
        assert f"vLLM's loader and the mapping table disagree on model.layers.0.mixer.{parameter}" in sentence


def test_what_a_gpt_model_or_a_layout_cannot_hold_is_refused(checkpoint, tmp_path):
    source = checkpoint(VARIANT)
    with pytest.raises(ReshardError, match="GPTModel has no Mamba layers: leave --model-class"):
        hf_to_mcore(source, tmp_path / "gpt", model_class="gpt")
    with pytest.raises(ReshardError, match="GPTModel has no Mamba layers"):
        build_megatron(Model.from_hf(config_of(VARIANT)), MegatronLayout(), model_class="gpt")
    with pytest.raises(ReshardError, match="--tp 8 does not divide n_groups 4; sizes that do: 1, 2, 4"):
        hf_to_mcore(source, tmp_path / "wide", MegatronLayout(tp=8))
    with pytest.raises(ReshardError, match="vLLM's tp 8 does not divide n_groups 4; sizes that do: 1, 2, 4"):
        VllmLayout(tp=8).check(Model.from_hf(config_of(VARIANT)))
    assert not list(tmp_path.iterdir())
