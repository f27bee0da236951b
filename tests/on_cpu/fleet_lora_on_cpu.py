"""A fleet of real ``vllm serve``s that serve a trainer's adapter, which one of them hands on with the weights below it;
and the trainer, which starts again."""

import os
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from reshard.integrations import Fleet
from reshard.trainers.fsdp import FsdpModel
from tests.on_cpu.engine_on_cpu import PROMPTS
from tests.on_cpu.fleet_on_cpu import LAUNCHER, Served
from tests.on_cpu.lora_serving_on_cpu import trainer
from tests.tools.vllm_server import post


def answer(engine: Served, model: str, prompt: list[int]) -> list | str:
    """Greedy tokens of a prompt with their logprobs, by the name of an adapter or of the model; why there are none."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
    }
    try:
        [choice] = post(engine.url + "/v1/completions", body)["choices"]
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()[:300]}"
    return [choice["token_ids"], choice["logprobs"]["token_logprobs"]]


def named(engine: Served, name: str, path: str = "in memory") -> str:
    """What vLLM says when a name of an adapter is to be known to requests."""
    try:
        post(engine.url + "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, answers=False)
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()[:300]}"
    return "known"


def answers(engine: Served, model: str) -> list:
    return [answer(engine, model, prompt) for prompt in PROMPTS]


def adapters(hf: str, folder: str) -> dict:
    """What engines answer by the name of an adapter that a trainer has refitted, by that of the files that PEFT has
    saved, and by that of the model: one that a trainer has refitted; one that is added then; both after the next send;
    and one that is added to the fleet of a trainer that starts again, before and after its first send."""
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in LAUNCHER]:
        del os.environ[name]
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    model, step = trainer(hf)
    options = "--load-format", "dummy", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"
    one, two, three = engines = [Served(name, hf, *options) for name in ("one", "two", "three")]
    outcome: dict = {"named": {}}

    def until_all_have(members: Fleet, version: int) -> None:
        deadline = time.monotonic() + 90
        while any(e["version"] != version or e["why"] for e in members.describe()["engines"].values()):
            assert time.monotonic() < deadline, members.describe()
            time.sleep(0.2)

    def looked_at(engine: Served, version: int) -> dict:
        files = f"files-{version}"
        if engine.name not in outcome["named"]:
            outcome["named"][engine.name] = named(engine, "policy")
        assert named(engine, files, f"{folder}/peft-{version}") == "known"
        return {
            "policy": answers(engine, "policy"),
            "files": answers(engine, files),
            "model": answers(engine, hf),
            "serves": [engine.client.serves("policy"), engine.client.serves("other")],
        }

    def save(version: int) -> None:
        step()
        model.save_pretrained(Path(folder) / f"peft-{version}")

    with ExitStack() as ends, ThreadPoolExecutor(3) as pool:
        for engine in engines:
            ends.enter_context(engine.stack)
        list(pool.map(Served.start, engines))
        members = Fleet(FsdpModel(model), "127.0.0.1", adapter="policy", timeout=60)
        members.add(one.client)
        save(7)
        members.send(7, verify=True)
        outcome["lent"] = looked_at(one, 7)
        outcome["early"] = [answer(two, name, PROMPTS[0]) for name in ("policy", hf)]
        outcome["early"] += [named(two, "policy"), two.client.serves("policy")]
        members.add(two.client)
        until_all_have(members, 7)
        outcome["got"] = looked_at(two, 7)
        save(8)
        report = members.send(8, verify=True)
        outcome["sent"] = report.version, sorted(report.reports), report.behind
        outcome["refitted"] = [looked_at(engine, 8) for engine in (one, two)]
        members.close()

        members = Fleet(FsdpModel(model), "127.0.0.1", adapter="policy", timeout=60)
        for engine in engines:
            members.add(engine.client)
        until_all_have(members, 8)
        outcome["found"] = members.describe()["found"]
        outcome["again"] = looked_at(three, 8)
        save(9)
        report = members.send(verify=True)
        outcome["sent again"] = report.version, sorted(report.reports), report.behind
        outcome["refitted again"] = [looked_at(engine, 9) for engine in engines]
        members.close()
    return outcome
