"""The flags file suits the version of Megatron-LM that reads it. `tests/campaigns/matrix.py` asks the parsers
of all versions."""

import json
import shlex
import shutil

import pytest
from click.testing import CliRunner

from reshard import MegatronLayout, ReshardError, diff, hf_to_mcore
from reshard.cli.main import cli
from reshard.megatron.flags import NEWEST, arguments_for, command_line, version_of
from tests.tools.flags import cases, lines_for


def names(line: str) -> set[str]:
    return {word for word in shlex.split(line) if word.startswith("--")}


@pytest.mark.parametrize(("version", "missing"), [
    ("0.12", {"--padded-vocab-size", "--rope-type"}), ("0.13", {"--padded-vocab-size", "--rope-type"}), ("0.14", set()),
    ("0.19", set()), ("0.20", set()),
])  # fmt: skip
def test_a_version_gets_the_flags_that_it_knows_and_all_of_them(version, missing):
    """What is missing is just what the parsers of these versions refuse."""
    number, newest, seen = version_of(version), 0, set()
    for args in cases():
        try:
            mine = names(" ".join(command_line(args, number)))
        except ReshardError:
            continue
        all_of_them = names(" ".join(command_line(args)))
        newest += 1
        seen |= all_of_them - mine
        assert all_of_them - mine <= missing and mine - all_of_them <= {"--rotary-scaling-factor"}
    assert seen == missing and newest > 70


def test_rope_without_yarn_stays_so_where_every_latent_attention_has_yarn():
    for args in cases():
        if args.get("multi_latent_attention") and not args.get("experimental_attention_variant"):
            args = args | {"max_position_embeddings": 4096}  # which is YaRN's original length there
            older = (
                arguments_for(args, (0, 13)) if args.get("pipeline_model_parallel_layout") is None else args
            )
            if args["rope_type"] == "rope":
                assert older.get("rotary_scaling_factor", 1.0) == 1.0
            else:
                assert older["rotary_scaling_factor"] == args["rotary_scaling_factor"] != 1.0


@pytest.mark.parametrize(("version", "what", "first"), [
    ("0.18", "YaRN without multi-latent attention", "0.19"), ("0.12", "pipeline layouts given as a string", "0.13"),
    ("0.13", "this YaRN of multi-latent attention", "0.14"),
    ("0.18", "attention to the tokens that an indexer chooses", "0.19"),
])  # fmt: skip
def test_what_a_version_cannot_be_told_is_refused_with_the_first_that_can(version, what, first):
    refused = [sentence for sentence in lines_for(version)[1] if what in sentence]
    assert refused and all(f"{first} is the first that has" in sentence for sentence in refused)
    assert not any(what in sentence for sentence in lines_for(first)[1])


@pytest.mark.parametrize("text", ["0.11", "0.9.9", "thirteen", "0", "", "0.13 ", "0.99999"])
def test_other_versions_are_refused(text):
    with pytest.raises(ReshardError, match="is not a version from 0.12 on, such as 0.20"):
        version_of(text)


def test_newer_versions_get_the_newest_flags():
    assert version_of("0.20.1") == version_of("0.31") == version_of("1.0.0") == version_of(None) == NEWEST
    assert version_of("0.13") == version_of("0.13.1rc0") == (0, 13)


def test_only_the_flags_file_follows_the_version(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint("deepseek-v3"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    done = CliRunner().invoke(
        cli, ["hf-to-mcore", str(source), str(tmp_path / "old"), "--megatron-version", "0.13", "--tp", "2"]
    )
    assert done.exit_code == 0, done.output
    hf_to_mcore(source, tmp_path / "new", MegatronLayout(tp=2))
    old, new = ((tmp_path / side / "megatron_flags.txt").read_text() for side in ("old", "new"))
    assert names(new) - names(old) == {"--padded-vocab-size", "--rope-type"} and "--vocab-size" in old
    assert diff(tmp_path / "old", tmp_path / "new").equal
    assert (tmp_path / "old/release/common.pt").read_bytes() == (
        tmp_path / "new/release/common.pt"
    ).read_bytes()


def test_a_model_that_a_version_cannot_be_told_of_leaves_nothing(checkpoint, tmp_path):
    with pytest.raises(
        ReshardError, match="Megatron-LM 0.14 has no arguments for YaRN without multi-latent attention"
    ):
        hf_to_mcore(checkpoint("qwen3-yarn"), tmp_path / "out", megatron_version="0.14")
    assert not (tmp_path / "out").exists()
