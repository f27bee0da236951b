"""What arrives is checked: one message of a connect or a refit spoiled at a time, among real
models, leads to a sentence on every member or to the right bits, and never to other bytes.

RESHARD_TEST_MUTATIONS=1000 RESHARD_TEST_SEED=7 .venv/bin/python -m pytest
tests/refit/test_refit_messages.py    # as long as one likes
"""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, Part
from reshard.refit.codecs import block_codec, codec_between
from reshard.refit.protocol.buckets import most_buckets
from reshard.refit.protocol.encoding import pack_array, pack_json, unpack_array, unpack_json
from reshard.refit.protocol.held import ShardSizes, names_held, pack_held, unpack_held
from reshard.refit.protocol.memory import TrainerMemory, check_regions
from reshard.refit.protocol.requests import check_pieces
from reshard.refit.protocol.slab import LineLoad, SlabLocation, exchange_loads
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import free_port, run_on_ranks

MUTATIONS, SEED = (
    int(os.environ.get("RESHARD_TEST_MUTATIONS", "60")),
    int(os.environ.get("RESHARD_TEST_SEED", "0")),
)
SECONDS = 8  # that a member waits for another

# variant, Megatron's layout, vLLM's, ranks on either side, in the same processes, how to connect
WAYS = {
    "the same processes": ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", dict(tp=2), True, {}),
    "nccl": ("qwen3", f"{TP} 2", dict(tp=2), False, {"delta": True}),
    "staged": ("qwen3", f"{PP} 2", dict(tp=2), False, {"backend": "staged", "bucket_bytes": 4 << 16}),
    "relayed": ("qwen3", f"{PP} 2", dict(tp=1, dp=2), False,
                {"backend": "staged", "bucket_bytes": 4 << 16, "relays": "always"}),
    "blocks": ("qwen3", f"{TP} 2", dict(tp=2, quantization="fp8_per_block"), False, {}),
    "staged blocks": (
        "qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", dict(tp=2, quantization="fp8_per_block"), False, {"backend": "staged"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_spoiled_message_is_refused_by_every_member_or_changes_nothing(way, converted, tmp_path):
    variant, parallel, engine, together, how = WAYS[way]
    checkpoint = converted(variant)[0]
    sides = {
        "trainer": 2,
        "engine": 2,
        "together": together,
        "folder": str(tmp_path),
        "port": free_port(),
        "timeout": SECONDS,
    }
    results = run_on_ranks(
        2 if together else 4, "spoiled", sides, flags_at(Path(checkpoint[1]), parallel), checkpoint, engine, how,
        SEED, MUTATIONS, module="refit_messages_on_cpu", timeout=120 + 5 * SECONDS * MUTATIONS,
    )  # fmt: skip
    wrong, refused = [], 0
    for number, said in enumerate(zip(*results, strict=True)):
        how_spoiled = max((one[0] for one in said), key=len)
        sentences = [one[1] for one in said]
        refused += any(sentence.startswith("refused") for sentence in sentences)
        bad = [
            sentence for sentence in sentences if sentence != "right" and not sentence.startswith("refused")
        ]
        if bad or len({sentence == "right" for sentence in sentences}) > 1:
            wrong.append(f"{number} {how_spoiled}: {sentences}")
        if any(
            len(sentence) > 1500 or "\n" in sentence
            for sentence in sentences
            if sentence.startswith("refused")
        ):
            wrong.append(f"{number} {how_spoiled}: no sentence, {sentences}")
        if max(one[2] for one in said) > 5 * SECONDS:
            wrong.append(f"{number} {how_spoiled}: after {max(one[2] for one in said):.0f} s, {sentences}")
        for _, sentence, _, holds in said:
            if holds is None:
                continue
            held, fit = holds
            if sentence == "right" and holds != ("right", True):
                wrong.append(f"{number} {how_spoiled}: holds {holds} after a refit that all take for good")
            elif sentence != "right" and held == "other" and fit:
                wrong.append(f"{number} {how_spoiled}: serves other weights after {sentence}")
    print(f"{way}: {refused} of {MUTATIONS} refused")
    assert not wrong, f"{len(wrong)} of {MUTATIONS}:\n" + "\n".join(wrong)
    assert refused > MUTATIONS // 3, "what was spoiled was seen"
    assert {one[-1][1] for one in results} == {"right"}, "and once nothing is, all is well"


# Shards of a trainer's rank: a matrix, a vector and a scalar in bf16, an empty matrix in fp32, and
# what has three dims.
SHAPES, DTYPES = (
    [(6, 8), (5,), (), (0, 8), (2, 2, 2)],
    ["bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16"],
)
SIZES = ShardSizes.of([LocalTensor(i, shape, ()) for i, shape in enumerate(SHAPES)], DTYPES)
BF16_IN_BLOCKS, FP32_TO_BF16 = block_codec("fp32"), codec_between("float32", "bfloat16")
MOST = (1 << 63) - 1


@pytest.mark.parametrize("row", [
    (0, 0, 0, 6, 8, 0), (0, 5, 7, 1, 1, 0), (1, 0, 0, 5, 1, 0), (2, 0, 0, 1, 1, 0),
    (0, 2, 0, 4, 8, BF16_IN_BLOCKS, 7, 250, 0, 256, 8, 3),
])  # fmt: skip
def test_what_a_trainers_rank_has_may_be_asked_for(row):
    check_pieces(np.array([row]), SIZES, "inference rank 3", "shard {}".format)


@pytest.mark.parametrize(("row", "sentence"), [
    ((5, 0, 0, 1, 1, 0), "asks for shard 5 of 5"),
    ((-1, 0, 0, 1, 1, 0), "asks for shard -1 of 5"),
    ((0, 0, 0, 7, 8, 0), "asks for [7, 8] elements at [0, 0] of shard 0, of which this rank has [6, 8]"),
    ((0, 1, 0, 6, 8, 0), "[6, 8] elements at [1, 0]"),
    ((0, 0, 1, 6, 8, 0), "[6, 8] elements at [0, 1]"),
    ((0, -1, 0, 1, 1, 0), "at [-1, 0]"),
    ((0, 0, -8, 1, 8, 0), "at [0, -8]"),
    ((0, 0, 0, 0, 8, 0), "[0, 8] elements"),
    ((0, 0, 0, 1, -1, 0), "[1, -1] elements"),
    ((0, MOST, 0, 1, 1, 0), f"at [{MOST}, 0]"),
    ((0, 1, 0, MOST, 1, 0), f"[{MOST}, 1] elements"),
    ((0, -MOST, 0, MOST, 1, 0), f"at [-{MOST}, 0]"),
    ((1, 5, 0, 1, 1, 0), "of shard 1, of which this rank has [5, 1]"),
    ((3, 0, 0, 1, 1, 0), "of shard 3, of which this rank has [0, 8]"),
    ((4, 0, 0, 1, 1, 0), "of shard 4, of which this rank has [0, 0]"),
    ((0, 0, 0, 1, 1, 99), "shard 0 by codec 99"),
    ((0, 0, 0, 1, 1, -1), "shard 0 by codec -1"),
    ((0, 0, 0, 1, 1, FP32_TO_BF16), f"shard 0 by codec {FP32_TO_BF16}, which none of bfloat16 is"),
    ((0, 0, 0, 1, 8, BF16_IN_BLOCKS), f"shard 0 by codec {BF16_IN_BLOCKS}"),  # and does not say where
    ((0, 0, 0, 1, 8, BF16_IN_BLOCKS, -1, 0, 0, 1, 8, -1), "blocks of its tensor -1"),
    ((0, 0, 0, 1, 8, BF16_IN_BLOCKS, 1 << 40, 0, 0, 1, 8, -1), f"blocks of its tensor {1 << 40}"),
    ((0, 0, 0, 1, 8, BF16_IN_BLOCKS, 0, 1, 0, 1, 8, -1),
     "blocks of [1, 8] elements at [1, 0] of its tensor 0, which has [1, 8]"),
    ((0, 0, 0, 1, 8, BF16_IN_BLOCKS, 0, MOST, 0, MOST, 8, -1), f"at [{MOST}, 0] of its tensor 0"),
    ((0, 0, 0, 1, 8, BF16_IN_BLOCKS, 0, 0, 0, 1, 8, -2), "in round -2"),
    ((0, 0, 0, 1, 8, 0, 0, 0, 0, 1, 8, 1 << 30), f"in round {1 << 30}"),
])  # fmt: skip
def test_a_trainers_rank_refuses_what_it_does_not_have(row, sentence):
    good = (0, 0, 0, 1, 8, 0, 1, 0, 0, 1, 8, -1)[: len(row)]
    with pytest.raises(ReshardError, match="^inference rank 3 asks for ") as refused:
        check_pieces(np.array([good, row]), SIZES, "inference rank 3", "shard {}".format)
    assert sentence in str(refused.value)


def test_one_tensor_in_two_shapes_and_everything_many_times_over_are_refused():
    block = [0, 0, 0, 1, 8, BF16_IN_BLOCKS, 0, 0, 0, 1, 8, -1]
    for other in ([*block[:9], 256, 8, -1], [*block[:5], block_codec("ue8m0"), *block[6:]]):
        with pytest.raises(ReshardError, match="its tensor 0 in two shapes or roundings"):
            check_pieces(np.array([block, other]), SIZES, "inference rank 3", str)
    check_pieces(np.array([[0, 0, 0, 6, 8, 0]] * 8), SIZES, "inference rank 3", str)
    with pytest.raises(ReshardError, match="times all elements that this rank has"):
        check_pieces(np.array([[0, 0, 0, 6, 8, 0]] * 1000), SIZES, "inference rank 3", str)


BASE, HANDLE = 1 << 40, "0a" * 64


@pytest.mark.parametrize(("regions", "allocation", "sentence"), [
    ({}, [BASE, 100, HANDLE], ""),
    ({0: (BASE, 20)}, [BASE, 116, HANDLE], ""),  # five rows of 20 bytes, and one of 16
    ({0: (BASE, 20)}, [BASE, 115, HANDLE], "6 rows of 16 bytes, 20 apart"),
    ({0: (BASE - 1, 16)}, [BASE, 100, HANDLE], "which leaves the memory that it shares"),
    ({0: (BASE + 100, 16)}, [BASE, 100, HANDLE], "which leaves the memory that it shares"),
    ({0: (BASE + 5, 16)}, [BASE, 100, HANDLE], "says that w0 lies in 6 rows of 16 bytes, 16 apart, at 0x10000000005"),
    ({0: (BASE, 0)}, [BASE, 100, HANDLE], "0 apart"),
    ({0: (BASE, -16)}, [BASE, 100, HANDLE], "-16 apart"),
    ({0: (BASE, 1 << 62)}, [BASE, 100, HANDLE], "apart"),
    ({0: (0, 16)}, [BASE, 100, HANDLE], "at 0x0"),
    ({0: (MOST, 16)}, [BASE, 100, HANDLE], "at 0x7fffffffffffffff"),
    ({1: (BASE + 95, 10)}, [BASE, 100, HANDLE], "says that w1 lies"),
    ({3: (7, 7)}, [BASE, 100, HANDLE], ""),  # nothing is asked of it
    ({}, [BASE, 0, HANDLE], "0 bytes at"),
    ({}, [-5, 100, HANDLE], "can be mapped as"),
    ({}, [BASE, 1 << 80, HANDLE], "can be mapped as"),
    ({}, [BASE, 100, "zz" * 64], "can be mapped as"),
    ({}, [BASE, 100, HANDLE[:-2]], "can be mapped as"),
    ({}, [float(BASE), 100, HANDLE], "can be mapped as"),
    ({}, [BASE, 100], "which is none"),
])  # fmt: skip
def test_an_address_that_leaves_what_a_trainers_rank_exports_is_refused(regions, allocation, sentence):
    where = np.array([regions.get(i, (BASE, 16)) for i in range(len(SHAPES))], np.int64)
    fields = {"allocations": [allocation], "exported": True}
    asked = np.array([(0, 0, 0, 1, 1, 0), (1, 0, 0, 1, 1, 0)])

    def check():
        memory = TrainerMemory.checked(fields, where, "trainer rank 0")
        check_regions(memory, asked, SIZES, True, "trainer rank 0", ["w0", "w1"])

    if not sentence:
        check()
        return
    with pytest.raises(ReshardError, match="^trainer rank 0 says ") as refused:
        check()
    assert sentence in str(refused.value)


def test_the_slots_of_a_slab_are_where_both_ends_cut_them():
    good = {"number": 3, "handle": "mine", "lines": [[1, 64], [4, 32], [5, 16], [4, 80]]}

    def starts(**changes):
        slab = SlabLocation.checked(
            good | changes, rank=4, size=6, limits=[32, 80], may_have="mine".__eq__, who="trainer rank 0"
        )
        assert slab.size(2) == 2 * sum(limit for _, limit in slab.lines)
        return slab.starts(4, slots=2)

    assert starts() == [128, 224]
    for changes in (
        {"lines": [[4, 80], [4, 32]]}, {"lines": [[4, 32]]}, {"lines": [[4, 32], [4, 80], [4, 16]]}, {"lines": []},
        {"lines": [[1, 0], [4, 32], [4, 80]]}, {"lines": [[6, 64], [4, 32], [4, 80]]}, {"lines": {}}, {"lines": 7},
        {"lines": [[4, 32.0], [4, 80]]}, {"lines": [[True, 64], [4, 32], [4, 80]]}, {"lines": [[1], [4]]},
        {"handle": "/etc/passwd"}, {"handle": 7}, {"number": -1}, {"number": None},
    ):  # fmt: skip
        with pytest.raises(ReshardError, match="^trainer rank 0 "):
            starts(**changes)
    assert starts(lines=[[4, 32], [4, 80]]) == [0, 64]


def test_what_a_member_says_of_its_lines_is_checked():
    def loads(said: bytes, own: bytes = b""):
        group = SimpleNamespace(rank=1, names={1: "rank 1", 2: "rank 2"}, post=lambda *_: None)
        group.read_all = lambda key, ranks: [own or pack_json([2, 0]), said]
        return exchange_loads(group, "nixl", LineLoad(2, 0), [1, 2])

    assert loads(pack_json([3, 1 << 40])) == {1: (2, 0), 2: (3, 1 << 40)}
    for said in ([3], [3, -1], [3.0, 1], [-1, 1], ["3", 1], {}, None, 7, [1, 2, 3]):
        with pytest.raises(ReshardError, match="^rank 2 says .* of its lines, which makes no sense"):
            loads(pack_json(said))
    with pytest.raises(ReshardError, match="'lines/nixl' of rank 1 did not arrive as it was sent"):
        loads(pack_json([3, 1]), pack_json([1, 0]))


def test_how_many_buckets_a_round_takes_is_what_two_members_say():
    names = {rank: f"rank {rank}" for rank in range(3)}
    assert most_buckets([[[-1, 3], [2, 1]], [[-1, 3]], [[-1, 2], [2, 1]]], names) == {-1: 3, 2: 1}
    for said in (
        [[-1, 4]],
        [[-1, 1 << 40]],
        [[-1, -1]],
        [[-2, 3]],
        [[-1, 3.0]],
        [[-1]],
        {},
        None,
        7,
        [["-1", 3]],
    ):
        with pytest.raises(ReshardError, match="^rank 0 "):
            most_buckets([said, [[-1, 3]], [[-1, 3]]], names)


def test_a_message_comes_back_as_it_was_said_or_not_at_all():
    held = [
        LocalTensor(0, (6, 8), (Part("w", Box((6, 0), (6, 8)), (0, 0)),)),
        LocalTensor(1, (5,), (Part("b", Box((0,), (5,)), (0,)),)),
        LocalTensor(2, (), ()),
    ]
    header, parts = pack_held(held, ["bfloat16"] * 3)
    assert unpack_held(header, parts, "it").tensors == held
    rows = unpack_array(parts)
    for row, column, value in (
        (0, 0, 3),
        (0, 0, -1),
        (0, 1, 2),
        (0, 2, -1),
        (0, 4, 7),
        (0, 4, 0),
        (0, 6, 1),
        (0, 6, MOST),
        (0, 4, MOST),
        (1, 3, 1),
    ):
        spoiled = rows.copy()
        spoiled[row, column] = value
        with pytest.raises(ReshardError, match="^what it says that it holds cannot be read"):
            unpack_held(header, pack_array(spoiled), "it")
    for change in (
        {"dtypes": ["bfloat16"]}, {"dtypes": ["bf17"] * 3}, {"names": ["w", "w"]}, {"names": "wb"},
        {"shapes": [[6, 8], [5], [-1]]}, {"shapes": [[6, 8], [5], [1 << 30] * 3]}, {"shapes": [[6, 8], [5], None]},
        {"shapes": 3},
    ):  # fmt: skip
        with pytest.raises(ReshardError, match="^what it says that it holds cannot be read"):
            unpack_held(pack_json(unpack_json(header) | change), parts, "it")
        with pytest.raises(ReshardError, match="^what it says that it holds cannot be read"):
            names_held(pack_json(unpack_json(header) | change), "it")
    assert names_held(header, "it") == {"w", "b"}
    for no_header in ({}, [], 7, {"names": ["w"]}):
        with pytest.raises(ReshardError, match="^what it says that it holds cannot be read"):
            names_held(pack_json(no_header), "it")
