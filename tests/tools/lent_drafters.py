"""Engines of real model classes on the CPU that hand on a model and the drafter that a trainer has brought with it."""

from collections.abc import Callable
from unittest.mock import patch

from reshard.refit import connect
from reshard.refit.drafter import digest_of_drafter
from reshard.trainers import FsdpModel, WithDrafter
from tests.tools.refit_sides import start
from tests.tools.twins import VERSION, RankOfLender, handed_on


def brought_up(
    rank: int,
    sides: dict,
    started: Callable[..., tuple],
    trained: Callable[..., tuple],
    pairs: list,
    engine: dict,
) -> dict:
    """What an engine holds that has loaded the first of two pairs of a model's and a drafter's directories, and was
    refitted from a trainer of the second; what a newcomer holds that has loaded the first, before and after it has got
    both from the engine; the drafters' digests; what the newcomer holds where nobody says that there is a drafter; and
    what is said of one that drafts by nothing, and of the engine once a trainer without a drafter has refitted it.

    `started` makes an engine, with the options `engine`, and `trained` the modules of a trainer.
    """
    members = start(rank, sides)[2]
    policy, drafter = trained(pairs[1], sides["trainer"])
    (lender, held), (newcomer, got), (unaware, alone) = (started(pairs[0], **engine) for _ in range(3))
    link = connect(members, WithDrafter(FsdpModel(policy), drafter), lender)
    link.refit(VERSION, verify=True)
    link.close()
    worker = RankOfLender(lender)
    results: dict = {"lent": held(), "before": got(), "quantized": len(lender.not_as_published())}
    results["said"] = handed_on(worker, newcomer)
    results |= {"got": got(), "still lent": held(), "version": newcomer.version, "ready": newcomer.ready}
    results["digests"] = [digest_of_drafter(one.drafter_tensors()) for one in (lender, newcomer)]
    results["stale"] = newcomer.stale_derived()
    with patch.object(type(lender), "facts", lambda _: None):
        results["unaware"] = handed_on(worker, unaware), alone(), unaware.ready
    results["without"] = handed_on(worker, started(pairs[0][:1], **engine)[0])
    again = RankOfLender(newcomer)
    results["again"] = handed_on(again, unaware), alone()
    link = connect(members, FsdpModel(policy), lender)
    link.refit(VERSION + 1, verify=True)
    link.close()
    results["left alone"] = handed_on(worker, newcomer, VERSION + 1), newcomer.version
    return results
