"""Runs that end early, and go on: --resume gives the bytes of an undisturbed run, whatever a disk,
a kill or an interrupt has left."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.sync import EarlySync
from tests.campaigns.kills import Kills
from tests.tools.disk import (
    DIRECTIONS,
    SUFFIX,
    beside,
    cli,
    flip,
    held_run,
    interrupted,
    journal,
    partial_file,
    resumed,
    tree,
    until,
)


def torch_dist_gap(path):
    """A byte of a ``.distcp`` file between two containers, which belongs to none."""
    data = path.read_bytes()
    end = data.index(b"PK\5\6") + 22
    assert data[end] == 0 and data[end : end + 64].lstrip(b"\0").startswith(b"PK")
    return end


@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize(("direction", "error"), [("hf-to-mcore", "ENOSPC"), ("mcore-to-hf", "EDQUOT")])
def test_a_sync_that_fails_and_loses_bytes_is_made_good_by_resume(direction, error, nth, whole, tmp_path):
    """Disks and servers that are full may take every write and say so at the sync only, once."""
    fault = f"sync:{SUFFIX[direction]}:{nth}:lose{error}"
    done = interrupted(direction, whole, tmp_path / "out", fault, "pwrite:*:0:sleep2")
    assert done.returncode == 1 and "--resume" in done.stderr
    resumed(direction, whole, tmp_path / "out")


def test_an_interrupt_after_a_failed_sync_forgets_nothing_of_it(whole, tmp_path):
    """The kernel tells the error once: a second sync of the file succeeds, and the bytes are lost
    all the same."""
    # Of four files: after the ninth sync every tensor that is finished stands in the journal. The loss does not yet, as
    # the interrupt comes: it begins with the file's removal.
    faults = ("sync:.distcp:-9:loseENOSPC", "unlink:.distcp:-1:hold")
    with held_run(whole["hf-to-mcore"][0], tmp_path / "out", *faults) as (process, go):
        until(lambda: (tmp_path / "held").stat().st_size == 2, process)
        assert sum(line[0] == "done" for line in journal(tmp_path)) > 50, "there is something to forget"
        process.send_signal(signal.SIGINT)
        stderr = go()
    assert process.returncode == 130 and "Traceback" not in stderr
    assert any(line[0] == "file" and line[2] == 0 for line in journal(tmp_path)), "the lost file is noted"
    assert resumed("hf-to-mcore", whole, tmp_path / "out") < 135


def test_ctrl_c_while_a_sync_is_waited_for_lets_it_end(tmp_path, monkeypatch):
    """What it says is written to the journal, which is closed after that."""
    begun, ended = threading.Event(), []

    def slow(descriptor):
        begun.set()
        time.sleep(0.3)
        ended.append(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    (tmp_path / "file").touch()
    interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    with (
        OpenFiles.of_destination(write=True) as files,
        pytest.raises(KeyboardInterrupt),
        EarlySync(files, [tmp_path / "file"]),
    ):
        assert begun.wait(60)
        interrupt.start()
    assert ended


@pytest.mark.parametrize(("direction", "loss"), [
    *(("hf-to-mcore", loss)
      for loss in ("removed", "truncated", "cut and lengthened", "copied", "a link", "made anew", "an older copy",
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


@pytest.fixture(scope="module")
def transposed(checkpoint, tmp_path_factory):
    """A Megatron checkpoint whose experts are columns of transposed matrices in Hugging Face files,
    and those."""
    folder = tmp_path_factory.mktemp("transposed")
    hf_to_mcore(checkpoint("gpt-oss", dtype=torch.bfloat16), folder / "mcore", MegatronLayout(ep=4, etp=1))
    mcore_to_hf(folder / "mcore", folder / "hf", max_shard_size="200KB")
    return {"mcore-to-hf": (folder / "mcore", tree(folder / "hf"))}


@pytest.mark.parametrize("fault", ["pwrite:*:40:KILL", "pwrite:*:90:KILL", "sync:reshard.json:1:KILL"])
def test_matrices_whose_columns_were_written_in_part_are_made_whole(fault, transposed, tmp_path):
    interrupted("mcore-to-hf", transposed, tmp_path / "out", fault)
    if "sync" in fault:  # a bit of one tensor's column, and with it all of the matrix
        path = next((tmp_path / ".out.reshard-partial").rglob("model-00002-of-*.safetensors"))
        flip(path, path.stat().st_size // 2)
    assert resumed("mcore-to-hf", transposed, tmp_path / "out") < 263


@pytest.mark.parametrize("how", ["not UTF-8", "cut", "of other lines", "empty", "zeros"])
def test_a_journal_that_is_damaged_costs_time_only(how, whole, tmp_path):
    interrupted("hf-to-mcore", whole, tmp_path / "out", "sync:reshard.json:1:KILL")
    (journal,) = (tmp_path / ".out.reshard-partial").glob("journal*")
    data = journal.read_bytes()
    lines = data.split(b"\n")
    journal.write_bytes(
        {
            "not UTF-8": data + b"\xff\xfe\x00 \xc3\n",
            "cut": data[:-40],
            "of other lines": b"\n".join(lines[:2] + [b'{"a": [1', b"[]", b"7"] + lines[2:]),
            "empty": b"",
            "zeros": data[: len(data) // 2] + bytes(4096) + b"\n",
        }[how]
    )
    found = resumed("hf-to-mcore", whole, tmp_path / "out")
    assert found == (134 if how == "cut" else 0)


def test_a_file_that_is_removed_while_it_is_written_is_not_published(whole, tmp_path):
    with held_run(whole["hf-to-mcore"][0], tmp_path / "out") as (process, go):
        partial_file(tmp_path, ".distcp").unlink()
        stderr = go()
    assert process.returncode == 1 and "was removed or replaced" in stderr and not (tmp_path / "out").exists()


def test_random_kills_leave_a_whole_destination_or_none_and_resume_gives_the_same_bytes(whole, tmp_path):
    """A short part of what ``python -m tests.campaigns.kills`` does."""
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_quietly_and_can_be_resumed(number, whole, tmp_path):
    """Ctrl-C, and what slurm and Kubernetes send."""
    with held_run(whole["hf-to-mcore"][0], tmp_path / "out") as (process, go):
        process.send_signal(number)
        stderr = go()
    assert process.returncode == 128 + number and not (tmp_path / "out").exists()
    assert stderr == "\nInterrupted: run the same command with --resume to continue.\n"
    assert resumed("hf-to-mcore", whole, tmp_path / "out") > 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_command_says_what_an_interrupted_run_has_left_and_how_it_goes_on(direction, whole, tmp_path):
    out, partial = tmp_path / "out", tmp_path / ".out.reshard-partial"
    with held_run(whole[direction][0], out, direction=direction) as (process, _):
        running = cli("inspect", out)
        process.kill()
    (tmp_path / "held").unlink()
    assert running.returncode == 1 and f"a run is writing {out}" in running.stderr
    before = tree(partial)
    commands = [
        ["inspect"],
        ["check"],
        ["diff", whole["mcore-to-hf"][0]],
        ["plan", "--trainer", "tp=1", "--engine", "tp=1", "--model"],
    ]
    for command, path in [
        *((command, out) for command in commands),
        (["inspect"], partial),
        (["inspect"], partial / "tree"),
    ]:
        done = cli(*command, path)
        assert (
            done.returncode == 1 and "--resume to continue" in done.stderr and f"left of {out}" in done.stderr
        ), done.stderr
    back = {"hf-to-mcore": "mcore-to-hf", "mcore-to-hf": "hf-to-mcore"}[direction]
    assert "--resume to continue" in cli(back, out, tmp_path / "back").stderr
    assert tree(partial) == before
    resumed(direction, whole, out)
    assert cli("inspect", out).returncode == 0, "the control"


def test_a_source_that_shrinks_meanwhile_is_one_sentence(whole, tmp_path):
    source = Path(shutil.copytree(whole["hf-to-mcore"][0], tmp_path / "source"))
    with held_run(source, tmp_path / "out") as (process, go):
        os.truncate(source / "model.safetensors", 9000)
        stderr = go()
    assert (
        process.returncode == 1
        and "model.safetensors changed while it was read" in stderr
        and "Traceback" not in stderr
    )
    assert beside(tmp_path) == []
