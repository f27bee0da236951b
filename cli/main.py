"""``reshard``: the command group. Commands are imported when they are called, so that ``--help`` stays
quick."""

import gc
import os
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from reshard.cli import signals
from reshard.cli.failures import status_of
from reshard.core.errors import ReshardError
from reshard.core.version import __version__

COMMANDS = {
    "hf-to-mcore": "Hugging Face checkpoint to Megatron torch_dist, at any layout.",
    "mcore-to-hf": "Megatron torch_dist checkpoint back to Hugging Face.",
    "fsdp-to-hf": "Checkpoint of an FSDP trainer (torch.distributed.checkpoint) to Hugging Face.",
    "mcore-to-mcore": "Megatron torch_dist checkpoint to another model class or layout.",
    "lora-to-peft": "LoRA adapter of Megatron-Bridge or mcore-bridge to a PEFT directory.",
    "lora-to-megatron": "PEFT LoRA adapter to a checkpoint for Megatron-Bridge or mcore-bridge.",
    "lora-merge": "Merge a LoRA adapter into its base model, in either format.",
    "delta": "Keep versions of a model as a chain of deltas, in a directory or an object store.",
    "inspect": "Show what a checkpoint of either format holds.",
    "diff": "Compare two checkpoints bit for bit, whatever their formats.",
    "check": "Compare a checkpoint's bytes with its manifest.",
    "digest": "Print the digest of weights, the same wherever they are.",
    "plan": "Plan a refit of vLLM or SGLang from Megatron, without a GPU.",
    "memory": "Estimate the GPU memory of training at a layout, or find layouts that fit.",
    "parity": "Compare the logprobs that two systems give the same prompts.",
    "fleet": "Show the engines that a trainer refits, add one, or remove one.",
    "monitor": "Show the rollouts of a training run, step by step.",
    "demo": "Convert a small model there and back, and prove it with Megatron's own loader.",
}

# These multiply no matrices, or in a worker for each core: numpy need not start a thread for each,
# which is a third of its import.
ONE_THREAD = {"hf-to-mcore", "mcore-to-hf", "fsdp-to-hf", "mcore-to-mcore", "lora-to-peft", "lora-to-megatron",
              "lora-merge", "delta", "inspect", "diff", "check", "digest", "memory", "fleet", "monitor"}  # fmt: skip

EPILOG = (
    "Exit codes: 0 done (diff: equal; check: intact; parity, monitor: within the limits); 1 a difference, a failed "
    "check or an error, which is printed as one sentence; 2 a mistake in the command line; 130 interrupted.\n\n"
    "Guides and reference are in docs/ of the repository; `mkdocs serve` shows them as a site."
)


class Commands(click.Group):
    """Commands by file name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        if name in ONE_THREAD:
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        return import_module(f"reshard.cli.{name.replace('-', '_')}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = get_close_matches(name.lower().replace("_", "-"), COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"No such command '{name}': {hint}", ctx)
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="reshard")
def cli() -> None:
    """Move LLM weights between Hugging Face, Megatron-Core, vLLM and SGLang, exactly and fast."""
    from reshard.models.config_fields import ignore_hint_for

    click.get_current_context().with_resource(ignore_hint_for("command"))


def main() -> None:
    """Run the command line and end the process with its exit code."""
    gc.disable()  # plans live to the end; looking through them for garbage costs a sixth of the planning
    signals.prepare_streams()
    try:
        signals.raise_when_interrupted()
        outcome = cli(standalone_mode=False)  # the code of an Exit, else what the command returns: nothing
        status = outcome if isinstance(outcome, int) else 0
    except BaseException as error:
        status = status_of(error, signals.interrupted())
    signals.leave_when_interrupted()
    unwritten = signals.flush()
    if unwritten is not None and not status:
        status = status_of(ReshardError(f"the result could not be printed: {unwritten.strerror}"))
    if "torch" not in sys.modules:
        os._exit(status)  # nothing is open, and taking a plan apart object by object takes a while
    sys.exit(status)


if __name__ == "__main__":
    main()
