"""Live Megatron models saved and exported by all ranks, byte for byte what the conversions write."""

import json
import shutil

import pytest

from reshard import MegatronLayout, ReshardError, check, hf_to_mcore, mcore_to_hf, read_model
from reshard.storage.sources.opening import open_source
from tests.megatron.test_logits import EP, ETP, PP, TP, VPP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import with_config
from tests.tools.disk import tree
from tests.tools.oracle import bits, hf_tensors


def on_ranks(ranks, function, *arguments, **options):
    return run_on_ranks(ranks, function, *arguments, module="live_megatron_on_cpu", options=options)


# Each family, and each axis of a layout, once.
SAVED = [
    ("llama-rope-tied", {}, f"{TP} 2 {PP} 2 --pipeline-model-parallel-layout Et|tttL", 4,
     MegatronLayout(tp=2, pp=2, pipeline_model_parallel_layout="Et|tttL")),
    ("qwen2", {}, f"{PP} 2 {VPP} 2", 4, MegatronLayout(pp=2, vpp=2)),
    ("qwen3", {}, f"{PP} 3 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2", 3,
     MegatronLayout(pp=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2)),
    ("qwen3-moe-mixed", {}, f"{TP} 2 {EP} 4 {ETP} 1", 4, MegatronLayout(tp=2, ep=4, etp=1)),
    ("deepseek-v3", {"mtp": True}, f"{TP} 2 {PP} 2 {EP} 2 {ETP} 2", 8, MegatronLayout(tp=2, pp=2, ep=2, etp=2)),
    ("glm4-moe-air", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=2, ep=2, etp=1)),
    ("qwen3-next", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=2, ep=2, etp=1)),
    ("qwen3.5", {}, f"{TP} 4", 4, MegatronLayout(tp=4)),
    ("mixtral", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=2, ep=2, etp=1)),
    ("seed-oss", {}, f"{TP} 4", 4, MegatronLayout(tp=4)),
    ("phi4", {}, f"{TP} 4", 4, MegatronLayout(tp=4)),
    ("qwen2-moe", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=2, ep=2, etp=1)),
    ("minimax-m2", {}, f"{TP} 4 {EP} 4 {ETP} 1", 4, MegatronLayout(tp=4, ep=4, etp=1)),
    ("olmoe", {}, f"{PP} 2 {ETP} 1", 2, MegatronLayout(pp=2, etp=1)),
    ("dots1", {}, f"{TP} 4 {EP} 2 {ETP} 1", 4, MegatronLayout(tp=4, ep=2, etp=1)),
    ("ling", {"mtp": True}, f"{TP} 4 {EP} 2 {ETP} 1", 4, MegatronLayout(tp=4, ep=2, etp=1)),
    ("ernie", {}, f"{TP} 2 {EP} 2 {ETP} 1", 2, MegatronLayout(tp=2, ep=2, etp=1)),
    ("gpt-oss", {}, f"{TP} 2 {EP} 2 {ETP} 1", 4, MegatronLayout(tp=2, ep=2, etp=1)),  # two ranks have each expert
    ("deepseek-v32", {"mtp": True}, f"{PP} 2 {EP} 2 {ETP} 1", 4, MegatronLayout(pp=2, ep=2, etp=1)),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "options", "parallel", "ranks", "layout"), SAVED,
                         ids=lambda v: str(v).replace("-model-parallel-size", ""))  # fmt: skip
def test_a_save_is_what_the_conversions_make_of_the_same_weights(
    variant, options, parallel, ranks, layout, weights, tmp_path
):
    folder, arguments = (
        weights(variant, **options),
        {"transformer_impl": "local", "make_vocab_size_divisible_by": 8},
    )
    source, mcore = folder / "hf", folder / "mcore"
    with_fp32_bias(source, tmp_path / "source")
    hf_to_mcore(tmp_path / "source", tmp_path / "expected", layout, **arguments)
    hf_to_mcore(tmp_path / "source", tmp_path / "expected-later", layout, iteration=7, **arguments)
    mcore_to_hf(tmp_path / "expected", tmp_path / "expected-hf")
    results = on_ranks(
        ranks,
        "save_each",
        flags_at(mcore, parallel),
        str(source),
        str(mcore),
        str(tmp_path),
        ddp="tied" not in variant,
    )
    for saved, expected in (("hf", "expected-hf"), ("mcore", "expected")):
        assert unlike_trees(tmp_path / saved, tmp_path / expected) == []
    # An iteration of a run has all that belongs to it in its own directory.
    later, expected = tree(tmp_path / "later"), tree(tmp_path / "expected-later")
    within = {
        f"iter_0000007/{name}"
        for name in expected
        if name.startswith("hf/") or name in ("megatron_flags.txt", "reshard.json")
    }
    assert {name for name in later if name not in expected} == within
    for name, data in expected.items():
        if name != "reshard.json":
            assert later.get(name, later.get(f"iter_0000007/{name}")) == data, name
    assert all(check(tmp_path / saved).ok for saved in ("hf", "mcore", "later"))
    assert unlike_trees(
        tmp_path / "spoiled", tmp_path / "expected-hf"
    )  # the control: other weights make other files
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    # Every rank was given every tensor, in small batches, or one rank all of them.
    published = {name: bits(tensor) for name, tensor in hf_tensors(tmp_path / "source").items()}
    for rank, (_, (to_all, to_last, as_they_lie), _) in enumerate(results):
        assert dict(to_all) == published and len(to_all) == len(published) and as_they_lie == to_all
        assert to_last == (to_all if rank == ranks - 1 else [])
    assert any(lying for *_, lying in results)
    results = [reports for reports, *_ in results]
    # One of several holders writes each box, and all share in that.
    for kind in range(3):
        written = [reports[kind]["written_bytes"] for reports in results]
        stored = sum(info.size_bytes for info in unique_tensors(tmp_path / "expected"))
        assert sum(written) == stored and max(written) < 0.7 * stored
        assert [reports[kind]["host_bytes"] for reports in results] == ([0] * ranks if kind < 2 else written)


def unique_tensors(directory):
    """Shapes and dtypes of a checkpoint's tensors that repeat no other."""
    source = open_source(directory)
    source.close()
    return [info for name, info in source.tensors.items() if name not in source.copies]


def with_fp32_bias(source, destination):
    """A copy of a Hugging Face directory with the router's bias in fp32, as it is published, and as
    Megatron holds it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, destination)
    tensors = load_file(destination / "model.safetensors")
    tensors = {
        n: t.float() if n.endswith(("e_score_correction_bias", "expert_bias")) else t
        for n, t in tensors.items()
    }
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})


def unlike_trees(a, b):
    """The files that differ or that only one has; of the manifest all but where the weights came from."""
    a, b = tree(a), tree(b)
    for files in (a, b):
        files["reshard.json"] = json.dumps(json.loads(files["reshard.json"]) | {"source": ""}).encode()
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def test_a_rank_that_fails_or_dies_leaves_the_old_destination_and_nothing_else(weights, tmp_path):
    folder = weights("qwen3")
    flags = flags_at(folder / "mcore", f"{TP} 2 {PP} 2")
    for fault, at, background in (("ENOSPC", 1, False), ("EIO", 0, True), ("dies", 2, False)):
        place = tmp_path / f"{fault}-{at}"
        shutil.copytree(folder / "hf", place / "out")
        before = tree(place / "out")
        said = run_on_ranks(
            4,
            "failing_save",
            flags,
            str(folder / "hf"),
            str(folder / "mcore"),
            str(place),
            fault,
            at,
            module="live_megatron_on_cpu",
            options={"background": background},
            may_die=True,
        )
        for rank, sentences in enumerate(said):
            if fault == "dies":
                expected = "process 2 of 4 was ended"
            else:
                expected = ("the disk is full: a file could not be written; free some space" if fault == "ENOSPC"
                            else "cannot write a file: no more")  # fmt: skip
                expected = expected if rank == at else f"process {at} of 4 failed: {expected}"
            if sentences is None:
                assert fault == "dies" and rank == at
                continue
            assert sentences[0] == expected
            # The next save raises it too, and the log has it.
            assert not background or sentences[1:3] == [
                expected,
                f"the save to {place}/out failed: {expected}",
            ]
            assert fault == "dies" or sentences[-1] == "no error"  # and the one after that succeeds
        assert tree(place / "out") == before
        assert sorted(path.name for path in place.iterdir()) == (
            ["out"] if fault == "dies" else ["after", "out"]
        )


def test_a_rank_that_dies_in_an_export_is_said_by_the_others(weights):
    folder = weights("qwen3")
    arguments = flags_at(folder / "mcore", f"{TP} 2"), str(folder / "hf")
    said, none = run_on_ranks(2, "failing_export", *arguments, module="live_megatron_on_cpu", may_die=True)
    assert none is None and said.startswith(
        "the export ended early, since another rank was ended, or has not iterated to the end"
    )


def test_a_save_after_the_first_rank_died_starts_anew(weights, tmp_path):
    folder = weights("qwen3")
    flags = flags_at(folder / "mcore", f"{TP} 2")
    arguments = (flags, str(folder / "hf"), str(folder / "mcore"), str(tmp_path))
    said = run_on_ranks(2, "failing_save", *arguments, "dies", 0, module="live_megatron_on_cpu", may_die=True)
    assert said[0] is None and "process 0 of 2 was ended" in said[1][0] and not (tmp_path / "out").exists()
    said = on_ranks(2, "failing_save", *arguments, "EIO", -1)
    assert said == [["no error", "no error"]] * 2 and check(tmp_path / "out").ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "out"]


@pytest.mark.parametrize("begun", ["by Megatron", "by a conversion", "by a save", "by logs"])
def test_iterations_join_the_others_of_a_run(begun, weights, tmp_path):
    first, second = weights("qwen3-moe"), weights("qwen3-moe", seed=1)
    run, parallel = tmp_path / "run", f"{TP} 2 {EP} 2 {ETP} 1"
    flags = flags_at(first / "mcore", parallel)
    if begun != "by a save":
        run.mkdir()
    if begun == "by Megatron":
        run_on_ranks(
            2, "save_as_trained", flags, str(first / "mcore"), str(run), 3, module="live_megatron_on_cpu"
        )
    elif begun == "by a conversion":
        hf_to_mcore(
            first / "hf", run, MegatronLayout(pp=2), transformer_impl="local", make_vocab_size_divisible_by=8
        )
    elif begun == "by logs":
        (run / "events.txt").write_text("mine")
    with_tokenizer(first / "hf", tmp_path / "with-tokenizer")
    before = tree(run) if run.exists() else {}
    arguments = str(tmp_path / "with-tokenizer"), str(first / "mcore"), str(second / "mcore"), str(run)
    for rank, (latest, replaced, said) in enumerate(on_ranks(2, "save_iterations", flags, *arguments)):
        # The iteration that was replaced is not the last that was asked for, but the last that was written.
        assert latest == replaced == []
        first_failed, last_failed = (f"process {n} of 2 failed: " if rank != n else "" for n in (0, 1))
        # What each rank sees for itself it may hear from the other first.
        said[1] = said[1].partition(" of 2 failed: ")[2] or said[1]
        assert said == [
            f"{first_failed}{run}/iter_0000020 exists; pass overwrite=True to replace it once the new one is complete",
            'a Hugging Face directory has no iterations: leave iteration out, or pass format="torch_dist"',
            f"{first_failed}{run} exists; pass overwrite=True to replace it once the new one is complete",
            (
                f"{first_failed}{run} holds iterations of a training run, all of which overwrite=True would "
                "replace: pass iteration=, or save to another directory"
            ),
            f"{last_failed}the disk is full: a file could not be written; free some space",
        ]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]
    # Nothing that was there has changed, but for what a save that began the run has made.
    kept = {name: data for name, data in tree(run).items() if name in before}
    assert kept | {"latest_checkpointed_iteration.txt": b""} == before | {
        "latest_checkpointed_iteration.txt": b""
    }
    ours = dict.fromkeys(("iter_0000007", "iter_0000020"), second)
    for name, expected in (ours | ({"release": first} if begun == "by a conversion" else {})).items():
        assert check(run / name).ok, name
        (tmp_path / "link").symlink_to(run / name)
        for way, place in (("named", run / name), ("linked", tmp_path / "link")):
            mcore_to_hf(place, tmp_path / f"{name}-{way}")
            other = second if expected is first else first
            assert hf_bits(tmp_path / f"{name}-{way}") == hf_bits(expected / "hf") != hf_bits(other / "hf")
            assert (tmp_path / f"{name}-{way}" / "tokenizer.json").exists() == (name != "release")
        (tmp_path / "link").unlink()
    assert check(run).ok
    damaged = next((run / "iter_0000007").glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert not check(run).ok and not check(run / "iter_0000007").ok and check(run / "iter_0000020").ok
    (tmp_path / "link").symlink_to(run / "iter_0000007")
    with pytest.raises(
        ReshardError, match="does not have the checksum of reshard.json|was changed since reshard.json"
    ):
        mcore_to_hf(tmp_path / "link", tmp_path / "of-the-damaged")
    (run / "iter_0000007" / "common.pt").unlink()
    assert check(run).missing == ["common.pt"]
    (run / "iter_0000007" / ".metadata").write_bytes(b"nothing")
    for path in (run, run / "iter_0000007"):
        with pytest.raises(ReshardError, match="not as it was written: .metadata, common.pt"):
            check(path)
    shutil.rmtree(run / "iter_0000007")  # the one that the tracker names
    assert check(run).missing[:1] == ["iter_0000007/.metadata"]


def test_what_a_killed_save_has_left_in_a_run_is_removed_by_the_next(weights, tmp_path):
    folder = weights("qwen3")
    arguments = (
        flags_at(folder / "mcore", f"{TP} 2"),
        str(folder / "hf"),
        str(folder / "mcore"),
        str(tmp_path),
    )
    shutil.copytree(folder / "mcore", tmp_path / "out")
    run_on_ranks(
        2,
        "failing_save",
        *arguments,
        "dies",
        0,
        module="live_megatron_on_cpu",
        options={"iteration": 20},
        may_die=True,
    )
    assert sum(path.name.startswith(".iter_0000020") for path in (tmp_path / "out").iterdir()) == 1
    on_ranks(2, "failing_save", *arguments, "EIO", -1, iteration=21)
    names = {path.name for path in (tmp_path / "out").iterdir()} - {
        path.name for path in (folder / "mcore").iterdir()
    }
    assert names == {"iter_0000021"} and check(tmp_path / "out").ok


def test_ranks_that_ask_for_different_saves_or_loads_are_told_so(weights, tmp_path):
    folder, other = weights("qwen3"), weights("qwen3", seed=1)
    mine, theirs, out = str(folder / "hf"), str(other / "hf"), tmp_path / "out"
    renamed = with_config(folder / "hf", tmp_path / "renamed", initializer_range=0.5)
    saves = [
        ({"destination": f"{out}-1"}, f"destination is {out} on rank 0, {out}-1 on rank 1"),
        ({"hf_config": str(renamed)}, "the digest of the config is "),
        ({"layout": MegatronLayout(tp=1)}, "layout is TP2 on rank 0, TP1 on rank 1"),
        ({"iteration": 7}, "iteration is None on rank 0, 7 on rank 1"),
        ({"format": "hf"}, "format is torch_dist on rank 0, hf on rank 1"),
        ({"make_vocab_size_divisible_by": 16}, "make_vocab_size_divisible_by is 128 on rank 0, 16 on rank 1"),
        ({"background": True}, "background is False on rank 0, True on rank 1"),
    ]
    run = tmp_path / "run"  # in which an iteration is complete by the time that the last rank looks
    for name, source in (("iter_0000001", folder), ("iter_0000002", other)):
        shutil.copytree(source / "mcore" / "release", run / name)
    shutil.copytree(folder / "hf", run / "hf")
    loads = [
        ({"source": theirs}, f"source is {mine} on rank 0, {theirs} on rank 1"),
        ({"source": str(run)}, f"source is {mine} on rank 0, {run / 'iter_0000002'} on rank 1"),
        ({"dtype": "bf16"}, "dtype is None on rank 0, bfloat16 on rank 1"),
        ({"skip_mtp": True}, "skip_mtp is False on rank 0, True on rank 1"),
    ]
    cases = [("saves", why) for _, why in saves] + [("loads", why) for _, why in loads]
    cases.append(("calls", "the call is export on rank 0, load on rank 1"))
    arguments = (flags_at(folder / "mcore", f"{TP} 2"), mine, str(folder / "mcore"), str(tmp_path))
    for said, touched in on_ranks(
        2, "apart", *arguments, *([one for one, _ in many] for many in (saves, loads))
    ):
        # All see it; who is the first to say so is not decided.
        said = [sentence.partition(" failed: ")[2] or sentence for sentence in said]
        for sentence, (what, why) in zip(said, cases, strict=True):
            assert sentence.startswith(f"the ranks ask for different {what} ({why}"), sentence
        assert touched == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["renamed", "run"]


def test_a_stage_without_layers_does_not_say_which_kind_they_are(weights, tmp_path):
    folder = weights("qwen3")
    flags = flags_at(folder / "mcore", f"{PP} 3 --pipeline-model-parallel-layout E|t*2|t*2L")
    on_ranks(3, "save_of_transformer_engine", flags, str(folder / "hf"), str(folder / "mcore"), str(tmp_path))
    assert (
        json.loads((tmp_path / "out" / "reshard.json").read_text())["transformer_impl"]
        == "transformer_engine"
    )


def with_tokenizer(source, destination):
    """A copy of a Hugging Face directory with a file that a run may not have had."""
    shutil.copytree(source, destination)
    (destination / "tokenizer.json").write_text("{}")


def hf_bits(directory):
    return {name: bits(tensor) for name, tensor in hf_tensors(directory).items()}


def test_what_a_save_cannot_do_is_said_before_anything_is_written(weights, tmp_path):
    folder = weights("qwen3")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "taken" / "a file").write_text("")
    good, out = str(folder / "hf"), str(tmp_path / "out")
    cases = [
        (str(tmp_path / "taken"), good, {}, "exists; pass overwrite=True"),
        (out, good, {"format": "gguf"}, "format is 'gguf', which is not one of torch_dist, hf"),
        (out, str(tmp_path / "none"), {}, "is neither a directory nor a hub id"),
        (out, str(weights("llama") / "hf"), {}, "the served model's"),
        (out, good, {"overwrite": "no"}, "overwrite is 'no'; it is true or false"),
        (out, good, {"layout": MegatronLayout(tp=3)}, "--tp 3 does not divide"),
        (out, good, {"layout": 2}, "not a reshard.MegatronLayout"),
        (
            str(folder / "mcore" / "release"),
            good,
            {"iteration": 5},
            "is a checkpoint itself, to which no iteration",
        ),
        (good, good, {"iteration": 5}, "is a checkpoint itself, to which no iteration"),
        (
            str(tmp_path / "taken" / "a file" / "run"),
            good,
            {"iteration": 5},
            "a file is a file, not a directory",
        ),
        (
            out,
            None,
            {},
            "hf_config is a NoneType, which is neither a path, a hub id nor a transformers config",
        ),
        ("", good, {}, "destination is '', which is not a directory's path"),
        (None, good, {}, "destination is None, which is not a directory's path"),
        (out, good, {"max_shard_size": "much", "format": "hf"}, "is not a size"),
        (str(folder / "hf" / "inside"), good, {}, "overlap"),
        (str(tmp_path / "taken" / "a file" / "run"), good, {}, "a file is a file, not a directory"),
    ]
    results = on_ranks(2, "refused_save", flags_at(folder / "mcore", f"{TP} 2"), [case[:3] for case in cases])
    for said in results:
        for sentence, case in zip(said, cases, strict=True):
            assert case[3] in sentence
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


@pytest.mark.parametrize("from_config", [False, True])
def test_a_model_built_from_a_config_is_loaded_exported_and_saved(from_config, weights, tmp_path):
    variant, layout = ("llama", dict(pp=2)) if from_config else ("qwen3-moe", dict(tp=2, ep=2, etp=1))
    source = weights(variant) / "hf"
    published = {name: bits(tensor) for name, tensor in hf_tensors(source).items()}
    for exported, wrong in on_ranks(2, "built", str(source), str(tmp_path), layout, from_config):
        assert exported == published
        assert wrong[0].startswith("2 ranks cannot be laid out as TP7: world_size (2) is not divisible")
        assert wrong[1].startswith("layout is TP8, but Megatron's parallel state was initialized with tp=")
    assert {name: bits(tensor) for name, tensor in hf_tensors(tmp_path / "saved").items()} == published
    assert (tmp_path / "saved" / "generation_config.json").exists() != from_config
    assert (
        check(tmp_path / "saved").ok
        and read_model(str(tmp_path / "saved")).family.name == read_model(str(source)).family.name
    )
