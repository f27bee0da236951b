"""The result of a comparison: figures, limits and what exceeds them, for people and for programs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reshard.core.errors import listed
from reshard.core.printed import NoTruthValue, Printed
from reshard.parity.causes.parts import Causes
from reshard.parity.limits import Limits
from reshard.parity.metrics import Metrics, Scores
from reshard.parity.noise import BOTH_IN_FP32, Noise
from reshard.parity.prompts import FarPrompt, Prompt
from reshard.parity.routing import Routing


@dataclass
class ParityReport(NoTruthValue, Printed):
    """The figures of two systems' scores of the same prompts, and the limits that they exceed.

    - `noise`: how far a system is from other runs of its checkpoint, by name (``A in fp32``).
      `rounding`: the difference in units of that; None if it was not measured.
    - `routing`: None if the model has no experts, or a system does not tell which it chose.
    - `unmeasured`: sentences on default limits whose figure was not measured, and on what could not
      be run.
    - `quantized`: an engine served quantized weights, which have limits of their own.
    - `fields`: the fields by which the two configs make two models, with both values.
    - `far`: the difference at the far positions of `reach`, where both systems take positions;
      `covered` says how far positions went.
    - `not_looked_at`: tensors of the checkpoints that no run used, such as MTP layers and experts that no token chose.
    - `causes`: why the two differ, and how much each cause makes; None unless it was asked for.
    - `first_process`: True on the rank that prints.
    """

    a: str
    b: str
    dtype: str
    overall: Metrics
    prompts: list[Metrics] = field(repr=False)
    limits: Limits
    exceeded: list[str]
    noise: dict[str, Metrics]
    routing: Routing | None
    scores_a: list[Scores] = field(repr=False)
    scores_b: list[Scores] = field(repr=False)
    tokens: list[Prompt] = field(repr=False)
    first_process: bool = True
    unmeasured: list[str] = field(default_factory=list)
    quantized: bool = False
    rounding: Noise | None = None
    fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    reach: FarPrompt | None = None
    far: Metrics | None = None
    covered: str = ""
    causes: Causes | None = None
    not_looked_at: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every limit holds."""
        return not self.exceeded

    @property
    def worst(self) -> int:
        """Index of the prompt with the largest mean |difference|."""
        return max(range(len(self.prompts)), key=lambda i: self.prompts[i].mean_abs)

    @property
    def worst_prompt(self) -> Prompt:
        """Tokens of the prompt with the largest mean |difference|."""
        return self.tokens[self.worst]

    @property
    def diverging_prompt(self) -> tuple[Prompt, tuple[int, ...] | None]:
        """The prompt that shows best where the two diverge, and its positions if they are not 0, 1,
        2 ..."""
        if self.reach is None or self.far is None or not self.far_only:
            return self.worst_prompt, None
        return self.reach.prompt, self.reach.positions

    @property
    def far_only(self) -> bool:
        """True if only the far positions show a difference: all sentences but those on configs are
        about them."""
        figures = self.exceeded[len(self.fields) :]
        return bool(figures) and all(sentence.startswith(f"at {self.covered}") for sentence in figures)

    @property
    def columns(self) -> dict[str, Metrics]:
        """The columns of the table of figures, by heading."""
        far = {} if self.far is None else {"at far positions": self.far}
        other_runs = {
            "both in fp32" if name == BOTH_IN_FP32 else f"{name[0]} to {name}": metrics
            for name, metrics in self.noise.items()
        }
        return {"A to B": self.overall} | far | other_runs

    @property
    def sentences(self) -> list[str]:
        """Sentences on rounding, routing and coverage, for people."""
        sentences = [] if self.rounding is None else [f"rounding: {self.rounding.sentence}"]
        if self.routing is not None:
            sentences.append(f"routing: {self.routing.sentence}")
        if self.not_looked_at:
            sentences.append(
                f"not looked at: {len(self.not_looked_at):,} tensors that no run used, such as "
                f"{listed(self.not_looked_at, 3)}: reshard diff compares their bytes"
            )
        return [*sentences, *([f"covered: {self.covered}"] if self.covered else [])]

    @property
    def verdict(self) -> str:
        """The conclusion, with all limits that are exceeded."""
        if self.ok:
            beside = f", but for {len(self.not_looked_at):,} tensors that no run looked at" * bool(
                self.not_looked_at
            )
            return f"A and B hold the same model{beside}: every figure is within its limit"
        unknown = all("was not measured" in sentence or "too few" in sentence for sentence in self.exceeded)
        what = (
            "A and B cannot be held against the limits" if unknown else "A and B do not hold the same model"
        )
        return f"{what}: {'; '.join(self.exceeded)}"

    def lines(self, verdict: bool = True) -> Iterator[str]:
        """Return a table of the figures, then sentences, notes, limits and, unless told otherwise, the
        `verdict`."""
        yield from (f"A: {self.a}", f"B: {self.b}")
        columns = self.columns
        width = max(20, *(len(name) + 2 for name in columns))
        heading = f"{self.overall.tokens} tokens of {len(self.prompts)} prompts"
        yield heading.ljust(36) + "".join(f"{name:>{width}}" for name in columns)
        for name, value in self.overall.to_dict().items():
            if name == "tokens" or value is None:
                continue
            values = [getattr(metrics, name) for metrics in columns.values()]
            cells = ["-" if value is None else f"{value:.6g}" for value in values]
            yield f"  {name:<34}" + "".join(f"{cell:>{width}}" for cell in cells)
        yield from self.sentences
        yield from () if self.causes is None else self.causes.lines()
        yield from (f"note: {sentence}" for sentence in self.unmeasured)
        worst = self.prompts[self.worst]
        yield f"worst prompt: {self.worst} ({worst.tokens} tokens), mean_abs {worst.mean_abs:.6g}"
        yield f"limits: {', '.join(self._held_limits())}"
        if verdict:
            yield self.verdict

    def _held_limits(self) -> list[str]:
        """Return the limits on figures that were measured; the notes and the verdict have the others."""
        figures = self.overall.to_dict()
        figures["routing_margin"] = self.routing.margin if self.routing is not None else None
        figures["noise_ratio"] = self.rounding.ratio if self.rounding is not None else None
        return [
            f"{name} {'>=' if name == 'argmax_agreement' else '<='} {limit:.6g}"
            for name, limit in self.limits.to_dict().items()
            if limit is not None and figures[name] is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the scores themselves, for ``--json``."""
        return {
            "a": self.a,
            "b": self.b,
            "dtype": self.dtype,
            "quantized": self.quantized,
            "ok": self.ok,
            "exceeded": self.exceeded,
            "unmeasured": self.unmeasured,
            "limits": self.limits.to_dict(),
            "overall": self.overall.to_dict(),
            "noise": {name: metrics.to_dict() for name, metrics in self.noise.items()},
            "rounding": self.rounding and self.rounding.to_dict(),
            "fields": self.fields,
            "covered": self.covered,
            "far": self.far and self.far.to_dict(),
            "routing": self.routing and self.routing.to_dict(),
            "not_looked_at": self.not_looked_at,
            "causes": self.causes and self.causes.to_dict(),
            "prompts": [metrics.to_dict() for metrics in self.prompts],
        }
