"""A trainer with PEFT's LoRA modules in this process, and a real vLLM on the CPU in processes of its own that
serves its adapter under load; started as `tests.on_cpu.engine_on_cpu` says."""

import asyncio
import os
from pathlib import Path

from reshard.engines.vllm.worker import RefitExtension
from tests.on_cpu.engine_on_cpu import PROMPTS, SMALL_BATCHES, adapter_of
from tests.on_cpu.lora_serving_on_cpu import trainer

LONG = 200  # tokens of a request during which refits come


class Extension(RefitExtension):
    """A worker that may not learn how a refit ended."""

    def miss_the_end(self) -> None:
        """Let the second rank miss the end of the next refit of an adapter."""
        if self.rank == 1:
            adapter = self._reshard_connected().receiver.engine
            adapter.end = lambda _: vars(adapter).pop("end")


def policy_of_its_own(hf: str, folder: str, port: int, parallel: dict) -> dict:
    """What requests for the trainer's adapter get, and what they get for its files, which vLLM loads itself."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.pop(name, None)
    return asyncio.run(_policy_of_its_own(hf, Path(folder), port, parallel))


async def _policy_of_its_own(hf: str, folder: Path, port: int, parallel: dict) -> dict:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from reshard import ReshardError
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.fsdp import FsdpModel

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            hf, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256,
            seed=0, kv_cache_memory_bytes=1 << 24, disable_log_stats=True, **SMALL_BATCHES, **parallel,
            worker_extension_cls="tests.on_cpu.lora_process_on_cpu.Extension",
            enable_lora=True, max_lora_rank=8, max_loras=2,
        )
    )  # fmt: skip
    model, step = trainer(hf)
    replicas = parallel.get("data_parallel_size", 1)
    members = 1 + replicas * parallel.get("tensor_parallel_size", 1)
    numbers, policy = iter(range(1000)), LoRARequest("policy", 1, "no path")

    async def request(
        adapter, count: int = 4, seen: list | None = None, prompt: int = 0, rank: int | None = None
    ):
        """Greedy tokens of a prompt with their logprobs; `seen` grows while they come."""
        wanted = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, logprobs=0, detokenize=False
        )
        given = {"prompt_token_ids": PROMPTS[prompt]}
        async for output in llm.generate(
            given, wanted, f"request {next(numbers)}", lora_request=adapter, data_parallel_rank=rank
        ):
            if seen is not None:
                seen.append(len(output.outputs[0].token_ids))
        [one] = output.outputs
        return [list(one.token_ids), [next(iter(step.values())).logprob for step in one.logprobs]]

    async def everywhere(adapter) -> list:
        """The answers of all replicas, which are asked at once; one if they are the same."""
        ranks = range(replicas) if replicas > 1 else [None]
        answers = await asyncio.gather(*(request(adapter, rank=rank) for rank in ranks))
        return answers[0] if answers == [answers[0]] * len(answers) else answers

    async def refused(adapter) -> str:
        try:
            return str(await request(adapter))
        except ReshardError as error:
            return str(error)

    async def both(method: str, arguments: tuple, mine, *more):
        """The engine's side and the trainer's at once."""
        return await asyncio.gather(
            llm.collective_rpc(method, args=arguments), asyncio.to_thread(mine, *more)
        )

    async def connected(port: int):
        def meet(address: str):
            group = RefitGroup.join(address, 0, members, timeout=120)
            return connect(group, FsdpModel(model), adapter="policy")

        address = f"127.0.0.1:{port}"
        named = ("auto", 1 << 25, 120.0, False, None, "policy")
        _, link = await both("reshard_connect", (address, 1, members, *named), meet, address)
        return link

    async def refit(link, version: int | None = None, verify: bool = False) -> LoRARequest:
        """Bring another adapter, and return vLLM's own request for its files."""
        await asyncio.to_thread(step)
        await both("reshard_refit", (version, verify), link.refit, version, verify)
        return files_of_now()

    def files_of_now() -> LoRARequest:
        number = next(numbers)
        model.save_pretrained(folder / f"peft {number}")
        return LoRARequest(f"files {number}", 1000 + number, str(folder / f"peft {number}"))

    link = await connected(port)
    outcome: dict = {"early": await refused(policy)}
    first = await refit(link, 7, True)
    outcome["first"] = [await everywhere(policy), await everywhere(first)]

    # A request that runs while refits come; on a busy machine it may have ended before.
    files = [first]
    for _ in range(5):
        seen: list = []
        running = asyncio.create_task(request(policy, LONG, seen))
        while not seen and not running.done():
            await asyncio.sleep(0.001)
        tenant = asyncio.create_task(request(LoRARequest("tenant", 5, adapter_of(hf)), 40, prompt=1))
        waiting = [asyncio.create_task(request(policy, 20, prompt=2)) for _ in range(8)]
        await asyncio.sleep(0)
        files.append(await refit(link, 7))  # the same number again
        ran = not running.done()
        new = await request(policy)
        if ran:
            break
    outcome["ran"] = ran
    outcome["running"] = [await running, [await request(one, LONG) for one in files[-2:]]]
    outcome["waiting"] = [
        await asyncio.gather(*waiting),
        [await request(one, 20, prompt=2) for one in files[-2:]],
    ]
    outcome["tenant"] = [await tenant, await request(LoRARequest("alone", 6, adapter_of(hf)), 40, prompt=1)]
    outcome["same number"] = [new, await everywhere(policy), await everywhere(files[-1])]
    outcome["several at once"] = await asyncio.gather(*map(request, [policy, first, files[-1]]))
    outcome["each alone"] = [await request(one) for one in (policy, first, files[-1])]

    # What is gone, and what may not be asked for.
    old = LoRARequest(**(await llm.collective_rpc("reshard_adapter"))[0])
    outcome["by version"] = await request(old)
    await refit(link)
    now = LoRARequest(**(await llm.collective_rpc("reshard_adapter"))[0])
    foreign = LoRARequest("other", now.lora_int_id, "no path")
    outcome["gone"] = [await refused(old), old.lora_name, await refused(foreign)]

    # One of two ranks that does not learn how a refit ended.
    if replicas == 1:
        await llm.collective_rpc("miss_the_end")
        await refit(link)
        outcome["apart"] = [await refused(policy)]
        again = await refit(link)
        outcome["apart"] += [await request(policy), await request(again)]

    # A trainer that comes again, and counts from 1.
    await both("reshard_close", (), link.close)
    outcome["closed"] = await everywhere(policy) == await everywhere(files_of_now())
    link = await connected(port + 1)
    last = await refit(link, 7)
    outcome["reconnected"] = [await everywhere(policy), await everywhere(last)]
    outcome["held"] = [
        len(state["adapters"]["policy"]["held"]) for state in await llm.collective_rpc("reshard_state")
    ]
    llm.shutdown()
    return outcome
