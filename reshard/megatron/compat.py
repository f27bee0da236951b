"""Private names of Megatron-Core, for megatron-core 0.16 to 0.20. No other file of reshard uses any.

Below 0.16 there is no `get_gpt_decoder_layer_specs`, with which models are built. Nothing is changed when
this is imported.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import import_module, metadata
from typing import Any

import torch
from megatron.core.fusions import fused_softmax
from megatron.core.tensor_parallel import random
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from reshard.core.errors import ReshardError

try:
    from megatron.core.tensor_parallel import gtp_api
    from megatron.core.tensor_parallel.generalized_tensor_parallelism import GTPShardedParam
except ImportError:  # before 0.19
    gtp_api, GTPShardedParam = None, None
try:
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
except ImportError:  # before 0.19
    QKNormConfigResolver = None

# Layers that modules compare with by `isinstance`, 0.16 and 0.20 also where they are no classes.
LINEARS = {
    "megatron.core.transformer.multi_latent_attention": ("TELinear",),
    "megatron.core.tensor_parallel.inference_layers": (
        "InferenceColumnParallelLinear",
        "InferenceLayerNormColumnParallelLinear",
    ),
}
GATHERS = "DistributedDataParallel._make_forward_pre_hook."
OLDEST, NEWEST = "0.16", "0.20"  # that models were built and refitted from with


def unknown(what: str) -> ReshardError:
    """Return the error for an unknown version of Megatron-Core. `what` completes "this megatron-core"."""
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        from megatron.core import package_info

        version = package_info.__version__
    return ReshardError(
        f"this megatron-core {version} {what}; reshard is tested with {OLDEST} to {NEWEST}: use one of those"
    )


if QKNormConfigResolver is None:
    MLAWithPlainQueries: type = MLASelfAttention  # which has no second norm
else:

    class _PlainQueries(QKNormConfigResolver):
        def _mla_fused_linear_or_default(self, module_spec: Any, module_name: str) -> Any:
            return (
                self.linear_impl
                if module_name == "linear_q_proj"
                else super()._mla_fused_linear_or_default(module_spec, module_name)
            )

    class MLAWithPlainQueries(MLASelfAttention):  # type: ignore[no-redef]
        """MLA without ``q_lora_rank`` as it is published: no second norm before ``linear_q_proj``, where 0.19
        on puts one."""

        def _resolve_qk_norm_config(self, submodules: Any) -> Any:
            return _PlainQueries(self.config, replace(submodules, q_layernorm=IdentityOp)).resolve()


@contextmanager
def without_random_states() -> Iterator[None]:
    """Give layers random states of CUDA that do nothing: they ask for them even without dropout."""
    names = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")
    if not all(hasattr(random, name) for name in names):
        raise unknown("keeps CUDA's random states elsewhere, so that its layers do not run without a GPU")
    before = [getattr(random, name) for name in names]
    for name, value in zip(names, (_NoRandomStates(), True)):
        setattr(random, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before):
            setattr(random, name, value)


@contextmanager
def without_transformer_engine() -> Iterator[None]:
    """Let layers run without Transformer Engine, whose names some versions use without a check."""
    before: list[tuple[Any, str, Any]] = []
    for path, names in LINEARS.items():
        with suppress(ImportError):
            module = import_module(path)
            before += [(module, name, vars(module)[name]) for name in names if name in vars(module)]
    before = [(module, name, value) for module, name, value in before if not isinstance(value, type)]
    lacks_gemm = not hasattr(moe_utils, "te_general_gemm")  # 0.16
    if lacks_gemm:
        moe_utils.te_general_gemm = None
    for module, name, _ in before:
        setattr(module, name, _NoLinear)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        if lacks_gemm:
            del moe_utils.te_general_gemm


@contextmanager
def without_linear_attention_kernels() -> Iterator[None]:
    """Let Gated DeltaNets be built and run in torch where flash-linear-attention, whose names they
    use without a check, is not installed."""
    common: Any = import_module("megatron.core.ssm.gated_delta_net")
    with suppress(ImportError):  # 0.19 on
        common = import_module("megatron.core.ssm.gated_delta_net.common")
    before = (common.HAVE_FLA, getattr(common, "l2norm", None))  # 0.17 has none without it
    if not common.HAVE_FLA:
        common.HAVE_FLA, common.l2norm = True, _unit_length
    try:
        yield
    finally:
        common.HAVE_FLA, common.l2norm = before


@contextmanager
def without_mamba_kernels() -> Iterator[None]:
    """Let Mamba layers be built and run in torch, where mamba-ssm's kernels cannot. A version that keeps
    them elsewhere still says of a Mamba layer that mamba-ssm is needed."""
    names = ("HAVE_MAMBA_SSM", "ExtendedRMSNorm", "mamba_split_conv1d_scan_combined")
    try:
        mixers: Any = import_module("megatron.core.ssm.mamba_mixer")
        from reshard.megatron.layers.mamba import GroupNorm, split_conv1d_scan

        before = [getattr(mixers, name) for name in names]
    except (ImportError, AttributeError):  # before 0.19
        yield
        return
    for name, value in zip(names, (True, GroupNorm, split_conv1d_scan), strict=True):
        setattr(mixers, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(mixers, name, value)


def _unit_length(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return vectors of the last dim at length 1, as flash-linear-attention's ``l2norm`` does."""
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(x.dtype)


@contextmanager
def windows_without_gpu() -> Iterator[None]:
    """Make the masks of local layers with windows in host memory: Megatron makes them on a GPU."""
    name = "get_sliding_window_causal_mask"
    before = getattr(fused_softmax, name, None)
    if before is None:
        raise unknown("masks windows elsewhere, so that its layers do not run without a GPU")
    setattr(fused_softmax, name, _outside_window)
    try:
        yield
    finally:
        setattr(fused_softmax, name, before)


def _outside_window(queries: int, keys: int, window: tuple[int, int]) -> torch.Tensor:
    """Return True ``[queries, keys]`` for keys outside of a query's window, of so many before and after
    it."""
    distance = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    return (distance < -window[0]) | (distance > window[1])


class _NoLinear:
    """A stand-in for a layer of Transformer Engine; no layer is an instance of it."""


class _NoRandomStates:
    """A stand-in for CUDA's random states, by the name that Megatron asks for."""

    def fork(self, *_: Any) -> Any:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True


@contextmanager
def without_deprecation_of_gpt_model() -> Iterator[None]:
    """Keep back the warning that a GPTModel is deprecated, which 0.19 on logs for every one that is built."""
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")

    def is_other(record: logging.LogRecord) -> bool:
        return "GPTModel IS DEPRECATED" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def gtp_ranks(tensor: torch.Tensor) -> int:
    """Return among how many ranks GTP splits a parameter that lies in plain memory."""
    held: Any = tensor
    is_shard = GTPShardedParam is not None and type(held) is GTPShardedParam
    return int(held.gtp_remat_size) if is_shard else 1


def gtp_padding(tensor: Any) -> int:
    """Return the rows by which GTP has padded those that this tensor parallel rank's shards of a parameter have."""
    return int(getattr(tensor, "pad_length", 0)) if getattr(tensor, "is_gtp_weight_remat", False) else 0


def saves_gtp() -> bool:
    """Return True if a model's ``sharded_state_dict`` says which rows of its parameters this rank of GTP has."""
    return gtp_api is not None and gtp_api.HAVE_GTP


def gathers_at_forward(model: torch.nn.Module) -> bool:
    """Return True if a DDP gathers parameters by hooks of a model's modules at the next forward."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(getattr(hook, "__qualname__", "").startswith(GATHERS) for hook in hooks)
