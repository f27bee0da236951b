"""What an estimate of memory says: a report, of each pipeline stage, and of each phase of an RL step."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from reshard.core.printed import Printed
from reshard.memory.outside import Band
from reshard.memory.text import band_text, gib, table

SHOWN = 16
KEPT = "kept for deltas"  # the parts of a phase that have a line of their own
PENDING = "pending changes"
HEADS = (
    "stage", "layers", "weights", "grads", "main", "moments", "TE", "activations", "transient", "allocated", "outside",
    "in all",
)  # fmt: skip


@dataclass(frozen=True)
class StageMemory:
    """A rank of one pipeline stage, in bytes; all ranks of a stage have the same.

    `activations` and `transient` are those of the fullest moment, `moment` says in words which that
    is, and `alive` how many microbatches each chunk (virtual stage) then has. `allocated` is what
    ``torch.cuda.max_memory_allocated`` will say, as one figure for the given (else even) routing;
    `engine_buffers` are Transformer Engine's, with its fp8 copies of the weights; `allocated_band`
    has what uneven routing may add and, with fp8, fewer copies or their scales. `total_band` is
    with fragmentation and what lies outside of torch. `tensors` are the activations by name.
    """

    stage: int
    layers: str
    weights: int
    grads: int
    main_params: int
    moments: int
    engine_buffers: int
    activations: int
    transient: int
    moment: str
    alive: tuple[int, ...]
    allocated: int
    allocated_band: Band
    outside: Band
    total_band: Band
    host: int
    tensors: dict[str, int]

    @property
    def static(self) -> int:
        """Bytes that are there at every moment."""
        return self.weights + self.grads + self.main_params + self.moments + self.engine_buffers


class Phase(NamedTuple):
    """Bytes on the fullest GPU of a phase, by what they are; `gpus` says whose GPUs. `kv_tokens`
    are the tokens of keys and values that fit for each engine (of a data parallel engine: for each
    of its parts)."""

    name: str
    gpus: str
    parts: dict[str, int]
    total_band: Band
    kv_tokens: Band | None = None


@dataclass(frozen=True)
class MemoryReport(Printed):
    """The memory of each pipeline stage, and the assumptions of the estimate.

    `delta_host_bytes` is the host's memory in which the GPUs of a host keep what they sent, for deltas.
    """

    model: str
    layout: str
    ranks: int
    dp: int
    microbatches: int
    tokens: int
    recompute: str
    stages: list[StageMemory]
    notices: list[str]
    gpu_bytes: int | None = None
    gpus_per_host: int = 8
    phases: list[Phase] = field(default_factory=list)
    delta_host_bytes: int = 0

    @property
    def peak(self) -> StageMemory:
        """The fullest stage."""
        return max(self.stages, key=lambda stage: stage.total_band.high)

    @property
    def host_bytes(self) -> int:
        """Bytes of a host's memory, for its fullest GPUs."""
        return max(stage.host for stage in self.stages) * min(self.gpus_per_host, self.ranks)

    @property
    def fits(self) -> bool | None:
        """True where the upper end of every stage's (and phase's) band is within the GPU's memory,
        False if a lower end is not. None in between, where it may fit, and where no GPU was
        named."""
        if self.gpu_bytes is None:
            return None
        ends = [stage.total_band for stage in self.stages] + [phase.total_band for phase in self.phases]
        if all(end.high <= self.gpu_bytes for end in ends):
            return True
        return False if any(end.low > self.gpu_bytes for end in ends) else None

    def lines(self, tensors: bool = False) -> Iterator[str]:
        """Return the lines of text, with the activations of the fullest stage by name if `tensors`."""
        return _lines(self, tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for ``--json``."""
        return asdict(self) | {
            "peak_stage": self.peak.stage,
            "host_bytes": self.host_bytes,
            "fits": self.fits,
        }


def _lines(report: MemoryReport, tensors: bool) -> Iterator[str]:
    """Yield the lines of a report; with the activations of its fullest stage by name if `tensors`."""
    yield (
        f"{report.model}: {report.layout}, {report.ranks} GPU{'s' * (report.ranks > 1)}, {report.tokens:,} "
        f"tokens a microbatch and GPU, {report.microbatches} microbatches, recompute {report.recompute}"
    )
    yield from _stage_lines(report.stages)
    peak = report.peak
    yield (
        f"peak: stage {peak.stage}, {peak.moment}: {gib(peak.allocated)} GiB allocated"
        + (
            f" ({band_text(peak.allocated_band)})"
            if peak.allocated_band.high > peak.allocated_band.low
            else ""
        )
        + f", {band_text(peak.total_band)} with fragmentation and what lies outside torch"
    )
    if report.host_bytes:
        yield f"host: {gib(report.host_bytes)} GiB of optimizer for the GPUs of a host"
    if report.delta_host_bytes:
        yield f"host: {gib(report.delta_host_bytes)} GiB kept for deltas for the GPUs of a host, at most"
    if tensors:
        yield "activations of that stage, GiB:"
        largest_first = sorted(peak.tensors.items(), key=lambda each: -each[1])
        yield from table(("", "GiB"), [(name, gib(n)) for name, n in largest_first])
    if report.phases:
        yield from _phase_lines(report.phases)
    if report.gpu_bytes is not None:
        size = f"{gib(report.gpu_bytes)} GiB"
        verdicts = {
            True: f"yes: it fits into {size}",
            False: f"no: it does not fit into {size}",
            None: f"maybe: {size} is within the range of the estimate",
        }
        yield verdicts[report.fits]


def _stage_lines(stages: Sequence[StageMemory]) -> Iterator[str]:
    yield "GiB of a GPU of each pipeline stage, at its fullest moment:"
    shown = stages
    if len(shown) > SHOWN:
        fullest = sorted(stages, key=lambda s: -s.total_band.high)[:SHOWN]
        shown = sorted(fullest, key=lambda s: s.stage)
    rows = []
    for s in shown:
        layers = s.layers if len(s.layers) <= 28 else s.layers[:25] + "..."
        static = (s.weights, s.grads, s.main_params, s.moments, s.engine_buffers)
        parts = (*static, s.activations, s.transient, s.allocated)
        rows.append((str(s.stage), layers, *map(gib, parts), band_text(s.outside), band_text(s.total_band)))
    yield from table(HEADS, rows)
    if len(shown) < len(stages):
        yield f"  ... and {len(stages) - len(shown)} that need no more (--json has all)"


def _phase_lines(phases: Sequence[Phase]) -> Iterator[str]:
    yield "phases of an RL step, GiB of the fullest GPU:"
    rows = []
    for p in phases:
        tokens = f"{p.kv_tokens.low:,} to {p.kv_tokens.high:,}" if p.kv_tokens else ""
        rows.append((p.name, p.gpus, gib(sum(p.parts.values())), band_text(p.total_band), tokens))
    yield from table(("phase", "GPUs", "holds", "in all", "tokens of keys and values"), rows)
    if kept := max(p.parts.get(KEPT, 0) for p in phases):
        yield f"of which kept for deltas: {gib(kept)} GiB of a trainer's GPU, at most"
    for gpus in ("trainer's", "engine's"):
        if pending := max((p.parts.get(PENDING, 0) for p in phases if p.gpus == gpus), default=0):
            yield f"of which pending changes: {gib(pending)} GiB of {'a' if gpus[0] == 't' else 'an'} {gpus} GPU"
