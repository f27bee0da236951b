"""A real SGLang that serves on the CPU, in processes of its own, and is refitted from a real Megatron
model through its plugin and ``Engine.collective_rpc``.

Without its kernels SGLang runs dense models by torch alone.
"""

import os
import time
from pathlib import Path

import torch

from reshard.engines.sglang.calls import call
from reshard.parity import LiveSglang, parity
from reshard.refit import RefitGroup, connect
from reshard.trainers.megatron import MegatronModel
from tests.ranks import caught
from tests.refit_sides import Steps, trainer
from tests.sglang_on_cpu import only_our_models

PROMPTS = [[(7 * i + 3 * j) % 1000 for j in range(n)] for i, n in enumerate((9, 33, 21))]


def engine(directory: str, **options):
    """SGLang on the CPU; its scheduler is another process."""
    import sglang

    only_our_models()
    return sglang.Engine(
        model_path=directory, device="cpu", dtype="float32", attention_backend="torch_native", sampling_backend="pytorch",
        grammar_backend="none", skip_tokenizer_init=True, disable_cuda_graph=True,
        max_total_tokens=1024, context_length=128, log_level="error", **options,
    )  # fmt: skip


def answers(served) -> list:
    """Prompt logprobs and four greedy tokens of every prompt."""
    sampling = {"max_new_tokens": 4, "temperature": 0}
    outputs = served.generate(
        input_ids=PROMPTS, sampling_params=sampling, return_logprob=True, logprob_start_len=0
    )
    return [
        [[one[0] for one in output["meta_info"]["input_token_logprobs"][1:]], list(output["output_ids"])]
        for output in outputs
    ]


def settle(served) -> None:
    """Wait until SGLang has no trace of requests that it has answered: what it then would be asked to do
    with its memory or weights would end it."""
    while not served.flush_cache().success:
        time.sleep(0.1)


def said_by(action) -> str:
    """The sentence of any error that an action raises."""
    try:
        action()
    except Exception as error:
        return str(getattr(error, "detail", "") or error)
    return "no error"


def serve(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]]):
    """Rank 0 is the trainer; rank 1 drives the engine, whose scheduler is member 1."""
    steps = Steps(sides, rank, 2)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sides['folder']}/side{rank}", rank=0, world_size=1
    )
    return train(steps, sides, flags, checkpoints) if rank == 0 else drive(steps, sides, checkpoints)


def train(steps: Steps, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]]) -> list[str]:
    """Refit from each checkpoint, then while the engine has a request and while it sleeps, and once
    more."""
    chunks, load = trainer(flags, checkpoints[0][1], wide=True)
    steps.meet("started")
    members = RefitGroup.join(f"127.0.0.1:{sides['port']}", 0, 2, timeout=60)
    link = connect(members, MegatronModel(chunks))
    said = []
    for step, (_, mcore) in enumerate(checkpoints):
        if step:
            load(mcore)
        steps.meet(f"before {step}")
        link.refit(step, verify=True)
    for state in ("busy", "asleep"):
        steps.meet(state)
        said.append(caught(link.refit))
    steps.meet("awake")
    link.refit(9)
    steps.meet("end")
    return said


def drive(steps: Steps, sides: dict, checkpoints: list[tuple[str, str]]) -> dict:
    """What an engine that starts with dummy weights answers in each state, and what one answers that has
    loaded each checkpoint."""
    shared = set(Path("/dev/shm").glob("sglang_*"))
    results: dict = {"served": []}
    dummy = engine(checkpoints[0][0], load_format="dummy")
    results["before"] = answers(dummy)
    steps.meet("started")
    address = f"127.0.0.1:{sides['port']}"
    results["unconnected"] = said_by(lambda: call(dummy, "reshard_refit", version=0))
    call(dummy, "reshard_connect", address=address, first_rank=1, size=2, timeout=60.0)
    results["unfit"] = said_by(lambda: answers(dummy))
    for step in range(len(checkpoints)):
        steps.meet(f"before {step}")
        call(dummy, "reshard_refit", version=step, verify=True)
        results["served"].append(answers(dummy))
    results["version"] = said_by(lambda: call(dummy, "reshard_check_version", version=1))
    results["other version"] = said_by(lambda: call(dummy, "reshard_check_version", version=7))
    sampling = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    stream = dummy.generate(input_ids=PROMPTS[0], sampling_params=sampling, stream=True)
    next(stream)  # the request runs
    steps.meet("busy")
    results["busy"] = said_by(lambda: call(dummy, "reshard_refit", version=7))
    results["goes on"] = [len(part["output_ids"]) for part in stream][-1], answers(dummy)
    settle(dummy)
    dummy.release_memory_occupation(tags=["kv_cache", "weights"])
    steps.meet("asleep")
    results["asleep"] = said_by(lambda: call(dummy, "reshard_refit", version=8))
    dummy.resume_memory_occupation(tags=["kv_cache", "weights"])
    results["woken"] = said_by(lambda: answers(dummy))
    steps.meet("awake")
    call(dummy, "reshard_refit", version=9)
    results["mended"] = answers(dummy)
    steps.meet("end")
    dummy.shutdown()
    os.environ["SGLANG_PLUGINS"] = "another"
    loading = engine(checkpoints[0][0])  # an SGLang that has nothing of ours
    results["no plugin"] = said_by(
        lambda: call(loading, "reshard_connect", address=address, first_rank=1, size=2)
    )
    results["loaded"] = [answers(loading)]
    for hf, _ in checkpoints[1:]:
        settle(loading)
        loading.update_weights_from_disk(hf)
        results["loaded"].append(answers(loading))
    results["parity"] = [parity(LiveSglang(loading), hf, PROMPTS).ok for hf, _ in checkpoints]
    loading.shutdown()
    for left in set(Path("/dev/shm").glob("sglang_*")) - shared:  # by SGLang, when it ends
        left.unlink(missing_ok=True)
    return results
