"""vLLM's real classes of a model and of its EAGLE-3 drafter, as `refit_drafters_on_cpu` has them, that hand on what a
trainer of both has brought."""

from reshard.engines.vllm.live import VllmModel
from tests.on_cpu.refit_drafters_on_cpu import served, trained
from tests.on_cpu.sleeping_on_cpu import of_both, worker_of
from tests.on_cpu.vllm_on_cpu import build
from tests.tools import lent_drafters


def started(load: list[str], **options) -> tuple:
    """A vLLM that has loaded a model and a drafter, or a model alone, and what says the bits of both."""
    if len(load) == 1:
        return VllmModel.from_worker(worker_of(*build(load[0], **options))), None
    worker, module, draft = served(load, **options)
    return VllmModel.from_worker(worker), lambda: of_both(module, draft)


def brought_up(rank: int, sides: dict, *rest) -> dict:
    """See `tests.tools.lent_drafters.brought_up`."""
    return lent_drafters.brought_up(rank, sides, started, trained, *rest)
