"""The processes that share a conversion: one, or those that ``torchrun`` started, over a common file system.

Each takes whole destination files. They meet twice, through a gloo process group: before the first byte, so that all have the
same plan, and after the last, so that the first one can publish.
"""

import os
from collections.abc import Callable
from typing import Any

from reshard.errors import ReshardError


class Team:
    """`process` of `size` processes; `owns_group` says that it made the process group and has to end it."""

    def __init__(self, process: int = 0, size: int = 1, owns_group: bool = False) -> None:
        self.process, self.size, self.owns_group = process, size, owns_group

    @staticmethod
    def from_environment() -> "Team":
        """The team that torchrun's environment variables describe; one process without them."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 or "RANK" not in os.environ:
            return Team()
        import torch.distributed as dist

        owns_group = not dist.is_initialized()
        if owns_group:
            dist.init_process_group("gloo")
        return Team(dist.get_rank(), dist.get_world_size(), owns_group)

    def close(self) -> None:
        """End the process group, if it is the team's own: without that, gloo's threads may abort the process at its exit."""
        if self.owns_group:
            import torch.distributed as dist

            dist.destroy_process_group()
            self.owns_group = False

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value, by process; waits for all."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, step: Callable[[], Any]) -> list[Any]:
        """Run `step` here, and meet: everybody's result, or everywhere an error if it failed in one process."""
        error, result = None, None
        try:
            result = step()
        except BaseException as caught:
            error = caught
        answers = self.exchange((None if error is None else str(error) or type(error).__name__, getattr(error, "resumable", True), result))
        if error is not None:
            raise error
        for process, (message, resumable, _) in enumerate(answers):
            if message is not None:
                raise ReshardError(f"process {process} of {self.size} failed: {message}", resumable)
        return [answer for _, _, answer in answers]

    def share(self, sizes: dict[Any, int]) -> set[Any]:
        """The files (name to bytes) that this process writes: contiguous runs of about equal bytes."""
        total, mine, position = sum(sizes.values()) or 1, set(), 0
        for name, n in sizes.items():
            middle = position + n // 2
            if min(self.size - 1, middle * self.size // total) == self.process:
                mine.add(name)
            position += n
        return mine
