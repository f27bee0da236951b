"""Conversions on a system that is not Linux: the same bytes, and the same promises, by the system's own means."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf
from reshard.core import system
from tests.campaigns.kills import Forked, Kills
from tests.tools.disk import tree

HIDDEN = "from tests.tools.not_linux import hide; hide()\n"
# As after the light install: nothing may need torch.
COMMAND = HIDDEN + "import sys; sys.modules['torch'] = None; from reshard.cli.main import main; main()"


def run(*arguments, code: str = COMMAND) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_commands_of_the_light_install_make_the_same_bytes(checkpoint, tmp_path):
    source = checkpoint("qwen3-moe", dtype=torch.bfloat16)
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, ep=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "hf")
    run("hf-to-mcore", source, tmp_path / "new" / "mcore", "--tp", 2, "--ep", 2)
    run("mcore-to-hf", tmp_path / "mcore", tmp_path / "new" / "hf")
    for name in ("mcore", "hf"):
        assert tree(tmp_path / "new" / name) == tree(tmp_path / name)
    again = "mcore-to-hf", tmp_path / "mcore", tmp_path / "new" / "hf", "--overwrite"
    run(*again)
    assert tree(tmp_path / "new" / "hf") == tree(tmp_path / "hf")
    assert [path.name for path in sorted((tmp_path / "new").iterdir())] == ["hf", "mcore"]
    run("check", tmp_path / "new" / "mcore")
    run("diff", source, tmp_path / "new" / "hf")
    [here, there] = (json.loads(run("inspect", path, "--json").stdout) for path in (source, tmp_path / "hf"))
    assert here["tensors"] == there["tensors"]
    run("digest", source)
    run("memory", source, "--trainer", "tp=2")


def test_what_is_hidden_is_missed_by_who_needs_it():
    """The control."""
    for code in (
        "import os; os.fdatasync(1)",
        "open('/proc/self/status')",
        "import ctypes; ctypes.CDLL(None).renameat2",
        "import sys; assert sys.platform == 'linux'",
        "import os; os.preadv(0, [memoryview(bytearray(1)) for _ in range(1)] + [bytes(1 << 31)], 0)",
    ):
        done = subprocess.run([sys.executable, "-c", HIDDEN + code], capture_output=True, text=True)
        assert done.returncode == 1, code


class Elsewhere(Forked):
    """A conversion in a process that is not on Linux."""

    prelude = HIDDEN


def test_random_kills_leave_a_whole_destination_or_none_on_another_system(checkpoint, tmp_path):
    kills = Kills(checkpoint("qwen3-moe", dtype=torch.bfloat16), tmp_path, 7, 1, Elsewhere)
    for _ in range(24):
        if kills.outcome.proves(4):
            break
        kills.run()
    assert kills.outcome.wrong == [] and kills.outcome.proves(4), str(kills.outcome)


def test_what_was_not_synced_is_done_again_where_nobody_knows_when_the_machine_was_started(tmp_path):
    """A machine that lost its power meanwhile may have lost what a process had only written."""
    code = """
import json, sys
from pathlib import Path
from reshard.storage.run.journal import Done, Journal
root = Path(sys.argv[1])
(root / "a").touch()
journal = Journal(root / "journal", root, {"a": 3}, {"one": ["a"]}, synced=sys.argv[2] == "synced")
journal.create(["a"])
if sys.argv[3] == "write":
    (root / "a").write_bytes(b"abc")
    journal.record([("one", Done("sum", 0))])
print(json.dumps([*journal.finished]))
"""
    for how, where, left in (
        ("written", "", ["one"]),
        ("written", HIDDEN, []),
        ("synced", HIDDEN, ["one"]),
    ):
        folder = tmp_path / f"{how} {bool(where)}"
        folder.mkdir()
        run(folder, how, "write", code=where + code)
        assert json.loads(run(folder, how, "read", code=where + code).stdout) == left, (how, where)


def test_two_directories_are_exchanged_by_macos_s_own_call(tmp_path, monkeypatch):
    """As far as that can be seen without it: what is called with what, and that others do without."""
    called = []

    class Library:
        def __init__(self, *_, **__) -> None:
            pass

        @staticmethod
        def renamex_np(*arguments) -> int:
            called.append(arguments)
            return 0

    monkeypatch.setattr(system.ctypes, "CDLL", Library)
    monkeypatch.setattr(system.sys, "platform", "darwin")
    assert system.exchange(Path("a"), Path("b")) and called == [(b"a", b"b", 2)]
    monkeypatch.setattr(system.sys, "platform", "freebsd14")
    assert not system.exchange(Path("a"), Path("b")) and len(called) == 1


def test_a_mac_is_asked_to_empty_the_disk_s_own_memory(tmp_path, monkeypatch):
    import fcntl

    asked, synced = [], []
    monkeypatch.setattr(system.sys, "platform", "darwin")
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(fcntl, "fcntl", lambda *arguments: asked.append(arguments))
    system.sync_data(7)
    assert asked == [(7, 51)] and not synced

    def cannot(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "fcntl", cannot)
    system.sync_data(7)
    assert synced == [7]

    def fails(*_):
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(fcntl, "fcntl", fails)
    with pytest.raises(OSError, match="broken"):
        system.sync_data(7)
    assert synced == [7], "what was lost would be reported once"


def test_no_two_files_of_a_checkpoint_differ_by_case_alone(checkpoint, tmp_path):
    """As on a Mac's file system, which takes them for one."""
    hf_to_mcore(checkpoint("qwen3-moe", dtype=torch.bfloat16), tmp_path / "mcore", MegatronLayout(tp=2, ep=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "hf", max_shard_size="200KB")
    for name in ("mcore", "hf"):
        names = [*tree(tmp_path / name)]
        assert len({one.casefold() for one in names}) == len(names) > 3


@pytest.mark.parametrize("sizes", [[3, 1 << 30, 5], [1 << 31]])
def test_a_mac_reads_no_more_at_once_than_it_can(sizes, monkeypatch):
    class Long:
        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, part: slice) -> "Long":
            return Long(min(self.size, part.stop))

    monkeypatch.setattr(system.sys, "platform", "darwin")
    assert 0 < sum(map(len, system._at_once([Long(size) for size in [0, *sizes]]))) <= 1 << 30
