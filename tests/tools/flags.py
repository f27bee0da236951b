"""The flags that are written, for every variant and several layouts, for a version of Megatron-LM;
and what its parser says of them."""

import json
import subprocess
import sys
from pathlib import Path

from reshard import MegatronLayout, ReshardError
from reshard.core.dtypes import dtype_named
from reshard.megatron.arguments import arguments
from reshard.megatron.flags import command_line, version_of
from reshard.models.model import Model
from tests.tools.checkpoints import VARIANTS


def layouts_of(layers: int) -> list[MegatronLayout]:
    """Layouts of so many layers, four or six."""
    return [
        MegatronLayout(),
        MegatronLayout(tp=2, pp=2, vpp=layers // 2),
        MegatronLayout(pp=2, num_layers_in_first_pipeline_stage=1),
        MegatronLayout(tp=2, pp=2, pipeline_model_parallel_layout=f"Et|{'t' * (layers - 1)}L"),
    ]


PARSER = Path(__file__).with_name("parse_flags.py")


def cases() -> list[dict]:
    """Arguments of every variant, layout and kind of layers."""
    found = []
    for name, config in VARIANTS.items():
        model = Model.from_hf(
            config.to_dict()
            | ({"topk_method": "noaux_tc", "scoring_func": "sigmoid"} if "deepseek" in name else {}),
            name,
        )
        for layout in layouts_of(model.num_layers):
            for impl in ("local", "transformer_engine"):
                found.append(arguments(model, layout, 1024, 128, dtype_named("bf16"), impl))
    return found


def lines_for(version: str) -> tuple[list[str], list[str]]:
    """The command lines for a version, and the sentences where it has none."""
    lines, refused = [], []
    for args in cases():
        try:
            lines.append(" ".join(command_line(args, version_of(version))))
        except ReshardError as error:
            refused.append(str(error))
    return lines, refused


def complaints(tree: Path, lines: list[str], python: str | Path = sys.executable) -> list[str]:
    """What the parser in `tree` says of each line: nothing where it takes it."""
    done = subprocess.run(
        [python, PARSER, tree], input=json.dumps(lines), capture_output=True, text=True, timeout=900, cwd="/"
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout)
