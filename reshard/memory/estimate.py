"""The memory of a training layout, and of an RL step on it, from a model's config."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from reshard.core.errors import OptionError
from reshard.megatron.layout import MegatronLayout, checked_layout
from reshard.memory.options import Training, TrainingSetup
from reshard.memory.outside import bytes_of_gpu
from reshard.memory.phases import EngineSetup, kept_on, phases_of
from reshard.memory.report import MemoryReport
from reshard.memory.stages import report_of
from reshard.models.model import Model
from reshard.storage.sources.opening import read_model


def estimate_memory(
    model: Model | str | Path,
    layout: MegatronLayout | Mapping[str, Any] | None = None,
    *,
    gpu_memory: str | int | None = None,
    engine: EngineSetup | None = None,
    **options: Any,
) -> MemoryReport:
    """Estimate the memory that training a model at a layout needs on a GPU of each pipeline stage.

    `model` is a `reshard.models.model.Model`, or what `reshard.read_model` takes: a directory of
    either format, a config.json, a hub id. `layout` is a `reshard.MegatronLayout` or its fields.
    `options` are the fields of `reshard.memory.options.Training` by their names. `gpu_memory`,
    bytes or a text such as ``80GB``, is what ``report.fits`` is held against. `engine` is an
    `reshard.memory.phases.EngineSetup`, for the phases of an RL step.

    Static bytes are exact, activations those of Transformer Engine's layers, the rest bands. Raises
    ReshardError where a size does not divide, or an option has no such value.

        layout = reshard.MegatronLayout(tp=8, pp=2)
        report = reshard.estimate_memory("Qwen/Qwen3-32B", layout, gpus=16, gpu_memory="H100")
        report.fits, report.peak.allocated, report.peak.moment
    """
    if not isinstance(model, Model):
        model = read_model(model)
    layout = MegatronLayout(**layout) if isinstance(layout, Mapping) else checked_layout(layout)
    unknown = options.keys() - Training.__dataclass_fields__.keys()
    if unknown:
        name = sorted(unknown)[0]
        close = get_close_matches(name, Training.__dataclass_fields__, n=1)
        hint = f"did you mean {close[0]}?" if close else "reshard.memory.options.Training has those of a run"
        raise OptionError(f"estimate_memory has no option {name}: {hint}")
    setup = TrainingSetup.of(model, layout, Training(**options))
    size = gpu_memory if isinstance(gpu_memory, (int, type(None))) else bytes_of_gpu(gpu_memory)
    report = report_of(setup, size)
    if engine is None:
        return report
    kept = max(kept_on("host", engine, stage) for stage in report.stages)
    return replace(
        report,
        phases=phases_of(setup, report, engine),
        delta_host_bytes=kept * min(report.gpus_per_host, report.ranks),
    )
