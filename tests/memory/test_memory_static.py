"""`reshard memory`: static bytes are those of real Megatron models and optimizers."""

from dataclasses import replace
from math import prod

import pytest

from reshard import MegatronLayout
from reshard.megatron.parameters import expand, padded_vocab_size
from reshard.megatron.ranks import Ranks, live_shards
from reshard.memory.options import Training, TrainingSetup
from reshard.memory.static import static_bytes
from reshard.models.model import Model
from tests.on_cpu import memory_on_cpu
from tests.tools.checkpoints import VARIANTS

# Configs of larger models, of which their language model is trained.
LARGER = {
    "qwen3-vl-moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False,
        "text_config": VARIANTS["qwen3-moe-mixed"].to_dict()
        | {"model_type": "qwen3_vl_moe_text", "architectures": None},
    },
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": VARIANTS["deepseek-v3"].to_dict()
        | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
    },
}
# variant, fields that it is changed in, layout, ranks, cp
LAYOUTS = {
    "one rank": ("qwen3", {}, MegatronLayout(), 1, 1),
    "tied, PP": ("qwen3-tied", {}, MegatronLayout(tp=2, pp=2), 8, 1),
    "tied, PP1": ("qwen2-tied", {}, MegatronLayout(tp=2), 6, 1),
    "biases": ("llama-bias", {}, MegatronLayout(tp=2, pp=2), 12, 1),
    "TP above the key heads": ("llama", {}, MegatronLayout(tp=4), 8, 1),
    "VPP, CP": ("llama", {"num_hidden_layers": 8}, MegatronLayout(tp=2, pp=2, vpp=2), 24, 2),
    "uneven stages": ("qwen3", {"num_hidden_layers": 7}, MegatronLayout(pp=3, num_layers_in_first_pipeline_stage=1,
                                                                        num_layers_in_last_pipeline_stage=2), 9, 1),
    "embedding and loss in the split": (
        "qwen3", {"num_hidden_layers": 6}, MegatronLayout(pp=4, account_for_embedding_in_pipeline_split=True,
                                                          account_for_loss_in_pipeline_split=True), 8, 1,
    ),
    "norms over the full width": ("minimax-m2", {}, MegatronLayout(tp=4, ep=2, etp=1), 8, 1),
    "softmax with a bias, shared experts": ("ernie", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), 8, 1),
    "q/k norm, shared experts": ("dots1", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), 8, 1),
    "q, k and v in one, MTP": ("ling", {"num_nextn_predict_layers": 1}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), 8, 1),
    "a shared expert with a gate": ("qwen2-moe", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), 8, 1),
    "in a larger model": ("qwen3-vl-moe", {}, MegatronLayout(tp=2, pp=2, ep=4, etp=1), 16, 1),
    "MLA in a larger model": ("kimi-k2.5", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), 8, 1),
    "linear attention": ("qwen3-next", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), 8, 1),
    "linear attention, MTP": ("qwen3.5-moe", {"mtp_num_hidden_layers": 1}, MegatronLayout(tp=2, pp=2, ep=2, etp=2), 8,
                              1),
    "Mamba": ("nemotron-h-moe", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), 8, 1),
    "biases of experts, sinks": ("gpt-oss", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), 8, 1),
    "EP, ETP1": ("qwen3-moe", {}, MegatronLayout(tp=2, pp=2, ep=4, etp=1), 16, 1),
    "EP, ETP2, odd DP": ("qwen3-moe-mixed", {}, MegatronLayout(tp=2, ep=4, etp=2), 24, 1),
    "shared experts": ("glm4-moe-air", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=2), 16, 1),
    "MLA, MTP, EP": ("deepseek-v3", {"num_nextn_predict_layers": 1}, MegatronLayout(tp=2, pp=2, ep=4, etp=1), 16, 1),
    "MLA, MTP, one stage": ("deepseek-v3", {"num_nextn_predict_layers": 1}, MegatronLayout(tp=2, ep=2, etp=2), 12, 1),
    "no q_lora, layout string": (
        "deepseek-v3-no-q-lora", {"num_nextn_predict_layers": 1},
        MegatronLayout(pp=2, ep=4, pipeline_model_parallel_layout="Et|t*2|t|mL"), 8, 1,
    ),
    "indexers in some layers, MTP": ("glm-moe-dsa-shared", {"num_nextn_predict_layers": 1},
                                     MegatronLayout(pp=2, ep=4, etp=1), 8, 1),
    "tied, MTP": (
        "deepseek-v3", {"num_nextn_predict_layers": 1, "tie_word_embeddings": True},
        MegatronLayout(tp=2, pp=2, ep=4, etp=1), 8, 1,
    ),
}  # fmt: skip


def model(variant: str, **fields) -> Model:
    config = (VARIANTS | LARGER)[variant]
    return Model.from_hf((config if isinstance(config, dict) else config.to_dict()) | fields, variant)


def planned(found: Model, layout: MegatronLayout, **options) -> TrainingSetup:
    return TrainingSetup.of(found, layout, Training(transformer_impl="local", **options))


@pytest.mark.parametrize("case", LAYOUTS)
def test_static_bytes_are_those_of_a_real_megatron(case):
    variant, fields, layout, ranks, cp = LAYOUTS[case]
    found = model(variant, **fields)
    for distributed, grads in ((True, "fp32"), (True, "bf16"), (False, "fp32")):
        plan = planned(found, layout, gpus=ranks, cp=cp, grads=grads, distributed_optimizer=distributed)
        for stage, chunks in enumerate(layout.stages(found)):
            real = memory_on_cpu.held(found, layout, stage * plan.per_stage, ranks, cp, grads, distributed)
            ours = static_bytes(plan, chunks)
            assert (ours.weights, ours.grads) == (real.weights + real.router, real.grads), (
                stage,
                distributed,
                grads,
            )


# Of a tied output layer Megatron makes a weight that nobody reads, where the stage has MTP's embedding.
@pytest.mark.parametrize("case", [case for case in LAYOUTS if case != "tied, MTP"])
def test_a_stage_s_shards_are_those_of_a_real_megatron(case):
    """What plans and checkpoints say of a rank, and in which stage."""
    variant, fields, layout, ranks, cp = LAYOUTS[case]
    found = model(variant, **fields)
    stages = len(layout.stages(found))
    arithmetic = Ranks(found, layout, ranks // stages)
    vocabulary = padded_vocab_size(found.symbols["V"], 128, layout.tp)
    parameters = [p for p in expand(found, "local", vocabulary).parameters if "expert_bias" not in p.name]
    for stage in range(stages):
        rank = stage * (ranks // stages)
        real = memory_on_cpu.held(found, layout, rank, ranks, cp, distributed=False)
        ours = [s.tensor for p in parameters for s in live_shards(arithmetic, p) if rank in s.ranks]
        assert sum(2 * prod(tensor.shape) for tensor in ours) == real.weights, stage


@pytest.mark.parametrize("case", ["EP, ETP1", "MLA, MTP, EP", "VPP, CP"])
def test_the_optimizers_states_are_those_of_the_real_one(case):
    variant, fields, layout, ranks, cp = LAYOUTS[case]
    found = model(variant, **fields)
    plan = planned(found, layout, gpus=ranks, cp=cp)
    for stage, chunks in enumerate(layout.stages(found)):
        real = memory_on_cpu.held(found, layout, stage * plan.per_stage, ranks, cp, optimizer=True)
        ours = static_bytes(plan, chunks)
        # what of a shard is padding has no state; the first shard has none but between parameters
        assert 0 <= ours.main_params - real.main_params <= 4 * real.padding
        assert ours.moments - 2 * ours.main_params == real.moments - 2 * real.main_params == 0
        if not real.padding:
            assert ours.main_params == real.main_params


def test_the_comparison_sees_an_embedding_a_norm_and_a_dtype():
    """The control: what a stage lacks, and another dtype, shows."""
    variant, fields, layout, ranks, _ = LAYOUTS["MLA, MTP, EP"]
    found = model(variant, **fields)
    plan, stages = planned(found, layout, gpus=ranks), layout.stages(found)
    real = memory_on_cpu.held(found, layout, plan.per_stage, ranks)
    assert static_bytes(plan, stages[1]).weights == real.weights + real.router
    for other in (replace(stages[1][0], mtp=False), replace(stages[1][0], output=False), stages[0][0]):
        assert static_bytes(plan, [other]).weights != real.weights + real.router
    assert static_bytes(planned(found, layout, gpus=ranks, grads="bf16"), stages[1]).grads != real.grads
