"""A fleet of one real SGLang server, which switches to refits that a trainer begins; see
tests/engines/test_sglang_switching.py."""

from reshard import digest
from reshard.comm.http import call_route
from reshard.integrations import Fleet, SglangClient
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu.refit_sglang_serving_on_cpu import ASKED, PROMPTS, answered, said_by, server, under_requests
from tests.starting.ranks import free_port
from tests.tools.refit_sides import trainer

FRESH = [700 + 5 * place for place in range(12)]  # of which nothing is cached


def switching(rank: int, flags: list[str], checkpoints: list[tuple[str, str]], stages: int) -> dict:
    """What is said of each switch, and what the server has then."""
    chunks, load = trainer(flags, checkpoints[0][1], wide=True)
    said: dict = {}
    fleet = Fleet(
        MegatronModel(chunks), "127.0.0.1", delta=True, backend="nccl", keep_mapped=True, peers=False
    )
    with server(checkpoints[0][1], free_port(), stages=stages) as url:
        fleet.add(SglangClient(url, name="pod"))

        def held() -> list:
            return [digest(url).text, call_route(url, "model_info")["weight_version"]]

        def told() -> list:
            return answered(call_route(url, "generate", {"input_ids": PROMPTS, **ASKED}))

        def begun(weights: int) -> list:
            load(checkpoints[weights][1])
            is_begun = fleet.begin()
            load(checkpoints[1 - weights][1])  # it trains on
            if is_begun:
                fleet._begun.connection.transfer.link.begun.last().wait()
            return [is_begun, *held()]

        said["loaded"] = told()
        said["whole"] = [begun(0), fleet.switch().version]
        said["pending"] = begun(1)
        said["while pending"] = told()
        if stages > 1:
            said["stages"] = said_by(fleet.switch)
            fleet.close()
            return said
        said["abort"] = [fleet.switch("abort", "reset").version, *held()]
        said["after"] = told()
        begun(0)
        said["finish"] = said_by(lambda: fleet.switch("finish"))
        said["still"] = held()
        begun(0)
        said["begun again"] = begun(1)
        said["under requests"] = [under_requests(url, fleet.switch, FRESH), *held()]
        fleet.close()
    return said | {"fresh": FRESH}
