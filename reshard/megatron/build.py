"""Megatron-Core models from a Hugging Face config, for those who start a trainer or check one.

The fields that decide numerics (rotary scaling, YaRN and mscale, q/k norm, the router's scores, groups and
scaling, shared experts, MTP) come from the family's table, the same that converts the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from reshard.core.extras import importing
from reshard.megatron.arguments import megatron_args

with importing("megatron"):
    import megatron.core  # noqa: F401
    import torch

from reshard.core.errors import ReshardError, first_line, listed
from reshard.megatron.compat import unknown, without_deprecation_of_gpt_model
from reshard.megatron.gtp import WITHOUT_GTP
from reshard.megatron.hybrid import as_hybrid_args, check_model_class, class_of, layer_pattern
from reshard.megatron.layers.specs import layer_specs
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import TRANSFORMER_IMPLS, padded_vocab_size
from reshard.models.model import Model

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
YARN_ATTRIBUTES = {
    "yarn_rotary_scaling_factor": "rotary_scaling_factor", "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
    "yarn_original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "yarn_beta_fast": "yarn_beta_fast", "yarn_beta_slow": "yarn_beta_slow",
    "yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
}  # fmt: skip


def transformer_config(
    model: Model,
    layout: MegatronLayout,
    *,
    transformer_impl: str = "transformer_engine",
    model_class: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> Any:
    """Return Megatron's ``TransformerConfig`` (``MLATransformerConfig`` for DeepSeek-V3) of a model
    in a layout, for a GPTModel (``gpt``) or a HybridModel (``hybrid``; the default for models with Mamba
    layers, which no GPTModel has); no process group is needed.

    Dropout is 0. `overrides` are fields of the config, such as ``sequence_parallel=True``, which Megatron
    demands for training experts with TP. Raises ReshardError if a size does not divide or a field does not
    exist.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    if transformer_impl not in TRANSFORMER_IMPLS:
        raise ReshardError(
            f"transformer_impl {transformer_impl!r} is not one of {', '.join(TRANSFORMER_IMPLS)}"
        )
    if dtype not in DTYPES:
        raise ReshardError(f"dtype is {dtype!r:.80}, not one of {listed(DTYPES)}")
    layout.check(model)
    model_class = class_of(model, model_class)
    args = megatron_args(model) | layout.megatron_args()
    if model_class == "hybrid":
        args = as_hybrid_args(args, layer_pattern(model, layout.stages(model)), transformer_impl)
    config_class = MLATransformerConfig if args.get("multi_latent_attention") else TransformerConfig
    names = {field.name for field in fields(config_class)}
    unknown = overrides.keys() - names
    if unknown:
        raise ReshardError(f"{config_class.__name__} has no field {', '.join(sorted(unknown))}")
    values = {name: value for name, value in args.items() if name in names}
    values |= _config_values(model, args, transformer_impl, dtype)
    values |= _hybrid_values(layout) if model_class == "hybrid" else _pipeline_values(layout)
    if not model.num_experts:
        values.pop("expert_tensor_parallel_size")
    if args.get("multi_latent_attention"):  # where the class has defaults of DeepSeek-V3's
        values = {"q_lora_rank": None, "rotary_scaling_factor": 1.0} | values
    config = config_class(**(values | overrides))
    if args["position_embedding_type"] == "yarn":
        # GPTModel reads these off the config, which has no such fields.
        for name, arg in YARN_ATTRIBUTES.items():
            setattr(config, name, args[arg])
    return config


def _config_values(
    model: Model, args: dict[str, Any], transformer_impl: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the fields of the config that are not spelled like Megatron-LM's arguments, or that no argument
    says."""
    values: dict[str, Any] = {
        "num_moe_experts": args.get("num_experts"),
        "activation_func": _activation(args),
        "gated_linear_unit": not args.get("squared_relu", False),
        "add_qkv_bias": args["add_qkv_bias"] or args["add_bias_linear"],
        "transformer_impl": transformer_impl,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }
    if not args.get("group_query_attention"):
        values["num_query_groups"] = None
    if transformer_impl == "local":
        values |= {
            "moe_grouped_gemm": False,
            "persist_layer_norm": False,
            "gradient_accumulation_fusion": False,
        }
        if not torch.cuda.is_available():
            values |= {"use_cpu_initialization": True, "masked_softmax_fusion": False}
            # A HybridModel's arguments do not say it: its pattern does.
            if model.family.megatron.get("experimental_attention_variant") == "gated_delta_net":
                values["deterministic_mode"] = True  # in torch: the other kernels are Triton's
    return values


def _hybrid_values(layout: MegatronLayout) -> dict[str, Any]:
    """Return the fields of a HybridModel's config that no argument says; its stages are in its pattern."""
    virtual = layout.virtual_stages if layout.virtual_stages > 1 else None
    return {"is_hybrid_model": True, "virtual_pipeline_model_parallel_size": virtual}


def _activation(args: dict[str, Any]) -> Any:
    """Return the activation of an MLP, or of its gated half."""
    if args.get("squared_relu"):
        from megatron.core.activations import squared_relu

        return squared_relu
    if not args.get("quick_geglu"):
        return torch.nn.functional.silu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return quick_gelu


def _pipeline_values(layout: MegatronLayout) -> dict[str, Any]:
    """Return the fields of the config for pipeline stages, by sizes or by Megatron's layout string."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    values: dict[str, Any] = {
        "num_layers_in_first_pipeline_stage": layout.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": layout.num_layers_in_last_pipeline_stage,
    }
    text = layout.pipeline_model_parallel_layout
    if text is not None:
        values["pipeline_model_parallel_layout"] = PipelineParallelLayerLayout.from_str(text, layout.pp)
        values["virtual_pipeline_model_parallel_size"] = (
            layout.virtual_stages if layout.virtual_stages > 1 else None
        )
    return values


def initialize_parallel(layout: MegatronLayout, seed: int = 1234, **options: Any) -> None:
    """Call Megatron's ``initialize_model_parallel`` for a layout; torch.distributed must be
    initialized, with as many ranks as it needs.

    On a GPU Megatron's random states, which its modules draw their weights from, are seeded too.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not torch.distributed.is_initialized():
        raise ReshardError(
            "torch.distributed is not initialized: start this with torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    if layout.gtp_sizes != WITHOUT_GTP:
        raise ReshardError(
            f"models are not built under GTP here, which {layout} asks for: leave out gtp and egtp"
        )
    try:
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, layout.virtual_stages if layout.virtual_stages > 1 else None,
            expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.expert_tp, **options,
        )  # fmt: skip
    except RuntimeError as error:
        raise ReshardError(
            f"{torch.distributed.get_world_size()} ranks cannot be laid out as {layout}: {first_line(error)}"
        ) from error
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)


def build_megatron(
    model: Model,
    layout: MegatronLayout,
    *,
    transformer_impl: str = "transformer_engine",
    model_class: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    make_vocab_size_divisible_by: int = 128,
    parallel_output: bool = True,
    **overrides: Any,
) -> list[torch.nn.Module]:
    """Build this rank's chunks of a ``GPTModel`` or, with `model_class` ``hybrid`` and for models with Mamba
    layers, of a ``HybridModel``, one for each virtual stage, with Megatron's own random weights; bare, as
    Float16Module and DDP take them.

    Megatron's parallel state must be initialized (`initialize_parallel`).
    `make_vocab_size_divisible_by` is ``--make-vocab-size-divisible-by``; `overrides` as for
    `transformer_config`. Raises ReshardError if this Megatron-Core has no HybridModel, or none
    that computes the model.
    """
    from megatron.core import parallel_state

    model_class = class_of(model, model_class)
    check_model_class(model, model_class)
    args = megatron_args(model)
    config = transformer_config(
        model, layout, transformer_impl=transformer_impl, model_class=model_class, dtype=dtype, **overrides
    )
    if transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        raise ReshardError(
            'Transformer Engine is not installed: install it, or pass transformer_impl="local"'
        )
    _check_parallel(model, layout)
    chunks = []
    for stage in range(layout.virtual_stages):
        vp_stage = stage if layout.virtual_stages > 1 else None
        which = {"ignore_virtual": False, "vp_stage": vp_stage} if vp_stage is not None else {}
        of_both: dict[str, Any] = dict(
            vocab_size=padded_vocab_size(model.symbols["V"], make_vocab_size_divisible_by, layout.tp),
            max_sequence_length=args["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(**which),
            post_process=parallel_state.is_pipeline_last_stage(**which),
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
            position_embedding_type=args["position_embedding_type"],
            rotary_percent=args.get("rotary_percent", 1.0),
            rotary_base=args.get("rotary_base", 10000),
            seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
            vp_stage=vp_stage,
        )
        if model_class == "hybrid":
            chunks.append(_hybrid_model(model, layout, config, transformer_impl, dtype, of_both))
        else:
            chunks.append(_gpt_model(model, config, transformer_impl, of_both))
    return chunks


def _gpt_model(model: Model, config: Any, transformer_impl: str, options: dict[str, Any]) -> torch.nn.Module:
    """Build a chunk of a GPTModel; `options` are the arguments that both classes have."""
    from megatron.core.models.gpt import GPTModel

    args = megatron_args(model)
    decoder, mtp = layer_specs(model.family, config, transformer_impl, options["vp_stage"])
    with without_deprecation_of_gpt_model():  # who builds one has chosen it
        return GPTModel(
            config,
            decoder,
            rope_scaling=args.get("use_rope_scaling", False),
            rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
            mtp_block_spec=mtp,
            **options,
        )


def _hybrid_model(
    model: Model,
    layout: MegatronLayout,
    config: Any,
    transformer_impl: str,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> torch.nn.Module:
    """Build a chunk of a HybridModel; `options` are the arguments that both classes have."""
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        from reshard.megatron.layers.hybrid_specs import stack_spec
    except ImportError as error:
        raise unknown("has no HybridModel") from error

    whole = MegatronLayout(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    of_gpt = transformer_config(model, whole, transformer_impl=transformer_impl, dtype=dtype)
    pattern = layer_pattern(model, layout.stages(model))
    stack = stack_spec(model.family, of_gpt, pattern, transformer_impl)
    return HybridModel(config, stack, hybrid_layer_pattern=pattern, **options)


def parallel_layout() -> MegatronLayout:
    """Return the layout of Megatron's parallel state. Raises ReshardError if it is not initialized."""
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        raise ReshardError(
            "Megatron's parallel state is not initialized: call reshard.megatron.build.initialize_parallel(layout) "
            "first, or Megatron's own initialize_model_parallel"
        )
    return MegatronLayout(
        tp=state.get_tensor_model_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        vpp=state.get_virtual_pipeline_model_parallel_world_size() or 1,
        ep=state.get_expert_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_world_size(),
    )


def _check_parallel(model: Model, layout: MegatronLayout) -> None:
    """Raise ReshardError if a layout is not that of Megatron's parallel state."""
    initialized = parallel_layout()
    for name in ("tp", "pp", *(("ep", "expert_tp") if model.num_experts else ())):
        size = getattr(initialized, name)
        if getattr(layout, name) != size:
            axis = name.replace("expert_tp", "etp")
            raise ReshardError(
                f"layout is {layout}, but Megatron's parallel state was initialized with {axis}={size}"
            )


@contextmanager
def without_gpu() -> Iterator[None]:
    """Let the code inside build and run Megatron's local layers on a machine without a GPU.

    They ask for the current CUDA device by name, move tied embeddings there, and want CUDA's random states
    even where there is no dropout, and in 0.16 names of Transformer Engine. All of these are changed for the
    whole process and put back.
    """
    if torch.cuda.is_available():
        yield
        return
    from reshard.megatron.compat import (
        windows_without_gpu,
        without_linear_attention_kernels,
        without_mamba_kernels,
        without_random_states,
        without_transformer_engine,
    )

    kept, kept_move = torch.cuda.current_device, torch.Tensor.cuda
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        with (
            without_random_states(),
            without_transformer_engine(),
            without_linear_attention_kernels(),
            without_mamba_kernels(),
            windows_without_gpu(),
        ):
            yield
    finally:
        torch.cuda.current_device = kept
        torch.Tensor.cuda = kept_move  # type: ignore[method-assign]
