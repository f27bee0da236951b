"""Layouts: stages as Megatron builds them, and refusals that name the sizes that would do."""

import ast
import itertools
from pathlib import Path

import pytest

import reshard.cli
import reshard.mappings
from reshard import MegatronLayout, ReshardError, VllmLayout
from reshard.megatron.stages import parse_pipeline
from reshard.models.family import Family, families
from reshard.models.field_tables import DECIDES_ELSEWHERE
from reshard.models.model import Model
from reshard.models.tables import shape_of
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import VARIANTS


def model(variant, **changes):
    config = VARIANTS[variant].to_dict() | changes
    config["architectures"] = config.get("architectures") or [
        next(f.architecture for f in families().values() if f.name == config["model_type"])
    ]
    return Model.from_hf(config)


PIPELINES = [
    (8, MegatronLayout(pp=2)),
    (8, MegatronLayout(pp=4, vpp=2)),
    (12, MegatronLayout(pp=2, vpp=3)),
    (9, MegatronLayout(pp=4, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=3)),
    (
        10,
        MegatronLayout(
            pp=4, vpp=2, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=4
        ),
    ),
    (7, MegatronLayout(pp=3, num_layers_in_last_pipeline_stage=1)),
    (
        6,
        MegatronLayout(
            pp=4, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
        ),
    ),
    (7, MegatronLayout(pp=2, vpp=2, account_for_loss_in_pipeline_split=True)),
    (6, MegatronLayout(pp=4, pipeline_model_parallel_layout="Et|t*2|tt|tL")),
    (5, MegatronLayout(pp=2, pipeline_model_parallel_layout="Et|t|(t|)*1,ttL")),
]


@pytest.mark.parametrize(("layers", "layout"), PIPELINES, ids=str)
def test_stages_are_those_that_megatron_builds(layers, layout):
    stages = layout.stages(model("llama", num_hidden_layers=layers))
    flags = {
        "decoder_first_pipeline_num_layers": layout.num_layers_in_first_pipeline_stage,
        "decoder_last_pipeline_num_layers": layout.num_layers_in_last_pipeline_stage,
    }
    theirs = run_on_ranks(
        1,
        "stages",
        layers,
        layout.pp,
        layout.virtual_stages,
        flags,
        layout.account_for_embedding_in_pipeline_split,
        layout.account_for_loss_in_pipeline_split,
        layout.pipeline_model_parallel_layout,
        module="megatron_parser_on_cpu",
    )[0]
    assert [[list(stage.layers) for stage in virtual] for virtual in stages] == theirs
    everything = sorted(layer for virtual in stages for stage in virtual for layer in stage.layers)
    assert everything == list(range(layers))
    assert stages[0][0].embedding and stages[-1][-1].output


def test_pipeline_strings_unroll_as_in_megatron():
    texts = ["Et|tL", "Et*3|t*4|t*3L", "Ettt|(tt|)*3,m|L", "E|(t|)*4L", "(t|t)*2"]
    assert [parse_pipeline(text) for text in texts] == run_on_ranks(
        1, "pipelines", texts, module="megatron_parser_on_cpu"
    )[0]


REFUSALS = [
    (
        "llama",
        MegatronLayout(tp=3),
        r"--tp 3 does not divide 8 attention heads in 2 query groups; sizes that do: 1, 2, 4, 8",
    ),
    ("llama", MegatronLayout(pp=3), r"--pp 3 does not divide 4 layers; sizes that do: 1, 2, 4"),
    (
        "llama",
        MegatronLayout(pp=2, vpp=3),
        r"--vpp 3 does not divide a stage of 2 layers; sizes that do: 1, 2",
    ),
    ("llama", MegatronLayout(vpp=2), r"--vpp 2 needs --pp above 1"),
    ("llama", MegatronLayout(ep=2), r"without experts has only 1 and 1"),
    ("llama", MegatronLayout(pp=2, num_layers_in_first_pipeline_stage=5), r"are 5 of the model.s 4 layers"),
    ("llama", MegatronLayout(num_layers_in_first_pipeline_stage=2), r"need --pp above 1"),
    (
        "llama",
        MegatronLayout(
            pp=2, num_layers_in_first_pipeline_stage=1, account_for_embedding_in_pipeline_split=True
        ),
        r"do not go with embedding",
    ),
    (
        "llama",
        MegatronLayout(pp=2, pipeline_model_parallel_layout="Ett|tL"),
        r"has 3 decoder layers \(t\); the model has 4",
    ),
    ("llama", MegatronLayout(pp=2, pipeline_model_parallel_layout="Ett|xtL"), r"has x in it"),
    ("llama", MegatronLayout(pp=3, pipeline_model_parallel_layout="Ett|ttL"), r"has 2 stages, which --pp 3"),
    ("llama", MegatronLayout(pp=2, pipeline_model_parallel_layout="tt|EttL"), r"must run from E"),
    (
        "qwen3-moe",
        MegatronLayout(ep=3, etp=1),
        r"--ep 3 does not divide experts 8; sizes that do: 1, 2, 4, 8",
    ),
    (
        "qwen3-moe",
        MegatronLayout(ep=2, etp=5),
        r"--etp 5 does not divide moe_intermediate_size 48; sizes that do: 1, 2, 3, 4, 6",
    ),
    (
        "gpt-oss",
        MegatronLayout(tp=2),
        r"--etp 2 .by default --tp.: Megatron-Core has experts with biases at --etp 1 only",
    ),
    ("qwen3-moe-mixed", MegatronLayout(tp=8, etp=32), r"--etp 32 does not divide moe_intermediate_size"),
]


@pytest.mark.parametrize(("variant", "layout", "message"), REFUSALS, ids=lambda v: str(v)[:40])
def test_sizes_that_do_not_divide_are_refused_with_those_that_would(variant, layout, message):
    with pytest.raises(ReshardError, match=message):
        layout.check(model(variant))


@pytest.mark.parametrize("variant", ["llama", "qwen3-moe-mixed", "qwen3-next", "nemotron-h-moe", "gpt-oss"])
@pytest.mark.parametrize("layout", [MegatronLayout, VllmLayout])
def test_every_size_that_is_offered_fits_all_of_the_model(variant, layout):
    with pytest.raises(ReshardError, match="sizes that do: ") as refusal:
        layout(tp=7).check(model(variant))
    offered = [int(n) for n in str(refusal.value).rpartition(": ")[2].split(", ")]
    assert offered
    for tp in range(1, 33):
        try:
            layout(tp=tp).check(model(variant))
        except ReshardError:
            assert tp not in offered or (variant, tp > 1) == ("gpt-oss", True)  # its experts need --etp 1
        else:
            assert tp in offered


def test_ranks_per_stage_hold_both_meshes():
    moe = model("qwen3-moe")
    for tp, ep, etp in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        n = MegatronLayout(tp=tp, ep=ep, etp=etp).ranks_per_stage(moe)
        assert n % tp == 0 and n % (ep * etp) == 0
    assert MegatronLayout(tp=2, ep=4).ranks_per_stage(moe) == 8  # ETP is TP where it is not given
    assert MegatronLayout(tp=2, ep=4, etp=1).ranks_per_stage(moe) == 4


def test_mapping_files_are_tables_of_literals_and_the_rules_of_a_family_its_methods():
    entries = {*vars(Family), "name", "architecture", "symbols", "config", "layer", "identifies"}
    for path in Path(reshard.mappings.__path__[0]).glob("[!_]*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 140, path
        [*imports, family] = ast.parse(text).body[1:]
        assert all(isinstance(node, ast.ImportFrom) for node in imports) and isinstance(
            family, ast.ClassDef
        ), path
        for node in family.body:
            if isinstance(node, ast.FunctionDef):
                assert callable(getattr(Family, node.name)) and len(node.body) <= 8, f"{path}: {node.name}"
                continue
            assert isinstance(node, ast.Assign), f"{path}: {ast.unparse(node)[:60]}"
            assert {target.id for target in node.targets} <= entries, f"{path}: {ast.unparse(node)[:60]}"
            ast.literal_eval(node.value)


def test_no_family_is_named_outside_its_own_file_and_an_engines_names():
    names = {
        name
        for family in families().values()
        for name in (family.name, family.architecture, family.name.replace("_", ""))
    }
    sources = [*Path(reshard.__path__[0]).rglob("*.py"), *Path(reshard.cli.__path__[0]).rglob("*.py")]
    assert len(sources) > 50
    for path in sources:
        strings = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        said = [
            text
            for text in strings
            if "\n" not in text
            and any(text == name or f"{name}_" in text for name in names)
            and text not in DECIDES_ELSEWHERE  # names of fields
        ]
        may = path.name in ("config_defaults.py", "demo.py") or "mappings" in path.parts
        may = may or (path.name == "names.py" and "engines" in path.parts)
        assert may or not said, (path, said)


def test_shapes_are_read_from_their_expressions():
    assert shape_of("NQ*D+2*D H", {"NQ": 4, "D": 8, "H": 64}) == (48, 64)
    assert shape_of("D/2", {"D": 8}) == (4,)
