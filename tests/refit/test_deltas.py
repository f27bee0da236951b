"""Refits that send what changed since the last: into the engine bit for bit what sends all, and all again by
itself wherever a member has other weights than those that the changes build on."""

import gc
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.delta.chunks import WORD, ChunkSizes, Words
from reshard.delta.forms import BLOCK
from reshard.device.memory import Region
from reshard.refit import RefitGroup, connect
from reshard.refit.changes import buckets
from reshard.refit.changes.exchange import ChangesExchange
from reshard.refit.codecs import codec_between
from reshard.refit.codecs.places import PLACES
from reshard.refit.copying.flows import Outgoing
from reshard.refit.copying.packing import PackedPair
from reshard.refit.copying.tables import CODEC, COLUMNS, DST, DST_PITCH, ROWS, SRC, WIDTH, empty_table
from reshard.refit.options import ConnectOptions
from reshard.refit.protocol.deltas import DeltaState, makes_sense
from tests.on_cpu.refit_deltas_on_cpu import DTYPES, PITCH, SHAPE, Served, Shards
from tests.starting.ranks import caught, free_port, run_on_ranks
from tests.tools.whole_model import ServedModel, TrainedModel, Training


def refits(member, engines: int = 1, **options) -> list:
    """Run `member(link, source or destination)` on two trainer's ranks and so many engine's, as threads."""
    address, size = f"127.0.0.1:{free_port()}", 2 + engines

    def run(rank: int):
        group = RefitGroup.join(address, rank, size, timeout=60)
        side = Shards(rank) if rank < 2 else Served()
        sides = (side, None) if rank < 2 else (None, side)
        with torch.random.fork_rng():
            link = connect(group, *sides, **{"bucket_bytes": 2 << 20, "delta": True} | options)
            result = member(link, side)
        link.close()
        assert not any(changes.buckets for changes in link.chain.changes)
        return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def same_as(trainers, served) -> bool:
    """Return whether an engine has the bits of what the trainers' ranks hold."""
    expected = [
        torch.cat(parts).to(dtype) for (_, dtype), *parts in zip(DTYPES.values(), *trainers, strict=True)
    ]
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(expected, served, strict=True)
    )


def state(side) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in side.tensors] if isinstance(side, Shards) else side.now()


def test_twenty_chained_deltas_leave_what_sending_all_leaves_and_replicas_share_what_is_kept():
    def member(link, side):
        states = []
        for version in range(21):
            changed = side.step(0.0 if version == 7 else 0.01) if isinstance(side, Shards) else []
            report = link.refit(verify=version in (1, 20))
            states.append((state(side), changed, report))
        return states, link.describe()

    (first, kept), (second, _), *engines = refits(member, engines=2)
    size = SHAPE[0] * SHAPE[1]
    assert kept["delta"] is True and kept["kept_bytes"] == size * (
        2 + 2 + 2 + 4
    )  # of one engine, not of both
    for served, described in engines:
        assert described["kept_bytes"] == 0
        for version, (one, other, into) in enumerate(zip(first, second, served, strict=True)):
            assert same_as((one[0], other[0]), into[0]), version
            if version:
                assert not same_as((first[version - 1][0], second[version - 1][0]), into[0]) or version == 7
            delta, received = one[2].delta, into[2].received_bytes["nccl"]
            assert delta.is_delta == into[2].delta.is_delta == (version > 0)
            if version:
                assert delta.reason == f"changes since version {version}"
                # A change of the fraction's fourth bit is one of a word, of an fp32 in its upper half.
                assert delta.changed == sum(one[1]) / (size * 5)
                assert received == delta.delta_bytes + other[2].delta.delta_bytes < size * 20 / 10
            else:
                assert "trainer rank 0: it has had no refit yet" in delta.reason
                assert received == 2 * size * 10


def lose(link, side, how: str) -> None:
    if isinstance(side, Shards):
        return
    if how == "discarded":
        side.guard.lose("no weights")
    elif how == "loaded":
        for tensor in side.wide.values():
            tensor[:, 2 : 2 + SHAPE[1]] = 0
        side.guard.loaded()
    elif how == "of an earlier refit":
        link.chain.holds -= 1
    elif how == "moved":
        side.wide = {name: tensor.clone() for name, tensor in side.wide.items()}
        side.regions = {name: Region(tensor, 2, PITCH) for name, tensor in side.wide.items()}


@pytest.mark.parametrize("how", ["discarded", "loaded", "moved", "of an earlier refit"])
def test_an_engine_that_has_other_weights_gets_all_of_them(how):
    def member(link, side):
        seen = []
        for version in range(4):
            if isinstance(side, Shards):
                side.step(0.02)
            if version == 2:
                lose(link, side, how)
            report = link.refit()
            seen.append((report.delta.is_delta, report.delta.reason, state(side)))
        return seen

    first, second, served = refits(member)
    assert [is_delta for is_delta, *_ in served] == [False, True, False, True]
    assert first[2][1] == (
        "all is sent: members have weights of different refits"
        if how == "of an earlier refit"
        else "all is sent: inference rank 2: its weights were moved, discarded, or written by others since"
    )
    for (*_, one), (*_, other), (*_, into) in zip(first, second, served, strict=True):
        assert same_as((one, other), into)


def test_what_is_written_raw_into_an_engine_between_deltas_is_seen_by_a_verification_alone():
    """Neither torch's count of writes nor the engine's guard knows of it."""

    def member(link, side):
        link.refit()
        if isinstance(side, Served):
            weight = side.wide["single"]
            counts = weight._version, side.guard.writes
            weight.data[5, 9] += 1
            assert counts == (weight._version, side.guard.writes)
        unseen, after = link.refit(), state(side)
        said = caught(lambda: link.refit(verify=link.group.rank == 0))  # one that asks is enough
        return unseen.delta.is_delta, after, said, link.refit().delta.is_delta, state(side)

    first, second, served = refits(member)
    for is_delta, _, said, healed_by_a_delta, _ in (first, second, served):
        assert is_delta and not healed_by_a_delta
        assert "1 tensors did not arrive as they are in the trainer: single" in said
    assert not same_as((first[1], second[1]), served[1]) and same_as((first[-1], second[-1]), served[-1])


PLAIN_CHANGES, PLAIN_COMPARED = buckets.SentBuckets.changes, buckets.SentBuckets._compared


def too_early(self, index, segments, since, sizes):
    """Send changes as if they built on an earlier refit."""
    return PLAIN_CHANGES(self, index, segments, since - 1, sizes)


def torn(self, index, segments, since, sizes):
    """Send changes that say another number than they are."""
    made = PLAIN_CHANGES(self, index, segments, since, sizes)
    for payload in made.values():
        if len(payload):
            payload.view(torch.int64)[4] += 1
    return made


def withheld(self, key, segment):
    """Find one change less than there is."""
    found = PLAIN_COMPARED(self, key, segment)
    first = found.compared.mask.nonzero()[:1, 0]
    found.compared.mask[first] = False
    found.compared.blocks[first // BLOCK] -= 1
    fewer = buckets.HostChanges(segment, segment)
    fewer.compared = found.compared
    fewer.changed = found.compared.changed
    fewer.sizes = ChunkSizes.of(len(segment) // WORD, fewer.changed.numpy())
    fewer.total = torch.tensor([buckets.header_bytes(len(segment)) + fewer.sizes.total])
    return fewer


FAULTS = {
    "too early": (
        buckets.SentBuckets,
        "changes",
        too_early,
        r"sends changes of bucket 0 since transaction \d+, where",
    ),
    "torn": (buckets.SentBuckets, "changes", torn, "sends changes of bucket 0 that make no sense"),
    "withheld": (
        buckets.SentBuckets,
        "_compared",
        withheld,
        "1 tensors did not arrive as they are in the trainer: plain",
    ),
}


@pytest.mark.parametrize(("owner", "name", "fault", "message"), FAULTS.values(), ids=FAULTS)
def test_changes_that_are_not_those_that_are_due_fail_everywhere_and_the_next_refit_sends_all(
    owner, name, fault, message, monkeypatch
):
    def member(link, side):
        link.refit()
        if isinstance(side, Shards):
            side.step(0.02)
        if link.group.rank == 0:
            monkeypatch.setattr(owner, name, fault)  # nobody sends before all have come
        said = caught(lambda: link.refit(verify=True))
        monkeypatch.undo()
        ready = isinstance(side, Shards) or side.ready
        healed, after = link.refit(verify=True), link.refit()
        return said, ready, healed.delta, after.delta, state(side)

    gc.collect()
    gc.disable()
    try:
        first, second, served = refits(member)
        assert not any(type(one) is ChangesExchange for one in gc.get_objects()), "with its buffers"
    finally:
        gc.enable()
    for said, _, healed, after, _ in (first, second, served):
        assert re.search(message, said), said
        assert not healed.is_delta and after.is_delta and "its last refit failed" in healed.reason
    assert not served[1] and same_as((first[-1], second[-1]), served[-1])


@pytest.mark.parametrize("sends_changes", [True, False])
def test_all_hear_at_once_of_a_rank_that_fails_while_they_wait_for_its_bytes(sends_changes):
    """Gloo's own wait would last for the time limit, and the rank that has failed would call in vain meanwhile."""

    def broken(*_):
        raise ReshardError("a kernel is broken")

    def member(link, side):
        link.refit()
        [transport] = [one for one in link.transports if one.reach.name == "nccl"]
        if link.group.rank == 1:
            transport._packed = transport._run_whole = broken
        start = time.monotonic()
        said, seconds = caught(link.refit), time.monotonic() - start
        if link.group.rank == 1:
            del transport._packed, transport._run_whole
        link.refit()
        return said, seconds, state(side)

    first, second, served = refits(member, delta=sends_changes)
    for said, seconds, _ in (first, second, served):
        assert "a kernel is broken" in said and seconds < 20, (said, seconds)
    assert same_as((first[-1], second[-1]), served[-1])


def test_a_trainers_rank_that_is_killed_while_it_finds_what_changed_is_named_and_nothing_torn_is_served():
    first, _, (said, ready, version) = run_on_ranks(
        3, "dying", free_port(), module="refit_deltas_on_cpu", may_die=True
    )
    for sentence in (first[0], said):
        assert re.search(r"(^|: )trainer rank 1 is gone", sentence), sentence
    assert (ready, version) == (False, None)


def test_rows_of_odd_lengths_at_odd_addresses_are_written_byte_by_byte():
    random = np.random.default_rng(0)
    memory = torch.from_numpy(random.integers(0, 256, 4096, np.uint8))
    before, start = memory.clone(), memory.data_ptr()
    # Offset in the bucket, of the first byte in memory, rows, bytes of a row, and pitch; and a cast.
    rows = [
        (4, 1, 5, 7, 11),
        (48, 100, 1, 13, 0),
        (64, 200, 4, 8, 16),
        (96, 303, 3, 6, 64),
        (128, 1024, 2, 32, 128),
    ]
    table = np.zeros((len(rows), COLUMNS), np.int64)
    for row, (offset, at, n, width, pitch) in zip(table, rows, strict=True):
        row[[SRC, DST, ROWS, WIDTH, DST_PITCH]] = offset, start + at, n, width, pitch
    table[-1, CODEC] = codec_between("bfloat16", "float32")
    bucket = torch.from_numpy(random.integers(0, 256, 160, np.uint8))
    bucket[128:].view(torch.bfloat16)[:] = torch.arange(16)
    expected = before.clone()
    for offset, at, n, width, pitch in rows[:-1]:
        for r in range(n):
            expected[at + r * pitch : at + r * pitch + width] = bucket[
                offset + r * width : offset + (r + 1) * width
            ]
    for r in range(2):
        cast = torch.arange(8 * r, 8 * r + 8).float().view(torch.uint8)
        expected[1024 + 128 * r : 1056 + 128 * r] = cast
    served = buckets.ServedBucket(table[::-1].copy(), torch.device("cpu"))
    served.write(Words(torch.arange(80), bucket.view(torch.int16)))
    assert torch.equal(memory, expected) and not torch.equal(memory, before)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [([32, 48], [True]), ([32, 40], [False]), ([40, 32], [False]), ([64, 30, 64], [True, False, True])],
)
def test_a_buffer_is_said_to_be_full_only_if_nothing_lies_between_what_is_packed(widths, expected):
    table = empty_table(len(widths))
    table[:, [SRC, ROWS, WIDTH]] = [(4096 * index, 1, width) for index, width in enumerate(widths)]
    none = np.zeros((len(widths), 3), np.int64)
    pair = PackedPair(
        Outgoing(table, none[:, 0], none, np.zeros((0, PLACES), np.int64)),
        SRC,
        64 if len(expected) > 1 else 1 << 16,
    )
    assert pair.is_dense.tolist() == expected


SENSELESS = [None, {}, {"holds": -1}, {"holds": True}, {"why": "x" * 300}, {"more": 1}]


@pytest.mark.parametrize("fields", SENSELESS, ids=str)
def test_what_a_member_says_of_its_deltas_is_checked(fields):
    plain = vars(DeltaState(3, ""))
    assert makes_sense(plain)
    assert not makes_sense(plain | fields if fields else fields)


def test_options_that_cannot_be_are_refused():
    for adapter in ("", " policy", "policy@7", 3):  # members tell each other of none as ""
        with pytest.raises(ReshardError, match="which is no name: give the one that requests ask vLLM for"):
            ConnectOptions(adapter=adapter).checked()
    for value in (1, "auto", None):
        with pytest.raises(ReshardError, match="delta is .*; it is true or false"):
            ConnectOptions(delta=value).checked()


def test_steps_of_a_trained_model_change_few_elements_and_their_chain_leaves_its_bits(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained, num_hidden_layers=1, dtype=torch.float32)
    text = (Path(__file__).parent.parent.parent / "README.md").read_text()
    tokens = torch.tensor(AutoTokenizer.from_pretrained(trained)(text)["input_ids"])
    training, served = Training(model, tokens, 1e-6, 32), ServedModel(model)
    address = f"127.0.0.1:{free_port()}"

    def member(rank: int):
        group = RefitGroup.join(address, rank, 2, timeout=60)
        link = connect(
            group,
            None if rank else TrainedModel(model),
            served if rank else None,
            delta=True,
            bucket_bytes=1 << 28,
        )
        seen = []
        for _ in range(4):
            if not rank:
                training.step()
            report = link.refit().delta
            now = (
                served.tensors
                if rank
                else {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
            )
            seen.append((report, {name: crc32(now[name].detach().view(torch.uint8).numpy()) for name in now}))
        link.close()
        return seen

    with ThreadPoolExecutor(2) as pool:
        sent, arrived = pool.map(member, range(2))
    assert [bits for _, bits in sent] == [bits for _, bits in arrived]
    assert len({str(bits) for _, bits in sent}) == 4
    reports = [report for report, _ in sent]
    shares = [report.changed for report in reports[1:]]
    assert all(report.is_delta for report in reports[1:]) and 1e-4 < min(shares) < max(shares) < 0.05, shares
    assert max(report.delta_bytes / report.whole_bytes for report in reports[1:]) < 0.1
