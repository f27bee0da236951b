"""SGLang's real classes of a model and of its EAGLE-3 drafter, as `refit_drafters_sglang_on_cpu` has them, that hand on
what a trainer of both has brought."""

from reshard.engines.sglang.live import SglangModel
from tests.on_cpu.refit_drafters_sglang_on_cpu import held, served, trained
from tests.on_cpu.refit_sglang_on_cpu import built
from tests.tools import lent_drafters


def started(load: list[str], **options) -> tuple:
    """An SGLang that has loaded a model and a drafter, or a model alone, and what says the bits of both."""
    if len(load) == 1:
        return SglangModel(*built(load[0], **options)), None
    model, arguments, worker = served(load, **options)
    return SglangModel(model, arguments, None, worker), lambda: held(model, worker)


def brought_up(rank: int, sides: dict, *rest) -> dict:
    """See `tests.tools.lent_drafters.brought_up`."""
    return lent_drafters.brought_up(rank, sides, started, trained, *rest)
