"""Megatron models built from the Hugging Face config are those that Megatron-LM builds from the flags."""

import contextlib
import io
import sys
from dataclasses import fields, replace

import pytest
import torch
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

from reshard import MegatronLayout, ReshardError, hf_to_mcore, read_model
from reshard.core.dtypes import DTYPES
from reshard.megatron.arguments import arguments
from reshard.megatron.build import build_megatron, initialize_parallel, transformer_config
from reshard.megatron.flags import command_line
from reshard.models.model import Model
from tests.on_cpu import memory_on_cpu
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import VARIANTS, hf_logits, make

# What a command line turns on for speed, and what only training has.
NOT_NUMERICS = {
    "gradient_accumulation_fusion",
    "deallocate_pipeline_outputs",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "bias_dropout_fusion",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "cp_comm_type",
    "inference_sampling_seed",
    "use_cpu_initialization",
    "deterministic_mode",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
    "sequence_parallel",
    "attention_dropout",  # Seed-OSS has some in training
}


def config_from_flags(model: Model, layout: MegatronLayout, impl: str, monkeypatch):
    """Megatron-LM's own way: command line, arguments, config."""
    flags = " ".join(command_line(arguments(model, layout, 1024, 128, DTYPES["bfloat16"], impl))).split()
    monkeypatch.setattr(
        sys, "argv", ["pretrain_gpt.py", *flags, "--micro-batch-size", "1", "--no-rope-fusion"]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        args.world_size = layout.world_size(model)
        validate_args(args)
        return core_transformer_config_from_args(args)


@pytest.fixture
def no_cuda(monkeypatch):
    """The flags are parsed as on a machine with GPUs."""
    for name in ("current_device", "get_device_properties", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *a: type("Hopper", (), {"major": 9, "minor": 0})
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_is_the_one_of_the_command_line(variant, impl, no_cuda, monkeypatch):
    config = VARIANTS[variant].to_dict() | (
        {"num_nextn_predict_layers": 1} if variant == "deepseek-v3" else {}
    )
    model = Model.from_hf(config)
    layers = model.num_layers
    split = f"Ett|{'t' * (layers - 2)}{'m' if model.mtp_layers else ''}L"
    layouts = [
        MegatronLayout(),
        MegatronLayout(tp=2, pp=2),
        MegatronLayout(pp=2, vpp=layers // 2),
        MegatronLayout(pp=2, num_layers_in_first_pipeline_stage=1),
        MegatronLayout(pp=2, pipeline_model_parallel_layout=split),
    ]
    if impl == "transformer_engine":
        layouts = layouts[1:2]  # where the layers come from and how they are split have no field in common
    if model.family.megatron["add_bias_linear"] and model.num_experts:
        layouts = [replace(layout, etp=1) for layout in layouts]
    for layout in layouts + ([MegatronLayout(tp=2, ep=2, etp=1)] if model.num_experts else []):
        theirs, ours = (
            config_from_flags(model, layout, impl, monkeypatch),
            transformer_config(model, layout, transformer_impl=impl),
        )
        assert type(ours) is type(theirs)
        different = {
            f.name for f in fields(theirs) if str(getattr(ours, f.name)) != str(getattr(theirs, f.name))
        }
        assert different <= NOT_NUMERICS, (variant, layout)


@pytest.mark.parametrize(("option", "said"), [
    ("moe_router_fusion", "would choose experts without their bias"),
    ("moe_enable_routing_replay", "cannot be replayed"),
])  # fmt: skip
def test_a_router_of_ours_refuses_what_would_choose_experts_without_their_bias(option, said):
    model, layout = Model.from_hf(VARIANTS["ernie"].to_dict()), MegatronLayout()
    with memory_on_cpu.as_rank(0, 1, layout), pytest.raises(ValueError, match=said):
        build_megatron(model, layout, transformer_impl="local", **{option: True})


@pytest.mark.parametrize(("variant", "layout"), [
    ("llama-rope-tied", dict(tp=2)), ("qwen2", dict(pp=2, vpp=2)), ("qwen3-moe-mixed", dict(tp=2, ep=2, etp=1)),
    ("qwen3-tied", dict(pp=2, pipeline_model_parallel_layout="Ettt|tL")),
    ("glm-moe-dsa-shared", dict(pp=2, ep=2, etp=1)),
])  # fmt: skip
def test_a_model_built_from_the_config_gives_the_logits_of_transformers(variant, layout, tmp_path):
    make(tmp_path / "hf", variant)
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore", transformer_impl="local")
    model, tokens = read_model(str(tmp_path / "hf")), torch.randint(0, 1000, (2, 17))
    ranks = MegatronLayout(**layout).world_size(model)
    results = run_on_ranks(
        ranks, "build_and_run", model.config, layout, str(tmp_path / "mcore" / "release"), tokens
    )
    outputs = [output for output in results if output is not None]
    assert outputs and all(
        (output[..., :1000] - hf_logits(tmp_path / "hf", tokens)).abs().max() < 1e-4 for output in outputs
    )


def test_a_field_that_megatron_does_not_have_is_refused():
    model = Model.from_hf(VARIANTS["llama"].to_dict())
    with pytest.raises(ReshardError, match="TransformerConfig has no field sequence_paralel"):
        transformer_config(model, MegatronLayout(), sequence_paralel=True)
    with pytest.raises(ReshardError, match="--tp 3 does not divide 8 attention heads"):
        transformer_config(model, MegatronLayout(tp=3))
    assert transformer_config(model, MegatronLayout(tp=2), sequence_parallel=True).sequence_parallel


def test_what_has_to_come_before_a_model_is_said(checkpoint):
    model, layout = read_model(str(checkpoint("qwen3"))), MegatronLayout()
    with pytest.raises(ReshardError, match="torch.distributed is not initialized: start this with torchrun"):
        initialize_parallel(layout)
    with pytest.raises(
        ReshardError, match="Transformer Engine is not installed: install it, or pass transformer_impl"
    ):
        build_megatron(model, layout)
    with pytest.raises(
        ReshardError, match="Megatron's parallel state is not initialized: call reshard.megatron.build"
    ):
        build_megatron(model, layout, transformer_impl="local")
    with pytest.raises(ReshardError, match="dtype is 'bf16', not one of torch.bfloat16"):
        transformer_config(model, layout, dtype="bf16")
