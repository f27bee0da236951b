"""Conversions from and to an object store: the bytes of local ones, whole or not at all, whatever a server does."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
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
)
from reshard.storage.sources.opening import open_source
from reshard.storage.stores import place, sending
from reshard.storage.stores.marks import record_name
from reshard.storage.stores.mirror import local_path
from reshard.storage.stores.place import StorePlace, version_in
from reshard.storage.stores.workdir import StoreWorkdir
from tests.tools.checkpoints import make
from tests.tools.disk import cli, command, ended, tree, until
from tests.tools.stores import (
    BUCKET,
    CLIENT_OPTIONS,
    Proxy,
    filesystem,
    forget_addresses,
    google,
    seaweed,
    variables,
    wide_model,
)

MARK, MANIFEST = ".reshard-partial/run.json", "reshard.json"
LAYOUT = ["--tp", "2", "--ep", "2", "--etp", "1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with seaweed(tmp_path_factory.mktemp("seaweed") / "server") as address:
        yield address


@pytest.fixture
def proxy(server, monkeypatch, tmp_path):
    """A proxy before the server, which ``s3://`` leads to."""
    import fsspec

    forget_addresses()
    monkeypatch.setitem(fsspec.config.conf, "s3", CLIENT_OPTIONS)
    with Proxy(server) as proxy:
        for name, value in variables(proxy.address).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RESHARD_SPOOL", str(tmp_path / "spool"))
        (tmp_path / "spool").mkdir()
        yield proxy


OPENED: list[str] = []  # files that were opened to be read, of directories that stand for places in a store
sys.addaudithook(
    lambda event, args: (
        OPENED.append(args[0])
        if event == "open" and "/reshard-store-" in str(args[0]) and not args[2] & os.O_WRONLY
        else None
    )
)


@pytest.fixture(autouse=True)
def no_file_of_a_mirror_is_read():
    """A file there is a hole: who reads it and not the store would take zeros for weights."""
    OPENED.clear()
    yield
    assert not [path for path in OPENED if not os.path.isdir(path)]


@pytest.fixture
def url(tmp_path):
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def objects(server):
    """Return a function to the bytes of all objects below a URL, read by the store's own client."""

    def get(url: str) -> dict[str, bytes]:
        fs = filesystem(server)
        root = url.removeprefix("s3://")
        return {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}

    return get


@pytest.fixture
def keys(server):
    def get(url: str) -> set[str]:
        root = url.removeprefix("s3://")
        return {path.removeprefix(f"{root}/") for path in filesystem(server).find(root)}

    return get


@pytest.fixture
def slices(monkeypatch):
    """A spool that holds two of the files of 200 kB."""
    monkeypatch.setenv("RESHARD_SPOOL_SIZE", "500KB")


@pytest.fixture
def few_tries(monkeypatch):
    """Calls that fail are made twice, without long waits; however slow the machine is, tries are counted."""
    import s3fs

    monkeypatch.setattr(place, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(place, "TRIES", 2)
    monkeypatch.setattr(place, "MOST_SECONDS", 1e9)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)


def without_source(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files, with a manifest that does not say where the weights came from."""
    return files | {MANIFEST: re.sub(rb'"source": "[^"]*"', b"", files[MANIFEST])}


def test_both_directions_give_the_bytes_of_local_conversions(whole, proxy, url, objects, slices, tmp_path):
    source, expected = whole["hf-to-mcore"]
    hf_to_mcore(source, f"{url}/mcore", MegatronLayout(tp=2, ep=2))
    assert objects(f"{url}/mcore") == expected
    report = mcore_to_hf(f"{url}/mcore", f"{url}/hf", max_shard_size="200KB")
    assert without_source(objects(f"{url}/hf")) == without_source(whole["mcore-to-hf"][1])
    assert f'"source": "{url}/mcore"'.encode() in objects(f"{url}/hf")[MANIFEST]
    assert report.files > 4 and "at most 500 kB or one file" in " ".join(report.notices)
    mcore_to_hf(f"{url}/mcore", tmp_path / "hf", max_shard_size="200KB")
    assert without_source(tree(tmp_path / "hf")) == without_source(whole["mcore-to-hf"][1])
    mcore_to_mcore(f"{url}/mcore", f"{url}/moved", MegatronLayout(tp=4), iteration=3)
    mcore_to_mcore(whole["mcore-to-hf"][0], tmp_path / "moved", MegatronLayout(tp=4), iteration=3)
    assert without_source(objects(f"{url}/moved")) == without_source(tree(tmp_path / "moved"))
    # An iteration by its own name has its config in the directory above.
    mcore_to_hf(f"{url}/moved/iter_0000003", tmp_path / "of-iteration", max_shard_size="200KB")
    assert without_source(tree(tmp_path / "of-iteration")) == without_source(whole["mcore-to-hf"][1])
    assert os.listdir(os.environ["RESHARD_SPOOL"]) in ([], [f"reshard-spool-{os.geteuid()}"])
    assert not any((tmp_path / "spool").rglob("*.*"))


def test_all_that_reads_reads_there_and_sees_one_byte_that_differs(whole, proxy, server, url):
    source, _ = whole["hf-to-mcore"]
    hf_to_mcore(source, url, MegatronLayout(tp=2, ep=2))
    assert check(url).ok and diff(source, url).equal and inspect(url).manifest["tensors"] > 100
    shown = cli("inspect", url)
    assert (
        shown.returncode == 0
        and f"{url}/hf/config.json" in shown.stdout
        and "reshard-store-" not in shown.stdout
    )
    fs, path = filesystem(server), f"{url.removeprefix('s3://')}/release/__0_0.distcp"
    data = bytearray(fs.cat_file(path))
    data[len(data) // 2] ^= 1
    fs.pipe_file(path, bytes(data))
    result = check(url)
    assert not result.ok and len(result.bad) == 1 and not diff(source, url).equal
    refused = cli("mcore-to-hf", url, f"{url}-hf")
    assert refused.returncode == 1 and f"{url}: {result.bad[0]} does not have the checksum" in refused.stderr


def test_a_kill_leaves_no_manifest_readers_refuse_and_resume_sends_the_rest(
    whole, proxy, url, objects, keys, slices
):
    mcore, expected = whole["mcore-to-hf"]
    arguments = ["mcore-to-hf", mcore, url, "--max-shard-size", "200KB"]
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    name = f"{prefix}/model-00004-of-00006.safetensors"
    proxy.rule = lambda request: "wait" if request.name == name and request.method == "PUT" else None
    with ended(subprocess.Popen(command(*arguments), stderr=subprocess.DEVNULL)) as process:
        until(lambda: name in proxy.sent() and sum(n.endswith(".json") for n in proxy.sent()) >= 4, process)
        process.kill()
    left = keys(url)
    # The record of the last one may have been on its way.
    whole_files = {n for n in left if n.endswith(".safetensors") and f".reshard-partial/{n}.json" in left}
    assert MARK in left and MANIFEST not in left and 2 <= len(whole_files) < 6
    assert "config.json" not in left  # nor could anybody else take it for a model
    refusal = f"{url} is not a whole checkpoint.*--resume"
    refused = cli("inspect", url)
    assert refused.returncode == 1 and re.search(refusal, refused.stderr)
    for read in (check, local_path, lambda url: hf_to_mcore(url, f"{url}-again")):
        with pytest.raises(ReshardError, match=refusal):
            read(url)
    with pytest.raises(ReshardError, match="another source, layout, options or version"):
        mcore_to_hf(mcore, url, max_shard_size="200KB", dtype="fp32", resume=True)
    proxy.rule, before = lambda request: None, len(proxy.requests)
    done = cli(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    again = [request.name for request in proxy.requests[before:] if request.method == "PUT"]
    assert not {f"{prefix}/{n}" for n in whole_files} & set(again) and name in again
    assert "had been sent before" in done.stderr and "resumed: " in done.stdout
    assert objects(url) == expected
    leftover = list(Path(os.environ["RESHARD_SPOOL"]).rglob("*.safetensors"))
    assert leftover == []  # what the kill had left there, too


def test_resume_sends_again_what_was_changed_in_the_store_and_refuses_another_source(
    whole, proxy, server, url, objects, slices, few_tries, tmp_path
):
    expected, mcore = whole["mcore-to-hf"][1], tmp_path / "mcore"
    shutil.copytree(whole["mcore-to-hf"][0], mcore)
    mcore_to_hf(mcore, tmp_path / "hf", max_shard_size="200KB")
    root = url.removeprefix("s3://")
    proxy.rule = lambda request: "503" if request.name.endswith("config.json") else None
    with pytest.raises(ReshardError, match="run again with --resume"):
        mcore_to_hf(mcore, url, max_shard_size="200KB")
    fs = filesystem(server)
    file = f"{root}/model-00002-of-00006.safetensors"
    fs.pipe_file(file, bytes(len(expected["model-00002-of-00006.safetensors"])))  # of the same size
    fs.rm_file(f"{root}/model-00003-of-00006.safetensors")
    proxy.rule, before = lambda request: None, len(proxy.requests)
    distcp = next((mcore / "release").glob("*.distcp"))
    times = distcp.stat()
    distcp.touch()
    refusal = "another source, layout, options or version"
    with pytest.raises(ReshardError, match=refusal):
        mcore_to_hf(mcore, url, max_shard_size="200KB", resume=True)
    # A file that was copied anew has another inode and ctime: the local run says the same.
    os.utime(distcp, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ReshardError, match=refusal):
        mcore_to_hf(mcore, url, max_shard_size="200KB", resume=True)
    mcore_to_hf(mcore, url, max_shard_size="200KB")  # without resume it starts over
    sent = {r.name.rpartition("/")[2] for r in proxy.requests[before:] if r.method == "PUT"}
    assert {n for n in expected if n.endswith(".safetensors")} <= sent
    assert without_source(objects(url)) == without_source(tree(tmp_path / "hf"))


def test_only_files_that_are_as_they_were_sent_are_kept_by_resume(
    whole, proxy, server, url, objects, slices, few_tries
):
    mcore, expected = whole["mcore-to-hf"]
    root = url.removeprefix("s3://")
    proxy.rule = lambda request: "503" if request.name.endswith("config.json") else None
    with pytest.raises(ReshardError):
        mcore_to_hf(mcore, url, max_shard_size="200KB")
    fs = filesystem(server)
    changed, removed = (f"model-0000{n}-of-00006.safetensors" for n in (2, 3))
    fs.pipe_file(f"{root}/{changed}", bytes(len(expected[changed])))
    fs.rm_file(f"{root}/{removed}")
    proxy.rule, before = lambda request: None, len(proxy.requests)
    mcore_to_hf(mcore, url, max_shard_size="200KB", resume=True)
    sent = {r.name.rpartition("/")[2] for r in proxy.requests[before:] if r.method == "PUT"}
    assert {n for n in sent if n.endswith(".safetensors")} == {changed, removed}
    assert objects(url) == expected


def test_a_server_that_stumbles_is_asked_again(whole, proxy, url, objects, slices, monkeypatch):
    monkeypatch.setattr(place, "FIRST_WAIT_SECONDS", 0.01)
    _mcore, expected = whole["mcore-to-hf"]

    def stumble(request):
        if request.number % 3 == 0 and request.method in ("GET", "PUT"):
            return ("503", "drop", "cut")[sum(map(ord, request.name)) % 3]
        return None

    hf_to_mcore(whole["hf-to-mcore"][0], f"{url}/mcore", MegatronLayout(tp=2, ep=2))
    proxy.rule = stumble
    mcore_to_hf(f"{url}/mcore", f"{url}/hf", max_shard_size="200KB")
    assert sum(stumble(request) is not None for request in proxy.requests) > 20
    proxy.rule = lambda request: None
    assert without_source(objects(f"{url}/hf")) == without_source(expected)


@pytest.mark.parametrize("fault", ["503", "drop"])
def test_a_server_that_goes_on_failing_is_given_up_in_one_sentence(
    fault, whole, proxy, url, keys, slices, few_tries
):
    file = "model-00002-of-00006.safetensors"
    proxy.rule = lambda request: fault if request.name.endswith(file) and request.method == "PUT" else None
    with pytest.raises(ReshardError) as failed:
        mcore_to_hf(whole["mcore-to-hf"][0], f"{url}/hf", max_shard_size="200KB")
    said = str(failed.value)
    assert said.startswith(f"{url}/hf: sending {file} failed 2 times (") and said.endswith("with --resume")
    assert "\n" not in said
    assert MARK in keys(f"{url}/hf") and MANIFEST not in keys(f"{url}/hf")
    proxy.rule = lambda request: None
    hf_to_mcore(whole["hf-to-mcore"][0], f"{url}/mcore", MegatronLayout(tp=2, ep=2))
    proxy.rule = lambda request: (
        fault if request.method == "GET" and request.name.endswith(".distcp") else None
    )
    with pytest.raises(ReshardError, match=rf"{url}/mcore: reading release/__\d_\d.distcp failed 2 times"):
        check(f"{url}/mcore")


def test_overwrite_never_shows_a_mixture(whole, proxy, url, objects, keys, slices, tmp_path):
    source, expected = whole["hf-to-mcore"]
    hf_to_mcore(source, url, MegatronLayout(tp=1))
    with pytest.raises(ReshardError, match=f"{url} exists; pass --overwrite to remove what is there"):
        hf_to_mcore(source, url, MegatronLayout(tp=2, ep=2))
    assert check(url).ok
    reader = open_source(local_path(url))
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    old, before = keys(url), len(proxy.requests)
    hf_to_mcore(source, url, MegatronLayout(tp=2, ep=2), overwrite=True)
    assert objects(url) == expected
    seen = [old]  # what a reader would find after each change
    for request in proxy.requests[before:]:
        name = request.name.removeprefix(f"{prefix}/")
        if request.method in ("PUT", "DELETE"):
            seen.append(seen[-1] | {name} if request.method == "PUT" else seen[-1] - {name})
    assert seen[-1] == set(expected) and len(seen) > 8
    for found in seen:
        # Whole and old, or all of the old but its manifest, or marked as no checkpoint, or whole and new.
        assert found in (old, old - {MANIFEST}, set(expected)) or MARK in found
    published = next(n for n, found in enumerate(seen[1:], 1) if MANIFEST in found)
    assert seen[published] - {MARK} >= set(expected)
    with pytest.raises(ReshardError, match="changed while"), reader.unchanged():
        pass
    reader.close()


def test_a_run_that_another_has_replaced_does_not_publish(whole, proxy, url, objects, slices):
    mcore, expected = whole["mcore-to-hf"]
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    arguments = ["mcore-to-hf", mcore, url, "--max-shard-size", "200KB"]
    waiting = threading.Event()

    def rule(request):
        if (
            request.name == f"{prefix}/generation_config.json"
            and request.method == "PUT"
            and not waiting.is_set()
        ):
            waiting.set()
            return "wait"
        return None

    proxy.rule = rule
    environment = dict(os.environ, RESHARD_SPOOL=f"{os.environ['RESHARD_SPOOL']}/other")
    os.mkdir(environment["RESHARD_SPOOL"])
    with ended(
        subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True, env=environment)
    ) as first:
        until(waiting.is_set, first)
        assert cli(*arguments).returncode == 0
        assert objects(url) == expected
        proxy.release()
        _, stderr = first.communicate(timeout=600)
    assert first.returncode == 1 and f"another run has begun to write {url}" in stderr, stderr
    assert objects(url) == expected


def test_a_source_that_changes_while_it_is_read_is_refused(whole, proxy, server, url, tmp_path, keys):
    mcore = f"{url}/mcore"
    hf_to_mcore(whole["hf-to-mcore"][0], mcore, MegatronLayout(tp=2, ep=2))
    fs, path = filesystem(server), f"{mcore.removeprefix('s3://')}/release/__1_0.distcp"
    data = fs.cat_file(path)
    source = open_source(local_path(mcore))
    with (
        pytest.raises(ReshardError, match=rf"{mcore}/release/__1_0.distcp changed while it was read"),
        source.unchanged(),
    ):
        fs.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
    source.close()
    fs.rm_file(path)
    with pytest.raises(ReshardError, match="lacks the files __1_0.distcp"):
        mcore_to_hf(mcore, tmp_path / "hf")


def test_memory_and_disk_are_bounded(proxy, url, objects, tmp_path):
    """Of a model of 320 MB the spool holds 80, and the process 24 blocks of 1 MiB, and what is being sent."""
    model = wide_model(tmp_path / "hf", layers=16)
    assert sum(path.stat().st_size for path in model.glob("*.safetensors")) > 300e6
    filesystem(proxy.server).put(str(model), f"{url.removeprefix('s3://')}/hf", recursive=True)
    program = "import sys; from reshard.storage.stores import ranges; ranges.BLOCK_BYTES = 1 << 20; " \
        "from reshard.cli.main import main; sys.argv[0] = 'reshard'; main()"  # fmt: skip
    arguments = ["hf-to-mcore", f"{url}/hf", f"{url}/mcore", "--pp", "8", "--workers", "2"]
    spool, peak, held = Path(os.environ["RESHARD_SPOOL"]), 0, 0
    environment = dict(os.environ, RESHARD_SPOOL_SIZE="80MB")
    with ended(subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment)) as process:
        memory = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(OSError, psutil.Error):
                peak = max(peak, memory.memory_info().rss)
                held = max(held, sum(p.stat().st_blocks * 512 for p in spool.rglob("*") if p.is_file()))
            time.sleep(0.02)
    assert process.returncode == 0
    assert 30e6 < held <= 80e6 + 4096, held
    # 110 MB of an idle process, 25 of blocks, and twice what the spool holds, as it is sent; 430 with the model.
    assert peak < 330e6, peak
    hf_to_mcore(model, tmp_path / "mcore", MegatronLayout(pp=8))
    assert without_source(objects(f"{url}/mcore")) == without_source(tree(tmp_path / "mcore"))


@pytest.mark.parametrize(("arguments", "environment", "said"), [
    (["inspect", "s3://{bucket}/nothing"], {}, "nothing is at s3://{bucket}/nothing"),
    (["inspect", "s3://nowhere/model"], {}, "s3://nowhere/model"),
    (["hf-to-mcore", "{source}", "s3://nowhere/model"], {}, "s3://nowhere/model"),
    (["hf-to-mcore", "{source}", "s3://{bucket}"], {}, "is a whole bucket: name a place in it, s3://{bucket}/model"),
    (["inspect", "s3://{bucket}/x"], {"AWS_SECRET_ACCESS_KEY": "wrong"}, "check the credentials"),
    (["hf-to-mcore", "{source}", "s3://{bucket}/x"], {"AWS_ACCESS_KEY_ID": "other"}, "check the credentials"),
    (["lora-merge", "s3://{bucket}/x", "{source}", "out"], {}, "s3://{bucket}/x is in an object store, and the LoRA"),
    (["lora-to-peft", "{source}", "s3://{bucket}/x"], {}, "s3://{bucket}/x is in an object store, and the LoRA"),
    (["parity", "s3://{bucket}/x", "{source}"], {}, "x is in an object store, and this reads directories"),
    (["plan", "s3://{bucket}/x", "--trainer", "tp=2", "--engine", "tp=2"], {}, "and this reads directories"),
    (["inspect", "nostore://{bucket}/x"], {}, "Protocol not known: nostore; pip install 'reshard[store]'"),
    (["hf-to-mcore", "{source}", "s3://{bucket}/x"], {"RESHARD_SPOOL_SIZE": "much"}, "SIZE=much is not a size"),
])  # fmt: skip
def test_what_cannot_be_reached_is_one_sentence(arguments, environment, said, whole, proxy, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    names = {"bucket": BUCKET, "source": whole["hf-to-mcore"][0]}
    done = cli(*(argument.format(**names) for argument in arguments))
    lines = done.stderr.strip().splitlines()
    assert done.returncode in (1, 2) and len(lines) == 1 and said.format(**names) in lines[0], done.stderr


@pytest.mark.parametrize(("package", "said"), [
    ("s3fs", "pip install 'reshard\\[store\\]'"), ("fsspec", "this needs fsspec.*pip install 'reshard\\[store\\]'"),
])  # fmt: skip
def test_the_extra_is_named_where_its_packages_are_missing(package, said):
    program = f"import sys; sys.modules[{package!r}] = None; from reshard.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", "s3://bucket/model"], capture_output=True, text=True
    )
    assert (
        done.returncode == 1 and re.search(said, done.stderr) and len(done.stderr.strip().splitlines()) == 1
    )


def test_processes_share_a_conversion_to_a_store(whole, proxy, url, objects, slices):
    """As torchrun starts them, each with a spool of its own."""
    from reshard.comm.hosts import free_address

    mcore, expected = whole["mcore-to-hf"]
    host, port = free_address("127.0.0.1").rsplit(":", 1)
    arguments = command("mcore-to-hf", mcore, url, "--max-shard-size", "200KB")
    processes = [
        subprocess.Popen(
            arguments,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port},
        )
        for rank in range(2)
    ]
    assert [process.wait(600) for process in processes] == [0, 0]
    assert objects(url) == expected


def test_google_cloud_storage_holds_the_same(whole, tmp_path, monkeypatch):
    # Read at import: else the client asks Google over gRPC, which the server does not speak, what kind a bucket is.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs

    assert gcsfs.GCSFileSystem is gcsfs.core.GCSFileSystem
    (tmp_path / "server").mkdir()
    with google(tmp_path / "server") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        fs = gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True)
        fs.mkdir(BUCKET)
        hf_to_mcore(whole["hf-to-mcore"][0], f"gs://{BUCKET}/mcore", MegatronLayout(tp=2, ep=2))
        found = {p.removeprefix(f"{BUCKET}/mcore/"): fs.cat_file(p) for p in fs.find(f"{BUCKET}/mcore")}
        assert found == whole["hf-to-mcore"][1]
        mcore_to_hf(f"gs://{BUCKET}/mcore", tmp_path / "hf", max_shard_size="200KB")
        assert without_source(tree(tmp_path / "hf")) == without_source(whole["mcore-to-hf"][1])


def test_what_another_run_has_sent_is_not_taken_for_ones_own(whole, proxy, url, monkeypatch):
    """Neither where it comes late, nor where a run goes on at a place whose remains were not all removed."""
    mcore, _ = whole["mcore-to-hf"]
    publish, sent = StoreWorkdir.publish, []

    def late(workdir, sync=True) -> None:
        name = next(iter(workdir.sizes))
        record = json.loads(workdir.place.read(record_name(name)))
        sent.append(record | {"token": "of another run", "run": "of another source"})
        workdir.place.put(record_name(name), json.dumps(sent[0]).encode())
        publish(workdir, sync)

    monkeypatch.setattr(StoreWorkdir, "publish", late)
    for resume in (False, True):  # which goes on
        with pytest.raises(ReshardError, match="changed after being sent, so another run"):
            mcore_to_hf(mcore, url, max_shard_size="200KB", resume=resume)
    assert sent
    monkeypatch.setattr(StoreWorkdir, "publish", publish)
    mcore_to_hf(mcore, url, max_shard_size="200KB", overwrite=True)
    assert check(url).ok


@pytest.mark.parametrize(("call", "name", "size"), [
    ("put_file", "model-00002-of-", "200KB"),
    ("put_file", "model-00002-of-", "300KB"),  # of other names: what comes late is of nobody
    ("put", "config.json", "200KB"),
    ("send", "model-00002-of-", "200KB"),
])  # fmt: skip
def test_what_comes_late_over_anothers_checkpoint_does_not_pass_for_a_part_of_it(
    call, name, size, proxy, url, monkeypatch, tmp_path
):
    """A run stands still before it sends an object, or in between, while another begins, sends everything, and ends."""
    for seed, folder in enumerate(("first", "second")):
        make(tmp_path / folder, "qwen3", torch.bfloat16, seed=seed)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        (tmp_path / folder / "config.json").write_text(json.dumps(config | {"transformers_version": folder}))
        hf_to_mcore(tmp_path / folder, tmp_path / f"{folder}-mcore")
    mcore = tmp_path / "first-mcore"
    kind = StoreWorkdir if call == "send" else StorePlace
    plain, others = getattr(kind, call), []

    def late(self, file, *arguments):
        if file.startswith(name) and not others:
            others.append(file)
            with monkeypatch.context() as patches:
                patches.setenv("RESHARD_SPOOL", str(tmp_path))
                mcore_to_hf(tmp_path / "second-mcore", url, max_shard_size=size, overwrite=True)
        return plain(self, file, *arguments)

    monkeypatch.setattr(kind, call, late)
    monkeypatch.setattr(sending, "FILES_AT_ONCE", 1)  # of which one comes late
    with pytest.raises(ReshardError) as error:
        mcore_to_hf(mcore, url, max_shard_size="200KB")
    assert others
    if call == "send":  # it had not been sent
        assert "another run has begun" in str(error.value)
    if call == "send" or size != "200KB":
        assert diff(tmp_path / "second", url).equal and check(url).ok
        return
    assert f"{others[0]} came late" in str(error.value)
    with pytest.raises(ReshardError, match="is not a whole checkpoint"):
        inspect(url)
    with pytest.raises(ReshardError, match="is of a run with another source"):  # nor goes anybody on with it
        mcore_to_hf(mcore, url, max_shard_size="200KB", resume=True)
    monkeypatch.setattr(kind, call, plain)
    mcore_to_hf(mcore, url, max_shard_size="200KB", overwrite=True)
    assert check(url).ok


def test_weights_that_a_replaced_run_had_on_their_way_are_removed_before_another_publishes(
    whole, proxy, url, monkeypatch
):
    mcore, _ = whole["mcore-to-hf"]
    publish, stray = StoreWorkdir.publish, "model-00099-of-00099.safetensors"

    def late(workdir, sync=True) -> None:
        workdir.place.put(stray, b"weights of another run")
        publish(workdir, sync)

    monkeypatch.setattr(StoreWorkdir, "publish", late)
    mcore_to_hf(mcore, url, max_shard_size="200KB")
    assert check(url).ok and not StorePlace(url).has(stray)


def test_a_place_is_the_same_by_the_stores_other_name_and_what_is_read_is_not_removed(
    whole, proxy, url, keys
):
    mcore, _ = whole["mcore-to-hf"]
    mcore_to_hf(mcore, url, max_shard_size="200KB")
    before = keys(url)
    alias = url.replace("s3://", "s3a://")
    with pytest.raises(ReshardError, match="overlap; write to a place beside it"):
        hf_to_mcore(alias, url, overwrite=True)
    with pytest.raises(ReshardError, match="overlap; write to a place beside it"):
        mcore_to_hf(mcore, url, hf_config=url, overwrite=True)
    assert keys(url) == before
    with pytest.raises(ReshardError, match="does not say by a tag or a time which bytes"):
        version_in({"name": "x", "size": 3, "type": "file"})
