"""A disk that fails, a process that dies, somebody else's files: the destination is whole or absent, and --resume gives the same bytes."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import Layout, ReshardError, check, hf_to_mcore, mcore_to_hf
from tests.disk import cli, command, environment, held_run, journal, tree, until
from tests.kills import Kills
from tests.oracle import hf_tensors, same
from tests.ranks import free_port
from tests.warm import python_of_trainer

DIRECTIONS = {"hf-to-mcore": ("--tp", "2", "--ep", "2"), "mcore-to-hf": ("--max-shard-size", "200KB")}
RENAME_EXCHANGE_UNKNOWN = "renameat2:*:0:EINVAL"


@pytest.fixture(scope="session")
def whole(checkpoint, tmp_path_factory):
    """By direction: the source, and the bytes that an undisturbed run makes of it."""
    folder = tmp_path_factory.mktemp("whole")
    sources = {"hf-to-mcore": checkpoint("qwen3-moe", dtype=torch.bfloat16), "mcore-to-hf": folder / "mcore"}
    hf_to_mcore(sources["hf-to-mcore"], folder / "mcore", Layout(tp=2, ep=2))
    mcore_to_hf(folder / "mcore", folder / "hf", max_shard_size="200KB")
    return {
        "hf-to-mcore": (sources["hf-to-mcore"], tree(folder / "mcore")),
        "mcore-to-hf": (folder / "mcore", tree(folder / "hf")),
    }


@pytest.fixture
def source(checkpoint, tmp_path):
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(checkpoint("qwen3", dtype=torch.bfloat16), tmp_path / "source"))


@pytest.fixture
def mcore(source, tmp_path):
    """The same as a Megatron checkpoint."""
    hf_to_mcore(source, tmp_path / "mcore", Layout(tp=2))
    return tmp_path / "mcore"


def refused(call, message):
    """The call raises one sentence that matches."""
    with pytest.raises(ReshardError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def beside(folder):
    """What lies in a folder, but for the sources."""
    return sorted({p.name for p in folder.iterdir()} - {"source", "mcore"})


def partial_file(folder, suffix):
    """The largest file of an interrupted run."""
    return max(
        (p for p in (folder / ".out.reshard-partial").rglob(f"*{suffix}")), key=lambda p: p.stat().st_size
    )


def interrupted(direction, whole, out, *faults):
    """Start a run that meets these faults and does not end well."""
    done = cli(direction, whole[direction][0], out, *DIRECTIONS[direction], faults=faults)
    assert done.returncode not in (0, 2) and not out.exists(), done.stderr
    return done


def resumed(direction, whole, out):
    """Go on with it; the bytes are those of an undisturbed run. How many tensors were taken as done."""
    source, expected = whole[direction]
    if direction == "hf-to-mcore":
        report = hf_to_mcore(source, out, Layout(tp=2, ep=2), resume=True)
    else:
        report = mcore_to_hf(source, out, max_shard_size="200KB", resume=True)
    assert tree(out) == expected and beside(out.parent) == ["out"]
    return report.resumed_tensors


def torch_dist_gap(path):
    """A byte of a ``.distcp`` file between two containers, which belongs to none."""
    data = path.read_bytes()
    end = data.index(b"PK\5\6") + 22
    assert data[end] == 0 and data[end : end + 64].lstrip(b"\0").startswith(b"PK")
    return end


SUFFIX = {"hf-to-mcore": ".distcp", "mcore-to-hf": ".safetensors"}


@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize(("direction", "error"), [("hf-to-mcore", "ENOSPC"), ("mcore-to-hf", "EDQUOT")])
def test_a_sync_that_fails_and_loses_bytes_is_made_good_by_resume(direction, error, nth, whole, tmp_path):
    """Disks and servers that are full may take every write and say so at the sync only, once."""
    fault = f"sync:{SUFFIX[direction]}:{nth}:lose{error}"
    done = interrupted(direction, whole, tmp_path / "out", fault, "pwrite:*:0:sleep2")
    assert done.returncode == 1 and "--resume" in done.stderr
    resumed(direction, whole, tmp_path / "out")


def test_an_interrupt_after_a_failed_sync_forgets_nothing_of_it(whole, tmp_path):
    """The kernel tells the error once: a second sync of the file succeeds, and the bytes are lost all the same."""
    # Of four files: after the ninth sync every tensor that is finished stands in the journal.
    with held_run(whole["hf-to-mcore"][0], tmp_path / "out", "sync:.distcp:-9:loseENOSPC") as (process, go):
        until(lambda: any(line[0] == "file" and line[2] == 0 for line in journal(tmp_path)), process)
        assert sum(line[0] == "done" for line in journal(tmp_path)) > 50, "there is something to forget"
        process.send_signal(signal.SIGINT)
        stderr = go()
    assert process.returncode == 130 and "Traceback" not in stderr
    assert resumed("hf-to-mcore", whole, tmp_path / "out") < 135


@pytest.mark.parametrize(("direction", "loss"), [
    *(("hf-to-mcore", loss) for loss in ("removed", "truncated", "cut and lengthened", "copied", "a link", "made anew", "an older copy",
                                         "zeros in place", "a flipped bit", "written between tensors")),
    *(("mcore-to-hf", loss) for loss in ("removed", "made anew", "a flipped bit")),
])  # fmt: skip
def test_a_partial_file_that_is_not_the_one_that_was_written_is_written_again(
    direction, loss, whole, tmp_path
):
    fault = "sync:reshard.json:1:KILL"  # everything is written by then
    interrupted(direction, whole, tmp_path / "out", fault)
    path = partial_file(tmp_path, SUFFIX[direction])
    size = path.stat().st_size
    if loss == "removed":
        path.unlink()
    elif loss == "truncated":
        os.truncate(path, 4096)
    elif loss == "cut and lengthened":
        os.truncate(path, 0)
        interrupted(
            direction, whole, tmp_path / "out", "pwrite:*:9:KILL"
        )  # a second run that begins to mend it, and dies
        os.truncate(path, size)
    elif (
        loss == "made anew"
    ):  # where the file system gives the inode of the removed one again, nothing but the bytes tells
        path.unlink()
        path.touch()
        os.truncate(path, size)
    elif loss == "an older copy":
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[: size // 3] + bytes(size - size // 3))
    elif loss in ("zeros in place", "a flipped bit", "written between tensors"):
        data = path.read_bytes()
        at = torch_dist_gap(path) if loss == "written between tensors" else size // 2
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes(4096) if loss == "zeros in place" else bytes([data[at] ^ 4]))
    else:
        other = tmp_path / "other"
        other.write_bytes(bytes(size))
        path.unlink()
        path.symlink_to(other) if loss == "a link" else other.rename(path)
    if loss == "a link":
        other.rename(tmp_path / "source")  # what `beside` does not count
        path.unlink()
        path.symlink_to(tmp_path / "source")
    found = resumed(direction, whole, tmp_path / "out")
    assert found == 135 if loss == "written between tensors" else found < 135
    assert found > 0 or loss == "cut and lengthened"  # the second run of that began anew
    if loss == "a link":
        assert (tmp_path / "source").read_bytes() == bytes(size)


@pytest.mark.parametrize("how", ["not UTF-8", "cut", "of other lines", "empty", "zeros"])
def test_a_journal_that_is_damaged_costs_time_only(how, whole, tmp_path):
    interrupted("hf-to-mcore", whole, tmp_path / "out", "sync:reshard.json:1:KILL")
    (journal,) = (tmp_path / ".out.reshard-partial").glob("journal*")
    data = journal.read_bytes()
    lines = data.split(b"\n")
    journal.write_bytes({
        "not UTF-8": data + b"\xff\xfe\x00 \xc3\n", "cut": data[:-40], "of other lines": b"\n".join(lines[:2] + [b'{"a": [1', b"[]", b"7"] + lines[2:]),
        "empty": b"", "zeros": data[: len(data) // 2] + bytes(4096) + b"\n",
    }[how])  # fmt: skip
    found = resumed("hf-to-mcore", whole, tmp_path / "out")
    assert found == (134 if how == "cut" else 0)


def test_a_file_that_is_removed_while_it_is_written_is_not_published(whole, tmp_path):
    with held_run(whole["hf-to-mcore"][0], tmp_path / "out") as (process, go):
        partial_file(tmp_path, ".distcp").unlink()
        stderr = go()
    assert process.returncode == 1 and "was removed or replaced" in stderr and not (tmp_path / "out").exists()


# --- Replacing


def replacing(whole, out, *faults, options=()):
    """Replace a checkpoint, an older one, by one that meets these faults on the way."""
    if not out.exists():
        hf_to_mcore(whole["hf-to-mcore"][0], out, Layout(pp=2))
    before = tree(out)
    done = cli(
        "hf-to-mcore",
        whole["hf-to-mcore"][0],
        out,
        *DIRECTIONS["hf-to-mcore"],
        "--overwrite",
        *options,
        faults=faults,
    )
    return before, done


@pytest.mark.parametrize("faults", [
    ("renameat2:*:1:EIO",),
    (RENAME_EXCHANGE_UNKNOWN, "rename:*:1:EIO"),
    (RENAME_EXCHANGE_UNKNOWN, "rename:*:2:EIO"),
], ids=str)  # fmt: skip
def test_overwrite_keeps_the_old_one_where_a_rename_fails(faults, whole, tmp_path):
    before, done = replacing(whole, tmp_path / "out", *faults)
    assert done.returncode == 1 and "cannot rename" in done.stderr and "--resume" in done.stderr
    assert tree(tmp_path / "out") == before
    _, done = replacing(whole, tmp_path / "out", options=["--resume", "--json"])
    assert done.returncode == 0 and json.loads(done.stdout)["resumed_tensors"] == 135
    assert tree(tmp_path / "out") == whole["hf-to-mcore"][1] and beside(tmp_path) == ["out"]


@pytest.mark.parametrize("fault", ["renameat2:*:1:KILL", "renameat2:*:1:DIE"])
def test_overwrite_that_is_killed_at_the_exchange_leaves_the_old_one_or_the_new_one(fault, whole, tmp_path):
    before, done = replacing(whole, tmp_path / "out", fault)
    assert done.returncode == -signal.SIGKILL
    assert tree(tmp_path / "out") == (before if fault.endswith("KILL") else whole["hf-to-mcore"][1])
    _, done = replacing(whole, tmp_path / "out", options=["--resume"])
    assert (
        done.returncode == 0
        and tree(tmp_path / "out") == whole["hf-to-mcore"][1]
        and beside(tmp_path) == ["out"]
    )


@pytest.mark.parametrize("fault", ["rename:*:1:DIE", "rename:*:2:KILL", "rename:*:2:DIE"])
def test_where_the_system_cannot_exchange_the_next_run_puts_the_old_one_back(fault, whole, tmp_path):
    before, done = replacing(whole, tmp_path / "out", RENAME_EXCHANGE_UNKNOWN, fault)
    assert done.returncode == -signal.SIGKILL
    expected = whole["hf-to-mcore"][1] if fault == "rename:*:2:DIE" else before
    done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", *DIRECTIONS["hf-to-mcore"])
    assert (
        done.returncode == 1
        and "exists; pass --overwrite" in done.stderr
        and tree(tmp_path / "out") == expected
    )
    _, done = replacing(whole, tmp_path / "out", options=["--resume"])
    assert (
        done.returncode == 0
        and tree(tmp_path / "out") == whole["hf-to-mcore"][1]
        and beside(tmp_path) == ["out"]
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_right_after_the_last_rename_leaves_no_stray_file_in_the_destination(
    overwrite, whole, tmp_path
):
    if overwrite:
        hf_to_mcore(whole["hf-to-mcore"][0], tmp_path / "out", Layout(pp=2))
    options = ["--overwrite"] if overwrite else []
    fault = "renameat2:*:1:DIE" if overwrite else "rename:/out$:1:DIE"
    done = cli(
        "hf-to-mcore",
        whole["hf-to-mcore"][0],
        tmp_path / "out",
        *DIRECTIONS["hf-to-mcore"],
        *options,
        faults=(fault,),
    )
    assert done.returncode == -signal.SIGKILL and tree(tmp_path / "out") == whole["hf-to-mcore"][1]
    done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out")
    assert done.returncode == 1 and "exists" in done.stderr and beside(tmp_path) == ["out"]
    assert tree(tmp_path / "out") == whole["hf-to-mcore"][1]


@pytest.mark.parametrize(("kind", "name"), [
    *((kind, ".out.reshard-partial") for kind in ("directory", "link", "file", "directory with a .lock")), ("link", ".out.reshard-replaced"),
])  # fmt: skip
def test_somebody_s_data_under_the_working_directory_s_name_is_not_touched(name, kind, whole, tmp_path):
    theirs = tmp_path / "source" if kind == "link" else tmp_path / name
    if kind == "file":
        theirs.write_text("theirs")
    else:
        (theirs / "folder").mkdir(parents=True)
        (theirs / "thesis.txt").write_text("theirs")
        (theirs / "folder" / ".lock").write_text("theirs")
    if kind == "directory with a .lock":
        (theirs / ".lock").write_text("")
        (theirs / "fingerprint").write_text("theirs")
    if kind == "link":
        (tmp_path / name).symlink_to(theirs)
    if name.endswith("replaced"):
        hf_to_mcore(whole["hf-to-mcore"][0], tmp_path / "out", Layout(pp=2))
    before = tree(theirs) if theirs.is_dir() else theirs.read_bytes()
    for resume in (False, True):
        done = cli(
            "hf-to-mcore",
            whole["hf-to-mcore"][0],
            tmp_path / "out",
            "--overwrite",
            *(["--resume"] if resume else []),
        )
        assert (tree(theirs) if theirs.is_dir() else theirs.read_bytes()) == before and (
            tmp_path / name
        ).is_symlink() == (kind == "link")
        if name.endswith("partial"):
            assert done.returncode == 1 and name in done.stderr and not (tmp_path / "out").exists()
        else:
            assert done.returncode == 0


def test_a_source_in_the_working_directory_or_linked_into_the_destination_is_not_removed(whole, tmp_path):
    """After a kill right after the exchange the old checkpoint is there, and somebody may want it back."""
    before, done = replacing(whole, tmp_path / "out", "renameat2:*:1:DIE")
    old = tmp_path / ".out.reshard-partial" / "tree"
    assert done.returncode == -signal.SIGKILL and tree(old) == before
    for options in (["--overwrite"], ["--overwrite", "--resume"]):
        done = cli("mcore-to-hf", old, tmp_path / "out", *options)
        assert (
            done.returncode == 1
            and "which this run would empty or replace" in done.stderr
            and tree(old) == before
        )
        done = cli(
            "mcore-to-hf", whole["mcore-to-hf"][0], tmp_path / "out", "--hf-config", old / "hf", *options
        )
        assert (
            done.returncode == 1
            and "which this run would empty or replace" in done.stderr
            and tree(old) == before
        )
    source = Path(shutil.copytree(whole["hf-to-mcore"][0], tmp_path / "source"))
    shutil.copy(source / "model.safetensors", tmp_path / "out" / "model.safetensors")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to(tmp_path / "out" / "model.safetensors")
    done = cli("hf-to-mcore", source, tmp_path / "out", "--overwrite")
    assert (
        done.returncode == 1
        and "which this run would empty or replace" in done.stderr
        and (source / "model.safetensors").exists()
    )


def test_an_empty_directory_of_somebody_else_s_is_left_and_named(whole, tmp_path):
    theirs = tmp_path / ".out.reshard-partial"
    theirs.mkdir()
    for options in ([], ["--resume"], ["--overwrite"]):
        done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", *options)
        assert (
            done.returncode == 1
            and f"{theirs} is in the way" in done.stderr
            and beside(tmp_path) == [theirs.name]
        )


def test_a_folder_that_can_be_written_and_not_read_takes_a_checkpoint(whole, tmp_path):
    done = cli(
        "hf-to-mcore",
        whole["hf-to-mcore"][0],
        tmp_path / "out",
        *DIRECTIONS["hf-to-mcore"],
        faults=(f"opendir:/{tmp_path.name}$:0:EACCES",),
    )
    assert done.returncode == 0 and tree(tmp_path / "out") == whole["hf-to-mcore"][1], done.stderr


@pytest.mark.parametrize(("error", "kept"), [(KeyError("x"), False), (OSError(5, "EIO"), False), (ReshardError("no"), False),
                                             (MemoryError(), True), (KeyboardInterrupt(), True), (ReshardError("later", True), True)], ids=repr)  # fmt: skip
def test_what_nobody_expected_leaves_nothing_and_an_interrupt_what_resume_needs(error, kept, whole, tmp_path):
    def progress(done, total):
        if done:
            raise error

    with pytest.raises(type(error)):
        hf_to_mcore(whole["hf-to-mcore"][0], tmp_path / "out", Layout(tp=2, ep=2), progress=progress)
    assert beside(tmp_path) == ([".out.reshard-partial"] if kept else [])


def test_arguments_of_the_wrong_kind_are_one_sentence(source, tmp_path):
    for call, said in ((lambda: Layout(tp="2"), "--tp is '2', which is not a whole number"), (lambda: Layout(pp=True), "--pp is True"),
                       (lambda: Layout(etp=2.0), "--etp is 2.0"), (lambda: Layout(pipeline=["Et"]), "--pipeline-layout is"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", {"tp": 2}), "layout is {'tp': 2}, not a reshard.Layout"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", workers="3"), "--workers is '3'"),
                       (lambda: mcore_to_hf(source, tmp_path / "out", workers=1.5), "--workers is 1.5"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", iteration=1.5), "--iteration is 1.5"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", make_vocab_size_divisible_by="128"), "divisible-by is '128'"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", make_vocab_size_divisible_by=(1 << 20) + 1), "between 1 and 1,048,576")):  # fmt: skip
        refused(call, said)
    assert beside(tmp_path) == []
    done = cli("hf-to-mcore", source, tmp_path / "out", "--make-vocab-size-divisible-by", (1 << 20) + 1)
    assert done.returncode == 2 and "1<=x<=1048576" in done.stderr
    assert (
        cli("hf-to-mcore", source, tmp_path / "out", "--workers", 300, "--dry-run").returncode == 0
    )  # as many as in Python


def test_a_single_process_with_a_rank_says_its_error_as_json(tmp_path):
    done = cli(
        "hf-to-mcore",
        tmp_path / "nowhere",
        tmp_path / "out",
        "--json",
        env=os.environ | {"RANK": "5", "WORLD_SIZE": "1"},
    )
    assert done.returncode == 1 and "nowhere" in json.loads(done.stdout)["error"]


def test_a_plan_of_more_ranks_than_there_are_gpus_is_refused(source):
    done = cli("plan", "--model", source, "--from", "tp=1,dp=1000000", "--to", "tp=1")
    assert done.returncode == 1 and "the number of the trainer's ranks is 1000000" in done.stderr
    done = cli("plan", "--model", source, "--from", "tp=1", "--to", "tp=1,dp=1000000")
    assert done.returncode in (1, 2) and "1000000" in done.stderr


# --- Destinations


def test_destinations_that_cannot_be_are_refused_before_anything_is_made(source, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    refused(lambda: hf_to_mcore(source, tmp_path / "link"), "is a symbolic link; give the directory itself")
    refused(lambda: hf_to_mcore(source, "/"), "overlap|root")
    refused(lambda: hf_to_mcore(source, tmp_path / ("x" * 256)), "[Ff]ile name too long|longer than")
    for options in ({"workers": 10**6}, {"workers": -1}, {"make_vocab_size_divisible_by": 10**15}, {"make_vocab_size_divisible_by": 10**30},
                    {"iteration": 10**30}):  # fmt: skip
        refused(
            lambda options=options: hf_to_mcore(source, tmp_path / "out", **options),
            "workers|divisible|iteration|more bytes",
        )
    assert beside(tmp_path) == ["empty", "link"] and not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("length", [238, 239, 255])
def test_names_as_long_as_the_file_system_allows_are_written(length, source, tmp_path):
    out = tmp_path / ("x" * length)
    done = cli("hf-to-mcore", source, out, faults=("sync:reshard.json:1:KILL",))
    assert done.returncode == -signal.SIGKILL
    done = cli("hf-to-mcore", source, out, "--resume", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["resumed_tensors"] == 47
    assert check(out).ok and beside(tmp_path) == [out.name]


def test_a_full_disk_at_a_resume_keeps_what_is_written(whole, tmp_path):
    """Another program takes the space meanwhile."""
    interrupted("hf-to-mcore", whole, tmp_path / "out", "pwrite:*:350:ENOSPC")
    done = interrupted("hf-to-mcore", whole, tmp_path / "out", "pwrite:*:3:ENOSPC")
    assert "the disk is full" in done.stderr and "--resume" in done.stderr
    resumed("hf-to-mcore", whole, tmp_path / "out")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a megabyte, in a mount namespace of the test's own commands."""
    mount = tmp_path / "disk"
    mount.mkdir()

    def run(size, *args):
        script = f"mount -t tmpfs -o size={size} tmpfs {mount} && {' '.join(command(*args))}; status=$?; ls -A {mount}; exit $status"
        shell = ["unshare", "-m" if os.getuid() == 0 else "-rm", "bash", "-c", script]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=300)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return mount, run


def test_an_unwritable_destination_is_refused(whole, small_disk):
    (mount, run), source = small_disk, whole["hf-to-mcore"][0]
    done = run("1m,ro", "hf-to-mcore", source, mount / "out")
    assert done.returncode == 1 and "permission denied or read-only" in done.stderr
    done = run("8m,ro", "hf-to-mcore", source, mount / "out", "--dry-run")
    assert done.returncode == 0 and "would write" in done.stdout
    done = run("8m", "hf-to-mcore", source, mount)
    assert done.returncode == 1 and "is a mount point" in done.stderr and done.stdout.strip() == ""


def test_a_full_disk_is_one_sentence(whole, small_disk):
    mount, run = small_disk
    done = run("512k", "hf-to-mcore", whole["hf-to-mcore"][0], mount / "out")
    assert (
        done.returncode == 1 and "more bytes, but the disk has" in done.stderr and done.stdout.strip() == ""
    )


def test_a_disk_that_refuses_large_files_is_one_sentence(whole, tmp_path):
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))

    done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", preexec_fn=limit)
    assert done.returncode == 1 and re.search("cannot write .*File too large", done.stderr)
    assert beside(tmp_path) == []


# --- Runs that end early


def test_random_kills_leave_a_whole_destination_or_none_and_resume_gives_the_same_bytes(whole, tmp_path):
    """A short part of what ``python -m tests.kills`` does."""
    for seed, processes, runs in ((3, 1, 5), (4, 3, 1)):
        folder = tmp_path / str(processes)
        folder.mkdir()
        kills = Kills(whole["hf-to-mcore"][0], folder, seed, processes)
        for number in range(8 * runs):
            if number >= runs and kills.outcome.proves(runs):
                break
            kills.run()
        assert kills.outcome.wrong == [] and kills.outcome.proves(runs), str(kills.outcome)


def test_resume_refuses_another_source_or_other_options(whole, tmp_path):
    interrupted("hf-to-mcore", whole, tmp_path / "out", "sync:reshard.json:1:KILL")
    for options in (["--tp", "4"], [*DIRECTIONS["hf-to-mcore"], "--dtype", "fp32"]):
        done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", *options, "--resume")
        assert done.returncode == 1 and "another source, layout, options" in done.stderr
    assert resumed("hf-to-mcore", whole, tmp_path / "out") == 135


def test_two_runs_on_one_destination(whole, tmp_path):
    with held_run(whole["hf-to-mcore"][0], tmp_path / "out") as (first, go):
        second = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out")
        assert second.returncode == 1 and "another run is writing" in second.stderr
        said = go()
    assert first.returncode == 0, said
    assert tree(tmp_path / "out") == whole["hf-to-mcore"][1] and beside(tmp_path) == ["out"]


def test_an_interrupt_ends_quietly_and_can_be_resumed(whole, tmp_path):
    with held_run(whole["hf-to-mcore"][0], tmp_path / "out") as (process, go):
        process.send_signal(signal.SIGINT)
        stderr = go()
    assert process.returncode == 130 and "Traceback" not in stderr and not (tmp_path / "out").exists()
    assert resumed("hf-to-mcore", whole, tmp_path / "out") > 0


def test_a_source_that_shrinks_meanwhile_is_one_sentence(whole, tmp_path):
    source = Path(shutil.copytree(whole["hf-to-mcore"][0], tmp_path / "source"))
    with held_run(source, tmp_path / "out") as (process, go):
        os.truncate(source / "model.safetensors", 9000)
        stderr = go()
    assert process.returncode == 1 and "it is truncated" in stderr and "Traceback" not in stderr
    assert beside(tmp_path) == []


# --- Several processes


@pytest.mark.parametrize("victim", [0, 2])
def test_processes_wait_for_a_slow_one_and_end_at_once_with_a_dead_one(victim, whole, tmp_path):
    arguments = [
        "hf-to-mcore",
        whole["hf-to-mcore"][0],
        tmp_path / "out",
        *DIRECTIONS["hf-to-mcore"],
        "--resume",
    ]
    held, others = tmp_path / "held", {0, 1, 2} - {victim}

    @contextlib.contextmanager
    def stopped(log):
        """Three processes, one of which is stopped in the middle of its work, while the others have come to the end of theirs."""
        with started(arguments, 3, tmp_path / log, {victim: ("pwrite:*:100:hold",)}, held) as runs:
            until(held.exists, *runs)
            runs[victim].send_signal(signal.SIGSTOP)
            done, before = [0, 0], None
            while done != before or not all(done):
                time.sleep(1)
                assert all(run.poll() is None for run in runs), (tmp_path / log).read_text()
                before, done = (
                    done,
                    [sum(line[0] == "done" for line in journal(tmp_path, other)) for other in others],
                )
            yield runs

    with stopped("dead") as runs:
        runs[victim].kill()
        codes, said = [run.wait(60) for run in runs], (tmp_path / "dead").read_text()
    assert codes.pop(victim) == -signal.SIGKILL and codes == [1, 1]
    assert (
        said.count(f"process {victim} of 3 was ended; run again with --resume") == 2
        and "Traceback" not in said
    )
    held.unlink()
    with stopped("slow") as runs:
        held.unlink()
        runs[victim].send_signal(signal.SIGCONT)
        assert [run.wait(300) for run in runs] == [0, 0, 0], (tmp_path / "slow").read_text()
    assert tree(tmp_path / "out") == whole["hf-to-mcore"][1] and beside(tmp_path) == ["dead", "out", "slow"]


def together(arguments, size, log, faults=None):
    """Run a command in processes of their own, as torchrun starts them; the exit codes."""
    with started(arguments, size, log, faults) as runs:
        return [run.wait(300) for run in runs]


@contextlib.contextmanager
def started(arguments, size, log, faults=None, held=None):
    """The processes of such a run, some of which meet faults; the others are forked from a server that has torch."""
    faults = faults or {}
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with open(log, "ab") as out:
        runs = [
            subprocess.Popen(command(*arguments, python=sys.executable if faults.get(rank) else python_of_trainer()), stdout=out, stderr=out,
                             env=environment(*faults.get(rank, ()), held=held) | shared | {"RANK": str(rank)})
            for rank in range(size)
        ]  # fmt: skip
        try:
            yield runs
        finally:
            for run in runs:
                run.kill()
                run.wait()


def test_bytes_that_changed_in_one_process_s_file_are_written_again_by_all_that_share_them(whole, tmp_path):
    source, expected = whole["hf-to-mcore"]
    arguments = ["hf-to-mcore", source, tmp_path / "out", *DIRECTIONS["hf-to-mcore"], "--resume"]
    codes = together(arguments, 2, tmp_path / "log", {0: ("sync:reshard.json:1:KILL",)})
    assert codes == [-signal.SIGKILL, 1]
    path = tmp_path / ".out.reshard-partial" / "tree" / "release" / "__1_0.distcp"  # the second process's
    flip(path, path.stat().st_size // 2)
    assert together([*arguments, "--json"], 2, tmp_path / "said") == [0, 0], (tmp_path / "said").read_text()
    assert tree(tmp_path / "out") == expected and beside(tmp_path) == ["log", "out", "said"]
    assert json.loads((tmp_path / "said").read_text())["resumed_tensors"] > 80  # of the first process's 87


def test_a_process_that_is_lost_after_the_first_has_published_makes_no_failure_of_it(whole, tmp_path):
    arguments = ["hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", *DIRECTIONS["hf-to-mcore"]]
    held = tmp_path / "held"
    with started(
        arguments, 3, tmp_path / "log", {0: (f"sync:/{tmp_path.name}$:1:hold",)}, held
    ) as runs:  # right after the rename
        until(held.exists, *runs)
        assert (tmp_path / "out").exists()
        runs[1].kill()
        runs[1].wait(60)
        held.unlink()
        assert [run.wait(60) for run in runs] == [0, -signal.SIGKILL, 0], (tmp_path / "log").read_text()
    assert tree(tmp_path / "out") == whole["hf-to-mcore"][1] and beside(tmp_path) == ["log", "out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_resume_of_a_run_that_was_killed_after_it_had_published_says_that_it_is_done(
    overwrite, whole, tmp_path
):
    arguments = [
        "hf-to-mcore",
        whole["hf-to-mcore"][0],
        tmp_path / "out",
        *DIRECTIONS["hf-to-mcore"],
        *(["--overwrite"] if overwrite else []),
    ]
    if overwrite:
        hf_to_mcore(whole["hf-to-mcore"][0], tmp_path / "out", Layout(pp=2))
    done = cli(*arguments, faults=("renameat2:*:1:DIE" if overwrite else "rename:/out$:1:DIE",))
    assert done.returncode == -signal.SIGKILL and tree(tmp_path / "out") == whole["hf-to-mcore"][1]
    inode = (tmp_path / "out").stat().st_ino
    done = cli(*arguments, "--dtype", "fp32", "--resume") if not overwrite else None
    assert done is None or (done.returncode == 1 and "exists; pass --overwrite" in done.stderr)
    if not overwrite:
        assert beside(tmp_path) == ["out"]
        return
    done = cli(*arguments, "--resume")
    assert done.returncode == 0 and "was complete: an earlier run had published it" in done.stderr
    assert (tmp_path / "out").stat().st_ino == inode and tree(tmp_path / "out") == whole["hf-to-mcore"][1]
    assert beside(tmp_path) == ["out"]
    done = cli("hf-to-mcore", *arguments[1:3], *DIRECTIONS["hf-to-mcore"], "--resume")
    assert done.returncode == 1 and "reshard check says whether it is whole" in done.stderr


@pytest.mark.parametrize(("size", "rank"), [("x", "0"), ("3", "3"), ("3", "-1")])
def test_an_environment_that_makes_no_sense_is_one_sentence(size, rank, whole, tmp_path):
    variables = {"WORLD_SIZE": size, "RANK": rank}
    done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", env=os.environ | variables)
    assert done.returncode == 1 and re.search("WORLD_SIZE|RANK", done.stderr) and done.stderr.count("\n") == 1
    assert beside(tmp_path) == []


# --- Sources


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


def flip(path, at):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


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
    "way, scales", [("fp8", "_scale_inv"), ("int8_per_channel", "_scale"), ("fp8_per_tensor", "_scale")]
)
def test_a_flipped_bit_in_codes_or_their_scales_is_refused_by_name(way, scales, mcore, tmp_path):
    from reshard.formats import safetensors

    mcore_to_hf(mcore, tmp_path / "codes", quantize=way)
    hf_to_mcore(tmp_path / "codes", tmp_path / "again")
    hf_to_mcore(tmp_path / "codes", tmp_path / "wide", dtype="fp32")
    stored = safetensors.read_directory(tmp_path / "codes")
    for name in ("model.layers.1.mlp.up_proj.weight", f"model.layers.1.mlp.up_proj.weight{scales}"):
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
    hf_to_mcore(source, tmp_path / "other", Layout(), dtype="fp32", iteration=7)
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
