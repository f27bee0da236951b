"""Layouts: Megatron's rank mesh (TP, PP, VPP, EP, ETP) and which layers each pipeline stage has.

All of it is arithmetic on the sizes; no process group is asked. Ranks are numbered in Megatron's default
order: within a pipeline stage, tensor-parallel ranks are neighbors (for experts: ETP, then EP), and stages
follow each other.
"""

import re
from dataclasses import dataclass
from math import isqrt, lcm

from reshard.core.errors import ReshardError
from reshard.models.model import MAX_LAYERS, Model

MAX_SIZE = 1 << 16  # of a parallel axis, and of all pipeline stages together: nobody has as many GPUs


@dataclass(frozen=True)
class Stage:
    """What one virtual pipeline stage holds: global decoder layers, and whether embedding, output and MTP are
    with it."""

    layers: tuple[int, ...]
    embedding: bool = False
    output: bool = False
    mtp: bool = False


@dataclass(frozen=True)
class MegatronLayout:
    """Megatron's parallel sizes. `etp` None means `tp`, as in Megatron; `pipeline` is its layout string, such
    as ``Et*3|t*4L``."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_in_split: bool = False
    loss_in_split: bool = False
    pipeline: str | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "etp", "first_stage_layers", "last_stage_layers"):
            value, may_lack = getattr(self, name), name in ("etp", "first_stage_layers", "last_stage_layers")
            if type(value) is not int and not (value is None and may_lack):
                raise ReshardError(
                    f"--{name.replace('_', '-')} is {value!r:.80}, which is not a whole number"
                )
        if not isinstance(self.pipeline, (str, type(None))):
            raise ReshardError(
                f"--pipeline-layout is {self.pipeline!r:.80}, which is not a text such as Et*3|t*4L"
            )
        for name in ("tp", "pp", "vpp", "ep", "expert_tp"):
            if getattr(self, name) < 1:
                raise ReshardError(
                    f"--{name.replace('expert_tp', 'etp')} is {getattr(self, name)}; sizes start at 1"
                )
            if getattr(self, name) > MAX_SIZE:
                raise ReshardError(
                    f"--{name.replace('expert_tp', 'etp')} is {getattr(self, name)}; sizes end at {MAX_SIZE}"
                )
        if self.pp * self.vpp > MAX_SIZE:
            raise ReshardError(
                f"--pp {self.pp} --vpp {self.vpp} are {self.pp * self.vpp} virtual stages; "
                f"at most {MAX_SIZE} can be"
            )

    @property
    def expert_tp(self) -> int:
        """Expert tensor parallel size."""
        return self.tp if self.etp is None else self.etp

    def ranks_per_stage(self, model: Model) -> int:
        """The fewest ranks that a pipeline stage can have: a multiple of TP and, with experts, of EP times
        ETP."""
        return lcm(self.tp, self.ep * self.expert_tp) if model.num_experts else self.tp

    def world_size(self, model: Model) -> int:
        """The fewest ranks that this layout needs."""
        return self.pp * self.ranks_per_stage(model)

    def check(self, model: Model) -> None:
        """Raise ReshardError where a size does not divide the model, naming the sizes that would."""
        s = model.symbols
        if s.get("NQ", 0) % self.tp or (s.get("NKV", 1) % self.tp and self.tp % s.get("NKV", 1)):
            fits = [n for n in _divisors(s["NQ"]) if s.get("NKV", n) % n == 0 or n % s.get("NKV", n) == 0]
            heads = f"{s['NQ']} attention heads" + (f" in {s['NKV']} query groups" if "NKV" in s else "")
            raise ReshardError(f"--tp {self.tp} does not divide {heads}; sizes that do: {_numbers(fits)}")
        dense = [("F", "intermediate_size")] if "dense" in model.kinds else []
        sizes = [(f"--tp {self.tp}", self.tp, s[symbol], name) for symbol, name in dense]
        if model.num_experts:
            sizes.append((f"--etp {self.expert_tp}", self.expert_tp, s["FE"], "moe_intermediate_size"))
            sizes.append((f"--ep {self.ep}", self.ep, model.num_experts, "experts"))
            if model.shared_width:
                sizes.append(
                    (f"--tp {self.tp}", self.tp, model.shared_width, "shared expert intermediate size")
                )
        elif self.ep > 1 or (self.etp or 1) > 1:
            raise ReshardError(
                f"--ep {self.ep} --etp {self.expert_tp}: a {model.family.name} model without "
                f"experts has only 1 and 1"
            )
        for flag, n, size, name in sizes:
            if size % n:
                raise ReshardError(
                    f"{flag} does not divide {name} {size}; sizes that do: {_numbers(_divisors(size))}"
                )
        self.stages(model)

    def stages(self, model: Model) -> list[list[Stage]]:
        """The stages as ``[pp rank][virtual stage]``. Raises ReshardError where the layers do not divide."""
        layers, mtp = model.num_layers, model.mtp_layers > 0
        if self.pipeline is not None:
            return self._stages_from_string(model)
        if self.vpp > 1 and self.pp == 1:
            raise ReshardError(f"--vpp {self.vpp} needs --pp above 1")
        uneven = self.first_stage_layers is not None or self.last_stage_layers is not None
        if uneven and (self.embedding_in_split or self.loss_in_split):
            raise ReshardError(
                "--first-stage-layers and --last-stage-layers do not go with embedding or "
                "loss in the pipeline split"
            )
        ends = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers} if self.pp > 1 else {}
        if uneven and not ends:
            raise ReshardError("--first-stage-layers and --last-stage-layers need --pp above 1")
        given = {rank: n for rank, n in ends.items() if n is not None}
        slots = layers + self.embedding_in_split + self.loss_in_split
        middle, rest = self.pp - len(given), slots - sum(given.values())
        if (middle and rest % middle) or (not middle and rest) or rest < 0:
            if given:
                raise ReshardError(
                    f"{rest} of {layers} layers are left for the {middle} other pipeline "
                    f"stages, which do not divide them"
                )
            raise ReshardError(
                f"--pp {self.pp} does not divide {slots} layers; sizes that do: "
                f"{_numbers(_divisors(slots))}, or use --first-stage-layers, "
                f"--last-stage-layers or --pipeline-model-parallel-layout"
            )
        per_rank = [given.get(rank, rest // middle if middle else 0) for rank in range(self.pp)]
        for n in per_rank:
            if n % self.vpp:
                raise ReshardError(
                    f"--vpp {self.vpp} does not divide a stage of {n} layers; sizes that do: "
                    f"{_numbers(_divisors(n))}"
                )
        stages: list[list[Stage]] = [[] for _ in range(self.pp)]
        position = 0
        for virtual in range(self.vpp):
            for rank in range(self.pp):
                first, last = rank == virtual == 0, (rank, virtual) == (self.pp - 1, self.vpp - 1)
                count = (
                    per_rank[rank] // self.vpp
                    - (first and self.embedding_in_split)
                    - (last and self.loss_in_split)
                )
                if count < 0:
                    raise ReshardError(
                        "a stage with the embedding or the loss in the pipeline split has no slot for it"
                    )
                stages[rank].append(
                    Stage(tuple(range(position, position + count)), first, last, last and mtp)
                )
                position += count
        return stages

    def _stages_from_string(self, model: Model) -> list[list[Stage]]:
        if (
            self.first_stage_layers is not None
            or self.last_stage_layers is not None
            or self.embedding_in_split
            or self.loss_in_split
        ):
            raise ReshardError(
                "--pipeline-model-parallel-layout says where every layer is; give no other "
                "flag for uneven stages"
            )
        rows = parse_pipeline(self.pipeline or "")
        if len(rows) % self.pp or (self.vpp > 1 and len(rows) != self.pp * self.vpp):
            raise ReshardError(
                f"pipeline layout {self.pipeline!r} has {len(rows)} stages, which --pp {self.pp} --vpp "
                f"{self.vpp} does not fit"
            )
        text = "".join(rows)
        for letter, count, name in (("E", 1, "embedding (E)"), ("L", 1, "loss (L)"), ("t", model.num_layers, "decoder layers (t)"),
                                    ("m", model.mtp_layers, "MTP layers (m)")):  # fmt: skip
            if text.count(letter) != count:
                raise ReshardError(
                    f"pipeline layout {self.pipeline!r} has {text.count(letter)} {name}; the "
                    f"model has {count}"
                )
        if not re.fullmatch("Et*m*L", text):
            raise ReshardError(f"pipeline layout {self.pipeline!r} must run from E over t and m to L")
        with_mtp = [index for index, row in enumerate(rows) if "m" in row]
        before_last_virtual_stage = any(index < len(rows) - self.pp for index in with_mtp)
        on_first_rank = self.pp > 1 and any(index % self.pp == 0 for index in with_mtp)
        if len(with_mtp) > 1 or before_last_virtual_stage or on_first_rank:
            raise ReshardError(
                f"pipeline layout {self.pipeline!r} must keep all m in one last virtual "
                f"stage, not on the first rank"
            )
        stages: list[list[Stage]] = [[] for _ in range(self.pp)]
        position = 0
        for index, row in enumerate(rows):
            layers = tuple(range(position, position + row.count("t")))
            stages[index % self.pp].append(Stage(layers, "E" in row, "L" in row, "m" in row))
            position += len(layers)
        return stages

    @property
    def virtual_stages(self) -> int:
        """Virtual stages per pipeline rank; a pipeline layout string gives them by itself."""
        return self.vpp if self.pipeline is None else len(parse_pipeline(self.pipeline)) // self.pp

    def megatron_args(self) -> dict:
        """Megatron-LM's arguments for this layout, by their names in ``args``."""
        args: dict = {
            "tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep, "expert_tensor_parallel_size": self.expert_tp, "context_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": self.virtual_stages if self.virtual_stages > 1 else None,
        }  # fmt: skip
        optional = {
            "decoder_first_pipeline_num_layers": self.first_stage_layers, "pipeline_model_parallel_layout": self.pipeline,
            "decoder_last_pipeline_num_layers": self.last_stage_layers,
            "account_for_embedding_in_pipeline_split": self.embedding_in_split or None,
            "account_for_loss_in_pipeline_split": self.loss_in_split or None,
        }  # fmt: skip
        return args | {key: value for key, value in optional.items() if value is not None}

    def __str__(self) -> str:
        sizes = [("TP", self.tp), ("PP", self.pp), ("VPP", self.vpp), ("EP", self.ep)]
        shown = [f"{name}{n}" for name, n in sizes if n > 1] or ["TP1"]
        if self.expert_tp != self.tp:
            shown.append(f"ETP{self.expert_tp}")
        return " ".join(shown + ([self.pipeline] if self.pipeline else []))


def parse_pipeline(text: str) -> list[str]:
    """The stages of Megatron's ``--pipeline-model-parallel-layout``, in pipeline order.

    >>> parse_pipeline("Et*2|(tt|)*2,mL")
    ['Ett', 'tt', 'tt', 'mL']
    """
    unrolled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*([0-9]+)", r"(.)\*([0-9]+)"):
        # Digits are counted before they are read: Python refuses to read thousands of them.
        if len(unrolled) > 4 * MAX_LAYERS:
            raise ReshardError(
                f"pipeline layout {_short(text)} has {len(text):,} characters; it describes "
                f"at most {MAX_LAYERS} layers"
            )
        long = [
            m for m in re.finditer(pattern, unrolled) if len(m[2]) > 6 or len(m[1]) * int(m[2]) > MAX_LAYERS
        ]
        if long or sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, unrolled)) > 2 * MAX_LAYERS:
            what = long[0][0] if long else text
            raise ReshardError(
                f"pipeline layout {_short(text)} repeats {_short(what)}; at most "
                f"{MAX_LAYERS} layers can be laid out"
            )
        unrolled = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), unrolled)
    unknown = set(unrolled) - set("EtmL|")
    if unknown or not unrolled:
        raise ReshardError(
            f"pipeline layout {_short(text)} has {' '.join(sorted(unknown)[:20]) or 'nothing'} in it; it is "
            f"made of E, t, m, L, | and *n"
        )
    return unrolled.split("|")


def _short(text: str) -> str:
    return repr(text) if len(text) <= 100 else repr(text[:100]) + " ..."


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _numbers(values: list[int]) -> str:
    return ", ".join(map(str, values))
