"""SGLang's real model classes that serve from fp8 blocks, and hand these on as they are, as `refit_sglang_on_cpu` runs
them."""

from reshard.engines.sglang.live import SglangModel
from tests.on_cpu.refit_sglang_on_cpu import built
from tests.tools import twins


def brought_up(rank: int, sides: dict, flags: list[str], checkpoints: list, engine: dict, *rest) -> dict:
    """See `tests.tools.twins.brought_up`; `engine` are the options of all engines, but of others."""

    def make(directory: str, **options) -> SglangModel:
        return SglangModel(*built(directory, **engine | options))

    return twins.brought_up(rank, sides, flags, checkpoints, make, *rest, "sglang.")
