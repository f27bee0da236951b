"""Run both systems on the same prompts, one after the other, and then the runs that measure their
rounding."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from reshard.core.errors import ReshardError
from reshard.core.system import free_memory
from reshard.megatron.parameters import expand
from reshard.parity.metrics import Metrics, Scores, metrics_of, routing_of
from reshard.parity.noise import BOTH_IN_FP32, Noise, noise_of
from reshard.parity.prompts import FarPrompt, Prompt
from reshard.parity.rounding import Rounding, rounded, rounding_of
from reshard.parity.routing import Routing
from reshard.parity.served import checkpoint_of, engine_of
from reshard.parity.systems.base import ForwardSystem, ScoringOptions, System, SystemOptions, scores_of
from reshard.parity.systems.huggingface import HuggingFace
from reshard.parity.systems.opening import is_megatron, model_of, open_system
from reshard.parity.systems.processes import device, gather_from_ranks, share_in_fp32

# Bytes of distributions that each system keeps for the KL over the vocabulary.
KEPT_BYTES = 1 << 30
SIDES = ("A", "B")
ABSOLUTE_LIMITS_NOTE = (
    "the limits are absolute ones, since no rounding could be measured: they leave room for any model"
)


class SystemComparison:
    """Two systems, the prompts that both score, and their scores.

    By side, ``A`` or ``B``: `specs` (paths or systems), `runs` (scores) and `names`. `far_runs` are
    the scores of the far prompt, by side and dtype. `noise` and `routings` compare a side with
    other runs of its checkpoint. `notes` are sentences on what could not be run; `covered` says how
    far positions went.
    """

    def __init__(self, a: str | System, b: str | System, options: SystemOptions) -> None:
        self.specs = dict(zip(SIDES, (a, b)))
        self.options = options
        # Open both before scoring either: a wrong path is better known before minutes of scoring.
        self.models = [
            spec.model if isinstance(spec, System) else model_of(spec, options.hf_config) for spec in (a, b)
        ]
        self.runs: dict[str, list[Scores]] = {}
        self.far_runs: dict[tuple[str, str], list[Scores]] = {}
        self.names: dict[str, str] = {}
        self.quantized_sides: set[str] = set()
        self.noise: dict[str, Metrics] = {}
        self.routings: list[Routing | None] = []
        self.notes: list[str] = []
        self.covered = ""
        self.unused: set[str] = set()  # parameters that transformers loaded, and no prompt used

    @property
    def dtype(self) -> str:
        """The dtype of the comparison, ``fp32`` or ``bf16``."""
        return self.options.dtype

    @property
    def quantized(self) -> bool:
        """True if an engine served quantized weights."""
        return bool(self.quantized_sides)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        reach: FarPrompt | None,
        batch_size: int,
        packed: bool,
        routing: bool,
    ) -> None:
        """Set the prompts and the options of scoring."""
        model, longest = self.models[0], max(map(len, prompts))
        context = int(model.config["max_position_embeddings"])
        unable = [side for side, spec in self.specs.items() if not takes_positions(spec)]
        self.reach = None if unable else reach
        self.prompts = list(prompts)
        keep = KEPT_BYTES // (4 * model.symbols["V"])
        self.scoring = ScoringOptions(batch_size, packed, keep, routing and model.num_experts > 0)
        last = max(longest, self.reach.positions[-1] + 1 if self.reach is not None else 0)
        self.covered = f"positions up to {last - 1:,} of {context:,}"
        if reach is not None and unable:
            scaled = model.rope()["rope_type"] != "default"
            rest = "its rotary scaling shows" if scaled else "the model may differ"
            self.covered += (
                f"; {' and '.join(unable)} cannot be given positions that jump, and no token stood where "
                f"{rest}: give a long prompt too, such as --lengths "
                f"16,64,128,{min(context - 1, reach.positions[-1] + 1)}"
            )

    def run(self, noise: bool | None) -> Noise | None:
        """Score the prompts in both systems, then what measures their rounding; return that.

        `noise` is that of `reshard.parity.parity`: False measures none, True also scores A again."""
        self.score_both()
        if noise:
            self.score_again()
        if noise is False or (self.dtype == "fp32" and not self.quantized):
            return None
        measured = self.measure_noise()
        if measured is None:
            self.notes.append(ABSOLUTE_LIMITS_NOTE)
        return measured

    def score_both(self) -> None:
        """Score the prompts in A, then in B."""
        for side, spec in self.specs.items():
            system = spec if isinstance(spec, System) else self.open(spec, self.dtype, self.options.hf_config)
            with closing(system):
                self.runs[side], self.names[side] = scores_of(system, self.prompts, self.scoring), system.name
                self._score_far(side, system, self.dtype)
                if isinstance(system, HuggingFace):  # which one rank alone has run
                    own = system.unused if "unused" in vars(system) else ()
                    self.unused |= gather_from_ranks(dict.fromkeys(own)).keys()
                if system.quantized:
                    self.quantized_sides.add(side)

    def score_again(self) -> None:
        """Score A once more, and where it is in fp32, in bf16."""
        spec = self.specs["A"]
        system = spec if isinstance(spec, System) else self.open(spec, self.dtype, self.options.hf_config)
        with closing(system):
            self._compare_with("A", "A again", scores_of(system, self.prompts, self.scoring))
        if isinstance(spec, str) and self.dtype == "fp32" and "A" not in self.quantized_sides:
            with closing(self.open(spec, "bf16", self.options.hf_config)) as system:
                self._compare_with("A", "A in bf16", scores_of(system, self.prompts, self.scoring))

    def measure_noise(self) -> Noise | None:
        """Run the checkpoint of each side in fp32 too, where possible, and compare; None if neither
        could be run."""
        in_fp32: dict[str, list[Scores] | None] = {}
        for side, spec in self.specs.items():
            in_fp32[side] = self._in_fp32(side) if isinstance(spec, str) else None
        rounding: dict[str, tuple[list[Scores] | None, list[Scores] | None]] = {}
        for side in SIDES:
            if side in self.quantized_sides:
                rounding[side] = self._quantized_rounding(side, in_fp32)
            else:
                rounding[side] = (self.runs[side], in_fp32[side])
        if self.quantized and any(None in rounding[side] for side in self.quantized_sides):
            return None  # the rounding of plain weights says nothing about quantized ones
        comparable = not self.quantized and in_fp32["A"] is not None and in_fp32["B"] is not None
        if comparable:
            self.noise[BOTH_IN_FP32] = metrics_of(in_fp32["A"] or [], in_fp32["B"] or [])
        both = (in_fp32["A"], in_fp32["B"]) if comparable else (None, None)
        rounded, exact = zip(rounding["A"], rounding["B"], strict=True)
        return noise_of(self.runs["A"], self.runs["B"], rounded, exact, both, same_kind=not self.quantized)

    @property
    def far(self) -> Metrics | None:
        """The difference at far positions, in the dtype of the comparison; None if they were not
        scored."""
        a, b = (self.far_runs.get((side, self.dtype)) for side in SIDES)
        return None if a is None or b is None else metrics_of(a, b)

    def far_noise(self) -> Noise | None:
        """Return the difference at far positions in units of rounding. A trained model can be
        chaotic there in bf16, so only its part in fp32 counts."""
        a, b = (self.far_runs.get((side, self.dtype)) for side in SIDES)
        exact_a, exact_b = (self.far_runs.get((side, "fp32")) for side in SIDES)
        if self.dtype == "fp32" or a is None or b is None or exact_a is None or exact_b is None:
            return None
        return noise_of(a, b, (a, b), (exact_a, exact_b), (exact_a, exact_b), share=share_in_fp32())

    def _in_fp32(self, side: str) -> list[Scores] | None:
        """Score a side's checkpoint in fp32, with transformers or Megatron-Core."""
        scores = self._forward(side, "fp32")
        if scores is not None and side not in self.quantized_sides:
            self._compare_with(side, f"{side} in fp32", scores)
        return scores

    def _quantized_rounding(
        self, side: str, in_fp32: dict[str, list[Scores] | None]
    ) -> tuple[list[Scores] | None, list[Scores] | None]:
        """Return scores of plain weights that are rounded as a side's engine rounds, and the same
        weights' scores in fp32: of the other side's checkpoint, if that is plain, so that the
        engine has no part in them."""
        other = SIDES[1 - SIDES.index(side)]
        rounding = rounding_of(
            self.models[SIDES.index(side)], self.options.quantization if self._is_served(side) else None
        )
        for base in (other, side):
            if in_fp32[base] is None:
                continue
            scores = self._forward(base, self.dtype, rounding)
            if scores is not None:
                exact = in_fp32[base] or []
                self.noise[f"{base} with {rounding}"] = metrics_of(exact, scores)
                return scores, exact
        return None, None

    def _forward(self, side: str, dtype: str, rounding: Rounding | None = None) -> list[Scores] | None:
        """Score a side's checkpoint in a dtype, rounded if asked; None, with a note, if it cannot
        be run here."""
        try:
            spec = checkpoint_of(str(self.specs[side]))
            self._check_memory(spec, side, dtype)
            with closing(self.open(spec, dtype, self.options.hf_config)) as system:
                assert isinstance(system, ForwardSystem)
                if rounding is None:
                    self._score_far(side, system, dtype)
                    return scores_of(system, self.prompts, self.scoring)
                with rounded(system, rounding):
                    return scores_of(system, self.prompts, self.scoring)
        except (ReshardError, torch.OutOfMemoryError, MemoryError) as error:
            self.notes.append(f"the rounding of {side} could not be measured: {error}")
            return None

    def _check_memory(self, spec: str, side: str, dtype: str) -> None:
        """Raise ReshardError if a checkpoint would clearly not fit into memory."""
        shapes = expand(self.models[SIDES.index(side)]).shapes.values()
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        parts = self.options.layout.tp * self.options.layout.pp if is_megatron(spec) else 1
        needed, free = elements * (4 if dtype == "fp32" else 2) // parts, _free_memory()
        if needed > free:
            raise ReshardError(f"in {dtype} it needs {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")

    def _is_served(self, side: str) -> bool:
        spec = self.specs[side]
        return isinstance(spec, str) and bool(engine_of(spec))

    def open(self, spec: str, dtype: str, hf_config: Path | None) -> System:
        """Open a checkpoint in a dtype, with the options of the comparison."""
        return open_system(spec, replace(self.options, dtype=dtype, hf_config=hf_config))

    def _score_far(self, side: str, system: System, dtype: str) -> None:
        if self.reach is not None:
            far = ScoringOptions(keep=self.scoring.keep, positions=self.reach.positions)
            self.far_runs[side, dtype] = scores_of(system, [self.reach.prompt], far)

    def _compare_with(self, side: str, name: str, scores: list[Scores]) -> None:
        self.noise[name] = metrics_of(self.runs[side], scores)
        self.routings.append(routing_of(self.runs[side], scores, self.models[0]))


def takes_positions(spec: str | System) -> bool:
    """Return True if a system can score tokens at positions that are not 0, 1, 2 ..."""
    return spec.takes_positions if isinstance(spec, System) else not engine_of(spec)


def _free_memory() -> int:
    """Return the bytes that are free for a model: on the host, through which it is loaded, and on
    the GPU."""
    free = free_memory() or 1 << 62
    return min(free, torch.cuda.mem_get_info()[0]) if device().type == "cuda" else free
