"""A real vLLM on the CPU with two engines of one model (``data_parallel_size=2``), under load, that follows a chain of
deltas; started as `tests.on_cpu.engine_on_cpu` says."""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from reshard.engines.vllm.worker import RefitExtension

MOST = 4096  # tokens of a request: more than an engine makes before a version is read
LONG = [(7 * i + 3) % 1000 for i in range(70)]  # fills four blocks of the prefix cache
BROKEN = "RESHARD_TEST_BROKEN"  # names a file: while it is there the second engine cannot write


class Extension(RefitExtension):
    """Methods of a worker that write into its weights behind the back of reshard, as trainers do."""

    def reshard_delta_write(self, *arguments: Any) -> Any:
        index = self.vllm_config.parallel_config.data_parallel_index
        if index and os.path.exists(os.environ[BROKEN]):
            return {"error": "the disk of the second engine is gone"}
        return super().reshard_delta_write(*arguments)

    def load_norm(self) -> None:
        """Load a tensor as TRL and OpenRLHF do it, by the model's own loader."""
        norm = self.get_model().model.norm.weight
        self.kept = norm.detach().clone()
        self.get_model().load_weights([("model.norm.weight", self.kept + 1)])

    def load_norm_back(self) -> None:
        """Load what the tensor was before."""
        self.get_model().load_weights([("model.norm.weight", self.kept)])

    def add_to_norm(self) -> None:
        """Write a tensor in place, as a function of ``apply_model`` may."""
        self.get_model().model.norm.weight.data += 1


def follow(directory: str, chain: str, folder: str) -> dict:
    """What two engines say at every step of a chain of three versions, and of what others write in between."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.pop(name, None)
    os.environ[BROKEN] = f"{folder}/broken"
    return asyncio.run(_serve(directory, chain, Path(folder) / "broken"))


async def _serve(directory: str, chain: str, broken: Path) -> dict:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            directory,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=MOST,
            hf_overrides={"max_position_embeddings": MOST},
            block_size=16,
            seed=0,
            kv_cache_memory_bytes=1 << 26,
            disable_log_stats=True,
            data_parallel_size=2,
            worker_extension_cls="tests.on_cpu.engine_deltas_on_cpu.Extension",
        )
    )
    try:
        return await _follow(llm, chain, broken)
    finally:
        llm.shutdown()


async def _follow(llm: Any, chain: str, broken: Path) -> dict:
    from vllm import SamplingParams

    from reshard import ReshardError
    from reshard.delta import apply_deltas_async, roll_back_async
    from reshard.engines.digest import digest_of_engine, digest_of_engine_async

    numbers = iter(range(1000))

    async def ask(
        engine: int,
        count: int = 1,
        salt: str | None = None,
        seen: list | None = None,
        after: Sequence[int] = (),
        over: asyncio.Event | None = None,
    ) -> list[float]:
        """Logprobs of `count` greedy tokens, or of those so far once it is `over`, after the long prompt and more
        tokens, by one of the engines; with a salt of its own a request reads nothing that another has left in the
        prefix cache. `seen` has its tokens so far."""
        wanted = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, logprobs=0
        )
        prompt: dict = {"prompt_token_ids": [*LONG, *after]} | ({"cache_salt": salt} if salt else {})
        number = f"request {next(numbers)}"
        async with aclosing(llm.generate(prompt, wanted, number, data_parallel_rank=engine)) as outputs:
            async for output in outputs:
                if seen is not None:
                    seen[:] = output.outputs[0].token_ids
                if over is not None and over.is_set():
                    break
        return [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]

    async def said(call: Any) -> str:
        try:
            return f"reached {await call}"
        except ReshardError as error:
            return str(error)

    async def answers() -> list[list[list[float]]]:
        """What each engine says with what is in its prefix cache, and without."""
        return [[await ask(engine), await ask(engine, salt=f"salt {next(numbers)}")] for engine in (0, 1)]

    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reshard").addHandler(heard)
    logging.getLogger("reshard").setLevel(logging.INFO)
    outcome: dict = {"base": await answers(), "lines": lines}

    # Under load, in both engines: the cache holds the prompt, as the base has it.
    seen: list[list[int]] = [[], []]
    over = asyncio.Event()
    running = [
        asyncio.create_task(ask(engine, MOST - len(LONG), seen=seen[engine], over=over)) for engine in (0, 1)
    ]
    while not all(seen):
        await asyncio.sleep(0.001)
    call = llm.collective_rpc

    async def while_read(method: str, *arguments: Any, **options: Any) -> Any:
        if method == "reshard_delta_follow_ready" and "while read" not in outcome:
            ahead = [len(tokens) + 1 for tokens in seen]
            while any(len(tokens) < count for tokens, count in zip(seen, ahead, strict=True)):
                assert not any(task.done() for task in running), "they are longer than this takes"
                await asyncio.sleep(0.001)
            outcome["while read"] = await llm.is_paused()
        return await call(method, *arguments, **options)

    llm.collective_rpc = while_read
    outcome["first"] = await said(apply_deltas_async(llm, chain, 1, verify=True))
    llm.collective_rpc = call
    outcome["was running"] = [not task.done() for task in running]
    before = [len(tokens) for tokens in seen]
    outcome["under load"] = await answers()
    over.set()
    went_on = await asyncio.gather(*running)
    outcome["tokens since"] = [len(each) - count for each, count in zip(went_on, before, strict=True)]
    outcome["went on"] = [
        [logprobs[-1], *await ask(engine, salt=f"salt {next(numbers)}", after=seen[engine][:-1])]
        for engine, logprobs in enumerate(went_on)
    ]
    outcome["paused"] = await llm.is_paused()

    # While its owner has paused it.
    await llm.pause_generation()
    outcome["while paused"] = (
        await said(apply_deltas_async(llm, chain, 2, verify=True)),
        await llm.is_paused(),
    )
    await llm.resume_generation()
    outcome["resumed"] = await answers()

    # Two callers at once.
    both = (apply_deltas_async(llm, chain, version, verify=True) for version in (3, 4))
    outcome["at once"] = await asyncio.gather(*map(said, both))
    outcome["after both"] = await answers()
    outcome["back"] = [await said(roll_back_async(llm, 3)), await llm.collective_rpc("reshard_version")]
    outcome["gone back"] = await answers()
    outcome["back twice"] = [await said(roll_back_async(llm)), await llm.is_paused()]
    outcome["forward"] = await said(apply_deltas_async(llm, chain, 4)), await answers()

    async def digest() -> str:
        return (await digest_of_engine_async(llm)).text

    outcome["digest"] = await digest()
    outcome["not awaited"] = await said(asyncio.to_thread(digest_of_engine, llm))

    # What others have written: by the model's loader, and in place.
    outcome["version"] = await llm.collective_rpc("reshard_version")
    await llm.collective_rpc("load_norm")
    outcome["version then"] = await llm.collective_rpc("reshard_version")
    outcome["loaded between"] = await said(apply_deltas_async(llm, chain))
    await llm.collective_rpc("load_norm_back")
    outcome["loaded back"] = await said(apply_deltas_async(llm, chain, 4))
    await llm.collective_rpc("add_to_norm")
    outcome["digest then"] = await digest()
    outcome["written between"] = await said(apply_deltas_async(llm, chain))
    await llm.collective_rpc("load_norm_back")

    # An owner, or another caller, who ends the pause too early.

    async def resumed_before(method: str, *arguments: Any, **options: Any) -> Any:
        if method == "reshard_delta_follow":
            await llm.resume_generation()
        return await call(method, *arguments, **options)

    llm.collective_rpc = resumed_before
    outcome["resumed meanwhile"] = await said(apply_deltas_async(llm, chain))
    llm.collective_rpc = call
    outcome["version after that"] = await llm.collective_rpc("reshard_version")
    await llm.collective_rpc("reload_weights")
    outcome["from the base"] = await said(apply_deltas_async(llm, chain, 4))

    # A replica that cannot write.
    broken.touch()
    outcome["replica"] = await said(apply_deltas_async(llm, chain, verify=True))
    outcome["versions then"] = await llm.collective_rpc("reshard_version")
    outcome["paused then"] = await llm.is_paused()
    return outcome
