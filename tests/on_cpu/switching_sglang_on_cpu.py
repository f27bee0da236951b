"""A fleet of one real SGLang server, which switches to refits that a trainer begins; see
tests/engines/test_sglang_switching.py."""

import time

from reshard import digest
from reshard.comm.http import call_route
from reshard.integrations import Fleet, SglangClient
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu.refit_sglang_serving_on_cpu import ASKED, PROMPTS, answered, said_by, server, under_requests
from tests.starting.ranks import free_port
from tests.tools.refit_sides import trainer

FRESH = [700 + 5 * place for place in range(12)]  # of which nothing is cached


def brought_up(trainer: MegatronModel, url: str, directory: str) -> list:
    """What two servers of a fleet serve once the second, which has joined after the last send with other pipeline
    stages and other weights, got the first one's from that."""
    fleet = Fleet(trainer, "127.0.0.1", timeout=60)
    fleet.add(SglangClient(url, name="pod"))
    sent, other = fleet.send(version=9).version, free_port()
    with server(directory, other, stages=2) as late:
        before = digest(late).text
        fleet.add(SglangClient(late, name="late"))
        deadline = time.monotonic() + 90
        while fleet.describe()["engines"]["late"]["version"] != sent and time.monotonic() < deadline:
            time.sleep(0.2)
        said = fleet.describe()["engines"]["late"]["version"]
        told = [call_route(one, "model_info")["weight_version"] for one in (url, late)]
        held = [before, digest(url).text, digest(late).text]
        fleet.close()
    return [sent, said, told, held]


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
        said["from another"] = brought_up(MegatronModel(chunks), url, checkpoints[1][1])
    return said | {"fresh": FRESH}
