"""The steps of `benchmarks.refits.sglang`, on each rank of the trainer."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import change, text_of
from benchmarks.processes import everyone, say, synchronize
from benchmarks.refits.sglang_server import Server, State, apart
from benchmarks.refits.slime_sync import SlimeSync


class Case:
    """One model and layout, on a rank of the trainer. The first rank has the server and calls it."""

    def __init__(
        self, options: argparse.Namespace, config: dict, models: list, server: Server | None
    ) -> None:
        from reshard.trainers.megatron import MegatronModel

        self.options, self.config, self.models, self.server = options, config, models, server
        self.source, self.rank, self.size = MegatronModel(models), dist.get_rank(), dist.get_world_size()
        self.engine_ranks = options.engine.get("tp_size", 1) * options.engine.get("pp_size", 1)
        self.result: dict[str, Any] = {}
        self.pool = ThreadPoolExecutor(1)
        self.expected: dict[int, State] = {}  # by checkpoint: of an SGLang that has loaded it
        self.refitted: dict[int, State] = {}  # by checkpoint: after a refit from its weights
        self.port = options.port + 10

    def together(self, call: Callable[[Server], Any], own_part: Callable[[], Any]) -> Any:
        """Call the server on the first rank while all ranks do their own part; return the own part's result."""
        answer = self.pool.submit(call, self.server) if self.server else None
        try:
            return own_part()
        finally:
            if answer is not None:
                answer.result(120)

    def connect(self, keep_mapped: bool) -> Any:
        """Connect the trainer's ranks and SGLang."""
        from reshard.engines.sglang.calls import connect_server
        from reshard.refit import RefitGroup, connect

        self.port += 1
        address, size = f"127.0.0.1:{self.port}", self.size + self.engine_ranks
        return self.together(
            lambda server: connect_server(server.url, address, self.size, size),
            lambda: connect(
                RefitGroup.join(address, self.rank, size, timeout=90), self.source, keep_mapped=keep_mapped
            ),
        )

    def refit(self, link: Any, verify: bool = False) -> Any:
        """Refit SGLang; return the report of this rank."""
        from reshard.engines.sglang.calls import refit_server

        return self.together(
            lambda server: refit_server(server.url, None, verify), lambda: link.refit(verify=verify)
        )

    def close(self, link: Any) -> None:
        """Close a connection, on both sides."""
        from reshard.engines.sglang.calls import close_server

        link.close()
        if self.server:
            close_server(self.server.url)
        dist.barrier()

    def check(self, name: str, expected: State | None) -> State | None:
        """Note whether SGLang's state is the expected one; return it."""
        state = None
        if self.server:
            state = self.state_asked_twice(name)
            if expected:
                self.note(name, comparison(state, expected))
        dist.barrier()
        return state

    def state_asked_twice(self, name: str) -> State:
        """Return SGLang's state; note the difference if it answers otherwise when it is asked again."""
        assert self.server
        vocabulary = text_of(self.config)["vocab_size"]
        state = self.server.state(vocabulary)
        self.server.flush_cache()
        if (difference := apart(state.says, self.server.says(vocabulary))) is not None:
            self.note(f"{name}: asked twice it is apart", difference)
        self.server.flush_cache()
        return state

    def note(self, name: str, value: Any) -> None:
        """Keep a result, print it, and write all results so far."""
        self.result[name] = value
        say(f"{name}: {value}")
        if self.rank == 0 and self.options.json:
            self.options.json.write_text(json.dumps(self.result) + "\n", encoding="utf-8")

    def step(self, seed: int) -> None:
        """Give the trainer the weights of a checkpoint. Free the memory that this took: the engines are on the same
        GPU."""
        change(self.source, seed)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def checkpoint(self, seed: int) -> Path:
        """Return the directory of a checkpoint of the trainer's weights."""
        return self.options.folder / "trainer" / str(seed)

    def loaded(self, seed: int, name: str, expected: State | None = None) -> State | None:
        """Let the running SGLang load a checkpoint by its own loader; return its state."""
        if self.server:
            self.server.load(self.checkpoint(seed))
        return self.check(name, expected)

    def load_both(self) -> None:
        """Keep SGLang's state with checkpoint 0, with which it has started, and with 1, which it loads by its own
        loader."""
        first = self.check("started with checkpoint 0", None)
        second = self.loaded(1, "loaded checkpoint 1")
        self.loaded(0, "loaded checkpoint 0, as started with it", first)
        if first and second:
            self.expected = {0: first, 1: second}
            self._note_control()
        dist.barrier()

    def _note_control(self) -> None:
        """Note how much the answers with the two checkpoints differ."""
        first, second = self.expected[0].says, self.expected[1].says
        self.note("control: the two checkpoints are apart", apart(first, second))

    def there_and_back(self) -> None:
        """Refit from each checkpoint's weights, and back to the first; verify the first refit. With `--times-only`
        verify all, and expect later what they leave."""
        start = time.perf_counter()
        link = self.connect(False)
        self.note("connect_seconds", time.perf_counter() - start)
        for number, seed in enumerate((0, 1, 0)):
            self.step(seed)
            self.refit(link, verify=number == 0 or self.options.times_only)
            state = self.check(f"refit {number + 1}, from checkpoint {seed}", self.expected.get(seed))
            if state:
                self.refitted[seed] = state
            if seed and not self.options.times_only:
                self.loaded(seed, "loaded checkpoint 1 after the refit, as refitted", self.refitted.get(seed))
            if state and self.options.times_only:
                self.expected.setdefault(seed, state)
        if self.server and self.options.times_only:
            self._note_control()
        self.close(link)

    def restart(self) -> None:
        """Note whether an SGLang that starts with checkpoint 1 has the state that a refit from it left."""
        if self.server:
            self.server.stop()
            self.server.start(self.checkpoint(1), "auto")
            self.server.wait(self.options.start_limit)
        dist.barrier()
        self.check("started with checkpoint 1, as refitted", self.refitted.get(1))

    def time_refits(self) -> None:
        """Note the milliseconds of refits, with the trainer's memory mapped each time and kept mapped."""
        for keep_mapped in (False, True):
            link = self.connect(keep_mapped)
            how = "keep_mapped" if keep_mapped else "mapped each time"
            self.note(f"SGLang, {how}", timed(lambda link=link: self.refit(link), self.options.rounds))
            if not keep_mapped:
                self.note("SGLang, verified", timed(lambda link=link: self.refit(link, True), 3))
            self.close(link)

    def time_slime(self) -> None:
        """Note the milliseconds of slime's sync, and whether it and the refit after it leave the expected states."""
        from reshard.models.model import Model

        slime = SlimeSync(self.source, Model.from_hf(self.config), self.server)
        self.step(1)
        slime.update()
        self.check("slime's way, from checkpoint 1", self.expected.get(1))
        self.note("slime's way", timed(slime.update, 4))
        self.step(0)
        link = self.connect(False)
        self.refit(link)
        self.check("refitted after slime's way, from checkpoint 0", self.expected.get(0))
        self.close(link)

    def sleep(self) -> None:
        """Note how a sleeping SGLang answers a refit, and an awake one a request; and what a refit leaves then."""
        link = self.connect(False)
        tags = {"tags": ["kv_cache", "weights"]}
        free = free_bytes()
        if self.server:
            self.server.call("release_memory_occupation", tags)
        dist.barrier()
        self.note("released_bytes", free_bytes() - free)
        self.note("refit while it sleeps", error_of(lambda: self.refit(link)))
        if self.server:
            self.server.call("resume_memory_occupation", tags)
            self.note(
                "asked before a refit", error_of(lambda: self.server.says(text_of(self.config)["vocab_size"]))
            )
        dist.barrier()
        self.step(1)
        self.refit(link)
        self.check("refitted after sleep, from checkpoint 1", self.expected.get(1))
        self.note("SGLang, after sleep", timed(lambda: self.refit(link), 4))
        self.close(link)

    def time_vllm(self, pipe: Any) -> None:
        """Note the milliseconds of the same refits into a vLLM."""
        from reshard.refit import RefitGroup, connect

        def connect_vllm(keep_mapped: bool) -> Any:
            self.port += 1
            address, size = f"127.0.0.1:{self.port}", 2 * self.size

            def connect_trainer() -> Any:
                members = RefitGroup.join(address, self.rank, size, timeout=90)
                return connect(members, self.source, keep_mapped=keep_mapped)

            return call_vllm(pipe, connect_trainer, "reshard_connect", address, self.size, size)

        ready = everyone(start_of_vllm(pipe))[0]
        if ready != "ready":
            self.note("vLLM", f"did not start: {ready}")
            return
        for keep_mapped in (False, True):
            link = connect_vllm(keep_mapped)
            how = "keep_mapped" if keep_mapped else "mapped each time"
            refit = partial(call_vllm, pipe, link.refit, "reshard_refit")
            self.note(f"vLLM, {how}", timed(refit, self.options.rounds))
            link.close()
            dist.barrier()


def call_vllm(pipe: Any, own_part: Callable[[], Any], method: str, *arguments: Any) -> Any:
    """Call a method of vLLM's workers on the rank that has the pipe while all ranks do their own part; return the own
    part's result."""
    if pipe:
        pipe.send(("collective_rpc", (method,), {"args": arguments}))
    result = own_part()
    answer = pipe.recv() if pipe else None
    if isinstance(answer, Exception):
        raise answer
    return result


def start_of_vllm(pipe: Any) -> str:
    """Return "ready" once vLLM has started, or why it has not."""
    try:
        return str(pipe.recv()) if pipe and pipe.poll(120) else "nothing"
    except (EOFError, OSError) as error:
        return f"its process has ended ({error})"


def comparison(state: State, expected: State) -> dict[str, Any]:
    """Return whether a state is the expected one, and how it differs."""
    digests, others = state.digests, expected.digests
    difference = apart(state.says, expected.says)
    result: dict[str, Any] = {"says the same": difference is None}
    result["same bits"] = None if digests is None or others is None else digests == others
    if difference is not None:
        result["apart"] = difference
    if result["same bits"] is False:
        both = zip(digests or [], others or [], strict=True)
        names = sorted({name for one, other in both for name in other if one.get(name) != other[name]})
        result["tensors that differ"] = [len(names), *names[:4]]
    return result


def free_bytes() -> int:
    """Return how many bytes of this process's GPU are free; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def error_of(action: Callable[[], Any]) -> str:
    """Return the message of the error that an action raises."""
    try:
        action()
    except Exception as error:
        return str(error)[:300]
    return "no error"


def timed(action: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Time an action `rounds` times, after two rounds that do not count. Return the fastest, median and slowest
    milliseconds, of the slowest rank in each round: from call to return, and the times in its reports."""

    columns: dict[str, list[float]] = {}
    for number in range(rounds + 2):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        report = action()
        synchronize()
        own = {"call": time.perf_counter() - start}
        for name in ("wait_seconds", "transfer_seconds", "total_seconds"):
            if hasattr(report, name):
                own[name.removesuffix("_seconds")] = getattr(report, name)
        ranks = everyone(own)
        if number >= 2:
            for name in own:
                columns.setdefault(name, []).append(1e3 * max(rank[name] for rank in ranks))
    return {
        name: [round(value, 2) for value in (min(times), statistics.median(times), max(times))]
        for name, times in columns.items()
    }
