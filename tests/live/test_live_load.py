"""Live Megatron models loaded by all ranks, bit for bit what Megatron's own loader makes of the
conversion."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf
from tests.megatron.test_logits import EP, ETP, PP, TP, VPP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make, with_config
from tests.tools.disk import flip
from tests.tools.oracle import bits, hf_tensors

# variant, options of its checkpoint, Megatron's layout, ranks, the layout of another checkpoint of
# the same weights: each family, and each axis of either layout, once
LAYOUTS = [
    ("llama-rope-tied", {}, f"{TP} 2 {PP} 2", 4, MegatronLayout(tp=4)),
    ("llama-bias", {}, f"{PP} 2 {VPP} 2", 2, MegatronLayout(tp=2, pp=4)),
    ("qwen2-tied", {}, f"{TP} 4", 4, MegatronLayout(pp=2)),  # twice the query groups
    (
        "qwen3",
        {},
        f"{PP} 3 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
        3,
        MegatronLayout(tp=8),
    ),
    ("qwen3-moe", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=4, ep=2, etp=2)),
    ("qwen3-moe-mixed", {}, f"{TP} 2 {PP} 2 {VPP} 2 {EP} 2 {ETP} 2", 8, MegatronLayout(ep=8, etp=1)),
    ("deepseek-v3", {"mtp": True}, f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, MegatronLayout(tp=4, ep=4, etp=1)),
    (
        "glm4-moe",
        {"mtp": True, "copies": False},
        f"{TP} 2 {EP} 2 {ETP} 1",
        2,
        MegatronLayout(pp=2, num_layers_in_first_pipeline_stage=1),
    ),
    ("qwen3-next", {}, f"{PP} 2 {EP} 2 {ETP} 1", 4, MegatronLayout(tp=4, ep=4, etp=2)),
    ("qwen3.5-moe", {}, f"{TP} 4 {EP} 2 {ETP} 2", 4, MegatronLayout(pp=2, ep=2, etp=1)),
    ("mixtral", {}, f"{EP} 2 {ETP} 1", 2, MegatronLayout(tp=4, ep=4, etp=2)),
    ("seed-oss", {}, f"{TP} 2 {PP} 2", 4, MegatronLayout(tp=4)),
    ("phi4", {}, f"{TP} 2 {PP} 2", 4, MegatronLayout(tp=4)),
    ("qwen2-moe", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=4, pp=2, ep=2, etp=2)),
    ("minimax-m2", {}, f"{TP} 4 {EP} 2 {ETP} 1", 4, MegatronLayout(tp=2, pp=2, ep=2, etp=2)),
    ("olmoe", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=2, pp=2, ep=2, etp=2)),
    ("dots1", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=4, pp=2, ep=2, etp=2)),
    ("ling", {"mtp": True}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=4, pp=2, ep=2, etp=2)),
    ("ernie", {}, f"{PP} 2 {EP} 2 {ETP} 1", 4, MegatronLayout(tp=4, ep=4, etp=2)),
    ("gpt-oss", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=4, ep=4, etp=1)),
    ("glm-moe-dsa-shared", {"mtp": True}, f"{PP} 2 {EP} 2 {ETP} 1", 4, MegatronLayout(tp=4, ep=4, etp=1)),
]


def on_ranks(ranks, function, *arguments, **options):
    return run_on_ranks(ranks, function, *arguments, module="live_megatron_on_cpu", options=options)


@pytest.mark.parametrize(("variant", "options", "parallel", "ranks", "layout"), LAYOUTS,
                         ids=lambda v: str(v).replace("-model-parallel-size", ""))  # fmt: skip
def test_a_load_leaves_what_megatron_loads_of_the_conversion(
    variant, options, parallel, ranks, layout, weights, tmp_path
):
    folder, other = weights(variant, **options), weights(variant, seed=1, **options)
    hf_to_mcore(folder / "hf", tmp_path / "laid-out", layout)
    sources, theirs = [str(folder / "hf"), str(tmp_path / "laid-out")], tmp_path / "theirs"
    theirs.mkdir()
    if variant == "mixtral":  # whose names in memory are others, and its experts in one tensor
        model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype="auto")
        model.save_pretrained(tmp_path / "otherwise", save_original_format=False)
        sources.append(str(tmp_path / "otherwise"))
    results = on_ranks(
        ranks,
        "load_each",
        flags_at(folder / "mcore", parallel),
        sources,
        str(folder / "mcore"),
        str(other / "hf"),
        str(theirs),
        ddp="tied" not in variant,
    )
    # Megatron keeps the router's bias in fp32, whatever the checkpoint has.
    biased = any(
        name.endswith(("e_score_correction_bias", "expert_bias")) for name in hf_tensors(folder / "hf")
    )
    for (*of_the_same, from_other), reports, tensors in results:
        assert len(of_the_same) == len(sources) + 1 and not any(of_the_same)
        assert len(from_other) > 0.8 * tensors  # the control: other weights are seen
        assert all(report["tensors"] and (biased or report["cast_tensors"] == 0) for report in reports)
    size = sum(path.stat().st_size for path in (folder / "hf").glob("*.safetensors"))
    if not options and "tied" not in variant:  # what a rank reads is its share, not the model
        assert max(reports[0]["read_bytes"] for _, reports, _ in results) < 0.85 * size


def test_norms_over_all_heads_that_a_trainer_has_split_are_loaded_and_exported(weights):
    """With TP4 over two key heads, each of which two ranks have."""
    folder = weights("minimax-m2")
    expected = {name: bits(tensor) for name, tensor in hf_tensors(folder / "hf").items()}
    flags = flags_at(folder / "mcore", f"{TP} 4 {EP} 2 {ETP} 1")
    for wrong, exported in on_ranks(4, "with_split_norms", flags, str(folder / "hf")):
        exported |= {
            name: expected[name] for name in expected if name.endswith("e_score_correction_bias")
        }  # fp32 here
        assert wrong == [] and exported == expected


def without(source, destination, name):
    """A copy of a Hugging Face directory whose one file lacks a tensor, or a Megatron checkpoint
    whose metadata does not name it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, destination)
    path = destination / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    return destination


def test_what_does_not_fit_is_said_on_every_rank_before_the_first_byte(weights, tmp_path):
    folder = weights("qwen3")
    lacking = without(folder / "hf", tmp_path / "lacking", "model.layers.2.mlp.up_proj.weight")
    base = with_config(
        folder / "hf",
        tmp_path / "base",
        rope_theta=777.0,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0},
    )
    smaller, larger = (make(tmp_path / name, "qwen3", torch.bfloat16) for name in ("smaller", "larger"))
    with_vocabulary(smaller, 600)
    with_vocabulary(larger, 1100)
    wide = make(tmp_path / "wide", "qwen3", torch.float32)
    torn = tmp_path / "torn"
    shutil.copytree(folder / "mcore", torn)
    next(torn.rglob("*.distcp")).unlink()
    sources = [
        (str(lacking), {}, "lacks 1 of qwen3's tensors: model.layers.2.mlp.up_proj.weight"),
        (str(base), {}, "rotary_base is"),
        (str(weights("llama") / "hf"), {}, "the served model's"),
        (str(smaller), {}, "it is another vocabulary"),
        (str(larger), {}, "has 1008 vocabulary rows, fewer than vocab_size 1100"),
        (str(wide), {}, 'does not hold all of its numbers: pass dtype="bf16"'),
        (str(torn), {}, "lacks the files"),
        (str(tmp_path / "nothing"), {}, "is neither a directory nor a hub id"),
        (str(folder / "hf"), {"dtype": "int3"}, "dtype int3 is not one of bf16, fp16, fp32"),
        (str(folder / "hf"), {"workers": 0}, "workers is 0;"),
        (
            str(folder / "hf"),
            {"make_vocab_size_divisible_by": 0},
            "make_vocab_size_divisible_by is 0; it is a whole number",
        ),
        (str(folder / "hf"), {"metadata": 3}, "metadata is 3, not a dictionary"),
        (str(folder / "hf"), {"optimizer": "adam"}, "optimizer is a str, which has no main parameters"),
    ]
    flags = flags_at(folder / "mcore", f"{TP} 2 {PP} 2")
    results = on_ranks(
        4, "refused", flags, [(path, options) for path, options, _ in sources], good=str(folder / "hf")
    )
    for rank, said in enumerate(results):
        for (sentence, touched), (_, _, expected) in zip(said, sources):
            assert expected in sentence and touched == 0, (rank, sentence)
        head, adapter = said[-2][0], said[-1][0]
        assert "holds 2 parameters that qwen3 does not have: value_head.bias, value_head.weight" in head
        assert (
            "has 1 parameters that no published tensor fills, since its sharded_state_dict leaves them out: "
            "embedding.word_embeddings.adapter"
        ) in adapter


def with_vocabulary(directory, rows):
    """Give a model another vocabulary."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].repeat(2, 1)[:rows].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))


def test_tensors_that_no_rank_takes_are_named(weights):
    folder = weights("deepseek-v3", mtp=True)
    plain = weights("deepseek-v3")
    flags = flags_at(plain / "mcore", f"{PP} 2")  # a model without MTP
    sources = [(str(folder / "hf"), {}), (str(folder / "hf"), {"skip_mtp": True})]
    for said in on_ranks(2, "refused", flags, sources):
        (first, touched), (second, all_touched) = said
        assert (
            "of which no rank's model takes every element: model.layers.4." in first
            and "skip_mtp=True" in first
        )
        assert touched == 0 and second == "no error" and all_touched > 0


def test_numbers_that_a_cast_makes_infinite_are_counted(weights, tmp_path):
    from safetensors.torch import load_file, save_file

    source = make(tmp_path / "hf", "qwen3", torch.float32)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5:7] = 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    flags, options = flags_at(weights("qwen3") / "mcore", f"{PP} 2"), {"dtype": "fp16"}
    sources = [(str(source), options), (str(source), options | {"allow_overflow": True})]
    (refused, allowed), others = on_ranks(2, "refused", flags, sources, dtype="float16")
    sentence = (
        "2 numbers of model.layers.1.mlp.down_proj.weight are too large for float16 and became infinite"
    )
    assert refused[0].startswith(
        f"{sentence}; choose another dtype, or pass allow_overflow=True; the model now has some"
    )
    assert others[0][0].startswith(f"process 0 of 2 failed: {sentence}")
    assert allowed[0] == others[1][0] == "no error"


def test_a_rounding_cast_is_that_of_the_conversion_and_main_parameters_follow(tmp_path):
    source = make(tmp_path / "hf", "qwen3-moe", torch.float32)
    hf_to_mcore(source, tmp_path / "mcore", dtype="bf16", transformer_impl="local")
    flags = flags_at(tmp_path / "mcore", f"{TP} 2 {EP} 2 {ETP} 1")
    for differ, mains, expected, report in on_ranks(
        4, "cast_and_follow", flags, str(source), str(tmp_path / "mcore"), {"dtype": "bf16"}
    ):
        assert differ == [] and report["cast_tensors"] == report["tensors"]
        assert mains and all(
            torch.equal(a, b) and not (a == -77.0).any() for a, b in zip(mains, expected, strict=True)
        )


@pytest.mark.parametrize("way", ["fp8", "fp8_per_channel", "nvfp4"])
def test_codes_with_scales_are_read_as_the_conversion_reads_them(way, tmp_path, weights):
    folder = weights("qwen3-moe")
    mcore_to_hf(folder / "mcore", tmp_path / "codes", quantize=way)
    hf_to_mcore(tmp_path / "codes", tmp_path / "mcore", transformer_impl="local")
    flags = flags_at(tmp_path / "mcore", f"{TP} 2 {EP} 2 {ETP} 2")
    for (differ, control), _, _ in on_ranks(
        4, "load_each", flags, [str(tmp_path / "codes")], str(tmp_path / "mcore"), str(folder / "hf")
    ):
        assert differ == [] and control


def test_a_rank_that_fails_or_dies_while_it_reads_is_said_on_all(weights):
    folder = weights("qwen3")
    arguments = flags_at(folder / "mcore", f"{TP} 2"), str(folder / "hf")
    two_kinds = "the model now has some of the new weights: load again"
    first, last = on_ranks(2, "failing_load", *arguments, "EIO")
    assert last == f"cannot read the file: Input/output error; {two_kinds}"
    assert first == f"process 1 of 2 failed: cannot read the file: Input/output error; {two_kinds}"
    first, last = run_on_ranks(
        2, "failing_load", *arguments, "dies", module="live_megatron_on_cpu", may_die=True
    )
    assert first == f"process 1 of 2 was ended; {two_kinds}" and last is None


@pytest.mark.parametrize("kind", ["hf", "mcore"])
def test_a_source_that_is_rewritten_while_it_is_loaded_is_named_on_all_ranks(kind, weights, tmp_path):
    folder = weights("qwen3")
    source = shutil.copytree(folder / kind, tmp_path / kind)
    (source / "reshard.json").unlink(missing_ok=True)
    file = next(path for path in source.rglob("*") if path.suffix in (".safetensors", ".distcp"))
    ranks = on_ranks(2, "load_of_what_changes", flags_at(folder / "mcore", f"{TP} 2"), str(source), str(file))
    for said, after in ranks:
        assert f"{file} changed while it was read" in said and said.endswith("load again"), said
        assert after == "no error", "the control: it is loaded once nobody writes to it"


def test_a_load_compares_tensors_with_their_manifest_where_it_is_asked_to(weights, tmp_path):
    folder = weights("qwen3")
    flipped = shutil.copytree(folder / "mcore", tmp_path / "flipped")
    file = max(flipped.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)
    sources = (str(path) for path in (folder / "mcore", flipped, folder / "hf"))
    for good, spoiled, bare, unasked in on_ranks(
        2, "verified", flags_at(folder / "mcore", f"{TP} 2"), *sources
    ):
        assert good == unasked == "no error"
        assert "does not have the checksum of reshard.json" in spoiled
        assert "has no reshard.json with checksums of its tensors, so they cannot be verified" in bare
