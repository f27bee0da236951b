"""Digests of SGLang's real model classes, by the call that reaches its schedulers."""

from types import SimpleNamespace
from typing import Any

from reshard import digest
from reshard.core.errors import ReshardError
from reshard.engines.sglang.digest import digest as digest_of_sglang
from reshard.engines.sglang.live import SglangModel
from reshard.engines.workers.digest_methods import DigestMethods, say
from tests.on_cpu.refit_sglang_on_cpu import built
from tests.starting.ranks import caught


class Scheduler(DigestMethods):
    """A scheduler, and the ``sglang.Engine`` that calls it; such a call returns nothing."""

    def __init__(self, side: SglangModel, ranks: int = 1) -> None:
        self.side, self.called = side, []
        self.server_args = SimpleNamespace(tp_size=ranks, pp_size=1, enable_dp_attention=False, dp_size=1)

    def _reshard_engine_side(self) -> SglangModel:
        return self.side

    def collective_rpc(self, method: str, **options: Any) -> None:
        assert method == "reshard_digest"
        self.called.append(options)
        answer = self.reshard_digest(options["dtype"])
        say(options["address"], 0, self.server_args.tp_size, answer, options["timeout"], options["secret"])


def digests(rank: int, directories: list[str]) -> list[dict]:
    """The digest of an engine that has loaded each directory; after one of its numbers has changed; and while it holds
    none of a version."""
    results = []
    for directory in directories:
        side = SglangModel(*built(directory))
        engine = Scheduler(side)
        given = digest(engine)
        result = {"given": [given.text, given.tensors], "bf16": digest(engine, dtype="bf16").text}
        next(iter(side.regions.values())).tensor.data.view(-1)[:1] += 1
        result["changed"] = digest(engine).text
        side.begin()
        result["half"] = caught(lambda engine=engine: digest(engine))
        result["secrets"] = len({call["secret"] for call in engine.called}) == len(engine.called)

        def refused(call: Any) -> None:
            raise ReshardError("it has no time")

        engine.collective_rpc = lambda method, **options: refused(options)
        result["refused"] = caught(lambda engine=engine: digest_of_sglang(engine, timeout=5))
        results.append(result)
    return results
