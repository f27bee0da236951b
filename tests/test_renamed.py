"""Public names of an earlier release work for one more release, with a note, and mean what they meant."""

import json
import warnings

import pytest
from click.testing import CliRunner

import reshard
from reshard.cli.main import cli
from reshard.megatron.layout import LONG_NAMES, MegatronLayout
from reshard.models.model import Model
from tests.checkpoints import VARIANTS


def model():
    return Model.from_hf(VARIANTS["qwen3"].to_dict() | {"architectures": ["Qwen3ForCausalLM"]})


# An old call, the new one, and the new name that the warning mentions.
CALLS = {
    "first_stage_layers": (
        lambda: MegatronLayout(pp=2, first_stage_layers=1, last_stage_layers=3),
        lambda: MegatronLayout(
            pp=2, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3
        ),
        "num_layers_in_first_pipeline_stage",
    ),
    "embedding_in_split": (
        lambda: MegatronLayout(pp=2, embedding_in_split=True, loss_in_split=True),
        lambda: MegatronLayout(
            pp=2, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
        ),
        "account_for_embedding_in_pipeline_split",
    ),
    "pipeline": (
        lambda: MegatronLayout(pp=2, pipeline="Et|tL"),
        lambda: MegatronLayout(pp=2, pipeline_model_parallel_layout="Et|tL"),
        "pipeline_model_parallel_layout",
    ),
    "vocab_divisible_by": (
        lambda: reshard.estimate_memory(model(), vocab_divisible_by=8),
        lambda: reshard.estimate_memory(model(), make_vocab_size_divisible_by=8),
        "make_vocab_size_divisible_by",
    ),
    "layout.pipeline": (
        lambda: MegatronLayout(pp=2, pipeline_model_parallel_layout="Et|tL").pipeline,
        lambda: "Et|tL",
        "pipeline_model_parallel_layout",
    ),
}

SIZES = ["--trainer", "tp=2,pp=2", "--engine", "tp=2"]
# An old command line and the new one; both print the same.
COMMANDS = {
    "plan --from --to": (["plan", "--from", "tp=2,pp=2", "--to=tp=2"], ["plan", *SIZES]),
    "plan pipeline=": (
        ["plan", "--trainer", "pp=2,pipeline=Et*3|,tL", "--engine", "tp=2"],
        ["plan", "--trainer", "pp=2,pipeline_model_parallel_layout=Et*3|,tL", "--engine", "tp=2"],
    ),
    "memory --first-stage-layers": (
        ["memory", "--pp", "2", "--first-stage-layers", "1"],
        ["memory", "--pp", "2", "--num-layers-in-first-pipeline-stage", "1"],
    ),
    "memory --pipeline-layout": (
        ["memory", "--pp", "2", "--pipeline-layout", "Et*3|tL"],
        ["memory", "--trainer", "pp=2,pipeline_model_parallel_layout=Et*3|tL"],
    ),
}


@pytest.mark.parametrize(("old", "new", "name"), CALLS.values(), ids=CALLS)
def test_an_old_name_in_python_warns_and_means_what_it_meant(old, new, name):
    with pytest.warns(DeprecationWarning, match=name) as caught:
        value = old()
    assert [warning.filename for warning in caught] == [__file__] * len(caught), "Python shows it there"
    with warnings.catch_warnings(action="error"):
        assert value == new()


@pytest.mark.parametrize(("old", "new"), COMMANDS.values(), ids=COMMANDS)
def test_an_old_option_is_noted_and_means_what_it_meant(old, new, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(VARIANTS["qwen3"].to_dict() | {"architectures": ["Qwen3ForCausalLM"]}))
    results = [
        CliRunner().invoke(cli, [*arguments, "--model", str(path), "--json"]) for arguments in (old, new)
    ]
    for result in results:
        assert result.exit_code == 0, result.output
    reports = [json.loads(result.stdout) for result in results]
    for report in reports:
        for rank in report.get("ranks", []) if isinstance(report.get("ranks"), list) else []:
            rank.pop("plan_seconds")
        report.pop("plan_seconds", None)
    assert reports[0] == reports[1]
    assert "the old name goes with the next release" in results[0].stderr
    assert "old name" not in results[1].stderr


@pytest.mark.parametrize("name", LONG_NAMES)
def test_a_layout_takes_megatrons_own_names(name, tmp_path):
    layout = MegatronLayout(**{name: 2})
    assert layout == MegatronLayout(**{LONG_NAMES[name]: 2}) != MegatronLayout()
    with pytest.raises(reshard.ReshardError, match="give one of the two"):
        MegatronLayout(**{name: 2, LONG_NAMES[name]: 2})
    with pytest.raises(TypeError, match="unexpected keyword argument 'tensor_parallel'"):
        MegatronLayout(tensor_parallel=2)


def test_sizes_are_given_as_options_or_as_one_list():
    done = CliRunner().invoke(cli, ["memory", "--model", "x", "--tp", "2", "--trainer", "tp=2"])
    assert done.exit_code == 2 and "--trainer and --tp both give sizes" in done.output
