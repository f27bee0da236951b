"""Megatron's parallel sizes: TP, PP, VPP, EP, ETP, GTP, and how pipeline stages divide the layers.

All of it is arithmetic on the sizes; no process group is asked. Ranks are numbered in Megatron's default
order: within a pipeline stage, tensor-parallel ranks are neighbors (for experts: ETP, then EP), and stages
follow each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import Any, NamedTuple

from reshard.core.errors import OptionError, ReshardError
from reshard.megatron.gtp import WITHOUT_GTP, Gtp
from reshard.megatron.stages import (
    Stage,
    divisors,
    numbers,
    parse_pipeline,
    stages_of_sizes,
    stages_of_string,
)
from reshard.models.family import no_table
from reshard.models.model import Model

MAX_SIZE = 1 << 16  # of a parallel axis, and of all pipeline stages together: nobody has as many GPUs
# Megatron's longer names of the sizes, which are accepted too.
LONG_NAMES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "gtp_weight_remat_size": "gtp",
    "expert_gtp_weight_remat_size": "egtp",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}


class _Misfit(NamedTuple):
    """A parallel size that does not divide a model: its `flag`, and what it has to divide, in words and as a number."""

    flag: str
    size: int
    what: str


@dataclass(frozen=True, init=False)
class MegatronLayout:
    """Megatron's parallel sizes, under the short names and, as keywords, under Megatron's own.

    `etp` None means `tp`, as in Megatron. `pipeline_model_parallel_layout` is Megatron's string, such as
    ``Et*3|t*4L``. `gtp` and `egtp` are the ranks of generalized tensor parallelism, for experts apart:
    ``--tensor-parallel-num-weight-shards`` divided by TP, and the same of experts by ETP. Raises ReshardError
    for a size that is not a positive whole number.

    >>> str(MegatronLayout(tp=2, pipeline_model_parallel_size=4))
    'TP2 PP4'
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    gtp: int = 1
    egtp: int = 1

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        vpp: int | None = 1,
        ep: int = 1,
        etp: int | None = None,
        num_layers_in_first_pipeline_stage: int | None = None,
        num_layers_in_last_pipeline_stage: int | None = None,
        account_for_embedding_in_pipeline_split: bool = False,
        account_for_loss_in_pipeline_split: bool = False,
        pipeline_model_parallel_layout: str | None = None,
        gtp: int = 1,
        egtp: int = 1,
        **other_names: Any,
    ) -> None:
        arguments = locals()
        values = {field.name: arguments[field.name] for field in fields(self)}
        for other, value in other_names.items():
            name = LONG_NAMES.get(other)
            if name is None:
                raise TypeError(f"MegatronLayout() got an unexpected keyword argument {other!r}")
            if values[name] != _DEFAULTS[name]:
                raise OptionError(f"{other} and {name} are the same size: give one of the two")
            values[name] = value
        if values["vpp"] is None:  # as Megatron has it without virtual stages
            values["vpp"] = 1
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_values()

    def _check_values(self) -> None:
        optional = ("etp", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        for name in ("tp", "pp", "vpp", "ep", "gtp", "egtp", *optional):
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name in optional):
                raise OptionError(f"{_flag(name)} is {value!r:.80}, which is not a whole number")
        if not isinstance(self.pipeline_model_parallel_layout, (str, type(None))):
            raise OptionError(
                f"--pipeline-model-parallel-layout is {self.pipeline_model_parallel_layout!r:.80}, which is not "
                f"a text such as Et*3|t*4L"
            )
        for name in ("tp", "pp", "vpp", "ep", "gtp", "egtp", "expert_tp"):
            size, flag = getattr(self, name), _flag(name.replace("expert_tp", "etp"))
            if size < 1:
                raise OptionError(f"{flag} is {size}; sizes start at 1")
            if size > MAX_SIZE:
                raise OptionError(f"{flag} is {size}; sizes end at {MAX_SIZE}")
        if self.pp * self.vpp > MAX_SIZE:
            raise OptionError(
                f"--pp {self.pp} --vpp {self.vpp} are {self.pp * self.vpp} virtual stages; "
                f"at most {MAX_SIZE} can be"
            )

    @property
    def expert_tp(self) -> int:
        """Expert tensor parallel size."""
        return self.tp if self.etp is None else self.etp

    @property
    def gtp_sizes(self) -> Gtp:
        """The sizes of GTP."""
        return Gtp(self.gtp, self.egtp)

    def ranks_per_stage(self, model: Model) -> int:
        """The fewest ranks that a pipeline stage can have: a multiple of TP times GTP and, with experts, of EP
        times ETP times their GTP."""
        ranks, experts = self.tp * self.gtp, self.ep * self.expert_tp * self.egtp
        return lcm(ranks, experts) if model.num_experts else ranks

    def world_size(self, model: Model) -> int:
        """The fewest ranks that this layout needs."""
        return self.pp * self.ranks_per_stage(model)

    def check(self, model: Model) -> None:
        """Raise ReshardError if a size does not divide the model, naming all sizes that would."""
        if not model.family.has_megatron_names:
            raise no_table(model.family)
        if self.gtp_sizes != WITHOUT_GTP and {"NK", "NM"} & model.symbols.keys():
            raise ReshardError(
                f"--gtp {self.gtp} --egtp {self.egtp}: a {model.family.name} model has layers of linear attention or "
                f"Mamba, whose rows Megatron's GTP arranges in another way, which is not supported"
            )
        if not model.num_experts and (self.ep > 1 or (self.etp or 1) > 1 or self.egtp > 1):
            egtp = f" --egtp {self.egtp}" if self.egtp > 1 else ""
            raise ReshardError(
                f"--ep {self.ep} --etp {self.expert_tp}{egtp}: a {model.family.name} model without experts has only "
                f"1 {'and 1' if not egtp else 'for each'}"
            )
        for misfit in self._misfits(model):
            name = misfit.flag.removeprefix("--")
            size = self.expert_tp if name == "etp" else getattr(self, name)
            fitting = [n for n in divisors(misfit.size) if self._with(name, n)._fits(model, name)]
            raise ReshardError(
                f"{misfit.flag} {size} does not divide {misfit.what}; sizes that do: {numbers(fitting)}"
            )
        if model.num_experts and model.family.megatron["add_bias_linear"] and self.expert_tp > 1:
            raise ReshardError(
                f"--etp {self.expert_tp} (by default --tp): Megatron-Core has experts with biases at --etp 1 only"
            )
        self.stages(model)

    def _with(self, name: str, size: int) -> "MegatronLayout":
        """Return this layout with another size."""
        values: dict[str, Any] = {name: size}
        return replace(self, **values)

    def _fits(self, model: Model, name: str) -> bool:
        """Return True if one of the sizes, and what follows from it, divides all of a model that it has to."""
        flags = {f"--{name}"} | ({"--etp"} if name == "tp" and self.etp is None else set())
        return all(misfit.flag not in flags for misfit in self._misfits(model))

    def _misfits(self, model: Model) -> Iterator["_Misfit"]:
        """Yield each size that does not divide something of a model that it has to."""
        s, symbols = model.symbols, model.family.symbols
        if s.get("NQ", 0) % self.tp or (s.get("NKV", 1) % self.tp and self.tp % s.get("NKV", 1)):
            groups = f" in {s['NKV']} query groups" if "NKV" in s else ""
            yield _Misfit("--tp", s["NQ"], f"{s['NQ']} attention heads{groups}")
        sizes = [
            ("--tp", self.tp, s[symbol], symbols[symbol])
            for symbol in ("NK", "NV", "NM", "NG")
            if symbol in s
        ]
        if any("dense" in kind.split() for kind in model.kinds):
            sizes.append(("--tp", self.tp, s["F"], "intermediate_size"))
        if model.num_experts:
            sizes.append(("--etp", self.expert_tp, s["FE"], symbols["FE"]))
            sizes.append(("--ep", self.ep, model.num_experts, "experts"))
            if model.shared_width:
                sizes.append(("--tp", self.tp, model.shared_width, "shared expert intermediate size"))
        for flag, n, size, name in sizes:
            if size % n:
                yield _Misfit(flag, size, f"{name} {size}")

    def stages(self, model: Model) -> list[list[Stage]]:
        """Return the stages as ``[pp rank][virtual stage]``. Raises ReshardError if the layers do not
        divide."""
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        embedding = self.account_for_embedding_in_pipeline_split
        loss = self.account_for_loss_in_pipeline_split
        text = self.pipeline_model_parallel_layout
        if text is None:
            return stages_of_sizes(model, self.pp, self.vpp, first, last, embedding, loss)
        if first is not None or last is not None or embedding or loss:
            raise OptionError(
                "--pipeline-model-parallel-layout says where every layer is; give no other flag for uneven stages"
            )
        return stages_of_string(model, text, self.pp, self.vpp)

    @property
    def virtual_stages(self) -> int:
        """Virtual stages per pipeline rank; a layout string gives them by itself."""
        text = self.pipeline_model_parallel_layout
        return self.vpp if text is None else len(parse_pipeline(text)) // self.pp

    def megatron_args(self) -> dict:
        """Megatron-LM's arguments for this layout, by their names in ``args``."""
        args: dict = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tp,
            "context_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": self.virtual_stages if self.virtual_stages > 1 else None,
        }
        optional = {
            "tensor_parallel_num_weight_shards": self.tp * self.gtp if self.gtp > 1 else None,
            "gtp_weight_remat_size": self.gtp if self.gtp > 1 else None,
            "expert_tensor_parallel_num_weight_shards": self.expert_tp * self.egtp if self.egtp > 1 else None,
            "expert_gtp_weight_remat_size": self.egtp if self.egtp > 1 else None,
            "decoder_first_pipeline_num_layers": self.num_layers_in_first_pipeline_stage,
            "decoder_last_pipeline_num_layers": self.num_layers_in_last_pipeline_stage,
            "account_for_embedding_in_pipeline_split": self.account_for_embedding_in_pipeline_split or None,
            "account_for_loss_in_pipeline_split": self.account_for_loss_in_pipeline_split or None,
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout,
        }
        return args | {key: value for key, value in optional.items() if value is not None}

    def __str__(self) -> str:
        sizes = [("TP", self.tp), ("PP", self.pp), ("VPP", self.vpp), ("EP", self.ep)]
        shown = [f"{name}{n}" for name, n in sizes if n > 1] or ["TP1"]
        if self.expert_tp != self.tp:
            shown.append(f"ETP{self.expert_tp}")
        shown += [f"{name}{n}" for name, n in (("GTP", self.gtp), ("EGTP", self.egtp)) if n > 1]
        return " ".join([*shown, *filter(None, [self.pipeline_model_parallel_layout])])


def checked_layout(layout: MegatronLayout | None) -> MegatronLayout:
    """Return the layout, by default that of one rank. Raises ReshardError for something else."""
    if not isinstance(layout, MegatronLayout | None):
        raise OptionError(
            f"layout is {layout!r:.80}, not a reshard.MegatronLayout such as MegatronLayout(tp=2)"
        )
    return layout or MegatronLayout()


_DEFAULTS = {field.name: field.default for field in fields(MegatronLayout)}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
