"""Checkpoints that a test may spoil, and calls that have to refuse them soon and with little memory."""

import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from reshard import MegatronLayout, ReshardError, diff, hf_to_mcore, inspect, mcore_to_hf
from tests.campaigns import fuzz
from tests.storage.test_faults import refused

DEEP = "[" * 100_000 + "]" * 100_000
KEY = "decoder.final_layernorm.weight"


@pytest.fixture
def source(checkpoint, tmp_path):
    """A Hugging Face checkpoint in one file that a test may spoil."""
    return Path(shutil.copytree(checkpoint("qwen3-moe", dtype=torch.bfloat16), tmp_path / "source"))


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    """A Megatron checkpoint and the way back, which nobody spoils."""
    folder = tmp_path_factory.mktemp("converted")
    hf_to_mcore(checkpoint("qwen3-moe", dtype=torch.bfloat16), folder / "mcore", MegatronLayout(tp=2))
    mcore_to_hf(folder / "mcore", folder / "back")
    return folder


@pytest.fixture
def mcore(converted, tmp_path):
    """A Megatron checkpoint that a test may spoil."""
    return Path(shutil.copytree(converted / "mcore", tmp_path / "mcore"))


def bounded(call, message, seconds=10):
    """The call is refused with one sentence that matches, within the fuzzer's memory and so many
    seconds of a core."""

    def work(say):
        start = time.process_time()
        try:
            with fuzz.limited():
                call()
            said = "nothing was wrong"
        except ReshardError as error:
            said = str(error)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        say([said, time.process_time() - start])

    words = fuzz.forked(work, 6 * seconds)
    assert words and words[0][1] < seconds, f"no answer in {seconds} s"
    assert re.search(message, words[0][0]) and "\n" not in words[0][0], words[0][0]


def all_refuse(mcore, tmp_path, message, good=None):
    """Each command that reads a Megatron checkpoint refuses this one."""
    refused(lambda: inspect(mcore), message)
    refused(lambda: mcore_to_hf(mcore, tmp_path / "out"), message)
    refused(lambda: diff(mcore, good or mcore), message)
    assert {p.name for p in tmp_path.iterdir()} <= {"source", "mcore"}
