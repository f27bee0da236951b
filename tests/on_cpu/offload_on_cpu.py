"""Offload on the CPU: real Megatron models under DDP and the distributed optimizer, which train,
refit and train again."""

import hashlib
import time

import torch
from safetensors.torch import load_file

import reshard
from reshard.device import staging
from reshard.live import offload as offloading
from reshard.refit import RefitGroup, connect
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu import megatron_on_cpu, vllm_on_cpu
from tests.on_cpu.live_megatron_on_cpu import chunks
from tests.on_cpu.optimizer_on_cpu import training_step
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint


class Training:
    """A model under Megatron's DDP with its distributed optimizer, and what each step does to them."""

    def __init__(self, flags: list[str], directory: str, **ddp) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        torch.cuda.current_stream = lambda *_: None  # asked for before gradients are reduced
        self.models, self.wrapped, args = chunks(flags, ddp=True, **ddp)
        megatron_on_cpu.load(self.models, args, directory)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            use_distributed_optimizer=True,
            clip_grad=0.0,
            overlap_param_gather=bool(ddp.get("overlap_param_gather")),
        )
        plain_type = torch.Tensor.type  # it takes parameters on a GPU only
        torch.Tensor.type = lambda self, *a, **k: (
            plain_type(self, *a, **k) if a else plain_type(self).replace("torch.", "torch.cuda.")
        )
        self.optimizer = get_megatron_optimizer(config, self.wrapped)
        torch.Tensor.type = plain_type

    def step(self, number: int) -> float:
        """Forward, backward and an update, on tokens of this rank and step."""
        torch.manual_seed(100 * number + torch.distributed.get_rank())
        return training_step(self.wrapped, self.optimizer, vocabulary=100)

    def bits(self) -> dict[str, list[bytes]]:
        """All that it holds, by kind; every tensor, not every storage."""
        found: dict[str, list[bytes]] = {}
        for kind, tensor in offloading._tensors(self.wrapped, self.optimizer):
            flat = (
                tensor.detach().clone().reshape(-1).view(torch.uint8)
            )  # a storage that numpy has seen stays as large as it is
            found.setdefault(kind, []).append(flat.numpy().tobytes())
        return found

    def sizes(self) -> dict[str, int]:
        """Bytes of all distinct storages, by kind."""
        found, seen = {"params": 0, "grads": 0, "optimizer": 0}, set()
        for kind, tensor in offloading._tensors(self.wrapped, self.optimizer):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found[kind] += storage.nbytes()
        return found


def steps(rank: int, flags: list[str], directory: str, config: str, move: bool) -> dict:
    """With little pieces of host memory, three training steps, after each of which the training is
    moved away and back, in parts too, or not; digests of all that it holds before and after, and
    what is freed."""
    staging.BLOCK_BYTES = 1 << 12
    training = Training(flags, directory)
    model, optimizer = training.wrapped, training.optimizer
    said: dict = {"losses": [], "before": [], "after": [], "sizes": [training.sizes()]}
    for number in range(3):
        said["losses"].append(training.step(number))
        said["before"].append(digest(training.bits()))
        if move and number == 0:
            said["freed"], said["again"] = (
                reshard.offload(model, optimizer),
                reshard.offload(model, optimizer),
            )
            said["sizes"].append(training.sizes())
            taken = [torch.full((4096,), -77.0) for _ in range(200)]  # somebody else has the memory now
            said["back"] = reshard.onload(model)
            del taken
        elif move:
            reshard.offload(model, optimizer, params=False)
            said["sizes"].append(training.sizes())
            reshard.offload(model, optimizer)
            reshard.onload(model, grads=False, states=False)
            said["sizes"].append(training.sizes())
            reshard.onload(model)
        said["after"].append(digest(training.bits()))
    if move:
        before = training.bits()
        reshard.offload(model, optimizer, grads="drop")
        reshard.onload(model)
        now = training.bits()
        said["dropped"] = [now[kind] == before[kind] for kind in ("params", "optimizer", "grads")]
        said["dropped"].append({byte for one in now["grads"] for byte in one})
        # The control: a byte that is lost in host memory is seen.
        reshard.offload(model, optimizer)
        kept = offloading._offloaded[training.models[0]]
        [*_, last] = kept.away["optimizer"]
        last.host[0][0] ^= 1
        pieces = [
            piece
            for one in kept.memory.values()
            for piece in (*one.blocks, one.reserved)
            if piece is not None
        ]
        said["host"] = sum(piece.numel() for piece in pieces)
        reshard.onload(model)
        said["with a lost byte"] = training.bits()["optimizer"] == before["optimizer"]
        foreign = torch.nn.Linear(2, 2).requires_grad_(False).apply(_from_file)
        said["refused"] = [
            caught(lambda: reshard.offload([], None)),
            caught(lambda: reshard.offload(MegatronModel(model))),
            caught(lambda: reshard.offload(model, "adam")),
            caught(lambda: reshard.offload(model, optimizer, grads="dorp")),
            caught(lambda: reshard.offload(foreign)),
        ]
        said |= uses_of_what_is_away(training, config)
    return said


def uses_of_what_is_away(training: Training, hf: str) -> dict:
    """What is said by all that needs what was offloaded; what a load leaves in the main parameters
    after that, and whether they were away."""
    model, optimizer = training.wrapped, training.optimizer
    reshard.offload(model, optimizer)
    uses = [
        lambda: reshard.save(model, f"{hf}-never", hf),
        lambda: list(reshard.export(model, hf)),
        lambda: reshard.load(model, hf),
        lambda: MegatronModel(model),
    ]
    away = [caught(use) for use in uses]
    assert reshard.onload(training.models, grads=False, states=False), "by the model in its wrappers"
    away.append(caught(lambda: reshard.load(model, hf, optimizer=optimizer)))
    reshard.onload(model)
    reshard.load(model, hf, optimizer=optimizer)
    reshard.export(model, hf)
    again = reshard.offload(model, optimizer)  # though the load has written there by numpy
    reshard.onload(model)
    [inner] = offloading._torch_optimizers(optimizer)
    main = inner.param_groups[0]["params"][0]
    inner.state[main]["master_param"] = main  # as Transformer Engine's keeps it
    away.append(caught(lambda: reshard.load(model, hf, optimizer=optimizer)))
    return {"away": away, "again after a load": again}


def digest(found: dict[str, list[bytes]]) -> dict[str, str]:
    """One for all tensors of a kind."""
    return {kind: hashlib.sha256(b"".join(some)).hexdigest() for kind, some in found.items()}


def _from_file(module: torch.nn.Linear) -> None:
    import numpy

    module.weight.data = torch.from_numpy(numpy.zeros((2, 2), numpy.float32))


def refits(rank: int, flags: list[str], checkpoint: tuple[str, str]) -> dict:
    """A trainer that is away, and elsewhere, between two refits of a vLLM in the same process."""
    training = Training(flags, checkpoint[1])
    module, config = vllm_on_cpu.build(checkpoint[0], load_format="dummy")
    from reshard.engines.vllm.live import VllmModel

    link = connect(
        RefitGroup.of_process_group(timeout=180), MegatronModel(training.wrapped), VllmModel(module, config)
    )
    said: dict = {"held": []}
    for number in range(2):
        training.step(number)
        before = link.sender.source.addresses()
        storages = [p.untyped_storage() for chunk in training.wrapped for p in chunk.parameters()]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}.values()
        reshard.offload(training.wrapped, training.optimizer)
        said.setdefault("from host", []).append(from_host(link, module, training))
        # Somebody else takes the places, so that it comes back to others.
        taken = [torch.full((size,), 77, dtype=torch.uint8) for size in sizes for _ in range(4)]
        reshard.onload(training.wrapped, grads=False, states=False)
        said["moved"] = link.sender.source.addresses() != before
        link.refit(verify=True)
        reshard.offload(training.wrapped, training.optimizer)
        said["held"].append(fingerprint(module))
        reshard.onload(training.wrapped)
        del taken
    # By another way: published tensors, through vLLM's own loader.
    other, _ = vllm_on_cpu.build(checkpoint[0], load_format="dummy")
    other.load_weights(
        (name, tensor.clone()) for name, tensor in reshard.export(training.wrapped, checkpoint[0])
    )
    said["expected"] = fingerprint(other)
    return said


def from_host(link, module: torch.nn.Module, training: Training) -> dict:
    """What an engine holds after a refit from a trainer that is away, and what the trainer has then; what is
    said where the host's copy of one parameter is lost; and whether a byte of a copy counts."""
    source = link.sender.source
    storages = {p.untyped_storage() for chunk in training.wrapped for p in chunk.parameters()}
    link.refit(verify=True)
    said = {"held": fingerprint(module), "readable": source.is_readable_from_host()}
    said["bytes"] = sum(storage.nbytes() for storage in storages)
    [kept] = [kept for kept in offloading._offloaded.values() if kept.away["params"]]
    away = max(kept.away["params"], key=lambda one: one.size)
    away.host[0][100] ^= 1
    link.refit(verify=True)
    said["with another byte"] = fingerprint(module)
    away.host[0][100] ^= 1
    host, away.host = away.host, [away.host[0][:1000]]
    said["lost"], said["unreadable"] = caught(link.refit), source.is_readable_from_host()
    # The trainer has its copy elsewhere now, and something else where it was.
    away.host = [part.clone() for part in host]
    for part in host:
        part.fill_(77)
    link.refit(verify=True)
    said["held where the copy is now"] = fingerprint(module)
    said["not pinned"] = caught(lambda: source.check_memory(torch.device("cuda", 0)))
    reshard.onload(training.wrapped, grads=False, states=False)
    # As verl and ms-swift do it.
    buffers = [b for chunk in training.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for buffer in buffers:
        buffer.param_data.cpu_data = buffer.param_data.clone()
        buffer.param_data.storage().resize_(0)
    said["readable beside buffers"] = source.is_readable_from_host()
    link.refit(verify=True)
    said["held beside buffers"] = fingerprint(module)
    for buffer in buffers:
        buffer.param_data.storage().resize_(buffer.param_data.cpu_data.numel())
        buffer.param_data.copy_(buffer.param_data.cpu_data)
        del buffer.param_data.cpu_data
    reshard.offload(training.wrapped, training.optimizer)
    return said


def put_off(rank: int, flags: list[str], checkpoint: tuple[str, str], folder: str) -> dict:
    """A training whose parameters are gathered when they are next needed
    (``overlap_param_gather``): after each of three steps what this rank holds; what an export, a
    save and a refit of a vLLM at TP2 have of that; what it holds once all is gathered, and what
    that would be. Then what is said of a refit of which one rank has another idea, after how many
    seconds, and of chunks without their DDP, and whether one in a wrapper is known."""
    from reshard.engines.vllm.live import VllmModel

    hf = checkpoint[0]
    training = Training(flags, checkpoint[1], overlap_param_gather=True, overlap_grad_reduce=True)
    [model] = training.wrapped
    module, config = vllm_on_cpu.build(hf, load_format="dummy", tp=2)
    source = MegatronModel(training.wrapped)
    link = connect(RefitGroup.of_process_group(timeout=180), source, VllmModel(module, config))
    published = lambda: {name: tensor.clone() for name, tensor in reshard.export(training.wrapped, hf)}  # noqa: E731
    said: dict = {"held": [], "gathered": [], "found": [], "expected": []}
    for number, way in enumerate(("export", "save", "refit")):
        training.step(number)
        said["held"].append(fingerprint(training.models[0]))
        if way == "export":
            found = published()
        elif way == "save":
            reshard.save(training.wrapped, folder, hf, format="hf")
            found = load_file(f"{folder}/model.safetensors")
        else:
            link.refit(verify=True)
            found = fingerprint(module)
        with torch.no_grad():
            model.start_param_sync(force_sync=True)
        said["gathered"].append(fingerprint(training.models[0]))
        expected = published()
        if way == "refit":
            other, _ = vllm_on_cpu.build(hf, load_format="dummy", tp=2)
            other.load_weights(expected.items())
            said["found"].append(found)
            said["expected"].append(fingerprint(other))
        else:
            said["found"].append({name: bits_of(tensor) for name, tensor in found.items()})
            said["expected"].append({name: bits_of(tensor) for name, tensor in expected.items()})
    began = time.monotonic()
    said["one is wrong"] = caught(lambda: link.refit(version="x" if rank else None)), time.monotonic() - began
    said["bare"] = caught(lambda: MegatronModel(training.models))
    outer = torch.nn.Module()
    outer.module = model
    said["wrapped"] = MegatronModel([outer]).gathering == [model]
    return said


def bits_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
