"""Looking at a checkpoint of either format."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.printed import Printed, size
from reshard.formats import safetensors
from reshard.models.config_fields import allow_unmapped_configs, check_ignored, whole_number
from reshard.models.model import Model
from reshard.storage.opening import note_untrained, open_model_or_adapter
from reshard.storage.sources.base import ignored_as_recorded, read_config
from reshard.storage.sources.hf_hub import config_path, source_directory
from reshard.storage.sources.opening import check_config_is_read
from reshard.storage.sources.paths import locate

UNUSED = (("gtp", 1), ("egtp", 1))  # sizes that few know of, shown where they say something


@dataclass
class Inspection(Printed):
    """The contents of a checkpoint. `parameters` and `size_bytes` leave out tensors that repeat
    another."""

    path: str
    format: str
    family: str
    architecture: str
    layers: int
    mtp_layers: int
    experts: int
    parameters: int
    size_bytes: int
    dtypes: dict[str, int]
    layout: dict[str, Any] | None
    manifest: dict[str, Any] | None
    details: dict[str, Any]
    notices: list[str] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    digest: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as the object that ``--json`` prints."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        rows = self._rows()
        width = max(11, *(len(label) for label, _ in rows)) + 1
        yield from (f"{label:<{width}}{value}" for label, value in rows)

    def _rows(self) -> list[tuple[str, Any]]:
        """Return the lines to show, as labels and values."""
        dtypes = ", ".join(f"{name} ({count:,})" for name, count in sorted(self.dtypes.items()))
        mtp = f" + {self.mtp_layers} MTP" if self.mtp_layers else ""
        layout = [
            f"{key}={value}"
            for key, value in (self.layout or {}).items()
            if value is not False and (key, value) not in UNUSED
        ]
        details = dict(self.details)
        if quantized := details.get("quantized"):
            formats = f" ({', '.join(quantized['formats'])})" if quantized["formats"] else ""
            details["quantized"] = f"{quantized['weights']:,} weights, {quantized['method']}{formats}"
        manifest = self.manifest
        rows = [
            ("format", self.format),
            ("family", f"{self.family} ({self.architecture})"),
            ("layers", f"{self.layers}{mtp}"),
            ("experts", self.experts or None),
            ("parameters", f"{self.parameters:,}"),
            ("size", size(self.size_bytes)),
            ("dtypes", dtypes),
            ("layout", " ".join(layout) or None),
            *details.items(),
            ("manifest", manifest and f"{manifest['tensors']} tensors, from {manifest['source']}"),
            ("digest", self.digest),
        ]
        return [(label, value) for label, value in rows if value is not None]


def inspect(path: str | Path, *, hf_config: str | Path | None = None) -> Inspection:
    """Look at a Hugging Face directory (or hub id) or a Megatron checkpoint. A config that cannot
    be mapped is one of the notices. Raises ReshardError if it cannot be read."""
    directory = source_directory(str(path))
    check_config_is_read(hf_config, directory)
    config = config_path(hf_config) if hf_config is not None else None
    with allow_unmapped_configs():
        why = _unmapped(directory)
        if why:
            return _as_stored(path, directory, why)
        source = open_model_or_adapter(directory, config)
    try:
        check_ignored(source.model)
        note_untrained(source)
        own = {name: t for name, t in source.tensors.items() if name not in source.copies}
        dtypes: Counter = Counter()
        for info in own.values():
            dtypes[info.dtype.name] += info.rows * info.columns
        manifest = source.manifest()
        summary = None
        if manifest is not None:
            summary = {
                key: value
                for key, value in manifest.items()
                if key not in ("tensors", "files", "layout", "quantized")
            }
            summary["tensors"] = len(manifest["tensors"])
        return Inspection(
            str(path),
            source.kind,
            source.model.family.name,
            source.model.family.architecture,
            source.model.num_layers,
            source.model.mtp_layers,
            source.model.num_experts,
            sum(dtypes.values()),
            sum(t.size_bytes for t in own.values()),
            dict(dtypes),
            _layout(source, manifest),
            summary,
            source.describe(),
            list(source.notices),
            {name: {"dtype": t.dtype.name, "shape": list(t.shape)} for name, t in source.tensors.items()},
        )
    finally:
        source.close()


def _unmapped(directory: Path) -> str:
    """Return why the config of a Hugging Face directory describes no model that can be mapped;
    empty if it does, or there is none."""
    path = directory / "config.json"
    if not path.is_file() or locate(directory) is not None:
        return ""
    config = read_config(path)
    try:
        with ignored_as_recorded(directory):
            Model.from_hf(config, str(path))
    except ReshardError as error:
        return str(error)
    return ""


def _as_stored(path: str | Path, directory: Path, why: str) -> Inspection:
    """Return what the headers of a Hugging Face directory's files say, whatever model they are of."""
    config, stored = read_config(directory / "config.json"), safetensors.read_directory(directory)
    names, layers = config.get("architectures"), config.get("num_hidden_layers")
    named = names[0] if isinstance(names, list) and names else config.get("model_type")
    dtypes: Counter = Counter()
    for tensor in stored.values():
        dtypes[tensor.dtype.name] += prod(tensor.shape)
    return Inspection(
        str(path),
        "huggingface",
        "not mapped",
        str(named)[:200],
        layers if isinstance(layers, int) and whole_number(layers) else 0,
        0,
        0,
        sum(dtypes.values()),
        sum(tensor.size_bytes for tensor in stored.values()),
        dict(dtypes),
        None,
        None,
        {},
        [f"cannot be mapped: {why}"],
        {name: {"dtype": t.dtype.name, "shape": list(t.shape)} for name, t in stored.items()},
    )


def _layout(source: Any, manifest: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the layout that wrote a Megatron checkpoint: from the manifest, else from the args
    that it holds."""
    if source.kind != "megatron":
        return None
    if manifest is not None and "layout" in manifest:
        return {key: value for key, value in manifest["layout"].items() if value is not None}
    args = source.checkpoint.common().get("args") or {}
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
             "vpp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size",
             "etp": "expert_tensor_parallel_size", "gtp": "gtp_weight_remat_size",
             "egtp": "expert_gtp_weight_remat_size"}  # fmt: skip
    return {short: args[name] for short, name in names.items() if args.get(name) is not None} or None
