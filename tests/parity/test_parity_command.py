"""`reshard parity`: prompts, exit codes, what it prints and the page that it writes."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from reshard import ReshardError, hf_to_mcore
from reshard.cli.main import cli
from reshard.parity.prompts import check_prompts, random_prompts, read_prompts, tokenizer_of
from reshard.parity.systems.huggingface import HuggingFace
from tests.starting.ranks import run_to_the_end, torchrun
from tests.starting.warm import python_of_trainer
from tests.tools.checkpoints import make, with_config
from tests.tools.html_pages import Parsed, assert_stands_alone
from tests.tools.parity_runs import parity_command, with_tokenizer


def test_prompts_are_read_and_checked(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('{"tokens": [1, 2, 3]}\n\n{"text": "ab"}\nplain words\n', encoding="utf-8")
    assert read_prompts(file, lambda: lambda text: [ord(c) for c in text])[:2] == [[1, 2, 3], [97, 98]]
    for text, sentence in (("", "has no prompts"), ("words", "is text, and neither system has a tokenizer"),
                           ("{1", "begins like JSON"),
                           ('{"tokens": "1"}', "has neither text nor a list of tokens")):  # fmt: skip
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ReshardError, match=sentence):
            read_prompts(file, lambda: None)
    with pytest.raises(ReshardError, match="cannot read the prompts"):
        read_prompts(tmp_path / "absent", lambda: None)
    assert {len(p) for p in random_prompts(4, 10, [3, 5])} == {3, 5}
    for prompts, sentence in (([], "no prompts"), ([[1]], "nothing to predict"),
                              ([[1, 2], []], "prompt 1 has 0 tokens"),
                              ([[1, 10]], "token 10, which a vocabulary of 10")):  # fmt: skip
        with pytest.raises(ReshardError, match=sentence):
            check_prompts(prompts, 10, 100)


def test_the_command_exits_0_within_the_limits(megatron_of):
    hf, mcore = megatron_of("qwen3")
    options = ("--random", 2, "--lengths", 9)
    done = parity_command(hf, mcore, *options, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["overall"]["tokens"] == 16, done.stderr
    command = [*torchrun(2, python_of_trainer()), "-m", "reshard", "parity", hf, mcore, *options, "--tp", 2]
    done = run_to_the_end(command, 600)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "Megatron-Core" in done.stdout and done.stdout.count("  mean_abs") == 1, (
        done.stderr
    )
    limits = "limits: max_abs <= 0.001, mean_abs <= 0.0001, token_mult_prob_error <= 1.0001, kl <= 1e-06"
    assert lines[-2:] == [limits, "A and B hold the same model: every figure is within its limit"]


@pytest.mark.parametrize(("option", "said"), [
    (("--engine", "tp=2"), "engine TP2 is for a system with vllm: or sglang: before it: neither has"),
    (("--hf-config", "."), "hf_config . is for a Megatron checkpoint: neither"),
    (("--ignore-config-field", "zzz"), "zzz is to be ignored, but no such field is in"),
    (("--locate",), "must be a Hugging Face directory and a Megatron checkpoint: only those can be compared inside"),
    (("--tp", "2"), "layout TP2 is for a Megatron checkpoint: neither"),
    (("--quantization", "fp8_per_block"), "quantization fp8_per_block is for a system with vllm: before it"),
])  # fmt: skip
def test_an_option_of_a_system_that_is_not_there_is_refused(option, said, checkpoint):
    """Without its prefix a vLLM that was meant is a transformers model, which agrees with itself."""
    hf = str(checkpoint("qwen3"))
    done = CliRunner().invoke(cli, ["parity", hf, hf, *option])
    assert done.exit_code == 1 and said in str(done.exception or done.output)


def test_a_directory_that_lacks_weights_is_refused_before_they_are_drawn_at_random(checkpoint, tmp_path):
    whole = checkpoint("qwen3")
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    file = broken / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ReshardError, match=r"transformers finds no model\.layers\.1\.mlp\.up_proj\.weight in"
    ):
        _ = HuggingFace(broken, "fp32").module
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(ReshardError, match="transformers cannot load .*broken: .*header"):
        _ = HuggingFace(broken, "fp32").module
    assert HuggingFace(whole, "fp32").module.config.model_type == "qwen3"


def test_code_that_lies_beside_the_weights_is_not_executed(megatron_of, tmp_path):
    """Of Ling 2.0, which transformers has no class for, under the name that it is published by."""
    hf, mcore = megatron_of("ling")
    done = parity_command(with_config(hf, tmp_path / "hf", model_type="bailing_moe"), mcore)
    assert done.returncode and "contains custom code which must be executed" in done.stderr
    assert "Do you wish to run" not in done.stdout + done.stderr


def test_text_prompts_use_the_tokenizer_that_both_have(megatron_of, tmp_path):
    hf, plain = megatron_of("qwen3")
    one = with_tokenizer(hf, tmp_path / "one", ["weights", "move", "fast"])
    other = with_tokenizer(hf, tmp_path / "other", ["weights", "fast", "move"])
    hf_to_mcore(one, tmp_path / "mcore")
    (tmp_path / "prompts").write_text(
        'weights move fast move\n{"text": "move weights"}\n{"tokens": [5, 6, 7]}\n', encoding="utf-8"
    )
    done = parity_command("--prompts", tmp_path / "prompts", "--json", one, tmp_path / "mcore")
    assert done.returncode == 0 and [p["tokens"] for p in json.loads(done.stdout)["prompts"]] == [3, 1, 2], (
        done.stderr
    )
    assert tokenizer_of([str(tmp_path / "mcore")])("weights move fast move") == [1, 2, 3, 2]
    assert tokenizer_of([str(hf), str(plain)]) is None
    with pytest.raises(
        ReshardError, match="the tokenizers of .*one and .*other differ: they do not hold the same model"
    ):
        tokenizer_of([str(one), "vllm:" + str(other)])


def test_the_page_stands_alone_and_shows_every_token(megatron_of, tmp_path):
    hf, _ = megatron_of("qwen3")
    words = [f"</script><b>{i}" for i in range(999)]
    one = with_tokenizer(hf, tmp_path / "one", words)
    other = with_tokenizer(make(tmp_path / "plain", "qwen3", seed=1), tmp_path / "a<b", words)
    done = parity_command(one, other, "--random", 3, "--lengths", 9, "--html", tmp_path / "r.html")
    assert done.returncode == 1 and "Error: A and B do not hold the same model: max_abs is " in done.stderr, (
        done.stderr
    )
    assert "limits: max_abs <= 0.001, mean_abs <= 0.0001" in done.stdout and "A and B hold" not in done.stdout
    parsed = Parsed((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert_stands_alone(parsed)
    assert "a<b" in parsed.text and "max_abs is " in parsed.text and "beyond the limits" in parsed.text
    scatter, histogram, positions = parsed.charts.roots
    for drawn in (scatter, positions):
        data = drawn.renderers[-1].data_source.data
        assert list(zip(data["prompt"], data["token"])) == [(p, t) for p in range(3) for t in range(1, 9)]
        assert all(
            text == json.dumps("?" if i == 0 else words[i - 1]) for i, text in zip(data["id"], data["text"])
        )
        assert np.isfinite(data["a"]).all() and (data["a"] != data["b"]).all()
    assert histogram.renderers[-1].data_source.data["tokens"].sum() == 24
    largest = max(abs(data["a"] - data["b"]))
    assert f"max_abs is {largest:.6g}, the limit is 0.001" in done.stderr


@pytest.mark.parametrize("place", ["a directory", "no permission", "a full disk"])
def test_a_page_that_cannot_be_written_does_not_lose_the_result(place, megatron_of, tmp_path):
    hf, _ = megatron_of("qwen3")
    page = tmp_path / "page.html"
    if place == "a directory":
        page.mkdir()
    elif place == "no permission":
        page.symlink_to("/proc/version")  # which nobody may write, root neither
    else:
        page.symlink_to("/dev/full")  # opens, and fails when it is written
    done = parity_command(hf, hf, "--random", 1, "--lengths", 9, "--html", page, "--json")
    if place == "a directory":
        assert done.returncode == 2 and "is a directory" in done.stderr
    elif place == "no permission":
        assert (
            done.returncode == 1
            and f"--html: cannot write {page}" in done.stderr
            and list(json.loads(done.stdout)) == ["error", "exit_code"]
        )
    else:
        assert done.returncode == 1 and f"Error: --html: cannot write {page}: No space left" in done.stderr
        assert json.loads(done.stdout)["ok"] and json.loads(done.stdout)["overall"]["tokens"] == 8


@pytest.mark.parametrize("arguments", [
    ("--prompts", "x", "--random", "2"), ("--lengths", "1"), ("--lengths", "a"), ("--random", "0"),
    ("--engine", "tp=0"), ("--engine", "pp=2"), ("--engine", "ep=4"), ("--no-routing", "--max-routing-margin", "0.1"),
    ("--seed", "-1"),
])  # fmt: skip
def test_a_mistake_in_the_command_line_exits_2(arguments):
    assert CliRunner().invoke(cli, ["parity", "a", "b", *arguments]).exit_code == 2


def test_locate_refuses_vllm():
    result = CliRunner().invoke(cli, ["parity", "a", "vllm:b", "--locate"])
    assert result.exit_code == 2 and "--locate looks inside transformers and Megatron-Core" in result.output


def test_lengths_of_prompts_that_are_given_are_refused():
    result = CliRunner().invoke(cli, ["parity", "a", "b", "--prompts", "c", "--lengths", "9"])
    assert result.exit_code == 2 and "--lengths is for random prompts" in result.output
