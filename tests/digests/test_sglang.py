"""The digest of what SGLang serves: that of the checkpoint that it has loaded."""

import torch

from tests import install_sglang_cpu
from tests.digests.on_disk import expected
from tests.starting import warm
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make


def test_an_sglang_has_the_digest_of_its_checkpoint(tmp_path):
    directories = []
    for variant in ("qwen3-tied", "qwen3-moe"):
        make(tmp_path / variant, variant, torch.bfloat16)
        directories.append(str(tmp_path / variant))
    [outcomes] = run_on_ranks(
        1, "digests", directories, module="digest_sglang_on_cpu",
        python=warm.python_of_sglang(), environment=install_sglang_cpu.environment_of_engine(),
    )  # fmt: skip
    for directory, outcome in zip(directories, outcomes, strict=True):
        text, numbers = expected(tmp_path / directory)
        assert outcome["given"] == [text, numbers] and outcome["bf16"] == text
        assert outcome["changed"] != text, "the control"
        assert "holds a half-written model" in outcome["half"]
        assert outcome["refused"] == "it has no time" and outcome["secrets"]
