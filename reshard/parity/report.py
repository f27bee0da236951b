"""The result of a comparison: figures, limits and what exceeds them, for people and for programs."""

from dataclasses import dataclass, field
from typing import Any

from reshard.parity.limits import Limits
from reshard.parity.metrics import Metrics, Scores
from reshard.parity.noise import BOTH_IN_FP32, Noise
from reshard.parity.prompts import FarPrompt, Prompt
from reshard.parity.routing import Routing


@dataclass
class ParityReport:
    """Two systems' scores, compared. `noise` has how far a system is from what else was run of its checkpoint,
    by name, as ``A in fp32``; `rounding` is the difference in units of that, None where it was not measured. `routing` is None where the
    model has no experts, or a system does not tell which it chose. `unmeasured` are sentences on the default limits
    that had nothing to hold; `quantized` says whether an engine served quantized weights, for which `limits` are
    others. `fields` are those of the two configs that make two models. `far` is the difference at the far positions of
    `reach`, where both systems took those, and `covered` says how far positions went."""

    a: str
    b: str
    dtype: str
    overall: Metrics
    prompts: list[Metrics]
    limits: Limits
    exceeded: list[str]
    noise: dict[str, Metrics]
    routing: Routing | None
    scores_a: list[Scores]
    scores_b: list[Scores]
    tokens: list[Prompt]
    first_process: bool = True
    unmeasured: list[str] = field(default_factory=list)
    quantized: bool = False
    rounding: Noise | None = None
    fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    reach: FarPrompt | None = None
    far: Metrics | None = None
    covered: str = ""

    @property
    def ok(self) -> bool:
        """Whether every limit holds."""
        return not self.exceeded

    @property
    def worst(self) -> int:
        """The prompt with the largest mean |difference|."""
        return max(range(len(self.prompts)), key=lambda i: self.prompts[i].mean_abs)

    @property
    def worst_prompt(self) -> Prompt:
        """Its tokens."""
        return self.tokens[self.worst]

    @property
    def diverging_prompt(self) -> tuple[Prompt, tuple[int, ...] | None]:
        """The prompt that shows best where the two depart, and where its tokens stand if not at 0, 1, 2 ..."""
        if self.reach is None or self.far is None or not self.far_only:
            return self.worst_prompt, None
        return self.reach.prompt, self.reach.positions

    @property
    def far_only(self) -> bool:
        """True where only the far positions show a difference: every sentence that is no config's is about them."""
        figures = self.exceeded[len(self.fields) :]
        return bool(figures) and all(sentence.startswith(f"at {self.covered}") for sentence in figures)

    @property
    def columns(self) -> dict[str, Metrics]:
        """What a table shows beside each other, by its head."""
        far = {} if self.far is None else {"at far positions": self.far}
        beside = {
            "both in fp32" if name == BOTH_IN_FP32 else f"{name[0]} to {name}": metrics
            for name, metrics in self.noise.items()
        }
        return {"A to B": self.overall} | far | beside

    @property
    def sentences(self) -> list[str]:
        """What there is to say beside the figures, for people."""
        said = [] if self.rounding is None else [f"rounding: {self.rounding.sentence}"]
        if self.routing is not None:
            said.append(f"routing: {self.routing.sentence}")
        return [*said, *([f"covered: {self.covered}"] if self.covered else [])]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``; without the scores themselves."""
        return {
            "a": self.a, "b": self.b, "dtype": self.dtype, "quantized": self.quantized, "ok": self.ok,
            "exceeded": self.exceeded, "unmeasured": self.unmeasured, "limits": self.limits.to_dict(), "overall": self.overall.to_dict(),
            "noise": {name: metrics.to_dict() for name, metrics in self.noise.items()},
            "rounding": self.rounding and self.rounding.to_dict(), "fields": self.fields,
            "covered": self.covered, "far": self.far and self.far.to_dict(),
            "routing": self.routing and self.routing.to_dict(), "prompts": [metrics.to_dict() for metrics in self.prompts],
        }  # fmt: skip
