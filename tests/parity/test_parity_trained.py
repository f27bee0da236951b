"""Parity of a trained model: rounding passes, faults of one percent and at far positions fail."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from reshard import MegatronLayout, hf_to_mcore
from tests.starting.ranks import run_on_ranks
from tests.starting.warm import python_of_trainer
from tests.tools.html_pages import Parsed
from tests.tools.parity_runs import change_config, parity_command, run, with_a_fault


@pytest.fixture(scope="module")
def trained_pair(trained, tmp_path_factory):
    """A trained model with its tokenizer, and its Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("trained-pair")
    shutil.copytree(trained, folder / "hf")
    change_config(folder / "hf", unk_token_id=None)
    hf_to_mcore(folder / "hf", folder / "mcore", MegatronLayout(pp=2), transformer_impl="local")
    return folder / "hf", folder / "mcore"


TEXT = (
    "The weights of a language model live in four places, and every one of them has names of its own.",
    "def add(a, b):\n    return a + b\n\nassert add(2, 3) == 5",
    "Paris is the capital of France, and Rome is the capital of Italy.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987",
) * 3  # fmt: skip


def test_in_bf16_rounding_passes_and_a_fault_of_one_percent_fails(trained_pair, tmp_path):
    hf, mcore = trained_pair
    (tmp_path / "prompts").write_text(
        "\n".join(json.dumps({"text": text}) for text in TEXT), encoding="utf-8"
    )
    options = [
        "--dtype",
        "bf16",
        "--locate",
        "--json",
        "--prompts",
        tmp_path / "prompts",
        "--html",
        tmp_path / "page.html",
    ]
    done = parity_command(hf, mcore, *options)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], done.stderr
    assert report["overall"]["mean_abs"] > 0.01, "in bf16 the two do differ"
    assert 0.5 < report["rounding"]["ratio"] < report["rounding"]["high"] < 1.5
    assert report["rounding"]["in_fp32"] < 0.01 and report["covered"] == "positions up to 8,191 of 8,192"
    page = Parsed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert json.dumps(TEXT[2]) in page.cells, "prompts as text"

    name = "model.layers.5.self_attn.o_proj.weight"
    wrong = with_a_fault(hf, tmp_path / "wrong", name, 1.01)
    done = parity_command(wrong, mcore, *options, "--no-reach")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and "this is not rounding" in done.stderr, done.stderr
    assert report["rounding"]["high"] < 1.5, "bf16 alone does not show it"
    sentence = report["located"]["sentence"]
    assert "the attention of layer 5 diverges first" in sentence and name in sentence
    page = Parsed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert f"Where they diverge: {sentence}." in page.text


def test_locate_says_so_if_only_rounding_exceeds_a_limit(trained_pair):
    hf, mcore = trained_pair
    done = parity_command(hf, mcore, "--dtype", "bf16", "--random", 3, "--max-mean-abs", 0.01, "--locate")
    assert done.returncode == 1 and "mean_abs is 0." in done.stderr, done.stderr
    assert (
        "no module's output diverges for the worst prompt: in each the two differ by no more than rounding"
        in done.stdout
    )


def test_too_few_tokens_fail(megatron_of):
    hf, mcore = megatron_of("qwen3")
    done = parity_command(hf, mcore, "--dtype", "bf16", "--random", 1)
    assert done.returncode == 1
    assert "A and B cannot be held against the limits: 15 tokens are too few" in done.stderr


def test_a_fault_at_far_positions_only_fails(trained_pair):
    hf, mcore = trained_pair
    (other,) = run_on_ranks(1, "slower", str(hf), str(mcore), module="parity_on_cpu")
    assert other["overall"]["max_abs"] < 1e-3, "not at the first 32 positions"
    assert other["exceeded"] and all(s.startswith("at positions up to 8,191") for s in other["exceeded"])
    assert run(hf, mcore, {}, prompts=2, lengths=(32,))["ok"]


def test_the_example_repository_gates_a_trained_checkpoint(trained_pair, tmp_path):
    example = Path(__file__).parent.parent.parent / "examples" / "ci"
    shutil.copytree(example, tmp_path / "ci")
    command = [
        python_of_trainer(),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path / "ci" / "tests"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MODEL": str(trained_pair[0])},
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout[-3000:]
    workflow = yaml.safe_load((example / ".github" / "workflows" / "parity.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["parity"]["steps"][-1]["run"] == "pytest tests/parity/test_parity.py"
