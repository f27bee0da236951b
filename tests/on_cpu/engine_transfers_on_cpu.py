"""Real vLLMs on the CPU, refitted by vLLM's own weight transfer; started as `tests.on_cpu.engine_on_cpu` says."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from reshard import digest
from reshard.core.errors import ReshardError
from reshard.engines.checksums import expected_checksums
from reshard.integrations import HttpClient
from tests.on_cpu.engine_on_cpu import PROMPTS, SMALL_BATCHES, answers
from tests.starting.ranks import caught
from tests.tools import probe


def transfer(pairs: list, url: str, port: int) -> dict:
    """A trainer of two ranks that refits, by vLLM's weight transfer, a server that has loaded the
    first of two checkpoints, and an ``LLM`` that has loaded the second: what both answer before,
    and after each of the two in turn."""
    import torch.distributed as dist

    from reshard import MegatronLayout
    from reshard.integrations import HttpClient, LlmClient, WeightTransfer
    from reshard.parity.systems.megatron import Megatron
    from reshard.refit import RefitGroup
    from reshard.trainers import MegatronModel

    trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout(tp=2))
    first = dist.get_rank() == 0
    server, outcome = HttpClient(url), {}
    if first:
        mortal = "tests.tools.mortal_worker.MortalExtension"
        llm = transferable(pairs[1][0], dtype="float32", worker_extension_cls=mortal)

    def note(step: str) -> None:
        dist.barrier()
        if first:
            server.reset_prefix_cache()
            llm.reset_prefix_cache()
            outcome[step] = {
                "server": [asked(url, pairs[0][0], prompt) for prompt in PROMPTS],
                "llm": [answers(llm, [p])[0] for p in PROMPTS],
                "digests": [digest(served).text for served in (url, llm)],
            }
            if hasattr(llm, "get_weight_version"):
                outcome[step]["named"] = [
                    server._call("GET", "weight_info")["weight_version"],
                    llm.get_weight_version(),
                ]

    note("loaded")
    if first:
        with running(url, pairs[0][0]):
            # vLLM's own default keeps all where requests hold something, and its status is 200.
            deadline = time.monotonic() + 20  # between two requests there may be none that holds something
            while (kept := server._call("POST", "reset_prefix_cache", {}))["success"]:
                if time.monotonic() > deadline:
                    break
            outcome["kept under load"] = kept
            outcome["reset under load"] = caught(server.reset_prefix_cache)
        outcome["too early"] = caught(lambda: server.update_weights({"version": 1}))
        server.start_weight_update()
        outcome["not connected"] = caught(lambda: server.update_weights({"version": 1}))
        outcome["tensors"] = caught(
            lambda: (server.start_weight_update(), server.update_weights({"names": ["a"]}))
        )
        outcome["no such route"] = caught(HttpClient(url + "/elsewhere").world_size)
        outcome["nobody"] = caught(HttpClient(f"http://127.0.0.1:{port}").world_size)
    source = MegatronModel(trainer.models)
    outcome["no client"] = caught(lambda: WeightTransfer(source, url, f"127.0.0.1:{port}"))
    clients = [server, LlmClient(llm, name="pod-7")] if first else []
    link = WeightTransfer(
        source,
        clients,
        f"127.0.0.1:{port}",
        engine_ranks=None if first else [1, 1],
        timeout=180,
        delta=True,
    )
    outcome |= {"deltas": [], "reported": [], "described": [], "checksums": []}

    def checksums() -> None:
        """What both engines' have to be of each checkpoint, and the last one's own."""
        expected = [expected_checksums(served, path) for served in (url, llm) for path, _ in pairs]
        [own] = llm.collective_rpc("own_checksums")
        outcome["checksums"].append([own == one for one in expected])

    def described() -> None:
        said = llm.collective_rpc("reshard_describe")
        said += server._call("POST", "collective_rpc", {"method": "reshard_describe"})["results"]
        outcome["described"].append([one["digest"] for one in said])

    for version, (_, mcore) in enumerate(pairs):
        trainer.load(Path(mcore))
        if first:
            server.pause()
        report = link.send(version, verify=True)
        if first:
            server.resume()
        note(f"version {version}")
        outcome["deltas"].append(report.delta.is_delta)
        outcome["reported"].append(report.digest)
        if first:
            described()
            checksums()
    outcome["version"] = report.version
    if first:
        llm.collective_rpc("change_a_number", args=(0,))
        described()
        checksums()
        good = {"address": f"127.0.0.1:{port + 5}", "first_rank": 2, "size": 4}
        wrong = [{"address": "nowhere"}, {"address": 7}, {"first_rank": "2"}, {"first_rank": -1}, {"first_rank": 4},
                 {"size": 1e3}, {"size": None}, {"size": 1 << 40}, {"timeout": "soon"}, {"timeout": -1}]  # fmt: skip
        outcome["wrong meetings"] = [
            caught(lambda w=w: server.init_weight_transfer_engine(good | w)) for w in wrong
        ]
        server.start_weight_update()
        outcome["wrong update"] = caught(lambda: server.update_weights({"version": 8, "verify": "no"}))
    outcome["two versions"] = caught(lambda: link.send(7 + dist.get_rank()))
    outcome["no version"] = caught(lambda: link.send(True))
    outcome["then"] = link.send(9).version
    if first:
        outcome["the same port"] = caught(lambda: RefitGroup.join(f"127.0.0.1:{port}", 0, 2))
    link.close()
    called: list = []
    link.clients = [SimpleNamespace(start_weight_update=lambda: called.append("an engine"))]
    outcome["closed"] = probe.caught(lambda: link.send(10)), called
    dist.barrier()
    if first:
        mine = [LlmClient(llm), *([server] if hasattr(llm, "shutdown_weight_transfer_engine") else [])]
        for client in mine:
            client.shutdown_weight_transfer_engine()
            client.start_weight_update()
        outcome["let go"] = [probe.caught(partial(client.update_weights, {"version": 1})) for client in mine]
    dist.barrier()
    before = link
    link = WeightTransfer(
        source, clients, f"127.0.0.1:{port}", engine_ranks=None if first else [1, 1], timeout=180
    )
    outcome["again"] = link.send(10, verify=True).version
    dist.barrier()
    if first:  # as one whose call comes when the engines have connected anew
        llm_client = LlmClient(llm)
        llm_client.start_weight_update()
        outcome["of another"] = probe.caught(
            partial(llm_client.update_weights, {"version": 1, "ticket": f"{before.link.group.meeting}/2"})
        )
    dist.barrier()
    outcome["after another"] = link.send(11, verify=True).version

    with failing(link):
        outcome["failed"] = caught(lambda: link.send(11, verify=True))
    if first:
        outcome["half-written"] = [
            refusal(url, pairs[0][0]),
            refusal(url, pairs[0][0], stream=True),
            health(url),
        ]
        outcome["half-written digests"] = [caught(lambda s=served: digest(s)) for served in (url, llm)]
        outcome["half-written llm"] = [caught(lambda: answers(llm)), llm.collective_rpc("reshard_version")]
    outcome["mended"] = link.send(12, verify=True).version
    note("version 12")

    def meet(who: list, at: int, **options) -> WeightTransfer:
        return WeightTransfer(
            MegatronModel(trainer.models), who if first else [], f"127.0.0.1:{at}", timeout=60, **options
        )

    if first:
        llm.collective_rpc("die_at_the_next_meeting")
    outcome["died"] = on_all_ranks(
        lambda: meet([LlmClient(llm)] if first else [], port + 1, engine_ranks=[1])
    )
    link.link.group.timeout = 60
    outcome["dead at a refit"] = on_all_ranks(lambda: link.send(13))
    if first:
        end_server(url)
    outcome["no server"] = on_all_ranks(lambda: meet([server], port + 2, engine_ranks=[1]))
    outcome["not asked"] = on_all_ranks(lambda: meet([server], port + 3))
    outcome["asked in vain"] = on_all_ranks(lambda: meet([DeadActor()], port + 5))
    if first:
        llm.llm_engine.engine_core.shutdown()
    return outcome


def transfer_data_parallel(pairs: list, urls: list, port: int) -> dict:
    """What a server of two data parallel engines answers before and after a refit by vLLM's weight
    transfer, each question often enough that both answer it, and what one answers that has loaded
    those weights; and how many workers the first says that it has."""
    from reshard import MegatronLayout
    from reshard.integrations import HttpClient, WeightTransfer
    from reshard.parity.systems.megatron import Megatron
    from reshard.trainers import MegatronModel

    def outcome(who: int) -> list:
        return [[asked(urls[who], pairs[who][0], prompt) for _ in range(4)] for prompt in PROMPTS]

    trainer, server = Megatron(Path(pairs[1][1]), "fp32", MegatronLayout()), HttpClient(urls[0])
    results = {"workers": server.world_size(), "before": outcome(0), "loaded": outcome(1)}
    link = WeightTransfer(MegatronModel(trainer.models), server, f"127.0.0.1:{port}", timeout=180)
    with failing(link):
        results["failed"] = caught(lambda: link.send(1, verify=True))
    results["half-written"] = [refusal(urls[0], pairs[0][0]) for _ in range(4)]
    results["half-written digest"] = caught(lambda: digest(urls[0]))
    # Requests that come while vLLM is paused wait, whatever the weights are, and so does one that it holds.
    server.pause()
    with failing(link), ThreadPoolExecutor() as threads:
        asking = [threads.submit(asked, urls[0], pairs[0][0], PROMPTS[0]) for _ in range(4)]
        results["failed while paused"] = caught(lambda: link.send(1, verify=True))
        results["answered while paused"] = [one.done() for one in asking]
        link.send(1, verify=True)
        server.reset_prefix_cache()
        server.resume()
        results["held"] = [one.result() for one in asking]
    results |= {"refitted": outcome(0), "digest": [digest(urls[0]).text, digest(urls[0]).notices]}
    with running(urls[0], pairs[0][0]):
        results["digests under load"] = [digest(urls[0]).text for _ in range(5)]
    server._call("POST", "collective_rpc", {"method": "change_a_number", "args": [1]})
    return results | {"one changed": caught(lambda: digest(urls[0]))}


@contextmanager
def failing(transfer):
    """The next refit of a `WeightTransfer` fails on this rank of the trainer, when all bytes have moved."""
    plain = transfer.link._verify

    def broken():
        transfer.link._verify = plain
        raise ReshardError("the trainer's digests are gone")

    transfer.link._verify = broken
    yield


@contextmanager
def running(url: str, model: str):
    """Requests run, one after the other in each of a few threads, and all are answered in the end."""
    over = Event()

    def ask() -> int:
        answered = 0
        while not over.is_set():
            answered += refusal(url, model, max_tokens=50, ignore_eos=True)[0] == 200
        return answered

    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(ask) for _ in range(3)]
        time.sleep(0.5)
        try:
            yield
        finally:
            over.set()
    assert all(one.result() for one in asking)


def refusal(url: str, model: str, **options) -> list:
    """The status and the text with which a server refuses a request; of a stream, what its chunks say."""
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 4, **options}
    request = Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urlopen(request, timeout=120) as response:
            return [response.status, response.read().decode()]
    except HTTPError as error:
        return [error.code, json.loads(error.read())["error"]["message"]]


def health(url: str) -> list:
    """The status of a server's health, and what its workers say that they hold."""
    with urlopen(url + "/health", timeout=60) as response:
        status = response.status
    return [status, HttpClient(url)._call("POST", "collective_rpc", {"method": "reshard_state"})["results"]]


class DeadActor:
    """A client of a user's own, with errors of its own."""

    init_weight_transfer_engine = None

    def world_size(self) -> int:
        raise RuntimeError("the actor is dead")


def on_all_ranks(action) -> list:
    """What an action raises on each rank, and after how many seconds."""
    import torch.distributed as dist

    dist.barrier()
    began, results = time.monotonic(), [None] * dist.get_world_size()
    dist.all_gather_object(results, [probe.caught(action), time.monotonic() - began])
    return results


def end_server(url: str) -> None:
    """As whoever has started it would; it does not answer any more when this returns."""
    import psutil

    port = int(url.rpartition(":")[2])
    listening = {
        c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port
    }
    for pid in listening - {None}:
        psutil.Process(pid).terminate()
    while any(c.status == "LISTEN" and c.laddr.port == port for c in psutil.net_connections("tcp")):
        time.sleep(0.1)


def transferable(path: str, **options):
    """An ``LLM`` with our weight transfer, whose worker is a process of its own; in one of torchrun's too."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING")
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in launcher]:
        del os.environ[name]
    from vllm import LLM

    return LLM(
        path,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        **SMALL_BATCHES,
        seed=0,
        kv_cache_memory_bytes=1 << 24,
        weight_transfer_config={"backend": "reshard"},
        **options,
    )


def transfer_quantized(pairs: list, port: int) -> dict:
    """Two ``LLM`` in fp8 by tensor, each of which has loaded one of two checkpoints: what they
    answer before, and after each of the two in turn has come to both by vLLM's weight transfer; and
    how many of their parameters are in fp8."""
    from reshard import MegatronLayout
    from reshard.integrations import LlmClient, WeightTransfer
    from reshard.parity.systems.megatron import Megatron
    from reshard.trainers import MegatronModel

    trainer = Megatron(Path(pairs[0][1]), "bf16", MegatronLayout())
    how = {
        "dtype": "bfloat16",
        "quantization": "fp8_per_tensor",
        "worker_extension_cls": "tests.tools.fp8_worker.Fp8Extension",
    }
    llms = [transferable(hf, **how) for hf, _ in pairs]
    outcome: dict = {"in fp8": [llm.collective_rpc("in_fp8") for llm in llms]}
    outcome["loaded"] = [[answers(llm, [p])[0] for p in PROMPTS[:1]] for llm in llms]
    clients = [LlmClient(llm) for llm in llms]
    link = WeightTransfer(
        MegatronModel(trainer.models), clients, f"127.0.0.1:{port}", timeout=180, delta=True
    )
    for version, (_, mcore) in enumerate(pairs):
        trainer.load(Path(mcore))
        link.send(version, verify=True)
        for llm in llms:
            llm.reset_prefix_cache()
        outcome[f"version {version}"] = [[answers(llm, [p])[0] for p in PROMPTS[:1]] for llm in llms]
    for llm in llms:
        llm.llm_engine.engine_core.shutdown()
    return outcome


def transfer_experts(pair: list, port: int) -> str:
    """What connecting an ``LLM`` with experts in bf16 raises."""
    from reshard import MegatronLayout
    from reshard.integrations import LlmClient, WeightTransfer
    from reshard.parity.systems.megatron import Megatron
    from reshard.trainers import MegatronModel

    trainer, llm = Megatron(Path(pair[1]), "bf16", MegatronLayout()), transferable(pair[0], dtype="bfloat16")
    source, address = MegatronModel(trainer.models), f"127.0.0.1:{port}"
    results = caught(lambda: WeightTransfer(source, LlmClient(llm), address, timeout=180))
    llm.llm_engine.engine_core.shutdown()
    return results


def asked(url: str, model: str, prompt: list[int]) -> list:
    """What `answers` says, of a server."""
    from tests.tools.vllm_server import post

    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    route = url + "/v1/completions"
    try:
        answer = post(route, body, seconds=40)
    except TimeoutError:
        # Two data parallel engines were seen to leave one of some hundred requests unanswered, on a loaded
        # machine, and why is not known. Asked again, it has to be answered, and rightly.
        answer = post(route, body)
    [choice] = answer["choices"]
    return [[next(iter(p.values()))["logprob"] for p in choice["prompt_logprobs"][1:]], choice["token_ids"]]
