"""The matrix of versions runs tests that exist, also after files are split and tests renamed."""

import re
from pathlib import Path

import pytest

from tests.campaigns import matrix, matrix_checks


@pytest.mark.parametrize(
    "name",
    [
        "LIVE",
        "LIVE_BEFORE_0_19",
        "REFIT",
        "QUANTIZED",
        "ADAPTERS",
        "TRAINERS",
        "SERVED",
        "SGLANG",
        "SGLANG_OF_TRAINERS",
    ],
)
def test_every_file_and_every_word_of_a_selection_is_found(name):
    arguments = matrix_checks.expanded(getattr(matrix, name))
    files = [Path(argument) for argument in arguments if argument.endswith(".py")]
    checkpoints = matrix.REPOSITORY / "tests" / "tools" / "checkpoints.py"  # its variants are names of cases
    text = "".join(file.read_text() for file in (*files, checkpoints))
    expression = arguments[arguments.index("-k") + 1] if "-k" in arguments else ""
    words = set(re.split(r"\s+", expression)) - {"", "and", "or", "not"}
    assert files and [word for word in words if word not in text] == []
