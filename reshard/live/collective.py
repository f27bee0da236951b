"""Calls that all ranks of a live model make together: they meet, compare their options, and fail together."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from reshard.comm.team import Team
from reshard.core.errors import ReshardError, rewrite_message


def keyword_style_errors() -> AbstractContextManager[None]:
    """Have error messages inside name the keywords of `load`, `save` and `export` instead of
    command-line options.

    They do not offer to resume, since a load or a save starts anew.
    """
    return rewrite_message(
        ("(;| and|,) run again with --resume", ""),
        ("pass --overwrite", "pass overwrite=True"),
        ("pass --hf-config with", "pass hf_config= with"),
        (r"(?<![\w-])--(dtype|family|workers)\b", r"\1"),
        (r"(?<![\w-])--max-shard-size\b", "max_shard_size"),
        (r"(?<![\w-])--megatron-version\b", "megatron_version"),
    )


def open_team(call: str) -> Team:
    """Return the team of the ranks that make this call. Raises ReshardError on all of them where
    some make another call."""
    team = Team.of_process_group()
    try:
        check_same_options(team, "calls", {"the call": call})
    except BaseException:
        team.close()
        raise
    return team


def check_same_options(team: Team, calls: str, options: dict[str, Any]) -> None:
    """Raise ReshardError on every rank where the ranks were given different options. `calls` is the
    plural of what they asked for."""
    options_of_ranks = team.together(lambda: options)

    def compare() -> None:
        for rank, others in enumerate(options_of_ranks):
            for name, value in others.items():
                first = options_of_ranks[0][name]
                if value != first:
                    raise ReshardError(
                        f"the ranks ask for different {calls} ({name} is {first} on rank 0, {value} on rank {rank}): "
                        f"give all the same"
                    )

    team.together(compare)


def run_on_first(team: Team, decide: Callable[[], Any]) -> Any:
    """Run `decide` in the first process, which alone has what the ranks sent; return its result on
    every rank."""
    return team.together(lambda: decide() if team.process == 0 else None)[0]
