"""Requests for a trainer's LoRA adapter while refits bring new versions of it, in a vLLM in processes of its own on
the same GPU, with CUDA graphs.

    torchrun --nproc-per-node 1 -m benchmarks.refits.lora_served --model llama-3.1-8b --layers 16 [--json FILE]

The trainer is a transformers model with PEFT's adapter. Reported: the mean difference of the logprobs that a request
by the adapter's plain name got to those that vLLM gives the same tokens with the files of each version, which it loads
itself: of a request before and after a refit, one that runs while the next version comes, under the same number, and
one after it, whose prompt's prefix is cached. vLLM's kernels for LoRA add in no fixed order, so that no two answers
are equal to the bit; those of another version differ by far more. Then a request before the first version, second
tenants, and refits that fail: each is answered, and the engine lives; and the time of a refit, while a request runs and
while none does.
"""

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import conclude, device, start_processes

LONG, SHORT, PORT = 400, 32, 29755
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING")
ENGINE = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "gpu_memory_utilization": 0.5,
    "seed": 0, "disable_log_stats": True, "worker_extension_cls": "reshard.engines.vllm.worker.RefitExtension",
    "enable_lora": True, "max_loras": 2, "enable_prefix_caching": True, "async_scheduling": True, "dtype": "bfloat16",
}  # fmt: skip


class Served:
    """A vLLM in processes of its own, a trainer in this one, and the results so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.async_llm import AsyncLLM

        from benchmarks.models import config_of
        from benchmarks.refits.lora_trainers import PeftTrainer
        from benchmarks.refits.serving import GRAPHS

        config = config_of(options.model, options.layers)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self.folder, self.numbers, self.steps = folder, itertools.count(), itertools.count(1)
        graphs = GRAPHS if device() == "cuda" else {"enforce_eager": True}
        memory = {"kv_cache_memory_bytes": 1 << (30 if device() == "cuda" else 26)}
        self.llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(str(folder), max_lora_rank=options.rank, **ENGINE, **graphs, **memory)
        )
        self.trainer = PeftTrainer(folder, options.rank)
        self.policy = LoRARequest("policy", 1, "no path")
        self.prompts = [[1 + (7 * row + 13 * n) % 997 for n in range(64)] for row in range(4)]
        self.result: dict[str, Any] = {"model": options.model, "layers": config["num_hidden_layers"]}

    async def request(
        self, adapter: Any, count: int = SHORT, seen: list | None = None, prompt: int = 0
    ) -> list:
        """Return greedy tokens with their logprobs; `seen` grows while they come."""
        from vllm import SamplingParams

        wanted = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, logprobs=0, detokenize=False
        )
        given = {"prompt_token_ids": self.prompts[prompt]}
        async for output in self.llm.generate(
            given, wanted, f"request {next(self.numbers)}", lora_request=adapter
        ):
            if seen is not None:
                seen.append(len(output.outputs[0].token_ids))
        [one] = output.outputs
        return [list(one.token_ids), [next(iter(step.values())).logprob for step in one.logprobs]]

    async def distances(self, answer: list, versions: dict[str, Any]) -> dict[str, float]:
        """Return the mean difference of an answer's logprobs to those of its tokens by the files of each version."""
        from vllm import SamplingParams

        tokens, logprobs = answer
        given = {"prompt_token_ids": self.prompts[0] + tokens}
        wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        found = {}
        for name, adapter in versions.items():
            number = next(self.numbers)
            async for output in self.llm.generate(given, wanted, f"request {number}", lora_request=adapter):
                scored = output.prompt_logprobs[len(self.prompts[0]) :]
            own = [entry[token].logprob for token, entry in zip(tokens, scored, strict=True)]
            found[name] = sum(abs(a - b) for a, b in zip(own, logprobs, strict=True)) / len(tokens)
        return found

    async def refused(self, adapter: Any) -> str:
        """Return with what a request is refused; its tokens, if it is not."""
        from reshard import ReshardError

        try:
            return str(await self.request(adapter))
        except ReshardError as error:
            return str(error)

    async def both(self, method: str, arguments: tuple, mine: Any, *more: Any) -> list:
        """Call the engine's side and the trainer's at once; return what each returns or raises."""
        return await asyncio.gather(
            self.llm.collective_rpc(method, args=arguments), asyncio.to_thread(mine, *more), return_exceptions=True
        )  # fmt: skip

    async def connect(self) -> Any:
        """Return the trainer's link."""
        from reshard.refit import RefitGroup, connect

        def meet() -> Any:
            group = RefitGroup.join(f"127.0.0.1:{PORT}", 0, 2, timeout=60)
            return connect(group, self.trainer.source(), adapter="policy")

        options = "auto", 1 << 29, 60.0, False, None, "policy"
        answers, link = await self.both("reshard_connect", (f"127.0.0.1:{PORT}", 1, 2, *options), meet)
        if isinstance(link, BaseException):
            raise link
        if isinstance(answers, BaseException):
            raise answers
        return link

    async def refit(self, link: Any, version: int | None) -> tuple[Any, float]:
        """Bring another adapter. Return vLLM's own request for its files, and the seconds of the refit."""
        from vllm.lora.request import LoRARequest

        number = next(self.steps)
        await asyncio.to_thread(self.trainer.step, number)
        start = time.perf_counter()
        for outcome in await self.both("reshard_refit", (version,), link.refit, version):
            if isinstance(outcome, BaseException):
                raise outcome
        seconds = time.perf_counter() - start
        await asyncio.to_thread(self.trainer.save, self.folder / f"peft {number}")
        return LoRARequest(f"files {number}", 1000 + number, str(self.folder / f"peft {number}")), seconds

    async def run(self) -> None:
        """Fill the result."""
        from vllm.lora.request import LoRARequest

        from reshard import ReshardError

        out, link = self.result, await self.connect()
        out["before the first version"] = await self.refused(self.policy)
        first, out["first_refit_seconds"] = await self.refit(link, 7)
        seen: list[int] = []
        answers = {"first": await self.request(self.policy, LONG)}
        running = asyncio.create_task(self.request(self.policy, LONG, seen))
        while not seen:
            await asyncio.sleep(0.001)
        second, seconds = await self.refit(link, 7)
        out["ran"], out["refit_ms"] = not running.done(), round(1e3 * seconds, 2)
        out["tokens_before_and_in_all"] = [seen[0], LONG]
        answers["running"] = await running
        answers["after"] = await self.request(self.policy, LONG)
        tenants = [LoRARequest(f"tenant {n}", 50 + n, first.lora_path) for n in range(3)]
        others = await asyncio.gather(*(self.request(one, prompt=1) for one in (self.policy, *tenants)))
        out["tenants"] = len(others)
        versions = {"version 1": first, "version 2": second, "the model alone": None}
        for name, answer in answers.items():
            out[name] = await self.distances(answer, versions)
        times = [(await self.refit(link, None))[1] for _ in range(10)]
        out["idle_refit_ms"] = [round(1e3 * one, 2) for one in sorted(times)]

        plain = link._transfer

        def fails() -> None:
            raise ReshardError("a copy has failed")

        link._transfer = fails
        out["failed"] = [str(one)[:120] for one in await self.both("reshard_refit", (99,), link.refit, 99)]
        newest, step = await self.request(self.policy), next(self.steps) - 1
        kept = LoRARequest(f"files {step}", 999, str(self.folder / f"peft {step}"))
        out["after a failed refit"] = await self.distances(newest, {"kept": kept, "version 2": second})
        link._transfer, link.below.link._transfer = plain, fails
        with_other_base = next(p for n, p in self.trainer.model.named_parameters() if "lora" not in n)
        with_other_base.data[0] += 1  # so that the weights below it are refitted, and left half-written
        await self.both("reshard_refit", (100,), link.refit, 100)
        out["half-written"] = [await self.refused(self.policy), await self.refused(None)]
        out["state"] = await self.llm.collective_rpc("reshard_state")
        del link.below.link._transfer
        last, _ = await self.refit(link, 101)
        mended = await self.request(self.policy)
        out["mended"] = await self.distances(mended, {"newest": last, "version 2": second})
        self.llm.shutdown()


def main() -> None:
    from benchmarks.models import model_options

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_options(parser)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start_processes()
    for name in list(os.environ):  # vLLM starts processes of its own, which are not torchrun's
        if name.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")) or name in TORCHRUN:
            del os.environ[name]

    async def all_of_it() -> dict[str, Any]:
        served = Served(options, Path(tempfile.gettempdir()) / "lora-served")
        await served.run()
        return served.result

    conclude(asyncio.run(all_of_it()), options.json)


if __name__ == "__main__":
    main()
