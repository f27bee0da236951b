"""``reshard``: the command group. Commands are imported when they are called, so that ``--help`` stays quick."""

import gc
import os
import sys
from importlib import import_module

import click

from reshard.errors import ReshardError

COMMANDS = {
    "hf-to-mcore": "Hugging Face checkpoint to Megatron torch_dist, at any layout.",
    "mcore-to-hf": "Megatron torch_dist checkpoint back to Hugging Face.",
    "inspect": "Show what a checkpoint of either format holds.",
    "diff": "Compare two checkpoints bit for bit, whatever their formats.",
    "check": "Compare a checkpoint's bytes with its manifest.",
    "plan": "Say what a refit of vLLM from Megatron would move, without a GPU.",
    "parity": "Say whether two systems give the same logprobs.",
    "demo": "Convert a small model there and back, and prove it with Megatron's own loader.",
}

EPILOG = (
    "Exit codes: 0 done (diff: equal; check: intact; parity: within the limits); 1 a difference, a failed check or an error, "
    "which is printed as one sentence; 2 a mistake in the command line; 130 interrupted."
)


class Commands(click.Group):
    """Commands by file name; a ReshardError ends with its sentence and status 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return import_module(f"reshard.cli.{name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="reshard")
def cli() -> None:
    """Move LLM weights between Hugging Face, Megatron-Core and vLLM, exactly and fast."""


def main() -> None:
    """The entry point."""
    gc.disable()  # plans live to the end; looking through them for garbage costs a sixth of the planning
    try:
        status = cli(standalone_mode=False)  # the code of an Exit, else what the command returns: nothing
        sys.exit(status if isinstance(status, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ReshardError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        click.echo(f"Error: the system refused{where}: {error.strerror}", err=True)
        sys.exit(1)
    except MemoryError:
        click.echo("Error: out of memory; use fewer --workers", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
