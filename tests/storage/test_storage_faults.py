"""A disk that fails, a destination that is taken, somebody else's files: the destination is whole or
absent."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from reshard import MegatronLayout, ReshardError, check, hf_to_mcore, mcore_to_hf
from reshard.formats.torch_dist import TRACKER
from reshard.storage.run.added_iteration import AddedIteration
from reshard.storage.run.partial import SAVE
from tests.tools.disk import (
    DIRECTIONS,
    RENAME_EXCHANGE_UNKNOWN,
    beside,
    cli,
    command,
    interrupted,
    refused,
    resumed,
    tree,
)

# --- Replacing


def replacing(whole, out, *faults, options=()):
    """Replace a checkpoint, an older one, by one that meets these faults on the way."""
    if not out.exists():
        hf_to_mcore(whole["hf-to-mcore"][0], out, MegatronLayout(pp=2))
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
        hf_to_mcore(whole["hf-to-mcore"][0], tmp_path / "out", MegatronLayout(pp=2))
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
    *((kind, ".out.reshard-partial") for kind in ("directory", "link", "file", "directory with a .lock")),
    ("link", ".out.reshard-replaced"),
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
        hf_to_mcore(whole["hf-to-mcore"][0], tmp_path / "out", MegatronLayout(pp=2))
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


AS_NOBODY = """
import os, sys
import reshard
source, spare, out = sys.argv[1:]
reshard.hf_to_mcore(source, spare)  # imports all that it takes, from where nobody else may read
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for resume in (False, True):
    try:
        print(reshard.hf_to_mcore(source, out, resume=resume, overwrite=True).tensors)
    except reshard.ReshardError as error:
        print(error)
"""


@pytest.fixture
def shared_folder():
    """A folder that all users write in and nobody may remove others' files from, as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="reshard-shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes another user's files")


@only_root
def test_a_directory_that_may_not_be_looked_into_is_named(whole, shared_folder):
    """A path below it was taken for one that is not there, and so for a hub id."""
    source, dark = whole["hf-to-mcore"][0], shared_folder / "dark"
    shutil.copytree(source, dark / "hf")
    dark.chmod(0o700)
    inspect = "import os, sys, reshard; reshard.inspect(sys.argv[1]); os.setuid(65534); reshard.inspect(sys.argv[2])"
    done = subprocess.run(
        [sys.executable, "-c", inspect, source, dark / "hf"], capture_output=True, text=True
    )
    assert done.stderr.endswith(f"ReshardError: cannot look into {dark}: Permission denied\n")


@only_root
def test_a_working_directory_of_another_user_is_left_and_named(whole, tmp_path):
    """With the mark, the fingerprint and the journal of a run of ours: its owner could change what
    is published."""
    partial = tmp_path / ".out.reshard-partial"
    interrupted("hf-to-mcore", whole, tmp_path / "out", "sync:reshard.json:1:KILL")
    for path in (partial, *partial.rglob("*")):
        os.chown(path, 65534, 65534)
    before = tree(partial)
    for options in ([], ["--resume"], ["--overwrite"]):
        done = cli(
            "hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", *DIRECTIONS["hf-to-mcore"], *options
        )
        assert done.returncode == 1 and f"{partial} belongs to another user (65534)" in done.stderr
        assert tree(partial) == before and beside(tmp_path) == [partial.name]
    (tmp_path / "other").mkdir()
    os.chown(tmp_path / "other", 65534, 65534)
    (tmp_path / "other").chmod(0o1755)  # as a run makes it that has not begun
    (tmp_path / "other").rename(tmp_path / ".new.reshard-partial")
    done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "new")
    assert done.returncode == 1 and "belongs to another user (65534)" in done.stderr
    for path in (partial, *partial.rglob("*")):
        os.chown(path, 0, 0)
    shutil.rmtree(tmp_path / ".new.reshard-partial")
    assert resumed("hf-to-mcore", whole, tmp_path / "out") > 0, "the control: one's own is gone on with"


@only_root
def test_a_user_does_not_write_into_what_another_made_first_in_a_shared_folder(whole, shared_folder):
    source = shutil.copytree(whole["hf-to-mcore"][0], shared_folder / "source")
    for path in (source, *source.iterdir()):
        path.chmod(0o755)
    interrupted("hf-to-mcore", whole, shared_folder / "out", "sync:reshard.json:1:KILL")
    partial = shared_folder / ".out.reshard-partial"
    for path in (partial, *partial.rglob("*")):
        path.chmod(0o777)  # whose owner asks everybody in
    before = tree(partial)
    arguments = [source, shared_folder / "spare", shared_folder / "out"]
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("belongs to another user (0)") == 2 and tree(partial) == before
    shutil.rmtree(partial)
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, source, shared_folder / "spare2", arguments[2]],
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == ["135"] * 2 and (shared_folder / "out").stat().st_uid == 65534, done.stdout


def test_a_folder_that_can_be_written_and_not_read_takes_a_checkpoint(whole, tmp_path):
    done = cli(
        "hf-to-mcore",
        whole["hf-to-mcore"][0],
        tmp_path / "out",
        *DIRECTIONS["hf-to-mcore"],
        faults=(f"opendir:/{tmp_path.name}$:0:EACCES",),
    )
    assert done.returncode == 0 and tree(tmp_path / "out") == whole["hf-to-mcore"][1], done.stderr


@pytest.mark.parametrize(("error", "kept"), [
    (KeyError("x"), False), (OSError(5, "EIO"), False), (ReshardError("no"), False), (MemoryError(), True),
    (KeyboardInterrupt(), True), (ReshardError("later", True), True),
], ids=repr)  # fmt: skip
def test_what_nobody_expected_leaves_nothing_and_an_interrupt_what_resume_needs(error, kept, whole, tmp_path):
    def progress(done, total):
        if done:
            raise error

    with pytest.raises(type(error)):
        hf_to_mcore(whole["hf-to-mcore"][0], tmp_path / "out", MegatronLayout(tp=2, ep=2), progress=progress)
    assert beside(tmp_path) == ([".out.reshard-partial"] if kept else [])


def test_a_run_names_an_iteration_once_both_are_on_the_disk(tmp_path, monkeypatch):
    """Else a crash of the machine may leave a tracker of no bytes."""
    events, sync, replace = [], os.fsync, os.replace

    def noted_sync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(new), replace(old, new)))
    work = AddedIteration(tmp_path / "config", (), tmp_path / "run" / "iter_0000003", False, False)
    work.check_destination()
    work.open(SAVE, False)
    work.write_file("weights", b"1", sync=True)
    work.publish()
    work.close()
    assert (tmp_path / "run" / TRACKER).read_text() == "3"
    before, after = events[: events.index(tmp_path / "run" / TRACKER)], events[-1]
    assert before[-2:] == [
        Path("run", ".iter_0000003.reshard-partial", TRACKER),
        Path("run"),
    ] and after == Path("run")


def test_arguments_of_the_wrong_kind_are_one_sentence(source, tmp_path):
    for call, said in ((lambda: MegatronLayout(tp="2"), "--tp is '2', which is not a whole number"),
                       (lambda: MegatronLayout(pp=True), "--pp is True"),
                       (lambda: MegatronLayout(etp=2.0), "--etp is 2.0"),
                       (lambda: MegatronLayout(pipeline_model_parallel_layout=["Et"]),
                        "--pipeline-model-parallel-layout is"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", {"tp": 2}),
                        "layout is {'tp': 2}, not a reshard.MegatronLayout"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", workers="3"), "--workers is '3'"),
                       (lambda: mcore_to_hf(source, tmp_path / "out", workers=1.5), "--workers is 1.5"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", iteration=1.5), "--iteration is 1.5"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", make_vocab_size_divisible_by="128"),
                        "divisible-by is '128'"),
                       (lambda: hf_to_mcore(source, tmp_path / "out", make_vocab_size_divisible_by=(1 << 20) + 1),
                        "between 1 and 1,048,576")):  # fmt: skip
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
    done = cli("plan", "--model", source, "--trainer", "tp=1,dp=1000000", "--engine", "tp=1")
    assert done.returncode == 2 and "the number of the trainer's ranks is 1000000" in done.stderr
    done = cli("plan", "--model", source, "--trainer", "tp=1", "--engine", "tp=1,dp=1000000")
    assert done.returncode == 2 and "1000000" in done.stderr


# --- Destinations


def test_destinations_that_cannot_be_are_refused_before_anything_is_made(source, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    refused(lambda: hf_to_mcore(source, tmp_path / "link"), "is a symbolic link; give the directory itself")
    refused(lambda: hf_to_mcore(source, "/"), "overlap|root")
    refused(lambda: hf_to_mcore(source, tmp_path / ("x" * 256)), "[Ff]ile name too long|longer than")
    for options in ({"workers": 10**6}, {"workers": -1}, {"make_vocab_size_divisible_by": 10**15},
                    {"make_vocab_size_divisible_by": 10**30}, {"iteration": 10**30}):  # fmt: skip
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
        script = (
            f"mount -t tmpfs -o size={size} tmpfs {mount} && {' '.join(command(*args))}; status=$?; ls -A "
            f"{mount}; exit $status"
        )
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


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_dry_run_says_that_the_disk_is_too_small(direction, whole, small_disk):
    mount, run = small_disk
    for size, fits in (("512k", False), ("64m", True)):
        for out in (mount / "out", mount / "not" / "there" / "out"):
            done = run(size, direction, whole[direction][0], out, "--dry-run")
            assert done.returncode == 0 and "would write" in done.stdout
            assert ("note: it will not fit: " in done.stderr) == (not fits), done.stderr


def test_a_disk_that_refuses_large_files_is_one_sentence(whole, tmp_path):
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))

    done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", preexec_fn=limit)
    assert done.returncode == 1 and re.search("cannot write .*File too large", done.stderr)
    assert beside(tmp_path) == []
