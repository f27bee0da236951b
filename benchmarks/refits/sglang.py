"""A running SGLang, refitted from Megatron: does it say what one says that has loaded the checkpoint, and how long
does it take beside a vLLM, and beside `update_weights_from_tensor` as slime calls it?

    torchrun --nproc-per-node 2 -m benchmarks.refits.sglang --model qwen3-30b-a3b --layers 6 --tp 2 --ep 2 --etp 1 \\
        --engine '{"tp_size": 2, "ep_size": 2}' --vllm '{"enable_expert_parallel": true}' --slime [--json FILE]

The trainer's ranks are torchrun's processes (Megatron with Transformer Engine layers, random weights), SGLang is a
server and vLLM an engine, each in processes of its own on the same GPUs. In turn:

- SGLang starts with checkpoint 0, and says its prompt logprobs, eight greedy tokens with theirs, and the digests of
  its weights: twice, since its kernels may not say the same twice. It then loads checkpoints 1 and 0 by its own
  loader. A refit from each, in turn and back, must leave the same. Where the running SGLang's own loader leaves
  something of the weights before, as GLM's router in SGLang 0.5.16 to 0.5.18, only what an SGLang says that started
  with a checkpoint counts: `--restart` asks one that starts with checkpoint 1.
- Refits are timed, with the trainer's memory mapped each time and kept mapped; `--vllm` times the same refits into a
  vLLM with these options; `--slime` times slime's way: whole tensors gathered on each rank, in flattened buckets of
  512 MB, whose handles SGLang gets by HTTP.
- `--times-only`: no checkpoints, for models that take long to write and load. SGLang starts with dummy weights, the
  first refits are verified, and what slime's way leaves is compared with what they left.
- `--sleep`: a refit while SGLang has released its weights must be refused, and one after it resumed leave the same.

With `--fp8` SGLang serves from fp8 blocks, of checkpoints that are quantized as `reshard mcore-to-hf --quantize fp8`
does, and of the trainer's bf16. An SGLang of the environment's is used, with kernels that are made by Triton.
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import change, config_of, megatron_models, model_options, text_of
from benchmarks.processes import conclude, everyone, say, start_processes, synchronize
from benchmarks.refits.served_checkpoint import served_config, write_checkpoint
from benchmarks.refits.sglang_server import Server, State, apart

OF_VLLM = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 28, "enable_sleep_mode": False}
BUCKET = 512 << 20  # bytes, as slime's --update-weight-buffer-size


class Case:
    """A trainer's side of one case, on each of its ranks; the first has the server and calls it."""

    def __init__(
        self, options: argparse.Namespace, config: dict, models: list, server: Server | None
    ) -> None:
        from reshard.trainers.megatron import MegatronModel

        self.options, self.config, self.models, self.server = options, config, models, server
        self.source, self.rank, self.size = MegatronModel(models), dist.get_rank(), dist.get_world_size()
        self.engine_ranks = options.engine.get("tp_size", 1) * options.engine.get("pp_size", 1)
        self.result: dict[str, Any] = {}
        self.pool = ThreadPoolExecutor(1)
        self.expected: dict[int, State] = {}  # of each checkpoint
        self.refitted: dict[int, State] = {}
        self.port = options.port + 10

    def both(self, call: Callable[[Server], Any], meanwhile: Callable[[], Any]) -> Any:
        """Call the server on the first rank while all ranks do their part; return what that returns."""
        asked = self.pool.submit(call, self.server) if self.server else None
        try:
            return meanwhile()
        finally:
            if asked is not None:
                asked.result(120)

    def connect(self, keep_mapped: bool) -> Any:
        """Connect the trainer's ranks and SGLang."""
        from reshard.engines.sglang.calls import connect_server
        from reshard.refit import RefitGroup, connect

        self.port += 1
        address, size = f"127.0.0.1:{self.port}", self.size + self.engine_ranks
        return self.both(
            lambda server: connect_server(server.url, address, self.size, size),
            lambda: connect(
                RefitGroup.join(address, self.rank, size, timeout=90), self.source, keep_mapped=keep_mapped
            ),
        )

    def refit(self, link: Any, verify: bool = False) -> Any:
        """Refit SGLang; return the report of this rank."""
        from reshard.engines.sglang.calls import refit_server

        return self.both(
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
        """Note whether SGLang says, twice, and holds, what is expected; return what it says and holds."""
        state = None
        if self.server:
            state = self.asked_twice(name)
            if expected:
                self.note(name, compared(state, expected))
        dist.barrier()
        return state

    def asked_twice(self, name: str) -> State:
        """Return what SGLang says and holds, and note it if it says something else when it is asked once more."""
        assert self.server
        vocabulary = text_of(self.config)["vocab_size"]
        state = self.server.state(vocabulary)
        self.server.flush_cache()
        if (difference := apart(state.says, self.server.says(vocabulary))) is not None:
            self.note(f"{name}: asked twice it is apart", difference)
        self.server.flush_cache()
        return state

    def note(self, name: str, value: Any) -> None:
        """Keep a result, print it, and write what there is so far."""
        self.result[name] = value
        say(f"{name}: {value}")
        if self.rank == 0 and self.options.json:
            self.options.json.write_text(json.dumps(self.result) + "\n", encoding="utf-8")

    def step(self, seed: int) -> None:
        """Give the trainer the weights of a checkpoint, and give back the memory that this took: the engines have the
        same GPU."""
        change(self.source, seed)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def checkpoint(self, seed: int) -> Path:
        """Return the place of a checkpoint of the trainer's weights."""
        return self.options.folder / "trainer" / str(seed)

    def loaded(self, seed: int, name: str, expected: State | None = None) -> State | None:
        """Let the running SGLang load a checkpoint by its own loader; return what it says and holds then."""
        if self.server:
            self.server.load(self.checkpoint(seed))
        return self.check(name, expected)

    def load_both(self) -> None:
        """Note what SGLang says of checkpoint 0, with which it has started, and of 1, which it loads by its own
        loader."""
        first = self.check("started with checkpoint 0", None)
        second = self.loaded(1, "loaded checkpoint 1")
        self.loaded(0, "loaded checkpoint 0, as started with it", first)
        if first and second:
            self.expected = {0: first, 1: second}
            self._note_control()
        dist.barrier()

    def _note_control(self) -> None:
        """Note how far apart the answers with the two sets of weights are."""
        first, second = self.expected[0].says, self.expected[1].says
        self.note("control: the two checkpoints are apart", apart(first, second))

    def there_and_back(self) -> None:
        """Refit from each checkpoint's weights, and back; verified, and not. With `--times-only` all are verified,
        and what they leave is expected later."""
        began = time.perf_counter()
        link = self.connect(False)
        self.note("connect_seconds", time.perf_counter() - began)
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
        """Note whether an SGLang that starts with checkpoint 1 says and holds what a refit from it left."""
        if self.server:
            self.server.stop()
            self.server.start(self.checkpoint(1), "auto")
            self.server.wait(self.options.start_limit)
        dist.barrier()
        self.check("started with checkpoint 1, as refitted", self.refitted.get(1))

    def time_refits(self) -> None:
        """Note the milliseconds of refits, with the trainer's memory mapped each time, and kept."""
        for keep_mapped in (False, True):
            link = self.connect(keep_mapped)
            how = "keep_mapped" if keep_mapped else "mapped each time"
            self.note(f"SGLang, {how}", timed(lambda link=link: self.refit(link), self.options.rounds))
            if not keep_mapped:
                self.note("SGLang, verified", timed(lambda link=link: self.refit(link, True), 3))
            self.close(link)

    def time_slime(self) -> None:
        """Note the milliseconds of slime's way, of both sets of weights, and that it leaves the same."""
        from reshard.models.model import Model

        slime = SlimesWay(self, Model.from_hf(self.config))
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
        """Note what SGLang says asleep and awake, and what a refit leaves then."""
        link = self.connect(False)
        tags = {"tags": ["kv_cache", "weights"]}
        free = free_bytes()
        if self.server:
            self.server.call("release_memory_occupation", tags)
        dist.barrier()
        self.note("released_bytes", free_bytes() - free)
        self.note("refit while it sleeps", said_by(lambda: self.refit(link)))
        if self.server:
            self.server.call("resume_memory_occupation", tags)
            self.note(
                "asked before a refit", said_by(lambda: self.server.says(text_of(self.config)["vocab_size"]))
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

        def told(method: str, *arguments: Any, meanwhile: Callable[[], Any]) -> Any:
            if pipe:
                pipe.send(("collective_rpc", (method,), {"args": arguments}))
            done = meanwhile()
            answer = pipe.recv() if pipe else None
            if isinstance(answer, Exception):
                raise answer
            return done

        ready = vllm_said(pipe)
        if (ready := everyone(ready)[0]) != "ready":
            self.note("vLLM", f"did not start: {ready}")
            return
        for keep_mapped in (False, True):
            self.port += 1
            address, size = f"127.0.0.1:{self.port}", 2 * self.size
            members = lambda address=address, size=size: RefitGroup.join(address, self.rank, size, timeout=90)  # noqa: E731
            link = told(
                "reshard_connect", address, self.size, size,
                meanwhile=lambda keep=keep_mapped, members=members: connect(members(), self.source, keep_mapped=keep),
            )  # fmt: skip
            how = "keep_mapped" if keep_mapped else "mapped each time"
            refit = lambda link=link: told("reshard_refit", meanwhile=link.refit)  # noqa: E731
            self.note(f"vLLM, {how}", timed(refit, self.options.rounds))
            link.close()
            dist.barrier()


class SlimesWay:
    """Weights into SGLang as slime's ``UpdateWeightFromTensor`` sends them: every rank gathers whole tensors, and
    its bucket's handle goes to the engine's rank on its GPU."""

    def __init__(self, case: Case, model: Any) -> None:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        from benchmarks.refits.refit import Today

        if torch.cuda.is_available():
            monkey_patch_torch_reductions()
        else:  # the server is no child of this process
            torch.multiprocessing.set_sharing_strategy("file_system")
        self.case, self.bucket, self.held = case, [], 0
        self.today = Today(case.source, model, None)
        self.today.give = self._take

    def update(self) -> None:
        """Send all tensors."""
        self.today.run()
        self._send()
        if self.case.server:
            self.case.server.flush_cache()
        dist.barrier()

    def _take(self, whole: dict[str, torch.Tensor]) -> None:
        for name, tensor in whole.items():
            self.bucket.append((name, tensor))
            self.held += tensor.nbytes
            if self.held >= BUCKET:
                self._send()

    def _send(self) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if not self.bucket:
            return
        flat = FlattenedTensorBucket(named_tensors=self.bucket)
        data = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        handle = MultiprocessingSerializer.serialize(data, output_str=True)
        synchronize()
        handles: list = [None] * self.case.size
        dist.gather_object(handle, handles if self.case.rank == 0 else None)
        if self.case.server:
            body = {
                "serialized_named_tensors": handles,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            self.case.server.call("update_weights_from_tensor", body)
        dist.barrier()  # until then the engine reads it
        self.bucket, self.held = [], 0


@contextmanager
def without_sglang() -> Iterator[None]:
    """Let processes that are started within it find no SGLang, nor what lies beside it, such as its transformers."""
    path, variable = sys.path.copy(), os.environ.get("PYTHONPATH", "")
    sys.path[:] = [place for place in path if not Path(place, "sglang").is_dir()]
    kept = [place for place in variable.split(os.pathsep) if not Path(place, "sglang").is_dir()]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    try:
        yield
    finally:
        sys.path[:], os.environ["PYTHONPATH"] = path, variable


def vllm_said(pipe: Any) -> str:
    """Return what the process of a vLLM says first: "ready", or why it does not."""
    try:
        return str(pipe.recv()) if pipe and pipe.poll(120) else "nothing"
    except (EOFError, OSError) as error:
        return f"its process has ended ({error})"


def compared(state: State, expected: State) -> dict[str, Any]:
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


def said_by(action: Callable[[], Any]) -> str:
    """Return the sentence of any error that an action raises."""
    try:
        action()
    except Exception as error:
        return str(error)[:300]
    return "no error"


def timed(action: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds, fastest, median and slowest, of the slowest rank in each of `rounds`, after two that do not
    count: between call and return, and as reports have them."""
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


def wait_for(files: list[Path], limit: float = 120.0) -> None:
    """Wait until all of these exist, or for so many seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end and not all(file.exists() for file in files):
        time.sleep(0.5)
    missing = [str(file) for file in files if not file.exists()]
    say(f"waited; missing: {missing}")
    dist.barrier()


def steps_of(case: Case, options: argparse.Namespace, pipe: Any) -> dict[str, Callable[[], None]]:
    """Return what a case does, by name, in order."""
    steps: dict[str, Callable[[], None]] = {}
    if not options.times_only:
        steps["load"] = case.load_both
    steps["refit"] = case.there_and_back
    if options.after:
        steps["wait"] = lambda: wait_for(options.after)
    if options.rounds:
        steps["time"] = case.time_refits
    if options.vllm is not None:
        steps["vllm"] = lambda: case.time_vllm(pipe)
    if options.slime:
        steps["slime"] = case.time_slime
    if options.sleep:
        steps["sleep"] = case.sleep
    if options.restart:
        steps["restart"] = case.restart
    return steps


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_options(parser)
    parser.add_argument(
        "--config", type=json.loads, default={}, help="fields of the language model's config, as JSON"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="SGLang's ServerArgs, as JSON")
    parser.add_argument("--vllm", type=json.loads, help="vLLM's options, as JSON: time it too")
    parser.add_argument("--slime", action="store_true")
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--times-only", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--after", type=Path, nargs="*", default=[], help="files to wait for, at most two minutes, before "
                        "anything is timed: of other cases on these GPUs")  # fmt: skip
    parser.add_argument("--port", type=int, default=29700)
    parser.add_argument(
        "--start-limit", type=float, default=150.0, help="seconds that SGLang may take to start"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for configs, checkpoints and logs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.restart and options.times_only:
        parser.error("--restart needs checkpoints, which --times-only does not write")
    return options


def main() -> None:
    options, rank = parsed_options(), int(os.environ["RANK"])
    config = config_of(options.model, options.layers, options.config)
    server = pipe = None
    if rank == 0:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "config.json").write_text(json.dumps(served_config(config, options.fp8)))
        server = Server(options.folder, options.engine, options.port)
        if options.times_only:
            server.start(options.folder, "dummy")
        if options.vllm is not None:
            from benchmarks.refits.offload import start_engine

            gpus = ",".join(map(str, range(int(os.environ["WORLD_SIZE"]))))
            settings = OF_VLLM | {"tensor_parallel_size": int(os.environ["WORLD_SIZE"])} | options.vllm
            with without_sglang():
                _, pipe = start_engine(config, gpus, settings)
    start_processes()
    result = {"model": options.model, "config": {"layers": text_of(config)["num_hidden_layers"], **options.config}, "engine": options.engine,
              "gpus": dist.get_world_size()}  # fmt: skip
    case = None
    try:
        case = prepared(options, config, server, pipe)
        for name, step in steps_of(case, options, pipe).items():
            step()
            say(f"-- {name} is done")
    except Exception:
        text = traceback.format_exc()
        print(f"rank {rank}: {text}\n{server.tail() if server else ''}", flush=True)
        result["failed"] = text[-1500:]
    finally:
        if server:
            server.stop()
        with suppress(OSError):  # vLLM has ended
            if pipe:
                pipe.send(None)
    result |= case.result if case else {}
    if "failed" in result:  # the others may wait for this one: no barrier
        if rank == 0 and options.json:
            options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
        os._exit(1)
    conclude(result, options.json)


def prepared(options: argparse.Namespace, config: dict, server: Server | None, pipe: Any) -> Case:
    """Return a case whose checkpoints are written, if it has some, and whose engines have started."""
    from benchmarks.refits.refit import memory_rate
    from reshard import MegatronLayout

    layout = MegatronLayout(tp=options.tp, pp=options.pp, ep=options.ep, etp=options.etp)
    models = megatron_models(config, layout)
    if server:
        (options.folder / "trainer").mkdir(exist_ok=True)
        (options.folder / "trainer" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    case = Case(options, config, models, server)
    size = sum(p.numel() * p.element_size() for model in models for p in model.parameters())
    case.result |= {"megatron": str(layout), "trainer_bytes": everyone(size)}
    if torch.cuda.is_available():
        rate = min(everyone(memory_rate()))
        case.result |= {"gpu": torch.cuda.get_device_name(), "memory_bytes_per_second": rate}
        case.note("floor: a copy of a trainer's rank on its GPU, ms", 2e3 * size / rate)
    dist.barrier()
    for seed in () if options.times_only else (0, 1):
        case.step(seed)
        write_checkpoint(models, config, case.checkpoint(seed), options.fp8)
        if server and seed == 0:
            server.start(case.checkpoint(0), "auto")
    if server:
        case.result["start_seconds"] = server.wait(options.start_limit)
        say(f"SGLang started in {case.result['start_seconds']:.0f} s")
    if pipe:
        pipe.poll(120)  # nothing is timed while vLLM starts
    dist.barrier()
    return case


if __name__ == "__main__":
    main()
