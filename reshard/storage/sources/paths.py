"""From the directory that somebody names to the Megatron checkpoint in it, and to the config that
lies beside it.

Trainers put both in places of their own. Of several iterations the last complete one is taken: some
trainers name an iteration as the latest before its weights are written.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.formats import torch_dist
from reshard.formats.small_files import MAX_COPIED_BYTES, read_file, read_json
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.sources.foreign import check_foreign

# In the ``hf/`` of a Megatron checkpoint: the tensors of a larger model around the language model.
TOWERS = "towers.safetensors"
HF_FILES = "hf"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's
ADAPTER_BESIDE = (
    f"the adapter of {ADAPTER} beside the weights is not read: transformers with PEFT adds it to what it loads here, "
    "and computes other logits; reshard lora-merge adds it, or delete its files if it is merged already"
)
# Directories that people name, and where in them a trainer leaves the weights.
BELOW = {
    "model/dist_ckpt": "verl", "dist_ckpt": "verl", "actor/model/dist_ckpt": "verl", "actor/dist_ckpt": "verl",
    "policy/weights": "NeMo-RL",
}  # fmt: skip
# The same of trainers under FSDP, which may have a config beside it.
BELOW_OF_FSDP = {"pytorch_model_fsdp_0": "Accelerate", "model": "a trainer under FSDP"}
# verl saves the weights of a step here unless it is told use_dist_checkpointing=True.
HUGGING_FACE_OF_VERL = ("actor/model/huggingface", "actor/huggingface", "model/huggingface", "huggingface")
DIST_MODEL = "dist_model"  # ROLL's directory in an iteration's
MCA_CONFIG, RUN_CONFIG = "mca_config.json", "run_config.yaml"  # ROLL's; Megatron-Bridge's and NeMo-RL's
ITERATION = re.compile("iter_([0-9]{1,18})")
STEP = re.compile("(?:(?:epoch_[0-9]{1,9}_)?step[_-]|global_step_|checkpoint-)([0-9]{1,18})")
# What trainers leave beside a config that is none of a model's files.
OF_TRAINERS = (torch_dist.TRACKER, "args.json", "trainer_state.json", "ckpt_contents.json", "megatron_flags.txt",
               MCA_CONFIG)  # fmt: skip


@dataclass(frozen=True)
class Located:
    """A checkpoint: `directory` has its ``.metadata``, `iteration` is its name, `root` is where its
    iterations and what belongs to all of them lie, or the directory itself where that has a
    manifest or config of its own; `notices` say what was taken, where it was not named."""

    directory: Path
    iteration: str
    root: Path
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config:
    """The config beside a checkpoint: its `fields`, the file `where` they stand, and the
    `directory` with the tokenizer, where there is one. `notice` says that it was taken; None
    if it lies where this tool puts it."""

    fields: dict[str, Any]
    where: str
    directory: Path | None
    notice: str | None


def locate(path: Path) -> Located | None:
    """Return the checkpoint that a directory means: itself, the last complete iteration in it, or
    one that a trainer has left below it. None if there is none.

    Raises ReshardError if there is one that is not complete, in a format that is not read, or in
    a directory that may not be looked into.
    """
    try:
        return _located(path)
    except PermissionError as error:
        raise ReshardError(f"cannot look into {error.filename or path}: {error.strerror}") from error


def _located(path: Path) -> Located | None:
    located = _here(path) or _iteration(path)
    if located is not None:
        return located
    if not any(path.glob("*.safetensors")):
        models = sorted(p.parent.name for p in path.glob("pytorch_model_fsdp_*/.metadata"))
        models += [name for name in ["model"] if (path / name / ".metadata").is_file()]
        if len(models) > 1:
            raise ReshardError(f"{path} has several models ({listed(models)}): name the directory of one")
        for below, trainer in BELOW_OF_FSDP.items():
            located = _here(path / below)
            if located is not None:
                return _taken(located, path, f" ({trainer})")
    if (path / "config.json").is_file():
        return None
    for below, trainer in BELOW.items():
        if (path / below).is_dir():
            located = _here(path / below) or _iteration(path / below)
            if located is not None:
                return _taken(located, path, f" ({trainer})")
    for below in HUGGING_FACE_OF_VERL:
        if (path / below / "config.json").is_file() and any((path / below).glob("*.safetensors")):
            raise ReshardError(
                f"{path} has its weights in Hugging Face's format, in {below}: name that directory"
            )
    for step in _numbered(path, STEP):
        located = locate(step)
        if located is not None:
            return _taken(located, path)
    return None


def _taken(located: Located, path: Path, trainer: str = "") -> Located:
    """Add the notice that says which weights were taken of a path; the outermost one replaces those
    of inner paths."""
    directory = located.directory
    if directory.is_relative_to(path):
        directory = directory.relative_to(path)
    return replace(located, notices=(f"weights taken from {directory}{trainer}",))


def _here(path: Path) -> Located | None:
    """Return the checkpoint of a directory that has the weights itself."""
    path = _called(path)
    for directory, above in ((path, path.parent), (path / DIST_MODEL, path.parent)):
        if (directory / ".metadata").is_file():
            step = next((p.name for p in directory.parents[:4] if STEP.fullmatch(p.name)), None)
            name = (
                path.name if ITERATION.fullmatch(path.name) or path.name == "release" else step or path.name
            )
            if directory == path and path.name == DIST_MODEL:
                name, above = path.parent.name, path.parent.parent
            if (directory / MANIFEST).is_file() or (directory / HF_FILES / "config.json").is_file():
                above = directory
            return Located(directory, name, above)
    return None


def _called(path: Path) -> Path:
    """Return an iteration's directory under the name that says so, where it is given as ``.`` or by
    a link."""
    if path.name in ("", ".."):
        path = Path(os.path.abspath(path))
    real = Path(os.path.realpath(path))
    is_one = [name == "release" or ITERATION.fullmatch(name) for name in (path.name, real.name)]
    return real if is_one[1] and not is_one[0] else path


def _iteration(path: Path) -> Located | None:
    """Return the iteration that the tracker names, or, where that one is not complete or there is
    no tracker, the last complete one."""
    names = iterations_in(path)
    tracked = tracked_iteration(path)
    if tracked is not None:
        located = _here(path / tracked)
        if located is not None:
            return located
    for name in names:
        located = _here(path / name)
        if located is not None:
            if tracked is not None:
                why = f"{torch_dist.TRACKER} names {tracked}, which is not complete"
            else:
                later = "" if name == names[0] else ", and later ones are not complete"
                why = f"there is no {torch_dist.TRACKER}{later}"
            return replace(located, notices=(f"took {name}: {why}",))
    for directory in [path / name for name in (tracked, *names) if name is not None]:
        if any(directory.glob("mp_rank_*")):
            raise ReshardError(
                f"{directory} is in Megatron's legacy format 'torch' (mp_rank_*), which is not read: save it "
                f"with --ckpt-format torch_dist"
            )
    hugging_face = (path / "config.json").is_file()  # ms-swift without an optimizer to go on with
    if tracked is not None and not hugging_face and not any(_numbered(path, STEP)):
        torch_dist.find(path)  # says what is missing
    return None


def iterations_in(path: Path) -> list[str]:
    """Return the names of a training run's iterations in its directory, the last one first."""
    return [directory.name for directory in _numbered(path, ITERATION)]


def tracked_iteration(path: Path) -> str | None:
    """Return the iteration that the tracker names; None without one."""
    if not (path / torch_dist.TRACKER).is_file():
        return None
    return torch_dist.tracked(path / torch_dist.TRACKER)


def _numbered(path: Path, pattern: re.Pattern) -> Iterator[Path]:
    """Return the directories in a path whose names match, the highest number first."""
    if not path.is_dir():
        return
    numbered = [
        (int(match[1]), p) for p in path.iterdir() if (match := pattern.fullmatch(p.name)) and p.is_dir()
    ]
    yield from (p for _, p in sorted(numbered, reverse=True))


def config_beside(located: Located) -> Config | None:
    """The config that lies with a checkpoint: in ``hf/``, in verl's ``huggingface/``, beside the
    iterations as ms-swift has it, in ROLL's ``mca_config.json``, or in the directory that
    ``run_config.yaml`` names. None if there is none."""
    own = located.root / HF_FILES
    for directory in (
        own,
        located.directory / HF_FILES,
        located.directory.parent / "huggingface",
        located.root,
        located.directory,
        *(
            folder / name
            for folder in (located.directory, located.root)
            for name in ("huggingface", ".hf_metadata")
        ),
    ):
        path = directory / "config.json"
        if path.is_file():
            notice = None if directory == own else f"config taken from {path}"
            return Config(read_json(path), str(path), directory, notice)
    path = located.root / MCA_CONFIG
    if path.is_file():
        fields = _published(read_json(path), path)
        if fields is not None:
            return Config(fields, str(path), None, f"config taken from {path}, as it was when training began")
    model = model_named(located)
    if model is not None and (Path(model) / "config.json").is_file():
        path = Path(model) / "config.json"
        return Config(
            read_json(path), str(path), Path(model), f"config taken from {path}, which {RUN_CONFIG} names"
        )
    return None


def config_of_args(args: dict[str, Any]) -> Config | None:
    """Return the config in the directory that slime's arguments name as ``hf_checkpoint``; None
    if it is not there."""
    named = args.get("hf_checkpoint")
    path = Path(named) / "config.json" if isinstance(named, str) else None
    if path is None or not path.is_file():
        return None
    return Config(read_json(path), str(path), path.parent, f"config taken from {path}, which the args name")


def _published(mca: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the Hugging Face config that ROLL keeps as text in its own."""
    text = mca.get("hf_config_json")
    if not text:
        return None
    try:
        fields = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ReshardError(f"{path}: hf_config_json is not a JSON object: pass --hf-config")
    return fields


def model_named(located: Located) -> str | None:
    """Return the model that Megatron-Bridge's or NeMo-RL's ``run_config.yaml`` says the training
    began with: a hub id or a path. The file is read as text."""
    for directory in (located.directory, located.root):
        path = directory / RUN_CONFIG
        if path.is_file():
            text = read_file(path, MAX_COPIED_BYTES).decode(errors="replace")
            match = re.search(r"""^\s*hf_model_id:\s*["']?([^\s"'#]+)""", text, re.MULTILINE)
            return match[1] if match and match[1] not in ("null", "~") else None
    return None


def check_config(path: Path, has_weights: bool = True) -> None:
    """Raise ReshardError, saying what it is instead, for a directory without the config.json of a
    model, or, where it is to have weights too, of a Megatron checkpoint's config and tokenizer alone."""
    if has_weights:
        check_foreign(path)
    if (path / "config.json").is_file():
        weights = {file.name for file in path.glob("*.safetensors")} - {TOWERS}
        if has_weights and path.name == HF_FILES and not weights and locate(path.parent) is not None:
            raise ReshardError(
                f"{path} has the config and the tokenizer of a Megatron checkpoint, and no weights: give {path.parent}"
            )
        return
    if (path / ADAPTER).is_file():
        base = read_json(path / ADAPTER).get("base_model_name_or_path")
        of = f" of {base:.200}" if isinstance(base, str) and base else ""
        raise ReshardError(
            f"{path} is a LoRA adapter{of} ({ADAPTER}), not a model: reshard lora-merge adds it to its "
            f"model, reshard lora-to-megatron converts it"
        )
    if (path / ADAPTER_WEIGHTS).is_file():
        raise ReshardError(
            f"{path} holds the matrices of a LoRA adapter ({ADAPTER_WEIGHTS}), and lacks its "
            f"{ADAPTER}: bring it back"
        )
    if (path / "base.json").is_file() and any(path.glob("delta-*.json")):
        raise ReshardError(
            f"{path} is a chain of deltas, not a model: reshard delta apply writes a version of it"
        )
    names = sorted(file.name for file in path.glob("*.gguf"))
    if names and not any(path.glob("*.safetensors")):
        raise ReshardError(
            f"{path} holds a model in llama.cpp's format ({listed(names, 3)}), which is not read: name the "
            "Hugging Face directory that it was made of"
        )
