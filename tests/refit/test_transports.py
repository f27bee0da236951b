"""Which transport a pair of ranks gets, and each of them between a trainer and an engine of one
tensor: no Megatron, no vLLM, a second each."""

import gc
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from socket import SHUT_RDWR
from threading import Barrier, Event

import pytest
import torch

from reshard.comm.hub import Hub
from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.refit import Link, RefitGroup, RefitReport, connect
from reshard.refit.agreement import should_relay
from reshard.refit.copying.copies import host_bytes
from reshard.refit.copying.tables import TILE_BYTES
from reshard.refit.engine import Engine
from reshard.refit.guard import Guard
from reshard.refit.protocol.greeting import DeviceInfo, Greeting
from reshard.refit.reporting.report import RefitDelta
from reshard.refit.routes import BACKENDS, Pair, Peer
from reshard.refit.trainer import Trainer
from reshard.refit.transports import TRANSPORTS, agent, nccl, slots, transport_for
from reshard.refit.transports.agent import Agent, AgentHandle
from reshard.refit.transports.bucket_memory import BucketMemory
from reshard.refit.transports.slots import SlotTransport
from tests.starting.ranks import caught, free_port

TRAINER = Peer("trainer", "host", "namespaces", 0, 1, "cuda", "GPU 0")
ENGINE = TRAINER._replace(name="engine", pid=2, gpu="GPU 1")
EVERYWHERE = {"auto": "nccl", "cuda_ipc": None, "staged": None, "nccl": "nccl"}
NIXL = {"nixl": "1.5.1", "rdma": True}


@pytest.mark.parametrize(("engine", "exported", "expected"), [
    (ENGINE, True, {"auto": "cuda_ipc", "cuda_ipc": "cuda_ipc", "staged": "staged", "nccl": "nccl"}),
    (ENGINE, False, {"auto": "staged", "cuda_ipc": "staged", "staged": "staged", "nccl": "nccl"}),
    # NCCL connects no two processes of one GPU.
    (ENGINE._replace(gpu="GPU 0"), True, {"auto": "cuda_ipc", "nccl": "staged"}),
    (ENGINE._replace(gpu="GPU 0"), False, {"auto": "staged", "nccl": "staged"}),
    (ENGINE._replace(host="another"), True, EVERYWHERE),
    (ENGINE._replace(user=7), True, EVERYWHERE),
    (ENGINE._replace(namespaces="a container's"), True, EVERYWHERE),
    (ENGINE._replace(gpu="GPU 0", namespaces="a container's"), True, EVERYWHERE),
])  # fmt: skip
def test_a_pair_gets_the_transport_that_reaches_it(engine, exported, expected):
    for backend, name in expected.items():
        pair = Pair(TRAINER, engine, same_process=False, exported=exported)
        if name is None:
            with pytest.raises(ReshardError, match=r"trainer and engine cannot read each other's memory"):
                transport_for(pair, backend)
        else:
            assert transport_for(pair, backend).reach.name == name
    assert transport_for(Pair(TRAINER, ENGINE, False, True, mappable=False), "auto").reach.name == "nccl"
    assert transport_for(Pair(TRAINER, TRAINER, True, False), "nccl").reach.name == "cuda_ipc", (
        "within a process"
    )


@pytest.mark.parametrize(("trainer", "engine", "expected"), [
    (NIXL, NIXL | {"host": "another"}, {"auto": "nixl", "nixl": "nixl", "nccl": "nccl"}),
    (NIXL, NIXL, {"auto": "cuda_ipc", "nixl": "nixl"}),  # of one host
    (NIXL, NIXL | {"gpu": "GPU 0"}, {"auto": "cuda_ipc", "nixl": "nixl"}),
    (NIXL, NIXL | {"host": "another", "rdma": False}, {"auto": "nccl", "nixl": "nixl"}),
    (NIXL, NIXL | {"host": "another", "rdma": False, "device": "cpu"}, {"auto": "nixl"}),
    (NIXL, NIXL | {"host": "another", "nixl": "1.6.0"},
     {"auto": "nccl", "nixl": "trainer has NIXL 1.5.1, engine has NIXL 1.6.0"}),
    (NIXL, {"host": "another"}, {"auto": "nccl", "nixl": "trainer has NIXL 1.5.1, engine has no NIXL"}),
])  # fmt: skip
def test_nixl_carries_what_goes_between_hosts_that_have_the_same(trainer, engine, expected):
    pair = Pair(TRAINER._replace(**trainer), ENGINE._replace(**engine), same_process=False, exported=True)
    for backend, name in expected.items():
        if " " in name:
            with pytest.raises(ReshardError, match=f"^{name}: pip install"):
                transport_for(pair, backend)
        else:
            assert transport_for(pair, backend).reach.name == name


@pytest.mark.parametrize("engine", [ENGINE, ENGINE._replace(host="another", **NIXL)], ids=["one host", "two"])
@pytest.mark.parametrize("exported", [True, False])
def test_what_several_want_goes_by_nccl_which_sends_it_once_unless_another_way_is_named(engine, exported):
    trainer = TRAINER._replace(**NIXL)
    alone = Pair(trainer, engine, False, exported)
    assert transport_for(alone, "auto").reach.name != "nccl"
    assert transport_for(alone._replace(shared=True), "auto").reach.name == "nccl"
    assert (
        transport_for(alone._replace(shared=True), "nixl" if engine.nixl else "staged").reach.name != "nccl"
    )
    assert transport_for(Pair(trainer, trainer, True, exported, shared=True), "auto").reach.name == "cuda_ipc"


@pytest.mark.parametrize(("trainers", "engines", "tp", "relays", "expected"), [
    ("A", "BC", 1, "auto", True), ("AB", "CDEF", 2, "auto", True), ("A", "BC", 1, "never", False),
    ("A", "B", 1, "auto", False), ("AB", "CDE", 1, "auto", False), ("A", "BC", 2, "auto", False),
    ("A", "BB", 1, "auto", False), ("A", "AB", 1, "auto", False), ("A", ["", ""], 1, "auto", False),
])  # fmt: skip
def test_engines_pass_on_if_there_are_twice_as_many_gpus_to_fill_as_to_read_from(
    trainers, engines, tp, relays, expected
):
    members = [("trainer", gpu, 0) for gpu in trainers] + [("inference", gpu, tp) for gpu in engines]
    greetings = [
        Greeting(name=str(number), roles=[role], backend="auto", bucket_bytes=1, keep_mapped=False, ignored=[],
                 relays=relays)
        for number, (role, *_) in enumerate(members)
    ]  # fmt: skip
    devices = [DeviceInfo("cuda", gpu, "", False, size) for _, gpu, size in members]
    assert should_relay([*greetings, replace(greetings[0], roles=[])], [*devices, devices[0]]) == expected


def test_between_cpus_of_a_host_staging_is_used_where_it_is_asked_for():
    pair = Pair(*(peer._replace(device="cpu", gpu="") for peer in (TRAINER, ENGINE)), False, True)
    assert [transport_for(pair, backend).reach.name for backend in ("auto", "staged", "nccl")] == [
        "nccl",
        "staged",
        "nccl",
    ]


def test_every_transport_can_be_named():
    assert ("auto", *(transport.reach.name for transport in TRANSPORTS)) == BACKENDS


ROWS, COLUMNS = 16, 8  # of a trainer's rank's shard
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


class OneShard(Trainer):
    """A trainer's rank with some rows of one tensor."""

    def __init__(self, rank: int, rows: int = ROWS) -> None:
        self.weight, self.first, self.rows = torch.randn(rows, COLUMNS).bfloat16(), rows * rank, rows

    @property
    def memory(self):
        return [Region(self.weight, 0, COLUMNS)]

    def publish(self, model):
        shape = (self.rows, COLUMNS)
        return [LocalTensor(0, shape, (Part("weight", Box((self.first, 0), shape), (0, 0)),))]

    def check_model(self, model):
        pass

    def name_of(self, index):
        return "weight"


class OneTensor(Engine):
    """An engine's rank that serves both ranks' rows."""

    hf_config, tp = CONFIG, 1

    def __init__(self, rows: int = 2 * ROWS) -> None:
        shape = (rows, COLUMNS)
        self.weight = torch.zeros(shape).bfloat16()
        self.regions = {"weight": Region(self.weight, 0, COLUMNS)}
        tensor = LocalTensor("weight", shape, (Part("weight", Box((0, 0), shape), (0, 0)),))
        self.placement = Placement({"weight": shape}, {"weight": tensor})
        self.guard = Guard("engine", False)

    def process_round(self, number):
        raise AssertionError("there are no rounds")

    def mismatches(self, number):
        raise AssertionError("there are no rounds")


@pytest.mark.parametrize("keep_mapped", [False, True])
@pytest.mark.parametrize("in_one_process", [False, True])
@pytest.mark.parametrize("backend", ["auto", "staged", "nixl"])
def test_each_transport_brings_every_byte_also_of_weights_that_have_moved(
    backend, in_one_process, keep_mapped
):
    address, size = f"127.0.0.1:{free_port()}", 2 if in_one_process else 3

    def member(rank: int):
        members = RefitGroup.join(address, rank, size, timeout=60)
        source = OneShard(rank) if rank < 2 else None
        destination = OneTensor() if rank == size - 1 else None
        link = connect(
            members, source, destination, backend=backend, keep_mapped=keep_mapped, bucket_bytes=1 << 20
        )
        states = []
        for version in (1, 2, 3):
            if source is not None:
                if version == 3:
                    source.weight = source.weight.clone()
                source.weight.copy_(torch.randn(ROWS, COLUMNS))
            report = link.refit(version, verify=version != 2)
            states.append(
                (source and source.weight.clone(), destination and destination.weight.clone(), report)
            )
        link.close()
        return states

    with ThreadPoolExecutor(size) as pool:
        first, second, *others = pool.map(member, range(size))
    route = "nccl" if backend == "auto" else backend
    bytes_of_shard = 2 * ROWS * COLUMNS
    for (top, _, _), (bottom, _, _), (_, served, report) in zip(
        first, second, (others or [second])[0], strict=True
    ):
        assert torch.equal(served, torch.cat([top, bottom]))
        expected = (
            {"local": bytes_of_shard, route: bytes_of_shard}
            if in_one_process
            else {route: 2 * bytes_of_shard}
        )
        assert {name: size for name, size in report.received_bytes.items() if size} == expected


@pytest.mark.parametrize("backend", ["auto", "staged", "nixl"])
def test_members_of_one_name_are_told_apart(backend):
    """As the ranks of a pod may be named, in what each sends and in what it says beside its weights."""
    address, rows, heard = f"127.0.0.1:{free_port()}", 7 * (TILE_BYTES // 16), []

    def member(rank: int):
        members = RefitGroup.join(address, rank, 3, timeout=60)
        source, destination = (OneShard(rank, rows), None) if rank < 2 else (None, OneTensor(2 * rows))
        if source is not None:
            source.facts = lambda: f"of rank {rank}".encode()
        else:
            destination.take_facts = heard.append
        name = "pod 7" if source is not None else None
        link = connect(members, source, destination, backend=backend, bucket_bytes=4 * TILE_BYTES, name=name)
        link.refit()
        link.close()
        return (source or destination).weight

    with ThreadPoolExecutor(3) as pool:
        first, second, served = pool.map(member, range(3))
    assert torch.equal(served, torch.cat([first, second]))
    assert heard == [{"pod 7 (rank 0)": b"of rank 0", "pod 7 (rank 1)": b"of rank 1"}]


class NoTensor(OneTensor):
    """An engine's rank without any tensor, as a pipeline stage without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.regions, self.placement = {}, Placement({}, {})


def test_a_rank_without_any_tensor_is_of_the_gpu_that_its_process_uses(monkeypatch):
    """Connect refuses members on two kinds of device."""
    assert NoTensor().device == torch.device("cpu")
    for name, value in (("is_available", True), ("is_initialized", True), ("current_device", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert NoTensor().device == torch.device("cuda", 3) and OneTensor().device == torch.device("cpu")


@pytest.mark.parametrize("relays", ["never", "always"])
@pytest.mark.parametrize("backend", ["auto", "staged", "nixl"])
def test_an_engines_rank_without_any_tensor_takes_part_and_gets_nothing(backend, relays):
    address, engines = f"127.0.0.1:{free_port()}", [OneTensor(), NoTensor()]

    def member(rank: int):
        members = RefitGroup.join(address, rank, 4, timeout=60)
        sides = (OneShard(rank), None) if rank < 2 else (None, engines[rank - 2])
        link = connect(members, *sides, backend=backend, relays=relays)
        reports = [link.refit(version, verify=version == 1) for version in (1, 2)]
        assert link.describe()
        link.close()
        return [sum(report.received_bytes.values()) for report in reports]

    with ThreadPoolExecutor(4) as pool:
        *_, whole, none = pool.map(member, range(4))
    assert whole == [2 * 2 * ROWS * COLUMNS] * 2 and none == [0, 0]
    assert [(engine.ready, engine.version) for engine in engines] == [(True, 2)] * 2


@pytest.mark.parametrize("backend", ["staged", "nixl"])
def test_a_slot_is_packed_anew_once_its_reader_has_taken_it(backend, monkeypatch):
    """Of a reader that is late in each of seven rounds, through two slots."""
    address, rows, late, plain = (
        f"127.0.0.1:{free_port()}",
        7 * (TILE_BYTES // 16),
        [],
        SlotTransport.wait_for,
    )

    def wait_for(self, step, line, count):
        plain(self, step, line, count)
        if step == "packed":
            late.append(count)
            time.sleep(0.02)

    def member(rank: int):
        members = RefitGroup.join(address, rank, 2, timeout=60)
        source, destination = (OneShard(0, rows), None) if not rank else (None, OneTensor(rows))
        connect(members, source, destination, backend=backend, bucket_bytes=2 * TILE_BYTES).refit()
        return (source or destination).weight

    monkeypatch.setattr(SlotTransport, "wait_for", wait_for)
    with ThreadPoolExecutor(2) as pool:
        sent, served = pool.map(member, range(2))
    assert torch.equal(served, sent) and late == [1, 2, 3, 4, 5, 6, 7]


def test_a_call_of_another_thread_within_a_refit_is_refused_and_takes_nothing_from_it(monkeypatch):
    """A close would unmap the slab that is being packed; a second refit would take the answers of the first."""
    address, said, plain = f"127.0.0.1:{free_port()}", {}, SlotTransport.tell

    def tell(self, step, lines):
        if step == "packed" and lines and not said:
            link = links[0]
            calls = (link.close, link.release, link.refit, lambda: connect(link.group, OneShard(0)))
            with ThreadPoolExecutor(1) as pool:
                said.update(enumerate(pool.map(caught, calls)))
        plain(self, step, lines)

    links: dict[int, Link] = {}

    def member(rank: int):
        members = RefitGroup.join(address, rank, 2, timeout=5)
        source, destination = (OneShard(0, 2 * ROWS), None) if not rank else (None, OneTensor())
        link = links[rank] = connect(members, source, destination, backend="staged")
        link.refit()
        link.refit(verify=True)
        link.close()
        return (source or destination).weight

    monkeypatch.setattr(SlotTransport, "tell", tell)
    with ThreadPoolExecutor(2) as pool:
        sent, served = pool.map(member, range(2))
    calls = ("close", "release", "refit", "connect")
    assert list(said.values()) == [
        f"trainer rank 0 cannot {call} while it is in another call (refit): call it again once that has returned"
        for call in calls
    ]
    assert torch.equal(served, sent)


class TwoSlots(OneTensor):
    """An engine's rank that serves what it has until another version is whole, as an adapter's."""

    def __init__(self):
        super().__init__()
        self.guard = Guard("engine", True)

    def begin(self):
        """Nothing: what was served before is served on."""


def test_a_rank_that_does_not_learn_how_a_refit_ended_serves_nothing_beside_others_that_do(monkeypatch):
    """As where the process that has the hub is killed while it answers."""
    address, together, dies, plain = f"127.0.0.1:{free_port()}", Barrier(3), Event(), Hub._answer

    def answer(self, wait, *of_wait):
        if dies.is_set() and (wait.key, wait.rank) == ("/commit", 2):
            self.members[2].connection.shutdown(SHUT_RDWR)
        plain(self, wait, *of_wait)

    def member(rank: int):
        members = RefitGroup.join(address, rank, 3, timeout=60)
        engine = TwoSlots() if rank else None
        link = connect(members, None if rank else OneShard(0, 2 * ROWS), engine)
        link.refit(version=1)
        together.wait(60)
        dies.set()
        said = caught(lambda: link.refit(version=2))
        return said, engine and (engine.guard.ready, engine.guard.version)

    monkeypatch.setattr(Hub, "_answer", answer)
    with ThreadPoolExecutor(3) as pool:
        trainer, first, second = pool.map(member, range(3))
    assert trainer == ("no error", None) and first == ("no error", (True, 2))
    assert "which serves the hub" in second[0] and second[1] == (False, None)


class InRounds(OneTensor):
    """An engine's rank that processes what arrives together with another, as ranks that find scales do."""

    def __init__(self, together: Barrier):
        super().__init__()
        self.staged_rounds, self.together = {"weight": 0}, together

    def process_round(self, number):
        self.together.wait(10)


def test_a_rank_whose_copies_fail_still_meets_the_other_rank_in_what_they_do_together(monkeypatch):
    """Else its next collective would be taken for the one that it has left out."""
    address, together, plain = f"127.0.0.1:{free_port()}", Barrier(2), SlotTransport.take

    def take(self, indices, receives):
        plain(self, indices, receives)
        if receives and (self.group.rank, self.group.what) == (2, "refit 2"):
            raise ReshardError("the trainer is gone")

    def member(rank: int):
        members = RefitGroup.join(address, rank, 3, timeout=60)
        source, engine = (None, InRounds(together)) if rank else (OneShard(0, 2 * ROWS), None)
        link = connect(members, source, engine, backend="staged")
        said = [caught(link.refit) for _ in range(3)]
        return said, (source or engine).weight

    monkeypatch.setattr(SlotTransport, "take", take)
    with ThreadPoolExecutor(3) as pool:
        (said, sent), *engines = pool.map(member, range(3))
    for told, served in ((said, sent), *engines):
        assert (told[0], told[2]) == ("no error", "no error") and "the trainer is gone" in told[1], told
        assert torch.equal(served, sent)


def test_tables_follow_slabs_that_lie_elsewhere_in_each_refit(monkeypatch):
    address, made, blockers, plain = f"127.0.0.1:{free_port()}", [], [], slots.PackedPair

    def pair(*arguments):
        made.append(plain(*arguments))
        return made[-1]

    def member(rank: int):
        members = RefitGroup.join(address, rank, 2, timeout=60)
        source, destination = (OneShard(0, 32), None) if not rank else (None, OneTensor())
        link = connect(members, source, destination, backend="staged", bucket_bytes=1 << 20)
        [staged] = [one for one in link.transports if one.reach.name == "staged"]
        states = []
        for _ in range(3):
            if source is not None:
                source.weight.copy_(torch.randn(32, COLUMNS))
            link.refit()
            states.append(
                ((source or destination).weight.clone(), *(start for start, *_ in staged.tables.values()))
            )
            blockers.append(mmap.mmap(-1, 1 << 20))  # where the slab was
        return states

    monkeypatch.setattr(slots, "PackedPair", pair)
    with ThreadPoolExecutor(2) as pool:
        sent, served = (zip(*states, strict=True) for states in pool.map(member, range(2)))
    for one, other in zip(*map(next, (sent, served)), strict=True):
        assert torch.equal(one, other)
    assert [len(set(starts)) for side in (sent, served) for starts in side] == [3, 3] and len(made) == 2


def gloo_threads(wanted: int | None = None) -> int:
    """How many threads Gloo's communicators of this process have, once there are no more than are wanted, or after ten
    seconds."""
    gc.collect()  # what other tests have left
    deadline = time.monotonic() + 10
    while True:
        names = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with suppress(OSError):  # it has ended meanwhile
                names.append(path.read_text())
        count = sum(name.startswith("pt_gloo") for name in names)
        if wanted is None or count <= wanted or time.monotonic() > deadline:
            return count
        time.sleep(0.01)


@pytest.mark.parametrize("fails", [True, False])
def test_a_failure_and_a_close_end_the_communicator_and_only_a_close_ends_the_link(fails, monkeypatch):
    """A kernel that waits for a dead partner has to end; where it does not, the driver would wait for it, or give it
    no more memory. Gloo's threads end, too, also where the closed link is kept."""
    together, threads = Barrier(2), gloo_threads()
    address, calls, plain = f"127.0.0.1:{free_port()}", [], nccl.abort
    for name in ("abandon", "drop", "free"):
        monkeypatch.setattr(BucketMemory, name, lambda self, name=name: calls.append(name))
    monkeypatch.setattr(nccl, "abort", lambda *arguments: calls.append("abort") or plain(*arguments))

    def refuse():
        raise ReshardError("a layer is broken")

    def member(rank: int):
        members = RefitGroup.join(address, rank, 2, timeout=60)
        source, destination = (OneShard(0, 32), None) if not rank else (None, OneTensor())
        link = connect(members, source, destination, backend="nccl", keep_mapped=True)
        if fails and destination is not None:
            monkeypatch.setattr(destination, "update_derived", refuse)
        said = caught(link.refit) if fails else link.refit()
        assert fails or gloo_threads() > threads
        together.wait(60)
        link.close()
        return said, caught(link.refit), link

    with ThreadPoolExecutor(2) as pool:
        said, after_close, links = zip(*pool.map(member, range(2)), strict=True)
    assert gloo_threads(threads) <= threads and all(link.closed for link in links)
    assert fails == all("a layer is broken" in str(one) for one in said), said
    assert all("this connection is closed: call connect again" in str(one) for one in after_close), (
        after_close
    )
    ended = ["abort", "drop"] if fails else ["free", "abort", "drop"]  # at the failure, or at the close
    assert sorted(calls) == sorted(ended * 2)


@pytest.mark.parametrize("backend", ["staged", "nixl"])
def test_a_byte_that_changes_in_a_slab_is_found_by_a_verification(backend, monkeypatch):
    address, spoiled, plain = f"127.0.0.1:{free_port()}", [], SlotTransport.tell

    def tell(self, step, lines):
        if step == "packed" and lines and not spoiled:
            spoiled.append(host_bytes(self.slab.address + 5, 1, 1, 1))
            spoiled[0] ^= 4
        plain(self, step, lines)

    def member(rank: int):
        members = RefitGroup.join(address, rank, 2, timeout=60)
        source, destination = (OneShard(0, rows=2 * ROWS), None) if not rank else (None, OneTensor())
        link = connect(members, source, destination, backend=backend)
        said = caught(lambda: link.refit(verify=True))
        state = destination and (destination.ready, destination.weight.clone())
        link.refit(verify=True)
        return said, state, (source or destination).weight

    monkeypatch.setattr(SlotTransport, "tell", tell)
    with ThreadPoolExecutor(2) as pool:
        (trainer, _, weight), (engine, (ready, torn), served) = pool.map(member, range(2))
    for said in (trainer, engine):
        assert "1 tensors did not arrive as they are in the trainer: weight" in said, said
    assert not ready and (torn != weight).sum() == 1 and torch.equal(served, weight)


def test_a_nixl_that_cannot_be_imported_is_none_and_the_log_says_why(monkeypatch, caplog):
    def broken():
        raise ImportError("detected CUDA 13 but nixl-cu13 is not installed")

    assert agent.installed_version() == metadata.version("nixl")
    monkeypatch.setattr(agent, "_nixl", broken)
    assert agent.installed_version.__wrapped__() == ""
    assert "NIXL is installed, and cannot be used: detected CUDA 13" in caplog.text


def test_an_agent_that_waits_for_others_takes_no_core():
    waiting, before = Agent(torch.device("cpu")), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    waiting.close()


def test_a_handle_of_a_slab_is_what_an_agent_says_or_nothing():
    one, other = Agent(torch.device("cpu")), Agent(torch.device("cpu"))
    slab = one.slab(1 << 16, in_gpu=True)  # and there is none
    found = AgentHandle.decode(slab.handle)
    assert found is not None and found[:3] == ("DRAM", 0, slab.address) and found.encode() == slab.handle
    for text in ("", slab.handle[1:], f"{slab.handle}0", slab.handle.replace("DRAM", "FILE"), "/proc/1/fd/3"):
        assert AgentHandle.decode(text) is None
    for described in (found.agent[:-9], b"x" * 100):
        with pytest.raises(ReshardError, match=r"^NIXL cannot reach rank 3 \(.*: use backend='nccl'$"):
            other.meet(described, "rank 3")
    one.close()
    other.close()


def test_a_report_as_a_dict_is_flat_as_loggers_of_metrics_want_it():
    plain = RefitReport(3, 0.5, 1.0, 2.0, {"local": 1, "staged": 3}, 5)
    assert plain.to_dict() == {
        "version": 3,
        "wait_seconds": 0.5,
        "transfer_seconds": 1.0,
        "total_seconds": 2.0,
        "received_bytes": 4,
        "received_bytes_local": 1,
        "received_bytes_staged": 3,
        "launches": 5,
    }
    verified = replace(plain, digest="bf16:0000000000003f2a")
    assert verified.to_dict() == plain.to_dict() | {"digest": verified.digest}
    changes = replace(
        verified, delta=RefitDelta(True, "changes since version 2", 0.01, 10, 100, 200)
    ).to_dict()
    assert {name: value for name, value in changes.items() if "delta" in name} == {
        "is_delta": True,
        "delta_reason": "changes since version 2",
        "delta_changed": 0.01,
        "delta_bytes": 10,
        "delta_whole_bytes": 100,
        "delta_kept_bytes": 200,
    }
    assert all(isinstance(value, bool | int | float | str) for value in changes.values())
