"""A real vLLM on the CPU that drafts tokens by an EAGLE-3 head, refitted from a model and a drafter under FSDP2, or in
processes of its own that follow a chain of deltas of both."""

import os
import zlib
from functools import partial

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard.engines.vllm.worker import RefitExtension
from tests.on_cpu.engine_on_cpu import PROMPTS, SMALL_BATCHES, engine, forget, keep_imports_frozen
from tests.starting.ranks import caught
from tests.tools import vllm_models
from tests.tools.drafters import load_drafter

DRAFTS = 2  # tokens that are drafted in a step


def with_drafter(hf: str, drafter: str, **options):
    """An engine that drafts by a published drafter."""
    from reshard.engines.vllm.compat import plain_weights

    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": DRAFTS}
    with plain_weights():
        return engine(hf, dtype="bfloat16", speculative_config=speculative, **options)


def said(llm) -> dict:
    """The greedy tokens of every prompt; what was drafted, step by step; and the drafter's bits, if there is one."""
    from vllm import SamplingParams

    from reshard.engines.vllm.compat import driver_worker

    proposer = getattr(driver_worker(llm).model_runner, "drafter", None)
    drafts: list = []
    if proposer is not None:
        plain = type(proposer).propose.__get__(proposer)

        def propose(*args, **kwargs):
            drafted = plain(*args, **kwargs)
            drafts.append(drafted.tolist())
            return drafted

        proposer.propose = propose
    tokens = []
    llm.reset_prefix_cache()
    for prompt in PROMPTS:
        sampling = SamplingParams(max_tokens=24, temperature=0, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
    held = {} if proposer is None else dict(proposer.model.named_parameters())
    bits = {name: zlib.crc32(one.detach().view(torch.uint8).numpy().tobytes()) for name, one in held.items()}
    return {"tokens": tokens, "drafts": drafts, "bits": bits}


def on_mesh(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters sharded over all ranks, as a trainer has them."""
    if dist.get_world_size() > 1:
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def policy_of(hf: str) -> torch.nn.Module:
    return on_mesh(transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16))


def refitted(pairs: list, options: dict) -> dict:
    """What an engine says that has loaded the first of two pairs of a model's and a drafter's directories; after refits
    from trainers with the first, with the second, and with the second model and the first drafter; what ones say that
    have loaded the second pair, and the second model alone; and what a refit does to the tensors."""
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.refit import RefitGroup, connect
    from reshard.refit.reporting.served_parts import digest_parts
    from reshard.trainers import FsdpModel, WithDrafter

    keep_imports_frozen()
    (hf, drafter), (other, second) = pairs
    llm = with_drafter(hf, drafter, **options)
    results: dict = {"before": said(llm), "digests": [], "refitted": []}
    destination = VllmModel.from_llm(llm)
    for version, (policy, draft) in enumerate(((hf, drafter), (other, second), (other, drafter))):
        source = WithDrafter(FsdpModel(policy_of(policy)), on_mesh(load_drafter(draft, hf)))
        link = connect(RefitGroup.of_process_group(), source, destination)
        digest = link.refit(version, verify=True).digest
        results["digests"].append([digest, digest_parts(destination)["drafter"]])
        results["refitted"].append(said(llm))
        results["described"] = link.describe()["tensors"]
        link.close()
    results["version"] = destination.version
    del llm, destination, link, source
    forget()
    results["loaded"] = said(llm := with_drafter(other, second, **options))
    del llm
    forget()
    with plain_weights():
        llm = engine(other, dtype="bfloat16", **options)
    results["alone"] = said(llm)["tokens"]
    return results


class Extension(RefitExtension):
    """A worker that says which bits its model and its drafter have."""

    def bits_of_both(self) -> dict[str, int]:
        """Return a checksum of each parameter, by name."""
        runner = self.model_runner
        named = {**dict(runner.model.named_parameters())}
        named |= {f"draft.{name}": one for name, one in runner.drafter.model.named_parameters()}
        return {
            name: zlib.crc32(one.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            for name, one in named.items()
        }


def apart(hf: str, drafter: str):
    """A vLLM with its workers in processes of their own, that drafts by a published drafter."""
    from vllm import LLM

    vllm_models.register()
    return LLM(
        hf,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        **SMALL_BATCHES,
        seed=0,
        dtype="bfloat16",
        kv_cache_memory_bytes=1 << 24,
        disable_log_stats=True,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": DRAFTS},
        worker_extension_cls="tests.on_cpu.drafters_on_cpu.Extension",
    )


def state(llm) -> dict:
    """The greedy tokens of every prompt, with what is in the prefix cache, and the bits of model and drafter."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=24, temperature=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    [bits] = llm.collective_rpc("bits_of_both")
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "bits": bits}


def followed(base: list[str], chains: dict[str, str], versions: int, saved: list[list[str]]) -> dict:
    """What an engine in a process of its own says that has loaded the base, a model's and a drafter's directory, and
    follows a chain version by version; of a spoiled one, and of one of another drafter, before the last version; after
    the way back from that, and forward again; and what ones say that have loaded what was saved of each version."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.pop(name, None)
    results = _followed(apart(*base), chains, versions)
    return results | {"loaded": [state(apart(*pair)) for pair in saved]}


def _followed(llm, chains: dict[str, str], versions: int) -> dict:
    from reshard.delta import apply_deltas, roll_back

    def now() -> list:
        return [llm.collective_rpc("reshard_version"), state(llm)]

    results: dict = {"base": state(llm), "versions": []}
    for version in range(1, versions):
        results["versions"].append([apply_deltas(llm, chains["chain"], version, verify=True), *now()])
    for case in ("spoiled", "other"):
        results[case] = caught(partial(apply_deltas, llm, chains[case])), now()
    results["versions"].append([apply_deltas(llm, chains["chain"], verify=True), *now()])
    results["back"] = [roll_back(llm), *now()]
    results["forward"] = [apply_deltas(llm, chains["chain"]), *now()]
    return results
