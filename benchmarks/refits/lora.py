"""A LoRA adapter of a trainer into a vLLM in the same processes: a refit, compared with what trainers do
today, and with merging it and refitting all weights; all in one run.

    torchrun --nproc-per-node 1 -m benchmarks.refits.lora --trainer peft --model llama-3.1-8b --rank 16
        [--graphs] [--json FILE]
    torchrun --nproc-per-node 2 -m benchmarks.refits.lora --trainer mcore-bridge --model qwen3-30b-a3b --rank 16
        --tp 2 --ep 2 --etp 1

`peft` is a transformers model with PEFT's adapter, in several processes under FSDP2; `mcore-bridge` (with
ms-swift installed) a Megatron model with mcore-bridge's. Adapters are on all linear layers, experts too; vLLM
(`external_launcher`, with as many ranks as there are processes) holds the largest rank `--max-rank`.
Reported, medians of the slowest rank:

- refit: `link.refit()` of the adapter, in all and its parts, and with `verify=True`, which alone sees what somebody has
  written raw into the weights below (`overwritten`); with several processes also where
  mappings of the trainer's memory stay (`mapped`) and through slabs (`staged`);
- tensors: the adapter collected as the trainer does it (PEFT's state dict, or mcore-bridge's export), and handed over
  in a request for vLLM's `LoRAModel.from_lora_tensors`, on the GPU, or by the host as verl and ms-swift have it;
- files: the adapter saved to /dev/shm and loaded by vLLM;
- merge: the adapter added to the weights, and all of them refitted (`weights`: their refit alone).

Compared: all that vLLM holds of adapters, bit for bit, after a refit and after its own loading of the saved files,
and, so that a difference can show, of another step's; the logprobs of random prompts by vLLM with the adapter, by
vLLM with merged weights and by vLLM without it, each with the trainer's own; and, for what the two differ by without
an adapter, those of the base.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import conclude, device, everyone, say, start_processes, synchronize

HANDED_OVER, FROM_FILES = 71, 72  # ids of adapters
PROMPTS, TOKENS = 8, 128


def seconds(
    run: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the seconds of the slowest rank in each round; `before` is not counted."""
    times = []
    for _ in range(rounds):
        before()
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        synchronize()
        times.append(max(everyone(time.perf_counter() - start)))
    return times


def milliseconds(times: list[float]) -> dict[str, float]:
    """Return the fastest, the median and the slowest."""
    return {
        name: round(1e3 * of(times), 2)
        for name, of in (("fastest", min), ("median", statistics.median), ("slowest", max))
    }


class Handover:
    """Adapters that come to vLLM as tensors in a request, as verl and ms-swift bring theirs: vLLM's worker makes its
    model of an adapter of them where it would read files."""

    def __init__(self, llm: Any) -> None:
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest

        self.llm = llm
        self.request = LoRARequest("handed over", HANDED_OVER, "in memory")
        self.tensors: dict[str, torch.Tensor] = {}
        self.settings: dict[str, Any] = {}
        self.where = "cpu"
        loader = worker_of(llm).model_runner.lora_manager
        read_files = loader._load_adapter

        def load(request: Any) -> Any:
            if request.lora_int_id != HANDED_OVER:
                return read_files(request)
            mapper = getattr(loader._adapter_manager.model, "hf_to_vllm_mapper", None)
            return loader._lora_model_cls.from_lora_tensors(
                lora_model_id=HANDED_OVER, tensors=self.tensors, peft_helper=PEFTHelper.from_dict(self.settings),
                device=self.where, dtype=loader.lora_config.lora_dtype,
                weights_mapper=mapper.get_unstacked_mapper() if mapper is not None else None,
            )  # fmt: skip

        loader._load_adapter = load

    def sync(self, trainer: Any, where: str) -> None:
        """Collect a trainer's adapter and let vLLM serve it, by way of the host or not."""
        self.tensors, self.settings, self.where = trainer.collected(), trainer.settings, where
        self.llm.llm_engine.remove_lora(HANDED_OVER)
        self.llm.llm_engine.add_lora(self.request)
        self.tensors = {}


def worker_of(llm: Any) -> Any:
    """Return the worker of vLLM in this process."""
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker)


class Files:
    """Adapters that come to vLLM as files in memory."""

    def __init__(self, llm: Any) -> None:
        from vllm.lora.request import LoRARequest

        self.llm, shared = llm, Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
        self.folder = shared / f"lora-{os.environ.get('MASTER_PORT', '0')}"
        self.request = LoRARequest("files", FROM_FILES, str(self.folder))

    def sync(self, trainer: Any) -> None:
        """Save a trainer's adapter and let vLLM load it."""
        trainer.save(self.folder)
        self.llm.llm_engine.remove_lora(FROM_FILES)
        self.llm.llm_engine.add_lora(self.request)

    def remove(self) -> None:
        """Let vLLM forget the adapter, and delete the files."""
        self.llm.llm_engine.remove_lora(FROM_FILES)
        dist.barrier()
        shutil.rmtree(self.folder, ignore_errors=True)


def held_in(module: Any, identity: int) -> dict[str, int]:
    """Return what vLLM holds of the adapter with an id: a fingerprint of each of its tensors."""
    from benchmarks.refits.refit import fingerprint

    manager = module.lora_manager
    slot = manager.lora_index_to_id.index(identity)
    found = {}
    for name, layer in manager.modules.items():
        for key, tensors in vars(layer).items():
            if key.endswith("_stacked") and isinstance(tensors, tuple):
                found |= {f"{name}.{key}.{index}": fingerprint(t[slot]) for index, t in enumerate(tensors)}
    return found


def prompts_of(vocabulary: int) -> torch.Tensor:
    """Return random prompts ``[PROMPTS, TOKENS]``."""
    return torch.randint(0, vocabulary, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(5))


def logprobs_by(llm: Any, tokens: torch.Tensor, adapter: Any) -> list[list[float]]:
    """Return the logprobs of all tokens but the first of each prompt, by vLLM with an adapter, or without."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in tokens.tolist()],
        sampling,
        use_tqdm=False,
        lora_request=adapter,
    )
    return [
        [
            entry[token].logprob
            for token, entry in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True)
        ]
        for o in outputs
    ]


def distance(first: list[list[float]], second: list[list[float]]) -> dict[str, float]:
    """Return the mean and the largest difference of logprobs."""
    differences = (torch.tensor(first) - torch.tensor(second)).abs()
    return {"mean": float(differences.mean()), "largest": float(differences.max())}


class Run:
    """One trainer and one engine, connected, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        from benchmarks.models import config_of, vllm_engine
        from benchmarks.refits.lora_trainers import trainer_of
        from benchmarks.refits.serving import GRAPHS
        from reshard import MegatronLayout
        from reshard.engines.vllm.live import VllmModel

        self.options, self.config = options, config_of(options.model, options.layers)
        folder = Path(tempfile.gettempdir()) / f"{options.model}-lora-{dist.get_rank()}"
        start = time.perf_counter()
        extra: dict[str, Any] = GRAPHS if options.graphs else {}
        self.llm = vllm_engine(
            folder, self.config, tensor_parallel_size=dist.get_world_size(), enable_lora=True, max_loras=options.slots,
            max_lora_rank=options.max_rank or options.rank, enable_prefix_caching=False, **extra,
        )  # fmt: skip
        say(f"vLLM started in {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        layout = MegatronLayout(tp=options.tp, pp=options.pp, ep=options.ep, etp=options.etp)
        self.trainer = trainer_of(options.trainer, folder, options.rank, layout)
        self.trainer.step(0)
        say(f"trainer built in {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        self.engine = VllmModel.from_llm(self.llm)
        self.link = self.connected()
        self.result: dict[str, Any] = {
            "model": options.model,
            "layers": self.config["num_hidden_layers"],
            "trainer": options.trainer,
            "rank": options.rank,
            "connect_seconds": round(max(everyone(time.perf_counter() - start)), 2),
            "device": torch.cuda.get_device_name() if device() == "cuda" else "cpu",
            "processes": dist.get_world_size(),
        }
        say(f"connected: {self.result}")
        start = time.perf_counter()
        self.link.refit(verify=True)
        self.result["first_refit_seconds"] = round(max(everyone(time.perf_counter() - start)), 2)
        say(f"refitted: {self.result}")

    def connected(self, **options: Any) -> Any:
        """Return a link of the trainer's adapter."""
        from reshard.refit import RefitGroup, connect

        group = RefitGroup.of_process_group()
        return connect(group, self.trainer.source(), self.engine, adapter="policy", **options)

    @property
    def policy(self) -> Any:
        """The request for the adapter that was refitted."""
        return self.engine.adapter("policy").request()

    def bits(self) -> None:
        """Compare what vLLM holds after a refit and after its own loading of the files."""
        files = Files(self.llm)
        self.trainer.step(1)
        self.link.refit()
        refitted = held_in(self.engine.module, self.policy.lora_int_id)
        files.sync(self.trainer)
        loaded = held_in(self.engine.module, FROM_FILES)
        different = [name for name in loaded if refitted[name] != loaded[name]]
        self.trainer.step(2)
        self.link.refit()
        other = held_in(self.engine.module, self.policy.lora_int_id)
        files.remove()
        self.result["bits"] = {
            "tensors": sum(everyone(len(loaded))), "different": sum(everyone(len(different))), "named": different[:3],
            "of_another_step": sum(everyone(sum(other[name] != bits for name, bits in loaded.items()))),
        }  # fmt: skip

    def refits(self) -> None:
        """Time refits of the adapter."""
        self.time_refits("refit")
        self.result["call_ms"] = milliseconds(seconds(self.link.refit, self.options.rounds))
        self.result["verified_ms"] = milliseconds(seconds(lambda: self.link.refit(verify=True), 3))

    def overwritten(self) -> None:
        """Write raw into the engine's weights, and see which refits of the adapter bring back what was there."""
        weight = next(
            one for name, one in self.engine.module.named_parameters() if name.endswith("norm.weight")
        )
        kept, sent = weight.clone(), self.link.below.link.refits
        weight.data.mul_(2)
        outcomes = []
        for verify in (False, True, True):
            self.link.refit(verify=verify)
            outcomes.append([torch.equal(weight, kept), self.link.below.link.refits - sent])
        self.result["overwritten"] = outcomes

    def mapped(self) -> None:
        """Time refits where mappings of the trainer's memory stay."""
        self.by_another_link("mapped", keep_mapped=True)

    def staged(self) -> None:
        """Time refits where all passes through slabs."""
        self.by_another_link("staged", backend="staged")

    def by_another_link(self, name: str, **options: Any) -> None:
        """Time refits by a link with other options, which is the one that is there then."""
        if dist.get_world_size() > 1:
            self.link.close()
            self.link = self.connected(**options)
            self.link.refit(verify=True)
            self.time_refits(name)

    def time_refits(self, name: str) -> None:
        """Time refits of the adapter by the link that there is."""
        from benchmarks.refits.lora_trainers import change

        for _ in range(3):
            self.link.refit()
        reports = []
        for _ in range(self.options.rounds):
            change(self.trainer.model)
            synchronize()
            dist.barrier()
            reports.append(self.link.refit())
        for part in ("wait_seconds", "transfer_seconds", "total_seconds"):
            times = everyone([getattr(report, part) for report in reports])
            slowest = [max(column) for column in zip(*times, strict=True)]
            self.result[f"{name}_{part.replace('seconds', 'ms')}"] = milliseconds(slowest)
        self.result[f"{name}_bytes"] = everyone(dict(reports[-1].received_bytes))
        self.result[f"{name}_launches"] = reports[-1].launches

    def rivals(self) -> None:
        """Time what trainers do today."""
        handover, files = Handover(self.llm), Files(self.llm)
        rounds = self.options.rival_rounds
        for name, where in (("by_host", "cpu"), ("on_gpu", device())):
            times = seconds(lambda where=where: handover.sync(self.trainer, where), rounds)
            self.result[f"tensors_{name}_ms"] = milliseconds(times)
        self.llm.llm_engine.remove_lora(HANDED_OVER)
        self.result["collected_ms"] = milliseconds(seconds(self.trainer.collected, rounds))
        self.result["files_ms"] = milliseconds(seconds(lambda: files.sync(self.trainer), rounds))
        files.remove()

    def weights(self) -> None:
        """Time refits of all weights below the adapter."""
        times = seconds(lambda: self.link.below.link.refit(), self.options.rounds)
        self.result["weights_ms"] = milliseconds(times[1:])

    def logprobs(self) -> None:
        """Compare logprobs of the trainer and of vLLM with the adapter; then merge it, refit all weights, and
        compare those of vLLM without it. The trainer's weights are the merged ones from then on."""
        if device() == "cpu":
            return  # whose build of vLLM has no logprobs of prompts with adapters
        tokens = prompts_of(self.config["vocab_size"])
        self.trainer.step(1)
        self.link.refit()
        own = self.trainer.logprobs(tokens)
        self.result["native"] = distance(own, logprobs_by(self.llm, tokens, self.policy))
        without = logprobs_by(self.llm, tokens, None)
        self.result["without"] = distance(own, without)
        with self.trainer.model.disable_adapter():
            self.result["base"] = distance(self.trainer.logprobs(tokens), without)
        self.result["merge_ms"] = milliseconds(seconds(self.trainer.merge, 1))
        self.link.below.link.refit()
        self.result["merged"] = distance(own, logprobs_by(self.llm, tokens, None))


def main() -> None:
    from benchmarks.models import model_options

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_options(parser)
    parser.add_argument("--trainer", choices=["peft", "mcore-bridge"], required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-rank", type=int, help="the largest rank that vLLM holds, if it is not --rank")
    parser.add_argument("--slots", type=int, default=3, help="vLLM's max_loras")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs of vLLM")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rival-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start_processes()
    run = Run(options)
    for part in (
        run.bits,
        run.refits,
        run.overwritten,
        run.weights,
        run.mapped,
        run.logprobs,
        run.rivals,
        run.staged,
    ):
        try:
            start = time.perf_counter()
            part()
            say(f"{part.__name__}: {time.perf_counter() - start:.1f} s; {run.result}")
        except Exception:
            run.result.setdefault("failed", []).append(part.__name__)
            traceback.print_exc()
        if options.json and dist.get_rank() == 0:  # what there is, should the next part not end
            options.json.write_text(json.dumps(run.result) + "\n", encoding="utf-8")
    conclude(run.result, options.json)


if __name__ == "__main__":
    main()
