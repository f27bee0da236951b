"""Replicas that read from each other what they want of a trainer's rank, by NIXL and through staging: every bit
arrives, and leaves the trainer once."""

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.core.placement import Placement
from reshard.refit import RefitGroup, connect, connecting
from reshard.refit.agreement import Agreement
from reshard.refit.copying.copies import host_bytes
from reshard.refit.copying.tables import TILE_BYTES
from reshard.refit.relays import Line
from reshard.refit.routes import Peer
from reshard.refit.transports import TRANSPORTS
from reshard.refit.transports.slots import SlotTransport, partners_in
from tests.megatron.test_logits import PP
from tests.on_cpu.refit_deltas_on_cpu import DTYPES
from tests.refit.test_block_digests import MATRICES, Halves, InBlocks
from tests.refit.test_deltas import Served, Shards, refits, same_as, state
from tests.refit.test_transports import COLUMNS, OneShard, OneTensor
from tests.starting.ranks import caught, free_port, run_on_ranks
from tests.tools.refits import refit

REPLICAS = 4
ROUNDS = 7
ROWS = ROUNDS * TILE_BYTES // (2 * COLUMNS)  # that take so many rounds of one tile
PULLS = pytest.mark.parametrize("backend", ["staged", "nixl"])


def members(sides, timeout: float = 60, **options):
    """Connect members with these sides, as threads, and call `work(link)` on each; the results by rank."""
    address = f"127.0.0.1:{free_port()}"

    def run(rank: int, work):
        group = RefitGroup.join(address, rank, len(sides), timeout=timeout)
        link = connect(group, *sides[rank], **options)
        result = work(link)
        link.close()
        return result

    def of_all(work):
        with ThreadPoolExecutor(len(sides)) as pool:
            return list(pool.map(run, range(len(sides)), [work] * len(sides)))

    return of_all


def transport_of(link, backend: str) -> SlotTransport:
    [transport] = [one for one in link.transports if one.reach.name == backend]
    return transport


def count_packed(link, backend: str) -> list[int]:
    """The bytes that this member packs for others in a refit, which are counted from now on."""
    transport, counts = transport_of(link, backend), []
    plain = transport.begin_packing

    def counted(sends, index):
        counts.extend(rounds[index].size for rounds in sends.values() if index < len(rounds))
        return plain(sends, index)

    transport.begin_packing = counted
    return counts


def replicas_of(trainers, engines, backend: str, choice: str):
    """Three refits of these, the second with a verification; by rank the bytes received in each, those of each round
    that was packed, and how the link describes itself. All engines are compared with the trainers after each."""
    together = Barrier(len(trainers) + len(engines))
    sides = [*((trainer, None) for trainer in trainers), *((None, engine) for engine in engines)]

    def work(link):
        sent, seen = count_packed(link, backend), []
        for version in (1, 2, 3):
            if link.group.rank < 2:
                trainers[link.group.rank].weight.copy_(torch.randn(ROWS, COLUMNS))
            before = len(sent)
            report = link.refit(version, verify=version == 2)
            seen.append((report.received_bytes, sent[before:]))
            together.wait(60)
            expected = torch.cat([trainer.weight for trainer in trainers])
            assert all(torch.equal(engine.weight, expected) for engine in engines)
            expected.view(torch.int16)[-1, -1] ^= 1
            assert not any(torch.equal(engine.weight, expected) for engine in engines)
            together.wait(60)
        return seen, link.describe()

    # Slots of one tile for the member with the most lines.
    lines = REPLICAS if choice == "never" else 2
    return members(sides, backend=backend, relays=choice, bucket_bytes=2 * lines * TILE_BYTES)(work)


@PULLS
@pytest.mark.parametrize(("choice", "copies"), [("always", 1), ("never", REPLICAS)])
def test_what_replicas_want_alike_leaves_the_trainer_once_and_arrives_in_each(backend, choice, copies):
    size = 2 * COLUMNS * ROWS
    trainers = [OneShard(rank, ROWS) for rank in range(2)]
    results = replicas_of(trainers, [OneTensor(2 * ROWS) for _ in range(REPLICAS)], backend, choice)
    to = [f"inference rank {rank}" for rank in range(2, 2 + REPLICAS)]
    for seen, described in results[:2]:
        assert all(sum(sent) == copies * size and len(sent) == copies * ROUNDS for _, sent in seen)
        sends = [(one["to"], one["route"]) for one in described["sends"]]
        assert sends == ([(to, backend)] if choice == "always" else [([name], backend) for name in to])
    for place, (seen, described) in enumerate(results[2:]):
        relayed = choice == "always" and place > 0
        for received, sent in seen:
            some = {route: size for route, size in received.items() if size}
            assert some == {"relay" if relayed else backend: 2 * size} and not sent
        through = [to[place - 1]] if relayed else []
        assert [route["through"] for route in described["routes"]] == [through] * 2


class Part(Served):
    """A replica that serves only some of the tensors, as one of another pipeline stage."""

    def __init__(self, names) -> None:
        super().__init__()
        self.regions = {name: self.regions[name] for name in names}
        placement = self.placement
        self.placement = Placement(
            {name: placement.shapes[name] for name in names},
            {name: placement.tensors[name] for name in names},
        )


@PULLS
def test_ranks_that_want_some_of_the_same_pass_that_on_in_several_lines_between_two(backend):
    names = [*DTYPES]
    wanted = [names, names[:3], names[:1], [names[0], names[2]]]
    trainers, engines = [Shards(rank) for rank in range(2)], [Part(of_rank) for of_rank in wanted]
    sides = [*((trainer, None) for trainer in trainers), *((None, engine) for engine in engines)]

    together = Barrier(len(sides))

    def work(link):
        sent, totals = count_packed(link, backend), []
        for version in (1, 2, 3):
            if link.group.rank < 2:
                trainers[link.group.rank].step(0.05)
            before = len(sent)
            link.refit(version, verify=version != 2)
            totals.append(sum(sent[before:]))
            together.wait(60)
            rows = zip(DTYPES, *(state(trainer) for trainer in trainers), strict=True)
            expected = {name: torch.cat(parts).to(DTYPES[name][1]) for name, *parts in rows}
            for engine, of_rank in zip(engines, wanted, strict=True):
                served = dict(zip(names, engine.now(), strict=True))
                for name in names:
                    same = torch.equal(served[name], expected[name])
                    assert same == (name in of_rank), (version, name)
            together.wait(60)
        return totals, transport_of(link, backend)

    results = members(sides, backend=backend, relays="always", bucket_bytes=4 << 20)(work)
    size = 64 * 96
    assert all(totals == [size * (2 + 2 + 2 + 4)] * 3 for totals, _ in results[:2]), "each tensor once"
    between = [partner for partner in results[2][1].readers.values() if partner.rank == 3]
    assert [partner.number for partner in between] == [*range(6)], "three lines of each trainer's rank"


def test_both_ends_number_the_lines_between_them_alike():
    lines = [Line(1, (2, 3)), Line(0, (2, 3, 4)), Line(0, (2, 3)), Line(0, (2, 4))]
    after, before = (
        partners_in({line: line.after(2) for line in reversed(lines)}),
        partners_in({line: line.before(3) for line in lines if 3 in line.ranks}),
    )
    assert {line: after[line].number for line in before} == {
        line: partner.number for line, partner in before.items()
    }
    assert after[Line(0, (2, 4))] == (4, 0) and after[Line(1, (2, 3))] == (3, 2)


@PULLS
def test_lines_that_go_opposite_ways_between_the_same_ranks_wait_for_nobody_in_a_circle(backend, monkeypatch):
    """Of two trainers on two hosts that serve, too, with an engine beside each: a line begins at the trainer's host."""
    plain_agreement = connecting.agreement_of

    def on_two_hosts(*arguments):
        agreed = plain_agreement(*arguments)
        hosts = agreed.peers[0].host, "elsewhere"
        return replace(agreed, peers=[p._replace(host=hosts[i % 2]) for i, p in enumerate(agreed.peers)])

    delays, plain_tell = random.Random(3), SlotTransport.tell

    def late(self, step, lines):
        time.sleep(delays.random() * 0.003)
        plain_tell(self, step, lines)

    monkeypatch.setattr(connecting, "agreement_of", on_two_hosts)
    monkeypatch.setattr(SlotTransport, "tell", late)
    if backend == "staged":  # as if the two hosts were one for it
        monkeypatch.setattr(
            Agreement,
            "route",
            lambda self, trainer, engine, exported: "local" if trainer == engine else "staged",
        )
        monkeypatch.setattr(
            Agreement,
            "relay_route",
            lambda self, trainer, engine, exported: "" if trainer == engine else "staged",
        )
    trainers, engines = [OneShard(rank, ROWS) for rank in range(2)], [OneTensor(2 * ROWS) for _ in range(4)]
    sides = [*zip(trainers, engines, strict=False), *((None, engine) for engine in engines[2:])]

    together = Barrier(len(sides))

    def work(link):
        for version in range(1, 6):
            if link.group.rank < 2:
                trainers[link.group.rank].weight.copy_(torch.randn(ROWS, COLUMNS))
            link.refit(version)
            together.wait(60)
            expected = torch.cat([trainer.weight for trainer in trainers])
            assert all(torch.equal(engine.weight, expected) for engine in engines)
            together.wait(60)
        return sorted(transport_of(link, backend).incoming)

    bucket_bytes = 8 * TILE_BYTES
    results = members(sides, timeout=20, backend=backend, relays="always", bucket_bytes=bucket_bytes)(work)
    assert results[2] == [Line(0, (2, 1, 3)), Line(1, (3, 0, 2))], "2 is before 3, and 3 before 2"


@PULLS
def test_blocks_come_down_a_line_as_the_trainer_has_made_them(backend):
    """Also those whose parts two trainer's ranks have, which each replica puts together itself."""
    engines = [InBlocks() for _ in range(3)]
    sides = [(Halves(0), None), (Halves(1), None), *((None, engine) for engine in engines)]

    def work(link):
        report = link.refit(verify=True)
        if link.group.rank == 3:
            engines[1].spoil = lambda: engines[1].flip(engines[1].codes, "strips")
        torn = caught(lambda: link.refit(verify=True))
        engines[1].spoil = lambda: None
        link.refit(verify=True)
        return report.received_bytes, torn

    results = members(sides, backend=backend, relays="always", bucket_bytes=1 << 20)(work)
    assert all("1 tensors did not arrive as they are in the trainer: strips" in torn for _, torn in results)
    received = [{route: size for route, size in one.items() if size} for one, _ in results[2:]]
    assert [[*one] for one in received] == [[backend], ["relay"], ["relay"]]
    assert len({*(size for one in received for size in one.values())}) == 1
    assert [name for engine in engines for name in MATRICES if not engine.expected(name)] == []


@PULLS
def test_a_byte_that_changes_in_a_replicas_slab_is_found_by_a_verification(backend, monkeypatch):
    """And the same without one is not: the check is what finds it. Who is before that replica has the right bits."""
    spoils, plain = set(), SlotTransport.tell

    def tell(self, step, lines):
        if step == "packed" and lines and self.group.rank == 3 and self.group.what in spoils:
            spoils.remove(self.group.what)
            host_bytes(self.slab.address + 5, 1, 1, 1)[...] ^= 4
        plain(self, step, lines)

    monkeypatch.setattr(SlotTransport, "tell", tell)
    spoils |= {"refit 2", "refit 3"}

    def member(link, side):
        link.refit()
        unseen = caught(link.refit)
        torn = state(side)
        seen = caught(lambda: link.refit(verify=True))
        ready = isinstance(side, Shards) or side.ready
        return unseen, torn, seen, ready, caught(lambda: link.refit(verify=True)), state(side)

    first, second, *engines = refits(member, REPLICAS, delta=False, backend=backend, relays="always")
    for unseen, _, seen, _, healed, _ in (first, second, *engines):
        assert unseen == healed == "no error", (unseen, healed)
        assert "did not arrive as they are in the trainer" in seen
    assert [same_as((first[1], second[1]), torn) for _, torn, *_ in engines] == [True, False, False, False]
    assert not any(ready for *_, ready, _, _ in engines)
    assert all(same_as((first[-1], second[-1]), served) for *_, served in engines)


@PULLS
def test_a_replica_that_fails_ends_the_refit_for_all_and_the_next_brings_everything(backend):
    def member(link, side):
        link.refit()
        transport = transport_of(link, backend)

        def broken(*_):
            raise ReshardError("a relay is broken")

        if link.group.rank == 3:
            transport.end_fetch = broken
        said = caught(link.refit)
        if link.group.rank == 3:
            del transport.end_fetch
        ready = isinstance(side, Shards) or side.ready
        link.refit(verify=True)
        return said, ready, state(side)

    first, second, *engines = refits(member, REPLICAS, delta=False, backend=backend, relays="always")
    assert all("a relay is broken" in said for said, *_ in (first, second, *engines))
    assert not any(ready for _, ready, _ in engines)
    assert all(same_as((first[-1], second[-1]), served) for *_, served in engines)


@PULLS
@pytest.mark.parametrize("late", [0, 2], ids=["the trainer", "the second"])
def test_who_stalls_in_a_line_is_named_and_not_those_who_wait_for_it(backend, late, monkeypatch):
    """Also where the last of the line waits for one that waits itself."""
    limit, what = 3, ("end_packing" if not late else "end_fetch")
    [kind] = [kind for kind in TRANSPORTS if kind.reach.name == backend]
    plain, calls = getattr(kind, what), []

    def stalling(self, *arguments):
        if self.group.rank == late and self.group.what == "refit 2":
            calls.append(arguments)
            if len(calls) == 3:
                time.sleep(limit + 2)
        return plain(self, *arguments)

    monkeypatch.setattr(kind, what, stalling)
    engines = [OneTensor(ROWS) for _ in range(3)]
    sides = [(OneShard(0, ROWS), None), *((None, engine) for engine in engines)]

    def work(link):
        link.refit()
        link.group.timeout = limit
        return caught(link.refit)

    said = members(sides, backend=backend, relays="always", bucket_bytes=2 * TILE_BYTES)(work)
    name = f"{'inference' if late else 'trainer'} rank {late}"
    for rank, sentence in enumerate(said):
        if rank != late:
            assert re.search(rf"(^|: ){name} (is silent|did not reach)", sentence), sentence
    assert not any(engine.ready for engine in engines)


PATIENCE = 30  # seconds that one waits for another: only where a death is not seen


@pytest.mark.parametrize(("backend", "victim", "moment"), [
    ("staged", 0, "end_packing"),  # the trainer, while what it has packed goes down the line
    ("staged", 2, "end_fetch"),  # the second of three, of which the third reads
    ("nixl", 2, "tell"),  # the same, when it has the round, before it says so
    ("nixl", 1, "begin_fetch"),  # the first, while it is read
    ("staged", 3, "take"),  # the last
])  # fmt: skip
def test_a_member_that_is_killed_in_the_middle_of_a_line_is_named_in_time_and_the_others_go_on_without_it(
    backend, victim, moment
):
    ports = [free_port(), free_port()]
    results = run_on_ranks(
        4, "dying", ports, backend, victim, moment, PATIENCE, module="refit_relays_on_cpu", may_die=True
    )
    assert results[victim] is None, "it has died"
    name = f"{'trainer' if not victim else 'inference'} rank {victim}"
    others = [results[rank] for rank in range(4) if rank != victim]
    for said, took, ready, weight in others:
        assert name in said and took < PATIENCE / 2 and not ready, (said, took, ready)
        assert not victim or torch.equal(weight, others[0][-1])


# Experts, of which each has some, beside an attention that both have; and layers that take turns in a slab of the
# engine's, which vLLM then quantizes.
@pytest.mark.parametrize(("variant", "parallel", "trainers", "engine", "options", "ways"), [
    ("qwen3-moe", f"{PP} 2", 2, {}, {"backend": "nixl", "bucket_bytes": 1 << 20}, {"nixl", "relay"}),
    ("qwen2", "", 1, {"quantization": "fp8_per_tensor"},
     {"backend": "staged", "bucket_bytes": 1 << 19, "round_bytes": 50_000}, {"relay"}),
])  # fmt: skip
def test_replicas_of_vllm_have_what_its_own_loader_makes_of_the_export(
    variant, parallel, trainers, engine, options, ways, converted, tmp_path
):
    replicas = {"tp": 1, "dp": 2} | engine
    reports = refit(
        converted(variant), parallel, trainers, replicas, 2, False, tmp_path, relays="always", **options
    )
    came = [received_by(of_rank[-1]) for of_rank in reports[-2:]]
    assert came == [{options["backend"]}, ways]


def received_by(report: dict) -> set[str]:
    """The routes by which a rank got something."""
    word = "received_bytes_"
    return {name.removeprefix(word) for name, size in report.items() if name.startswith(word) and size}


def test_lines_have_ranks_of_one_way_and_auto_passes_on_where_that_gains():
    trainer = Peer("trainer", "a", "namespaces", 0, 1, "cuda", "GPU 0", "1.5.1", True)
    peers = [trainer, *(trainer._replace(name=f"engine {i}", pid=9 + i, gpu=f"GPU {i}") for i in range(1, 5))]
    peers[3:] = [peer._replace(host="b", nixl="") for peer in peers[3:]]
    agreed = Agreement(0, peers, [0], [1, 2, 3, 4], "auto", 1 << 20, False)
    hidden = replace(agreed, unmapped={(0, rank): "it could not" for rank in (1, 2)})
    assert agreed.relaying(0, False, range(1, 5)) == {3: "nccl", 4: "nccl"}, "staged gains nothing alone"
    for shared, relays, staged in ((False, "always", True), (True, "auto", True), (False, "auto", False)):
        chosen = replace(agreed, backend="staged", shared=shared, relays=relays, peers=peers[:3])
        assert chosen.relaying(0, False, [1, 2]) == (dict.fromkeys((1, 2), "staged") if staged else {})
    assert replace(agreed, backend="nixl").relaying(0, True, [1, 2]) == {1: "nixl", 2: "nixl"}
    assert replace(agreed, backend="cuda_ipc", relays="always").relaying(0, True, [1, 2]) == {}
    assert hidden.relaying(0, True, range(1, 5)) == dict.fromkeys(range(1, 5), "nccl")
