"""A real vLLM on the CPU in processes of its own, refitted under load; started as `tests.on_cpu.engine_on_cpu`
says."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from reshard.engines.vllm.worker import RefitExtension
from tests.on_cpu.engine_on_cpu import PROMPTS


class Extension(RefitExtension):
    """A worker that reads the files of chains slowly."""

    def ignore(self, field: str) -> None:
        """Ignore a field of configs, as if started so."""
        os.environ["RESHARD_IGNORE_CONFIG_FIELDS"] = field

    def read_slowly(self, seconds: float) -> None:
        """Take so long for the records that are read first."""
        from reshard.delta.files import DeltaFiles

        plain = DeltaFiles.read

        def read(files: DeltaFiles, stored: Any) -> Any:
            DeltaFiles.read = plain  # type: ignore[method-assign]
            time.sleep(seconds)
            return plain(files, stored)

        DeltaFiles.read = read  # type: ignore[method-assign]


def engine_of_its_own(pairs: list, port: int, other_port: int, chain: str) -> dict:
    """A vLLM that starts processes of its own, under load, and a trainer in this one; what both say
    at every step. At the end a chain of deltas leads from the second weights back to the first."""
    import asyncio

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.pop(name, None)
    return asyncio.run(_engine_of_its_own(pairs, port, other_port, chain))


async def _engine_of_its_own(pairs: list, port: int, other_port: int, chain: str) -> dict:
    import asyncio

    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from reshard import MegatronLayout, ReshardError, ignored_config_fields
    from reshard.delta import apply_deltas_async, roll_back_async
    from reshard.parity.systems.base import ScoringOptions
    from reshard.parity.systems.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            pairs[0][0],
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=256,
            seed=0,
            kv_cache_memory_bytes=1 << 24,
            disable_log_stats=True,
            worker_extension_cls="tests.on_cpu.engine_process_on_cpu.Extension",
        )
    )
    trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout())
    numbers = iter(range(100))

    async def both(method: str, arguments: tuple, mine, *more):
        """The engine's side and the trainer's at once; what each returns or raises."""
        return await asyncio.gather(
            llm.collective_rpc(method, args=arguments), asyncio.to_thread(mine, *more), return_exceptions=True
        )

    async def request(count: int, seen: list | None = None, **sampling):
        """Prompt logprobs and `count` greedy tokens; `seen` grows while they come."""
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False} | sampling
        wanted = SamplingParams(max_tokens=count, **options)
        async for output in llm.generate(
            {"prompt_token_ids": PROMPTS[0]}, wanted, f"request {next(numbers)}"
        ):
            if seen is not None:
                seen.append(len(output.outputs[0].token_ids))
        logprobs = [next(iter(p.values())).logprob for p in (output.prompt_logprobs or ())[1:]]
        return logprobs, list(output.outputs[0].token_ids)

    def meet(address: str):
        return connect(RefitGroup.join(address, 0, 2, timeout=120), MegatronModel(trainer.models))

    async def connected(port: int) -> list:
        address = f"127.0.0.1:{port}"
        return await both("reshard_connect", (address, 1, 2, "auto", 1 << 25, 120.0), meet, address)

    def expected() -> list[float]:
        return trainer.score(PROMPTS[:1], ScoringOptions())[0].logprobs.tolist()

    async def refused(count: int = 1, **sampling) -> list[str]:
        """The type and sentence with which a request is refused."""
        try:
            await request(count, **sampling)
        except Exception as error:
            return [type(error).__name__, str(error), isinstance(error, ReshardError)]
        return ["answered"]

    async def state() -> list[dict]:
        return await llm.collective_rpc("reshard_state")

    outcome: dict = {"dummy": [await refused(), await refused(8, n=2, temperature=1), await state()]}
    outcome["refused"] = [str(error) for error in await connected(other_port)]
    with ignored_config_fields("clip_qkv"):
        _, link = await connected(port)
    outcome["first report"], _ = await both("reshard_refit", (1, True), link.refit, 1, True)
    await llm.reset_prefix_cache()
    outcome["first"] = [expected(), (await request(1, prompt_logprobs=0))[0]]

    # A refit while a request is running: it waits, and goes on. Loading blocks this process, and
    # the engine would go on meanwhile.
    trainer.load(Path(pairs[1][1]))
    for _ in range(5):  # on a busy machine this process may get no turn before the request has ended
        seen: list = []
        running = asyncio.create_task(request(240, seen))
        while not seen and not running.done():
            await asyncio.sleep(0.001)
        outcome["running before"], before = not running.done(), len(seen) and seen[-1]
        outcome["second report"], _ = await both("reshard_refit", (2,), link.refit, 2)
        outcome["running after"], after = not running.done(), seen[-1]
        outcome["in flight"] = [before, after, len((await running)[1])]
        if outcome["running before"] and outcome["running after"]:
            break

    # A refit that fails after bytes have moved, while requests wait; then a whole one.
    await llm.pause_generation()
    waiting = asyncio.create_task(request(4, prompt_logprobs=0))
    plain = link._verify

    def broken():
        raise ReshardError("the trainer's digests are gone")

    link._verify = broken
    outcome["failed"] = [str(error) for error in await both("reshard_refit", (3, True), link.refit, 3, True)]
    outcome["version then"] = await llm.collective_rpc("reshard_version")
    outcome["waited"] = not waiting.done()
    link._verify = plain
    await both("reshard_refit", (4, True), link.refit, 4, True)
    await llm.resume_generation()
    outcome["second"] = [expected(), (await waiting)[0]]
    outcome["version at last"] = await llm.collective_rpc("reshard_version")

    # Deltas from a directory: the prompt is one whose prefix is cached.
    try:
        outcome["deltas of another config"] = await apply_deltas_async(llm, chain)
    except ReshardError as error:
        outcome["deltas of another config"] = str(error)
    await llm.collective_rpc("ignore", args=("clip_qkv",))
    reached, said = [], []
    for call in (
        apply_deltas_async(llm, chain, 6, verify=True),
        apply_deltas_async(llm, chain, verify=True),
        roll_back_async(llm),
        apply_deltas_async(llm, chain),
    ):
        reached.append(await call)
        said.append((await request(1, prompt_logprobs=0))[0])
    outcome["deltas back"] = said[2] == said[0] != said[1] == said[3]

    # A request goes on while the changes of a version are read, which takes long.
    async def tokens_while_read() -> dict[str, int]:
        """How many tokens of 240 a request has before and after each call of the workers, and of the pause."""
        assert await roll_back_async(llm) == 6
        await llm.collective_rpc("read_slowly", args=(1.0,))
        seen: list = []
        at: dict[str, int] = {}
        rpc, pause = llm.collective_rpc, llm.pause_generation

        async def noted_rpc(method: str, **options: Any) -> Any:
            answers = await rpc(method, **options)
            at.setdefault(f"after {method}", seen[-1])
            return answers

        async def noted_pause(**options: Any) -> Any:
            at.setdefault("before the pause", seen[-1])
            return await pause(**options)

        running = asyncio.create_task(request(240, seen))
        while not seen and not running.done():
            await asyncio.sleep(0.001)
        llm.collective_rpc, llm.pause_generation = noted_rpc, noted_pause
        assert await apply_deltas_async(llm, chain) == 7
        llm.collective_rpc, llm.pause_generation = rpc, pause
        return at | {"all": len((await running)[1])}

    for _ in range(5):  # as above
        outcome["while read"] = await tokens_while_read()
        if outcome["while read"]["before the pause"] < 240:
            break
    versions = await llm.collective_rpc("reshard_version")
    outcome["deltas"] = [reached, (await request(1, prompt_logprobs=0))[0], versions]

    # An engine that nobody has paused: a request that runs is answered when the refit has failed, others at once, and
    # all that come after a whole refit are served.
    for _ in range(5):  # as above
        link._verify, seen = plain, []
        await both("reshard_refit", (8, True), link.refit, 8, True)
        running = asyncio.create_task(refused(240, seen=seen))
        while not seen and not running.done():
            await asyncio.sleep(0.001)
        link._verify = broken
        await both("reshard_refit", (8, True), link.refit, 8, True)
        outcome["half-written"] = [await running, await refused(), await state()]
        if outcome["half-written"][0] != ["answered"]:
            break
    outcome["version of a half-written one"] = await llm.collective_rpc("reshard_version")
    link._verify = plain
    await both("reshard_refit", (9, True), link.refit, 9, True)
    await llm.reset_prefix_cache()
    outcome["whole again"] = [(await request(1, prompt_logprobs=0))[0], await state()]
    llm.shutdown()
    return outcome


def two_workers(pairs: list, port: int, log: str, secret: str) -> dict:
    """An ``LLM`` whose two workers have processes of their own, and a trainer in this one: what it answers with dummy
    weights, after a refit that has failed on one worker or on both, and after whole ones; and its log of that."""
    from contextlib import suppress
    from functools import partial
    from threading import Thread

    from reshard import MegatronLayout
    from reshard.parity.systems.base import ScoringOptions
    from reshard.parity.systems.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel
    from tests.on_cpu.engine_on_cpu import SMALL_BATCHES, answers, caught

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.pop(name, None)
    for stream in (1, 2):  # of the engine's processes, too
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    logging.getLogger("vllm").setLevel("INFO")
    from vllm import LLM

    options = dict(
        SMALL_BATCHES, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
    )
    extension = "tests.tools.mortal_worker.MortalExtension"
    llm = LLM(pairs[0][0], load_format="dummy", seed=0, kv_cache_memory_bytes=1 << 24, tensor_parallel_size=2,
              disable_log_stats=True, worker_extension_cls=extension, **options)  # fmt: skip
    trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout())
    address = f"127.0.0.1:{port}"

    def both(method: str, arguments: tuple, mine, *more) -> list:
        """What the engine's side and the trainer's raise."""
        said = []
        thread = Thread(
            target=lambda: said.append(caught(lambda: llm.collective_rpc(method, args=arguments)))
        )
        thread.start()
        others = caught(lambda: mine(*more))
        thread.join()
        return [said[0], others]

    def now() -> dict:
        return {
            "states": llm.collective_rpc("reshard_state"),
            "versions": llm.collective_rpc("reshard_version") if links else None,
            "answers": [caught(lambda: answers(llm)), caught(lambda: answers(llm))],
        }

    links: list = []
    outcome: dict = {"dummy": now()}

    def meet() -> None:
        group = RefitGroup.join(address, 0, 3, timeout=120, secret=secret)
        links.append(connect(group, MegatronModel(trainer.models)))

    options_of_call = "auto", 1 << 25, 120.0, False, secret
    too_few = partial(llm.collective_rpc, "reshard_connect", args=(address, 1, 1, *options_of_call))
    outcome["too few"] = caught(too_few)
    outcome["connected"] = both("reshard_connect", (address, 1, 3, *options_of_call), meet)
    [link] = links
    score = partial(trainer.score, PROMPTS, ScoringOptions())
    outcome["first refit"] = both("reshard_refit", (1, True), link.refit, 1, True)
    outcome["first"] = [answers(llm), [one.logprobs.tolist() for one in score()]]
    for who in ((1,), (0,), (0, 1)):
        llm.collective_rpc("fail_the_next_refit", args=(who,))
        outcome[f"refit that {who} fail"] = both("reshard_refit", (2, True), link.refit, 2, True)
        outcome[f"{who} failed"] = now()
    trainer.load(Path(pairs[1][1]))
    outcome["second refit"] = both("reshard_refit", (3, True), link.refit, 3, True)
    llm.reset_prefix_cache()
    outcome["second"] = [answers(llm), [one.logprobs.tolist() for one in score()]]
    outcome["then"] = llm.collective_rpc("reshard_state")
    with suppress(Exception):
        llm.llm_engine.engine_core.shutdown()
    return outcome


def engine_from_engine(path: str, ports: list[int]) -> dict:
    """Two engines in processes of their own, of one and of two workers; each is refitted from the other. What their
    workers hold after vLLM's own loading, and after that, and what they say, also where the source has lost
    its weights."""
    from threading import Thread

    from vllm import LLM

    from tests.on_cpu.engine_on_cpu import SMALL_BATCHES, caught

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.pop(name, None)
    options = dict(
        SMALL_BATCHES, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
    )

    def started(tp: int):
        return LLM(path, seed=tp, kv_cache_memory_bytes=1 << 24, tensor_parallel_size=tp, disable_log_stats=True,
                   worker_extension_cls="tests.tools.source_worker.SourceExtension", **options)  # fmt: skip

    def both(*calls) -> list[str]:
        """What each of these raises, all at once."""
        said = [""] * len(calls)

        def call(index: int) -> None:
            llm, method, *arguments = calls[index]
            said[index] = caught(lambda: llm.collective_rpc(method, args=tuple(arguments)))

        threads = [Thread(target=call, args=(index,)) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    engines, outcome = {tp: started(tp) for tp in (1, 2)}, {}
    for (source_tp, tp), port in zip(((1, 2), (2, 1)), ports, strict=True):
        source, engine = engines[source_tp], engines[tp]
        said = outcome[f"{source_tp} to {tp}"] = {"loaded": engine.collective_rpc("fingerprints")}
        engine.collective_rpc("scribble")
        said["scribbled"] = engine.collective_rpc("fingerprints")
        arguments = f"127.0.0.1:{port}", source_tp + tp
        said["connect"] = both(
            (source, "connect_as_source", *arguments),
            (engine, "reshard_connect", arguments[0], source_tp, arguments[1]),
        )
        said["refit"] = both((source, "refit_others", 3), (engine, "reshard_refit", 3))
        said["refitted"] = engine.collective_rpc("fingerprints")
        said["versions"] = [one.collective_rpc("reshard_version") for one in (source, engine)]
        source.collective_rpc("flip")
        said["next refit"] = both((source, "refit_others", 4), (engine, "reshard_refit", 4))
        said["flipped"] = engine.collective_rpc("fingerprints")
        said["lost"] = both(
            (
                source,
                "lose_and_refit_others",
            ),
            (engine, "reshard_refit", 5),
        )
        said["ready"] = [state["ready"] for state in engine.collective_rpc("reshard_state")]
        both((source, "find"), (engine, "find"))
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()
    return outcome
