"""docs/reference/json.md names every field that a command prints with --json."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from reshard.delta import save
from reshard.parity import RolloutMonitor
from tests.lora.test_lora_files import adapter
from tests.starting.warm import python_of_trainer

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "json.md").read_text(
    encoding="utf-8"
)
NESTED = {"deltas", "differences", "ranks", "stages", "layouts"}  # whose items' fields the page lists, too


def documented(heading: str) -> set[str]:
    section = next(part for part in PAGE.split("\n## ") if part.startswith(heading))
    return set(re.findall(r"`([a-z_]+)`", section))


def printed(*arguments: object) -> dict:
    command = [python_of_trainer(), "-m", "reshard", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True).stdout)


def fields_of(document: dict) -> set[str]:
    fields = set(document)
    for name in (name for name in NESTED & fields if isinstance(document[name], list)):
        for item in document[name]:
            fields |= set(item)
    return fields


@pytest.mark.parametrize(
    "heading, arguments",
    [
        ("hf-to-mcore", ("hf-to-mcore", "{hf}", "{new}")),
        ("hf-to-mcore", ("mcore-to-hf", "{mcore}", "{new}")),
        ("hf-to-mcore", ("mcore-to-mcore", "{mcore}", "{new}", "--model-class", "hybrid")),
        ("hf-to-mcore", ("lora-to-peft", "{lora}", "{new}")),
        ("hf-to-mcore", ("lora-merge", "{hf}", "{lora}", "{new}")),
        ("hf-to-mcore", ("delta", "apply", "{hf}", "{chain}", "{new}")),
        ("delta save", ("delta", "save", "{other}", "{hf}", "{chain}")),
        ("delta show", ("delta", "show", "{chain}")),
        ("diff", ("diff", "{hf}", "{other}")),
        ("check", ("check", "{mcore}")),
        ("digest", ("digest", "{mcore}")),
        ("diff --digest", ("diff", "--digest", "{hf}", "{other}")),
        ("inspect", ("inspect", "{mcore}")),
        ("plan", ("plan", "--model", "{hf}", "--trainer", "tp=2", "--engine", "tp=2")),
        ("memory", ("memory", "--model", "{hf}", "--tp", "2", "--gpus", "4", "--gpu-memory", "H100")),
        ("memory", ("memory", "--model", "{hf}", "--fit", "--gpus", "4", "--gpu-memory", "H100")),
        ("monitor", ("monitor", "{run}")),
        ("parity", ("parity", "{hf}", "{mcore}", "--random", "1", "--lengths", "8", "--dtype", "fp32")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_every_printed_field_is_in_the_page(converted, tmp_path, heading, arguments):
    (hf, mcore), (other, _) = converted("qwen3-moe")
    places = {"hf": hf, "mcore": mcore, "other": other, "new": tmp_path / "new", "chain": tmp_path / "chain"}
    if arguments[0] == "delta" and arguments[1] != "save":
        save(hf, other, tmp_path / "chain")
    if "{run}" in arguments:
        places["run"] = tmp_path / "run.jsonl"
        RolloutMonitor(places["run"]).step([[-1.0, -2.0]], [[-1.01, -2.0]], versions=[3], version=4)
    if any("{lora}" in argument for argument in arguments):
        places["lora"] = adapter(hf, tmp_path / "lora", target_modules=["o_proj"])
    fields = fields_of(printed(*(argument.format(**places) for argument in arguments)))
    assert len(fields) > 4 and fields - documented(heading) == set()
