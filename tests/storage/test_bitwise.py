"""Bit for bit: against tensors assembled by hand, there and back, and across layouts drawn at random."""

import json
import pickle

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, mcore_to_hf
from tests.tools.checkpoints import VARIANTS
from tests.tools.oracle import hf_tensors, megatron_tensors, same, stored_tensors

CASES = [
    *((variant, {}) for variant in VARIANTS),
    ("deepseek-v3", {"mtp": True}),
    ("glm4-moe", {"mtp": True}),
    ("glm4-moe-lite", {"mtp": True}),
    ("deepseek-v32", {"mtp": True}),
    ("glm-moe-dsa-shared", {"mtp": True}),
    ("qwen3-next", {"mtp": True}),
    ("nemotron-h-moe-latent", {"mtp": True}),
]


# How numbers of a dtype travel is no matter of the family.
OTHER_DTYPES = [
    (variant, {}, dtype)
    for variant in ("llama-bias", "qwen3-moe", "deepseek-v3", "qwen3-next", "gpt-oss")
    for dtype in (torch.float32, torch.float16)
]


@pytest.mark.parametrize(
    ("variant", "options", "dtype"), [*((*case, torch.bfloat16) for case in CASES), *OTHER_DTYPES], ids=str
)
def test_a_checkpoint_holds_what_is_assembled_by_hand_and_comes_back(
    variant, options, dtype, checkpoint, tmp_path
):
    source = checkpoint(variant, dtype=dtype, **options)
    moe = "moe" in variant or "deepseek" in variant or "gpt-oss" in variant
    layout = MegatronLayout(tp=2, pp=2, ep=8, etp=1) if moe else MegatronLayout(tp=8, pp=4)
    hf_to_mcore(source, tmp_path / "mcore", layout)
    stored = stored_tensors(tmp_path / "mcore" / "release")
    expected = megatron_tensors(source, 1024)
    assert same(stored, expected) == []
    if dtype == torch.bfloat16:
        # The comparison sees one wrong bit, and a wrong order of rows.
        name = next(n for n in expected if n.endswith(("mlp.linear_fc1.weight", "experts.linear_fc1.weight")))
        for change in (lambda t: t.flatten()[0].mul_(-1), lambda t: t.copy_(t.flip(-2))):
            wrong = expected | {name: expected[name].clone()}
            change(wrong[name])
            assert same(stored, wrong) == [name]
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", max_shard_size="200KB")
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    for name in ("config.json", "generation_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    assert (
        diff(source, tmp_path / "mcore").equal
        and check(tmp_path / "mcore").ok
        and check(tmp_path / "back").ok
    )


def test_the_output_loads_with_from_pretrained(checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM

    source = checkpoint("qwen3-moe", dtype=torch.bfloat16)
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, ep=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", max_shard_size="300KB")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    ours, theirs = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in (tmp_path / "back", source))
    assert same(ours, theirs) == []


def draw_layout(variant):
    """Any layout that the sizes allow, for a variant of four layers and eight heads."""
    moe = "moe" in variant or "deepseek" in variant or "gpt-oss" in variant
    pipeline = st.sampled_from(
        [
            {},
            {"pp": 2},
            {"pp": 4},
            {"pp": 2, "vpp": 2},
            {"pp": 2, "num_layers_in_first_pipeline_stage": 1},
            {"pp": 2, "num_layers_in_last_pipeline_stage": 1},
            {"pp": 3, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1},
            {"pp": 2, "pipeline_model_parallel_layout": "Et|t|tt|L"},
            {"pp": 3, "pipeline_model_parallel_layout": "Ett|t|tL"},
            {
                "pp": 3,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            {"pp": 5, "account_for_embedding_in_pipeline_split": True},
        ]
    )
    size = st.sampled_from([1, 2, 4, 8])
    experts = st.tuples(size, st.sampled_from([1, 2, 4, 8, None])) if moe else st.just((1, None))
    return st.builds(lambda tp, p, e: MegatronLayout(tp=tp, ep=e[0], etp=e[1], **p), size, pipeline, experts)


@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.parametrize(
    "variant",
    [
        "llama-bias",
        "qwen2-tied",
        "qwen3",
        "qwen3-moe",
        "qwen3-moe-mixed",
        "deepseek-v3",
        "glm4-moe",
        "minimax-m2",
        "olmoe",
        "ling-bias",
        "glm-moe-dsa-shared",
    ],
)
@given(data=st.data())
def test_any_layout_holds_the_same_tensors(variant, data, checkpoint, tmp_path_factory):
    layout = data.draw(draw_layout(variant))
    folder = tmp_path_factory.mktemp("crossed")
    source = checkpoint(variant, dtype=torch.bfloat16)
    impl = data.draw(st.sampled_from(["transformer_engine", "local"]))
    try:
        hf_to_mcore(source, folder / "mcore", layout, transformer_impl=impl, sync=False)
    except ReshardError:
        assume(False)
    mcore_to_hf(folder / "mcore", folder / "back", sync=False)
    assert same(hf_tensors(source), hf_tensors(folder / "back")) == []
    if impl == "transformer_engine":
        rows = len(stored_tensors(folder / "mcore" / "release")["embedding.word_embeddings.weight"])
        assert same(stored_tensors(folder / "mcore" / "release"), megatron_tensors(source, rows)) == []


def test_ranks_save_what_megatron_s_ranks_would(checkpoint, tmp_path):
    """File by file: the chunks of each rank, as Megatron's own save of the same layout has them."""
    import pickle

    from tests.megatron.test_logits import flags_at
    from tests.starting.ranks import run_on_ranks

    layout = MegatronLayout(tp=2, pp=2, ep=2, etp=1)
    source = checkpoint("qwen3-moe")
    hf_to_mcore(source, tmp_path / "mcore", layout, transformer_impl="local")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    flags = flags_at(
        tmp_path / "mcore",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --make-vocab-size-divisible-by 128",
    )
    run_on_ranks(4, "load_and_save", flags, str(tmp_path / "mcore"), str(theirs))

    def chunks(directory):
        metadata = pickle.loads((directory / ".metadata").read_bytes())
        found = {}
        for index, info in metadata.storage_data.items():
            if not index.fqn.startswith(("common_state", "iteration")):
                rank = info.relative_path.split("_")[2]
                found[index.fqn, tuple(index.offset or ())] = rank
        sizes = {
            (k, tuple(c.offsets)): tuple(c.sizes)
            for k, e in metadata.state_dict_metadata.items()
            for c in getattr(e, "chunks", ())
        }
        return found, sizes

    ours, wanted = chunks(tmp_path / "mcore" / "release"), chunks(theirs)
    assert ours[1] == wanted[1]
    assert ours[0] == wanted[0]


def test_nan_infinity_and_negative_zero_pass_through(checkpoint, tmp_path):
    source = copy_of(checkpoint("qwen3", dtype=torch.bfloat16), tmp_path / "source")
    path = source / "model.safetensors"
    tensors = load_file(path)
    bits = torch.tensor([0x7FC0, 0x7F81, -0x7F, 0x7F80, -0x80, -0x8000, 1], dtype=torch.int16).view(
        torch.bfloat16
    )
    tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[: len(bits)] = bits
    save_file(tensors, path, metadata={"format": "pt"})
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(tensors, hf_tensors(tmp_path / "back")) == [] and check(tmp_path / "back").ok


def test_a_cast_rounds_as_torch_does_and_keeps_the_router_bias(checkpoint, tmp_path):
    source = checkpoint("deepseek-v3")
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2), dtype="bf16")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    bias = "mlp.gate.e_score_correction_bias"
    expected = {name: t if name.endswith(bias) else t.bfloat16() for name, t in hf_tensors(source).items()}
    assert same(expected, hf_tensors(tmp_path / "back")) == []
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def test_a_tied_head_that_the_files_repeat_comes_back(checkpoint, tmp_path):
    source = copy_of(checkpoint("qwen3-tied", dtype=torch.bfloat16), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(tensors, hf_tensors(tmp_path / "back")) == []
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReshardError, match="lm_head.weight differs from model.embed_tokens.weight"):
        hf_to_mcore(source, tmp_path / "untied")
    assert not (tmp_path / "untied").exists()


def copy_of(source, target):
    """A copy of a checkpoint that a test may change."""
    import shutil

    return shutil.copytree(source, target)


@pytest.mark.parametrize(("variant", "of_norms"), [("qwen3-moe", 8), ("minimax-m2", 0)])
def test_norms_that_are_not_transformer_engines_have_no_state_of_its(variant, of_norms, checkpoint, tmp_path):
    hf_to_mcore(checkpoint(variant), tmp_path / "mcore", MegatronLayout(tp=2))
    metadata = pickle.loads((tmp_path / "mcore" / "release" / ".metadata").read_bytes()).state_dict_metadata
    states = [key for key in metadata if "_extra_state" in key]
    assert sum("_layernorm._extra_state" in key and "self_attention" in key for key in states) == of_norms
    assert sum("linear_qkv._extra_state" in key for key in states) == 4
