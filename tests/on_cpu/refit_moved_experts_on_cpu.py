"""vLLM's own balancing of experts (EPLB) on the CPU: its real model classes with redundant experts, its own
``EplbState`` with its policy, its Gloo communicator and its thread, over several processes.

vLLM starts EPLB on GPUs alone. What is ours here is that the platform says it is one while a config is made, and
streams and events that order nothing: on a CPU each copy has ended when its call returns.
"""

import contextlib
import functools
import time
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.eplb import eplb_state, rebalance_execute
from vllm.engine.arg_utils import EngineArgs

from reshard.core.errors import ReshardError
from reshard.engines.vllm import live
from reshard.engines.vllm.live import VllmModel
from reshard.engines.vllm.weights import moved_experts
from reshard.engines.workers.deltas import EngineDeltas
from reshard.models.config_fields import ignored, ignored_config_fields
from reshard.refit import connect
from reshard.refit.guard import Guard
from reshard.refit.reporting.served_parts import digest_parts
from reshard.refit.served import ServedWeights
from reshard.refit.transports.together import Transports
from reshard.refit.unmoved import Unmoved
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu import vllm_on_cpu
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint, start, trainer
from tests.tools.twins import VERSION, RankOfLender, handed_on


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


def unpinned(make):
    return lambda *sizes, pin_memory=False, **options: make(*sizes, **options)


@functools.cache
def without_streams() -> None:
    """From now on streams and events order nothing, and memory is not pinned."""
    torch.Event = torch.cuda.Event = torch.cuda.Stream = NoStream  # the first of vLLM 0.32 on
    torch.cuda.current_stream = torch.accelerator.current_stream = lambda *_: NoStream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.accelerator.set_device_index = lambda *_: None
    torch.empty, torch.empty_like = unpinned(torch.empty), unpinned(torch.empty_like)


def config_as_on_a_gpu(arguments: EngineArgs, plain=EngineArgs.create_engine_config):
    """vLLM's config, made as if the platform were a GPU."""
    with patch.object(vllm_on_cpu.Host, "is_cuda_alike", lambda self: True):
        return plain(arguments)


def build(
    directory: str, load_format: str = "safetensors", redundant: int = 4, use_async: bool = False, **engine
):
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
    """Let vLLM's steps take over all that its thread copies; how many layers they did."""
    layers = 0
    while of_model(state).rebalanced:
        await_copy(state)
        state.step(is_dummy=True)
        layers += 1
    return layers


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


class Sides:
    """The sides of a rank: a trainer that loads checkpoints, an engine that moves experts, and their link."""

    def __init__(
        self, rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict
    ):
        self.rank, self.flags, self.checkpoints, self.engine = rank, flags, checkpoints, engine
        self.is_trainer, self.is_engine, self.members = start(rank, sides)
        self.source = self.load = self.destination = self.model = self.state = self.link = None

    def connect(
        self,
        moved_before: bool = False,
        use_async: bool = False,
        match_vllm_rounding: bool = False,
        **options,
    ) -> None:
        """Make both sides, of an engine that has moved experts before, and connect them."""
        if self.is_trainer:
            chunks, self.load = trainer(self.flags, self.checkpoints[0][1])
            self.source = MegatronModel(chunks)
        if self.is_engine:
            made = build(self.checkpoints[0][0], "dummy", use_async=use_async, **self.engine)
            self.model, config, self.state = made
            if moved_before:
                balance(self.state, 7)
            self.destination = VllmModel(self.model, config, worker_of(*made))
        self.link = connect(self.members, self.source, self.destination, **options)

    def train(self, which: int) -> None:
        """Let the trainer have the weights of one of the checkpoints."""
        if self.load is not None:
            self.load(self.checkpoints[which][1])

    def move(self, seed: int) -> None:
        """Let the engine move experts, or begin it."""
        if self.is_engine:
            balance(self.state, seed)

    def wrong(self, which: int) -> list[str]:
        """The names of what an engine's rank serves otherwise than vLLM's loader and mover leave it of a checkpoint."""
        if not self.is_engine:
            return []
        places = of_model(self.state).physical_to_logical_map.clone()
        expected, now = as_loaded(self.checkpoints[which][0], places, **self.engine), fingerprint(self.model)
        return sorted(name for name in expected if now[name] != expected[name])


def refits(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options
):
    """Refits of an engine that moves experts in between. Of engine ranks, for each refit, whether vLLM had moved
    experts since the one before, what is wrong then, and the report; what is wrong where a rank goes by the places of
    before, and after the refit that comes then; and what is said where others are to read from it, where an adapter is
    to be refitted, and after vLLM has loaded weights itself."""
    both = Sides(rank, sides, flags, checkpoints, engine)
    both.connect(**options)
    found = []
    # Which checkpoint comes, and the seed of the loads by which vLLM moves experts before it.
    for version, (which, seed) in enumerate([(0, None), (1, 1), (1, 2), (0, None), (1, 3)]):
        both.train(which)
        before = fingerprint(both.model) if both.is_engine else {}
        if seed is not None:
            both.move(seed)
        moved = both.is_engine and fingerprint(both.model) != before
        if version == 4:  # planned anew, this one fails
            is_last = rank == both.members.size - 1
            with patch.object(VllmModel, "update_derived", failing) if is_last else contextlib.nullcontext():
                assert "on purpose" in caught(lambda: both.link.refit(4, verify=True))
        report = both.link.refit(version, verify=True)
        found.append((moved, both.wrong(which), report.to_dict()))
    destination, said = both.destination, []
    held = destination.experts.held() if both.is_engine else None
    both.move(4)
    both.train(0)
    with patch.object(moved_experts.VllmExperts, "held", lambda self: held):
        both.link.refit()  # of deltas a verification would find it
    controls = [both.wrong(0)]
    both.link.refit(verify=True)
    controls.append(both.wrong(0))
    if both.is_engine:
        both.link.close()
        ready = destination.guard.ready
        destination.guard.loaded()
        said = [
            caught(destination.check_as_published),
            caught(lambda: destination.adapter("policy")),
            ready and destination.guard.refusal,
        ]
    return found, controls, said


def refused(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict
) -> str:
    """What is said at connect."""
    _, _, members = start(rank, sides)  # kept, since others meet at the first
    made = build(checkpoints[0][0], "dummy", **engine)
    said = caught(lambda: VllmModel(made[0], made[1], worker_of(*made)))
    members.close()
    return said


def failing(self) -> None:
    raise ReshardError("on purpose")


def by_chain(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, chain: str
):
    """What is wrong in an engine that loaded a checkpoint, after vLLM has moved experts and a delta has led to the
    next, and after it was rolled back; what is said where vLLM moves experts before that, and while a delta is read;
    and whether the engine is ready all the same."""
    _, _, members = start(rank, sides)  # kept, since others meet at the first
    model, config, state = build(checkpoints[0][0], **engine)
    destination = VllmModel(model, config, worker_of(model, config, state))
    deltas = EngineDeltas(destination)

    def prepare() -> None:
        [delta] = deltas.open(chain, "session").deltas(1)
        deltas.digests()
        deltas.begin(delta.before, 1, delta.after, 1 << 30)
        assert deltas.is_prepared(waits=True)

    def write() -> None:
        deltas.write(1, deltas.chain.deltas(1)[0].after)

    def wrong(which: int) -> list[str]:
        places = of_model(state).physical_to_logical_map.clone()
        expected, now = as_loaded(checkpoints[which][0], places, **engine), fingerprint(model)
        return sorted(name for name in expected if now[name] != expected[name])

    balance(state, 1)
    prepare()
    write()
    found = [wrong(1)]
    deltas.roll_back(0)
    found.append(wrong(0))
    prepare()
    balance(state, 2)
    said = [caught(write)]
    found.append(wrong(0))
    prepare()
    write()
    found.append(wrong(1))
    balance(state, 3)
    said.append(caught(lambda: deltas.roll_back(0)))
    found.append(wrong(1))
    members.close()
    return found, said, destination.guard.ready


def while_moving(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options
):
    """Refits while vLLM's thread moves experts in the background (``use_async``): after it has taken over no layer,
    and some; and one where nobody sees to what it has copied. Of engine ranks, for each, what is wrong once all has
    ended, and how many layers vLLM took over after the refit; what is wrong after one more; and what was `counted`."""
    both = Sides(rank, sides, flags, checkpoints, engine)
    both.connect(use_async=True, **options)
    both.link.refit()
    found = []
    for which, seed, taken, settled in ((1, 1, 0, True), (0, 2, 2, True), (1, 3, 0, False)):
        both.move(seed)
        for _ in range(taken if both.is_engine else 0):
            await_copy(both.state)
            both.state.step(is_dummy=True)
        if both.is_engine and not settled:
            await_copy(both.state)
        both.train(which)
        with (
            contextlib.nullcontext()
            if settled
            else patch.object(live, "leave_where_they_are", lambda *_: None)
        ):
            both.link.refit(verify=True)
        layers = finish(both.state) if both.is_engine else 0
        found.append((both.wrong(which), layers))
    both.link.refit(verify=True)
    return found, both.wrong(1), counted(both) if both.is_engine else []


def counted(both: Sides) -> list:
    """How often the guard of an engine that is to hand on its weights has counted moves by then: after a step that
    moves nothing, after one that begins to move experts in the background, and once that has ended; and what is said to
    who still reads."""
    still, guard = both.destination.held_still(), both.destination.guard
    both.state.step(is_dummy=True)
    counts = [guard.moves]
    balance(both.state, 4)
    counts.append(guard.moves)
    finish(both.state)
    return [*counts, guard.moves, caught(still.check_current)]


def await_copy(state) -> None:
    """Wait until vLLM's thread has copied a layer."""
    deadline = time.monotonic() + 60
    while of_model(state).pending_result is None:
        time.sleep(0.005)
        assert time.monotonic() < deadline, "vLLM's thread copies nothing"


def looked_between(
    rank: int,
    sides: dict,
    flags: list[str],
    checkpoints: list[tuple[str, str]],
    engine: dict,
    how: str,
    **options,
):
    """What the refit says that comes after a move and something that only looks."""
    both = Sides(rank, sides, flags, checkpoints, engine)
    both.connect(**options)
    both.link.refit(0, verify=True)
    both.move(1)
    if how == "digest" and both.is_engine:
        digest_parts(both.destination)
    if how == "describe":
        both.link.describe()
    if how == "failed":
        # The trainer is asked for another version by one member: the refit fails before anything is planned anew.
        caught(lambda: both.link.refit(7 if both.is_engine else 8))
    if how == "begun":
        both.link.begin_refit(1).wait()
    said = [caught(lambda: both.link.refit(9, verify=True)), caught(lambda: both.link.refit(10, verify=True))]
    return said, both.wrong(0)


def ignoring(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options
):
    """What refits say that plan anew, of a model that is taken where a field is ignored, as it was at connect."""
    both, plain = Sides(rank, sides, flags, checkpoints, engine), MegatronModel.check_model

    def check(self, model) -> None:
        assert "router_jitter_noise" in ignored(), "it is not ignored any more"
        plain(self, model)

    with patch.object(MegatronModel, "check_model", check):
        with ignored_config_fields("router_jitter_noise") if both.is_trainer else contextlib.nullcontext():
            both.connect(**options)
        both.link.refit(0, verify=True)
        both.move(1)
        said = [caught(lambda: both.link.refit(verify=True)) for _ in range(2)]
    return said, both.wrong(0)


def calls(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options
):
    """What transports are told, in order, by a refit that keeps its plan, and by one that plans anew."""
    both = Sides(rank, sides, flags, checkpoints, engine)
    both.connect(**options)
    told = []

    def told_of(name, plain):
        def called(self, *args, **kwargs):
            told.append(name)
            return plain(self, *args, **kwargs)

        return called

    found = []
    with contextlib.ExitStack() as stack:
        for name in ("prepare", "release", "update_addresses", "run"):
            stack.enter_context(patch.object(Transports, name, told_of(name, getattr(Transports, name))))
        for moves in (False, True):
            if moves:
                both.move(1)
            told.clear()
            both.link.refit()
            found.append(list(told))
    return found


def lends(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict):
    """What newcomers hold wrong that get the weights of an engine which has moved experts since its refit: one whose
    experts are elsewhere, and one that moves none; what is said where the engine moves experts meanwhile: as it
    is, where nobody ends the reading, and where nobody looks either whether they have moved, and what is wrong then."""
    both = Sides(rank, sides, flags, checkpoints, engine)
    both.connect(moved_before=True)
    both.link.refit(VERSION, verify=True)
    both.move(1)
    worker = RankOfLender(both.destination)
    own = {name: value for name, value in engine.items() if name != "redundant"}
    model, config, state = build(checkpoints[0][0], "dummy", **engine)
    balance(state, 2)
    newcomer = VllmModel(model, config, worker_of(model, config, state))
    plain = VllmModel(
        *vllm_on_cpu.build(checkpoints[0][0], load_format="dummy", enable_expert_parallel=True, **own)
    )

    def wrong(served: VllmModel) -> list[str]:
        if served is plain:
            options = {"enable_expert_parallel": True, **own}
            expected = fingerprint(vllm_on_cpu.build(checkpoints[0][0], **options)[0])
        else:
            expected = as_loaded(checkpoints[0][0], of_model(state).physical_to_logical_map, **engine)
        return sorted(name for name, bits in fingerprint(served.module).items() if expected[name] != bits)

    found = [wrong(newcomer)]
    for one in (newcomer, plain):
        found += [handed_on(worker, one), wrong(one), one.version]
    begin = newcomer.begin

    def moving_first() -> None:
        balance(both.state, 3)
        begin()

    newcomer.begin = moving_first
    said = [(handed_on(worker, newcomer), newcomer.ready)]
    newcomer.begin = begin
    worker = MovingLender(both.destination, both.state)
    with patch.object(Guard, "end_readers", lambda self: None):
        said.append((handed_on(worker, newcomer), newcomer.ready))
        with patch.object(live, "Unmoved", Unguarded):
            control = handed_on(worker, newcomer), wrong(newcomer)
    return found, said, control


class MovingLender(RankOfLender):
    """One whose engine moves experts, for other loads each time, once it is to hand on its weights."""

    def __init__(self, engine: VllmModel, state) -> None:
        super().__init__(engine)
        self.state, self.seeds = state, iter(range(4, 9))

    def reshard_lend(self, *args, **options) -> None:
        super().reshard_lend(*args, **options)
        balance(self.state, next(self.seeds))


class Unguarded(Unmoved):
    """One that does not look whether anything has moved."""

    def check_current(self) -> None:
        ServedWeights.check_current(self)
