"""A fleet of real ``vllm serve``s with experts in int8, one of which hands on what it serves; and a trainer."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from reshard import MegatronLayout
from reshard.engines.vllm.worker import RefitExtension
from reshard.integrations import Fleet
from reshard.parity.systems.megatron import Megatron
from reshard.trainers import MegatronModel
from tests.on_cpu.engine_on_cpu import PROMPTS
from tests.on_cpu.engine_transfers_on_cpu import asked
from tests.on_cpu.fleet_on_cpu import LAUNCHER, Served
from tests.tools.reachable import reachable


class Extension(RefitExtension):
    """A worker that says what its model holds."""

    def held_bits(self) -> dict:
        """The bits of every tensor; those of the cache of keys and values are of requests."""
        held = reachable(self.get_model())
        return {name: bits for name, bits in held.items() if ".kv_cache" not in name}


def looked_at(engine: Served) -> dict:
    """What an engine holds, and what it answers."""
    held = engine.client._call("POST", "collective_rpc", {"method": "held_bits"})["results"]
    return {"held": held, "answers": [asked(engine.url, engine.directory, prompt) for prompt in PROMPTS]}


def twins(pairs: list) -> dict:
    """What engines hold and answer: one that a trainer has refitted from the first of two checkpoints; one that is
    added then; both after the next send, of the second checkpoint. And what the fleet says of these, and of one that
    is added with the second and serves in bf16."""
    trainer = Megatron(Path(pairs[0][1]), "bf16", MegatronLayout())
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in LAUNCHER]:
        del os.environ[name]
    plain = "--dtype", "bfloat16", "--load-format", "dummy"
    quantized = *plain, "--quantization", "int8_per_channel_weight_only"
    extension = "--worker-extension-cls", "tests.on_cpu.fleet_twins_on_cpu.Extension"
    one, two = (Served(name, pairs[0][0], *quantized, *extension) for name in ("one", "two"))
    three, outcome = Served("three", pairs[0][0], *plain), {}
    members = Fleet(MegatronModel(trainer.models), "127.0.0.1", timeout=40)

    def described(name: str) -> dict:
        return members.describe()["engines"][name] | {"age": None}

    with ExitStack() as ends, ThreadPoolExecutor(3) as pool:
        for engine in (one, two, three):
            ends.enter_context(engine.stack)
        list(pool.map(Served.start, (one, two, three)))
        members.add(one.client)
        members.send(0, verify=True)
        outcome["lent"] = looked_at(one)
        outcome["before"] = two.client._call("POST", "collective_rpc", {"method": "held_bits"})["results"]
        members.add(two.client)
        members.add(three.client)
        deadline = time.monotonic() + 60
        while described("two")["version"] is None or "last send" in described("three")["why"]:
            assert time.monotonic() < deadline, members.describe()
            time.sleep(0.2)
        outcome["got"] = looked_at(two)
        outcome["said"] = described("two"), described("three"), two.client.serves(), three.client.serves()
        outcome["still lent"] = looked_at(one)
        trainer.load(Path(pairs[1][1]))
        report = members.send(1, verify=True)
        outcome["sent"] = report.version, [*report.reports], report.behind
        outcome["refitted"] = [looked_at(engine) for engine in (one, two)]
        members.close()
    return outcome
