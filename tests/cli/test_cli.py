"""The command line as a user meets it, several processes, and a stand-in for the hub."""

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from reshard import MegatronLayout, ReshardError, check, delta, diff, hf_to_mcore, lora_merge, mcore_to_hf
from tests.starting.ranks import run_to_the_end
from tests.starting.warm import python_of_trainer
from tests.storage.test_faults import run_cli
from tests.tools.disk import ended


def test_help_is_quick_and_imports_no_torch():
    code = (
        "import sys; import reshard.cli.main as m; m.cli(['--help'], standalone_mode=False); print('torch' "
        "in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("False False") and "hf-to-mcore" in done.stdout
    for command in (
        "hf-to-mcore",
        "mcore-to-hf",
        "fsdp-to-hf",
        "mcore-to-mcore",
        "lora-to-peft",
        "lora-to-megatron",
        "lora-merge",
        "inspect",
        "diff",
        "check",
        "demo",
    ):
        assert run_cli(command, "--help").returncode == 0


def test_a_conversion_imports_no_torch(checkpoint, tmp_path):
    code = (
        "import sys, reshard; reshard.hf_to_mcore(sys.argv[1], sys.argv[2]); "
        "reshard.mcore_to_hf(sys.argv[2], sys.argv[3]);assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            str(checkpoint("qwen3")),
            str(tmp_path / "mcore"),
            str(tmp_path / "back"),
        ],
        check=True,
    )


def test_there_and_back_on_the_command_line(checkpoint, tmp_path):
    source, mcore, back = checkpoint("qwen3-moe", dtype=torch.bfloat16), tmp_path / "mcore", tmp_path / "back"
    done = run_cli(
        "hf-to-mcore",
        source,
        mcore,
        "--tensor-model-parallel-size",
        2,
        "--pp",
        2,
        "--expert-model-parallel-size",
        2,
        "--etp",
        1,
    )
    assert done.returncode == 0 and "TP2 PP2 EP2 ETP1, 4 files" in done.stdout
    assert done.stderr.startswith(f"note: {source} has no tokenizer") and done.stderr.count("\n") == 1
    done = run_cli("mcore-to-hf", mcore, back, "--json")
    assert json.loads(done.stdout)["tensors"] == 135
    assert run_cli("diff", source, back).stdout == "equal: 135 tensors, bit for bit\n"
    assert run_cli("check", mcore).stdout == "intact: 135 tensors, 11 files\n"
    found = json.loads(run_cli("inspect", mcore, "--json").stdout)
    assert found["family"] == "qwen3_moe" and found["layout"]["ep"] == 2 and len(found["tensors"]) == 135
    assert "parameters" in run_cli("inspect", source, "--tensors").stdout
    for name in ("config.json", "generation_config.json"):
        assert (mcore / "hf" / name).read_bytes() == (source / name).read_bytes()


def test_diff_shows_the_worst_tensors_and_exits_with_1(checkpoint, tmp_path):
    a, b = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    done = run_cli("diff", a, b, "--worst", 3)
    assert done.returncode == 1 and "max abs" in done.stdout and "47 of 47 tensors differ" in done.stdout
    assert json.loads(run_cli("diff", a, b, "--json").stdout)["equal"] is False


def test_a_comparison_of_nothing_is_no_equality(checkpoint):
    directory = checkpoint("qwen3")
    assert diff(directory, directory, only=lambda name: name == "model.norm.weight").names == [
        "model.norm.weight"
    ]
    with pytest.raises(ReshardError, match="nothing to compare: `only` chooses none of the 47 tensors"):
        diff(directory, directory, only=lambda name: name == "norm")


def test_dry_run_writes_nothing_and_tells_bytes_per_rank(checkpoint, tmp_path):
    done = run_cli(
        "hf-to-mcore", checkpoint("qwen3-moe"), tmp_path / "out", "--tp", 2, "--ep", 4, "--dry-run", "--json"
    )
    report = json.loads(done.stdout)
    assert report["dry_run"] and not list(tmp_path.iterdir())
    hf_to_mcore(checkpoint("qwen3-moe"), tmp_path / "out", MegatronLayout(tp=2, ep=4))
    sizes = {p.name.split("_")[2]: p.stat().st_size for p in (tmp_path / "out" / "release").glob("*.distcp")}
    assert report["bytes_per_rank"].keys() == sizes.keys() and sum(sizes.values()) == report["written_bytes"]
    assert all(0 < sizes[rank] - n < 0.5 * n + 20000 for rank, n in report["bytes_per_rank"].items())
    assert (
        run_cli("mcore-to-hf", tmp_path / "out", tmp_path / "x", "--dry-run").returncode == 0
        and not (tmp_path / "x").exists()
    )
    inside = mcore_to_hf(tmp_path / "out", tmp_path / "out" / "back", dry_run=True)
    assert [said for said in inside.notices if said.startswith("as it is now, the run would be refused: ")]


def test_a_checkpoint_without_a_tokenizer_says_so_and_promises_none(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint("qwen3"), tmp_path / "source")
    for name, tokenizer in (
        ("without", None),
        ("with", "tokenizer.json"),
        ("sentencepiece", "tokenizer.model"),
    ):
        if tokenizer is not None:
            (source / tokenizer).write_text("{}")
        there = run_cli("hf-to-mcore", source, tmp_path / name)
        back = run_cli("mcore-to-hf", tmp_path / name, tmp_path / f"{name}-back")
        for done, place in ((there, source), (back, tmp_path / name / "hf")):
            assert done.returncode == 0 and (f"note: {place} has no tokenizer" in done.stderr) == (
                tokenizer is None
            )
        assert ("so " in back.stderr and "copy one there" in back.stderr) == (tokenizer is None)
        assert ("--tokenizer-type" in (tmp_path / name / "megatron_flags.txt").read_text()) == (
            tokenizer is not None
        )
        for path in source.glob("tokenizer.*"):
            path.unlink()


@pytest.fixture(scope="module")
def megatron(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("megatron") / "mcore"
    hf_to_mcore(checkpoint("qwen3"), directory)
    return directory


@pytest.mark.parametrize(("args", "code", "message"), [
    (["hf-to-mcore", "{src}", "{out}", "--tp", "0"], 2, "Invalid value for '--tp'"),
    (["hf-to-mcore", "{src}"], 2, "Missing argument 'DESTINATION'"),
    (["nothing"], 2, "No such command"),
    (["hf-to-mcore", "no/such/place", "{out}"], 1, "neither a directory nor a hub id"),
    (["hf-to-mcore", "{src}", "{out}", "--tp", "16"], 1, "sizes that do: 1, 2, 4, 8"),
    (["mcore-to-hf", "{src}", "{out}"], 1,
     "is a Hugging Face directory, which hf-to-mcore converts: reshard hf-to-mcore {src} {out}"),
    (["mcore-to-mcore", "{src}", "{out}"], 1, "is a Hugging Face directory, which hf-to-mcore converts"),
    (["mcore-to-mcore", "{mcore}", "{out}", "--model-class", "bert"], 2, "Invalid value for '--model-class'"),
    (["mcore-to-mcore", "{mcore}", "{mcore}"], 1, "overlap; write to a directory beside it"),
    (["inspect", "{mcore}/hf"], 1,
     "has the config and the tokenizer of a Megatron checkpoint, and no weights: give {mcore}"),
    (["hf-to-mcore", "{mcore}", "{out}"], 1,
     "is a Megatron checkpoint, which mcore-to-hf converts: reshard mcore-to-hf {mcore} {out}"),
    (["mcore-to-hf", "{mcore}", "{out}", "--quantize", "fp8", "--dtype", "fp32"], 1, "add --dtype bf16"),
    (["mcore-to-hf", "{mcore}", "{out}", "--family", "llama"], 1, "--family llama contradicts"),
    (["mcore-to-hf", "{mcore}", "{out}", "--family", "quen3"], 2, "--family quen3 is not one of"),
    (["mcore-to-hf", "{mcore}", "{out}", "--quantize", ""], 2, "--quantize  is not one of fp8"),
    (["lora-to-peft", "{src}", "{out}"], 1, "{src} holds no LoRA adapter: give a PEFT directory (adapter_config.json)"),
    (["lora-to-peft", "{mcore}", "{out}"], 1, "holds no LoRA adapter: no key ends with linear_in.weight"),
    (["lora-to-peft", "no/such", "{out}"], 1, "no/such is not a directory: give a PEFT directory"),
    (["lora-to-megatron", "{src}", "{out}", "--format", "nemo"], 2, "Invalid value for '--format'"),
    (["lora-to-peft", "{src}", "{out}", "--alpha", "nan"], 2, "--alpha is nan; it is a number above 0"),
    (["lora-merge", "{src}", "{src}", "{out}"], 1, "{src} holds no LoRA adapter"),
    (["lora-merge", "{src}", "{src}", "{out}", "--tp", "2"], 2,
     "--tp has no effect with --format hf: give --format mcore"),
    (["lora-merge", "{src}", "{src}", "{out}", "--format", "mcore", "--max-shard-size", "1GB"], 2,
     "has no effect with --format mcore"),
    (["lora-merge", "{src}", "{mcore}", "{out}", "--tp", "2", "--format", "pt"], 2, "Invalid value for '--format'"),
    (["hf-to-mcore", "", "{out}"], 2, "it is empty; say . for the current directory"),
    (["hf-to-mcore", "{src}", ""], 2, "it is empty"),
    (["mcore-to-hf", "{mcore}", "{out}", "--hf-config", ""], 2, "it is empty"),
    (["diff", "{src}", ""], 2, "it is empty"),
    (["inspect", " "], 2, "it is empty"),
    (["parity", "{src}", "{src}", "--html", "{out}/absent/page.html"], 1, "absent is not a directory"),
    (["parity", "{src}", "{src}", "--html", "/dev/null/page.html"], 1, "/dev/null is not a directory"),
    (["mcore-to-hf", "{mcore}", "{out}", "--max-shard-size", "big"], 2, "is not a size such as 5GB"),
    (["mcore-to-hf", "{mcore}", "{out}", "--max-shard-size", "5"], 2, "5 is not a size such as 5GB"),
    (["plan", "--trainer", "tp2", "--engine", "tp2"], 2, "Missing argument 'MODEL'"),
    (["memory", "{src}", "--model", "{src}"], 2, "MODEL and --model are the same"),
    (["plan", "{src}", "--trainer", "TP2,xp2", "--engine", "tp2"], 2, "'xp2' is not one of cp=N"),
    (["hf-to-mcore", "{src}/config.json", "{out}"], 1, "is a file, not a directory: give {src}"),
    (["mcore-to-hf", "{out}", "{out}2"], 1, "{out} does not exist"),
    (["mcore-to-hf", "/dev/null", "{out}"], 1, "/dev/null is a file, not a directory"),
    (["mcore-to-hf", "{mcore}/hf/..", "{out}", "--hf-config", "/dev/null"], 1, "/dev/null is not a regular file"),
    (["check", "{src}", "--workers", "100000000"], 2, "is not in the range 1<=x<=1024"),
    (["hf-to-mcore", "{src}", "{out}", "--make-vocab-size-divisible-by", "99999999999999999999"], 2,
     "is not in the range"),
    (["plan", "--model", "{src}", "--trainer", "tp=2", "--engine", "tp=2", "--link-rate", "nan"], 2,
     "nan is not a rate"),
    (["plan", "--model", "{src}", "--trainer", "", "--engine", "tp=2"], 2, "--trainer is empty"),
    (["plan", "{src}", "--trainer", "tp=2", "--engine", "tp=2", "--ranks", "2"], 2,
     "2 ranks are 0 to 1; asked for [2]"),
    (["hf-to-mcore", "{src}", "{out}", "--vpp", "2"], 2, "--vpp 2 needs --pp above 1"),
    (["hf-to-mcore", "{src}", "{out}", "--pp", "2", "--num-layers-in-first-pipeline-stage", "9"], 1,
     "are 9 of the model's 4 layers"),
    (["hf-to-mcore", "{src}", "{out}", "--megatron-version", "x"], 2, "--megatron-version x is not a version"),
    (["hf-to-mcore", "{src}", "{out}", "--pipeline-model-parallel-layout", "xyz"], 2, "has x y z in it"),
    (["memory", "{src}", "--gpu-memory", "much"], 2, "--gpu-memory much is not a size such as 80GB"),
    (["memory", "{src}", "--recompute", "some"], 2, "--recompute some: 'some' is not one of none, full"),
    (["parity", "{src}", "{src}", "--no-noise", "--max-noise-ratio", "3"], 2, "leaves nothing for --max-noise-ratio"),
    (["demo", "--keep", "{src}/config.json/b"], 1, "cannot make {src}/config.json/b: Not a directory"),
    (["lora-to-peft", "{src}", "s3://bucket/run"], 1, "s3://bucket/run is in an object store, and the LoRA commands"),
    (["inspect", "{src}", "--hf-config", "{mcore}"], 1,
     "--hf-config is for a Megatron or FSDP checkpoint or an adapter, and a Hugging Face directory has its own, "
     "here {src}/config.json: leave it out"),
    (["mcore-to-hf", "{mcore}", "{out}", "--hf-config", "{out}/config.json"], 1,
     "{out}/config.json does not exist: give a config.json, a directory with one, or a hub id"),
    (["inspect", "{src}", "--ignore-config-field", ""], 2, "the name of a config field to ignore is empty"),
    (["inspect", "{out}"], 1, "neither a directory nor a hub id"),
    (["check", "{src}"], 1, "has no reshard.json"),
])  # fmt: skip
def test_mistakes_get_one_sentence_and_an_exit_code(args, code, message, checkpoint, megatron, tmp_path):
    places = {"src": checkpoint("qwen3"), "mcore": megatron, "out": tmp_path / "out"}
    done = run_cli(*[a.format(**places) for a in args])
    assert (
        done.returncode == code and message.format(**places) in done.stderr and "Traceback" not in done.stderr
    )
    assert not list(tmp_path.iterdir())


def test_a_current_directory_that_is_replaced_or_gone_is_told(checkpoint, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    done = run_cli("hf-to-mcore", checkpoint("qwen3"), ".", cwd=here)
    assert done.returncode == 0 and f"was replaced: cd {here} enters the new one" in done.stderr
    assert check(here).ok
    removed = tmp_path / "removed"
    removed.mkdir()
    done = run_cli("hf-to-mcore", checkpoint("qwen3"), "out", cwd=removed, preexec_fn=removed.rmdir)
    sentence = "Error: the current directory was removed or replaced: cd to one that is there\n"
    assert (done.returncode, done.stderr) == (1, sentence)


def test_the_same_mistakes_in_a_library_call(checkpoint, megatron, tmp_path):
    of, out = checkpoint("qwen3"), tmp_path / "out"
    own_config = "config.json: leave it out"
    for call, message in (
        (lambda: hf_to_mcore("", tmp_path / "out"), "the path is empty"),
        (
            lambda: mcore_to_hf(megatron, tmp_path / "out", quantize=True),
            "that is fp32 here: add --dtype bf16",
        ),
        (
            lambda: mcore_to_hf(megatron, tmp_path / "out", family="llama"),
            "--family llama contradicts .*config.json, which is of a qwen3",
        ),
        (lambda: diff(of, of, hf_config=of), own_config),
        (lambda: lora_merge(of, of, out, hf_config=of), own_config),
        (lambda: delta.save(of, of, out, hf_config=of), own_config),
    ):
        with pytest.raises(ReshardError, match=message):
            call()
    mcore_to_hf(megatron, tmp_path / "out", family="qwen3")


def test_equal_values_in_another_dtype_are_said_to_be_equal(checkpoint, tmp_path):
    source = checkpoint("qwen3", dtype=torch.bfloat16)
    run_cli("hf-to-mcore", source, tmp_path / "wide", "--dtype", "float32")
    done = run_cli("diff", source, tmp_path / "wide")
    assert (
        done.returncode == 1
        and "lm_head.weight: bfloat16 and float32, all 64,000 values are equal" in done.stdout
    )
    assert done.stdout.endswith(
        "47 of 47 tensors differ, all of them in dtype only, 0 are on one side only\n"
    )
    found = json.loads(run_cli("diff", source, tmp_path / "wide", "--json").stdout)
    assert (
        not found["equal"]
        and found["differences"][0]["unequal"] == 0
        and found["differences"][0]["note"] == "bfloat16 and float32"
    )
    hf_to_mcore(checkpoint("qwen3"), tmp_path / "half", dtype="bf16")
    said = run_cli("diff", checkpoint("qwen3"), tmp_path / "half", "--worst", "1").stdout
    assert (
        " differ, max abs " in said
        and "(float32 and bfloat16)" in said
        and "47 of 47 tensors differ, 0 are on one side" in said
    )


@pytest.mark.parametrize("processes", [3])
def test_processes_under_torchrun_share_the_work_and_write_the_same_bytes(processes, checkpoint, tmp_path):
    source = checkpoint("qwen3-moe", dtype=torch.bfloat16)
    forked = python_of_trainer()  # torch is imported there
    torchrun = [forked, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--no-python", "--standalone",
                forked, "-m", "reshard.cli.main"]  # fmt: skip
    options = ["--tp", "2", "--pp", "2", "--ep", "2", "--etp", "1"]
    for directory, arguments in (
        ("mcore", ["hf-to-mcore", source, *options]),
        ("back", ["mcore-to-hf", tmp_path / "mcore1", "--max-shard-size", "100KB"]),
    ):
        assert run_cli(*arguments[:2], tmp_path / f"{directory}1", *arguments[2:]).returncode == 0
        done = run_to_the_end([*torchrun, *arguments[:2], tmp_path / f"{directory}2", *arguments[2:]], 600)
        assert done.returncode == 0, done.stderr[-2000:]
        one, two = (
            {p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()}
            for d in (tmp_path / f"{directory}{i}" for i in (1, 2))
        )
        assert one == two
    assert check(tmp_path / "mcore2").ok
    failed = run_to_the_end([*torchrun, "hf-to-mcore", source, tmp_path / "mcore2"], 600)
    assert failed.returncode != 0 and "exists; pass --overwrite" in failed.stderr
    assert failed.stderr.count("Traceback (most recent call last)") == 1, failed.stderr  # torchrun's own


@pytest.fixture
def hub(checkpoint):
    """A server with one model, answering as the hub's API does."""
    directory = checkpoint("qwen3", dtype=torch.bfloat16)
    sha = "0123456789abcdef0123456789abcdef01234567"
    files = {p.name: p.read_bytes() for p in directory.iterdir()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, body, **headers):
            self.send_response(200)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            if path.startswith("/api/models/acme/tiny/tree/"):
                listing = [
                    {"type": "file", "path": n, "size": len(data), "oid": "0" * 40}
                    for n, data in files.items()
                ]
                self.answer(json.dumps(listing).encode(), Content_Type="application/json")
            elif path.startswith("/api/models/acme/tiny"):
                info = {
                    "id": "acme/tiny",
                    "sha": sha,
                    "siblings": [{"rfilename": n} for n in files],
                    "private": False,
                    "tags": [],
                }
                self.answer(json.dumps(info).encode(), Content_Type="application/json")
            elif path.startswith("/acme/tiny/resolve/") and name in files:
                self.answer(
                    files[name],
                    ETag='"' + name.encode().hex().ljust(40, "0")[:40] + '"',
                    X_Repo_Commit=sha,
                    X_Linked_Size=str(len(files[name])),
                )
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", directory
    server.shutdown()


def test_a_hub_id_is_downloaded_and_converted(hub, tmp_path):
    endpoint, directory = hub
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    done = run_cli("hf-to-mcore", "acme/tiny", tmp_path / "mcore", env=environment)
    assert done.returncode == 0, done.stderr
    assert run_cli("diff", tmp_path / "mcore", directory).returncode == 0
    assert (
        json.loads((tmp_path / "mcore" / "reshard.json").read_text(encoding="utf-8"))["source"] == "acme/tiny"
    )
    options = ["--hf-config", "acme/tiny", "--dry-run"]
    done = run_cli("mcore-to-hf", tmp_path / "mcore", tmp_path / "hf", *options, env=environment)
    assert done.returncode == 0, done.stderr
    done = run_cli("hf-to-mcore", "acme/other", tmp_path / "other", env=environment)
    assert done.returncode == 1 and "no such model" in done.stderr and "Traceback" not in done.stderr
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    done = run_cli("hf-to-mcore", "acme/unreachable", tmp_path / "other", env=environment)
    assert done.returncode == 1 and "could not be reached" in done.stderr and "Traceback" not in done.stderr


def test_progress_shows_on_a_terminal_only(checkpoint, tmp_path):
    import pty

    master, slave = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "reshard.cli.main",
            "hf-to-mcore",
            str(checkpoint("qwen3")),
            str(tmp_path / "out"),
        ],
        stdout=subprocess.PIPE,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    with ended(process):
        # While it runs: the terminal holds some kilobytes only, and a slow run shows more.
        with contextlib.suppress(OSError):  # which is how the end is told
            while data := os.read(master, 65536):
                shown += data
        said, _ = process.communicate(timeout=300)
    os.close(master)
    assert process.returncode == 0 and b"hf-to-mcore" in shown and said.startswith(b"qwen3, ")


def test_the_readme_s_library_call_works(checkpoint, tmp_path):
    import reshard

    calls = []
    report = reshard.hf_to_mcore(
        checkpoint("qwen3"),
        tmp_path / "mcore",
        reshard.MegatronLayout(tp=2),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert report.tensors == 47 and calls[-1][0] == calls[-1][1] > 0
    assert Path(tmp_path / "mcore" / "megatron_flags.txt").exists()
