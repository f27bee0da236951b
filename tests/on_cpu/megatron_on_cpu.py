"""Real Megatron-Core models on a CPU: built from command-line flags as Megatron-LM builds them,
saved and loaded by its own code.

Only what needs a CUDA device is replaced: the current device, synchronization, the CUDA RNG
tracker, and for DeepSeek-V3 the core attention (the local one rejects MLA's head sizes).
"""

import contextlib
import functools
import io
import queue
import sys
import warnings
from copy import copy
from types import SimpleNamespace

warnings.filterwarnings("ignore")

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
import megatron.core.parallel_state as mpu
import numpy
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.tensor_parallel import random as tp_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import MegatronModule, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import import_module
from megatron.training import global_vars
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.checkpointing import load_checkpoint

try:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_dsa_module_spec_for_backend,
    )
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
except ImportError:  # before 0.19
    LocalSpecProvider, absorbed_mla, dsa = object, None, None

try:
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
except ImportError:  # before 0.17
    from megatron.training.tokenizer.tokenizer import _vocab_size_with_padding as vocab_size_with_padding

try:
    from megatron.core.transformer import mla_qk_norm_config
except ImportError:  # before 0.19
    mla_qk_norm_config = None

CPU_FLAGS = """--micro-batch-size 1 --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
--moe-token-dispatcher-type allgather --no-load-optim --no-load-rng
--distributed-backend gloo""".split()


class _Tracker:
    """Stands in for the CUDA RNG tracker: there is no dropout, and weights are loaded."""

    def is_initialized(self):
        return True

    def get_states(self):
        return {}

    def set_states(self, states):
        pass

    @contextlib.contextmanager
    def fork(self, *_):
        yield


class PlainAttention(MegatronModule):
    """Causal softmax attention over [sequence, batch, heads, dim], with value heads of a size of their
    own."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        **_,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, **_):
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        n = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        mixed = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value)
        return mixed.reshape(*mixed.shape[:2], -1)


KEPT = contextlib.ExitStack()  # what holds until this process ends


class IndexerLinear(torch.nn.Linear):
    """A linear layer as Transformer Engine's "duplicated" one: every rank has all of it."""

    def __init__(self, size, outputs, config, init_method, bias, parallel_mode, **_):
        assert parallel_mode == "duplicated" and not bias
        super().__init__(size, outputs, bias=False)

    def forward(self, hidden):
        return super().forward(hidden), None


class Backend(LocalSpecProvider):
    """Megatron's local layers, with the linear layer that an indexer is made of."""

    def linear(self):
        return IndexerLinear


def without_cuda() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_device_properties = lambda *a: SimpleNamespace(major=9, minor=0)
    torch.cuda.synchronize = lambda *a: None
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.cuda.empty_cache = lambda *a: None
    plain_tensor = torch.tensor
    torch.tensor = lambda *a, **k: plain_tensor(
        *a, **(k | {"device": None} if k.get("device") == "cuda" else k)
    )
    plain_ones = torch.ones  # of masks of windows
    torch.ones = lambda *a, **k: plain_ones(*a, **(k | {"device": None} if k.get("device") == "cuda" else k))
    torch.cuda.get_rng_state = lambda *a, **k: torch.zeros(1)
    for module in (tp_random, sys.modules["megatron.core.tensor_parallel.layers"],
                   sys.modules["megatron.core.tensor_parallel"], sys.modules["megatron.core.transformer.moe.experts"],
                   sys.modules["megatron.core.transformer.transformer_block"],
                   sys.modules["megatron.core.transformer.attention"],
                   sys.modules["megatron.core.transformer.dot_product_attention"]):  # fmt: skip
        if hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *a, **k: _Tracker()
    results = queue.Queue()
    filesystem_async.get_write_results_queue = lambda *a: results
    # Names of Transformer Engine that 0.16 and 0.20 use also where it is not installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    inference = sys.modules.get("megatron.core.tensor_parallel.inference_layers")
    for module in (multi_latent_attention, inference):
        for name, value in list(vars(module).items()) if module else ():
            if name.endswith("Linear") and not isinstance(value, type):
                setattr(module, name, type("NoLinear", (), {}))
    # A pull of YaRN's table: it asks for the current CUDA device where use_cpu_initialization is
    # not passed on.
    plain_yarn = multi_latent_attention.YarnRotaryEmbedding
    for module in filter(None, (multi_latent_attention, absorbed_mla, dsa)):
        module.YarnRotaryEmbedding = lambda *a, **k: plain_yarn(*a, **(k | {"use_cpu_initialization": True}))


def parse(flags: list[str], world_size: int = 1):
    """Megatron's own parsing and validation of a command line."""
    return parsed([*flags, *CPU_FLAGS], world_size)


def parsed(flags: list[str], world_size: int = 1, take=None):
    """The same of a command line as it is; `take` may change the arguments before they are validated."""
    without_cuda()
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    sys.argv = ["pretrain_gpt.py", *flags]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        args.world_size = world_size
        if take is not None:
            take(args)
        validate_args(args)
    args.save_tokenizer_assets = False  # by which Megatron-LM's main saves a tokenizer, and there is none
    return args


def local_specs(config, vp_stage: int | None):
    """Megatron's local layers of a stage, and a list that ends with the model's last."""
    if config.experimental_attention_variant in ("gated_delta_net", "gdn"):  # as Megatron-LM's main calls it
        from reshard.megatron import compat
        from reshard.megatron.layers import gated_delta

        KEPT.enter_context(compat.without_linear_attention_kernels())
        module = "megatron.core.ssm.gated_delta_net"
        common = sys.modules.get(f"{module}.common") or sys.modules[module]  # before 0.19
        common.get_cuda_rng_tracker = lambda *a, **k: _Tracker()
        config.deterministic_mode = True
        spec, last = gated_delta.layer_specs(config, "local", vp_stage)
        return spec, [last]
    usual, options = copy(config), {"use_transformer_engine": False, "normalization": "RMSNorm"}
    usual.experimental_attention_variant = None  # of which Megatron has specs for Transformer Engine only
    spec = get_gpt_decoder_block_spec(usual, vp_stage=vp_stage, **options)
    return spec, get_gpt_decoder_layer_specs(usual, **options)


def adapted_specs(config, vp_stage: int | None, of_all: bool = False):
    """What `local_specs` gives, with what Megatron's local layers lack in it; with `of_all` no
    stage is asked for."""
    if of_all:
        config = copy(config)
        config.pipeline_model_parallel_size, config.num_layers_in_first_pipeline_stage = 1, None
        config.num_layers_in_last_pipeline_stage = config.virtual_pipeline_model_parallel_size = None
        vp_stage = None
    spec, layer_specs = local_specs(config, vp_stage)
    sparse = config.experimental_attention_variant == "dsa"
    for layer in (*spec.layer_specs, *layer_specs):
        if sparse:
            layer.submodules.self_attention = get_dsa_module_spec_for_backend(config, Backend())
            attention = layer.submodules.self_attention.submodules
            attention.linear_q_down_proj = attention.linear_kv_down_proj = ColumnParallelLinear
            continue
        attention = layer.submodules.self_attention.submodules
        if config.multi_latent_attention:
            attention.core_attention = PlainAttention
            attention.linear_q_proj = ColumnParallelLinear
            if config.q_lora_rank is None:
                # Megatron 0.19 on would put a second norm before linear_q_proj, which no published model has.
                attention.q_layernorm = IdentityOp
            if config.q_lora_rank is None and mla_qk_norm_config is not None:
                mla_qk_norm_config.QKNormConfigResolver._mla_fused_linear_or_default = (
                    lambda self, linear, name: linear
                )
    return spec, layer_specs


def build(flags: list[str], parallel_output: bool = False):
    """A list of model chunks (one per virtual stage) for this rank, and the args."""
    args = parse(flags, torch.distributed.get_world_size())
    if args.padded_vocab_size is None:
        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)
    global_vars.set_args(args)
    init_num_microbatches_calculator(
        0, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        **gtp_sizes(args),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        config = core_transformer_config_from_args(args)
    config.use_cpu_initialization = True
    chunks = args.virtual_pipeline_model_parallel_size or 1
    models = []
    for stage in range(chunks):
        vp_stage = stage if chunks > 1 else None
        hybrid = getattr(args, "hybrid_layer_pattern", None)
        if hybrid:
            from tests.tools import hybrid_layers

            config.deterministic_mode = "G" in hybrid
            of_layers = [hybrid_layers.of_layers(config, hybrid, experts) for experts in (True, False)]
            (spec, layer_specs), (dense, _) = (adapted_specs(of, None, of_all=True) for of in of_layers)
        else:
            spec, layer_specs = adapted_specs(config, vp_stage)
        if args.spec is not None and not hybrid:
            spec = import_module(args.spec)  # as Megatron-LM does
        mtp = None
        if config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(
                config, layer_specs[-1], use_transformer_engine=False, vp_stage=vp_stage
            )
            if mtp is not None and config.layernorm_zero_centered_gamma:
                from reshard.megatron.layers.gated_delta import local_mtp

                mtp = local_mtp(mtp)
        options = dict(
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
            if chunks > 1
            else mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
            if chunks > 1
            else mpu.is_pipeline_last_stage(),
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        )
        if hybrid:
            model = hybrid_layers.model(
                config, args, vp_stage, mtp, (dense.layer_specs, spec.layer_specs), options
            )
        else:
            model = GPTModel(
                config, spec, rope_scaling=args.use_rope_scaling, rope_scaling_factor=args.rope_scaling_factor,
                mtp_block_spec=mtp, vp_stage=vp_stage, **options,
            )  # fmt: skip
        models.append(model.eval())
    return models, args


def gtp_sizes(args) -> dict[str, int]:
    """The arguments for the groups of generalized tensor parallelism, where there are any (0.19 on)."""
    sizes = {
        "gtp_remat_size": getattr(args, "gtp_weight_remat_size", 1),
        "expert_gtp_remat_size": getattr(args, "expert_gtp_weight_remat_size", 1),
    }
    return {name: size for name, size in sizes.items() if size > 1}


def load(models, args, directory: str) -> int:
    """Megatron-LM's own ``load_checkpoint``, as ``--load DIRECTORY`` calls it; the iteration."""
    args.load = directory
    with contextlib.redirect_stdout(io.StringIO()):
        iteration, _ = load_checkpoint(models, None, None, strict=True)
    return iteration


def save(models, directory: str, extra: dict | None = None, metadata: dict | None = None) -> None:
    """Megatron's own ``dist_checkpointing.save``, with the model part of a training run's state."""
    metadata = metadata or {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    state = {
        f"model{i}" if len(models) > 1 else "model": m.sharded_state_dict(
            metadata=metadata | {"dp_cp_group": group}
        )
        for i, m in enumerate(models)
    }
    state |= {"checkpoint_version": 3.0, "iteration": 7, **(extra or {})}
    dist_checkpointing.save(state, directory, content_metadata=dict(metadata))


def logits(models, tokens: torch.Tensor) -> torch.Tensor | None:
    """Run all pipeline stages in order; the last one's ranks return ``[batch, sequence, vocabulary]``."""
    pp, rank = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    ranks = torch.distributed.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    hidden, output = None, None
    with torch.no_grad():
        for index in range(len(models) * pp):
            virtual, stage = divmod(index, pp)
            if stage != rank:
                continue
            model = models[virtual]
            if index > 0:
                hidden = torch.empty(tokens.shape[1], tokens.shape[0], model.config.hidden_size)
                if pp > 1:
                    torch.distributed.recv(hidden, ranks[(index - 1) % pp])
                model.set_input_tensor(hidden)
            output = model(tokens, positions, mask)
            if index + 1 < len(models) * pp and pp > 1:
                torch.distributed.send(output.contiguous(), ranks[(index + 1) % pp])
    return output if rank == pp - 1 else None


def load_and_run(rank: int, flags: list[str], directory: str, tokens: torch.Tensor):
    """Build, load with Megatron-LM's code, run; (iteration, logits or None)."""
    models, args = build(flags)
    iteration = load(models, args, directory)
    return iteration, logits(models, tokens)


def build_and_run(rank: int, config: dict, layout: dict, directory: str, tokens: torch.Tensor):
    """Build from the Hugging Face config alone, load with Megatron-Core's code, run; logits or None."""
    from reshard import MegatronLayout
    from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu
    from reshard.models.model import Model

    sizes = MegatronLayout(**layout)
    inside = without_gpu()
    inside.__enter__()  # until this process ends
    initialize_parallel(sizes)
    models = build_megatron(
        Model.from_hf(config),
        sizes,
        transformer_impl="local",
        dtype=torch.float32,
        parallel_output=False,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
    )
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    state = {
        f"model{i}": model.eval().sharded_state_dict(metadata=metadata) for i, model in enumerate(models)
    }
    loaded = dist_checkpointing.load(state, directory)
    for i, model in enumerate(models):
        model.load_state_dict(loaded[f"model{i}"])
    return logits(models, tokens)


def load_and_save(
    rank: int, flags: list[str], source: str, directory: str, training: bool = False, singleton: bool = False
) -> None:
    """Build, load with Megatron-LM's code, save with Megatron-Core's; `training` adds the state of
    an optimizer and RNGs."""
    models, args = build(flags)
    load(models, args, source)
    extra: dict = {"args": args}
    if training:
        extra |= training_state(models)
    save(models, directory, extra, {"singleton_local_shards": True} if singleton else None)


def training_state(models) -> dict:
    """What a training run's checkpoint holds besides weights: moments of each parameter, RNG and
    scheduler state."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    moments = {
        f"{kind}.{name}": ShardedTensor.from_rank_offsets(
            f"optimizer.state.{kind}.{name}", torch.ones(4), (0, rank, size)
        )
        for kind in ("exp_avg", "exp_avg_sq", "fp32_param")
        for name in ("decoder.layers.mlp.linear_fc1.weight", "output_layer.weight")
    }
    rng = [
        {
            "random_rng_state": (3, (1, 2), None),
            "torch_rng_state": torch.get_rng_state(),
            "np_rng_state": numpy.random.get_state(),
        }
    ]
    return {
        "optimizer": {"state": moments, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "params": [0, 1]}]},
        "rng_state": ShardedObject("rng_state", rng, (size,), (rank,), replica_id=0),
        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 7}, "num_floating_point_operations_so_far": 12.5,
        "rerun_state_machine": {"mode": "disabled"},
    }  # fmt: skip


def weights(models) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers by name, a prefix for each virtual stage."""
    return {f"{i}:{name}": value.clone() for i, model in enumerate(models) for name, value in model.state_dict().items()
            if isinstance(value, torch.Tensor)}  # fmt: skip


def as_trainers(
    rank: int, config: dict, command_lines: list[list[str]], changes: list[tuple[str, object]]
) -> list[str]:
    """What is said of models with these flags, and of the first of them with attributes changed, as
    trainers of an engine that serves a Hugging Face config."""
    from reshard.models.model import Model
    from reshard.trainers.megatron import MegatronModel
    from tests.starting.ranks import caught

    said, served, trainers = [], Model.from_hf(config, "the config"), []
    for flags in command_lines:
        torch.distributed.barrier()  # all have made the groups that now end
        mpu.destroy_model_parallel()
        unset_num_microbatches_calculator()
        trainers.append(MegatronModel(build(flags)[0]))
        said.append(caught(lambda: trainers[-1].check_model(served)))
    first = trainers[0]
    for path, value in changes:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, first.models[0])
        kept = getattr(owner, name)
        if isinstance(value, tuple) and value[0] in ("times", "first"):
            value = kept * value[1] if value[0] == "times" else kept[: value[1]]
        setattr(owner, name, value)
        said.append(caught(lambda: first.check_model(served)))
        setattr(owner, name, kept)
    return said


def training_loss(rank: int, flags: list[str], directory: str, tokens: torch.Tensor) -> float:
    """The loss of a model in training, as Megatron-LM computes it, with nothing but these flags."""
    models, args = build(flags, parallel_output=True)
    load(models, args, directory)
    [model] = models
    torch.manual_seed(1 + rank)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    n = inputs.shape[1]
    positions, mask = (
        torch.arange(n)[None].expand_as(inputs),
        torch.ones(n, n, dtype=torch.bool).triu(1)[None, None],
    )
    return float(model.train()(inputs, positions, mask, labels=labels).mean())
