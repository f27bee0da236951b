"""Sources that change between runs or after they were written, what the manifest covers, and casts
that overflow."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, mcore_to_hf
from tests.tools.disk import DIRECTIONS, beside, cli, flip, held_run, refused
from tests.tools.oracle import hf_tensors, same


def test_a_source_that_changes_between_runs_is_another_source(whole, tmp_path):
    source = Path(shutil.copytree(whole["hf-to-mcore"][0], tmp_path / "source"))
    options = DIRECTIONS["hf-to-mcore"]
    assert (
        cli(
            "hf-to-mcore", source, tmp_path / "out", *options, faults=("sync:reshard.json:1:KILL",)
        ).returncode
        == -signal.SIGKILL
    )
    path = source / "model.safetensors"
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-100, 2)
        file.write(b"\x01" * 50)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = cli("hf-to-mcore", source, tmp_path / "out", *options, "--resume")
    assert done.returncode == 1 and "another source" in done.stderr


@pytest.mark.parametrize("where", ["iteration directory", "iteration directory itself", "hub cache"])
def test_a_source_behind_links_that_changes_between_runs_is_another_source(where, whole, tmp_path):
    """What a link leads to is the source, not the link."""
    real, source = tmp_path / "real", tmp_path / "source"
    direction = "mcore-to-hf" if where.startswith("iteration") else "hf-to-mcore"
    shutil.copytree(whole[direction][0], source)
    if direction == "mcore-to-hf":
        (source / "release").rename(real)
        (source / "release").symlink_to(real)
        given, path = (source / "release" if where.endswith("itself") else source), real / "__0_0.distcp"
        (source / "reshard.json").unlink()  # which would show it
    else:
        (source / "model.safetensors").rename(real)
        (source / "model.safetensors").symlink_to(real)
        given, path = source, tmp_path / "other"
        shutil.copy2(real, path)
    out = ["--no-sync", "--resume", *DIRECTIONS[direction]]
    assert (
        cli(direction, given, tmp_path / "out", *out, faults=("rename:/out$:1:KILL",)).returncode
        == -signal.SIGKILL
    )
    before = path.stat()
    flip(path, before.st_size // 2)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if where == "hub cache":
        (source / "model.safetensors").unlink()
        (source / "model.safetensors").symlink_to(path)
    done = cli(direction, given, tmp_path / "out", *out)
    assert done.returncode == 1 and "another source" in done.stderr, done.stdout + done.stderr


# --- Sources that are written to while they are read


def rewrite(path, how):
    """Give a file's last tensor other numbers: in place, with its old time, or as a new file, which
    takes the old one's name or that of the link to it."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-100:-50] = bytes(byte ^ 1 for byte in data[-100:-50])
    if how == "in place":
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return
    new = path.parent.parent / "new"
    new.write_bytes(data)
    if how == "link":
        link = path.with_name("link")
        link.symlink_to(new)
        new = link
    os.replace(new, path)


def unlisted_copy(original, folder):
    """A copy of a checkpoint without its manifest, whose checksums would show every change; and its
    largest file of weights."""
    source = Path(shutil.copytree(original, folder))
    (source / "reshard.json").unlink(missing_ok=True)
    weights = [path for path in source.rglob("*") if path.suffix in (".distcp", ".safetensors")]
    return source, max(weights, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("how", ["in place", "replaced", "link"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_source_that_is_rewritten_while_it_is_converted_makes_nothing(direction, how, whole, tmp_path):
    source, path = unlisted_copy(whole[direction][0], tmp_path / "source")
    if how == "link":
        path.rename(tmp_path / "blob")
        path.symlink_to(tmp_path / "blob")
    with held_run(source, tmp_path / "out", direction=direction) as (process, go):
        rewrite(path, how)
        stderr = go()
    assert process.returncode == 1, stderr
    assert f"{path} changed while it was read" in stderr and "again" in stderr
    assert {"out", ".out.reshard-partial"}.isdisjoint(beside(tmp_path))


def test_a_config_that_is_rewritten_while_its_weights_are_converted_makes_nothing(whole, tmp_path):
    source, _ = unlisted_copy(whole["hf-to-mcore"][0], tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    with held_run(source, tmp_path / "out") as (process, go):
        (source / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
        stderr = go()
    assert process.returncode == 1 and f"{source / 'config.json'} changed while it was read" in stderr
    assert beside(tmp_path) == []


def test_a_source_with_a_manifest_that_changes_meanwhile_is_said_to_change_not_to_be_damaged(whole, tmp_path):
    source = Path(shutil.copytree(whole["mcore-to-hf"][0], tmp_path / "source"))
    with held_run(source, tmp_path / "out", direction="mcore-to-hf") as (process, go):
        for path in source.rglob("*.distcp"):
            os.truncate(path, 9000)
        stderr = go()
    assert process.returncode == 1, stderr
    assert "__1_0.distcp" in stderr and "changed while they were read" in stderr and "damaged" not in stderr
    assert beside(tmp_path) == []


def test_a_training_run_may_go_on_while_one_of_its_iterations_is_converted(whole, tmp_path):
    """The control: what does not belong to the iteration is not looked at."""
    source = Path(shutil.copytree(whole["mcore-to-hf"][0], tmp_path / "source"))
    with held_run(source, tmp_path / "out", direction="mcore-to-hf") as (process, go):
        shutil.copytree(source / "release", source / "iter_0000007")
        (source / "latest_checkpointed_iteration.txt").write_text("7")
        stderr = go()
    assert process.returncode == 0, stderr
    assert same(hf_tensors(tmp_path / "out"), hf_tensors(whole["hf-to-mcore"][0])) == []
    assert check(tmp_path / "out").ok


def rewriting(path):
    """A progress callback that rewrites a file once."""
    left = ["once"]

    def progress(done, total):
        if done and left:
            left.clear()
            rewrite(path, "in place")

    return progress


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_checkpoint_that_is_rewritten_while_it_is_compared_is_named(side, whole, tmp_path):
    source, path = unlisted_copy(whole["hf-to-mcore"][0], tmp_path / "source")
    sides = (source, whole["mcore-to-hf"][0]) if side == "a" else (whole["mcore-to-hf"][0], source)
    assert diff(*sides, workers=1).equal, "the control"
    refused(lambda: diff(*sides, workers=1, progress=rewriting(path)), f"{path} changed while it was read")


def test_a_checkpoint_that_is_rewritten_while_it_is_checked_is_named(whole, tmp_path):
    source = Path(shutil.copytree(whole["mcore-to-hf"][0], tmp_path / "source"))
    path = next(source.rglob("*.distcp"))
    assert check(source, workers=1).ok, "the control"
    refused(lambda: check(source, workers=1, progress=rewriting(path)), f"{path} changed while it was read")


# --- Directories with more files of weights than one model's


def two_models(source, folder):
    """A directory with another model's ``model.safetensors`` beside a model in shards with an index."""
    sharded = folder / "sharded"
    hf_to_mcore(source, folder / "made")
    mcore_to_hf(folder / "made", sharded, max_shard_size="100KB")
    (sharded / "reshard.json").unlink()
    assert len(list(sharded.glob("*.safetensors"))) > 1
    return sharded


def test_an_index_beside_a_single_file_that_it_does_not_name_is_refused_with_both_names(source, tmp_path):
    """transformers takes the one, vLLM the other."""
    sharded = two_models(source, tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, sharded / "model.safetensors", metadata={"format": "pt"})
    both = r"model\.safetensors .*model\.safetensors\.index\.json"
    refused(lambda: hf_to_mcore(sharded, tmp_path / "out"), both)
    refused(lambda: diff(sharded, source), both)
    assert not (tmp_path / "out").exists()
    (sharded / "model.safetensors").unlink()
    assert diff(sharded, source).equal


def test_an_index_that_names_the_single_file_is_read(source):
    """The control: both are there and say the same."""
    names = load_file(source / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert diff(source, source).equal


def test_shards_that_no_index_names_are_left_alone_and_noted(source, tmp_path):
    """As transformers and vLLM do: leftovers of an earlier download or save, and Mistral's
    consolidated files."""
    sharded = two_models(source, tmp_path)
    shutil.copy(next(sharded.glob("*.safetensors")), sharded / "model-00001-of-00099.safetensors")
    report = hf_to_mcore(sharded, tmp_path / "out")
    assert any("model-00001-of-00099.safetensors" in notice for notice in report.notices), report.notices
    assert diff(tmp_path / "out", source).equal
    shutil.copy(sharded / "model-00001-of-00099.safetensors", source)
    assert any("model-00001-of-00099" in notice for notice in hf_to_mcore(source, tmp_path / "two").notices)
    assert diff(tmp_path / "two", source).equal


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_a_flipped_bit_in_a_source_with_a_manifest_is_refused_by_name(dtype, mcore, tmp_path):
    from reshard.formats import torch_dist

    mcore_to_hf(mcore, tmp_path / "back")
    checkpoint = torch_dist.read(mcore / "release")
    chunk = checkpoint.tensor_at(
        next(iter(checkpoint.keys["decoder.final_layernorm.weight"].chunks.values()))
    )
    flip(mcore / "release" / "__0_0.distcp", chunk.offset + 7)
    refused(lambda: mcore_to_hf(mcore, tmp_path / "out", dtype=dtype), r"model\.norm\.weight .*reshard\.json")
    refused(
        lambda: mcore_to_hf(mcore, tmp_path / "out", quantize=True), r"model\.norm\.weight .*reshard\.json"
    )
    flip(tmp_path / "back" / "model.safetensors", -9)
    refused(lambda: hf_to_mcore(tmp_path / "back", tmp_path / "out", dtype=dtype), r"model\..*reshard\.json")
    assert beside(tmp_path) == ["back"]


@pytest.mark.parametrize(
    "way, ends",
    [
        ("fp8", ("", "_scale_inv")),
        ("fp8_per_channel", ("", "_scale")),
        ("nvfp4", ("_packed", "_scale", "_global_scale")),
    ],
)
def test_a_flipped_bit_in_codes_or_their_scales_is_refused_by_name(way, ends, mcore, tmp_path):
    from reshard.formats import safetensors

    mcore_to_hf(mcore, tmp_path / "codes", quantize=way)
    hf_to_mcore(tmp_path / "codes", tmp_path / "again")
    hf_to_mcore(tmp_path / "codes", tmp_path / "wide", dtype="fp32")
    stored = safetensors.read_directory(tmp_path / "codes")
    for name in (f"model.layers.1.mlp.up_proj.weight{end}" for end in ends):
        flip(tmp_path / "codes" / stored[name].file, stored[name].offset)
        refused(
            lambda: hf_to_mcore(tmp_path / "codes", tmp_path / "out"), rf"{re.escape(name)} .*reshard\.json"
        )
        flip(tmp_path / "codes" / stored[name].file, stored[name].offset)
    hf_to_mcore(tmp_path / "codes", tmp_path / "out")


def test_two_chunks_that_changed_places_are_refused(mcore, tmp_path):
    metadata = mcore / "release" / ".metadata"
    from reshard.formats import torch_dist

    checkpoint = torch_dist.read(mcore / "release")
    chunks = checkpoint.keys["decoder.layers.mlp.linear_fc2.weight"].chunks
    (a, stored_a), (b, stored_b) = list(chunks.items())[:2]
    chunks[a], chunks[b] = stored_b, stored_a
    metadata.write_bytes(torch_dist.metadata_bytes(checkpoint.keys, checkpoint.objects, "release"))
    for with_files in (True, False):
        if not with_files:  # a manifest of before files were listed
            manifest = json.loads((mcore / "reshard.json").read_text())
            manifest.pop("files", None)
            (mcore / "reshard.json").write_text(json.dumps(manifest))
        refused(lambda: mcore_to_hf(mcore, tmp_path / "out"), r"release/\.metadata .*reshard\.json" if with_files else
                r"down_proj\.weight .*reshard\.json")  # fmt: skip
    assert beside(tmp_path) == []


def test_a_changed_config_is_refused_unless_it_is_given(mcore, source, tmp_path):
    config = mcore / "hf" / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"bos_token_id": 7}))
    refused(lambda: mcore_to_hf(mcore, tmp_path / "out"), r"hf/config\.json .*reshard\.json")
    mcore_to_hf(mcore, tmp_path / "out", hf_config=config)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "out")) == []
    (mcore / "hf" / "tokenizer.json").write_text("{}")
    config.write_text(
        json.dumps(json.loads(text) | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64})
    )
    refused(
        lambda: mcore_to_hf(mcore, tmp_path / "out2", hf_config=config), r"num_attention_heads is 8 \(not 4\)"
    )
    assert beside(tmp_path) == ["out"]


def test_a_later_iteration_in_the_same_directory_is_not_held_against_the_manifest(mcore, source, tmp_path):
    """Who trains with --load DST --save DST has a manifest of the release beside what training wrote."""
    hf_to_mcore(source, tmp_path / "other", MegatronLayout(), dtype="fp32", iteration=7)
    (tmp_path / "other" / "iter_0000007").rename(mcore / "iter_0000007")
    (mcore / "latest_checkpointed_iteration.txt").write_text("7")
    mcore_to_hf(mcore, tmp_path / "out")
    mcore_to_hf(mcore / "release", tmp_path / "out2")
    refused(lambda: check(mcore), "is of release, .* iter_0000007")
    assert check(mcore / "release").ok


# --- What the manifest covers


@pytest.mark.parametrize("kind", ["megatron", "huggingface"])
def test_check_says_of_every_file_whether_it_changed(kind, mcore, source, tmp_path):
    directory = mcore
    if kind == "huggingface":
        directory = tmp_path / "back"
        mcore_to_hf(mcore, directory, max_shard_size="100KB")
    assert check(directory).ok
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != "reshard.json"):
        name = str(path.relative_to(directory))
        before = path.read_bytes()
        for data in (before[:-1] + bytes([before[-1] ^ 1]), None):
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
            try:
                found = check(directory)
                assert not found.ok and (name in found.changed or name in found.missing or found.bad), name
            except ReshardError as error:  # what cannot be read at all
                assert path.name.removesuffix(".safetensors") in str(error) or name in str(error), (
                    name,
                    error,
                )
            path.write_bytes(before)
    assert check(directory).ok
    (directory / "model-extra.safetensors.txt").write_text("")
    found = check(directory)
    assert found.added == ["model-extra.safetensors.txt"] and not found.ok


def test_a_manifest_of_before_files_were_listed_checks_tensors_and_says_so(mcore):
    manifest = json.loads((mcore / "reshard.json").read_text())
    assert manifest.pop("files")
    (mcore / "reshard.json").write_text(json.dumps(manifest))
    (mcore / "megatron_flags.txt").write_text("")
    found = check(mcore)
    assert found.ok and "no files" in " ".join(found.notices)
    assert "no files" in cli("check", mcore).stderr


# --- Overflow


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_cast_that_would_make_infinity_of_numbers_is_refused_unless_it_is_allowed(
    direction, source, tmp_path
):
    path = source / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    tensors = {n: t.float() for n, t in tensors.items()}
    tensors[name].view(-1)[:4] = torch.tensor(
        [70000.0, -1e30, float("inf"), 65519.0]
    )  # the last rounds to 65504
    save_file(tensors, path, metadata={"format": "pt"})
    convert = hf_to_mcore
    if direction == "mcore-to-hf":
        hf_to_mcore(source, tmp_path / "mcore")
        source, convert = tmp_path / "mcore", mcore_to_hf
    refused(
        lambda: convert(source, tmp_path / "out", dtype="fp16"), rf"2 numbers of {re.escape(name)} .*float16"
    )
    assert beside(tmp_path) == []
    done = cli(direction, source, tmp_path / "out", "--dtype", "fp16", "--allow-overflow", "--json")
    assert done.returncode == 0 and any(
        f"2 numbers of {name}" in notice for notice in json.loads(done.stdout)["notices"]
    )
    if direction == "mcore-to-hf":
        assert same({n: t.half() for n, t in tensors.items()}, hf_tensors(tmp_path / "out")) == []
    tensors[name].view(-1)[0] = 3.4e38
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    refused(
        lambda: hf_to_mcore(tmp_path / "source", tmp_path / "out2", dtype="bf16"),
        rf"1 number of {re.escape(name)} .*bfloat16",
    )
