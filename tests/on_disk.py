"""The commands that need no torch, each once, in any environment that reshard is installed in.

As a program (``python tests/on_disk.py SOURCE FOLDER``) it needs nothing but reshard.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from subprocess import run

LAYOUT = ["--tp", "2", "--pp", "2", "--ep", "2", "--etp", "1"]


def use_disk_commands(python: str | Path, source: Path, folder: Path) -> None:
    """Run them with this Python on a Hugging Face checkpoint with experts, into ``folder/mcore``
    and ``folder/hf``.

    AssertionError where one fails, or says that something differs or is damaged.
    """

    def reshard(*arguments: str | Path) -> dict:
        done = run(
            [str(python), "-m", "reshard", *map(str, arguments), "--json"],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=600,
        )
        assert not done.returncode, f"{arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}"
        return json.loads(done.stdout)

    mcore, back = folder / "mcore", folder / "hf"
    reshard("hf-to-mcore", source, mcore, *LAYOUT, "--no-sync")
    reshard("mcore-to-hf", mcore, back, "--no-sync")
    assert reshard("inspect", mcore)["parameters"] == reshard("inspect", source)["parameters"]
    assert reshard("diff", source, back)["equal"] and reshard("diff", mcore, back)["equal"]
    assert reshard("check", mcore)["ok"] and reshard("check", back)["ok"]
    planned = reshard("plan", "--model", source, "--trainer", "tp=2,ep=2,etp=1,dp=1", "--engine", "tp=2,ep")
    assert len(planned["ranks"]) == 2 and planned["memory_seconds"] > 0
    damaged = next(mcore.rglob("*.distcp"))
    kept = damaged.read_bytes()
    damaged.write_bytes(kept[:-200] + bytes([kept[-200] ^ 1]) + kept[-199:])
    wrong = run([str(python), "-m", "reshard", "check", str(mcore)], capture_output=True, cwd=folder)
    assert wrong.returncode == 1, "the control: a bit that has turned is found"
    damaged.write_bytes(kept)


def files_of(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder."""
    return {
        str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


if __name__ == "__main__":
    use_disk_commands(sys.executable, *(Path(argument).resolve() for argument in sys.argv[1:]))
