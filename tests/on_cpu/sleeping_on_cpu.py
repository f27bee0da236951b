"""vLLM's own worker that forgets its weights: ``sleep`` and ``wake_up`` of its class for GPUs, with
an allocator that needs none."""

from functools import partial

import torch

from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.live import VllmModel
from reshard.refit import RefitGroup, connect
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu.refit_on_cpu import loaded
from tests.on_cpu.vllm_on_cpu import build, parallel_state, set_current_vllm_config
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint, trainer

GARBAGE = 0x7B


class Allocator:
    """What stands for ``CuMemAllocator``: the memory of a model, tagged ``weights``, that is
    garbage where nothing keeps it."""

    def __init__(self, *models: torch.nn.Module) -> None:
        tensors = [tensor for model in models for tensor in _tensors(model) if tensor.numel()]
        self.storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self.kept: dict[int, torch.Tensor] = {}

    def sleep(self, offload_tags: tuple[str, ...] = ()) -> None:
        if "weights" in offload_tags:
            self.kept = {at: _bytes(storage).clone() for at, storage in self.storages.items()}
        self.discard(("weights",))

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            for at, values in self.kept.items():
                _bytes(self.storages[at]).copy_(values)
            self.kept = {}

    def discard(self, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            for storage in self.storages.values():
                _bytes(storage).fill_(GARBAGE)

    def get_current_usage(self) -> int:
        return 0


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers, and tensors that modules have as plain attributes."""
    plain = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor)
    ]
    return [*model.parameters(), *model.buffers(), *plain]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def worker_of(module: torch.nn.Module, config, draft: torch.nn.Module | None = None):
    """vLLM's worker for GPUs with its model runner, as they are when both models are loaded; the
    allocator of both is `Allocator`."""
    from types import SimpleNamespace

    from vllm import device_allocator
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class Worker(gpu_worker.Worker):
        """With what 0.31 and 0.32 have beside these, where this version has not."""

        if not hasattr(gpu_worker.Worker, "discard"):

            def discard(self, tags: tuple[str, ...]) -> None:
                allocator.discard(tags)

        if not hasattr(gpu_worker.Worker, "reset_weights"):

            def reset_weights(self) -> None:
                for tensor in module.parameters():
                    tensor.data.zero_()

    allocator = Allocator(*(model for model in (module, draft) if model is not None))
    # There is no accelerator that could be waited for, or say how much memory it has.
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.get_memory_info = torch.cuda.mem_get_info = lambda *_: (1 << 30, 1 << 34)
    for owner in (device_allocator, gpu_worker):
        owner.get_mem_allocator_instance = lambda: allocator
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.model, runner.vllm_config, runner.load_config = module, config, config.load_config
    runner.model_config, runner.kv_caches = config.model_config, []
    runner.lora_config = config.lora_config
    runner.post_kv_cache_wake_up = lambda: None
    if draft is not None:
        runner.drafter = SimpleNamespace(model=draft)
    worker = Worker(config, 0, 0, "env://")
    worker.model_runner = runner
    return worker


LOSSES = {
    "sleep": lambda worker: worker.sleep(2),
    "discard": lambda worker: worker.discard(("weights", "kv_cache")),
    "reset_weights": lambda worker: worker.reset_weights(),
}


def after_losses(rank: int, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict) -> dict:
    """For each way in which a worker that has loaded the first checkpoint forgets its weights, and
    for a sleep that keeps them: what is said of a refit while they have no memory, and when only
    the cache has got it again; whether the engine is fit then; and the names of what is not, after
    a refit that nothing checks, as vLLM's own loader makes it of the second checkpoint, which the
    trainer has."""
    (hf, _), (other, mcore) = checkpoints
    chunks, _ = trainer(flags, mcore)
    expected, before = loaded(other, **engine), loaded(hf, **engine)
    results = {"alike": sum(before[name] == expected[name] for name in expected) / len(expected)}
    for name, lose in (LOSSES | {"level 1": lambda worker: worker.sleep(1)}).items():
        module, config = build(hf, **engine)
        worker = worker_of(module, config)
        link = connect(
            RefitGroup.of_process_group(timeout=180), MegatronModel(chunks), VllmModel.from_worker(worker)
        )
        lose(worker)
        outcome = [] if name == "reset_weights" else [caught(link.refit)]
        if name != "reset_weights":
            worker.wake_up(["kv_cache"])
            outcome.append(caught(link.refit))
            worker.wake_up(["weights"])
        fit = link.receiver.engine.ready
        link.refit(version=7)
        held = fingerprint(module)
        wrong = sorted(key for key in expected if held[key] != expected[key])
        results[name] = {
            "said": outcome,
            "fit": fit,
            "wrong": wrong,
            "version": link.version,
            "verified": caught(partial(link.refit, verify=True)),
        }
        link.close()
    return results


def drafter_of(module: torch.nn.Module, config) -> torch.nn.Module:
    """The drafter of an engine with MTP layers, loaded and bound to the model's embedding and
    output by vLLM's own proposer."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    proposer = EagleProposer.__new__(EagleProposer)
    proposer.vllm_config, proposer.speculative_config = config, config.speculative_config
    proposer.use_local_argmax_reduction = False
    with set_current_vllm_config(config):
        proposer.model = proposer._get_model()
    language_model = module.get_language_model() if hasattr(module, "get_language_model") else module
    proposer._maybe_share_embeddings(language_model)
    proposer._maybe_share_lm_head(language_model)
    return proposer.model


def with_drafter(hf: str, **engine) -> tuple:
    """A model with its drafter, and a worker that has both; their config."""
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    module, config = build(hf, speculative_config=speculative, **engine)
    draft = drafter_of(module, config) if parallel_state.get_pp_group().is_last_rank else None
    return worker_of(module, config, draft), module, draft, config


def of_both(module: torch.nn.Module, draft: torch.nn.Module | None) -> dict[str, tuple]:
    """The `fingerprint` of a model and its drafter."""
    drafts = fingerprint(draft) if draft is not None else {}
    return fingerprint(module) | {f"draft.{name}": bits for name, bits in drafts.items()}


def drafted(rank: int, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict) -> dict:
    """An engine with a drafter, both of which start with dummy weights, is refitted from a trainer
    that has the MTP layers: the names of what is not then as vLLM's own loader makes it of each
    checkpoint, in model and drafter; after it has slept at level 2; which of the drafter's
    parameters are its own; what is said of them; and what a verified refit says where one of them
    changes afterward."""
    chunks, load = trainer(flags, checkpoints[0][1])
    worker, module, draft, _ = with_drafter(checkpoints[0][0], load_format="dummy", **engine)
    destination = VllmModel.from_worker(worker)
    link = connect(RefitGroup.of_process_group(timeout=180), MegatronModel(chunks), destination)
    results: dict = {"wrong": [], "alike": []}
    held = [{}]
    for step, (hf, mcore) in enumerate(checkpoints):
        if step:
            load(mcore)
            worker.sleep(2)
            worker.wake_up(["weights"])
        link.refit(step)
        held.append(of_both(module, draft))
        _, *others, _ = with_drafter(hf, **engine)
        expected = of_both(*others)
        results["wrong"].append(sorted(name for name in expected if held[-1][name] != expected[name]))
    results["own"] = sorted(name for name in destination.tensors if name.startswith("draft."))
    results["same"] = [
        name for name in held[1] if name.startswith("draft.") and held[1][name] == held[2][name]
    ]
    results["accounts"] = [(one["what"], one["tensors"]) for one in link.describe()["tensors"]]
    update_derived = destination.update_derived

    def spoiled() -> None:
        update_derived()
        if draft is not None:
            norms = ("enorm.weight", "norm_embedding.weight")
            next(p for name, p in draft.named_parameters() if name.endswith(norms)).data[0] += 1

    destination.update_derived = spoiled
    results["spoiled"] = caught(partial(link.refit, verify=True))
    destination.update_derived = update_derived
    results["then"] = caught(partial(link.refit, verify=True))
    return results


def drafter_left_alone(rank: int, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict) -> dict:
    """A trainer without MTP layers, of the second checkpoint: what it says of an engine whose
    drafter has dummy weights; and of one that has loaded the first checkpoint the names of what is
    not, after a refit, and after another since it has slept at level 2, the model of the second
    with the drafter of the first; and what is said of the drafter."""
    (hf, _), (other, mcore) = checkpoints
    chunks, _ = trainer(flags, mcore)

    def meet(**options):
        worker, module, draft, _ = with_drafter(hf, **engine, **options)
        members = RefitGroup.of_process_group(timeout=180)
        return (
            worker,
            module,
            draft,
            lambda: connect(members, MegatronModel(chunks), VllmModel.from_worker(worker)),
        )

    results: dict = {"dummy": caught(meet(load_format="dummy")[3]), "wrong": []}
    worker, module, draft, join = meet()
    before = fingerprint(draft)
    link, expected = join(), loaded(other, **engine)
    own = {name for name, _ in draft.named_parameters() if f"draft.{name}" in link.receiver.engine.accounts}
    for _ in range(2):
        link.refit()
        held = fingerprint(module)
        wrong = [name for name in expected if held[name] != expected[name]]
        held = fingerprint(draft)
        results["wrong"].append([*wrong, *(f"draft.{name}" for name in own if held[name] != before[name])])
        worker.sleep(2)
        worker.wake_up(["weights"])
    results["own"] = len(own)
    results["left"] = [one for one in link.describe()["tensors"] if "drafter" in one["how"]]
    return results


def mtp_lost(rank: int, flags: list[str], checkpoint: tuple[str, str]) -> dict[str, object]:
    """Of a vLLM that sleeps before and after a trainer without MTP layers is connected: what is said then, and, once it
    has loaded its model again, but not its drafter, why it does not serve, and what of the drafter is not as loaded."""
    hf, mcore = checkpoint
    chunks, _ = trainer(flags, mcore)
    members = RefitGroup.of_process_group(timeout=180)
    results: dict[str, object] = {}
    for name in ("before", "after"):
        worker, module, draft, config = with_drafter(hf)
        runner = worker.model_runner
        runner.reset_mm_cache = runner.reset_encoder_cache = lambda: (
            None
        )  # which the stand-in for a runner lacks
        guard_of(module, config, just_loaded=True).watch(module, worker)
        loaded, links = fingerprint(draft), []

        def join(side: VllmModel, links: list = links) -> None:
            links.append(connect(members, MegatronModel(chunks), side))

        def sleep(worker=worker) -> None:
            worker.sleep(2)
            worker.wake_up(["weights"])

        if name == "before":
            sleep()
        side = VllmModel.from_worker(worker)
        said = [caught(partial(join, side))]
        if name == "after":
            sleep()
        worker.reload_weights()
        held = fingerprint(draft)
        wrong = [key for key, _ in draft.named_parameters() if held[key] != loaded[key]]
        results[name] = *said, side.guard.ready, side.guard.refusal, wrong
    return results
