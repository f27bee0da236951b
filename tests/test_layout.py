"""Layouts: stages as Megatron builds them, and refusals that name the sizes that would do."""

import ast
import itertools
from pathlib import Path

import pytest
import reshard.mappings

from reshard import Layout, ReshardError
from reshard.layout import parse_pipeline
from reshard.model import Model
from reshard.rope import hf_rope, megatron_rope
from reshard.tables import families, shape_of
from tests.checkpoints import LLAMA3_ROPE, VARIANTS, YARN
from tests.ranks import run_on_ranks


def model(variant, **changes):
    config = VARIANTS[variant].to_dict() | changes
    config["architectures"] = config.get("architectures") or [
        next(f.architecture for f in families().values() if f.name == config["model_type"])
    ]
    return Model.from_hf(config)


PIPELINES = [
    (8, Layout(pp=2)), (8, Layout(pp=4, vpp=2)), (12, Layout(pp=2, vpp=3)), (9, Layout(pp=4, first_stage_layers=2, last_stage_layers=3)),
    (10, Layout(pp=4, vpp=2, first_stage_layers=2, last_stage_layers=4)), (7, Layout(pp=3, last_stage_layers=1)), (6, Layout(pp=4, embedding_in_split=True, loss_in_split=True)),
    (7, Layout(pp=2, vpp=2, loss_in_split=True)), (6, Layout(pp=4, pipeline="Et|t*2|tt|tL")), (5, Layout(pp=2, pipeline="Et|t|(t|)*1,ttL")),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "layout"), PIPELINES, ids=str)
def test_stages_are_those_that_megatron_builds(layers, layout):
    stages = layout.stages(model("llama", num_hidden_layers=layers))
    flags = {"decoder_first_pipeline_num_layers": layout.first_stage_layers, "decoder_last_pipeline_num_layers": layout.last_stage_layers}
    theirs = run_on_ranks(
        1, "stages", layers, layout.pp, layout.virtual_stages, flags, layout.embedding_in_split, layout.loss_in_split, layout.pipeline
    )[0]
    assert [[list(stage.layers) for stage in virtual] for virtual in stages] == theirs
    everything = sorted(layer for virtual in stages for stage in virtual for layer in stage.layers)
    assert everything == list(range(layers))
    assert stages[0][0].embedding and stages[-1][-1].output


def test_pipeline_strings_unroll_as_in_megatron():
    texts = ["Et|tL", "Et*3|t*4|t*3L", "Ettt|(tt|)*3,m|L", "E|(t|)*4L", "(t|t)*2"]
    assert [parse_pipeline(text) for text in texts] == run_on_ranks(1, "pipelines", texts)[0]


REFUSALS = [
    ("llama", Layout(tp=3), r"--tp 3 does not divide 8 attention heads in 2 query groups; sizes that do: 1, 2, 4, 8"),
    ("llama", Layout(pp=3), r"--pp 3 does not divide 4 layers; sizes that do: 1, 2, 4"),
    ("llama", Layout(pp=2, vpp=3), r"--vpp 3 does not divide a stage of 2 layers; sizes that do: 1, 2"),
    ("llama", Layout(vpp=2), r"--vpp 2 needs --pp above 1"),
    ("llama", Layout(ep=2), r"without experts has only 1 and 1"),
    ("llama", Layout(pp=2, first_stage_layers=5), r"-1 of 4 layers are left"),
    ("llama", Layout(first_stage_layers=2), r"need --pp above 1"),
    ("llama", Layout(pp=2, first_stage_layers=1, embedding_in_split=True), r"do not go with embedding"),
    ("llama", Layout(pp=2, pipeline="Ett|tL"), r"has 3 decoder layers \(t\); the model has 4"),
    ("llama", Layout(pp=2, pipeline="Ett|xtL"), r"has x in it"),
    ("llama", Layout(pp=3, pipeline="Ett|ttL"), r"has 2 stages, which --pp 3"),
    ("llama", Layout(pp=2, pipeline="tt|EttL"), r"must run from E"),
    ("qwen3-moe", Layout(ep=3, etp=1), r"--ep 3 does not divide experts 8; sizes that do: 1, 2, 4, 8"),
    ("qwen3-moe", Layout(ep=2, etp=5), r"--etp 5 does not divide moe_intermediate_size 48; sizes that do: 1, 2, 3, 4, 6"),
    ("qwen3-moe-mixed", Layout(tp=8, etp=32), r"--etp 32 does not divide moe_intermediate_size"),
]


@pytest.mark.parametrize(("variant", "layout", "message"), REFUSALS, ids=lambda v: str(v)[:40])
def test_sizes_that_do_not_divide_are_refused_with_those_that_would(variant, layout, message):
    with pytest.raises(ReshardError, match=message):
        layout.check(model(variant))


def test_ranks_per_stage_hold_both_meshes():
    moe = model("qwen3-moe")
    for tp, ep, etp in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        n = Layout(tp=tp, ep=ep, etp=etp).ranks_per_stage(moe)
        assert n % tp == 0 and n % (ep * etp) == 0
    assert Layout(tp=2, ep=4).ranks_per_stage(moe) == 8  # ETP is TP where it is not given
    assert Layout(tp=2, ep=4, etp=1).ranks_per_stage(moe) == 4


def test_rope_settings_go_there_and_back():
    for kind, rope in (("llama3", LLAMA3_ROPE), ("yarn", YARN), ("default", {"rope_type": "default", "rope_theta": 1e6})):
        args = megatron_rope({"rope_parameters": rope}, kind, "config") | {"multi_latent_attention": kind == "yarn"}
        back = hf_rope(args)
        assert back["rope_theta"] == rope["rope_theta"]
        assert (back["rope_scaling"] or {"rope_type": "default"}).items() <= (rope | {"rope_theta": 0}).items()


@pytest.mark.parametrize(("kind", "rope", "message"), [
    ("llama3", LLAMA3_ROPE | {"low_freq_factor": 2.0}, "low_freq_factor is 2.0, but Megatron has 1.0 built in"),
    ("default", {"rope_type": "yarn", "factor": 4.0}, "'yarn' has no counterpart"),
    ("yarn", YARN | {"beta_fast": 16}, "beta_fast is 16"),
    ("default", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("default", {"rope_theta": 10000.5}, "not a whole number"),
])  # fmt: skip
def test_rope_settings_that_megatron_lacks_are_refused_by_name(kind, rope, message):
    with pytest.raises(ReshardError, match=message):
        megatron_rope({"rope_parameters": rope}, kind, "config")


@pytest.mark.parametrize(("variant", "change", "message"), [
    ("llama", {"attention_bias": True}, "attention_bias != mlp_bias cannot be held"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True cannot be held"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = softmax"),
    ("llama", {"hidden_size": None}, "has no field hidden_size"),
    ("deepseek-v3", {"first_k_dense_replace": None}, "has no field first_k_dense_replace"),
    ("llama", {"hidden_size": "big"}, "hidden_size is 'big'"),
    ("llama", {"num_attention_heads": -8}, "num_attention_heads is -8"),
    ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "cannot be read .KeyError: 'factor'"),
    ("deepseek-v3", {"first_k_dense_replace": "three"}, "cannot be read .TypeError"),
    ("qwen3-moe", {"mlp_only_layers": 7}, "cannot be read .TypeError"),
    ("qwen3-moe", {"num_experts_per_tok": "2"}, "num_experts_per_tok is '2'"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "has no mapping table; the nearest is LlamaForCausalLM"),
    ("qwen3", {"architectures": ["Qwen3NextForCausalLM"]}, "the nearest is Qwen3ForCausalLM"),
])  # fmt: skip
def test_configs_that_cannot_be_held_are_refused_by_name(variant, change, message):
    with pytest.raises(ReshardError, match=message):
        model(variant, **change)


def test_args_that_describe_no_model_are_refused():
    args = model("qwen3-moe-mixed").megatron_args()
    assert Model.from_megatron_args(args, "args").kinds == model("qwen3-moe-mixed").kinds
    for change, message in (({"moe_layer_freq": "every second"}, "cannot be read as a model's"), ({"num_layers": None}, "num_layers"),
                            ({"qk_layernorm": False}, "qk_layernorm = False"), ({"squared_relu": True}, "squared_relu")):  # fmt: skip
        with pytest.raises(ReshardError, match=message):
            Model.from_megatron_args(args | change, "args")
    with pytest.raises(ReshardError, match="--family gpt is not one of"):
        Model.from_megatron_args(args, "args", "gpt")


def test_mapping_files_are_tables_of_literals():
    for path in Path(reshard.mappings.__path__[0]).glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 120, path
        for node in ast.parse(text).body[1:]:
            assert isinstance(node, ast.Assign), f"{path}: {ast.unparse(node)[:60]}"
            ast.literal_eval(node.value)


def test_shapes_are_read_from_their_expressions():
    assert shape_of("NQ*D+2*D H", {"NQ": 4, "D": 8, "H": 64}) == (48, 64)
    assert shape_of("D/2", {"D": 8}) == (4,)
