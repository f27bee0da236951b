"""Models under Megatron's generalized tensor parallelism (GTP): their checkpoints, and live ones."""

import pytest
import torch

from reshard import ReshardError, diff, hf_to_mcore, mcore_to_hf
from reshard.megatron import gtp
from reshard.storage.sources import megatron
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.oracle import hf_tensors, same

# variant, the layout without GTP, ranks, ranks of GTP for all weights but experts' and for experts': each axis, gate
# and up (not of MiniMax's experts at ETP 2), vocabularies padded within TP's parts, experts with and without.
SAVED = [
    ("qwen3", "", 4, (4, 1)),
    ("llama-rope-tied", f"{TP} 2", 4, (2, 1)),
    ("qwen3", f"{PP} 2", 4, (2, 1)),
    ("qwen3-moe", f"{EP} 2 {ETP} 1", 4, (2, 2)),
    ("qwen3-moe-mixed", f"{EP} 2 {ETP} 1", 4, (1, 2)),
    ("deepseek-v3", f"{TP} 2 {EP} 2 {ETP} 1", 4, (2, 1)),
    ("minimax-m2", f"{TP} 2 {EP} 2 {ETP} 2", 8, (2, 2)),
    ("gpt-oss", "", 2, (2, 2)),
]
IDS = [
    f"{variant} {parallel.replace('-model-parallel-size', '')} GTP {a} {b}"
    for variant, parallel, _, (a, b) in SAVED
]


def saved(source, folder, parallel, ranks, sizes, **options):
    """The checkpoint that a trainer under GTP saves of these weights, as ``--load`` takes it."""
    hf_to_mcore(source, folder / "ours", transformer_impl="local")
    (folder / "gtp" / "iter_0000007").mkdir(parents=True)
    run_on_ranks(
        ranks,
        "save",
        flags_at(folder / "ours", parallel),
        str(folder / "ours"),
        sizes,
        str(folder / "gtp" / "iter_0000007"),
        module="gtp_on_cpu",
        options=options,
    )
    (folder / "gtp" / "latest_checkpointed_iteration.txt").write_text("7")
    return folder / "gtp"


@pytest.mark.parametrize(("variant", "parallel", "ranks", "sizes"), SAVED, ids=IDS)
def test_what_megatron_saves_under_gtp_becomes_the_hugging_face_tensors(
    variant, parallel, ranks, sizes, checkpoint, tmp_path, monkeypatch
):
    source = checkpoint(variant)
    theirs = saved(source, tmp_path, parallel, ranks, sizes)
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    assert diff(source, theirs, hf_config=source).equal
    # The control: the same files read as those of a trainer without GTP.
    monkeypatch.setattr(megatron, "gtp_of_keys", lambda keys: gtp.WITHOUT_GTP)
    try:
        mcore_to_hf(theirs, tmp_path / "as without", hf_config=source)
    except ReshardError as error:
        assert "has shape" in str(error)
    else:
        assert same(hf_tensors(source), hf_tensors(tmp_path / "as without")) != []


def test_halves_with_keys_of_their_own_are_read(checkpoint, tmp_path):
    source = checkpoint("qwen3-moe")
    theirs = saved(source, tmp_path, f"{ETP} 1", 4, (2, 4), singleton_local_shards=True)
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []


def test_a_vocabulary_padded_in_the_middle_needs_its_size(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    theirs = saved(source, tmp_path, f"{TP} 2", 4, (2, 1), args=False)
    with pytest.raises(ReshardError, match="do not say padded_vocab_size, without which a row"):
        mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert not (tmp_path / "back").exists()


def test_a_chunk_has_each_row_of_its_parameter_or_padding():
    """Against rows that are cut as by Megatron: by tensor parallel rank, padded, by GTP rank, in halves."""
    for rows, tp, shards, halves in [
        (40, 2, 2, 1),
        (96, 1, 4, 2),
        (80, 2, 2, 2),
        (48, 1, 1, 2),
        (20, 1, 4, 1),
    ]:
        own = torch.arange(rows).reshape(halves, tp, -1).transpose(0, 1).reshape(tp, -1)
        padded = -(-own.shape[1] // (16 * shards)) * 16 * shards
        own = torch.nn.functional.pad(own, (0, padded - own.shape[1]), value=-1)
        chunks = own.reshape(tp * shards, halves, -1).transpose(0, 1).reshape(halves * tp * shards, -1)
        chunk_rows = chunks.shape[1]
        found = gtp.ShardedRows(tp, rows // tp, shards, chunk_rows, halves, None)
        for index, expected in enumerate(chunks):
            held = torch.full((chunk_rows,), -1)
            for at, row, n in found.pieces(index * chunk_rows):
                held[at : at + n] = torch.arange(row, row + n)
            assert held.tolist() == expected.tolist()
