"""The options of a training run that decide memory: lengths, microbatches, recompute, dtypes of the
optimizer."""

import re
from dataclasses import dataclass, fields
from math import lcm
from typing import Any

from reshard.core.errors import OptionError, ReshardError, listed
from reshard.core.limits import MAX_RANKS, check_number
from reshard.megatron.gtp import WITHOUT_GTP
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import TRANSFORMER_IMPLS
from reshard.models.model import Model

GIB = 1 << 30
MAX_LENGTH = 1 << 27
MAX_MICROBATCHES = 1 << 20
# Megatron's --recompute-modules.
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# --store-param-remainders of the precision-aware optimizer: the bf16 weight and these bits are the fp32 one.
REMAINDERS = "int16"
CROSS_ENTROPY = ("native", "te", "none")
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


@dataclass(frozen=True)
class Recompute:
    """Megatron's activation recomputation. `method` is ``none``, ``selective`` with `modules`, ``uniform`` in
    groups of `layers`, or ``block``: the first `layers` of each chunk."""

    method: str = "none"
    layers: int = 1
    modules: frozenset[str] = frozenset()

    @staticmethod
    def of(text: str) -> "Recompute":
        """Read ``none``, ``full``, ``uniform:2``, ``block:4``, ``selective`` (Megatron's default module,
        core_attn), or modules such as ``moe_act,layernorm``. Raises ReshardError for anything else."""
        text = text.strip()
        if text == "none":
            return Recompute()
        if text in ("full", "uniform"):
            return Recompute("uniform")
        if text == "selective":
            return Recompute("selective", modules=frozenset({"core_attn"}))
        counted = re.fullmatch(r"(uniform|block):([1-9][0-9]{0,4})", text)
        if counted:
            return Recompute(counted[1], int(counted[2]))
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in MODULES]
        if unknown:
            raise OptionError(
                f"--recompute {text:.80}: {unknown[0]!r} is not one of none, full, uniform:N, block:N and "
                f"{listed(MODULES)}"
            )
        return Recompute("selective", modules=frozenset(names))

    @property
    def full(self) -> bool:
        """True where whole layers are recomputed."""
        return self.method in ("uniform", "block")

    def __str__(self) -> str:
        if self.method == "uniform" and self.layers == 1:
            return "full"
        if self.full:
            return f"{self.method}:{self.layers}"
        return ",".join(name for name in MODULES if name in self.modules) or "none"


@dataclass(frozen=True)
class Training:
    """A training run besides its layout; sizes in tokens, sequences and ranks.

    `gpus` or `dp` says how many ranks there are (default: the fewest). `num_microbatches` or
    `global_batch_size` says how long the pipeline runs (default: four times its virtual stages'
    rank count, in which it is full). `sequence_parallel` None means with TP, as experts demand.
    `recompute` is a text as `Recompute.of` takes it. `grads` is the dtype in which gradients are
    accumulated; `main_params`, `exp_avg`, `exp_avg_sq` are the optimizer's, int16 main parameters
    the precision-aware optimizer's. `optimizer_offload` is the share of the optimizer in host
    memory. `imbalance` is how many times its even share of tokens the fullest expert parallel rank
    gets; None: even, with a band up to what was measured. `cross_entropy` is Megatron's
    ``--cross-entropy-fusion-impl``, or ``none`` without that fusion. `fp8` names Transformer
    Engine's recipe, None for bf16. With ``local`` as `transformer_impl` the shapes of the weights
    are those of Megatron's local layers; activations are Transformer Engine's all the same.
    """

    seq_length: int = 4096
    micro_batch_size: int = 1
    num_microbatches: int | None = None
    global_batch_size: int | None = None
    dp: int | None = None
    cp: int = 1
    gpus: int | None = None
    sequence_parallel: bool | None = None
    recompute: str = "none"
    grads: str = "fp32"
    distributed_optimizer: bool = True
    optimizer_instances: int = 1
    main_params: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    optimizer_offload: float = 0.0
    imbalance: float | None = None
    fp8: str | None = None
    fp8_params: bool = False
    cp_comm_type: str = "p2p"
    cross_entropy: str = "native"
    dispatcher: str = "alltoall"
    probs_after_experts: bool = False
    overlap_expert_comm: bool = False
    microbatch_group_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    gradient_accumulation_fusion: bool = True
    gpus_per_host: int = 8
    transformer_impl: str = "transformer_engine"

    def __post_init__(self) -> None:
        most = {
            "seq_length": MAX_LENGTH,
            "num_microbatches": MAX_MICROBATCHES,
            "global_batch_size": MAX_MICROBATCHES,
            "microbatch_group_size": MAX_MICROBATCHES,
        }
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if each.type is int or (each.type == int | None and value is not None):
                check_number(value, _option(name), most.get(name, MAX_RANKS))
        for name, allowed in (
            ("grads", ("fp32", "bf16")),
            ("main_params", ("fp32", "fp16", REMAINDERS)),
            ("exp_avg", tuple(WIDTHS)),
            ("exp_avg_sq", tuple(WIDTHS)),
            ("fp8", (None, *RECIPES)),
            ("cp_comm_type", ("p2p", "a2a", "all_gather")),
            ("cross_entropy", CROSS_ENTROPY),
            ("dispatcher", ("alltoall", "flex", "allgather")),
            ("transformer_impl", TRANSFORMER_IMPLS),
        ):
            if getattr(self, name) not in allowed:
                raise OptionError(
                    f"{_option(name)} is {getattr(self, name)!r:.80}; it is one of {listed(allowed)}"
                )
        _check_amount(self.optimizer_offload, "--optimizer-offload", 0, 1)
        if self.imbalance is not None:
            _check_amount(self.imbalance, "--imbalance", 1e-3, 1024)
        if self.fp8_params and not self.fp8:
            raise OptionError(
                "--fp8-param-gather needs --fp8: parameters are held in fp8 for fp8 products only"
            )
        if not self.distributed_optimizer and self.optimizer_instances > 1:
            raise OptionError("--num-distributed-optimizer-instances needs the distributed optimizer")
        if self.precision_aware and not self.distributed_optimizer:
            raise OptionError(
                "--main-params, --exp-avg and --exp-avg-sq below fp32 are the precision-aware optimizer's, which "
                "needs the distributed optimizer"
            )
        Recompute.of(self.recompute)

    @property
    def precision_aware(self) -> bool:
        """True where a state of the optimizer has another dtype than fp32."""
        return {self.main_params, self.exp_avg, self.exp_avg_sq} != {"fp32"}

    @property
    def main_width(self) -> int:
        """Bytes of a main parameter."""
        return 2 if self.main_params == REMAINDERS else WIDTHS[self.main_params]


@dataclass(frozen=True)
class TrainingSetup:
    """A model at a layout in a run, with every size settled: ranks of a pipeline stage, data
    parallel ranks of dense and of expert parameters, microbatches, tokens of one microbatch on one
    rank."""

    model: Model
    layout: MegatronLayout
    training: Training
    recompute: Recompute
    dp: int
    per_stage: int
    expert_dp: int
    microbatches: int
    sequence_parallel: bool

    @staticmethod
    def of(model: Model, layout: MegatronLayout, training: Training) -> "TrainingSetup":
        """Settle the sizes. Raises ReshardError, naming both, if one does not divide another."""
        layout.check(model)
        if layout.gtp_sizes != WITHOUT_GTP:
            raise ReshardError(
                f"the memory of a trainer under GTP is not estimated, which {layout} is: leave out gtp and egtp, by "
                "which every rank has all rows of its tensor parallel part"
            )
        t, experts = training, layout.ep * layout.expert_tp
        least = layout.tp * t.cp
        if t.gpus is not None:
            if t.gpus % (least * layout.pp):
                raise OptionError(
                    f"--gpus {t.gpus} is not a multiple of tp {layout.tp} x cp {t.cp} x pp {layout.pp} = "
                    f"{least * layout.pp}"
                )
            dp = t.gpus // (least * layout.pp)
            if t.dp not in (None, dp):
                raise OptionError(f"--gpus {t.gpus} makes dp {dp}, but --dp is {t.dp}: give one of the two")
        elif t.dp is not None:
            dp = t.dp
        else:
            dp = 1
            while model.num_experts and least * dp % experts:
                dp += 1
        per_stage = least * dp
        if model.num_experts and per_stage % experts:
            raise OptionError(
                f"tp {layout.tp} x cp {t.cp} x dp {dp} are {per_stage} ranks a pipeline stage, which ep "
                f"{layout.ep} x etp {layout.expert_tp} do not divide"
            )
        check_number(per_stage * layout.pp, "the number of ranks", MAX_RANKS)
        parts = t.cp * (2 if t.cp > 1 else 1)
        if t.seq_length % parts:
            raise OptionError(
                f"--seq-length {t.seq_length} is not divided by 2 x cp {t.cp}, as context parallelism needs"
            )
        together = t.sequence_parallel is not False and layout.tp > 1
        if model.num_experts and layout.tp > 1 and not together:
            raise ReshardError("Megatron trains experts with TP only with sequence parallelism")
        if together and t.seq_length // t.cp % layout.tp:
            step = lcm(parts, t.cp * layout.tp)
            without = "" if model.num_experts else ", or --no-sequence-parallel"
            raise OptionError(
                f"--seq-length {t.seq_length} / cp {t.cp} is not divided by tp {layout.tp}, as sequence parallelism "
                f"needs: pass --seq-length {-(-t.seq_length // step) * step}{without}"
            )
        return TrainingSetup(
            model, layout, training, Recompute.of(t.recompute), dp, per_stage,
            per_stage // experts if model.num_experts else per_stage, _microbatches(layout, t, dp), together,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.per_stage * self.layout.pp

    @property
    def dense_shards(self) -> int:
        """Number of ranks over which the distributed optimizer spreads the states of dense parameters."""
        return self._shards(self.dp * self.training.cp)

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which the distributed optimizer spreads the states of routed experts."""
        return self._shards(self.expert_dp)

    def _shards(self, ranks: int) -> int:
        instances = self.training.optimizer_instances
        if not self.training.distributed_optimizer:
            return 1
        if ranks % instances:
            raise OptionError(
                f"--num-distributed-optimizer-instances {instances} does not divide {ranks} data parallel ranks"
            )
        return ranks // instances

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank, before sequence parallelism divides them."""
        return self.training.seq_length * self.training.micro_batch_size // self.training.cp


def _microbatches(layout: MegatronLayout, t: Training, dp: int) -> int:
    if t.global_batch_size is not None:
        sequences = t.micro_batch_size * dp
        if t.global_batch_size % sequences:
            raise OptionError(
                f"--global-batch-size {t.global_batch_size} is not a multiple of --micro-batch-size "
                f"{t.micro_batch_size} x dp {dp} = {sequences}"
            )
        microbatches = t.global_batch_size // sequences
        if t.num_microbatches not in (None, microbatches):
            raise OptionError(
                f"--global-batch-size makes {microbatches} microbatches, but --num-microbatches is "
                f"{t.num_microbatches}: give one of the two"
            )
    else:
        microbatches = 4 * layout.pp if t.num_microbatches is None else t.num_microbatches
    group = t.microbatch_group_size or layout.pp
    if layout.virtual_stages > 1:
        if group < layout.pp:
            raise OptionError(f"--microbatch-group-size-per-vp-stage {group} is less than pp {layout.pp}")
        if 0 < microbatches % group < layout.pp:
            raise OptionError(
                f"{microbatches} microbatches leave {microbatches % group} after groups of {group}, fewer "
                f"than pp {layout.pp}: the interleaved schedule of Megatron refuses that"
            )
    return microbatches


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_amount(value: Any, option: str, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise OptionError(f"{option} is {value!r:.80}; it is a number between {least:g} and {most:g}")
