"""Parallel sizes under Megatron's own names, as options and as one list."""

import pytest
from click.testing import CliRunner

import reshard
from reshard.cli.main import cli
from reshard.megatron.layout import LONG_NAMES, MegatronLayout


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
