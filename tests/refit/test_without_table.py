"""Refits of transformers models that no mapping table covers: what a class saves is read from the class, and where each
tensor goes from the engine's own loader. Bit for bit what that loader makes of the saved model."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from reshard import ReshardError, diff, digest, hf_to_mcore
from reshard.core.dtypes import DTYPES
from reshard.core.views import View
from reshard.delta import apply, save
from reshard.digests.numbers import number_of, seed_of, sum_rows, text_of
from reshard.live.digest import digest_of_models
from reshard.megatron.arguments import megatron_args
from reshard.megatron.parameters import expand
from reshard.models.model import Model
from reshard.models.saved_tensors import SavedTensor, saved_tensors
from reshard.models.towers import TAKES_TOWER
from reshard.models.without_table import any_model, check_tower, tower_of
from reshard.storage.check import check as check_manifest
from reshard.storage.digest import digest_of_path
from reshard.storage.io.streams import TensorInfo
from reshard.trainers import FsdpModel
from tests import install_sglang_cpu
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks
from tests.storage.test_wrapped import kimi_k25, with_sizes_of_class
from tests.tools.model_classes import (
    CLASSES,
    REFUSED_BY_TABLE,
    WITH_NUMBERS,
    WITH_TOWER,
    config_of,
    make,
)
from tests.tools.oracle import bits, hf_tensors

# vLLM switches Llama 4's scale of attention off by itself where its context is short, and connect compares configs.
SCALED = {"override_generation_config": {"attn_temperature_tuning": True}}
# Transformers' class of it has another name, other names in memory, and its tower's queries and keys in another order.
KIMI = "KimiK25ForConditionalGeneration"
EP = {"tp": 2, "enable_expert_parallel": True}
PP = {"pp": 2}
# Beside those with a tower, of SGLang's.
SGLANG_CLASSES = (
    "Gemma3ForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM", "StableLmForCausalLM", "GraniteMoeForCausalLM",
    "Glm4ForCausalLM", "Gemma3ForConditionalGeneration",
)  # fmt: skip
# By the ranks of the trainer, those of the engine, and whether they are the same processes.
RUNS = {
    (2, 2, True): {name: {"tp": 2} for name in (*CLASSES, *WITH_TOWER, KIMI, *REFUSED_BY_TABLE)}
    | {"Llama4ForCausalLM": {"tp": 2} | SCALED},
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
            made[name] = [str(made_of(folder / str(seed), name, seed)) for seed in (0, 1)]
        return made[name]

    return get


def made_of(directory: Path, name: str, seed: int) -> Path:
    if name != KIMI:
        return make(directory, name, seed)
    with_sizes_of_class(kimi_k25(directory, seed))
    tensors = load_file(directory / "model.safetensors")
    # As they are published, and as trainers hold them.
    tensors |= {n: tensor.float() for n, tensor in tensors.items() if n.endswith("e_score_correction_bias")}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


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
        weights = [
            key for key in expected if not key.endswith("_scale")
        ]  # HRM-Text attends 16 times with 4 layers
        assert sum(before[key] != expected[key] for key in weights) >= 0.5 * len(weights), "other weights"
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
        "a stage that computes": "this engine takes nothing beside its language model, and its log says why: start it",
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
        assert of["not counted"] == [len(tower), 0], of["not counted"]
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
    for each, tensor in saved.items():
        view = View.parse(each)
        whole = files[view.tensor]
        expected = whole[int(each.partition("[")[2].rstrip("]"))] if view.tensor != each else whole
        assert torch.equal(put_together(tensor, state), expected), each


def put_together(saved: SavedTensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that a checkpoint should have, of parameters of a model."""
    made = torch.zeros(saved.shape, dtype=torch.bfloat16)
    for parameter, shape, box, first in saved.parts:
        assert tuple(state[parameter].shape) == shape
        part = state[parameter][tuple(map(slice, box.offsets, box.ends))]
        if len(saved.parts) == 1:
            return part.reshape(saved.shape)
        made[first : first + len(part)] = part
    return made


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": None}),
        ("PhimoeForCausalLM", {"num_local_experts": 1, "num_experts_per_tok": 1}),
        ("GraniteMoeForCausalLM", {"num_local_experts": 1, "num_experts_per_tok": 1}),
        ("Llama4ForCausalLM", {"num_local_experts": 1}),
    ],
)
def test_a_single_expert_is_read_row_by_row(name, fields, tmp_path):
    directory = make(tmp_path / "made", name, **fields)
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.bfloat16)
    assert digest_of_models(FsdpModel(model), directory).text == digest(directory).text
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.endswith("experts.down_proj"))[0, -1, -1] += 1
    assert digest_of_models(FsdpModel(model), directory).text != digest(directory).text, "the control"


def test_what_transformers_makes_of_a_published_tower_is_joined_to_it_again(tmp_path):
    """Against the published tensors, of which transformers' own loading has turned and split some."""
    directory = made_of(tmp_path, KIMI, 0)
    config = json.loads((directory / "config.json").read_text())
    model = Model.from_hf(config)
    of_class = config | {"architectures": [model.family.wrapped_class]}
    state = getattr(transformers, model.family.wrapped_class).from_pretrained(directory).state_dict()
    published = {n: t for n, t in load_file(directory / "model.safetensors").items() if model.is_of_tower(n)}
    saved = tower_of(model, of_class).family.saved
    assert saved.keys() == published.keys()
    joined = [name for name, tensor in saved.items() if len(tensor.parts) > 3]
    assert [name.rpartition(".")[0] for name in joined] == ["vision_tower.encoder.blocks.0.wqkv"] * 2
    for name, tensor in published.items():
        assert torch.equal(put_together(saved[name], state), tensor), name
    swapped = {n: state[n.replace("q_proj", "k_proj") if "q_proj" in n else n] for n in state}
    assert not any(torch.equal(put_together(saved[name], swapped), published[name]) for name in joined)


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 2}, {"hidden_act": "silu"}, {"pos_emb_time": 8}], ids=str
)
def test_a_tower_of_a_class_of_its_own_that_computes_something_else_is_refused(change, tmp_path):
    config = json.loads((made_of(tmp_path, KIMI, 0) / "config.json").read_text())
    served = Model.from_hf(config | {TAKES_TOWER: config})
    of_class = config | {"architectures": [served.family.wrapped_class]}
    check_tower(of_class, served, "the trainer's config")
    with pytest.raises(
        ReshardError, match="the trainer's config has vision_config.*, but the served model's is"
    ):
        check_tower(
            of_class | {"vision_config": config["vision_config"] | change}, served, "the trainer's config"
        )


EXCHANGED = {
    "HrmTextForCausalLM": (
        "model.H_module.layers.0.mlp.gate_proj.weight", "model.H_module.layers.0.mlp.up_proj.weight",
        "model.H_module.layers.0.mlp.gate_up_proj.weight",
    ),
    "HunYuanMoEV1ForCausalLM": (
        "model.layers.1.mlp.shared_mlp.gate_proj.weight", "model.layers.1.mlp.shared_mlp.up_proj.weight",
        "model.layers.1.mlp.shared_mlp.gate_up_proj.weight",
    ),
    KIMI: (
        "model.vision_tower.layers.0.attn.q_proj.weight", "model.vision_tower.layers.0.attn.k_proj.weight",
        "vision_tower.encoder.blocks.0.wqkv.weight",
    ),
}  # fmt: skip


def test_two_tensors_that_a_trainer_has_exchanged_are_seen_in_the_one_that_they_are_joined_to(
    checkpoints, tmp_path
):
    """The control of what is compared above."""
    cases = {name: (checkpoints(name)[1], two) for name, (*two, _) in EXCHANGED.items()}
    places = sides(tmp_path, 2, 2, True)
    for said in run_on_ranks(2, "refit_exchanged", places, cases, module="refit_without_table_on_cpu"):
        assert said == {name: [joined] for name, (*_, joined) in EXCHANGED.items()}


@pytest.mark.parametrize(
    "name",
    [
        "GraniteMoeForCausalLM",
        "HrmTextForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        *WITH_NUMBERS,
        *REFUSED_BY_TABLE,
    ],
)
def test_a_chain_leads_its_checkpoint_to_the_versions_of_the_trainer(name, checkpoints, tmp_path):
    first, second = checkpoints(name)
    run_on_ranks(2, "write_chain", {"shard": 2}, [first, second], f"{tmp_path}/chain", module="delta_on_cpu")
    check_applied(first, second, tmp_path)


def check_applied(first: str, second: str, folder: Path) -> None:
    """The first version of a chain is, as a directory, the second checkpoint, and transformers takes all of it."""
    out = folder / "out"
    apply(first, folder / "chain", out, version=1)
    assert diff(second, out).equal and not diff(first, out).equal
    assert digest(out).text == digest(second).text != digest(first).text
    assert digest_of_path(out, stored=True).text == digest(second).text, "no tensor is in codes"
    assert stored(out) == stored(second) and stored(out).keys() == stored(first).keys()
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    _, loaded = getattr(transformers, name).from_pretrained(out, output_loading_info=True)
    assert not any(loaded.values()), loaded
    damaged = Path(shutil.copytree(out, folder / "damaged"))
    with next(damaged.glob("*.safetensors")).open("r+b") as file:
        [last] = file.read()[-1:]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert check_manifest(out).ok and not check_manifest(damaged).ok


def stored(directory: str | Path) -> dict[str, tuple]:
    """Shape, dtype and bits of each tensor in the files of a directory, as safetensors reads them."""
    return {name: bits(tensor) for name, tensor in hf_tensors(Path(directory)).items()}


def test_an_engine_follows_a_chain_of_single_and_whole_numbers(checkpoints, tmp_path):
    cases = {name: (checkpoints(name), f"{tmp_path}/{name}/chain") for name in WITH_NUMBERS}
    for said in run_on_ranks(
        2, "follow", sides(tmp_path, 2, 2, True), cases, module="refit_without_table_on_cpu"
    ):
        for name, ((first, second), _) in cases.items():
            of = said[name]
            assert of["trainer"] == digest(second).text != digest(first).text
            assert of["after"] == of["expected"] and of["before"].keys() == of["expected"].keys()
            numbers = [key for key in of["after"] if key.endswith(("act_fn.beta", "num_batches_tracked"))]
            assert len(numbers) == 2 and all(of["before"][key] != of["after"][key] for key in numbers), (
                numbers
            )
            is_counted = any("batch" in key for key in numbers)
            assert ("int32, and transformers' class has it in int64" in of["in another dtype"]) == is_counted
    for name, ((first, second), _) in cases.items():
        save(first, second, tmp_path / name / "on disk" / "chain")
        for folder in (tmp_path / name, tmp_path / name / "on disk"):
            check_applied(first, second, folder)
        other = Path(shutil.copytree(second, tmp_path / name / "other"))
        config = (other / "config.json").read_text()
        (other / "config.json").write_text(re.sub('("rms_norm_eps": )[^,]+', r"\g<1>0.5", config))
        with pytest.raises(ReshardError, match="its config has .*rms_norm_eps 0.5, .* begin a new chain"):
            save(first, other, tmp_path / name / "never")


@pytest.mark.parametrize("name", [*WITH_TOWER, KIMI])
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


BETA, COUNT = "model.layers.0.mlp.act_fn.beta", "encoder.layers.0.conv.batch_norm.num_batches_tracked"


def test_a_number_among_weights_is_a_vector_of_one_for_refits_and_has_no_dims_in_files(checkpoints, tmp_path):
    name = "ApertusForCausalLM"
    beta = saved_tensors(name, config_of(name).to_dict(), name)[BETA]
    assert (beta.shape, beta.parts[0].parameter_shape, beta.is_single) == ((1,), (), True)
    directory = Path(checkpoints(name)[0])
    assert stored(directory)[BETA][0] == ()
    assert digest(directory).tensors[BETA] == text_of(number_of_vector(BETA, 0.25))
    with pytest.raises(ReshardError, match=rf"{BETA} has shape \[1\], expected \[\] from config.json"):
        digest(with_tensor(directory, tmp_path / "vector", BETA, lambda beta: beta.reshape(1)))
    with pytest.raises(RuntimeError, match="mismatched|size mismatch"):  # nor does transformers
        transformers.ApertusForCausalLM.from_pretrained(tmp_path / "vector")


def number_of_vector(name: str, value: float) -> int:
    info = TensorInfo((1,), DTYPES["bfloat16"])
    seed = seed_of(name, info)
    return number_of(seed, [sum_rows(seed, np.array([[value]], info.dtype.numpy()))])


def with_tensor(directory: Path, to: Path, name: str, change) -> Path:
    """A copy of a directory with one tensor changed."""
    shutil.copytree(directory, to)
    tensors = load_file(to / "model.safetensors")
    save_file(tensors | {name: change(tensors[name])}, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_whole_numbers_stay_as_they_are_and_are_taken_where_the_class_has_them_alone(checkpoints, tmp_path):
    directory = Path(checkpoints("GraniteSpeechForConditionalGeneration")[0])
    tensors = digest(directory).tensors
    assert digest(directory, dtype="fp32").tensors[COUNT] == tensors[COUNT]
    more = with_tensor(directory, tmp_path / "more", COUNT, lambda count: count + 1)
    assert [each.name for each in diff(directory, more).differences] == [COUNT]
    for number, (name, dtype, sentence) in enumerate((
        (COUNT, torch.int32, "has dtype int32, and granite_speech's class has whole numbers there, in int64"),
        (COUNT, torch.float32, "has dtype float32, and granite_speech's class has whole numbers there, in int64"),
        (COUNT.replace("num_batches_tracked", "running_mean"), torch.int64, "has dtype int64, which is not a weight's"),
    )):  # fmt: skip
        other = with_tensor(
            directory, tmp_path / str(number), name, lambda tensor, dtype=dtype: tensor.to(dtype)
        )
        with pytest.raises(ReshardError, match=sentence):
            digest(other)
