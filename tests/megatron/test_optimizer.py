"""Optimizer states that move with a checkpoint: real Megatron-LM trains, saves and resumes."""

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
from reshard.formats import torch_dist
from reshard.megatron.training.progress import TrainingState
from reshard.megatron.training.states import check_movable, states_of
from tests.live.test_live_save import unlike_trees
from tests.megatron.test_logits import EP, ETP, PP, TP, VPP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.disk import cli, command, ended, environment, journal, until
from tests.tools.oracle import hf_tensors, same, stored_tensors

pytestmark = pytest.mark.skipif(
    find_spec("megatron.core.dist_checkpointing.gpt_checkpoint_interop") is None,
    reason="megatron-core before 0.19 has no loader of a GPTModel's optimizer for a HybridModel",
)
RESHARDABLE = "--bf16 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
BEFORE, AFTER = 2, 2  # steps of the training before and after its save
FORM = {"transformer_impl": "local", "make_vocab_size_divisible_by": 8}
ITERATION = "iter_0000002"
EARLIER = ("dp_zero_gather_scatter",)
EP2 = MegatronLayout(ep=2, etp=1)
QKV = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"


class Runs:
    """Two trainings, of a model with experts under the distributed optimizer and of a dense one under a
    plain one, with their checkpoints; a third with flat buffers; and what is made of them."""

    def __init__(self, folder: Path, sources: dict[str, Path]) -> None:
        self.folder, self.configs = folder, sources
        for variant, source in sources.items():
            hf_to_mcore(source, folder / f"{variant}-mcore", transformer_impl="local")
        self.of_experts = self.flags("qwen3-moe", f"{EP} 2 {ETP} 1")
        self.dense = self.flags("qwen3", f"{TP} 2", "--bf16")
        self.muon = self.flags("qwen3", f"{TP} 2", "--bf16 --optimizer muon")
        by_layers = self.flags("qwen3-moe", f"{EP} 2 {ETP} 1", f"{RESHARDABLE} --optimizer muon")
        buffers = [flag for flag in self.of_experts if flag != "--dist-ckpt-optim-fully-reshardable"]
        runs = [
            (self.of_experts, self.path("qwen3-moe-mcore"), self.path("moe"), BEFORE, AFTER),
            (self.dense, self.path("qwen3-mcore"), self.path("dense"), BEFORE, AFTER),
            (buffers, self.path("qwen3-moe-mcore"), self.path("buffers"), 1, 0),
            (self.muon, self.path("qwen3-mcore"), self.path("muon"), BEFORE, AFTER),
            (by_layers, self.path("qwen3-moe-mcore"), self.path("by-layers"), 1, 0),
            *((buffers, self.path("qwen3-moe-mcore"), self.path(name), 1, 0, name) for name in EARLIER),
        ]  # fmt: skip
        self.losses = run_on_ranks(2, "train_each", runs, module="optimizer_on_cpu")
        config, dense = ({"hf_config": sources[name]} for name in ("qwen3-moe", "qwen3"))
        self.move("moe", "stages", MegatronLayout(pp=2, vpp=2), **config)
        self.move("moe", "hybrid", EP2, model_class="hybrid", **config)
        self.move("hybrid", "back", EP2)
        self.move("stages", "split", EP2)
        self.move("dense", "dense-stages", MegatronLayout(pp=2), **dense)
        self.move("dense", "dense-hybrid", MegatronLayout(tp=2), **dense, model_class="hybrid")
        self.move("dense-hybrid", "dense-back", MegatronLayout(tp=2))
        self.move("muon", "muon-stages", MegatronLayout(pp=2), **dense)
        self.move("muon", "muon-hybrid", MegatronLayout(tp=2), **dense, model_class="hybrid")
        self.move("muon-hybrid", "muon-back", MegatronLayout(tp=2))
        shutil.copytree(folder / "back", folder / "exchanged")
        exchange(folder / "exchanged" / ITERATION)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def flags(self, variant: str, parallel: str, options: str = RESHARDABLE) -> list[str]:
        return flags_at(self.folder / f"{variant}-mcore", parallel, options, "--ckpt-format torch_dist")

    def move(self, source: str, destination: str, layout: MegatronLayout, **options):
        return mcore_to_mcore(self.folder / source, self.folder / destination, layout, **FORM | options)


def exchange(directory: Path) -> None:
    """Exchange the first moments of the attention of two layers, as they lie in the files."""
    stored = torch_dist.read(directory)
    places = [
        (directory / at.file, stored.tensor_at(at).offset, 4 * sizes[1] * sizes[2])
        for ((layer, *_), sizes), at in sorted(stored.keys[QKV].chunks.items())
        if layer < 2
    ]
    data = [path.read_bytes()[offset : offset + size] for path, offset, size in places]
    assert len(data) == 2 and data[0] != data[1]
    for (path, offset, _), other in zip(places, reversed(data), strict=True):
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(other)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, checkpoint):
    sources = {name: checkpoint(name, dtype=torch.bfloat16) for name in ("qwen3-moe", "qwen3")}
    return Runs(tmp_path_factory.mktemp("optimizer"), sources)


@pytest.fixture(scope="module")
def resumed(runs):
    """For each rank and layout, what Megatron loads of several directories, held against what it loads of the first:
    the training's own, where it can change the layout."""
    cases = {
        "experts": (runs.of_experts, "", ["moe", "back", "split", "exchanged"], AFTER, ""),
        "hybrid": (runs.of_experts, "*E*E*E*E", ["moe", "hybrid"], AFTER, ""),
        "stages": (runs.flags("qwen3-moe", f"{PP} 2 {VPP} 2"), "", ["stages"], 0, "stages-saved"),
        "tensors": (runs.flags("qwen3-moe", f"{TP} 2 {ETP} 2"), "", ["stages"], 0, "tensors-saved"),
        "dense stages": (runs.flags("qwen3", f"{PP} 2", "--bf16"), "", ["dense", "dense-stages"], 0, ""),
        "dense": (runs.dense, "", ["dense", "dense-back"], AFTER, ""),
        "dense hybrid": (runs.dense, "*-*-*-*-", ["dense", "dense-hybrid"], AFTER, ""),
        "muon": (runs.muon, "", ["muon", "muon-back"], AFTER, ""),
        "muon hybrid": (runs.muon, "*-*-*-*-", ["muon", "muon-hybrid"], AFTER, ""),
        "muon stages": (
            runs.flags("qwen3", f"{PP} 2", "--bf16 --optimizer muon"),
            "",
            ["muon", "muon-stages"],
            0,
            "",
        ),
        **{name: (runs.of_experts, "", [name], 1, f"{name}-saved") for name in ("buffers", *EARLIER)},
    }
    arguments = []
    for flags, pattern, names, steps, saved in cases.values():
        paths = [runs.path(name) for name in names]
        arguments.append((flags, pattern, paths, steps, saved and runs.path(saved)))
    of_ranks = run_on_ranks(2, "resume", arguments, module="optimizer_on_cpu")
    return [dict(zip(cases, said, strict=True)) for said in of_ranks]


def test_megatron_loads_of_a_moved_checkpoint_what_it_loads_of_the_training_s_own(resumed):
    """Bit for bit: weights, main parameters and moments, steps, schedule and samples."""
    for of_rank in resumed:
        for name, (own, *moved) in of_rank.items():
            if name in ("buffers", *EARLIER):
                continue
            for iteration, differ, count, places, _ in (own, *moved[:2]):
                assert (iteration, differ, count, places) == (BEFORE, [], own[2], own[3]), name
                assert count > (40 if "muon" in name else 60) and places == (2 * BEFORE, 4 * BEFORE)


def test_a_resumed_training_has_the_losses_of_an_undisturbed_one(runs, resumed):
    for of_rank, (of_experts, of_dense, _, of_muon, *_) in zip(resumed, runs.losses, strict=True):
        for name, undisturbed in (
            ("muon", of_muon),
            ("muon hybrid", of_muon),
            ("experts", of_experts),
            ("hybrid", of_experts),
            ("dense", of_dense),
            ("dense hybrid", of_dense),
        ):
            for *_, losses in of_rank[name][:3]:
                assert losses == undisturbed[BEFORE:], name
        assert len({*of_experts, *of_dense}) == 2 * (BEFORE + AFTER)
        assert of_muon[2:] != of_dense[2:]


@pytest.mark.parametrize("saved", ["stages-saved", "tensors-saved"])
def test_megatron_saves_again_what_it_loads_where_experts_have_no_optimizer_of_their_own(
    saved, runs, resumed
):
    """As at EP1, where Megatron does not load its own checkpoint of EP2."""
    trained = stored_tensors(runs.folder / "moe" / ITERATION)
    again = stored_tensors(runs.folder / saved / ITERATION)
    rows = {key: tensor[:1000] for key, tensor in again.items() if len(tensor) == 1008}  # at TP2
    assert same(trained, again | rows) == []


def test_moments_of_two_layers_in_each_other_s_place_are_seen(runs, resumed):
    differing = [name for of_rank in resumed for name in of_rank["experts"][3][1]]
    assert len(differing) >= 2 and all(name.endswith(".exp_avg") for name in differing)
    for of_rank, (undisturbed, *_) in zip(resumed, runs.losses, strict=True):
        *_, losses = of_rank["experts"][3]
        assert losses[0] == undisturbed[BEFORE] and losses[1] != undisturbed[BEFORE + 1]
    result = check(runs.folder / "exchanged")
    assert not result.ok and all(
        name.startswith("optimizer.state.exp_avg.model.layers.") for name in result.bad
    )


def test_every_state_lies_where_its_parameter_does(runs):
    """Read by torch, whole: the same tensors under the same keys, whatever the layout."""
    trained = stored_tensors(runs.folder / "moe" / ITERATION)
    assert sum(key.startswith("optimizer.state.") for key in trained) == 36
    for name in ("stages", "back"):
        assert same(trained, stored_tensors(runs.folder / name / ITERATION)) == []
        assert check(runs.folder / name).ok
    hybrid = stored_tensors(runs.folder / "hybrid" / ITERATION)
    for kind in ("exp_avg", "exp_avg_sq", "param"):
        for layer in range(4):
            for half, weight in enumerate(("self_attention.linear_qkv", "mlp.experts.experts.linear_fc2")):
                moved = hybrid[f"optimizer.state.{kind}.decoder.layers.{2 * layer + half}.{weight}.weight"]
                assert torch.equal(
                    moved, trained[f"optimizer.state.{kind}.decoder.layers.{weight}.weight"][layer]
                )


def test_padding_that_training_has_written_stays_as_far_as_there_is_room(runs, tmp_path):
    """1008 rows at TP2; 1000 without padding; 1024 where more is padded."""
    trained = stored_tensors(runs.folder / "dense" / ITERATION)
    runs.move("dense-hybrid", tmp_path / "wider", MegatronLayout(tp=4), make_vocab_size_divisible_by=256)
    runs.move(tmp_path / "wider", tmp_path / "narrow", MegatronLayout())
    assert check(tmp_path / "wider").ok and check(tmp_path / "narrow").ok
    for key in ("output_layer.weight", "optimizer.state.exp_avg_sq.output_layer.weight"):
        own = trained[key]
        assert len(own) == 1008 and own[1000:].abs().min() > 0
        kept, wider, narrow = (
            stored_tensors(path / ITERATION)[key]
            for path in (runs.folder / "dense-hybrid", tmp_path / "wider", tmp_path / "narrow")
        )
        assert torch.equal(kept, own) and torch.equal(narrow, own[:1000])
        assert len(wider) == 1024 and torch.equal(wider[:1008], own) and not wider[1008:].any()


def test_weights_alone_are_those_of_the_training(runs, tmp_path):
    config = {"hf_config": runs.configs["qwen3-moe"]}
    report = runs.move("moe", tmp_path / "weights", EP2, without_optimizer=True, **config)
    assert "ignored 36 entries of optimizer state" in report.notices
    assert (tmp_path / "weights" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert not any(key.startswith("optimizer") for key in stored_tensors(tmp_path / "weights" / "release"))
    runs.move("back", tmp_path / "again", EP2, without_optimizer=True)
    assert unlike_trees(tmp_path / "weights", tmp_path / "again") == []
    mcore_to_hf(runs.folder / "moe", tmp_path / "hf", **config)
    mcore_to_hf(runs.folder / "stages", tmp_path / "of-moved")
    assert same(hf_tensors(tmp_path / "hf"), hf_tensors(tmp_path / "of-moved")) == []
    assert diff(runs.folder / "hybrid", tmp_path / "weights").equal


def test_a_cast_leaves_the_states_as_they_are(runs, tmp_path):
    report = runs.move("back", tmp_path / "wide", EP2, dtype="fp32", iteration=7)
    assert "optimizer states go along: exp_avg, exp_avg_sq, param" in report.notices
    wide = stored_tensors(tmp_path / "wide" / "iter_0000007")
    trained = stored_tensors(runs.folder / "moe" / ITERATION)
    states = {key for key in trained if key.startswith("optimizer.state.")}
    assert {wide[key].dtype for key in wide} == {torch.float32}
    assert same({key: wide[key] for key in states}, {key: trained[key] for key in states}) == []


@pytest.mark.parametrize("name", ["buffers", *EARLIER])
def test_states_that_belong_to_a_layout_are_refused_by_name(name, runs, tmp_path):
    states_format = {"buffers": "dp_reshardable"}.get(name, name)
    with pytest.raises(
        ReshardError,
        match=rf"in the format {states_format}, .*resume it once at that layout with "
        "--dist-ckpt-optim-fully-reshardable, .*, or pass --without-optimizer",
    ):
        runs.move(name, tmp_path / "out", EP2, hf_config=runs.configs["qwen3-moe"])
    said = inspect(runs.folder / name).details["optimizer"]
    assert said.startswith(
        f"{states_format}, which belongs to the layout that it was saved at: resume it once"
    )


@pytest.mark.parametrize(
    "states_format", ["fully_sharded_model_space", "fully_sharded_bucket_space", "fsdp_dtensor"]
)
def test_formats_that_megatron_does_not_read_any_more_are_refused_by_name(states_format, runs, tmp_path):
    """Which Megatron-Core 0.19 neither saves nor loads: so a checkpoint says that it has them."""
    content = {"distrib_optim_sharding_type": states_format}
    stored = torch_dist.read(runs.folder / "moe" / ITERATION)
    states = states_of(
        SimpleNamespace(keys=stored.keys, objects={}, common=lambda: {"content_metadata": content})
    )
    assert not states.can_move and states.describe().startswith(
        f"{states_format}, which belongs to the layout"
    )
    with pytest.raises(
        ReshardError, match=f"run has its optimizer states in the format {states_format}, .* or pass --wit"
    ):
        check_movable(states, "run")
    assert ("with the one that saved it" in states.describe()) == states_format.startswith("fully_sharded")


def test_weights_of_a_run_with_flat_buffers_are_converted_without_them(runs, tmp_path):
    done = cli(
        "mcore-to-mcore",
        runs.folder / "buffers",
        tmp_path / "weights",
        "--hf-config",
        runs.configs["qwen3-moe"],
        "--without-optimizer",
    )
    assert done.returncode == 0 and "optimizer state" in done.stderr


def test_a_run_with_flat_buffers_is_moved_once_megatron_has_saved_it_anew(runs, resumed, tmp_path):
    """As the refusal says: with the flag, at the same layout."""
    for of_rank, (of_experts, *_) in zip(resumed, runs.losses, strict=True):
        for name in ("buffers", *EARLIER):
            [(iteration, _, _, _, losses)] = of_rank[name]
            assert iteration == 1 and losses == of_experts[1:2], name
    report = runs.move(
        "buffers-saved", tmp_path / "moved", MegatronLayout(pp=2), hf_config=runs.configs["qwen3-moe"]
    )
    assert "optimizer states go along: exp_avg, exp_avg_sq, param" in report.notices
    saved, moved = (
        stored_tensors(path / "iter_0000001") for path in (runs.folder / "buffers-saved", tmp_path / "moved")
    )
    assert same(saved, moved) == []
    for name in EARLIER:
        assert same(saved, stored_tensors(runs.folder / f"{name}-saved" / "iter_0000001")) == []


def test_inspect_says_which_states_can_be_moved(runs):
    of_experts, dense = (inspect(runs.folder / name).details["optimizer"] for name in ("moe", "dense"))
    assert of_experts == "fully_reshardable (exp_avg, exp_avg_sq, param), moved by mcore-to-mcore"
    assert dense == "regular (exp_avg, exp_avg_sq, fp32_param), moved by mcore-to-mcore"
    assert "optimizer" not in inspect(runs.folder / "qwen3-mcore").details


def test_diff_compares_the_states_of_two_trainings_and_says_what_it_leaves_out(runs):
    def compared(a: str, b: str):
        return diff(runs.folder / a, runs.folder / b, hf_config=runs.configs["qwen3-moe"])

    moved, exchanged = compared("moe", "stages"), compared("moe", "exchanged")
    states = sum(name.startswith("optimizer.state.") for name in moved.names)
    weights = len(hf_tensors(runs.configs["qwen3-moe"]))
    assert moved.equal and states == 3 * weights and "schedules" in str(moved.notices)
    # The control: the first moments of two layers in each other's place, with the same weights.
    assert not exchanged.equal and not exchanged.only_a and not exchanged.only_b
    assert all(each.name.startswith("optimizer.state.exp_avg.") for each in exchanged.differences)
    # What cannot be compared is named, and the weights are.
    flat, alone = compared("buffers", "buffers"), compared("moe", "qwen3-moe-mcore")
    assert flat.equal and "optimizer states were not compared" in str(flat.notices)
    assert "dp_reshardable" in str(flat.notices)
    assert "moe has optimizer states, and" in str(alone.notices) and not alone.only_a
    assert not any("optimizer" in name for name in (*flat.names, *alone.names))


def test_states_of_muon_are_moved_where_experts_keep_the_optimizer_that_they_have(runs, tmp_path):
    of_both, by_layers = (inspect(runs.folder / name).details["optimizer"] for name in ("muon", "by-layers"))
    assert of_both == "regular (exp_avg, exp_avg_sq, fp32_param, momentum_buffer), moved by mcore-to-mcore"
    assert by_layers == of_both.replace("regular", "fully_reshardable")
    config = {"hf_config": runs.configs["qwen3-moe"]}
    runs.move("by-layers", tmp_path / "hybrid", EP2, model_class="hybrid", **config)
    runs.move(tmp_path / "hybrid", tmp_path / "back", EP2)
    saved, back = (
        stored_tensors(path / "iter_0000001") for path in (runs.folder / "by-layers", tmp_path / "back")
    )
    assert same(saved, back) == [] and any(".momentum_buffer." in key for key in saved)
    with pytest.raises(
        ReshardError, match="--optimizer muon has experts in groups of parameters of their own at"
    ):
        runs.move("by-layers", tmp_path / "never", MegatronLayout(pp=2), **config)
    assert not (tmp_path / "never").exists()


def rewrite(directory: Path, change) -> None:
    """Write an iteration's metadata again, with changed keys."""
    stored = torch_dist.read(directory)
    (directory / ".metadata").write_bytes(torch_dist.metadata_bytes(change(stored.keys), stored.objects, ""))


def test_a_layer_that_was_not_trained_has_no_states_on_the_other_side_either(runs, tmp_path):
    directory = shutil.copytree(runs.folder / "moe", tmp_path / "moe") / ITERATION

    def freeze(keys):
        for key in (
            key for key in keys if key.startswith("optimizer.state.") and ".linear_qkv.weight" in key
        ):
            keys[key].chunks = {place: at for place, at in keys[key].chunks.items() if place[0][0] != 1}
        return keys

    rewrite(directory, freeze)
    config = {"hf_config": runs.configs["qwen3-moe"]}
    runs.move(tmp_path / "moe", tmp_path / "hybrid", EP2, model_class="hybrid", **config)
    trained, some = (
        stored_tensors(path / ITERATION) for path in (runs.folder / "hybrid", tmp_path / "hybrid")
    )
    frozen = {f"optimizer.state.{kind}.decoder.layers.2.self_attention.linear_qkv.weight"
              for kind in ("exp_avg", "exp_avg_sq", "param")}  # fmt: skip
    assert trained.keys() - some.keys() == frozen
    assert same(some, {key: trained[key] for key in some}) == []
    runs.move(tmp_path / "moe", tmp_path / "gpt", MegatronLayout(tp=2), **config)
    chunks = torch_dist.read(tmp_path / "gpt" / ITERATION).keys[QKV].chunks
    assert {offsets[0] for offsets, _ in chunks} == {0, 2, 3} and len(chunks) == 6


def test_an_iteration_that_megatron_does_not_resume_is_refused(runs, tmp_path):
    shutil.copytree(runs.folder / "back", tmp_path / "source")
    common = torch.load(tmp_path / "source" / ITERATION / "common.pt", weights_only=False)
    torch.save(common | {"iteration": 0}, tmp_path / "source" / ITERATION / "common.pt")
    (tmp_path / "source" / "reshard.json").unlink()
    with pytest.raises(
        ReshardError, match="is of iteration 0, from which Megatron does not resume: pass --iteration"
    ):
        runs.move(tmp_path / "source", tmp_path / "out", EP2)
    runs.move(tmp_path / "source", tmp_path / "out", EP2, iteration=2)
    common.pop("optimizer")
    torch.save(common | {"iteration": "2"}, tmp_path / "source" / ITERATION / "common.pt")
    with pytest.raises(
        ReshardError, match="has no iteration, from which a training could go on: pass --without-optimizer"
    ):
        runs.move(tmp_path / "source", tmp_path / "other", EP2)


SQUARES = QKV.replace("exp_avg", "exp_avg_sq")
STRANGE = [
    (
        QKV,
        "optimizer.state.exp_avg.decoder.surplus",
        r"not have: decoder\.surplus; --without-optimizer takes the weights alone",
    ),
    (
        QKV,
        "optimizer.distributed.dp_group_idx_0.gbuf",
        r"format fully_reshardable with optimizer\.distributed\.dp_group_idx_0\.gbuf",
    ),
    (SQUARES, f"chained_1.{QKV}", r"format fully_reshardable with chained_1\."),
]


def test_keys_of_earlier_versions_are_read(runs, tmp_path):
    """With the number of each optimizer of a chain before them."""
    rewrite(
        shutil.copytree(runs.folder / "moe", tmp_path / "moe") / ITERATION,
        lambda keys: {
            f"chained_0.{k}" if k.startswith("optimizer.state.") else k: v for k, v in keys.items()
        },
    )
    runs.move(tmp_path / "moe", tmp_path / "out", EP2, hf_config=runs.configs["qwen3-moe"])
    trained, moved = (stored_tensors(path / ITERATION) for path in (runs.folder / "moe", tmp_path / "out"))
    assert same(trained, moved) == []


@pytest.mark.parametrize(("key", "renamed", "expected"), STRANGE, ids=["parameter", "buffer", "twice"])
def test_states_under_strange_keys_are_refused(key, renamed, expected, runs, tmp_path):
    rewrite(
        shutil.copytree(runs.folder / "moe", tmp_path / "moe") / ITERATION,
        lambda keys: {renamed if k == key else k: v for k, v in keys.items()},
    )
    with pytest.raises(ReshardError, match=expected):
        runs.move(tmp_path / "moe", tmp_path / "out", EP2, hf_config=runs.configs["qwen3-moe"])


def test_an_interrupted_move_goes_on(runs, tmp_path):
    held, config = tmp_path / "held", runs.configs["qwen3-moe"]
    options = (
        "--ep",
        2,
        "--etp",
        1,
        "--model-class",
        "hybrid",
        "--transformer-impl",
        "local",
        "--hf-config",
        config,
    )
    line = command(
        "mcore-to-mcore",
        runs.path("moe"),
        tmp_path / "out",
        *options,
        "--make-vocab-size-divisible-by",
        8,
        "--workers",
        1,
    )
    with ended(
        subprocess.Popen(line, env=environment("pwrite:*:900:hold", held=held), stderr=subprocess.DEVNULL)
    ) as process:
        until(lambda: held.exists() and any(entry[0] == "done" for entry in journal(tmp_path)), process)
    report = runs.move("moe", tmp_path / "out", EP2, model_class="hybrid", hf_config=config, resume=True)
    assert 0 < report.resumed_tensors < report.tensors
    assert unlike_trees(tmp_path / "out", runs.folder / "hybrid") == []


APART = [
    (MegatronLayout(ep=2, etp=1), (0, 14), True),
    (MegatronLayout(tp=2), (0, 20), False),
    (MegatronLayout(tp=2, etp=1), (0, 18), False),
    (MegatronLayout(tp=2, etp=1), (0, 19), True),
]


@pytest.mark.parametrize(("layout", "version", "apart"), APART, ids=str)
def test_experts_have_an_optimizer_of_their_own_where_megatron_gives_them_one(
    layout, version, apart, checkpoint
):
    """With the groups of parameters that it makes there: norms and biases are not decayed."""
    model = read_model(str(checkpoint("qwen3-moe", dtype=torch.bfloat16)))

    def optimizer(*decays, experts=False):
        groups = [{"wd_mult": decay, "is_expert_parallel": experts, "step": 2} for decay in decays]
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}

    one, two = optimizer(1.0, 0.0), {0: optimizer(1.0, 0.0), 1: optimizer(1.0, experts=True)}
    for saved in (one, two):
        training = TrainingState(2, {}, {}, {"optimizer": saved, "other": 1}, {})
        common = training.common_for(model, layout, version)
        assert common == {"optimizer": two if apart else one, "other": 1}
    strange = TrainingState(2, {}, {}, {"optimizer": dict.fromkeys(range(3), one)}, {})
    with pytest.raises(ReshardError, match="has 3 optimizers, and not one, or one for the experts beside it"):
        strange.common_for(model, layout, version)


def test_a_damaged_state_is_named_before_it_is_moved(runs, tmp_path):
    shutil.copytree(runs.folder / "exchanged", tmp_path / "source")
    with pytest.raises(
        ReshardError, match=r"optimizer\.state\.exp_avg\.\S+ does not have the checksum of reshard\.json"
    ):
        runs.move(tmp_path / "source", tmp_path / "out", EP2)
    assert not (tmp_path / "out").exists()
    runs.move(tmp_path / "source", tmp_path / "weights", EP2, without_optimizer=True)  # which are whole
    manifest = json.loads((tmp_path / "source" / "reshard.json").read_text())
    assert sum(name.startswith("optimizer.state.") for name in manifest["tensors"]) == 3 * 135
