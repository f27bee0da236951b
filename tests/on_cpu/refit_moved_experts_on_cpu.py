"""vLLM's own balancing of experts (EPLB) on the CPU: its real model classes with redundant experts, its own
``EplbState`` with its policy, its Gloo communicator and its thread, over several processes.

vLLM starts EPLB on GPUs alone. What is ours here is that the platform says it is one while a config is made, and
streams and events that order nothing: on a CPU each copy has ended when its call returns.
"""

import contextlib
import time
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.eplb import eplb_state, rebalance_execute
from vllm.engine.arg_utils import EngineArgs

from reshard.engines.vllm.live import VllmModel
from reshard.refit import connect
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu import vllm_on_cpu
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint, start, trainer


class NoStream:
    """A stream, or an event, of a device on which all is done at once."""

    def __init__(self, *_, **__):
        pass

    def synchronize(self):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def elapsed_time(self, other):
        return 0.0


def without_streams() -> None:
    torch.cuda.Event = torch.cuda.Stream = NoStream
    torch.cuda.current_stream = lambda *_: NoStream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.accelerator.set_device_index = lambda *_: None


def config_as_on_a_gpu(arguments: EngineArgs, plain=EngineArgs.create_engine_config):
    """vLLM's config, made as if the platform were a GPU."""
    with patch.object(vllm_on_cpu.Host, "is_cuda_alike", lambda self: True):
        return plain(arguments)


def build(directory: str, load_format: str = "safetensors", redundant: int = 4, use_async: bool = False, **engine):
    """A model with redundant experts as a worker of vLLM has it, its config, and its ``EplbState``."""
    without_streams()
    eplb = {
        "num_redundant_experts": redundant,
        "use_async": use_async,
        "communicator": "torch_gloo",
        "window_size": 4,
        "step_interval": 1 << 20,
    }
    options = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": eplb, **engine}
    with patch.object(EngineArgs, "create_engine_config", config_as_on_a_gpu):
        model, config = vllm_on_cpu.build(directory, load_format=load_format, **options)
    with set_current_vllm_config(config):
        state = eplb_state.EplbState(config.parallel_config, torch.device("cpu"))
        state.add_model(model, config.model_config)
        if use_async:
            state.cuda_device_index = 0
            state.start_async_loop()
    return model, config, state


def of_model(state) -> eplb_state.EplbModelState:
    [one] = state.model_states.values()
    return one


def balance(state, seed: int) -> None:
    """Have vLLM move experts for skewed loads of the last steps; with ``use_async`` begin it."""
    window = of_model(state).expert_load_window
    generator = torch.Generator().manual_seed(seed)
    heavy = torch.rand(window.shape[1:], generator=generator) ** 8
    window.copy_((heavy * 1000).int().expand_as(window))
    state.rearrange()


def finish(state) -> int:
    """Let vLLM's steps take over all that its thread copies; how many steps that took."""
    steps = 0
    deadline = time.monotonic() + 60
    while of_model(state).rebalanced:
        state.step(is_dummy=True)
        steps += 1
        time.sleep(0.005)
        assert time.monotonic() < deadline, "vLLM's thread does not end"
    return steps


def as_loaded(directory: str, places: torch.Tensor, **engine) -> dict[str, tuple]:
    """What vLLM's own loader makes of a checkpoint, with experts moved by vLLM's own function to these places."""
    model, _, state = build(directory, **engine)
    moves = of_model(state)
    rebalance_execute.rearrange_expert_weights_inplace(
        moves.physical_to_logical_map,
        places.clone(),
        model.expert_weights,
        moves.expert_buffer,
        parallel_state.get_ep_group().device_group,
        moves.communicator,
    )
    return fingerprint(model)


def worker_of(model, config, state):
    """What of a worker a refit looks at."""
    runner = SimpleNamespace(eplb_state=state, execute_model=lambda *_, **__: None)
    return SimpleNamespace(model_runner=runner, vllm_config=config, get_model=lambda: model)


def refits(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options):
    """Refits of an engine that moves experts in between: before connect with `moved_before`, and with the map of connect
    for ever with `stale`. Of engine ranks, for each refit, the names of what is not as vLLM's loader and mover leave it,
    how many tensors vLLM had moved since the one before, and the report."""
    moved_before, stale = options.pop("moved_before", False), options.pop("stale", False)
    is_trainer, is_engine, members = start(rank, sides)
    source = load = destination = model = state = None
    if is_trainer:
        chunks, load = trainer(flags, checkpoints[0][1])
        source = MegatronModel(chunks)
    if is_engine:
        model, config, state = build(checkpoints[0][0], "dummy", **engine)
        if moved_before:
            balance(state, 7)
        destination = VllmModel(model, config, worker_of(model, config, state))
        if stale:
            held = destination.experts.held()
            destination.experts.held = lambda: held
    link = connect(members, source, destination, **options)
    found = []
    # Which checkpoint comes, and the seed of the loads by which vLLM moves experts before it.
    for version, (which, seed) in enumerate([(0, None), (1, 1), (1, 2), (0, None), (1, None), (0, 3)]):
        if load is not None and version:
            load(checkpoints[which][1])
        before = fingerprint(model) if is_engine else {}
        if seed is not None and is_engine:
            balance(state, seed)
        moved = sum(before[name] != bits for name, bits in (fingerprint(model) if is_engine else {}).items())
        report = link.refit(version, verify=True)
        if is_engine:
            expected = as_loaded(checkpoints[which][0], of_model(state).physical_to_logical_map, **engine)
            now = fingerprint(model)
            wrong = sorted(name for name in expected if now[name] != expected[name])
            found.append((wrong, moved, report.to_dict()))
    said = caught(destination.check_as_published) if is_engine else ""
    return found, said
