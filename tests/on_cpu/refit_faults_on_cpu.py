"""What goes wrong in a refit, on the CPU as `refit_on_cpu` runs them: members that fail, are late,
die, or do not fit each other."""

import os
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from reshard.core.errors import ReshardError
from reshard.engines.placing import places
from reshard.refit import connect, connecting
from reshard.refit.copying import copies
from reshard.refit.protocol import greeting
from reshard.refit.transports import staged
from reshard.refit.transports.agent import Agent
from reshard.trainers.megatron import MegatronModel
from reshard.trainers.shards import unwrapped
from tests.starting.ranks import caught
from tests.tools import container
from tests.tools.refit_sides import Steps, fingerprint, start, trainer

LIMIT = 3  # seconds, where one is waited for in vain


def engine_side(sides: dict):
    """The module that has the engine which weights go `into`: its class, how one is made and loaded, and how
    it runs."""
    return import_module(
        f"tests.on_cpu.{'refit_sglang_on_cpu' if sides.get('into') == 'SGLang' else 'refit_on_cpu'}"
    )


def joining(rank: int, sides: dict) -> str:
    """What is said where the members cannot meet."""
    said = caught(lambda: start(rank, sides))
    if not torch.distributed.is_initialized():
        alone()
    return said


def alone() -> None:
    """A process group of this process, where it has joined no other."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def fault(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], what: str):
    """One trainer and two engine ranks (TP2), something wrong, and what each of them says, with
    what it says next."""
    steps = Steps(sides, rank, 3)
    if what == "protocol" and rank == 2:
        greeting.PROTOCOL = 99
    if what == "NIXL" and rank == 2:
        connecting.installed_version = lambda: "0.1"
    is_trainer, is_engine, members = start(rank, sides)
    source = destination = None
    if is_trainer:
        chunks, _ = trainer(flags, checkpoint[1])
        if what == "has an adapter":  # which is in no checkpoint of Megatron's either
            unwrapped(chunks[0]).embedding.word_embeddings.adapter = torch.nn.Parameter(torch.zeros(3))
        source = MegatronModel(chunks)
        if what == "lacks a parameter":
            dropped = next(i for i, shard in enumerate(source.shards) if "linear_proj" in shard.key)
            del source.shards[dropped], source.memory[dropped]
        if what == "lies elsewhere":
            source.memory[3] = source.memory[3]._replace(tensor=source.memory[3].tensor.to("meta"))
        if what == "has one too many":
            source.shards.append(source.shards[0]._replace(key="decoder.layers.adapter.weight"))
            source.memory.append(source.memory[0])
    else:
        side = engine_side(sides)
        model, config = side.engine_of(
            checkpoint[0],
            load_format="dummy",
            tp=2,
            **({"hf_overrides": {"rms_norm_eps": 0.5}} if what == "config" else {}),
            **({"dtype": "float16"} if what == "dtype" else {}),
        )
        destination = side.ENGINE(model, config)
    steps.meet("built")
    if what == "never comes" and rank == 2:
        steps.wait("said")
        return ["absent"]
    holder: dict = {}
    how = {"backend": "nixl"} if what == "NIXL" else {}
    said = [caught(lambda: holder.update(link=connect(members, source, destination, **how)))]
    steps.reach("said")
    if "link" not in holder:
        return said
    link = holder["link"]
    link.refit(version=1)
    if what in ("trainer dies", "stalls"):
        steps.reach("refitted")
        if rank == (0 if what == "trainer dies" else 2):
            # Not before the others know how the first refit ended: they ask the store, which one of
            # these serves.
            steps.wait("refitted" if what != "stalls" else "refitted again")
            os._exit(0)
        said.append(caught(lambda: link.refit(version=2)))
        steps.reach("refitted again")
        return [*said, destination.ready if destination else None]
    if what == "is offloaded":
        if is_trainer:
            weight = source.models[0].output_layer.weight
            aside = weight.data.clone()
            weight.untyped_storage().resize_(0)
        said.append(caught(lambda: link.refit(version=2)))
        if is_trainer:
            weight.data = aside
        said.append(caught(lambda: link.refit(version=2, verify=True)))
        return [*said, destination.ready if destination else None]
    if is_trainer:
        with torch.no_grad():  # else what was lost would be there from the first refit
            for tensor in source.models[0].parameters():
                tensor.mul_(-1.5)
    plain = copies.copy_on_host
    if rank == 1:
        if what == "fails in the middle":

            def broken(table):
                raise ReshardError("the device is gone")

            copies.copy_on_host = broken
        if what.startswith("loses a tile"):
            copies.copy_on_host = lambda table: plain(table[:-1])
    verify = is_trainer if what.endswith("only the trainer asks") else True
    said.append(caught(lambda: link.refit(version=2, verify=verify)))
    copies.copy_on_host = plain
    if is_engine:
        said.append(caught(lambda: side.run_model(destination)))
        said.append(str((destination.ready, destination.version)))
    link.refit(version=3, verify=True)
    if is_engine:
        said.append(str((destination.ready, destination.version)))
    return said


def in_containers(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], hows: list[dict]):
    """A trainer, and an engine in a container of its own on the same host, connected and refitted
    in each of some ways: what is said at connect, at the refit, how the engine gets its bytes, and
    whether it has the right ones; and what either member says of itself."""

    def work():
        is_trainer, _, members = start(rank, sides)
        source = MegatronModel(trainer(flags, checkpoint[1])[0]) if is_trainer else None
        side = engine_side(sides)
        destination = None if is_trainer else side.ENGINE(*side.engine_of(checkpoint[0], load_format="dummy"))
        said = []
        for number, how in enumerate(hows):
            links: list = []
            answers = [
                caught(
                    lambda how=how, links=links: links.append(connect(members, source, destination, **how))
                )
            ]
            for link in links:
                answers.append(caught(lambda link=link, number=number: link.refit(version=number)))
            right = fingerprint(destination.module) == side.loaded(checkpoint[0]) if destination else None
            said.append((answers, [link.describe()["routes"] for link in links], right))
        own = greeting.Greeting(members.names[rank], [], "auto", 1, True, [])
        return said, (own.name, own.host, own.namespaces, own.user, own.pid)

    if rank < sides["trainer"]:
        return work()
    found = container.inside(work)
    alone()
    return found


def death(
    rank: int,
    sides: dict,
    flags: list[str],
    checkpoint: tuple[str, str],
    engine: dict,
    victim: int,
    moment: str,
):
    """A member dies at a moment of a connection's life. Of every other one: what the call said in
    which that was, after how many seconds, whether the engine is ready, with which version, and how
    many slabs and NIXL agents are left."""
    is_trainer, _, members = start(rank, sides)
    source = MegatronModel(trainer(flags, checkpoint[1])[0]) if is_trainer else None
    destination = None
    if not is_trainer:
        side = engine_side(sides)
        destination = slow(side.ENGINE)(*side.engine_of(checkpoint[0], load_format="dummy", **engine))
    steps = Steps(sides, rank, sides["trainer"] + sides["engine"])
    steps.meet("built")
    where, call, *key = moment.split()
    (steps.folder / f"process {rank}").write_text(str(os.getpid()))
    steps.meet("named")

    def run(name: str, action) -> str:
        if rank == victim and name == where:
            DEATHS[call](members, destination, *key, last=last)
        return caught(action)

    def last() -> None:
        if where == "refit" and call in (
            "posts",
            "copies",
            "reads",
        ):  # else an engine's rank may hear of it before it has begun
            engines = range(sides["trainer"], steps.size)
            steps.wait("begun", *(other for other in engines if other != victim))

    began, links = time.monotonic(), []
    said = run("connect", lambda: links.append(connect(members, source, destination, **sides.get("how", {}))))
    if where == "refit":
        assert said == "no error", said
        links[0].refit(version=1)
        steps.meet("refitted")
        if moment == "refit between" and destination:  # the first byte is copied when the victim has ended
            destination.wait = partial(steps.wait_for_the_end_of, victim)
        if destination:
            destination.begun = partial(steps.reach, "begun")
        if call == "posts" and key == [
            "packed"
        ]:  # what an engine's rank maps is gone, since its owner has given up
            plain_map = staged._mapped

            def map_late(handle: str, whose: str):
                steps.wait_for_the_end_of(victim)
                while "memfd:reshard" in opened(handle):
                    time.sleep(0.01)
                return plain_map(handle, whose)

            staged._mapped = map_late
        if call == "reads":  # a read begins when who has packed the bytes has ended
            plain = Agent.read

            def read(*args):
                steps.wait_for_the_end_of(victim)
                return plain(*args)

            Agent.read = read
        began = time.monotonic()
        said = run("refit", lambda: links[0].refit(version=2, verify=True))
    took = time.monotonic() - began
    if torch.cuda.is_initialized():
        assert torch.ones(1, device="cuda").item() == 1, "this process can go on with its GPU"
    slabs = [file for file in Path("/proc/self/fd").iterdir() if "memfd:reshard" in opened(file)]
    agents = [one for link in links for one in link.transports if getattr(one, "agent", None) is not None]
    state = (destination.ready, destination.version) if destination else None
    return said, took, state, len(slabs) + len(agents)


def opened(file: str | Path) -> str:
    """What a process has open, by its file in ``/proc``; nothing where a thread closes it just then."""
    try:
        return os.readlink(file)
    except OSError:
        return ""


def dies_at(owner, name: str, last, key: str = "", after: bool = False) -> None:
    """End this process, without a word, when a method of an object is called and `last` is done, or
    when both are over; with a key as the method's first argument, or among its payloads' keys, where one is given."""
    plain = getattr(owner, name)

    def dying(*args, **options):
        keys = [args[0]] if key and isinstance(args[0], str) else args[0] if key else []
        if key and key not in {one.partition("/")[0] for one in keys}:
            return plain(*args, **options)
        if after:
            plain(*args, **options)
        last()
        os._exit(0)

    setattr(owner, name, dying)


def dies_in_torch(last) -> None:
    """End this process when it begins to make a communicator for buckets."""

    def dying(*_):
        last()
        os._exit(0)

    torch.distributed.ProcessGroupGloo._Options = dying


# How a member dies, by the word for it: what it says and does last.
DEATHS = {
    "posts": lambda members, engine, key, last: [
        dies_at(members, name, last, key) for name in ("post", "post_all")
    ],
    "reads": lambda members, engine, last: dies_at(members, "post", last, "packed", after=True),
    "meets": lambda members, engine, last: dies_in_torch(last),
    "comes": lambda members, engine, last: dies_at(members, "prepare", last),
    "between": lambda members, engine, last: dies_at(members, "prepare", last, after=True),
    "copies": lambda members, engine, last: dies_at(engine, "update_derived", last),
    "ends": lambda members, engine, last: dies_at(members, "commit", last),
    "over": lambda members, engine, last: dies_at(members, "commit", last, after=True),
}  # fmt: skip


class SlowTrainer(MegatronModel):
    """A trainer that waits, where it is given something to wait for, before it says what lies
    where; but not before it says that it is there, for which its addresses are asked for once."""

    wait, waits, is_there = None, False, False

    def addresses(self):
        if self.waits and self.is_there:
            self._wait_once()
        found = super().addresses()
        self.is_there = self.waits
        return found

    @property
    def memory(self):
        if self.waits and self.is_there:
            self._wait_once()
        return self._regions

    def _wait_once(self):
        self.waits = self.is_there = False
        self.wait()

    @memory.setter
    def memory(self, value):
        self._regions = value


def slow(engine: type) -> type:
    """An engine's class that waits between saying that it is there and taking the first byte, and says that
    it begins; where it is given what to do."""

    class Slow(engine):
        wait = begun = None

        def begin(self):
            if self.wait:
                self.wait()
            super().begin()
            if self.begun:
                self.begun()

    return Slow


def lateness(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]]):
    """A trainer (rank 0) and an engine (rank 1), one of whom comes when the other has given up, in
    one phase after the other; what each says, how long that took, and whether the engine is ready,
    its version, and which checkpoint's weights it holds."""
    is_trainer, _, members = start(rank, sides)
    steps, said, limit = Steps(sides, rank, 2), {}, members.timeout
    source = destination = None
    if is_trainer:
        chunks, load = trainer(flags, checkpoints[0][1])
        source = SlowTrainer(chunks)
    else:
        side_of_engine = engine_side(sides)
        model, config = side_of_engine.engine_of(checkpoints[0][0], load_format="dummy")
        destination = slow(side_of_engine.ENGINE)(model, config)
        known = [side_of_engine.loaded(hf) for hf, _ in checkpoints]

    def now(step: str, action, late: str = "", slow: str = "") -> None:
        """What is said, after how long; and the engine's state. One side may come late, or be slow
        in the middle, by all of the others' wait."""
        steps.meet(f"before {step}")
        me = "trainer" if is_trainer else "engine"
        members.timeout = limit if late or slow else 60  # who is not to be late may be slow on a busy machine
        if late == me:
            steps.wait(step)
        if slow == me:
            side = source or destination
            side.wait, side.waits = partial(steps.wait, step), True
        began = time.monotonic()
        heard = caught(action)
        took = time.monotonic() - began
        if slow == me:
            side.wait = None
        state = None
        if destination:
            held = fingerprint(destination.module)
            state = destination.ready, destination.version, known.index(held) if held in known else None
        said[step] = heard, round(took, 1), state
        steps.meet(step)

    links: list = []
    for who in ("engine", "trainer"):
        now(f"{who} late at connect", lambda: connect(members, source, destination), late=who)
    now("both connect", lambda: links.append(connect(members, source, destination)))
    [link] = links
    now("both refit", lambda: link.refit(version=5, verify=True))
    if is_trainer:
        load(checkpoints[1][1])
    for version, who in ((6, "engine"), (7, "trainer")):
        now(f"{who} late at a refit", partial(link.refit, version=version), late=who)
    now("they disagree", lambda: link.refit(version=41 if is_trainer else 8))
    now("the trainer wants a check", lambda: link.refit(version=41, verify=is_trainer))
    now("the engine wants a check", lambda: link.refit(version=41, verify=not is_trainer))
    now("only one says", lambda: link.refit(version=42 if is_trainer else None))
    now("none says", lambda: link.refit())
    if is_trainer:
        load(checkpoints[0][1])
    for who in ("engine", "trainer"):
        now(f"{who} late in the middle", lambda: link.refit(version=50, verify=True), slow=who)
        now(f"after {who} was late in the middle", lambda: link.refit(version=51, verify=True))
    # After a refit that failed for the engine it may connect anew, with another look at the same model.
    now("engine late once more", lambda: link.refit(version=60), slow="engine")
    if destination:
        destination = side_of_engine.ENGINE(model, config)
    now(
        "they want other ways",
        lambda: connect(members, source, destination, backend="staged" if is_trainer else "nccl"),
    )
    more = {"backend": "staged", "bucket_bytes": 1 << 19} if is_trainer else {}
    now("connect anew", lambda: links.append(connect(members, source, destination, **more)))
    link = links[-1]
    now("refit anew", lambda: link.refit(version=61))
    if is_trainer:
        load(checkpoints[1][1])
        for parameter in source.models[0].parameters():
            parameter.data = parameter.data.clone()
    else:
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter.data)
        layer = model.get_submodule("model.layers.1.mlp.gate_up_proj")
        layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
    now("both sides moved", lambda: link.refit(verify=True))
    if destination:
        kept, layer.weight = (
            layer.weight,
            torch.nn.Parameter(layer.weight.T.contiguous(), requires_grad=False),
        )
    now("the engine has another parameter", lambda: link.refit())
    if destination:
        layer.weight = kept
    now("and has it back", lambda: link.refit())
    said["routes"] = link.describe()["routes"]
    return said


def missed(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]]):
    """A trainer (rank 0) and an engine of two ranks, the last of which misses one call of `refit`, by each backend;
    what all say then, when all call again, and whether the engine then holds the trainer's weights, which are others
    each time."""
    is_trainer, _, members = start(rank, sides)
    steps, said = Steps(sides, rank, 3), {}
    source = destination = load = None
    if is_trainer:
        chunks, load = trainer(flags, checkpoints[0][1])
        source = MegatronModel(chunks)
    else:
        side = engine_side(sides)
        model, config = side.engine_of(checkpoints[0][0], load_format="dummy", tp=2)
        destination = side.ENGINE(model, config)
        known = [side.loaded(hf, tp=2) for hf, _ in checkpoints]

    def now(name: str, link, number: int, absent: tuple = (), first: tuple = ()) -> None:
        """All but the `absent` ranks call, those that come `first` as soon as the others have failed."""
        if load is not None:
            load(checkpoints[number % 2][1])
        steps.meet(f"before {name}")
        if rank not in absent:
            if first and rank not in first:
                time.sleep(0.3)
            began = time.monotonic()
            heard = caught(lambda: link.refit(verify=True))
            right = fingerprint(model) == known[number % 2] if destination and heard == "no error" else None
            said[name] = heard, round(time.monotonic() - began, 1), right
        steps.meet(name)

    for how in ({"delta": True}, {"backend": "staged"}, {"backend": "nixl"}):
        by = how.get("backend", "Gloo")
        members.timeout = 60
        link = connect(members, source, destination, **how)
        now(f"{by} before", link, 0)
        now(f"{by} with changes", link, 1)
        members.timeout = LIMIT
        now(f"{by} without one", link, 2, absent=(2,))
        members.timeout = 60
        now(f"{by} again", link, 3, first=(2,) if by == "staged" else ())
        now(f"{by} after", link, 4)
    members.timeout = LIMIT
    for name, absent in (("twice", (2,)), ("twice without another", (0, 1))):
        now(name, link, 5, absent=absent)
    members.timeout = 60
    now("after both", link, 6)
    steps.meet("before another call")
    said["another call"] = caught(link.release if rank == 1 else link.refit)
    steps.meet("another call")
    now("after another call", link, 7)
    return said


def agreement(rank: int, sides: dict, checkpoint: str, engine: dict, change: str):
    """What is said where our rules, or vLLM's state, are not what they should be."""
    start(rank, sides | {"together": True, "engine": sides["trainer"]})
    side = engine_side(sides)
    model, config = side.engine_of(checkpoint, **engine)
    before = fingerprint(model)
    plain = places.place
    if change in ("gate and up", "expert"):

        def changed(*args):
            placement = plain(*args)
            name = next(
                i
                for i in placement.tensors
                if i[0].endswith("gate_up_proj.weight" if change == "gate and up" else "w13_weight")
            )
            tensor = placement.tensors[name]
            gate, up = tensor.parts
            if change == "gate and up":
                parts = gate._replace(at=up.at), up._replace(at=gate.at)
            else:
                parts = gate._replace(name=gate.name.replace("experts.0", "experts.1")), up
            return replace(placement, tensors={**placement.tensors, name: tensor._replace(parts=parts)})

        places.place = changed
    if change == "turns":  # every second row, but the other one

        def exchanged(*args):
            placement = plain(*args)
            gate, up = (
                f"model.layers.0.mlp.experts.routed_experts.w13_bias[{turn} in 2]" for turn in ("0:1", "1:2")
            )
            names = {(gate, 0): (up, 0), (up, 0): (gate, 0)}
            tensors = [t._replace(id=names.get(t.id, t.id)) for t in placement.tensors.values()]
            return placement.of(placement.shapes, tensors)

        places.place = exchanged
    if change == "fp8":
        from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

        layer = model.get_submodule("model.layers.0.self_attn.qkv_proj")
        layer.quant_method = object.__new__(Fp8LinearMethod)  # its kernels ask for a GPU when it is made
    if change == "backend":
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

        for module in model.modules():
            if hasattr(getattr(module, "quant_method", None), "unquantized_backend"):
                module.quant_method.unquantized_backend = UnquantizedMoeBackend.AITER
    said = caught(lambda: side.ENGINE(model, config))
    places.place = plain
    return said, fingerprint(model) == before
