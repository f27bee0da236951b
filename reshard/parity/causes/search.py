"""Why two systems' logprobs differ: the runs that lead from A to B, one cause at a time.

A gets B's config, then B's weights, then runs each prompt alone, sends tokens to B's experts, lets them attend to what
B's indexers chose, and runs in fp32; B is reached from its own run in fp32 the same way back. What lies between the two
runs in fp32 is explained by none of these. `parts` has what follows from the scores.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from reshard.comm.http import is_address
from reshard.comm.ranks import on_first_rank
from reshard.core.errors import ReshardError, first_line, listed
from reshard.megatron.configs import config_differences
from reshard.parity.causes.indexers import AttendedTokens, leave_tokens_out
from reshard.parity.causes.mixed import MixedCheckpoints
from reshard.parity.causes.parts import (
    BATCHING,
    CONFIG,
    INDEXING,
    ROUNDING,
    ROUTING,
    UNEXPLAINED,
    WEIGHTS,
    Causes,
    Step,
    causes_of,
)
from reshard.parity.causes.replay import replayed
from reshard.parity.comparison import SystemComparison, takes_positions
from reshard.parity.metrics import Scores, metrics_of
from reshard.parity.served import checkpoint_of, engine_of, place_of
from reshard.parity.systems.base import ForwardSystem, ScoringOptions, System, scores_of
from reshard.parity.systems.opening import is_megatron
from reshard.parity.systems.processes import failing_together
from reshard.storage.compare import diff

# Share of the difference below which what is left after all other causes is not looked into.
MATTERS = 0.02
# With all tokens at one position a model is another function, in which the same fault is some tenths larger or smaller.
# A smaller share of positions than this is taken for that.
LEAST_OF_POSITIONS = 0.2
# What a system does while it scores the prompt of this number alone.
During = Callable[[System, int], AbstractContextManager[None]]


def find_causes(comparison: SystemComparison) -> Causes:
    """Return why the two systems of a comparison differ, which has scored both. Every rank calls this."""
    with tempfile.TemporaryDirectory(prefix="reshard-why-") as own:
        search = _Search(comparison, on_first_rank(lambda: Path(own)))
        steps = search.steps()
    return causes_of(comparison.runs["A"], steps, search.notes)


class _Search:
    """The runs that lead from A to B, each scored alone where it can be."""

    def __init__(self, comparison: SystemComparison, folder: Path) -> None:
        self.comparison, self.folder, self.notes = comparison, folder, list[str]()
        self.specs = dict(comparison.specs)
        self.in_fp32: dict[str, str] = {}  # by side, the checkpoint that ran in fp32 last
        self.paths = all(isinstance(s, str) and not is_address(place_of(s)) for s in self.specs.values())
        self.alone = replace(comparison.scoring, batch_size=1, packed=False)
        self.taken: tuple[During, ...] = ()  # the choices of B that A is told to take

    def steps(self) -> list[Step]:
        """Return the steps from A as it was run to B as it was run."""
        forth = [*self._models(), *self._alone("A"), *self._choices(), *self._in_fp32("A")]
        back = [*self._alone("B"), *self._in_fp32("B")]
        # The way from B's run in fp32 to B, turned around: each step then ends where it began.
        ends = [self.comparison.runs["B"], *(step.scores for step in back)]
        turned = [Step(step.cause, end, step.detail) for step, end in zip(back, ends, strict=False)][::-1]
        start = forth[-1].scores if forth else self.comparison.runs["A"]
        positions = self._of_positions(start, ends[-1])
        return [*forth, Step(UNEXPLAINED, ends[-1], self._between(forth, back), positions), *turned]

    def _of_positions(self, a: list[Scores], b: list[Scores]) -> float:
        """Return the share of the last step's difference that is gone where all tokens stand at position 0, where
        the step matters and both systems of it can be told positions."""
        apart = metrics_of(a, b).mean_abs
        if apart <= MATTERS * metrics_of(*self.comparison.runs.values()).mean_abs:
            return 0.0
        ends = [
            (self.in_fp32[side], "fp32") if side in self.in_fp32 else (spec, self.comparison.dtype)
            for side, spec in self.specs.items()
        ]
        if not all(takes_positions(spec) for spec, _ in ends):
            self.notes.append("the part of positions was not told apart: an engine counts them itself")
            return 0.0
        try:
            at_zero = [self._score(*end, self.alone, self.taken, at_zero=True) for end in ends]
        except (ReshardError, torch.OutOfMemoryError, MemoryError) as error:
            self.notes.append(f"the part of positions was not told apart: {first_line(error)}")
            return 0.0
        share = 1 - metrics_of(*at_zero).mean_abs / apart
        return share if share > LEAST_OF_POSITIONS else 0.0

    def _between(self, forth: Sequence[Step], back: Sequence[Step]) -> str:
        both = all(any(step.cause == ROUNDING for step in steps) for steps in (forth, back))
        in_fp32 = self.comparison.dtype == "fp32" and not self.comparison.quantized
        return "two implementations in fp32" if both or in_fp32 else "implementations, kernels and rounding"

    def _models(self) -> list[Step]:
        """Return the steps by which A gets B's config, and B's weights."""
        if not self.paths:
            self.notes.append(
                "weights and configs were not exchanged: a running engine has no checkpoint to change"
            )
            return []
        fields, steps = config_differences(*self.comparison.models), list[Step]()
        tensors = on_first_rank(self._different_tensors)
        mixed = MixedCheckpoints(str(self.specs["A"]), str(self.specs["B"]), self.comparison, self.folder)
        for cause, names, weights_of in ((CONFIG, [*fields], "A"), (WEIGHTS, tensors, "B")):
            if not names:
                continue
            try:
                with failing_together():
                    spec = mixed.checkpoint(weights_of)
                scores = self._score(spec, self.comparison.dtype, self.comparison.scoring)
            except ReshardError as error:
                self.notes.append(
                    f"{cause} could not be exchanged ({listed(names, 3)} differ): {first_line(error)}"
                )
                continue
            steps.append(Step(cause, scores, listed(names, 3)))
            self.specs["A"] = spec
        return steps

    def _different_tensors(self) -> list[str]:
        a, b = (checkpoint_of(str(spec)) for spec in self.specs.values())
        config = self.comparison.options.hf_config
        reads_config = config is not None and any(map(is_megatron, (a, b)))
        result = diff(a, b, hf_config=config if reads_config else None)
        return [*(d.name for d in result.differences if d.unequal), *result.only_a, *result.only_b]

    def _alone(self, side: str) -> list[Step]:
        """Return the step by which a side scores each prompt alone, where it did not."""
        spec, scoring = self.specs[side], self.comparison.scoring
        batches = bool(isinstance(spec, str) and engine_of(spec)) or not isinstance(spec, str | ForwardSystem)
        if not batches and scoring.batch_size == 1 and not scoring.packed:
            return []
        return [
            Step(BATCHING, self._score(spec, self.comparison.dtype, self.alone), f"{side}, each prompt alone")
        ]

    def _choices(self) -> list[Step]:
        """Return the steps by which A takes B's experts, and B's tokens to attend to. Either may differ only because
        the other does: what leaves less of the difference alone comes first."""
        left, steps = self._experts() | self._tokens(), list[Step]()
        while left:
            runs: dict[str, list[Scores]] = {}
            for cause, take in list(left.items()):
                try:
                    runs[cause] = self._score(
                        self.specs["A"], self.comparison.dtype, self.alone, (*self.taken, take)
                    )
                except ReshardError as error:
                    self.notes.append(f"{cause} was not told apart: {first_line(error)}")
                    del left[cause]
            if runs:
                first = min(
                    runs, key=lambda cause: metrics_of(runs[cause], self.comparison.runs["B"]).mean_abs
                )
                self.taken += (left.pop(first),)
                steps.append(
                    Step(first, runs[first], f"B's {'experts' if first == ROUTING else 'tokens'} in A")
                )
        return steps

    def _experts(self) -> dict[str, During]:
        """Return how A sends tokens to the experts of B, where it can be told to."""
        if not self.comparison.models[0].num_experts:
            return {}
        choices = [scores.choices for scores in self.comparison.runs["B"] if scores.choices is not None]
        if len(choices) < len(self.comparison.prompts) or not self._replays("A"):
            self.notes.append(
                "routing was not told apart: B does not say which experts it chose, or A cannot be told which to take"
            )
            return {}
        return {ROUTING: lambda system, prompt: replayed(system, choices[prompt])}

    def _tokens(self) -> dict[str, During]:
        """Return how the indexers of A choose the tokens of B's, where they leave some out and can be told which."""
        if not leave_tokens_out(self.comparison.models, self.comparison.prompts):
            return {}
        tokens, scoring = AttendedTokens(), replace(self.alone, keep=0, routing=False)
        try:
            if not all(map(self._replays, self.specs)):
                raise ReshardError(
                    "B does not say which tokens its indexers chose, or A cannot be told which to take"
                )
            self._score(self.specs["B"], self.comparison.dtype, scoring, [tokens.recorded])
        except ReshardError as error:
            self.notes.append(f"indexing was not told apart: {first_line(error)}")
            return {}
        tokens.gather()
        return {INDEXING: tokens.replayed}

    def _replays(self, side: str) -> bool:
        spec = self.specs[side]
        return not engine_of(spec) if isinstance(spec, str) else isinstance(spec, ForwardSystem)

    def _in_fp32(self, side: str) -> list[Step]:
        """Return the step by which a side runs in fp32: its checkpoint, in transformers or Megatron-Core."""
        spec = self.specs[side]
        if self.comparison.dtype == "fp32" and side not in self.comparison.quantized_sides:
            return []
        if not isinstance(spec, str):
            self.notes.append(f"the rounding of {side} was not told apart: a running system is in one dtype")
            return []
        try:
            scores = self._score(checkpoint_of(spec), "fp32", self.alone, self.taken)
            self.in_fp32[side] = checkpoint_of(spec)
        except (ReshardError, torch.OutOfMemoryError, MemoryError) as error:
            self.notes.append(f"the rounding of {side} was not told apart: {first_line(error)}")
            return []
        kernels = " and kernels" if engine_of(spec) else ""
        return [Step(ROUNDING, scores, f"{side}{kernels} in {self.comparison.dtype}")]

    def _score(
        self,
        spec: str | System,
        dtype: str,
        scoring: ScoringOptions,
        during: Sequence[During] = (),
        at_zero: bool = False,
    ) -> list[Scores]:
        """Score the prompts in a system, each alone in these contexts, `at_zero` with all tokens at position 0."""
        prompts = self.comparison.prompts
        with closing(spec if isinstance(spec, System) else self._open(spec, dtype)) as system:
            if scoring.batch_size > 1 or scoring.packed:
                return scores_of(system, prompts, scoring)
            kept, scores = scoring.kept_of(len(prompts)), dict[int, list[Scores]]()
            # The longest first: an engine is started for the first prompts that it gets.
            for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
                positions = (0,) * len(prompts[i]) if at_zero else None
                runs_here = system.spread or dist.get_rank() == 0
                with failing_together(), ExitStack() as stack:
                    for context in during if runs_here else ():
                        stack.enter_context(context(system, i))
                    scores[i] = scores_of(
                        system, [prompts[i]], replace(scoring, keep=kept[i], positions=positions)
                    )
            return [score for i in sorted(scores) for score in scores[i]]

    def _open(self, spec: str, dtype: str) -> System:
        is_mixed = Path(checkpoint_of(spec)).is_relative_to(self.folder)  # which has its config in itself
        return self.comparison.open(spec, dtype, None if is_mixed else self.comparison.options.hf_config)
