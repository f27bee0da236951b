"""What stands for the code that is published beside Ling 2.0's weights, which transformers has no class for, held
against that code, as Megatron-Bridge's wheel has it."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from reshard.models.config_defaults import DEFAULTS
from reshard.models.family import families
from tests.models.test_configs import fields_read
from tests.standins.bailing import BailingMoeV2Config
from tests.tools.checkpoints import hf_logits
from tests.tools.environments import UV, run

pytestmark = pytest.mark.install
PACKAGE = "megatron.bridge.models.bailing"
# Of caches, of what a call returns, and of a loss.
READ_WITHOUT_EFFECT = {
    "output_attentions",
    "output_hidden_states",
    "use_return_dict",
    "use_cache",
    "pad_token_id",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder with the published code."""
    site = tmp_path_factory.mktemp("wheel")
    run([*UV, "pip", "install", "--quiet", "--no-deps", "--target", site, "megatron-bridge==0.6.2"])
    return site / "megatron" / "bridge" / "models" / "bailing"


@pytest.fixture
def published(folder, monkeypatch) -> dict[str, ModuleType]:
    """The published modules, by the beginning of their names, imported without the package that they are in."""
    modules = {}
    for name in ("configuration", "modeling"):
        full = f"{PACKAGE}.{name}_bailing_moe_v2"
        spec = importlib.util.spec_from_file_location(full, folder / f"{name}_bailing_moe_v2.py")
        modules[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, full, modules[name])
        spec.loader.exec_module(modules[name])
    # The wheel turns whole heads where the installed transformers has no function for them; the publisher's own code
    # takes transformers' earlier one, which heeds partial_rotary_factor as GLM-4.5's does.
    initial = dict(modules["modeling"].ROPE_INIT_FUNCTIONS) | {
        "default": lambda config, device=None: Glm4MoeRotaryEmbedding.compute_default_rope_parameters(config)
    }
    monkeypatch.setattr(modules["modeling"], "ROPE_INIT_FUNCTIONS", initial)
    return modules


def test_the_config_has_the_published_fields_and_defaults(published):
    theirs = published["configuration"].BailingMoeV2Config().to_dict()
    assert {
        name: value for name, value in BailingMoeV2Config().to_dict().items() if name != "auto_map"
    } == theirs


def test_every_field_that_the_published_code_reads_is_mapped_or_held_to_its_default(folder):
    family, read = families()["bailing_moe_v2"], fields_read(folder / "modeling_bailing_moe_v2.py")
    read = {name for name in read if not family.has_no_effect(name) and not name.startswith("_")}
    assert len(read) > 20 and not read - family.fields - DEFAULTS[family.name].keys() - READ_WITHOUT_EFFECT


@pytest.mark.parametrize("variant", ["ling", "ling-bias"])
def test_logits_are_those_of_the_published_code(variant, checkpoint, published):
    from safetensors.torch import load_file

    source, tokens = checkpoint(variant), torch.arange(96).reshape(2, 48) * 7
    config = published["configuration"].BailingMoeV2Config(**json.loads((source / "config.json").read_text()))
    config._attn_implementation = "eager"
    model = published["modeling"].BailingMoeV2ForCausalLM(config).float().eval()
    model.load_state_dict(load_file(source / "model.safetensors"))

    def distance() -> float:
        with torch.no_grad():
            return float((model(tokens, use_cache=False).logits - hf_logits(source, tokens)).abs().max())

    assert distance() < 2e-5
    with torch.no_grad():
        model.model.layers[1].mlp.gate.expert_bias.neg_()
    assert distance() > 1e-3, "a router's bias shows"
