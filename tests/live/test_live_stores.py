"""Live Megatron models saved to an object store and loaded from it by all ranks."""

import os

import pytest

from reshard import MegatronLayout, check, hf_to_mcore, mcore_to_hf
from tests.megatron.test_logits import EP, ETP, TP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.storage.test_object_stores import without_source
from tests.tools.disk import tree
from tests.tools.stores import BUCKET, filesystem, seaweed, variables


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with seaweed(tmp_path_factory.mktemp("seaweed") / "server") as address:
        yield address


def test_ranks_send_their_files_and_load_them_again(server, weights, tmp_path, monkeypatch):
    url = f"s3://{BUCKET}/live"
    (tmp_path / "spool").mkdir()
    environment = variables(server) | {"RESHARD_SPOOL": str(tmp_path / "spool")}
    folder = weights("qwen3-moe-mixed")
    source, mcore = folder / "hf", folder / "mcore"
    layout, options = (
        MegatronLayout(tp=2, ep=2, etp=1),
        {"transformer_impl": "local", "make_vocab_size_divisible_by": 8},
    )
    hf_to_mcore(source, tmp_path / "mcore", layout, **options)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "hf")
    results = run_on_ranks(
        2, "save_to_store", flags_at(mcore, f"{TP} 2 {EP} 2 {ETP} 1"), str(source), str(mcore), url, environment,
        module="live_megatron_on_cpu", options={},
    )  # fmt: skip
    for differ, (exists, iterations, spool), notices in results:
        assert differ == [[], [], []] or not any(differ)
        assert f"{url}/hf exists; pass overwrite=True" in exists
        assert f"{url}/run holds iterations of a training run" in iterations
        assert "rank 1 does not see" in spool and "set RESHARD_SPOOL" in spool
        assert any("holds all files at a time" in notice for notice in notices)
    fs = filesystem(server)
    for name in ("hf", "mcore"):
        root = f"{BUCKET}/live/{name}"
        found = {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}
        assert without_source(found) == without_source(tree(tmp_path / name))
    assert fs.cat_file(f"{BUCKET}/live/run/latest_checkpointed_iteration.txt") == b"7"
    assert not [path for path in fs.find(f"{BUCKET}/live") if "/elsewhere/" in path]
    assert not any(path.is_file() for path in (tmp_path / "spool").rglob("*"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert all(check(f"{url}/{name}").ok for name in ("hf", "mcore", "run"))
    # The control: one byte that differs is found.
    path = f"{BUCKET}/live/run/iter_0000007/__0_0.distcp"
    data = bytearray(fs.cat_file(path))
    data[len(data) // 2] ^= 1
    fs.pipe_file(path, bytes(data))
    assert not check(f"{url}/run").ok
    assert os.environ["RESHARD_SPOOL"]
