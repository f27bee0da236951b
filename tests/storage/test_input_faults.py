"""Spoiled small files: configs, headers, manifests, trackers and layouts are refused in one
sentence, soon and with little memory."""

import json
import re
import shutil

import pytest
import torch

from reshard import MegatronLayout, check, hf_to_mcore, inspect
from reshard.megatron.stages import parse_pipeline
from reshard.storage.sources.hf_hub import local_directory
from tests.campaigns import fuzz
from tests.campaigns.mutations.values import HUGE_BYTES
from tests.storage.test_faults import edit_header, refused
from tests.tools.spoiled import DEEP, all_refuse, bounded, converted, mcore, source


def json_files(source, mcore):
    """Each JSON file that is read, with the call that reads it."""
    return {
        source / "config.json": lambda: inspect(source),
        source / "model.safetensors.index.json": lambda: inspect(source),
        mcore / "reshard.json": lambda: inspect(mcore),
        mcore / "hf" / "config.json": lambda: inspect(mcore),
        mcore / "release" / "metadata.json": lambda: inspect(mcore),
    }


@pytest.mark.parametrize(
    "text", ['{"a": ' + DEEP + "}", DEEP, "[]", "5", '"x"', "\xff", '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}"],
    ids=["deep in place", "deep", "a list", "a number", "a text", "no UTF-8", "half a character",
         "5000 digits"])  # fmt: skip
def test_json_that_is_no_object_is_refused_in_every_file(text, source, mcore):
    for path, call in json_files(source, mcore).items():
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(text.encode("latin-1"))
        refused(call, re.escape(str(path)))
        path.write_bytes(before) if before is not None else path.unlink()


def test_huge_sparse_files_are_refused_unread(source, mcore, tmp_path):
    files = json_files(source, mcore) | {
        mcore / "latest_checkpointed_iteration.txt": lambda: inspect(mcore),
        mcore / "release" / ".metadata": lambda: inspect(mcore),
    }
    for path, call in files.items():
        before = path.read_bytes() if path.exists() else None
        with open(path, "wb") as file:
            file.truncate(HUGE_BYTES)
        bounded(call, f"{re.escape(str(path))} has 3,221,225,472 bytes, more than")
        path.write_bytes(before) if before is not None else path.unlink()
    with open(source / "tokenizer.json", "wb") as file:
        file.truncate(HUGE_BYTES)
    with fuzz.limited():
        report = hf_to_mcore(source, tmp_path / "out", workers=1)
    assert any(
        "not carried along" in notice and "tokenizer.json (3,221,225,472 bytes)" in notice
        for notice in report.notices
    )
    shutil.rmtree(mcore / "hf")
    with open(mcore / "release" / "common.pt", "wb") as file:
        file.truncate(HUGE_BYTES)
    bounded(lambda: inspect(mcore), "common.pt is not a readable torch container")


def test_pipes_directories_and_links_to_nowhere_are_no_files(source, mcore, tmp_path):
    import os

    makers = (os.mkfifo, os.mkdir, lambda path: path.symlink_to(tmp_path / "nowhere"))
    for path, call in json_files(source, mcore).items():
        if not path.exists():
            continue
        for make in makers:
            before = path.read_bytes()
            path.unlink()
            make(path)
            bounded(
                call,
                "not a regular file|cannot read|Is a directory|neither a Hugging|nothing was wrong|no args",
            )
            path.rmdir() if path.is_dir() else path.unlink()
            path.write_bytes(before)


CONFIGS = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is above 10,000"),
    "more layers than tensors": (
        {"num_hidden_layers": 9000},
        "9,000 layers, but the files hold only 135 tensors",
    ),
    "experts": ({"num_experts": 10**9, "num_local_experts": 10**9}, "experts times layers are above 200,000"),
    "experts at many layers": (
        {"num_experts": 10**4, "num_local_experts": 10**4, "num_hidden_layers": 10**4},
        "experts times layers",
    ),
    "a size of 400 digits": ({"hidden_size": 10**400}, "hidden_size is above"),
    "quantization that is a number": ({"quantization_config": 5}, "quantization_config is 5, not an object"),
    "quantization that is a list": ({"quantization_config": ["fp8"]}, "not an object"),
    "blocks of text": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128"}},
        "not two positive whole numbers",
    ),
    "blocks of 0": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        "not two positive whole numbers",
    ),
    "a method that is a list": ({"quantization_config": {"quant_method": [[]]}}, "are not supported"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_beyond_all_bounds_is_refused_at_once(what, source, mcore, tmp_path):
    change, message = CONFIGS[what]
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    bounded(lambda: hf_to_mcore(source, tmp_path / "out"), message)


def test_args_of_a_billion_layers_are_refused_at_once(mcore):
    shutil.rmtree(mcore / "hf")
    (mcore / "reshard.json").unlink()
    path = mcore / "release" / "common.pt"
    common = torch.load(path, weights_only=False)
    for args, message in (
        ({"num_layers": 10**9}, "num_layers is above 10,000"),
        ({"num_experts": 10**9, "num_local_experts": 10**9}, "experts times layers"), ({"mtp_num_layers": 10**9}, ""),
        ({"moe_layer_freq": "[" + "1," * 10**6 + "1]"}, ""),
    ):  # fmt: skip
        changed = dict(common)
        changed["args"] = type(common["args"])(**vars(common["args"]) | args)
        torch.save(changed, path)
        bounded(lambda: inspect(mcore), message)
    for args in (5, "text", [1, 2], None):
        torch.save(dict(common) | {"args": args}, path)
        refused(lambda: inspect(mcore), "has args of type|has no args|not a readable pickle")
    torch.save([1, 2], path)
    refused(lambda: inspect(mcore), "holds list, not a dict")


HEADERS = {
    "a dtype that is a list": (lambda h: h["model.norm.weight"].update(dtype=[]), "malformed"),
    "a dtype that is a dict": (lambda h: h["model.norm.weight"].update(dtype={}), "malformed"),
    "a shape that is a dict": (lambda h: h["model.norm.weight"].update(shape={}), "malformed"),
    "a shape of True": (lambda h: h["model.norm.weight"].update(shape=[True]), "malformed"),
    "a shape of a million dims": (lambda h: h["model.norm.weight"].update(shape=[2] * 10**6), "malformed"),
    "a size of 400 digits": (lambda h: h["model.norm.weight"].update(shape=[0, 10**400]), "malformed"),
    "places that are text": (lambda h: h["model.norm.weight"].update(data_offsets="12"), "malformed"),
    "places in the wrong order": (
        lambda h: h["model.norm.weight"]["data_offsets"].reverse(),
        "needs|overlap",
    ),
    "an entry that is a number": (lambda h: h.update({"model.norm.weight": 5}), "malformed"),
    "a name of a megabyte": (
        lambda h: h.update({"x" * 2**20: h["model.norm.weight"]}),
        "the name .* of 1,048,576 characters",
    ),
    "a name with a line break": (
        lambda h: h.update({"model.norm\nweight": h.pop("model.norm.weight")}),
        r"the name 'model.norm\\nweight'",
    ),
    "60,000 names, one of them twice": (
        lambda h: (
            json.dumps(h)[:-1] + ", " + ", ".join(f'"n{i % 59_999}": {{}}' for i in range(60_000)) + "}"
        ),
        "has n0 twice",
    ),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_does_not_add_up_is_refused_at_once(what, source):
    change, message = HEADERS[what]
    edit_header(source / "model.safetensors", change)
    bounded(lambda: inspect(source), message)


MANIFESTS = {
    "no tensors": lambda m: m.pop("tensors"),
    "tensors that are a list": lambda m: m.update(tensors=[]),
    "a tensor that is a number": lambda m: m["tensors"].update({"model.norm.weight": 5}),
    "a tensor without a checksum": lambda m: m["tensors"]["model.norm.weight"].pop("xxh3_128"),
    "a tensor without a dtype": lambda m: m["tensors"]["model.norm.weight"].pop("dtype"),
    "a shape that is a number": lambda m: m["tensors"]["model.norm.weight"].update(shape=5),
    "a family that is a number": lambda m: m.update(family=5),
    "no source": lambda m: m.pop("source"),
    "a layout that is a list": lambda m: m.update(layout=[1]),
    "quantized names that are numbers": lambda m: m.update(quantized=[1]),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_lacks_what_every_manifest_has_is_refused(what, mcore, tmp_path):
    path = mcore / "reshard.json"
    manifest = json.loads(path.read_text())
    MANIFESTS[what](manifest)
    path.write_text(json.dumps(manifest))
    all_refuse(mcore, tmp_path, "reshard.json is not a readable manifest")
    refused(lambda: check(mcore), "reshard.json is not a readable manifest")


def test_a_manifest_without_a_layout_leaves_it_to_the_args(mcore):
    path = mcore / "reshard.json"
    manifest = json.loads(path.read_text())
    del manifest["layout"]
    path.write_text(json.dumps(manifest))
    assert inspect(mcore).layout["tp"] == 2


@pytest.mark.parametrize(
    "text",
    ["²", "\u0661", "-1", "+1", "1_0", "9" * 5000, "release\0", "../release", "release\nrelease", ""],
    ids=lambda text: repr(text[:20]),
)
def test_a_tracker_with_odd_digits_is_refused(text, mcore):
    (mcore / "latest_checkpointed_iteration.txt").write_text(text)
    refused(lambda: inspect(mcore), "it must be a number or 'release'|has 5,000 bytes, more than")


@pytest.mark.parametrize("text", [
    "Et*999999999L", "E(t*9999)*9999L", "E(t|)*99999999L", "Et*" + "9" * 5000 + "L", "(" * 100_000, "Et*²L",
    "t" * 10**6,
], ids=lambda text: text[:20])  # fmt: skip
def test_a_pipeline_layout_of_a_billion_layers_is_refused_at_once(text):
    bounded(lambda: parse_pipeline(text), "pipeline layout")


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 10**9}, {"pp": 10**9, "num_layers_in_first_pipeline_stage": 4}, {"pp": 60_000, "vpp": 60_000}],
    ids=str,
)
def test_a_layout_of_a_billion_ranks_is_refused_at_once(sizes, source, tmp_path):
    bounded(
        lambda: hf_to_mcore(source, tmp_path / "out", MegatronLayout(**sizes), dry_run=True),
        "sizes end at|at most",
    )


@pytest.mark.parametrize("name", ["foo/a..b", "foo/a--b", "a" * 5000, "foo/" + "b" * 300, "foo\0bar", "foo/ba²",
                                  "foo/bar.git"],
                         ids=lambda name: repr(name[:20]))  # fmt: skip
def test_a_source_that_can_be_no_hub_id_is_refused(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(
        lambda: local_directory(name),
        "neither a directory nor a hub id|the hub could not be reached|has no such model",
    )
