"""Refits into an engine that serves from fp8 blocks leave what vLLM makes of the same weights."""

import json
from pathlib import Path

import pytest

from reshard import mcore_to_hf
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.refits import refit

ONLINE = {"quantization": "fp8_per_block"}
BY_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def served_in_blocks(mcore: str, folder: Path) -> str:
    """The checkpoint in fp8 as a conversion writes it: what a refit writes has to be the same. vLLM's own
    function is compared with both in `blocks_that_differ`."""
    mcore_to_hf(Path(mcore), folder, quantize=True)
    return str(folder)


# Blocks across queries, keys and values; experts that vLLM rounds up to whole blocks; kv_b_proj, of
# which MLA derives matrices. In two processes they travel, with their padding, or where four ranks
# have parts in bf16; in two that are both, some of the experts do.
ONLINE_CASES = [
    ("qwen3", "", 1, True),
    ("qwen3-moe", "", 1, True),
    ("deepseek-v3", "", 1, True),
    ("ling", "", 1, True),
    ("qwen3-moe", "", 1, False),
    ("deepseek-v3", "", 1, False),
    ("qwen3-moe", f"{EP} 2", 2, True),
    ("served-blocks", f"{TP} 4", 4, False),  # a head of 64 on each
    ("qwen3-moe", f"{TP} 2 {ETP} 2", 2, False),  # padding around parts
]


@pytest.mark.parametrize("variant, parallel, ranks, together", ONLINE_CASES)
def test_a_refit_leaves_what_vllm_makes_of_the_same_weights_while_it_loads_them(
    variant, parallel, ranks, together, converted, tmp_path
):
    moving, engines = variant == "qwen3-moe", ranks if together else 1
    engine = ONLINE | {"tp": engines}
    refit(converted(variant), parallel, ranks, engine, engines, together, tmp_path, moving=moving)


def published(checkpoints, folder: Path) -> tuple[list[str], dict]:
    """The checkpoints as they are published in fp8, and what vLLM is told of their config."""
    directories = [
        served_in_blocks(checkpoint[1], folder / f"fp8-{number}")
        for number, checkpoint in enumerate(checkpoints)
    ]
    config = json.loads((Path(directories[0]) / "config.json").read_text())
    return directories, {"hf_overrides": {"quantization_config": config["quantization_config"]}}


# Dummy weights make up scales of the key-value cache too, which nobody reads unless it is in fp8.
IGNORED = ["_k_scale", "_v_scale"]


# In one process, where the weights lie; in two, in buckets of blocks that the trainer makes, in
# many rounds, the second time what changed in them; through a slab; and partly one and partly the other.
@pytest.mark.parametrize(
    "variant,parallel,ranks,together,options",
    [
        ("served-blocks", "", 1, True, {}),
        ("served-blocks", "", 1, False, {"bucket_bytes": 1 << 19, "delta": True}),
        ("served-moe-blocks", "", 1, True, {}),
        ("served-moe-blocks", f"{PP} 2 {EP} 2", 4, False, {"backend": "nixl", "bucket_bytes": 1 << 19}),
        ("served-blocks", f"{TP} 2", 2, True, {"bucket_bytes": 1 << 20}),
        # from one replica to the other
        ("served-blocks", f"{TP} 2", 2, False, {"engines": 2, "delta": True, "relays": "always"}),
        (
            "served-blocks",
            f"{TP} 2",
            2,
            False,
            {"engines": 2, "backend": "nixl", "relays": "always", "bucket_bytes": 1 << 19},
        ),
    ],
)
def test_a_refit_leaves_what_vllm_loads_from_a_checkpoint_in_fp8(
    variant, parallel, ranks, together, options, converted, tmp_path
):
    checkpoints = converted(variant)
    loaded, engine = published(checkpoints, tmp_path)
    options = dict(options)
    engines = options.pop("engines", ranks if together else 1)
    engine |= {"dp": engines}  # each has the whole model
    reports = refit(
        checkpoints,
        parallel,
        ranks,
        engine,
        engines,
        together,
        tmp_path / "run",
        published=loaded,
        ignored=IGNORED,
        **options,
    )
    of_all = [report for of_rank in reports for report in of_rank]
    sent = sum(report["received_bytes_nixl"] + report["received_bytes_nccl"] for report in of_all)
    assert (sent > 0) == (not together or ranks > 1)
    assert any(report.get("received_bytes_relay") for report in of_all) == ("relays" in options)
    assert all(report["launches"] > 0 for report in of_all), "of members that only send, too"


def sides_of(folder: Path, trainers: int, engines: int, together: bool) -> dict:
    folder.mkdir(exist_ok=True)
    return {
        "trainer": trainers,
        "engine": engines,
        "together": together,
        "folder": str(folder),
        "port": free_port(),
    }


# In one process, from fp32; in blocks that the trainer makes; and in parts of blocks of two ranks.
@pytest.mark.parametrize(
    ("trainers", "together", "wide"), [(1, True, True), (1, False, False), (2, False, True)]
)
def test_a_check_sees_what_changed_and_parts_that_were_lost_and_connect_sees_other_arithmetic(
    trainers, together, wide, converted, tmp_path
):
    checkpoint = converted("qwen3" if trainers > 1 else "served-blocks")[0]
    flags, engine = flags_at(Path(checkpoint[1]), f"{TP} {trainers}"), ONLINE | {"by_config": BY_CONFIG}
    sides = sides_of(tmp_path, trainers, 1, together)
    *trainers_messages, messages = run_on_ranks(
        1 if together else trainers + 1,
        "blocks_that_differ",
        sides,
        flags,
        checkpoint,
        engine,
        wide,
        module="refit_reloads_on_cpu",
    )
    plain, code, scale, lost, mended, cache, arithmetic = messages
    assert plain == mended == "no error"
    assert "tensors did not arrive as they are in the trainer" in code and "q_proj" in code
    assert (
        "tensors did not arrive as they are in the trainer" in scale
        and "q_proj" in scale
        and "o_proj" not in scale
    )
    assert ("k_proj" in lost and "q_proj" not in lost) if trainers > 1 else lost == "no error"
    assert "scales its fp8 keys and values by numbers that load_format='dummy' has made up" in cache
    assert "this vLLM quantizes blocks with fp32 scales in another way than reshard" in arithmetic
    for on_trainer in trainers_messages:
        assert (
            on_trainer[0] == on_trainer[4] == "no error"
            and "q_proj" in on_trainer[1]
            and "q_proj" in on_trainer[2]
        )
