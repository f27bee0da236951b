"""Files and directories on the command line."""

import contextlib
import functools
from collections.abc import Callable, Iterator
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


def model_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument MODEL to a command, which takes it as `path`; ``--model`` says the same."""

    @functools.wraps(command)
    def with_path(*arguments: Any, model: str | None, model_option: str | None, **options: Any) -> Any:
        if (model is None) == (model_option is None):
            raise click.UsageError(
                "Missing argument 'MODEL'." if model is None else "MODEL and --model are the same; give one."
            )
        return command(*arguments, path=model or model_option, **options)

    option = click.option(
        "--model",
        "model_option",
        type=PathOrHubId(),
        help="MODEL: a directory of either format, a config.json, or a hub id.",
    )
    return click.argument("model", type=PathOrHubId(), required=False)(option(with_path))


@contextlib.contextmanager
def resumable(destination: str) -> Iterator[None]:
    """If an interrupt inside the `with` block leaves something to resume, add a hint at `--resume` to it."""
    try:
        yield
    except KeyboardInterrupt as error:
        from reshard.storage.run.partial import unfinished
        from reshard.storage.stores.place import is_store

        if not is_store(destination) and unfinished(Path(destination)) is None:
            raise
        raise KeyboardInterrupt("run the same command with --resume to continue") from error


def check_command(source: str, destination: str, megatron: bool) -> None:
    """Raise ReshardError, with the command that is meant, where a source has the other command's
    format: with `megatron` it should be a Megatron checkpoint, else a Hugging Face one or that of an FSDP trainer."""
    from reshard.storage.run.partial import unfinished
    from reshard.storage.sources.fsdp import locate_fsdp
    from reshard.storage.sources.paths import check_config, locate
    from reshard.storage.stores.mirror import local_path

    path = local_path(source)
    if megatron and not path.is_dir():
        wrong = "is a file, not a directory" if path.exists() else "does not exist"
        expected = (
            "a Megatron checkpoint is a directory with latest_checkpointed_iteration.txt, or one of its "
            "iterations"
        )
        raise ReshardError(unfinished(path) or f"{source} {wrong}: {expected}")
    hugging_face = (path / "config.json").is_file() or any(path.glob("*.safetensors"))
    if megatron and locate_fsdp(path) is not None:
        raise ReshardError(
            f"{source} is a checkpoint of a trainer under FSDP, which fsdp-to-hf converts: reshard "
            f"fsdp-to-hf {source} {destination}"
        )
    if megatron and hugging_face and locate(path) is None:
        check_config(path)
        raise ReshardError(
            f"{source} is a Hugging Face directory, which hf-to-mcore converts: reshard "
            f"hf-to-mcore {source} {destination}"
        )
    is_megatron = path.is_dir() and locate(path) is not None and locate_fsdp(path) is None
    if not megatron and not hugging_face and is_megatron:
        raise ReshardError(
            f"{source} is a Megatron checkpoint, which mcore-to-hf converts: reshard "
            f"mcore-to-hf {source} {destination}"
        )
