"""Bad input and bad luck: one sentence, and nothing half-made."""

import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, inspect, mcore_to_hf
from reshard.formats import pickles
from reshard.storage.run.workers import run_jobs
from tests.tools.oracle import hf_tensors, same

INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(checkpoint, tmp_path):
    """A checkpoint in one file that a test may spoil."""
    return Path(shutil.copytree(checkpoint("qwen3-moe", dtype=torch.bfloat16), tmp_path / "source"))


@pytest.fixture
def sharded(source):
    """The same in several files with an index."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        part = {n: tensors[n] for n in names[i::3]}
        save_file(part, source / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return source


@pytest.fixture
def mcore(checkpoint, tmp_path):
    """A Megatron checkpoint that a test may spoil."""
    hf_to_mcore(checkpoint("qwen3-moe", dtype=torch.bfloat16), tmp_path / "mcore", MegatronLayout(tp=2))
    return tmp_path / "mcore"


def refused(call, message):
    """The call raises one sentence that matches."""
    with pytest.raises(ReshardError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def nothing_left(folder, *names):
    """No output and no working directory is left in a folder."""
    left = {p.name for p in folder.iterdir()} - {"source", "mcore", *names}
    assert not left, left


def edit_header(path, change):
    """Rewrite a safetensors header, leaving the bytes behind it."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = (json.dumps(header) if text is None else text).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def set_entry(name, **fields):
    return lambda header: header[name].update(fields)


NORM = "model.norm.weight"
SPOILED_FILES = {
    "truncated body": (
        lambda p: os.truncate(p, p.stat().st_size - 100),
        "malformed or points outside|truncated or corrupt",
    ),
    "truncated header": (lambda p: os.truncate(p, 60), "truncated or no safetensors"),
    "empty file": (lambda p: os.truncate(p, 0), "fewer than a safetensors header"),
    "git lfs pointer": (
        lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a Git LFS pointer, not the weights: run git lfs pull in",
    ),
    "huge header length": (
        lambda p: p.write_bytes(struct.pack("<Q", 2**62) + p.read_bytes()[8:]),
        "header of 4611686018427387904 bytes",
    ),
    "header is no JSON": (lambda p: edit_header(p, lambda h: "{" * 200), "not JSON"),
    "header is deeply nested": (lambda p: edit_header(p, lambda h: "[" * 200000), "not JSON"),
    "header is a list": (lambda p: edit_header(p, lambda h: "[]"), "not a JSON object"),
    "name twice": (
        lambda p: edit_header(p, lambda h: json.dumps(h)[:-1] + f', "{NORM}": {json.dumps(h[NORM])}}}'),
        f"has {re.escape(NORM)} twice",
    ),
    "bytes that overlap": (
        lambda p: edit_header(p, set_entry(NORM, data_offsets=[0, 128])),
        "overlap others or leave a gap",
    ),
    "negative shape": (lambda p: edit_header(p, set_entry(NORM, shape=[-64])), "malformed"),
    "shape that does not fit": (
        lambda p: edit_header(p, set_entry(NORM, shape=[63])),
        "128 bytes, but BF16 .63. needs 126",
    ),
    "other dtype of the same size": (
        lambda p: edit_header(p, set_entry(NORM, dtype="I16")),
        "has dtype int16, which is not a weight",
    ),
    "unknown dtype": (
        lambda p: edit_header(p, set_entry(NORM, dtype="F4")),
        "dtype F4, which is not supported",
    ),
    "wrong shape": (
        lambda p: edit_header(p, set_entry(NORM, shape=[8, 8])),
        r"has shape \[8, 8\], expected \[64\]",
    ),
    "extra bytes": (lambda p: p.write_bytes(p.read_bytes() + b"x" * 9), "truncated or corrupt"),
}


@pytest.mark.parametrize("how", SPOILED_FILES)
def test_a_spoiled_safetensors_file_is_refused(how, source, tmp_path):
    spoil, message = SPOILED_FILES[how]
    spoil(source / "model.safetensors")
    refused(lambda: hf_to_mcore(source, tmp_path / "out"), message)
    nothing_left(tmp_path)


def test_a_flipped_bit_in_the_body_shows_in_check_and_diff(mcore, tmp_path):
    from reshard.formats import torch_dist

    mcore_to_hf(mcore, tmp_path / "back")
    checkpoint = torch_dist.read(mcore / "release")
    chunk = checkpoint.tensor_at(
        next(iter(checkpoint.keys["decoder.layers.mlp.router.weight"].chunks.values()))
    )
    for path, at, directory in ((tmp_path / "back" / "model.safetensors", -999, tmp_path / "back"),
                                (mcore / "release" / "__0_0.distcp", chunk.offset + 7, mcore)):  # fmt: skip
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)
        found = check(directory)
        assert not found.ok and len(found.bad) == 1
    assert len(diff(mcore, tmp_path / "back").differences) == 2


def test_index_and_files_that_do_not_agree_are_refused(sharded, tmp_path):
    def spoil(change, message):
        index = json.loads((sharded / INDEX).read_text())
        before = json.dumps(index)
        change(index["weight_map"])
        (sharded / INDEX).write_text(json.dumps(index))
        refused(lambda: hf_to_mcore(sharded, tmp_path / "out"), message)
        (sharded / INDEX).write_text(before)

    spoil(lambda m: m.update({NORM: "../elsewhere.safetensors"}), "which are not files of")
    spoil(lambda m: m.update({NORM: "model-00009-of-00009.safetensors"}), "lacks the shard files model-00009")
    (sharded / INDEX).write_text("{")
    refused(lambda: hf_to_mcore(sharded, tmp_path / "out"), "not a readable index")


def test_an_index_that_says_something_else_than_its_files_is_told_and_the_files_are_read(sharded, tmp_path):
    """As transformers and vLLM read them: of the index, they use the names of the files."""
    index = json.loads((sharded / INDEX).read_text())
    files, weight_map = sorted(set(index["weight_map"].values())), index["weight_map"]
    first = next(name for name, file in weight_map.items() if file == files[0])
    changes = {"model.extra.weight": files[0], first: files[1]}
    wrong = {name: file for name, file in (weight_map | changes).items() if name != NORM}
    index = {"metadata": {"total_size": 1}, "weight_map": wrong}
    plain = hf_tensors(sharded)
    (sharded / INDEX).write_text(json.dumps(index))
    report = hf_to_mcore(sharded, tmp_path / "out")
    told = f"{INDEX} says of .* something else than the files, which are read"
    [notice] = [notice for notice in report.notices if re.search(told, notice)]
    assert all(name in notice for name in ("model.extra.weight", first, NORM))
    (sharded / INDEX).unlink()
    hf_to_mcore(sharded, tmp_path / "without")
    for mcore in ("out", "without"):
        mcore_to_hf(tmp_path / mcore, tmp_path / f"{mcore}-back")
        assert same(hf_tensors(tmp_path / f"{mcore}-back"), plain) == []
    (sharded / files[1]).unlink()
    refused(lambda: hf_to_mcore(sharded, tmp_path / "never"), "lacks .* tensors")


def test_a_missing_shard_and_a_tensor_in_two_files_are_refused(sharded, tmp_path):
    first, second = (load_file(sharded / f"model-0000{i}-of-00003.safetensors") for i in (1, 2))
    name = next(iter(second))
    save_file(first | {name: second[name]}, sharded / "model-00001-of-00003.safetensors")
    refused(
        lambda: hf_to_mcore(sharded, tmp_path / "out"),
        f"{re.escape(name)} is in model-00001-of-00003.safetensors and again in model-00002",
    )
    (sharded / "model-00001-of-00003.safetensors").unlink()
    refused(
        lambda: hf_to_mcore(sharded, tmp_path / "out"),
        "lacks the shard files model-00001-of-00003.safetensors",
    )
    nothing_left(tmp_path)


def test_tensors_that_the_table_does_not_cover_are_refused_by_name(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if n != NORM} | {"model.vision.weight": torch.zeros(2)},
        source / "model.safetensors",
    )
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out"),
        "lacks 1 of qwen3_moe's tensors: model.norm.weight; it holds 1 .*: model.vision.weight",
    )


def test_parts_of_one_parameter_with_two_dtypes_are_refused_and_a_cast_helps(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, source / "model.safetensors")
    refused(lambda: hf_to_mcore(source, tmp_path / "out"), "has one dtype: pass --dtype")
    hf_to_mcore(source, tmp_path / "out", dtype="bf16")
    assert same(tensors, _back(tmp_path / "out", tmp_path)) == []


def _back(directory, folder):
    mcore_to_hf(directory, folder / "back", overwrite=True)
    return hf_tensors(folder / "back")


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is not JSON"), ("[]", "is not a JSON object"), ("{}", "names neither architectures nor model_type"),
    ('{"architectures": ["GPT2LMHeadModel"]}', "GPT2LMHeadModel is not supported"),
])  # fmt: skip
def test_a_spoiled_config_is_refused(text, message, source, tmp_path):
    (source / "config.json").write_text(text)
    refused(lambda: hf_to_mcore(source, tmp_path / "out"), message)
    (source / "config.json").unlink()
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out"),
        "has no config.json, so it is not a .*: give a directory that has one, or a hub id",
    )
    for name in ("checkpoint-1", "checkpoint-2"):
        (source / name).mkdir()
        (source / name / "config.json").write_text(text)
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out"),
        "has no config.json.*: give .*/checkpoint-2, which has one",
    )
    refused(
        lambda: hf_to_mcore("https://huggingface.co/Qwen/Qwen3-8B", tmp_path / "out"), ": give Qwen/Qwen3-8B$"
    )
    refused(lambda: inspect(tmp_path), "neither a Hugging Face directory")


def test_pytorch_bin_files_are_named(source, tmp_path):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out"), "only pytorch_model.bin: save it with save_pretrained"
    )


class Boom:
    """Unpickling this runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("file", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_pickle_that_would_call_something_is_refused_and_not_run(file, mcore, tmp_path):
    trap, path = tmp_path / "trapped", mcore / "release" / file
    if file == ".metadata":
        path.write_bytes(pickle.dumps(Boom(trap)))
    elif file == "common.pt":
        shutil.rmtree(mcore / "hf")
        torch.save({"args": Boom(trap)}, path)
    else:
        from reshard.formats import torch_dist, torch_zip

        # A chunk's own data.pkl: of the same length, so that only this one thing is wrong.
        checkpoint = torch_dist.read(mcore / "release")
        stored = checkpoint.keys["decoder.final_layernorm.weight"].chunks[(0,), (64,)]
        data = bytearray(path.read_bytes())
        start, length = torch_zip.records(
            lambda o, n: bytes(data[stored.offset + o :][:n]), stored.length, "chunk"
        )["data.pkl"]
        evil = pickle.dumps(Boom("x"), protocol=0)[: length - 1].ljust(length - 1, b".") + b"."
        data[stored.offset + start : stored.offset + start + length] = evil
        path.write_bytes(data)
    refused(
        lambda: mcore_to_hf(mcore, tmp_path / "back"),
        "posix.system, which a checkpoint has no need of; refused, nothing was run",
    )
    assert not trap.exists() and not (tmp_path / "back").exists()


@pytest.mark.parametrize("payload", [
    b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    b"\x80\x02cbuiltins\ngetattr\n.", b"\x80\x04\x8c\x05torch\x8c\x0bhub.os.path\x93.", b"ctorch.hub\nload\n(tR.",
])  # fmt: skip
def test_names_outside_the_list_are_refused(payload):
    with pytest.raises(ReshardError, match="refused, nothing was run"):
        pickles.load(payload, "a file")


@pytest.mark.parametrize("payload", [b"", b"\x80\x04", b"garbage", b"\x80\x04(lp0\n" * 3, b"I1\n0."])
def test_bytes_that_are_no_pickle_are_refused(payload):
    with pytest.raises(ReshardError, match="not a readable pickle"):
        pickles.load(payload, "a file")


def test_a_spoiled_megatron_checkpoint_is_refused(mcore, tmp_path):
    release = mcore / "release"

    def spoil(path, data, message):
        before = path.read_bytes()
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        refused(lambda: mcore_to_hf(mcore, tmp_path / "back"), message)
        path.write_bytes(before)

    spoil(release / "__1_0.distcp", None, "lacks the files __1_0.distcp")
    spoil(release / "__1_0.distcp", (release / "__1_0.distcp").read_bytes()[:-200], "truncated")
    zeros = bytearray((release / "__0_0.distcp").read_bytes())
    spoil(release / "__0_0.distcp", bytes(len(zeros)), "not a readable torch container")
    spoil(release / ".metadata", b"", "not a readable pickle")
    spoil(release / ".metadata", pickle.dumps({"a": 1}), "does not have the structure")
    spoil(release / ".metadata", None, "no .metadata")
    spoil(release / "metadata.json", b'{"sharded_backend": "zarr"}', "'zarr'; only 'torch_dist'")
    spoil(release / "metadata.json", b"{", "not readable JSON")
    spoil(mcore / "latest_checkpointed_iteration.txt", b"latest", "must be a number or 'release'")
    spoil(mcore / "latest_checkpointed_iteration.txt", b"9", "iter_0000009 has no .metadata")
    spoil(mcore / "hf" / "config.json", b"{", "is not JSON")
    config = json.loads((mcore / "hf" / "config.json").read_text())
    spoil(
        mcore / "hf" / "config.json",
        json.dumps(config | {"num_hidden_layers": 5}).encode(),
        "has shape|lacks|num_layers is 4 .not 5.",
    )
    spoil(
        mcore / "hf" / "config.json",
        json.dumps(config | {"vocab_size": 5000}).encode(),
        "fewer than vocab_size 5000",
    )
    spoil(
        mcore / "hf" / "config.json",
        json.dumps(config | {"moe_intermediate_size": 24}).encode(),
        "has shape|moe_ffn_hidden_size is 48 .not 24.",
    )
    spoil(mcore / "reshard.json", b"{", "not a readable manifest")
    nothing_left(tmp_path)
    (mcore / "reshard.json").unlink()
    refused(lambda: check(mcore), "has no reshard.json")


def test_a_taken_destination_is_refused_and_replaced_only_on_success(source, tmp_path):
    out = tmp_path / "out"
    hf_to_mcore(source, out)
    before = sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*"))
    refused(lambda: hf_to_mcore(source, out), "exists; pass --overwrite")
    with pytest.raises(ReshardError):
        os.truncate(source / "model.safetensors", 5000)
        hf_to_mcore(source, out, MegatronLayout(tp=2), overwrite=True)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*"))
    back = tmp_path / "source2"
    mcore_to_hf(out, back)
    hf_to_mcore(back, out, MegatronLayout(tp=2), overwrite=True)
    assert inspect(out).layout["tp"] == 2
    (tmp_path / "file").write_text("")
    refused(lambda: hf_to_mcore(back, tmp_path / "file"), "is a file, not a directory")
    refused(lambda: hf_to_mcore(back, tmp_path / "file" / "out"), "file is a file, not a directory")
    (tmp_path / "empty").mkdir()
    hf_to_mcore(back, tmp_path / "empty")
    assert check(tmp_path / "empty").ok
    nothing_left(tmp_path, "out", "source2", "file", "empty")


def test_missing_directories_above_a_destination_are_made_and_go_with_a_run_that_fails(source, tmp_path):
    hf_to_mcore(source, tmp_path / "runs" / "today" / "out", dtype=torch.bfloat16)
    assert check(tmp_path / "runs" / "today" / "out").ok
    good = tmp_path / "back"
    mcore_to_hf(tmp_path / "runs" / "today" / "out", good)
    with open(good / "model.safetensors", "r+b") as file:  # what its manifest contradicts
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    refused(
        lambda: hf_to_mcore(good, tmp_path / "later" / "today" / "out"),
        "manifest|changed|differs|reshard.json",
    )
    nothing_left(tmp_path, "runs", "back")


def test_a_destination_that_overlaps_the_source_is_refused(source, tmp_path):
    for place in (source, source / "inside", tmp_path):
        refused(lambda place=place: hf_to_mcore(source, place, overwrite=True), "overlap")
    assert (source / "model.safetensors").exists()
    nothing_left(tmp_path)


def test_symbolic_links(source, tmp_path):
    """A hub cache is all links; a destination that is one is not followed silently."""
    (tmp_path / "link").symlink_to(source)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    hf_to_mcore(tmp_path / "link", tmp_path / "a")
    hf_to_mcore(linked, tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "b").equal
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(lambda: hf_to_mcore(source, tmp_path / "dangling"), "symbolic link to nowhere")
    (tmp_path / "to-a").symlink_to(tmp_path / "a")
    refused(
        lambda: hf_to_mcore(source, tmp_path / "to-a", overwrite=True),
        "is a symbolic link; give the directory itself",
    )


def run_cli(*args, **options):
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "reshard.cli.main", *map(str, args)], capture_output=True, text=True, **options
    )


def test_an_error_in_progress_stops_the_workers():
    done = []

    def progress(count: int, total: int) -> None:
        if count == 2:  # in whichever worker: the others hear nothing of it unless they are told
            raise KeyError("the bar is gone")

    with pytest.raises(KeyError):
        run_jobs(
            {str(i): 1 for i in range(1000)}, lambda name: done.append(name) or time.sleep(0.01), 8, progress
        )
    assert len(done) < 300  # the batches that had begun, and no more


def test_an_interrupt_while_workers_end_waits_for_them_all_the_same():
    writing = []

    def job(name: str) -> None:
        if name == "fails":
            while "slow" not in writing:
                time.sleep(0.01)
            raise ReshardError("no luck")
        writing.append(name)
        time.sleep(1)
        writing.remove(name)

    def interrupt() -> None:
        while "slow" not in writing:
            time.sleep(0.01)
        time.sleep(0.3)  # the error has come, and what is left to do is to wait
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_jobs({"fails": 2, "slow": 1}, job, 2)
    assert not writing
