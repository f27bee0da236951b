"""The commands that need no torch, each once, in any environment that reshard is installed in.

As a program (``python tests/tools/on_disk.py SOURCE FOLDER``) it needs nothing but reshard.
"""

import json
import random
import sys
from array import array
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from subprocess import run

RANK = 2  # of the adapter
LAYOUT = ["--tp", "2", "--pp", "2", "--ep", "2", "--etp", "1"]


def commands(python: str | Path, folder: Path) -> Callable[..., dict]:
    """A function that runs a command of this Python's reshard in a folder and returns its JSON; AssertionError where
    it fails."""

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

    return reshard


def use_disk_commands(python: str | Path, source: Path, folder: Path) -> None:
    """Run them with this Python on a Hugging Face checkpoint with experts, into ``folder/mcore``
    and ``folder/hf``.

    AssertionError where one fails, or says that something differs or is damaged.
    """

    reshard = commands(python, folder)
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


def use_adapter_commands(python: str | Path, source: Path, folder: Path) -> None:
    """Run those of adapters on one of this checkpoint's queries and values.

    AssertionError where one fails, or says that something differs.
    """
    reshard, own = commands(python, folder), folder / "adapter"
    config = json.loads((source / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    rows = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    header, numbers, choose = {}, array("f"), random.Random(0)
    for layer in range(config["num_hidden_layers"]):
        for name, out in rows.items():
            for matrix, shape in (("A", [RANK, hidden]), ("B", [out, RANK])):
                begin = 4 * len(numbers)
                numbers.extend(choose.gauss(0, 0.1) for _ in range(shape[0] * shape[1]))
                header[f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{matrix}.weight"] = {
                    "dtype": "F32", "shape": shape, "data_offsets": [begin, 4 * len(numbers)]
                }  # fmt: skip
    own.mkdir()
    text = json.dumps(header).encode()
    (own / "adapter_model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + numbers.tobytes()
    )
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 5, "target_modules": list(rows)}
    (own / "adapter_config.json").write_text(json.dumps(described))
    reshard("lora-to-megatron", own, folder / "lora", "--hf-config", source, "--no-sync")
    reshard("lora-to-peft", folder / "lora", folder / "peft", "--hf-config", source, "--no-sync")
    assert reshard("diff", own, folder / "peft", "--hf-config", source)["equal"]
    for adapter, merged in ((own, "merged"), (folder / "lora", "merged-2")):
        reshard("lora-merge", source, adapter, folder / merged, "--no-sync")
    assert reshard("diff", folder / "merged", folder / "merged-2")["equal"]
    same = run(
        [str(python), "-m", "reshard", "diff", str(source), str(folder / "merged")], capture_output=True
    )
    assert same.returncode == 1, "the control: the sum is another model"


def files_of(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder."""
    return {
        str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


if __name__ == "__main__":
    given = [Path(argument).resolve() for argument in sys.argv[1:]]
    use_disk_commands(sys.executable, *given)
    use_adapter_commands(sys.executable, *given)
