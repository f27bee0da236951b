"""Offload: a trainer that was moved to host memory and back is the same to the last bit, trains on
alike, and refits from where it is."""

import mmap
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from reshard import hf_to_mcore
from reshard.device.staging import BLOCK_BYTES, HostMemory, anonymous_memory
from tests.megatron.test_logits import flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A Hugging Face directory and a Megatron one, in bf16."""
    folder = tmp_path_factory.mktemp("offload")
    make(folder / "hf", "qwen3-moe", torch.bfloat16)
    hf_to_mcore(folder / "hf", folder / "mcore", transformer_impl="local")
    return str(folder / "hf"), str(folder / "mcore")


@pytest.fixture(scope="module")
def trained(pair):
    """A training on two data parallel ranks, between whom the optimizer is split; and one that is
    moved away between its steps."""
    flags = flags_at(Path(pair[1]), "")
    return [
        run_on_ranks(2, "steps", flags, pair[1], pair[0], move, module="offload_on_cpu")
        for move in (False, True)
    ]


def test_training_goes_on_as_if_nothing_had_been_moved(trained):
    for still, moved in zip(*trained, strict=True):
        assert moved["losses"] == still["losses"] and len(set(still["losses"])) == 3
        for step, held in enumerate(still["before"]):
            assert held.keys() == {"params", "grads", "optimizer"}
            assert moved["before"][step] == moved["after"][step] == held, "bit for bit"
        assert still["before"][0] != still["before"][1], "the control: training changes them"
        assert not moved["with a lost byte"], "the control: a byte counts"
        assert moved["dropped"] == [True, True, False, {0}]


def test_storages_are_really_freed_and_by_kind(trained):
    for said in trained[1]:
        _, away, *parts = said["sizes"]
        freed, nothing = said["freed"], {"params": 0, "grads": 0, "optimizer": 0}
        assert away == nothing and said["again"] == 0 and freed == said["back"]
        whole = said["sizes"][0]
        for without, with_params in (parts[:2], parts[2:]):
            assert without == with_params == nothing | {"params": whole["params"]}
        # bf16 parameters, fp32 gradients, and of the optimizer's fp32 main parameters and two
        # moments this rank's half
        assert freed == pytest.approx((1 + 2 + 3) * whole["params"], rel=0.05) and whole["params"] > 100_000


def test_host_memory_is_no_more_than_what_is_away_and_a_part_of_a_piece_of_each_kind(trained):
    for said in trained[1]:
        # Each of some ten storages begins at a multiple of 256 bytes.
        assert said["freed"] <= said["host"] <= said["freed"] + 3 * (1 << 12) + 40 * 256


def test_host_memory_of_what_is_needed_whole_fills_the_rest_of_a_piece():
    memory = HostMemory(pinned=False, spare=[])
    sizes = [BLOCK_BYTES // 2, BLOCK_BYTES // 4, 5 * BLOCK_BYTES // 2, BLOCK_BYTES, 1, 0]
    found = [memory.allocate(size) for size in sizes]
    assert [one.numel() for one in found] == sizes
    assert [piece.numel() for piece in memory.blocks] == [BLOCK_BYTES, 4 * BLOCK_BYTES]
    spans = sorted((one.data_ptr(), one.data_ptr() + one.numel()) for one in found if one.numel())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "none has another's bytes"
    kept = memory.blocks
    memory.release()
    [again] = memory.allocate_parts(1)
    assert any(again.data_ptr() == piece.data_ptr() for piece in kept), "used again"


def test_a_forked_process_gets_no_copy_of_what_is_pinned():
    plain = mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = anonymous_memory(1 << 21), plain
    addresses = [torch.frombuffer(one, dtype=torch.uint8).data_ptr() for one in memory]
    left_out, span = set(), range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            span = range(*(int(end, 16) for end in line.split()[0].split("-")))
        elif line.startswith("VmFlags:") and "dc" in line.split():
            left_out |= {address for address in addresses if address in span}
    assert left_out == {addresses[0]}, "and the control is copied"


def test_what_cannot_be_moved_is_refused_in_a_sentence(trained):
    nothing, no_list, no_optimizer, no_kind, foreign = trained[1][0]["refused"]
    assert nothing == "the trainer's list of models is empty"
    assert no_list == "models is a MegatronModel: give the list of chunks that the trainer holds"
    assert no_kind == "grads is 'dorp'; it is true or false"
    assert no_optimizer == "optimizer is a str: give Megatron's, or one of torch.optim"
    assert "lie in memory that is not torch's own" in foreign


def test_what_needs_the_memory_of_what_is_away_says_so_and_touches_nothing(trained):
    for rank, said in enumerate(trained[1]):
        *uses, mains, kept = (
            sentence.partition(f"process {1 - rank} of 2 failed: ")[2] or sentence
            for sentence in said["away"]
        )
        assert len(uses) == 4
        for sentence in uses:
            assert sentence.endswith(
                "has no memory, as after an offload: bring the parameters back first (reshard.onload, where "
                "reshard.offload has moved them)"
            )
        assert mains.startswith("the optimizer's main parameters have no memory, as after an offload")
        assert kept.startswith(
            "the optimizer keeps its main parameters to itself (use_precision_aware_optimizer)"
        )
        assert said["again after a load"] == said["freed"]


@pytest.fixture(scope="module")
def refitted(pair):
    """What a trainer that is away between two refits, and in them, leaves in a vLLM."""
    [said] = run_on_ranks(1, "refits", flags_at(Path(pair[1]), ""), pair, module="offload_on_cpu")
    return said


def test_a_refit_follows_a_trainer_that_was_away(refitted):
    said = refitted
    assert said["held"][1] == said["expected"] != said["held"][0]
    assert said["moved"]


def test_a_refit_reads_what_is_away_from_the_host(refitted):
    for held, away in zip(refitted["held"], refitted["from host"], strict=True):
        assert away["held"] == held != away["with another byte"], "the control: a byte of a copy counts"
        assert away["bytes"] == 0 and away["readable"] and not away["unreadable"]
        assert "has no memory, and a refit reads from cpu" in away["lost"]
        assert away["held where the copy is now"] == held
        assert "lies in host memory that is not pinned, and a refit reads from cuda:0" in away["not pinned"]
        assert away["readable beside buffers"] and away["held beside buffers"] == held


def test_what_is_gathered_only_when_it_is_needed_is_gathered_before_it_is_read(pair, tmp_path):
    out = str(tmp_path / "out")
    for said in run_on_ranks(2, "put_off", flags_at(Path(pair[1]), ""), pair, out, module="offload_on_cpu"):
        assert said["found"] == said["expected"]
        # The control: what a rank holds after a step is in part what it was before.
        assert all(held != gathered for held, gathered in zip(said["held"], said["gathered"], strict=True))
        sentence, seconds = said["one is wrong"]
        assert "version is 'x', which is not a whole number" in sentence and seconds < 60
        assert "was taken off the chunks that are given here" in said["bare"] and said["wrapped"]
