"""Spoiled input: every file that is read may hold anything, and the answer is one sentence, soon and with little memory."""

import io
import json
import pickle
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, inspect, mcore_to_hf
from reshard.formats import pickles
from reshard.megatron.arguments import command_line
from reshard.megatron.layout import parse_pipeline
from reshard.storage.sources.hf_hub import local_directory
from tests import fuzz
from tests.mutations import HUGE_BYTES, _rezip, zip64_offset
from tests.test_faults import edit_header, refused

DEEP = "[" * 100_000 + "]" * 100_000
KEY = "decoder.final_layernorm.weight"


@pytest.fixture
def source(checkpoint, tmp_path):
    """A Hugging Face checkpoint in one file that a test may spoil."""
    return Path(shutil.copytree(checkpoint("qwen3-moe", dtype=torch.bfloat16), tmp_path / "source"))


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    """A Megatron checkpoint and the way back, which nobody spoils."""
    folder = tmp_path_factory.mktemp("converted")
    hf_to_mcore(checkpoint("qwen3-moe", dtype=torch.bfloat16), folder / "mcore", MegatronLayout(tp=2))
    mcore_to_hf(folder / "mcore", folder / "back")
    return folder


@pytest.fixture
def mcore(converted, tmp_path):
    """A Megatron checkpoint that a test may spoil."""
    return Path(shutil.copytree(converted / "mcore", tmp_path / "mcore"))


def bounded(call, message, seconds=10):
    """The call is refused with one sentence that matches, within the fuzzer's memory and so many seconds of a core."""

    def work(say):
        start = time.process_time()
        try:
            with fuzz.limited():
                call()
            said = "nothing was wrong"
        except ReshardError as error:
            said = str(error)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        say([said, time.process_time() - start])

    words = fuzz.forked(work, 6 * seconds)
    assert words and words[0][1] < seconds, f"no answer in {seconds} s"
    assert re.search(message, words[0][0]) and "\n" not in words[0][0], words[0][0]


def all_refuse(mcore, tmp_path, message, good=None):
    """Each command that reads a Megatron checkpoint refuses this one."""
    refused(lambda: inspect(mcore), message)
    refused(lambda: mcore_to_hf(mcore, tmp_path / "out"), message)
    refused(lambda: diff(mcore, good or mcore), message)
    assert {p.name for p in tmp_path.iterdir()} <= {"source", "mcore"}


# A chunk's container.


def chunk_of(
    storage_offset=0,
    shape=(64,),
    stride=(1,),
    numel=64,
    storage="BFloat16Storage",
    rebuild="_rebuild_tensor_v2",
    marks=(),
    args=None,
):
    """What a chunk's ``data.pkl`` says of its tensor."""
    place = pickles.Persistent(("storage", pickles.Name("torch", storage), "0", "cpu", numel))
    values = (
        (place, storage_offset, shape, stride, False, pickles.call("collections", "OrderedDict"), *marks)
        if args is None
        else args
    )
    return pickles.dump(pickles.call("torch._utils", rebuild, *values), protocol=2)


def replace_chunk(mcore, change):
    """Put another container in the place of the final norm's, at the end of its file."""
    (mcore / "reshard.json").unlink(missing_ok=True)  # which would tell that a file is another one
    path = mcore / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    [index] = [i for i in metadata.storage_data if i.fqn == KEY]
    place = metadata.storage_data[index]
    file = mcore / "release" / place.relative_path
    data = file.read_bytes()
    new = change(data[place.offset : place.offset + place.length])
    file.write_bytes(data + new)
    metadata.storage_data[index] = type(place)(place.relative_path, len(data), len(new))
    path.write_bytes(pickle.dumps(metadata))


def with_pickle(data_pkl):
    return lambda old: _rezip(old, lambda name, payload: data_pkl if name.endswith("data.pkl") else payload)


CHUNKS = {
    "an offset before its bytes": (chunk_of(storage_offset=-8), "storage, offset, shape or strides"),
    "an offset behind its bytes": (chunk_of(storage_offset=1), "missing or cut short"),
    "an offset that is no number": (chunk_of(storage_offset="0"), "storage, offset, shape or strides"),
    "an offset of True": (chunk_of(storage_offset=True), "storage, offset, shape or strides"),
    "negative sizes": (chunk_of(shape=(-8, -8), stride=(-8, 1)), "storage, offset, shape or strides"),
    "a shape that is a number": (chunk_of(shape=64), "storage, offset, shape or strides"),
    "a shape of text": (chunk_of(shape=("64",)), "storage, offset, shape or strides"),
    "a shape of fractions": (chunk_of(shape=(64.0,)), "storage, offset, shape or strides"),
    "more strides than dims": (chunk_of(stride=(1, 1)), "storage, offset, shape or strides"),
    "other strides": (chunk_of(stride=(0,)), "strides"),
    "a thousand dims": (chunk_of(shape=(1,) * 1000, stride=(1,) * 1000), "storage, offset, shape or strides"),
    "no arguments": (chunk_of(args=()), "storage, offset, shape or strides"),
    "a storage that is a number": (
        chunk_of(args=(5, 0, (64,), (1,), False, None)),
        "storage, offset, shape or strides",
    ),
    "a storage of no known type": (chunk_of(storage="Generator"), "refused, nothing was run|unknown dtype"),
    "a sign still to be turned": (chunk_of(marks=({"neg": True},)), "negated view"),
    "another dtype": (chunk_of(storage="HalfStorage"), r"holds float16 \[64\], .metadata says bfloat16"),
    "another shape": (chunk_of(shape=(32,)), r"holds bfloat16 \[32\]"),
    "no tensor": (pickles.dump({"a": 1}, protocol=2), "holds dict, not one tensor"),
}


@pytest.mark.parametrize("what", CHUNKS)
def test_a_chunk_that_says_something_else_of_its_bytes_is_refused(what, mcore, converted, tmp_path):
    data_pkl, message = CHUNKS[what]
    replace_chunk(mcore, with_pickle(data_pkl))
    refused(lambda: mcore_to_hf(mcore, tmp_path / "out"), message)
    refused(lambda: diff(mcore, converted / "back"), message)


def test_a_chunk_written_anew_as_it_was_is_read(mcore, converted):
    """The control: what the other tests spoil is right before."""
    replace_chunk(mcore, with_pickle(chunk_of()))
    assert diff(mcore, converted / "back").equal


@pytest.mark.parametrize("offset", [2**64 - 1, 2**63, 2**63 - 1, 2**40])
def test_a_zip_that_points_far_away_is_refused(offset, mcore, tmp_path):
    replace_chunk(mcore, lambda old: zip64_offset(old, offset))
    refused(lambda: mcore_to_hf(mcore, tmp_path / "out"), "not a readable torch container")


# .metadata.


def edit_metadata(mcore, change):
    path = mcore / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata, metadata.state_dict_metadata, metadata.storage_data)
    path.write_bytes(pickle.dumps(metadata))


def first_chunk(state, key="decoder.layers.mlp.router.weight"):
    return state[key].chunks[0]


def set_field(target, name, value):
    object.__setattr__(target, name, value)


def index_of(storage, key="decoder.layers.mlp.router.weight"):
    return next(index for index in storage if index.fqn == key)


def place_of(storage):
    return storage[index_of(storage)]


METADATA = {
    "a chunk size of 0": (lambda m, state, storage: set_field(first_chunk(state), "sizes", (0, 8, 64)), "router.weight lacks chunks"),
    "a chunk size of text": (lambda m, state, storage: set_field(first_chunk(state), "sizes", ("1", 8, 64)), "whose offsets or sizes"),
    "a chunk outside": (lambda m, state, storage: set_field(first_chunk(state), "sizes", (1, 9, 64)), "outside of its shape"),
    "a negative offset": (lambda m, state, storage: set_field(first_chunk(state), "offsets", (-1, 0, 0)), "whose offsets or sizes"),
    "other dims": (lambda m, state, storage: set_field(first_chunk(state), "sizes", (8, 64)), "whose offsets or sizes"),
    "a place that is no number": (lambda m, state, storage: set_field(place_of(storage), "offset", "0"), "name, file, offset or length"),
    "a place at a fraction": (lambda m, state, storage: set_field(place_of(storage), "offset", 0.5), "name, file, offset or length"),
    "a place before the start": (lambda m, state, storage: set_field(place_of(storage), "offset", -64), "name, file, offset or length"),
    "a place of 2^64": (lambda m, state, storage: set_field(place_of(storage), "length", 2**64), "name, file, offset or length"),
    "a file that is no text": (lambda m, state, storage: set_field(place_of(storage), "relative_path", 5), "name, file, offset or length"),
    "a file of another": (lambda m, state, storage: set_field(place_of(storage), "relative_path", "../x"), "outside of the checkpoint"),
    "the directory as a file": (lambda m, state, storage: set_field(place_of(storage), "relative_path", "."), "lacks the files"),
    "no place": (lambda m, state, storage: storage.pop(index_of(storage)), "stored nowhere"),
    "two chunks at one place": (
        lambda m, state, storage: storage.update({index_of(storage): storage[index_of(storage, KEY)]}), "at the same bytes of"),
    "a key that is a number": (lambda m, state, storage: state.update({5: state[KEY]}), "does not have the structure"),
    "entries that are numbers": (lambda m, state, storage: state.update({KEY: 5}), "does not have the structure"),
    "no storage": (lambda m, state, storage: setattr(m, "storage_data", 5), "does not have the structure"),
}  # fmt: skip


@pytest.mark.parametrize("what", METADATA)
def test_metadata_that_does_not_add_up_is_refused(what, mcore, tmp_path):
    change, message = METADATA[what]
    edit_metadata(mcore, change)
    all_refuse(mcore, tmp_path, message)


@pytest.mark.parametrize("key", ["decoder.layers.mlp.router.weight", "embedding.word_embeddings.weight", KEY])
def test_a_checkpoint_that_lacks_a_chunk_is_named_with_its_key(key, mcore, converted, tmp_path):
    edit_metadata(mcore, lambda m, state, storage: state[key].chunks.pop())
    all_refuse(
        mcore,
        tmp_path,
        f"{mcore}/release: {key} lacks chunks: they hold .* elements, its shape .* has",
        converted / "back",
    )
    refused(lambda: diff(converted / "back", mcore), f"{key} lacks chunks")


def test_chunks_that_overlap_are_refused(mcore, tmp_path):
    def widen(metadata, state, storage):
        set_field(state["decoder.layers.mlp.router.weight"].chunks[0], "sizes", torch.Size((2, 8, 64)))

    edit_metadata(mcore, widen)
    all_refuse(mcore, tmp_path, "router.weight has chunks that overlap")


# Pickles.

TEXT = st.text("abc²", max_size=5)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
NESTED = st.deferred(lambda: PLAIN | st.lists(NESTED, max_size=4) | st.dictionaries(TEXT, NESTED, max_size=4) | st.tuples(NESTED, NESTED)
                     | st.tuples(NESTED) | st.tuples() | st.tuples(PLAIN, PLAIN, PLAIN, PLAIN))  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(NESTED, st.integers(2, 5), st.binary(max_size=300), st.sets(TEXT))
def test_plain_pickles_are_read_as_python_reads_them(value, protocol, data, members):
    found = pickles.load(pickle.dumps(value, protocol=protocol), "x")
    assert found == value and repr(found) == repr(value)  # repr: True is not 1
    if protocol > 3:  # before, bytes and sets are calls
        value = [data, members, frozenset(members), data]
        assert pickles.load(pickle.dumps(value, protocol=protocol), "x") == value


def tower(levels=64):
    """Opcodes of a tuple of two of a tuple of two of ...: 2 to the power of `levels` parts in a few bytes."""
    get = [b"h" + bytes([i]) for i in range(levels + 1)]
    return (
        b"N\x85q\x000"
        + b"".join(get[i] + get[i] + b"\x86q" + bytes([i + 1]) + b"0" for i in range(levels))
        + get[-1]
    )


BOMBS = {
    "a memo index of 2^29": (b"\x80\x02Nr\xff\xff\xff\x1f.", None),
    "bytes of 2^62": (b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"x.", "not a readable pickle"),
    "a key that shares parts": (b"\x80\x02}" + tower() + b"Ns.", "a key of type tuple"),
    "a member of a set that shares parts": (b"\x80\x04\x8f(" + tower() + b"\x90.", "a key of type tuple"),
    "keys that collide": (b"\x80\x02}(" + b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(100_000))
                          + b"u.", "a key of type int"),
    "a whole number of a million digits": (b"\x80\x02\x8b" + (500_000).to_bytes(4, "little") + b"\x7f" * 500_000 + b".", None),
    "deep lists": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", None),
    "20 million lists": (b"\x80\x02" + b"]" * 20_000_000 + b".", "more than 16,000,000 containers"),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_a_pickle_that_blows_up_takes_little_time_and_memory(what):
    data, message = BOMBS[what]

    def call():
        pickles.load(data, "a file")
        if message is None:
            raise ReshardError("read")

    bounded(call, message or "read")


@pytest.mark.parametrize("what", BOMBS)
def test_metadata_and_common_pt_that_blow_up_are_refused(what, mcore):
    data, _ = BOMBS[what]
    (mcore / "release" / ".metadata").write_bytes(data)
    bounded(lambda: inspect(mcore), "structure of a torch_dist|readable pickle|containers")


# JSON files, all of them.


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
    ids=["deep in place", "deep", "a list", "a number", "a text", "no UTF-8", "half a character", "5000 digits"])  # fmt: skip
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
        "not copied" in notice and "tokenizer.json (3,221,225,472 bytes)" in notice
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
        ({"num_layers": 10**9}, "num_layers is above 10,000"), ({"num_experts": 10**9, "num_local_experts": 10**9}, "experts times layers"),
        ({"mtp_num_layers": 10**9}, ""), ({"moe_layer_freq": "[" + "1," * 10**6 + "1]"}, ""),
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
    "places in the wrong order": (lambda h: h["model.norm.weight"]["data_offsets"].reverse(), "needs|overlap"),
    "an entry that is a number": (lambda h: h.update({"model.norm.weight": 5}), "malformed"),
    "a name of a megabyte": (lambda h: h.update({"x" * 2**20: h["model.norm.weight"]}), "the name .* of 1,048,576 characters"),
    "a name with a line break": (lambda h: h.update({"model.norm\nweight": h.pop("model.norm.weight")}), r"the name 'model.norm\\nweight'"),
    "60,000 names, one of them twice": (
        lambda h: json.dumps(h)[:-1] + ", " + ", ".join(f'"n{i % 59_999}": {{}}' for i in range(60_000)) + "}", "has n0 twice"),
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_does_not_add_up_is_refused_at_once(what, source):
    change, message = HEADERS[what]
    edit_header(source / "model.safetensors", change)
    bounded(lambda: inspect(source), message)


MANIFESTS = {
    "no tensors": lambda m: m.pop("tensors"), "tensors that are a list": lambda m: m.update(tensors=[]),
    "a tensor that is a number": lambda m: m["tensors"].update({"model.norm.weight": 5}),
    "a tensor without a checksum": lambda m: m["tensors"]["model.norm.weight"].pop("xxh3_128"),
    "a tensor without a dtype": lambda m: m["tensors"]["model.norm.weight"].pop("dtype"),
    "a shape that is a number": lambda m: m["tensors"]["model.norm.weight"].update(shape=5),
    "a family that is a number": lambda m: m.update(family=5), "no source": lambda m: m.pop("source"),
    "a layout that is a list": lambda m: m.update(layout=[1]), "quantized names that are numbers": lambda m: m.update(quantized=[1]),
}  # fmt: skip


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
    "Et*999999999L", "E(t*9999)*9999L", "E(t|)*99999999L", "Et*" + "9" * 5000 + "L", "(" * 100_000, "Et*²L", "t" * 10**6,
], ids=lambda text: text[:20])  # fmt: skip
def test_a_pipeline_layout_of_a_billion_layers_is_refused_at_once(text):
    bounded(lambda: parse_pipeline(text), "pipeline layout")


@pytest.mark.parametrize(
    "sizes", [{"tp": 10**9}, {"pp": 10**9, "first_stage_layers": 4}, {"pp": 60_000, "vpp": 60_000}], ids=str
)
def test_a_layout_of_a_billion_ranks_is_refused_at_once(sizes, source, tmp_path):
    bounded(
        lambda: hf_to_mcore(source, tmp_path / "out", MegatronLayout(**sizes), dry_run=True),
        "sizes end at|at most",
    )


@pytest.mark.parametrize("name", ["foo/a..b", "foo/a--b", "a" * 5000, "foo/" + "b" * 300, "foo\0bar", "foo/ba²", "foo/bar.git"],
                         ids=lambda name: repr(name[:20]))  # fmt: skip
def test_a_source_that_can_be_no_hub_id_is_refused(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(
        lambda: local_directory(name),
        "neither a directory nor a hub id|the hub could not be reached|has no such model",
    )


def test_what_torch_saves_reads_as_torch_reads_it():
    """The pickle machine on real objects: a namespace, dtypes, tensors of several dtypes, nested dicts."""
    import argparse

    from reshard.formats import torch_zip

    out = io.BytesIO()
    args = argparse.Namespace(
        bf16=True, dtype=torch.bfloat16, sizes=[1, 2**40, -3], nested={"a": (None, 1.5)}
    )
    torch.save({"args": args, "w": torch.arange(6, dtype=torch.int64).view(2, 3), "iteration": 7}, out)
    data = out.getvalue()
    found = torch_zip.stored_object(lambda offset, length: data[offset : offset + length], len(data), "x")
    fields = found["args"].fields
    assert (fields["bf16"], fields["sizes"], fields["nested"]) == (True, [1, 2**40, -3], {"a": (None, 1.5)})
    assert fields["dtype"].name == "bfloat16" and found["iteration"] == 7
    assert found["w"].args[2:4] == ((2, 3), (3, 1))


@pytest.mark.parametrize(
    "version",
    [b"3\n", b"10", b"x", b"", b"11", b"0", b"-1", b"9" * 5000],
    ids=lambda version: repr(version[:9]),
)
def test_a_container_s_version_is_taken_and_refused_as_torch_does(version):
    from reshard.formats import torch_zip

    out = io.BytesIO()
    torch.save(torch.arange(4.0), out)
    data = _rezip(out.getvalue(), lambda name, payload: version if name.endswith("/version") else payload)
    try:
        torch.load(io.BytesIO(data))
        assert torch_zip.stored_tensor(lambda at, n: data[at : at + n], len(data), "x").shape == (4,)
    except (RuntimeError, IndexError):  # of the standard library of C++, for a number that is too large
        refused(
            lambda: torch_zip.stored_tensor(lambda at, n: data[at : at + n], len(data), "x"),
            "x says that its format is version b'",
        )


def test_mutations_of_every_file_are_answered(tmp_path):
    """A seeded part of what `python -m tests.fuzz` runs for as long as one likes."""
    found = fuzz.subjects(tmp_path, ("qwen3-moe",))
    outcomes = fuzz.run(2026, list(range(40)), found)
    assert fuzz.failed(outcomes) == []
    assert len({outcome.verdict for outcome in outcomes}) > 1


def test_the_judges_of_the_fuzzer_see_what_goes_wrong_without_our_checks(tmp_path, monkeypatch):
    """Negative controls: with a check switched off a spoiled checkpoint converts, and is not taken for right."""
    published, _, written, saved = fuzz.subjects(tmp_path / "made", ("llama-rope-tied",))

    def verdict(subject, command, spoil):
        with tempfile.TemporaryDirectory() as folder:
            spoiled = Path(shutil.copytree(subject.path, Path(folder) / "spoiled"))
            spoil(spoiled)
            return fuzz.answered(
                subject, command, Path(folder), fuzz.Outcome(0, 0, subject.name, command, "", "time")
            )

    def zeros(spoiled):
        path = spoiled / "release" / "__0_0.distcp"
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :])

    def config(**changes):
        def spoil(spoiled):
            path = spoiled / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return spoil

    def other_chunk(spoiled):
        metadata = pickle.loads((spoiled / "release" / ".metadata").read_bytes())
        metadata.state_dict_metadata["decoder.final_layernorm.weight"].properties.dtype = torch.float16
        (spoiled / "release" / ".metadata").write_bytes(pickle.dumps(metadata))

    nothing = config()
    assert (
        verdict(published, "hf-to-mcore", nothing).verdict
        == verdict(written, "mcore-to-hf", lambda spoiled: None).verdict
        == "right"
    )
    assert (
        verdict(saved, "mcore-to-hf", lambda spoiled: None).verdict
        == verdict(saved, "inspect", lambda spoiled: None).verdict
        == "right"
    )
    assert verdict(written, "mcore-to-hf", zeros).verdict == "refused"
    assert verdict(published, "hf-to-mcore", config(logit_scale=9.0)).verdict == "refused"
    assert (
        verdict(published, "hf-to-mcore", config(rms_norm_eps=7.0)).verdict == "right"
    )  # the flags say so too
    assert fuzz.failed([verdict(saved, "inspect", other_chunk)]) == []
    with monkeypatch.context() as off:
        off.setattr("reshard.storage.sources.verify.SourceChecks.compare", lambda self, name, found: None)
        found = verdict(written, "mcore-to-hf", zeros)
        assert (found.verdict, found.detail) == (
            "wrong",
            "other bytes than the manifest has",
        ) and fuzz.failed([found])
    with monkeypatch.context() as off:
        off.setattr("reshard.models.model._check_meaning", lambda *_: None)
        found = verdict(published, "hf-to-mcore", config(logit_scale=9.0))
        assert found.verdict == "wrong" and "logit_scale" in found.detail
    with monkeypatch.context() as off:  # a conversion that writes other flags than the config means
        off.setattr(
            "reshard.storage.destinations.megatron.command_line",
            lambda args, *more: command_line(args | {"layernorm_epsilon": 1e-3}, *more),
        )
        found = verdict(published, "hf-to-mcore", nothing)
        assert found.verdict == "wrong" and "norm_epsilon" in found.detail
    with monkeypatch.context() as off:  # a listing that nobody's files have
        off.setattr(
            "reshard.storage.inspection.asdict",
            lambda found: {"tensors": {n: e | {"shape": [1]} for n, e in found.tensors.items()}},
        )
        found = verdict(saved, "inspect", lambda spoiled: None)
        assert found.verdict in ("wrong", "no judgment") and fuzz.failed([found])
