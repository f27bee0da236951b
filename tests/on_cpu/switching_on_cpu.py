"""A fleet of real ``vllm serve``s under requests, whose trainer begins refits, trains on, and lets them switch."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from urllib.request import Request, urlopen

import torch.distributed as dist

from reshard import MegatronLayout, digest
from reshard.core.errors import ReshardError
from reshard.delta import save
from reshard.engines.together import _Vllm, apply_deltas_together
from reshard.integrations import Fleet
from reshard.parity.systems.megatron import Megatron
from reshard.trainers import MegatronModel
from tests.on_cpu.fleet_on_cpu import LAUNCHER, Served
from tests.starting.ranks import free_port

PROMPTS = [f"w{first} w{first + 7} w{first * 3}" for first in range(1, 9)]


def choice(url: str, model: str, prompt: str, **more) -> dict:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    request = Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=120) as response:
        return json.loads(response.read())["choices"][0]


def answer(url: str, model: str, prompt: str) -> str:
    return choice(url, model, prompt)["text"]


def tokens(url: str, model: str, prompt: str) -> list:
    """The tokens of a long answer, each with its logprob."""
    said = choice(url, model, prompt, max_tokens=48, logprobs=1)
    words = [int(word.removeprefix("w")) for word in said["text"].split()]
    logprobs = said["logprobs"]["token_logprobs"]
    assert len(words) == len(logprobs) == 48, said
    return [*zip(words, logprobs, strict=True)]


@contextmanager
def load(urls: list[str], model: str, ask=answer):
    """Within it requests run without a pause on all servers; what was answered to each prompt comes in the list."""
    over, answers = Event(), []

    def asks(number: int) -> None:
        while not over.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            answers.append((prompt, ask(urls[number % len(urls)], model, prompt)))

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(asks, number) for number in range(8)]
        time.sleep(0.5)
        try:
            yield answers
        finally:
            over.set()
    for one in asking:
        one.result()


def switching(pairs: list) -> dict:
    """What reports say, the digests of what engines serve, and what they answered, around each switch."""
    trainer, outcome = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout(tp=2)), {}
    going: dict[str, list] = {}
    first, source = dist.get_rank() == 0, MegatronModel(trainer.models)
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in LAUNCHER]:
        del os.environ[name]
    one, two = Served("one", pairs[0][0]), Served("two", pairs[0][0], "--tensor-parallel-size", "2")
    engines = (one, two)
    members = Fleet(
        source,
        f"127.0.0.1:{free_port()}",
        timeout=25,
        backend="nccl",
        delta=True,
        keep_mapped=True,
        peers=False,
    )

    def serve() -> dict:
        served = {}
        for engine in engines:
            with suppress(ReshardError):
                served[engine.name] = digest(engine.url).text, engine.client.serves()
        return served

    def tried(call) -> str:
        try:
            call()
            return ""
        except ReshardError as error:
            return str(error)

    def step(name: str, weights: int, between=None, begin=None, **options) -> None:
        trainer.load(Path(pairs[weights][1]))
        begun = members.begin(**(begin or {}))
        trainer.load(Path(pairs[1 - weights][1]))  # it trains on
        said = {"begun": begun}
        if begun:
            deadline = time.monotonic() + 60
            while not members._begun.connection.transfer.link.begun.last().is_done:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        if first:
            said["pending"] = serve()
            if between is not None:
                between()
        dist.barrier()
        report = []
        said["refused"] = tried(lambda: report.append(members.switch(**options)))
        for sent in report:
            said |= {"version": sent.version, "behind": sent.behind, "has": [*sent.reports]}
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, {name: said[name] for name in said if name != "pending"})
        assert every[0] == every[1], every
        if first:
            outcome[name] = said | {"serve": serve()}
        dist.barrier()

    def cannot(*_, **__) -> None:
        raise ReshardError("it does not pause")

    def reload(engine: Served) -> None:
        engine.client._call("POST", "collective_rpc", {"method": "reload_weights"})

    def of_a_chain() -> dict:
        """What comes of a version of a chain for both servers, which serve its base: where something is written into
        the second one at the worst time, and where nothing is."""
        chain, urls, said = Path(pairs[0][0]).parent / "chain", [one.url, two.url], {}
        save(pairs[0][0], pairs[1][0], chain)
        write = _Vllm.write

        def spoiled(server: _Vllm) -> None:
            if server._url == two.url:
                reload(two)
            write(server)

        _Vllm.write = spoiled
        said["spoiled"] = tried(lambda: apply_deltas_together(urls, chain)), serve()

        def cut_off(server: _Vllm) -> None:
            write(server)
            if server._url == two.url:
                raise ConnectionResetError("its answer was lost")

        _Vllm.write = cut_off
        said["cut off"] = tried(lambda: apply_deltas_together(urls, chain)), serve()
        _Vllm.write = write
        said["unread"] = tried(lambda: apply_deltas_together([*urls, "http://127.0.0.1:9"], chain)), serve()
        said["written"] = apply_deltas_together(urls, chain, verify=True), serve()
        said["again"] = apply_deltas_together(urls, chain), serve()
        return said

    with one.stack, two.stack:
        if first:
            for engine in engines:
                engine.start()
                members.add(engine.client)
        dist.barrier()
        step("whole", 0)
        references = {}
        if first:
            references["0"] = [
                [answer(one.url, one.directory, prompt) for prompt in PROMPTS] for _ in range(2)
            ]
        step("begun", 1)
        if first:
            references["1"] = [
                [answer(two.url, one.directory, prompt) for prompt in PROMPTS] for _ in range(2)
            ]
        answers: list = []
        with load([one.url, two.url], one.directory) if first else ExitStack() as seen:
            for number, weights in enumerate((0, 1, 0, 1)):
                step(f"finish {number}", weights, requests="finish", caches="reset", begin={"verify": True})
            answers = list(seen) if first else []
        step("again", 0)
        for name, options in (("go on", {}), ("go on anew", {"caches": "reset"})):
            with load([one.url, two.url], one.directory, tokens) if first else ExitStack() as seen:
                step(name, len(going) % 2 ^ 1, **options)
            going[name] = list(seen) if first else []
        with load([one.url, two.url], one.directory) if first else ExitStack():
            step("abort", 1, requests="abort")
        back = members.roll_back()
        if first:
            outcome["rolled back"] = {"version": back, "serve": serve(), "again": tried(members.roll_back)}
        else:
            tried(members.roll_back)
        dist.barrier()
        step("after a way back", 1)
        step("cannot pause", 0, between=lambda: setattr(two.client, "pause", cannot), requests="finish")
        step("can pause", 1, between=lambda: delattr(two.client, "pause"))
        step("together", 0)
        step("and again", 1)
        step("reloaded", 0, between=lambda: reload(two))
        step("after that", 1)
        step("nobody switched", 0)
        trainer.load(Path(pairs[1][1]))
        members.begin()
        members.send()  # instead of a switch
        if first:
            outcome["sent"] = {"serve": serve()}
        dist.barrier()
        step("after a send", 0)
        if first:
            outcome["chain"] = of_a_chain()
        dist.barrier()
        step("after a chain", 0)
        step("all again", 0)
        step("died", 1, between=two.kill)
        step("one is left", 0)
        step("one goes on", 1)
        members.close()
    return outcome | {"prompts": PROMPTS, "references": references, "answers": answers, "going": going}
