"""Checkpoints that have the weights of one side of a comparison and the config of the other."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.comm.ranks import on_first_rank
from reshard.core.errors import ReshardError
from reshard.parity.served import checkpoint_of, engine_of
from reshard.parity.systems.opening import is_megatron
from reshard.storage.convert import hf_to_mcore, mcore_to_hf
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.sources.hf_hub import local_directory

if TYPE_CHECKING:
    from reshard.parity.comparison import SystemComparison


class MixedCheckpoints:
    """Checkpoints in the format of A's, made below a `folder` of either side's weights, with B's config.

    All ranks make one together, as they convert together; what is not converted is made by the first."""

    def __init__(self, a: str, b: str, comparison: "SystemComparison", folder: Path) -> None:
        self.specs, self.comparison, self.folder = {"A": a, "B": b}, comparison, folder

    def checkpoint(self, weights_of: str) -> str:
        """Return A with the weights of a side and the config of B. Raises ReshardError where there is none."""
        a, with_b = self.specs["A"], self.folder / f"weights-of-{weights_of}"
        directory = self._as_huggingface(weights_of, with_b)
        on_first_rank(partial(self._give_config, directory))
        if is_megatron(a):
            hf_to_mcore(directory, with_b.with_suffix(".mcore"), sync=False)
            directory = with_b.with_suffix(".mcore")
        engine = engine_of(a)
        return f"{engine}:{directory}" if engine else str(directory)

    def _give_config(self, directory: Path) -> None:
        """Give a Hugging Face directory the config of B. What says how it was converted goes, as it is of another."""
        for name in ("config.json", MANIFEST):
            (directory / name).unlink(missing_ok=True)
        (directory / "config.json").write_text(json.dumps(self.comparison.models[1].config), encoding="utf-8")

    def _as_huggingface(self, side: str, directory: Path) -> Path:
        """Make a Hugging Face directory of a side's weights: of links, where it is one."""
        path = local_directory(checkpoint_of(self.specs[side]))
        if is_megatron(self.specs[side]):
            mcore_to_hf(path, directory, hf_config=self.comparison.options.hf_config, sync=False)
        else:
            on_first_rank(partial(_link_files, path, directory))
        return directory


def _link_files(path: Path, directory: Path) -> None:
    """Make a Hugging Face directory of links to the files of another. Raises ReshardError if that is none."""
    if not (path / "config.json").is_file():
        raise ReshardError(f"{path} is no Hugging Face directory")
    directory.mkdir()
    for file in path.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file.resolve())
