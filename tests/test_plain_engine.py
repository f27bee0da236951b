"""A new engine has to give five things: then it is refitted bit for bit, and refuses to serve
weights that are not whole."""

import ast
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make
from tests.ranks import free_port, run_on_ranks

ENGINES = Path(__file__).parent.parent / "reshard" / "engines"


@pytest.mark.parametrize(("variant", "together"), [("llama-rope-tied", True), ("qwen2", False)])
def test_an_engine_of_five_members_is_refitted_from_fsdp_shards(variant, together, tmp_path):
    checkpoints = [str(make(tmp_path / str(seed), variant, torch.bfloat16, seed=seed)) for seed in (0, 1)]
    sides = {
        "trainer": 2,
        "engine": 2 if together else 1,
        "together": together,
        "folder": str(tmp_path),
        "port": free_port(),
    }
    results = run_on_ranks(
        2 if together else 3, "refit", sides, {"shard": 2}, checkpoints, module="refit_plain_engine_on_cpu"
    )
    engines = [result for result in results if result["outcomes"]]
    assert len(engines) == sides["engine"]
    for engine in engines:
        assert engine["before"] == "this transformers holds dummy weights: refit it before it serves"
        assert engine["outcomes"] == [(True, 0), (True, 1)]
        assert engine["half"].startswith("this transformers holds a half-written model")


def test_what_is_not_vllms_imports_nothing_of_vllm():
    for path in sorted(ENGINES.glob("*.py")):
        if path.name == "__init__.py":  # names the engines that there are
            continue
        imported = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
        }
        assert not [name for name in imported if "vllm" in name], path.name
