"""A live trainer that computes another model than the served one is refused."""

import re

import pytest
import torch

from reshard import (
    hf_to_mcore,
)
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import config_of

TRAINERS = {
    "qwen3": [
        ("", "no error"),
        ("--rotary-base 50000", "the trainer's rotary_base is 50000, but the served model's is 10000"),
        ("--rotary-interleaved", "rotary_interleaved is True, but the served model's is False"),
        (
            "--rotary-seq-len-interpolation-factor 2",
            r"rotary_pos_emb has inv_freq\[0\] = 0.5, but the served model's is 1 ",
        ),
        ("--use-rope-scaling", "use_rope_scaling is True, but the served model's is False"),
        ("--position-embedding-type yarn", "position_embedding_type is yarn, but the served model's is rope"),
        ("--norm-epsilon 1e-5", "layernorm_epsilon is 1e-05, but the served model's is 1e-06"),
        ("--attention-dropout 0.1 --max-position-embeddings 512", "no error"),
    ],
    "qwen3-yarn": [
        ("", "no error"),
        ("--yarn-beta-fast 8", "yarn_beta_fast is 8.0, but the served model's is 32.0"),
        ("--rotary-scaling-factor 2", "inv_freq|rotary_scaling_factor"),
    ],
    "glm4-moe": [
        ("", "no error"),
        ("--rotary-percent 0.25", "rotary_percent is 0.25, but the served model's is 0.5"),
        ("--moe-router-pre-softmax", "no error"),  # as some trainers say of a router that has no softmax
    ],
    "minimax-m2": [
        ("", "no error"),
        ("--rotary-percent 1.0", "rotary_percent is 1.0, but the served model's is 0.5"),
        (
            "--moe-router-topk-scaling-factor 2.5",
            "moe_router_topk_scaling_factor is 2.5, but the served model's is None",
        ),
    ],
    "deepseek-v3": [
        ("", "no error"),
        ("--rotary-scaling-factor 20", "rotary_scaling_factor is 20.0, but the served model's is 40.0"),
        ("--mscale-all-dim 0.5", "mscale_all_dim is 0.5, but the served model's is 1.0"),
        (
            "--moe-router-topk-scaling-factor 1.5",
            "moe_router_topk_scaling_factor is 1.5, but the served model's is 2.5",
        ),
        (
            "--moe-router-num-groups 2 --moe-router-group-topk 1",
            "moe_router_group_topk is 1|moe_router_num_groups is 2",
        ),
    ],
}
CHANGED = {
    "qwen3": [
        ("rotary_pos_emb.inv_freq", ("times", 1.01),
         "rotary_pos_emb has inv_freq.0. = 1.01, but the served model's is 1 "),
        ("rotary_pos_emb.inv_freq", ("first", 8), "rotary_pos_emb turns 8 pairs of dims, but the served model's 16"),
        ("config.layernorm_zero_centered_gamma", True, "layernorm_zero_centered_gamma is True"),
        ("config.activation_func", torch.nn.functional.gelu, "swiglu is False, but the served model's is True"),
        ("config.window_size", (16, 0), "window_size is .16, 0., but the served model's is None"),
        ("config.softmax_scale", 0.5, "softmax_scale is 0.5, but the served model's is None"),
        ("config.qk_layernorm", False, "qk_layernorm is False, but the served model's is True"),
    ],
    "qwen3-yarn": [
        ("config.yarn_beta_slow", 3.0, "yarn_beta_slow is 3.0, but the served model's is 1.0"),
        ("rotary_pos_emb.beta_slow", 3.0, "rotary_pos_emb has inv_freq"),
        ("rotary_pos_emb.scaling_factor", 3.0, "rotary_pos_emb has inv_freq"),
    ],
    "glm4-moe": [
        ("rotary_pos_emb.inv_freq", ("first", 2), "rotary_pos_emb turns 2 pairs of dims, but the served model's 4"),
    ],
    "minimax-m2": [
        ("rotary_pos_emb.inv_freq", ("first", 2), "rotary_pos_emb turns 2 pairs of dims, but the served model's 4"),
    ],
    "deepseek-v3": [
        ("decoder.layers.0.self_attention.rotary_pos_emb.rotary_base", 20000,
         "self_attention.rotary_pos_emb has inv_freq"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("variant", TRAINERS)
def test_a_trainer_that_computes_something_else_than_what_is_served_is_refused(variant, checkpoint, tmp_path):
    hf_to_mcore(checkpoint(variant), tmp_path / "mcore", transformer_impl="local")
    flags = (tmp_path / "mcore" / "megatron_flags.txt").read_text().split()
    lines = [[*flags, *extra.split()] for extra, _ in TRAINERS[variant]]
    changes = [(path, value) for path, value, _ in CHANGED[variant]]
    [said] = run_on_ranks(1, "as_trainers", config_of(variant), lines, changes)
    for sentence, (*what, pattern) in zip(said, [*TRAINERS[variant], *CHANGED[variant]], strict=True):
        assert re.search(pattern, sentence), (what, sentence)
