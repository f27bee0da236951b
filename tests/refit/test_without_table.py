"""Refits of transformers models that no mapping table covers: what a class saves is read from the class, and where each
tensor goes from the engine's own loader. Bit for bit what that loader makes of the saved model."""

from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from reshard import ReshardError, diff, digest, hf_to_mcore, ignored_config_fields
from reshard.core.views import View
from reshard.delta import apply
from reshard.megatron.arguments import megatron_args
from reshard.megatron.parameters import expand
from reshard.models.config_fields import check_ignored
from reshard.models.model import different_fields
from reshard.models.saved_tensors import saved_tensors
from reshard.models.towers import TAKES_TOWER
from reshard.models.without_table import any_model
from reshard.trainers import FsdpModel
from tests import install_sglang_cpu
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.model_classes import CLASSES, SIZES, WITH_TOWER, config_of, make, save

# vLLM switches Llama 4's scale of attention off by itself where its context is short, and connect compares configs.
SCALED = {"override_generation_config": {"attn_temperature_tuning": True}}
EP = {"tp": 2, "enable_expert_parallel": True}
PP = {"pp": 2}
# Beside those with a tower, of SGLang's.
SGLANG_CLASSES = (
    "Gemma3ForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM", "StableLmForCausalLM", "GraniteMoeForCausalLM",
    "Glm4ForCausalLM", "Gemma3ForConditionalGeneration",
)  # fmt: skip
# By the ranks of the trainer, those of the engine, and whether they are the same processes.
RUNS = {
    (2, 2, True): {name: {"tp": 2} for name in (*CLASSES, *WITH_TOWER)} | {"Llama4ForCausalLM": {"tp": 2} | SCALED},
    (3, 2, False): {
        "PhimoeForCausalLM": EP, "GraniteMoeForCausalLM": EP, "Gemma3ForCausalLM": {"tp": 2},
        "Olmo2ForCausalLM": {"tp": 2},
    },
    (1, 2, False): dict.fromkeys((
        "Gemma2ForCausalLM", "Gemma3ForConditionalGeneration", "GraniteMoeForCausalLM", "FalconH1ForCausalLM",
        "Glm4ForCausalLM", "StableLmForCausalLM", "Exaone4ForCausalLM", "Qwen3_5ForConditionalGeneration",
    ), PP),
    (4, 4, True): {
        "PhimoeForCausalLM": EP | PP, "Gemma3ForCausalLM": {"tp": 2} | PP,
        "Qwen2_5_VLForConditionalGeneration": {"tp": 2} | PP,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function from a class to two checkpoints of a model of it."""
    made: dict[str, list[str]] = {}

    def get(name: str) -> list[str]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = [str(make(folder / str(seed), name, seed)) for seed in (0, 1)]
        return made[name]

    return get


def sides(folder: Path, trainers: int, engines: int, together: bool) -> dict:
    port = free_port()
    return {"trainer": trainers, "engine": engines, "together": together, "folder": str(folder), "port": port}


@pytest.fixture(scope="module", params=RUNS, ids=str)
def run(request, checkpoints, tmp_path_factory):
    """How many ranks are an engine's, what each says of each class, and the options of each."""
    trainers, engines, together = request.param
    cases = {name: (checkpoints(name), options) for name, options in RUNS[request.param].items()}
    places = sides(tmp_path_factory.mktemp("run"), trainers, engines, together)
    ranks = trainers if together else trainers + engines
    results = run_on_ranks(ranks, "refit_each", places, cases, module="refit_without_table_on_cpu")
    return engines, results, RUNS[request.param]


def check(results: list[dict], name: str, engines: int, stages: int = 1) -> None:
    """Every engine's rank holds what its loader makes of the second checkpoint, and nothing of the first."""
    assert not any(isinstance(of[name], str) for of in results), results[0][name]
    held = [of[name] for of in results if of[name] is not None]
    assert len(held) == engines
    layers = {frozenset(key for key in now if ".layers." in key) for now, _, _ in held}
    assert len(layers) == stages, "each stage has its layers"
    for now, (before, expected), left in held:
        assert now.keys() == expected.keys()
        assert {key for key in expected if now[key] != expected[key]} == set(), name
        assert sum(before[key] != expected[key] for key in expected) >= 0.5 * len(expected), "other weights"
        assert not [how for how in left if "tower" in how or "another part" in how], (
            "the whole model is brought"
        )


def test_every_class_holds_what_its_engines_loader_makes_of_the_saved_model(run):
    engines, results, options_of = run
    assert len(results[0]) > 1
    for name in results[0]:
        check(results, name, engines, options_of[name].get("pp", 1))


def test_what_would_be_another_model_is_refused_everywhere(checkpoints, tmp_path):
    places = sides(tmp_path, 2, 2, True)
    checkpoint = checkpoints("Gemma2ForCausalLM")[0]
    for said in run_on_ranks(2, "refusals", places, checkpoint, module="refit_without_table_on_cpu"):
        assert (
            said.pop("fits") == said.pop("stages fit") == said.pop("fits with a cache in fp8") == "no error"
        )
        for what, sentence in {
            "a name that the loader skips": "does not take model.layers.1.mlp.down_proj.weight, and would",
            "a buffer that nobody brings": "of_nobody",
            "scales of a cache": "scales its fp8 keys and values by numbers that load_format='dummy' has made up",
            "what is computed of all weights": "Gemma2ForCausalLM of this vLLM computes something of its weights once",
            "another config": "query_pre_attn_scalar is 7, but the served model's is 256",
            "a parameter that the class does not have": "parameters that transformers' class of it does not have: "
            "model.adapter",
            "a stage that nobody fills": "would bring nothing into model.layers.1.mlp.down_proj.weight, and this vLLM",
            "a name that every stage skips": "none of the 2 pipeline stages of this vLLM takes "
            "model.layers.1.post_feedforward_layernorm.weight, and it would serve another model",
            "another config of stages": "query_pre_attn_scalar is 7, but the served model's is 256",
        }.items():
            assert sentence in said[what], said[what]


def test_a_tower_that_stages_do_not_serve_whole_is_refused_or_left_alone_everywhere(checkpoints, tmp_path):
    arguments = sides(tmp_path, 2, 2, True), checkpoints("Qwen2_5_VLForConditionalGeneration")[0]
    expected = {
        "fits": "no error",
        "a stage that lacks some of it": "no error",
        "a stage that has none of it": "no error",
        "a stage that nobody fills": "would bring nothing into visual.blocks.1.norm1.weight, and this vLLM",
        "a name that every stage skips": "none of the 2 pipeline stages of this vLLM takes "
        "visual.blocks.1.norm1.weight, and it would serve another model",
        "no tower anywhere": "parameters that qwen2_5_vl_text does not have: model.visual.",
        "no tower anywhere, of a language model": "no error",
        "a stage that computes": "parameters that qwen2_5_vl_text does not have: model.visual.",
        "a stage that computes, of a language model": "left alone",
        "a stage that computes, with dummy weights": "beside the language model are dummy weights",
    }
    for said in run_on_ranks(2, "tower_in_stages", *arguments, module="refit_without_table_on_cpu"):
        assert said.keys() == expected.keys()
        for what, sentence in expected.items():
            assert sentence in said[what], said


def test_a_bias_that_no_stage_of_an_engines_class_has_is_refused(tmp_path):
    name = "GraniteMoeForCausalLM"
    checkpoint = str(make(tmp_path / "made", name, attention_bias=True))
    places, cases = sides(tmp_path, 2, 2, True), {name: ([checkpoint] * 2, PP)}
    for said in run_on_ranks(2, "refit_each", places, cases, module="refit_without_table_on_cpu"):
        assert (
            "none of the 2 pipeline stages of this vLLM takes model.layers.0.self_attn.k_proj.bias, "
            "model.layers.0.self_attn.o_proj.bias" in said[name]
        ), said[name]


def check_beside_towers(results: list[dict], prefix: str) -> None:
    """A tower stays as it was loaded where the trainer has none, and dummy weights are refused then."""
    for of in results:
        first, second = of["loaded"]
        tower = {name for name in first if name.startswith(prefix)}
        others = {name for name in first if first[name] != second[name]}
        assert len(tower & others) > 10 and len(others - tower) > 10, (
            "they differ, and a mix of them from either"
        )
        mixed = {name: (first if name in tower else second)[name] for name in first}
        assert of["without"] == mixed and of["all"] == second
        assert "tensors beside the language model are dummy weights (load_format='dummy')" in of["dummy"]


def test_a_trainer_without_a_tower_leaves_that_of_the_engine(checkpoints, tmp_path):
    arguments = sides(tmp_path, 2, 2, True), checkpoints("Qwen3_5ForConditionalGeneration"), {"tp": 2}
    results = run_on_ranks(2, "beside_towers", *arguments, module="refit_without_table_on_cpu")
    check_beside_towers(results, "visual.")


if install_sglang_cpu.installed():

    def test_a_trainer_without_a_tower_leaves_that_of_an_sglang(checkpoints, tmp_path):
        results = run_on_ranks(
            2,
            "beside_towers",
            sides(tmp_path, 2, 2, True),
            checkpoints("Qwen3_5ForConditionalGeneration"),
            {"tp": 2, "disable_radix_cache": True},
            module="refit_without_table_on_cpu",
            python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )
        check_beside_towers(results, "visual.")
        for of in results:
            assert of["images"] == [[7], []], "an image is seen anew by another tower"

    def test_stages_of_an_sglang_hold_what_its_loader_makes_of_the_saved_model(checkpoints, tmp_path):
        """Of a class that has stages there. The last of them gets no output layer from its loader if that is the
        embedding, so that nothing would fill it."""
        name, cases = "Glm4ForCausalLM", {}
        for tied in (False, True):
            folder, fields = tmp_path / str(tied), {"tie_word_embeddings": tied, "vocab_size": 512}
            made = [str(make(folder / str(seed), name, seed, **fields)) for seed in (0, 1)]
            cases[str(tied)] = made, PP | {"disable_radix_cache": True}
        # Qwen3-VL needs more layers on its first stage, for DeepStack: see `test_towers`.
        towers = [larger for larger in WITH_TOWER if larger != "Qwen3VLForConditionalGeneration"]
        for larger in towers:
            cases[larger] = checkpoints(larger), PP | {"disable_radix_cache": True}
        results = run_on_ranks(
            2,
            "refit_each",
            sides(tmp_path, 2, 2, True),
            cases,
            module="refit_without_table_on_cpu",
            python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )
        for each in ("False", *towers):
            check(results, each, 2, stages=2)
        assert all("would bring nothing into lm_head.weight, and this SGLang" in of["True"] for of in results)

    def test_an_sglang_holds_what_its_loader_makes_of_the_saved_model(checkpoints, tmp_path):
        options = {"tp": 2, "disable_radix_cache": True}
        cases = {name: (checkpoints(name), options) for name in (*SGLANG_CLASSES, *WITH_TOWER)}
        results = run_on_ranks(
            2,
            "refit_each",
            sides(tmp_path, 2, 2, True),
            cases,
            module="refit_without_table_on_cpu",
            python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )
        for name in cases:
            check(results, name, 2)
            assert any("SGLang" in how for of in results for how in of[name][2]), "its engine"


@pytest.mark.parametrize("name", CLASSES)
def test_each_saved_tensor_is_the_box_that_is_said_of_a_parameter(name, tmp_path):
    """Against what transformers writes; of a model in which no two elements in a row are alike."""
    model = any_model(config_of(name).to_dict(), name)
    saved = saved_tensors(name, model.config, name)
    made = getattr(transformers, name).from_pretrained(make(tmp_path / "made", name))
    state = made.state_dict()
    files = {}
    for path in (tmp_path / "made").glob("*.safetensors"):
        files |= load_file(path)
    assert {View.parse(each).tensor for each in saved} == files.keys()
    for each, (shape, parameter, parameter_shape, box) in saved.items():
        assert tuple(state[parameter].shape) == parameter_shape
        part = state[parameter][tuple(map(slice, box.offsets, box.ends))].reshape(shape)
        view = View.parse(each)
        whole = files[view.tensor]
        expected = whole[int(each.partition("[")[2].rstrip("]"))] if view.tensor != each else whole
        assert torch.equal(part, expected), each


@pytest.mark.parametrize(
    "name", ["GraniteMoeForCausalLM", "Gemma3ForConditionalGeneration", "Qwen3VLForConditionalGeneration"]
)
def test_a_chain_leads_its_checkpoint_to_the_versions_of_the_trainer(name, checkpoints, tmp_path):
    first, second = checkpoints(name)
    run_on_ranks(2, "write_chain", {"shard": 2}, [first, second], f"{tmp_path}/chain", module="delta_on_cpu")
    apply(first, tmp_path / "chain", tmp_path / "out", version=1)
    assert diff(second, tmp_path / "out").equal and not diff(first, tmp_path / "out").equal
    assert digest(tmp_path / "out").text == digest(second).text != digest(first).text


@pytest.mark.parametrize("name", WITH_TOWER)
def test_a_chain_and_the_digest_of_a_trainer_have_its_tower(name, checkpoints, tmp_path):
    first, second = checkpoints(name)
    places = sides(tmp_path, 2, 2, True)
    for said in run_on_ranks(
        2, "write_whole", places, [first, second], f"{tmp_path}/chain", module="refit_without_table_on_cpu"
    ):
        assert said["digest"] == digest(second).text != digest(first).text
        assert "lack elements of 1 tensors" in said["a part of a tower"], said["a part of a tower"]
    apply(first, tmp_path / "chain", tmp_path / "out", version=1)
    assert diff(second, tmp_path / "out").equal and not diff(first, tmp_path / "out").equal


def test_what_has_to_be_megatrons_is_refused_by_name(checkpoints, tmp_path):
    directory = checkpoints("GraniteMoeForCausalLM")[0]
    with pytest.raises(
        ReshardError, match="GraniteMoeForCausalLM is not supported; the architectures that are"
    ):
        hf_to_mcore(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model = any_model(config_of("GraniteMoeForCausalLM").to_dict())
    for look in (lambda: megatron_args(model), lambda: list(expand(model).parameters)):
        with pytest.raises(ReshardError, match="add a table"):
            look()


def test_what_transformers_computes_as_it_saves_is_refused(monkeypatch):
    from reshard.models import saved_tensors as module

    def doubled(model, state):
        return {name: tensor * 2 for name, tensor in revert_weight_conversion(model, state).items()}

    monkeypatch.setattr(module, "revert_weight_conversion", doubled)
    with pytest.raises(
        ReshardError, match="transformers computes model.embed_tokens.weight as it saves a Gemma2"
    ):
        saved_tensors("Gemma2ForCausalLM", config_of("Gemma2ForCausalLM").to_dict(), "config.json")


def test_a_class_that_transformers_does_not_have_is_named():
    config = {"architectures": ["NeverMadeForCausalLM"], "model_type": "never_made"}
    with pytest.raises(
        ReshardError, match="no mapping table covers NeverMadeForCausalLM, and transformers 5"
    ):
        any_model(config)


def test_fields_that_decide_what_is_computed_are_compared_wherever_they_are():
    name = "Gemma3ForConditionalGeneration"
    one, other = config_of(name).to_dict(), config_of(name).to_dict()
    other["dtype"], other["text_config"]["attention_dropout"] = "float16", 0.5
    assert different_fields(any_model(one), any_model(other)) == {}
    other["text_config"]["rms_norm_eps"] = 0.5
    assert different_fields(any_model(one), any_model(other)) == {"text_config.rms_norm_eps": (1e-6, 0.5)}


@pytest.mark.parametrize(
    "field, written, other", [("is_mm_prefix_lm", True, None), ("attention_output_gate", False, True)]
)
def test_what_vllm_writes_into_a_config_makes_no_other_model(field, written, other):
    name = "Gemma3ForConditionalGeneration"
    one, served = config_of(name).to_dict(), config_of(name).to_dict()
    served["hidden_size"] = served["text_config"]["hidden_size"]
    served["text_config"][field] = written
    assert different_fields(any_model(one), any_model(served)) == {}
    served["hidden_size"] = 7
    assert different_fields(any_model(one), any_model(served)) == {"hidden_size": (None, 7)}
    if other is not None:
        served["text_config"][field] = other
        assert f"text_config.{field}" in different_fields(any_model(one), any_model(served))


def test_what_only_training_reads_makes_no_other_model_and_what_a_router_reads_does():
    name = "PhimoeForCausalLM"
    one, trained, other = (any_model(config_of(name, **fields).to_dict()) for fields in (
        {}, {"attention_dropout": 0.5, "initializer_range": 0.5}, {"router_jitter_noise": 0.5}
    ))  # fmt: skip
    assert different_fields(one, trained) == {}
    assert different_fields(one, other) == {"router_jitter_noise": (0.01, 0.5)}
    with ignored_config_fields("router_jitter_noise"):
        check_ignored(one)
        assert different_fields(one, other) == {}


def test_two_classes_of_one_type_are_two_models():
    name = "Gemma2ForCausalLM"
    base = config_of(name).to_dict() | {"architectures": ["Gemma2Model"]}
    assert "architectures" in different_fields(any_model(config_of(name).to_dict()), any_model(base))


def built(name: str, **fields) -> torch.nn.Module:
    return getattr(transformers, name)(config_of(name, **fields))


@pytest.mark.parametrize("what", ["an embedding", "a stack of experts"])
def test_a_trainer_whose_weights_are_not_of_its_config_is_refused(what):
    model = built("PhimoeForCausalLM")
    served = any_model(model.config.to_dict())
    assert FsdpModel(model).publish(served)
    if what == "an embedding":
        model.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(600, 64))
        said = r"model.embed_tokens.weight has shape \[600, 64\], and \[500, 64\] by its config"
    else:
        experts = model.model.layers[0].mlp.experts
        experts.down_proj = torch.nn.Parameter(torch.zeros(6, *experts.down_proj.shape[1:]))
        said = r"experts.down_proj has shape \[6, 64, 128\], and \[4, 64, 128\] by its config"
    with pytest.raises(ReshardError, match=said):
        FsdpModel(model).publish(served)


def test_the_class_is_that_of_the_model_below_an_adapter():
    model = built("Gemma2ForCausalLM")
    served = any_model(model.config.to_dict())
    model.config.architectures = None  # as of one made from a config
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    below, adapter = FsdpModel(adapted).split_adapter()
    below.check_model(served)
    assert len(below.publish(served)) == len(FsdpModel(built("Gemma2ForCausalLM")).publish(served))
    assert len(adapter.publish(served)) == 4, "A and B of two layers"


def test_heads_of_other_sizes_than_the_default_are_those_of_the_config():
    name = "Qwen3ForSequenceClassification"
    config = transformers.Qwen3Config(**SIZES, num_labels=5).to_dict() | {"architectures": [name]}
    assert saved_tensors(name, config, name)["score.weight"].shape == (5, 64)


def test_a_class_with_whole_numbers_among_its_weights_is_refused():
    name = "GraniteSpeechForConditionalGeneration"
    config = transformers.GraniteSpeechConfig().to_dict() | {"architectures": [name]}
    with pytest.raises(
        ReshardError, match="num_batches_tracked is a single whole number, which no refit moves"
    ):
        any_model(config)


def test_a_number_among_weights_is_a_vector_of_one_for_refits_and_refused_in_files(tmp_path):
    name = "ApertusForCausalLM"
    config = transformers.ApertusConfig(**SIZES)
    config.architectures = [name]
    saved = saved_tensors(name, config.to_dict(), name)
    beta = saved["model.layers.0.mlp.act_fn.beta"]
    assert (beta.shape, beta.parameter_shape) == ((1,), ())
    save(tmp_path, config)
    [stored] = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert stored["model.layers.0.mlp.act_fn.beta"].shape == ()
    with pytest.raises(
        ReshardError, match="act_fn.beta is a single number, which a refit moves, but what reads"
    ):
        digest(tmp_path)


def test_a_change_in_place_is_no_view(monkeypatch):
    from reshard.models import saved_tensors as module

    def changed(model, state):
        return {name: tensor.clone().add_(1) for name, tensor in state.items()}

    monkeypatch.setattr(module, "revert_weight_conversion", changed)
    with pytest.raises(ReshardError, match="transformers computes tensors as it saves a Gemma2"):
        saved_tensors("Gemma2ForCausalLM", config_of("Gemma2ForCausalLM").to_dict(), "config.json")


def test_a_tower_that_computes_something_else_is_refused_where_an_engine_takes_it():
    name = "Qwen3VLForConditionalGeneration"
    config = config_of(name).to_dict()
    engine = any_model(config | {TAKES_TOWER: config})
    FsdpModel(built(name)).check_model(engine)
    changed = built(name)
    changed.config.vision_config.deepstack_visual_indexes = [1, 0]
    with pytest.raises(
        ReshardError, match=r"has vision_config.deepstack_visual_indexes \[1, 0\], but the served"
    ):
        FsdpModel(changed).check_model(engine)
    FsdpModel(changed).check_model(any_model(config))  # its own tower stays in the engine
