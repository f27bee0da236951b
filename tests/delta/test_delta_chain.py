"""Chains of deltas on disk and in a store: the bits that training left, and every fault by name."""

import asyncio
import errno
import fcntl
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, mcore_to_hf
from reshard.cli.places import check_command
from reshard.comm.group import RefitGroup
from reshard.comm.hosts import free_address
from reshard.core.dtypes import DTYPES
from reshard.delta import Chain, apply, apply_deltas, apply_deltas_async, roll_back, save, show
from reshard.delta.grouped import GroupDeltas
from reshard.delta.manifests import _checksum
from reshard.digests import numbers
from reshard.engines.sglang.calls import connect_server
from reshard.engines.sglang.delta_calls import apply_deltas as apply_to_sglang
from reshard.engines.workers.delta_methods import DeltaMethods
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import TensorInfo
from tests.starting.ranks import caught
from tests.tools.checkpoints import make

STEPS = 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[Path]:
    """A small Llama after each step of a training by Adam, in bf16 as engines serve it; the first before any."""
    root = tmp_path_factory.mktemp("trained")
    steps = [make(root / "step0", "llama", torch.bfloat16)]
    model = AutoModelForCausalLM.from_pretrained(steps[0], dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-6)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 1000, (2, 16), generator=generator)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        directory = root / f"step{step}"
        shutil.copytree(steps[0], directory)
        names = load_file(directory / "model.safetensors")
        weights = {name: model.state_dict()[name].bfloat16().contiguous() for name in names}
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        steps.append(directory)
    return steps


@pytest.fixture(scope="module")
def chain(trained, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chain") / "chain"
    for old, new in pairwise(trained):
        save(old, new, path)
    return path


def differing(a: Path, b: Path) -> list[str]:
    """The tensors of two directories that differ, by the safetensors library."""
    one, other = (load_file(path / "model.safetensors") for path in (a, b))
    assert one.keys() == other.keys()
    return [
        name for name in one if not torch.equal(one[name].view(torch.int16), other[name].view(torch.int16))
    ]


def test_twenty_deltas_give_the_bits_that_training_left(trained, chain, tmp_path):
    for version, expected in ((None, STEPS), (7, 7), (0, 0)):
        report = apply(trained[0], chain, tmp_path / f"{version}", version=version)
        assert not differing(tmp_path / f"{version}", trained[expected]) and report.direction == "delta-apply"
    assert differing(tmp_path / "7", trained[8])  # the control
    held = show(chain)
    assert [delta["version"] for delta in held["deltas"]] == list(range(1, STEPS + 1))
    assert all(0 < delta["density"] < 0.25 for delta in held["deltas"])
    assert sum(delta["bytes"] for delta in held["deltas"]) < STEPS * held["weights_bytes"] / 2


def test_old_and_new_and_base_may_be_megatron_checkpoints_of_any_layout(trained, chain, tmp_path):
    for step, layout in ((0, MegatronLayout(tp=2)), (1, MegatronLayout(pp=2)), (2, MegatronLayout(tp=4))):
        hf_to_mcore(trained[step], tmp_path / f"mcore{step}", layout)
    save(tmp_path / "mcore0", tmp_path / "mcore1", tmp_path / "chain")
    save(trained[1], tmp_path / "mcore2", tmp_path / "chain")
    assert [d["digest"] for d in show(tmp_path / "chain")["deltas"]] == [
        d["digest"] for d in show(chain)["deltas"][:2]
    ]
    for number, base in enumerate((trained[0], tmp_path / "mcore0")):
        apply(base, tmp_path / "chain", tmp_path / f"out{number}")
        assert diff(trained[2], tmp_path / f"out{number}").equal


def test_a_store_of_fsspec_holds_the_same_files(trained, chain, tmp_path):
    url = f"memory://{tmp_path.name}/chain"
    for old, new in pairwise(trained[:4]):
        save(old, new, url)
    fs = fsspec.filesystem("memory")
    for name in (Path(p).name for p in fs.ls(url, detail=False)):
        if name.endswith(".safetensors"):
            assert fs.cat_file(f"{url}/{name}") == (chain / name).read_bytes()
    apply(trained[0], url, tmp_path / "out")
    assert not differing(tmp_path / "out", trained[3])
    fs.pipe_file(f"{url}/delta-000002.safetensors", fs.cat_file(f"{url}/delta-000002.safetensors")[:-8])
    with pytest.raises(ReshardError, match=r"memory://.*/delta-000002.safetensors is truncated: it has"):
        apply(trained[0], url, tmp_path / "other")
    with pytest.raises(
        ReshardError, match="memory://nowhere is not a chain of deltas, since it has no base.json"
    ):
        show("memory://nowhere")


def test_a_bucket_is_not_made_by_a_name_that_is_misspelled(trained, tmp_path, monkeypatch):
    store, bucket = fsspec.filesystem("memory"), f"memory://{tmp_path.name}-bucket"
    plain = type(store).put_file

    def into_bucket(self, path, to, **options):  # as S3's and Google's do
        if not self.isdir(bucket):
            raise FileNotFoundError(to)
        plain(self, path, to, **options)

    monkeypatch.setattr(type(store), "protocol", ("memory", "s3"))
    monkeypatch.setattr(type(store), "put_file", into_bucket)
    with pytest.raises(ReshardError, match="-bucket/run is not there: create its bucket first"):
        save(trained[0], trained[1], f"{bucket}/run")
    assert not store.exists(bucket)
    store.mkdir(bucket)
    save(trained[0], trained[1], f"{bucket}/run")
    assert len(show(f"{bucket}/run")["deltas"]) == 1


def rewrite(path: Path, **fields) -> None:
    """Change fields of a manifest, with the checksum that belongs to them."""
    manifest = json.loads(path.read_text()) | fields
    del manifest["xxh3_128"]
    path.write_text(json.dumps(manifest | {"xxh3_128": _checksum(manifest)}))


def forge(path: Path, change) -> None:
    """Change bytes of a delta's file, with the checksums that belong to them."""
    payload = path.with_suffix(".safetensors")
    data = change(bytearray(payload.read_bytes()))
    payload.write_bytes(data)
    entry = {"name": payload.name, "bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(bytes(data))}
    rewrite(path, files=[entry])


def flip(data: bytearray, at: int = -9) -> bytearray:
    data[at] ^= 1
    return data


def swap(chain: Path, end: str) -> None:
    two, three = chain / f"delta-000002.{end}", chain / f"delta-000003.{end}"
    one, other = two.read_bytes(), three.read_bytes()
    two.write_bytes(other)
    three.write_bytes(one)


def other_chain(chain: Path) -> None:
    """Put a delta of a chain of other weights in the place of the second."""
    rewrite(chain / "delta-000002.json", before="0123456789abcdef")


def key_of(data: bytearray, old: bytes, new: bytes) -> bytearray:
    assert old in data and len(old) == len(new)
    return data.replace(old, new)


FAULTS = {
    "a delta is lost": (lambda c: (c / "delta-000002.json").unlink(), "lacks delta-000002, which delta-000003 follows"),
    "a delta's file is lost": (lambda c: (c / "delta-000002.safetensors").unlink(), "lacks delta-000002.safetensors"),
    "two deltas are exchanged": (lambda c: swap(c, "json"),
                                 "delta-000002.json is version 3, not 2: it was renamed or copied"),
    "two files are exchanged": (lambda c: swap(c, "safetensors"), "delta-000002.safetensors is (truncated|longer)"),
    "a delta is doubled": (
        lambda c: shutil.copy(c / "delta-000003.json", c / "delta-000004.json"),
        "delta-000004.json is version 3, not 4: it was renamed or copied",
    ),
    "a manifest is copied under a longer name": (
        lambda c: shutil.copy(c / "delta-000002.json", c / "delta-0000002.json"),
        "delta-0000002.json is not called delta-000002.json: it was renamed or copied",
    ),
    "two trainers write to one chain": (
        lambda c: rewrite(c / "delta-000003.json", follows=1),
        "delta-000003 and delta-000002 both follow delta-000001",
    ),
    "a file is truncated": (
        lambda c: (c / "delta-000003.safetensors").write_bytes((c / "delta-000003.safetensors").read_bytes()[:-1]),
        "delta-000003.safetensors is truncated: it has",
    ),
    "a file is altered": (
        lambda c: (c / "delta-000001.safetensors").write_bytes(
            flip(bytearray((c / "delta-000001.safetensors").read_bytes()))),
        "delta-000001.safetensors was altered after it was written",
    ),
    "a manifest is altered": (
        lambda c: (c / "delta-000001.json").write_text((c / "delta-000001.json").read_text().replace('"changed": ',
                                                                                                     '"changed": 1')),
        "delta-000001.json was altered after it was written",
    ),
    "a manifest is truncated": (
        lambda c: (c / "delta-000002.json").write_text((c / "delta-000002.json").read_text()[:-40]),
        "delta-000002.json is truncated, or no manifest",
    ),
    "a delta is another chain's": (other_chain,
                                   "delta-000002 is of another chain: it changes weights with digest 0123456789abcdef"),
    "a format of another time": (lambda c: rewrite(c / "delta-000002.json", format=6),
                                 "has format 6, and this reshard reads 4 and 5: update reshard"),
    "a format of an earlier time": (lambda c: rewrite(c / "base.json", format=2),
                                    "has format 2, and this reshard reads 4 and 5: begin a new"),
    "a value is forged": (
        lambda c: forge(c / "delta-000002.json", lambda data: flip(data, data.index(b"}}") + 24)),
        "(version 2 does not give the weights that it says|has changes outside of its box)",
    ),
    "a box is forged": (
        lambda c: forge(c / "delta-000002.json",
                        lambda d: key_of(d, b"embed_tokens.weight@0,0+", b"embed_tokens.weight@9,0+")),
        "lies outside of the tensor, whose shape is .1000, 64.",
    ),
    "a tensor is forged": (
        lambda c: forge(c / "delta-000002.json",
                        lambda d: key_of(d, b"model.embed_tokens.weight@", b"model.embed_tokans.weight@")),
        "'model.embed_tokans.weight' is not a tensor of the base",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_before_anything_is_written(fault, trained, chain, tmp_path):
    spoil, message = FAULTS[fault]
    copy = tmp_path / "chain"
    copy.mkdir()
    for path in chain.iterdir():
        if path.name < "delta-000004":
            shutil.copy(path, copy / path.name)
    apply(trained[0], copy, tmp_path / "control")
    assert not differing(tmp_path / "control", trained[3])
    spoil(copy)
    with pytest.raises(ReshardError, match=message):
        apply(trained[0], copy, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain", "control"]


def test_another_base_and_another_step_are_refused_by_name(trained, chain, tmp_path):
    with pytest.raises(ReshardError, match="step1 is not the base of .*: its weights have digest"):
        apply(trained[1], chain, tmp_path / "out")
    make(tmp_path / "qwen", "qwen2", torch.bfloat16)
    with pytest.raises(ReshardError, match="qwen is another model than the base of"):
        apply(tmp_path / "qwen", chain, tmp_path / "out")
    with pytest.raises(ReshardError, match="has no version 21: the newest is 20"):
        apply(trained[0], chain, tmp_path / "out", version=21)
    hf_to_mcore(trained[20], tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "fp8", quantize=True)
    with pytest.raises(ReshardError, match="fp8 is quantized .*, and deltas are of plain weights"):
        save(tmp_path / "fp8", trained[4], chain)
    before = sorted(path.name for path in chain.iterdir())
    with pytest.raises(ReshardError, match="step3 is version 3 of .*, and the next delta follows version 20"):
        save(trained[3], trained[1], chain)
    with pytest.raises(
        ReshardError,
        match="has these changes already: .*step3 is its version 3, and .*step4 its version 4; the next .* newest, 20",
    ):
        save(trained[3], trained[4], chain)
    with pytest.raises(ReshardError, match="has version 20, so the next cannot be 20"):
        save(trained[20], trained[4], chain, version=20)
    shutil.copytree(trained[4], tmp_path / "epsilon")
    config = json.loads((tmp_path / "epsilon" / "config.json").read_text())
    (tmp_path / "epsilon" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    with pytest.raises(
        ReshardError,
        match="epsilon is not a new version of .*step20: its config has rms_norm_eps 0.25, and had 1e-0",
    ):
        save(trained[20], tmp_path / "epsilon", chain)
    with pytest.raises(ReshardError, match="qwen is not a new version of"):
        save(trained[20], tmp_path / "qwen", chain)
    shutil.copytree(trained[0], tmp_path / "another config")
    (tmp_path / "another config" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    with pytest.raises(
        ReshardError,
        match="another config is not the base of .*: its config has rms_norm_eps 0.25, and the chain was begun with "
        "1e-0.*; give the checkpoint with which it was begun .*step0",
    ):
        apply(tmp_path / "another config", chain, tmp_path / "out")
    assert sorted(path.name for path in chain.iterdir()) == before
    assert not (tmp_path / "out").exists()


def test_a_save_that_fails_leaves_no_chain_and_one_at_a_time_writes(trained, tmp_path):
    copy = tmp_path / "new"
    shutil.copytree(trained[1], copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ReshardError, match="points outside of the file"):
        save(trained[0], copy, tmp_path / "chain")
    assert not (tmp_path / "chain").exists()
    before = sorted(path.name for path in copy.iterdir())
    with pytest.raises(
        ReshardError, match="new holds a checkpoint .config.json.: give a chain a directory of its own"
    ):
        save(trained[0], trained[1], copy)
    assert sorted(path.name for path in copy.iterdir()) == before
    save(trained[0], trained[1], tmp_path / "chain", version=10)
    shutil.copytree(tmp_path / "chain", tmp_path / "headless")
    (tmp_path / "headless" / "base.json").unlink()
    for add in (
        lambda: save(trained[1], trained[2], tmp_path / "headless"),
        lambda: show(tmp_path / "headless"),
    ):
        with pytest.raises(
            ReshardError, match="headless has versions, but has lost its base.json: bring it back"
        ):
            add()
    busy = pytest.raises(ReshardError, match="another process writes a delta to")
    with Chain(tmp_path / "chain") as held, held.store.writing(), busy:
        save(trained[1], trained[2], tmp_path / "chain")
    (tmp_path / "chain" / ".writing").mkdir()  # of one that was killed
    (tmp_path / "chain" / ".writing" / "delta-000020.safetensors").touch()
    save(trained[1], trained[2], tmp_path / "chain", version=20)
    assert [delta["follows"] for delta in show(tmp_path / "chain")["deltas"]] == [0, 10]
    assert not (tmp_path / "chain" / ".writing").exists()


def test_a_file_system_that_gives_less_than_it_was_asked_for_changes_no_byte(trained, tmp_path, monkeypatch):
    """As one over a network may, which Python passes on."""
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, at: read(file, length // 2 + 1, at))
    save(trained[0], trained[20], tmp_path / "chain")
    apply(trained[0], tmp_path / "chain", tmp_path / "out")
    assert not differing(tmp_path / "out", trained[20]) and check(tmp_path / "out").ok


def test_a_chain_is_shown_only_if_its_files_are_there_in_full(trained, tmp_path):
    chain = tmp_path / "chain"
    save(trained[0], trained[1], chain)
    payload = chain / "delta-000001.safetensors"
    os.truncate(payload, payload.stat().st_size - 1)
    with pytest.raises(ReshardError, match=r"delta-000001.safetensors is truncated: it has"):
        show(chain)
    with pytest.raises(
        ReshardError, match="chain is a chain of deltas, not a model: reshard delta apply writes"
    ):
        save(chain, trained[1], tmp_path / "other")
    with pytest.raises(ReshardError, match="chain is a chain of deltas, not a model"):
        check_command(str(chain), "out", megatron=True)  # of mcore-to-hf
    payload.unlink()
    with pytest.raises(ReshardError, match="lacks delta-000001.safetensors: bring it back"):
        show(chain)


def test_a_chain_is_not_overwritten_by_a_version_of_it(trained, tmp_path):
    save(trained[0], trained[1], tmp_path / "chain")
    with pytest.raises(ReshardError, match="chain/base.json is in .*, which this run would empty or replace"):
        apply(trained[0], tmp_path / "chain", tmp_path / "chain", version=0, overwrite=True)
    assert len(show(tmp_path / "chain")["deltas"]) == 1


@pytest.mark.parametrize(
    "owner, call",
    [(os, "pwritev"), (os, "fsync"), (fcntl, "flock"), (Path, "write_text"), (OpenFiles, "close")],
)
def test_a_full_disk_is_named_and_a_second_try_adds_the_version(owner, call, trained, tmp_path, monkeypatch):
    def full(*of, **options):
        error = OSError(errno.ENOSPC, "No space left on device")
        if owner is OpenFiles:  # as a file server says it, of bytes that it had taken
            return {chain: error}
        raise error

    chain = tmp_path / "chain"
    for step in (0, 1):  # before the chain is there, and after
        before = {path: path.read_bytes() for path in chain.glob("*")}
        with monkeypatch.context() as patched:
            patched.setattr(owner, call, full)
            with pytest.raises(ReshardError, match=r"the disk is full: .*; free some space and run again$"):
                save(trained[step], trained[step + 1], chain)
        assert {path: path.read_bytes() for path in chain.glob("*")} == before and chain.exists() == bool(
            step
        )
        save(trained[step], trained[step + 1], chain)
    apply(trained[0], chain, tmp_path / "out")
    assert not differing(tmp_path / "out", trained[2])


@pytest.mark.parametrize("begun", [False, True])
def test_of_two_savers_at_once_in_a_store_the_slower_adds_nothing(begun, trained, tmp_path):
    url, fs = f"memory://{tmp_path.name}/chain", fsspec.filesystem("memory")
    if begun:
        save(trained[0], trained[1], url)
    files: dict[str, bytes] = {}

    def add_another(done: int, total: int) -> None:
        if not files:  # while the first one compares
            save(trained[int(begun)], trained[3], url)
            files.update({path: fs.cat_file(path) for path in fs.ls(url, detail=False)})

    with pytest.raises(ReshardError, match=r"has version \d since this process read it: one process"):
        save(trained[int(begun)], trained[2], url, progress=add_another)
    assert {path: fs.cat_file(path) for path in fs.ls(url, detail=False)} == files
    apply(trained[0], url, tmp_path / "out")
    assert not differing(tmp_path / "out", trained[3])


class TwoWorkers:
    """An engine both of whose workers hold a checkpoint, and one of them cannot write a delta, such as by a store that
    is gone."""

    def __init__(self, held: Path | None = None) -> None:
        broken = Broken().reshard_delta_write("", 1, "")
        self.answers: dict[str, list] = {
            "reshard_delta_workers": [[2, ""]] * 2,
            "reshard_delta_digests": [boxes(held)] * 2 if held else [],
            "reshard_delta_write": [None, broken],
        }
        self.calls: list[str] = []
        self.empties = True

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.calls.append(method)
        return self.answers.get(method, [None] * 2)

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.empties


class Broken(DeltaMethods):
    """A worker without memory for a delta."""

    def _reshard_opened(self, session):
        raise RuntimeError("out of memory")


def boxes(checkpoint: Path) -> list:
    """What a worker says of the tensors of a checkpoint."""
    parts = []
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        rows = tensor.view(torch.int16).reshape(len(tensor), -1).numpy()
        seed = numbers.seed_of(name, TensorInfo(tuple(tensor.shape), DTYPES["bfloat16"]))
        parts.append((name, [0, len(rows), 0, rows.shape[1]], numbers.sum_rows(seed, rows)))
    return parts


def test_no_engine_serves_half_a_delta_or_goes_back(trained, chain, caplog):
    engine = TwoWorkers(trained[0])
    with pytest.raises(ReshardError, match="RuntimeError: out of memory"):
        apply_deltas(engine, chain)
    said = [record.message for record in caplog.records if record.message.startswith("reshard: deltas of")]
    assert len(said) == 1 and said[0].endswith("RuntimeError: out of memory"), "a line for the failure"
    assert engine.calls[-3:] == ["reset_prefix_cache", "reshard_delta_write", "reshard_delta_invalidate"]
    newer = TwoWorkers(trained[5])
    with pytest.raises(
        ReshardError, match="engine holds version 5 of .*, and goes forward only: to go back to version 3"
    ):
        apply_deltas(newer, chain, version=3)
    assert newer.calls == ["reshard_delta_workers", "reshard_delta_digests"]


NO_WAY = {"error": "this vLLM keeps no version to go back to", "untouched": True}


@pytest.mark.parametrize(
    ("can", "done", "said", "calls"),
    [
        ([[0], [0]], [None, None], "", ["reset_prefix_cache", "roll_back", "reset_prefix_cache"]),
        ([[4], NO_WAY], [], "keeps no version to go back to", []),
        ([[4], [3]], [], r"would go back to different versions \(3, 4\)", []),
        ([[4]], [], "1 of the engine's 2 workers have answered", []),
        ([[4], [4]], [NO_WAY, NO_WAY], "keeps no version", ["reset_prefix_cache", "roll_back"]),
        ([[4], [4]], [None, NO_WAY], "keeps no version", ["reset_prefix_cache", "roll_back", "invalidate"]),
        ([[4], [4]], [None], "1 of the engine's 2", ["reset_prefix_cache", "roll_back", "invalidate"]),
    ],
)
def test_all_workers_go_back_or_none_serves_what_others_do_not(can, done, said, calls):
    engine = TwoWorkers()
    engine.answers |= {"reshard_delta_check_roll_back": can, "reshard_delta_roll_back": done}
    if said:
        with pytest.raises(ReshardError, match=said):
            roll_back(engine)
    else:
        assert roll_back(engine) == 0
    plain = [call.removeprefix("reshard_delta_") for call in engine.calls]
    assert plain == ["workers", "check_roll_back", *calls]


def test_an_engine_with_requests_under_way_does_not_go_back():
    engine = TwoWorkers()
    engine.answers["reshard_delta_check_roll_back"], engine.empties = [[4], [4]], False
    with pytest.raises(ReshardError, match="this LLM has requests under way"):
        roll_back(engine, 4)
    assert "reshard_delta_roll_back" not in engine.calls


@pytest.mark.parametrize("call", ["digests", "prepare", "write"])
def test_a_worker_that_does_not_answer_is_missed(call, trained, chain):
    engine = TwoWorkers(trained[0])
    engine.answers["reshard_delta_write"] = [None, None]
    engine.answers[f"reshard_delta_{call}"] = engine.answers.get(f"reshard_delta_{call}", [None])[:1]
    with pytest.raises(ReshardError, match="1 of the engine's 2 workers have answered"):
        apply_deltas(engine, chain)
    assert ("reshard_delta_invalidate" in engine.calls) == (call == "write")


def test_an_engine_that_has_requests_under_way_is_left_as_it_is(trained, chain):
    engine = TwoWorkers(trained[0])
    engine.empties = False
    with pytest.raises(ReshardError, match="this LLM has requests under way, whose keys and values"):
        apply_deltas(engine, chain)
    assert engine.calls[-2:] == ["reshard_delta_prepared", "reset_prefix_cache"], "nothing is written"


def test_workers_that_find_different_chains_at_one_place_write_nothing(trained, tmp_path):
    address, chains = free_address("127.0.0.1"), [tmp_path / "one", tmp_path / "other"]
    for step, path in enumerate(chains, 1):
        save(trained[0], trained[step], path)

    def follow(rank: int) -> str:
        group = RefitGroup.join(address, rank, 2)
        return caught(lambda: GroupDeltas(lambda: group, None, "one", chains[rank]).is_prepared(waits=True))

    with ThreadPoolExecutor(2) as pool:
        for said in pool.map(follow, (0, 1)):
            assert "workers of this engine find different chains at" in said, said


@pytest.mark.parametrize("said", [
    "'CPUWorker' object has no attribute 'reshard_delta_digests'", "Method 'reshard_delta_digests' is not implemented.",
])  # fmt: skip
def test_an_engine_without_the_extension_says_how_to_get_it(said, chain):
    """As vLLM says it: of a worker in a process of its own, and of one in this process."""

    class Bare(TwoWorkers):
        def collective_rpc(self, method: str, args: tuple = ()) -> list:
            raise RuntimeError(f"Call to collective_rpc method failed: {said}")

    with pytest.raises(
        ReshardError, match="give LLM worker_extension_cls='reshard.engines.vllm.worker.Refit"
    ):
        apply_deltas(Bare(), chain)
    with pytest.raises(ReshardError, match="verify is 'no'; it is true or false"):
        apply_deltas(TwoWorkers(), chain, verify="no")
    said = "the control: another error"
    with pytest.raises(RuntimeError, match="another error"):
        apply_deltas(Bare(), chain)


def test_what_is_no_engine_is_refused_by_name(chain):
    class Awaited(TwoWorkers):
        async def collective_rpc(self, method, args=()): ...

    for engine, said in (
        (Awaited(), "the calls of this Awaited are awaited: await apply_deltas_async"),
        (None, "llm is a NoneType: give a vLLM LLM, .* an SGLang takes reshard.engines.sglang.delta_calls"),
        ("127.0.0.1:8000", "'127.0.0.1:8000' is not the address of a server such as http://"),
    ):
        with pytest.raises(ReshardError, match=said):
            apply_deltas(engine, chain)
    with pytest.raises(ReshardError, match="are not awaited: call apply_deltas"):
        asyncio.run(apply_deltas_async(TwoWorkers(), chain))
    for call in (apply_to_sglang, lambda url, _: connect_server(url, "127.0.0.1:1", 1, 2)):
        with pytest.raises(ReshardError, match="'127.0.0.1:30000' is not the address of a server"):
            call("127.0.0.1:30000", chain)
