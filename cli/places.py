"""Files and directories on the command line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from reshard.core.errors import ReshardError


class PathOrHubId(click.Path):
    """A path or hub id. An empty one, such as of a shell variable that is not set, is refused: it
    would be the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            self.fail("it is empty; say . for the current directory", param, ctx)
        return super().convert(value, param, ctx)


@contextlib.contextmanager
def resumable(destination: str) -> Iterator[None]:
    """Add to an interrupt inside the `with` block that `--resume` goes on, where it leaves
    something to go on with."""
    try:
        yield
    except KeyboardInterrupt as error:
        from reshard.storage.run.partial import unfinished

        if unfinished(Path(destination)) is None:
            raise
        raise KeyboardInterrupt("the same command with --resume goes on") from error


def check_command(source: str, destination: str, megatron: bool) -> None:
    """Raise ReshardError, with the command that is meant, where a source has the other command's
    format: with `megatron` it should be a Megatron checkpoint, else a Hugging Face one."""
    from reshard.storage.run.partial import unfinished
    from reshard.storage.sources.paths import locate

    path = Path(source)
    if megatron and not path.is_dir():
        wrong = "is a file, not a directory" if path.exists() else "does not exist"
        expected = "a Megatron checkpoint is a directory with latest_checkpointed_iteration.txt, or one of its iterations"
        raise ReshardError(unfinished(path) or f"{source} {wrong}: {expected}")
    hugging_face = (path / "config.json").is_file() or any(path.glob("*.safetensors"))
    if megatron and hugging_face and locate(path) is None:
        raise ReshardError(
            f"{source} is a Hugging Face directory, which hf-to-mcore converts: reshard "
            f"hf-to-mcore {source} {destination}"
        )
    if not megatron and not hugging_face and path.is_dir() and locate(path) is not None:
        raise ReshardError(
            f"{source} is a Megatron checkpoint, which mcore-to-hf converts: reshard "
            f"mcore-to-hf {source} {destination}"
        )
