"""Models under Megatron's generalized tensor parallelism (GTP): their checkpoints, and live ones."""

import re
import shutil
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

import reshard
from reshard import (
    MegatronLayout,
    ReshardError,
    check,
    diff,
    estimate_memory,
    hf_to_mcore,
    lora_to_megatron,
    lora_to_peft,
    mcore_to_hf,
    mcore_to_mcore,
)
from reshard.formats import torch_dist
from reshard.megatron import gtp
from reshard.storage.sources import megatron
from tests.live.test_live_save import unlike_trees
from tests.lora.test_lora_families import random_adapter
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.megatron.test_optimizer import RESHARDABLE
from tests.starting.ranks import run_on_ranks
from tests.tools.disk import tree
from tests.tools.oracle import bits, hf_tensors, same, stored_tensors
from tests.tools.refits import refit

pytestmark = pytest.mark.skipif(
    find_spec("megatron.core.tensor_parallel.gtp_api") is None, reason="megatron-core before 0.19 has no GTP"
)
GTP, EGTP = "--tensor-parallel-num-weight-shards", "--expert-tensor-parallel-num-weight-shards"

# variant, Megatron's layout on how many ranks: each axis, gate and up in dense layers and in experts, vocabularies
# padded within TP's parts, and either of GTP's two sizes alone.
SAVED = [
    ("qwen3", f"{GTP} 4", 4),
    ("llama-rope-tied", f"{TP} 2 {GTP} 4", 4),
    ("qwen3", f"{PP} 2 {GTP} 2", 4),
    ("qwen3-moe", f"{EP} 2 {ETP} 1 {GTP} 2 {EGTP} 2", 4),
    ("qwen3-moe", f"{ETP} 1 {GTP} 2 {EGTP} 4", 4),  # gate and up, padded
    ("qwen3-moe-mixed", f"{EP} 2 {ETP} 1 {EGTP} 2", 4),
    ("deepseek-v3", f"{TP} 2 {EP} 2 {ETP} 1 {GTP} 4", 4),
    ("minimax-m2", f"{TP} 2 {EP} 2 {ETP} 2 {GTP} 4 {EGTP} 4", 8),
    ("gpt-oss", f"{GTP} 2 {EGTP} 2", 2),
]


def short(value) -> str:
    return re.sub(r"--(?:|expert-)tensor-parallel-num-weight", "", str(value)).replace(
        "-model-parallel-size", ""
    )


def saved(source, folder, parallel, ranks, how="save", **options):
    """The checkpoint that a trainer under GTP saves of these weights, as ``--load`` takes it."""
    hf_to_mcore(source, folder / "ours", transformer_impl="local")
    (folder / "gtp" / "iter_0000007").mkdir(parents=True)
    places = str(folder / "ours"), str(folder / "gtp" / "iter_0000007")
    on_ranks(ranks, how, flags_at(folder / "ours", parallel), *places, **options)
    (folder / "gtp" / "latest_checkpointed_iteration.txt").write_text("7")
    return folder / "gtp"


def on_ranks(ranks, function, *arguments, **options):
    return run_on_ranks(ranks, function, *arguments, module="gtp_on_cpu", options=options)


@pytest.mark.parametrize(("variant", "parallel", "ranks"), SAVED, ids=short)
def test_what_megatron_saves_under_gtp_becomes_the_hugging_face_tensors(
    variant, parallel, ranks, checkpoint, tmp_path, monkeypatch
):
    source = checkpoint(variant)
    theirs = saved(source, tmp_path, parallel, ranks)
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    assert diff(source, theirs, hf_config=source).equal
    # The control: the same files read as those of a trainer without GTP.
    monkeypatch.setattr(megatron, "gtp_of", lambda *_: gtp.WITHOUT_GTP)
    try:
        mcore_to_hf(theirs, tmp_path / "as without", hf_config=source)
    except ReshardError as error:
        assert "has shape" in str(error)
    else:
        assert same(hf_tensors(source), hf_tensors(tmp_path / "as without")) != []


def test_halves_with_keys_of_their_own_are_read(checkpoint, tmp_path):
    source = checkpoint("qwen3-moe")
    theirs = saved(source, tmp_path, f"{ETP} 1 {GTP} 2 {EGTP} 4", 4, singleton_local_shards=True)
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []


def test_a_vocabulary_padded_in_the_middle_needs_its_size(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    theirs = saved(source, tmp_path, f"{TP} 2 {GTP} 4", 4, args=False)
    with pytest.raises(
        ReshardError, match="no args or run_config.yaml that say whether it was saved under GTP"
    ):
        mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    (theirs / "iter_0000007" / "run_config.yaml").write_text(
        "model:\n  tensor_model_parallel_size: 2\n  tensor_parallel_num_weight_shards: 4\n"
    )
    with pytest.raises(ReshardError, match="do not say padded_vocab_size, without which a row"):
        mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(("parallel", "said"), [
    (f"{GTP} 2", "has 192 rows in chunks of 96: GTP 2 does not save the parameter's 192 so"),
    (f"{TP} 2 {GTP} 4", "is cut as for 1 tensor parallel ranks, and .* as for 2: this Megatron-Core arranges gate"),
])  # fmt: skip
def test_gates_in_an_order_of_a_later_megatron_are_refused(parallel, said, checkpoint, tmp_path):
    theirs = saved(checkpoint("qwen3"), tmp_path, parallel, 4, "save_in_order")
    with pytest.raises(ReshardError, match=said):
        mcore_to_hf(theirs, tmp_path / "out", hf_config=checkpoint("qwen3"))


def test_arguments_decide_where_there_are_any(checkpoint, tmp_path):
    """Rows may be cut without GTP, by whatever wrote the file; and what is cut otherwise than it says is refused."""
    source = checkpoint("qwen3")
    theirs = saved(source, tmp_path, f"{GTP} 2", 2)
    shutil.copytree(theirs, tmp_path / "other")
    for said, folder in ((1, theirs), (4, tmp_path / "other")):
        [path] = folder.rglob(".metadata")
        torch.save(
            {"args": Namespace(gtp_weight_remat_size=said, padded_vocab_size=1000), "content_metadata": {}},
            path.parent / "common.pt",
        )
    mcore_to_hf(theirs, tmp_path / "as without", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "as without")) != []
    [path] = theirs.rglob(".metadata")
    for number, said in enumerate(
        (
            {"tensor_model_parallel_size": 1, "tensor_parallel_num_weight_shards": 2},
            {"tensor_parallel_num_weight_shards": 2, "gtp_weight_remat_size": None},
            {"gtp_weight_remat_size": 2, "expert_gtp_weight_remat_size": 2},  # of a model without experts
            {
                "tensor_parallel_num_weight_shards": 2,
                "gtp_weight_remat_size": 1,
            },  # Megatron goes by the first
        )
    ):
        args = Namespace(padded_vocab_size=1000, **said)
        torch.save({"args": args, "content_metadata": {}}, path.parent / "common.pt")
        mcore_to_hf(theirs, tmp_path / f"back {number}", hf_config=source)
        assert same(hf_tensors(source), hf_tensors(tmp_path / f"back {number}")) == [], said
    for number, (args, config) in enumerate(
        ((None, ""), ({"iteration": 3}, ""), (None, "2"), ({"iteration": 3}, "1"))
    ):
        common = {"content_metadata": {}} | ({} if args is None else {"args": Namespace(**args)})
        torch.save(common, path.parent / "common.pt")
        if not config:
            with pytest.raises(
                ReshardError, match="no args or run_config.yaml that say whether it was saved"
            ):
                mcore_to_hf(theirs, tmp_path / "out", hf_config=source)
            continue
        (path.parent / "run_config.yaml").write_text(f"model:\n  gtp_weight_remat_size: {config}\n")
        mcore_to_hf(theirs, tmp_path / f"said {number}", hf_config=source)
        is_right = same(hf_tensors(source), hf_tensors(tmp_path / f"said {number}")) == []
        assert is_right is (config == "2"), "as the config says"
    for config, sentence in (
        ("num_layers: 4", "no args or run_config.yaml that say whether it was saved"),
        ("tensor_parallel_num_weight_shards: 1\n  gtp_weight_remat_size: 2", "which contradict each other"),
    ):
        (path.parent / "run_config.yaml").write_text(f"model:\n  tensor_model_parallel_size: 1\n  {config}\n")
        with pytest.raises(ReshardError, match=sentence):
            mcore_to_hf(theirs, tmp_path / "out", hf_config=source)
    with pytest.raises(
        ReshardError, match="args of GTP 4 and, of experts, 1, but weights that GTP 2 and 1 has cut"
    ):
        mcore_to_hf(tmp_path / "other", tmp_path / "out", hf_config=source)


def test_a_chunk_has_each_row_of_its_parameter_or_padding():
    """Against rows that are cut as by Megatron: by tensor parallel rank, padded, by GTP rank, in halves."""
    for rows, tp, shards, halves in [
        (40, 2, 2, 1),
        (96, 1, 4, 2),
        (80, 2, 2, 2),
        (48, 1, 1, 2),
        (20, 1, 4, 1),
    ]:
        own = torch.arange(rows).reshape(halves, tp, -1).transpose(0, 1).reshape(tp, -1)
        padded = -(-own.shape[1] // (16 * shards)) * 16 * shards
        own = torch.nn.functional.pad(own, (0, padded - own.shape[1]), value=-1)
        chunks = own.reshape(tp * shards, halves, -1).transpose(0, 1).reshape(halves * tp * shards, -1)
        chunk_rows = chunks.shape[1]
        found = gtp.ShardedRows(tp, rows // tp, shards, chunk_rows, halves, None)
        for index, expected in enumerate(chunks):
            held = torch.full((chunk_rows,), -1)
            for at, row, n in found.pieces(index * chunk_rows):
                held[at : at + n] = torch.arange(row, row + n)
            assert held.tolist() == expected.tolist()


# variant, Megatron's layout on how many ranks, vLLM's on how many, in the same processes.
REFITTED = [
    ("qwen3", f"{TP} 2 {GTP} 4", 4, dict(tp=4), 4, True, {}),
    ("qwen2-tied", f"{GTP} 4", 4, dict(tp=2), 2, False, {"ddp": True}),
    ("qwen3-moe", f"{EP} 2 {ETP} 1 {GTP} 2 {EGTP} 2", 4, dict(tp=2), 2, False, {}),
    (
        "deepseek-v3",
        f"{TP} 2 {EP} 2 {ETP} 1 {GTP} 4",
        4,
        dict(tp=4, enable_expert_parallel=True),
        4,
        True,
        {},
    ),
]


@pytest.mark.parametrize(
    ("variant", "parallel", "trainers", "engine", "engines", "together", "options"), REFITTED, ids=short
)
def test_a_refit_under_gtp_leaves_what_vllms_own_loader_makes_of_the_export(
    variant, parallel, trainers, engine, engines, together, options, converted, tmp_path
):
    refit(converted(variant), parallel, trainers, engine, engines, together, tmp_path, **options)


# variant, Megatron's layout on how many ranks, and as a layout of ours.
LAYOUTS = [
    ("qwen3", f"{TP} 2 {GTP} 4", 4, MegatronLayout(tp=2, gtp=2)),
    ("llama-rope-tied", f"{PP} 2 {GTP} 2", 4, MegatronLayout(pp=2, gtp=2)),
    ("qwen3-moe", f"{EP} 2 {ETP} 1 {GTP} 2 {EGTP} 2", 4, MegatronLayout(ep=2, etp=1, gtp=2, egtp=2)),
    ("qwen3-moe", f"{ETP} 1 {GTP} 2 {EGTP} 4", 4, MegatronLayout(etp=1, gtp=2, egtp=4)),  # padded below up
]
FORM = {"transformer_impl": "local", "make_vocab_size_divisible_by": 8}


@pytest.mark.parametrize(("variant", "parallel", "ranks", "layout"), LAYOUTS, ids=short)
def test_a_live_model_under_gtp_is_loaded_saved_and_exported(
    variant, parallel, ranks, layout, weights, tmp_path
):
    folder, other = weights(variant), weights(variant, seed=1)
    source, mcore = str(folder / "hf"), str(folder / "mcore")
    arguments = flags_at(folder / "mcore", parallel), [mcore, str(other / "mcore")], source
    results = on_ranks(ranks, "load_and_save", *arguments, [source, mcore], str(tmp_path))
    published = {name: bits(tensor) for name, tensor in hf_tensors(folder / "hf").items()}
    for (from_hf, from_mcore, of_others), exported, digest in results:
        assert digest == reshard.digest(source).text
        assert from_hf == from_mcore == []
        assert of_others  # the control
        assert dict(exported) == published
    assert same(hf_tensors(folder / "hf"), hf_tensors(tmp_path / "hf")) == []
    assert diff(folder / "hf", tmp_path / "mcore").equal and check(tmp_path / "mcore").ok
    hf_to_mcore(folder / "hf", tmp_path / "expected", layout, **FORM)
    assert unlike_trees(tmp_path / "mcore", tmp_path / "expected") == []


@pytest.mark.parametrize(("variant", "parallel", "ranks", "layout"), LAYOUTS, ids=short)
def test_megatrons_loader_under_gtp_wants_a_checkpoint_that_was_cut_for_it(
    variant, parallel, ranks, layout, weights, tmp_path
):
    folder, options = weights(variant), FORM
    hf_to_mcore(folder / "hf", tmp_path / "cut", layout, **options)
    hf_to_mcore(folder / "hf", tmp_path / "not", MegatronLayout(tp=layout.tp), **options)
    mcore_to_mcore(tmp_path / "not", tmp_path / "moved", layout, **options)
    flags = flags_at(folder / "mcore", parallel)
    written = [str(tmp_path / name) for name in ("cut", "moved", "not")]
    for cut, moved, other in on_ranks(ranks, "loaded_by_megatron", flags, str(folder / "mcore"), written):
        assert cut == moved == []
        # Megatron's own fault: these are the weights of gate and up in another order, without a word but for padding.
        assert ("Global shape mismatch" in other[0]) == (layout.egtp == 4)
        assert other and all(("linear_fc1" if layout.tp == 1 else "weight") in name for name in other)
    said = (tmp_path / "cut" / "megatron_flags.txt").read_text().split()
    words = parallel.split()
    assert {words[at + 1] for at, w in enumerate(words) if w == GTP} == {said[said.index(GTP) + 1]}
    assert diff(tmp_path / "cut", folder / "hf").equal and check(tmp_path / "cut").ok
    mcore_to_mcore(tmp_path / "cut", tmp_path / "back", MegatronLayout(tp=layout.tp), **options)
    assert files_of(tmp_path / "back") == files_of(tmp_path / "not")


def files_of(directory) -> dict[str, bytes]:
    return {name: data for name, data in tree(directory).items() if name.endswith(".distcp")}


def test_shards_that_were_exchanged_are_other_weights(weights, tmp_path):
    folder = weights("qwen3")
    arguments = flags_at(folder / "mcore", f"{GTP} 2"), str(folder / "mcore"), str(folder / "hf")
    on_ranks(2, "exchanged", *arguments, str(tmp_path / "hf"))
    assert same(hf_tensors(folder / "hf"), hf_tensors(tmp_path / "hf")) == [
        "model.layers.1.mlp.down_proj.weight"
    ]


def test_a_checkpoint_of_linear_attention_that_gtp_has_cut_is_not_read(checkpoint, tmp_path, monkeypatch):
    hf_to_mcore(checkpoint("qwen3-next"), tmp_path / "mcore", MegatronLayout())
    mcore_to_hf(tmp_path / "mcore", tmp_path / "hf")
    monkeypatch.setattr(megatron, "gtp_of", lambda *_: gtp.Gtp(2, 1))
    with pytest.raises(ReshardError, match="saved under GTP, of a qwen3_next model with layers of linear"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "other")


def test_what_is_not_done_under_gtp_is_refused(checkpoint, tmp_path):
    source, layout = checkpoint("qwen3-next"), MegatronLayout(gtp=2)
    with pytest.raises(ReshardError, match="layers of linear attention or Mamba, whose rows"):
        hf_to_mcore(source, tmp_path / "out", layout)
    with pytest.raises(ReshardError, match="without experts has only"):
        hf_to_mcore(checkpoint("qwen3"), tmp_path / "out", MegatronLayout(egtp=2))
    with pytest.raises(ReshardError, match="no arguments for generalized tensor parallelism: 0.19 is"):
        hf_to_mcore(checkpoint("qwen3"), tmp_path / "out", layout, megatron_version="0.18")
    with pytest.raises(ReshardError, match="keep the down projections of multi-head latent attention whole"):
        hf_to_mcore(checkpoint("deepseek-v3"), tmp_path / "out", layout)
    with pytest.raises(ReshardError, match="the memory of a trainer under GTP is not estimated"):
        estimate_memory(checkpoint("qwen3"), layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("variant", "parallel", "ranks", "layout"), [LAYOUTS[0], LAYOUTS[2]], ids=short)
def test_optimizer_states_are_moved_out_of_gtp_and_back(variant, parallel, ranks, layout, weights, tmp_path):
    folder, options = weights(variant), FORM
    flags = flags_at(folder / "mcore", parallel, RESHARDABLE)
    places = str(folder / "mcore"), str(tmp_path / "saved")
    on_ranks(ranks, "states_saved_and_loaded", flags, *places)
    without = replace(layout, gtp=1, egtp=1)
    mcore_to_mcore(tmp_path / "saved", tmp_path / "without", without, hf_config=folder / "hf", **options)
    stored = stored_tensors(tmp_path / "without" / "iter_0000003")
    for name, moment in (("exp_avg", lambda w: w * 0.5), ("exp_avg_sq", lambda w: w**2)):
        prefix = f"optimizer.state.{name}."
        states = {key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)}
        assert len(states) > 8
        assert [k for k, state in states.items() if not torch.equal(state, moment(stored[k].float()))] == []
    assert (
        "gtp_weight_remat_size" not in torch_dist.read(tmp_path / "without" / "iter_0000003").common()["args"]
    )
    mcore_to_hf(tmp_path / "without", tmp_path / "hf")
    assert same(hf_tensors(folder / "hf"), hf_tensors(tmp_path / "hf")) == []
    mcore_to_mcore(tmp_path / "without", tmp_path / "back", layout, **options)
    for moved, differs in ((tmp_path / "back", False), (tmp_path / "without", True)):
        results = on_ranks(ranks, "states_saved_and_loaded", flags, *places, str(moved))
        assert any(results) == differs, results[0][:5]


def test_an_adapter_that_was_trained_under_gtp_is_refused(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    of = random_adapter(
        AutoModelForCausalLM.from_pretrained(source), tmp_path / "adapter", target_modules="all-linear"
    )
    lora_to_megatron(of, tmp_path / "lora", hf_config=source)
    lora_to_peft(tmp_path / "lora", tmp_path / "back")  # the control
    [path] = (tmp_path / "lora").rglob("common.pt")
    common = torch.load(path, weights_only=False)
    common["args"].gtp_weight_remat_size = 2
    torch.save(common, path)
    with pytest.raises(
        ReshardError, match="holds an adapter that was trained under GTP, which is not converted"
    ):
        lora_to_peft(tmp_path / "lora", tmp_path / "out")
    assert not (tmp_path / "out").exists()
