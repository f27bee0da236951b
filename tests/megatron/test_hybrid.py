"""HybridModels of Megatron-Core: what its own code saves of them, read like any other checkpoint,
and what is written for them, bit for bit."""

import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import (
    MegatronLayout,
    ReshardError,
    check,
    diff,
    hf_to_mcore,
    inspect,
    mcore_to_hf,
    mcore_to_mcore,
    read_model,
)
from reshard.megatron.build import build_megatron
from reshard.megatron.hybrid import as_gpt_args
from tests.live.test_live_save import unlike_trees, with_fp32_bias
from tests.megatron.test_logits import EP, ETP, PP, TP, VPP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.storage.test_wrapped import published
from tests.tools.oracle import bits, hf_tensors, same, stored_tensors
from tests.tools.parity_runs import run
from tests.tools.refits import PATTERN, refit

pytestmark = pytest.mark.skipif(
    find_spec("megatron.core.dist_checkpointing.gpt_checkpoint_interop") is None,
    reason="megatron-core before 0.19 has no HybridModel that loads a GPTModel's checkpoints",
)
FORM = {"transformer_impl": "local", "model_class": "hybrid", "make_vocab_size_divisible_by": 8}
# variant, options of its checkpoint, parallel sizes, ranks, pattern, the layout that says the same
SAVED = [
    ("llama", {}, f"{TP} 2 {PP} 2", 4, "*-*-|*-*-", MegatronLayout(tp=2, pp=2)),
    ("qwen2-tied", {}, f"{PP} 2 --decoder-first-pipeline-num-layers 1", 2, "*-|*-*-*-",
     MegatronLayout(pp=2, pipeline_model_parallel_layout="Et|tttL")),
    ("qwen3", {}, f"{PP} 2 {VPP} 2", 2, "*-|*-|*-|*-", MegatronLayout(pp=2, vpp=2)),
    ("qwen3-moe", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, "*E*E*E*E", MegatronLayout(tp=2, ep=2, etp=1)),
    ("qwen3-moe-mixed", {}, f"{PP} 2 {EP} 2 {ETP} 1", 4, "*E*-|*E*E", MegatronLayout(pp=2, ep=2, etp=1)),
    ("deepseek-v3", {"mtp": True}, f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, "+-+E|+E+E/+E",
     MegatronLayout(tp=2, pp=2, ep=2, etp=1)),
    ("glm4-moe", {}, f"{PP} 2", 2, "*-*E|*E*E", MegatronLayout(pp=2)),
    ("seed-oss", {}, f"{TP} 2", 2, "*-*-*-*-", MegatronLayout(tp=2)),
    ("phi4", {}, f"{TP} 2", 2, "*-*-*-*-", MegatronLayout(tp=2)),
    ("dots1", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, "*-*E*E*E", MegatronLayout(tp=2, ep=2, etp=1)),
    ("ling", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, "*-*E*E*E", MegatronLayout(tp=2, ep=2, etp=1)),
    ("qwen2-moe-mixed", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, "*E*-*E*E", MegatronLayout(tp=2, ep=2, etp=1)),
    ("qwen3-next", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, "GEGEGE*E", MegatronLayout(tp=2, ep=2, etp=1)),
    ("deepseek-v32", {}, f"{EP} 2 {ETP} 1", 2, "D-DEDEDE", MegatronLayout(ep=2, etp=1)),
]  # fmt: skip
TOKENS = torch.randint(0, 1000, (2, 24), generator=torch.Generator().manual_seed(1))
CASES = {"ids": lambda value: str(value).replace("-model-parallel-size", "")}
NAMES = ("variant", "options", "parallel", "ranks", "pattern", "layout")


def on_ranks(ranks, function, *arguments):
    return run_on_ranks(ranks, function, *arguments, module="hybrid_on_cpu")


def saved_hybrid(source, folder, parallel, ranks, pattern, **options):
    """A checkpoint by Megatron's code of a HybridModel with these weights; the directory that
    ``--load`` would take, and the logits of a GPTModel and of the HybridModel."""
    hf_to_mcore(source, folder / "gpt", transformer_impl="local")
    directory = folder / "hybrid" / "iter_0000007"
    directory.mkdir(parents=True)
    results = run_on_ranks(
        ranks,
        "save_hybrid",
        flags_at(folder / "gpt", parallel),
        pattern,
        str(folder / "gpt"),
        str(directory),
        TOKENS,
        *options.values(),
        module="hybrid_on_cpu",
    )
    (directory.parent / "latest_checkpointed_iteration.txt").write_text("7")
    return directory.parent, next(logits for logits in results if logits[0] is not None)


@pytest.mark.parametrize(NAMES, SAVED, **CASES)
def test_what_megatron_saves_of_a_hybrid_model_is_read_and_written_and_loaded(
    variant, options, parallel, ranks, pattern, layout, checkpoint, tmp_path
):
    source = checkpoint(variant, **options)
    hf_to_mcore(source, tmp_path / "gpt", transformer_impl="local")
    hf_to_mcore(source, tmp_path / "ours", layout, **FORM)
    hf_to_mcore(
        checkpoint(variant, seed=1, **options), tmp_path / "other", MegatronLayout(ep=layout.ep), **FORM
    )
    (tmp_path / "theirs").mkdir()
    written = (tmp_path / "ours" / "megatron_flags.txt").read_text().split()
    assert written[written.index("--hybrid-layer-pattern") + 1] == pattern
    directories = [str(tmp_path / name) for name in ("gpt", "theirs", "ours", "other")]
    results = on_ranks(
        ranks, "save_and_load", flags_at(tmp_path / "gpt", parallel), written, *directories, TOKENS
    )
    for (gpt, hybrid), differ, of_other, count in results:
        assert gpt is hybrid is None or torch.equal(
            gpt, hybrid
        )  # the two classes compute the same of these weights
        assert differ == []
        assert len(of_other) > 0.8 * count  # the control: other weights are seen
    theirs = tmp_path / "theirs"
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    assert (
        diff(source, theirs, hf_config=source).equal
        and diff(theirs, tmp_path / "gpt", hf_config=source).equal
    )
    assert same(stored_tensors(theirs), stored_tensors(tmp_path / "ours" / "release")) == []


LIVE = [SAVED[1], SAVED[2], SAVED[4], SAVED[5]]


@pytest.mark.parametrize(NAMES, LIVE, **CASES)
def test_a_live_hybrid_model_is_loaded_and_saved(
    variant, options, parallel, ranks, pattern, layout, weights, tmp_path
):
    folder, other = weights(variant, **options), weights(variant, seed=1, **options)
    with_fp32_bias(folder / "hf", tmp_path / "source")
    hf_to_mcore(tmp_path / "source", tmp_path / "expected", layout, **FORM)
    mcore_to_hf(tmp_path / "expected", tmp_path / "expected-hf")
    flags, gpt = flags_at(folder / "mcore", parallel), str(folder / "mcore")
    sources = [str(folder / "hf"), gpt, str(tmp_path / "expected")]
    published = {name: bits(tensor) for name, tensor in hf_tensors(tmp_path / "source").items()}
    arguments = flags, pattern, gpt, sources, str(other / "hf"), str(tmp_path)
    for differ, of_other, count, exported in on_ranks(ranks, "load_and_save_live", *arguments):
        assert differ == [[], [], []]
        assert len(of_other) > 0.8 * count
        assert dict(exported) == published
    for saved, expected in (("hf", "expected-hf"), ("mcore", "expected")):
        assert unlike_trees(tmp_path / saved, tmp_path / expected) == []


@pytest.mark.parametrize(
    "variant, pattern", [("qwen3", "*-*-*-*-"), ("qwen3-moe-mixed", "*E*-*E*E"), ("deepseek-v3", "+-+E+E+E")]
)
def test_the_args_of_a_hybrid_model_stand_in_for_the_config(variant, pattern, checkpoint, tmp_path):
    from transformers import AutoConfig

    source = checkpoint(variant)
    theirs, _ = saved_hybrid(source, tmp_path, f"{TP} 2", 2, pattern)
    found = inspect(theirs)
    assert found.details["model_class"] == "hybrid" and found.layers == 4
    mcore_to_hf(theirs, tmp_path / "back")
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    ours, wanted = (AutoConfig.from_pretrained(directory) for directory in (tmp_path / "back", source))
    assert ours.num_hidden_layers == wanted.num_hidden_layers
    for name in ("mlp_only_layers", "first_k_dense_replace"):
        assert getattr(ours, name, None) == getattr(wanted, name, None)


@pytest.mark.parametrize("variant, pattern", [("qwen3", "*-*-*-*-"), ("qwen3-moe", "*E*E*E*E")])
def test_the_singleton_scheme_of_a_hybrid_model_is_read(variant, pattern, checkpoint, tmp_path):
    source = checkpoint(variant)
    theirs, _ = saved_hybrid(source, tmp_path, f"{TP} 2", 2, pattern, singleton=True)
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []


def test_layers_in_another_order_are_refused_by_name(checkpoint, tmp_path):
    """The same tensors, of a model that runs two attentions one after the other."""
    source = checkpoint("qwen3")
    hf_to_mcore(source, tmp_path / "gpt", transformer_impl="local")
    theirs = tmp_path / "theirs" / "iter_0000007"
    theirs.mkdir(parents=True)
    flags = flags_at(tmp_path / "gpt", f"{TP} 1")
    run_on_ranks(1, "save_untrained", flags, "*-**--*-", str(theirs), module="hybrid_on_cpu")
    with pytest.raises(
        ReshardError, match=r"in the pattern '\*-\*\*--\*-' attention .* and MLP .* do not alternate"
    ):
        mcore_to_hf(theirs, tmp_path / "back")
    (theirs / "common.pt").unlink(missing_ok=True)
    with pytest.raises(ReshardError, match=r"do not alternate|lacks 8 parameters"):
        mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert not (tmp_path / "back").exists()


def test_mamba_layers_that_a_family_does_not_have_are_refused_by_name(checkpoint, tmp_path):
    import torch.distributed.checkpoint as dcp

    source = checkpoint("qwen3")
    theirs, _ = saved_hybrid(source, tmp_path, f"{TP} 1", 1, "*-*-*-*-")
    [directory] = theirs.glob("iter_*")
    state = stored_tensors(directory) | {"decoder.layers.8.mixer.in_proj.weight": torch.zeros(4, 64)}
    for path in directory.glob("*.distcp"):
        path.unlink()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(directory)), no_dist=True)
    with pytest.raises(
        ReshardError,
        match=r"holds 1 parameters that qwen3 does not have: decoder\.layers\.8\.mixer\.in_proj\.weight",
    ):
        mcore_to_hf(theirs, tmp_path / "back", hf_config=source)


def test_scaled_rotary_embeddings_are_none_in_a_hybrid_model(checkpoint, tmp_path):
    """Megatron-Core's HybridModel takes no --use-rope-scaling: the same weights compute something
    else, which is said."""
    source = checkpoint("llama-rope-tied")
    theirs, (gpt, hybrid) = saved_hybrid(source, tmp_path, f"{TP} 1", 1, "*-*-*-*-")
    assert not torch.allclose(gpt, hybrid, atol=1e-5)
    report = mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    assert any("a HybridModel trains without" in notice for notice in report.notices)


PARITY = [
    ("qwen3", MegatronLayout(), dict(pp=2, vpp=2)),
    ("qwen3-moe-mixed", MegatronLayout(tp=2, ep=2, etp=2), dict(pp=2, ep=2, etp=1)),
    ("deepseek-v3", MegatronLayout(tp=2, ep=2, etp=1), dict(tp=2, pp=2, ep=2, etp=1)),
    ("minimax-m2", MegatronLayout(), dict(tp=2)),
    ("qwen3-next", MegatronLayout(tp=2), dict(tp=2, ep=2, etp=1)),
]


@pytest.mark.parametrize(("variant", "written", "loaded"), PARITY, ids=lambda v: str(v))
def test_a_hybrid_model_that_is_built_passes_parity(variant, written, loaded, megatron_of):
    hf, mcore = megatron_of(variant, written, model_class="hybrid")
    report = run(hf, mcore, loaded, batch_size=2)
    assert (
        report["ok"] and report["overall"]["max_abs"] < 1e-4 and report["overall"]["argmax_agreement"] == 1.0
    )
    if routed_layers := {"qwen3-moe-mixed": 3, "qwen3-next": 4}.get(variant):
        assert report["routing"]["choices"] == routed_layers * 80 and report["routing"]["differing"] == 0


def test_a_fault_is_found_in_the_half_of_the_decoder_layer_that_has_it(megatron_of, tmp_path):
    hf, mcore = megatron_of("qwen3", model_class="hybrid")
    for index, (name, place) in enumerate(
        [
            ("self_attn.o_proj", "the attention of layer 2"),
            ("mlp.down_proj", "the MLP of layer 2"),
            ("input_layernorm", "the input norm of layer 2"),
        ]
    ):
        copied = tmp_path / str(index)
        shutil.copytree(hf, copied)
        tensors = load_file(hf / "model.safetensors")
        tensors[f"model.layers.2.{name}.weight"] *= 1.01
        save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
        [found] = run_on_ranks(1, "find", str(copied), str(mcore), {}, module="parity_on_cpu")
        assert found is not None and found[1] == place and all(name in differing for differing in found[2])
    assert run_on_ranks(1, "find", str(hf), str(mcore), {}, module="parity_on_cpu") == [None]


def test_what_a_hybrid_model_cannot_compute_is_not_built_and_not_written(checkpoint, tmp_path):
    source = checkpoint("llama-rope-tied")
    report = hf_to_mcore(source, tmp_path / "mcore", **FORM)
    assert any("a HybridModel trains without" in notice for notice in report.notices)
    with pytest.raises(ReshardError, match="HybridModel has no llama3 scaling of rotary embeddings"):
        build_megatron(
            read_model(str(source)), MegatronLayout(), transformer_impl="local", model_class="hybrid"
        )
    report = hf_to_mcore(checkpoint("ernie"), tmp_path / "pairs", **FORM)
    assert any("rotary embeddings of neighboring dims, which" in notice for notice in report.notices)
    with pytest.raises(ReshardError, match="HybridModel has no rotary embeddings of neighboring dims: build"):
        build_megatron(
            read_model(str(checkpoint("ernie"))),
            MegatronLayout(),
            transformer_impl="local",
            model_class="hybrid",
        )
    with pytest.raises(
        ReshardError, match="layers that share an indexer are counted otherwise in a HybridModel"
    ):
        hf_to_mcore(checkpoint("glm-moe-dsa-shared"), tmp_path / "shared", **FORM)
    with pytest.raises(ReshardError, match="Megatron-LM 0.18 has no arguments for a HybridModel"):
        hf_to_mcore(checkpoint("qwen3"), tmp_path / "older", megatron_version="0.18", **FORM)
    with pytest.raises(ReshardError, match="model_class is 'bert', which is not one of gpt, hybrid"):
        build_megatron(read_model(str(source)), MegatronLayout(), model_class="bert")
    with pytest.raises(ReshardError, match="--model-class bert is not one of gpt, hybrid"):
        hf_to_mcore(source, tmp_path / "other", model_class="bert")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mcore", "pairs"]


MOVED = [
    ("qwen3", {}, MegatronLayout(pp=2, vpp=2)),
    ("deepseek-v3", {"mtp": True}, MegatronLayout(tp=2, pp=2, ep=2, etp=1)),
    ("qwen3-next", {}, MegatronLayout(tp=2, ep=2, etp=1)),
]


@pytest.mark.parametrize(("variant", "options", "layout"), MOVED, ids=lambda v: str(v))
def test_a_checkpoint_of_one_class_becomes_what_is_written_for_the_other(
    variant, options, layout, checkpoint, tmp_path
):
    source, other = checkpoint(variant, **options), MegatronLayout(tp=4)
    for name, model_class in (("gpt", "gpt"), ("hybrid", "hybrid")):
        hf_to_mcore(source, tmp_path / name, layout, **FORM | {"model_class": model_class})
        hf_to_mcore(source, tmp_path / f"{name}-other", other, **FORM | {"model_class": model_class})
    mcore_to_mcore(tmp_path / "gpt", tmp_path / "to-hybrid", other, **FORM)
    mcore_to_mcore(tmp_path / "hybrid", tmp_path / "to-gpt", other, **FORM | {"model_class": "gpt"})
    for moved, expected in (("to-hybrid", "hybrid-other"), ("to-gpt", "gpt-other")):
        assert unlike_trees(tmp_path / moved, tmp_path / expected) == []
        assert check(tmp_path / moved).ok
    assert unlike_trees(tmp_path / "to-gpt", tmp_path / "hybrid-other")  # the control: other keys


def test_numbers_that_both_ends_hold_less_1_keep_every_bit(weights, tmp_path):
    """A trainer steps such weights to numbers that plus 1 have no bf16 of their own."""
    import torch.distributed.checkpoint as dcp

    shutil.copytree(weights("qwen3-next") / "mcore", tmp_path / "trained")
    (tmp_path / "trained" / "reshard.json").unlink()
    release = tmp_path / "trained" / "release"
    state = stored_tensors(release)
    norms = [key for key in state if key.endswith("self_attention.out_norm.weight")]
    torch.manual_seed(3)
    state |= {key: (torch.randn(state[key].shape) * 0.01).bfloat16() for key in norms}
    for path in release.glob("*.distcp"):
        path.unlink()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(release)), no_dist=True)
    mcore_to_mcore(tmp_path / "trained", tmp_path / "moved", **FORM | {"model_class": "gpt"})
    assert same(stored_tensors(tmp_path / "moved" / "release"), vocabulary_of_1000(state)) == []
    mcore_to_mcore(tmp_path / "moved", tmp_path / "hybrid", **FORM)
    mcore_to_mcore(tmp_path / "hybrid", tmp_path / "back", **FORM | {"model_class": "gpt"})
    assert unlike_trees(tmp_path / "back", tmp_path / "moved") == []
    assert all(check(tmp_path / name).ok for name in ("moved", "hybrid", "back"))
    assert norms and diff(tmp_path / "trained", tmp_path / "hybrid").equal
    held = torch.cat([state[key].flatten() for key in norms])
    assert not torch.equal(
        (held.float() + 1).bfloat16().float() - 1, held.float()
    )  # the control: they are such numbers


def vocabulary_of_1000(state):
    """Padded to a multiple of 8, which is none, instead of 128."""
    vocabulary = {key: tensor[:1000].clone() for key, tensor in state.items() if len(tensor) == 1024}
    return state | vocabulary


def test_models_that_are_built_print_no_deprecation(checkpoint):
    config = read_model(str(checkpoint("qwen3"))).config
    [(of_gpt, of_hybrid, of_megatron)] = on_ranks(1, "logged_by_builds", config)
    assert not any("DEPRECATED" in message for message in (*of_gpt, *of_hybrid))
    assert any("GPTModel IS DEPRECATED" in message for message in of_megatron)  # the control


def test_a_live_hybrid_model_that_computes_something_else_is_refused(weights):
    dense, sparse, scaled = (weights(name) for name in ("qwen3", "qwen3-moe", "llama-rope-tied"))
    flags = {folder: flags_at(folder / "mcore", f"{TP} 1") for folder in (dense, sparse, scaled)}
    cases = [
        (
            dense,
            "*-**--*-",
            dense,
            "in the pattern '*-**--*-' attention (* + D G) and MLP (- E) do not alternate",
        ),
        (dense, "*-*-*-", dense, "num_layers is 3, but the served model's is 4"),
        (
            sparse,
            "*E*-*E*E",
            sparse,
            "moe_layer_freq is [1, 0, 1, 1], but the served model's is [1, 1, 1, 1]",
        ),
        (scaled, "*-*-*-*-", scaled, "inv_freq"),
    ]
    said = on_ranks(
        1,
        "refused_live",
        [(flags[model], pattern, str(source / "hf")) for model, pattern, source, _ in cases],
    )[0]
    for sentence, (*_, expected) in zip(said, cases, strict=True):
        assert expected in sentence


@pytest.mark.parametrize("pattern", ["*-*|-*-*-", "*-*-*-*-"])
def test_a_stage_may_end_between_an_attention_and_its_mlp(pattern, weights, tmp_path):
    """And, as Megatron deprecates, where an even split ends it."""
    folder = weights("qwen3")
    flags = flags_at(folder / "mcore", f"{PP} 2")
    published = {name: bits(tensor) for name, tensor in hf_tensors(folder / "hf").items()}
    apart = "a pipeline stage ends between an attention and its MLP: pass layout="
    for exported, said in on_ranks(2, "apart", flags, pattern, str(folder / "hf"), str(tmp_path)):
        assert dict(exported) == published
        assert apart in said if "|" in pattern else said == "no error"
    hf_to_mcore(folder / "hf", tmp_path / "expected", MegatronLayout(pp=2), **FORM)
    for saved in ["given", *(["mcore"] if "|" not in pattern else [])]:
        assert unlike_trees(tmp_path / saved, tmp_path / "expected") == []


@pytest.mark.parametrize(("args", "expected"), [
    ({"hybrid_layer_pattern": "*-*E|*E/*E"}, {"num_layers": 3, "moe_layer_freq": [0, 1, 1], "mtp_num_layers": 1}),
    ({"hybrid_override_pattern": "*-*-", "is_hybrid_model": True}, {"num_layers": 2, "num_experts": None}),
    ({"hybrid_override_pattern": "*E", "mtp_hybrid_override_pattern": "*E", "mtp_num_layers": 2},
     {"num_layers": 1, "mtp_num_layers": 2}),
    ({"hybrid_layer_pattern": "G-*-"},
     {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 0]}),
    ({"hybrid_layer_pattern": "[M-]*-"}, "groups layers in brackets"),
    ({"hybrid_layer_pattern": "[*-][*-]"}, "groups layers in brackets"),
    ({"hybrid_layer_pattern": "*-*"}, "do not alternate"),
    ({"hybrid_layer_pattern": "*-/*-*-"}, "an MTP layer of the pattern '*-/*-*-' is not one attention and one MLP"),
    ({"hybrid_layer_pattern": "/*-"}, "do not alternate"),
    ({"hybrid_layer_pattern": 3}, "hybrid_layer_pattern is 3, which is not a pattern"),
    ({"hybrid_layer_pattern": "D-D-", "dsa_indexer_topk_freq": 4},
     "dsa_indexer_topk_freq 4 counts the layers of a HybridModel"),
])  # fmt: skip
def test_args_of_earlier_and_of_other_patterns(args, expected):
    args = {
        "num_layers": 8,
        "num_experts": 4,
        "spec": ["megatron.core.models.mamba.mamba_layer_specs", "x"],
    } | args
    if isinstance(expected, str):
        with pytest.raises(ReshardError) as error:
            as_gpt_args(args, "here")
        assert expected in str(error.value)
        return
    gpt = as_gpt_args(args, "here")
    assert {name: gpt[name] for name in expected} == expected
    assert not gpt.keys() & {"spec", "hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"}


@pytest.mark.parametrize(("variant", "parallel", "trainers", "engine", "engines", "together"), [
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1 {PATTERN} *E*E*E*E", 4, dict(tp=2, pp=2), 4, True),
    ("qwen2-tied", f"{PP} 2 {PATTERN} *-*-*-|*-", 2, dict(tp=2), 2, False),
], ids=["qwen3-moe", "qwen2-tied"])  # fmt: skip
def test_a_refit_from_a_hybrid_model_that_megatron_has_loaded(
    variant, parallel, trainers, engine, engines, together, converted, tmp_path
):
    """By Megatron-LM's own loader, which takes a GPTModel's checkpoint for it."""
    refit(converted(variant), parallel, trainers, engine, engines, together, tmp_path)


def test_a_tower_and_mtp_layers_behind_a_prefix_go_along(tmp_path):
    published(tmp_path / "hf", moe=True)
    hf_to_mcore(tmp_path / "hf", tmp_path / "gpt", MegatronLayout(tp=2))
    mcore_to_mcore(tmp_path / "gpt", tmp_path / "hybrid", MegatronLayout(ep=2), model_class="hybrid")
    keys = stored_tensors(tmp_path / "hybrid" / "release").keys()
    assert "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight" in keys
    mcore_to_hf(tmp_path / "hybrid", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "hf"), hf_tensors(tmp_path / "back")) == []
