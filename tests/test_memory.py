"""`reshard memory`: static bytes against real Megatron models, activations and schedules against what was measured of real runs."""

import json
from dataclasses import replace
from math import prod

import pytest
from click.testing import CliRunner

import reshard
from reshard import MegatronLayout, ReshardError, VllmLayout
from reshard.cli.main import cli
from reshard.megatron.parameters import expand, padded_vocab_size
from reshard.megatron.ranks import Ranks, live_shards
from reshard.memory.activations import Sizes, layer_tensors
from reshard.memory.estimate import estimate_memory
from reshard.memory.options import Training, TrainingSetup
from reshard.memory.phases import EngineSetup, Phase
from reshard.memory.schedule import moments
from reshard.memory.static import static_bytes
from reshard.models.model import Model
from tests import memory_on_cpu
from tests.checkpoints import VARIANTS
from tests.test_published import PUBLISHED

# variant, fields that it is changed in, layout, ranks, cp
LAYOUTS = {
    "one rank": ("qwen3", {}, MegatronLayout(), 1, 1),
    "tied, PP": ("qwen3-tied", {}, MegatronLayout(tp=2, pp=2), 8, 1),
    "tied, PP1": ("qwen2-tied", {}, MegatronLayout(tp=2), 6, 1),
    "biases": ("llama-bias", {}, MegatronLayout(tp=2, pp=2), 12, 1),
    "TP above the key heads": ("llama", {}, MegatronLayout(tp=4), 8, 1),
    "VPP, CP": ("llama", {"num_hidden_layers": 8}, MegatronLayout(tp=2, pp=2, vpp=2), 24, 2),
    "uneven stages": ("qwen3", {"num_hidden_layers": 7}, MegatronLayout(pp=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2), 9, 1),
    "embedding and loss in the split": (
        "qwen3", {"num_hidden_layers": 6}, MegatronLayout(pp=4, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True), 8, 1,
    ),
    "EP, ETP1": ("qwen3-moe", {}, MegatronLayout(tp=2, pp=2, ep=4, etp=1), 16, 1),
    "EP, ETP2, odd DP": ("qwen3-moe-mixed", {}, MegatronLayout(tp=2, ep=4, etp=2), 24, 1),
    "shared experts": ("glm4-moe-air", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=2), 16, 1),
    "MLA, MTP, EP": ("deepseek-v3", {"num_nextn_predict_layers": 1}, MegatronLayout(tp=2, pp=2, ep=4, etp=1), 16, 1),
    "MLA, MTP, one stage": ("deepseek-v3", {"num_nextn_predict_layers": 1}, MegatronLayout(tp=2, ep=2, etp=2), 12, 1),
    "no q_lora, layout string": (
        "deepseek-v3-no-q-lora", {"num_nextn_predict_layers": 1}, MegatronLayout(pp=2, ep=4, pipeline_model_parallel_layout="Et|t*2|t|mL"), 8, 1,
    ),
    "tied, MTP": (
        "deepseek-v3", {"num_nextn_predict_layers": 1, "tie_word_embeddings": True}, MegatronLayout(tp=2, pp=2, ep=4, etp=1), 8, 1,
    ),
}  # fmt: skip


def model(variant: str, **fields) -> Model:
    return Model.from_hf(VARIANTS[variant].to_dict() | fields, variant)


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


def of(name: str, **fields) -> Model:
    return Model.from_hf(PUBLISHED[name][0] | fields, name)


LLAMA = of("Llama-3.1-70B", num_hidden_layers=12)
# With 16 query groups, as the config first had.
LLAMA_405B = of(
    "Llama-3.1-70B",
    num_hidden_layers=4,
    hidden_size=16384,
    intermediate_size=53248,
    num_attention_heads=128,
    num_key_value_heads=16,
)
V3 = of("DeepSeek-V3", num_hidden_layers=4, first_k_dense_replace=1, num_nextn_predict_layers=0)
V2 = of(
    "DeepSeek-V3", num_hidden_layers=4, first_k_dense_replace=1, num_nextn_predict_layers=0, hidden_size=5120, intermediate_size=12288,
    moe_intermediate_size=1536, n_routed_experts=160, num_experts_per_tok=6, n_shared_experts=2, vocab_size=102400,
)  # fmt: skip
V3_MTP = of("DeepSeek-V3", num_hidden_layers=14)
MOONLIGHT = of(
    "DeepSeek-V3", num_hidden_layers=27, first_k_dense_replace=1, num_nextn_predict_layers=0, hidden_size=2048, intermediate_size=11264,
    moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, vocab_size=163840, q_lora_rank=None,
    num_attention_heads=16, num_key_value_heads=16, n_group=1, topk_group=1,
)  # fmt: skip
QWEN = of("Qwen3-30B-A3B")
MTP_PIPELINE = "Ett|(tt|)*6mL"
GIB = 1 << 30

# Allocated at most on a GPU, as others measured it: (model, layout, options, {stage: GiB}, tolerance in GiB). Runs of dense models,
# and of experts with balanced routing, are within 2 GiB but for the last two lines, which say by how much they are not.
MEASURED = {
    "Llama-70B x12, PP2": (LLAMA, MegatronLayout(pp=2), dict(gpus=8), {0: 66.55, 1: 62.97}, 0.5),
    "Llama-70B x12, TP2": (LLAMA, MegatronLayout(tp=2), dict(gpus=8), {0: 60.68}, 0.5),
    "Llama-70B x12, TP4": (LLAMA, MegatronLayout(tp=4), dict(gpus=8), {0: 39.07}, 0.5),
    "Llama-70B x12, TP8": (LLAMA, MegatronLayout(tp=8), dict(gpus=8), {0: 28.29}, 0.5),
    "Llama-405B x4, PP2": (LLAMA_405B, MegatronLayout(pp=2), dict(gpus=8), {0: 86.61, 1: 87.08}, 1.0),
    "Llama-405B x4, TP2": (LLAMA_405B, MegatronLayout(tp=2), dict(gpus=8), {0: 81.59}, 1.0),
    "Llama-405B x4, TP4": (LLAMA_405B, MegatronLayout(tp=4), dict(gpus=8), {0: 52.89}, 1.0),
    "Llama-405B x4, TP8": (LLAMA_405B, MegatronLayout(tp=8), dict(gpus=8), {0: 38.57}, 1.0),
    "DeepSeek-V3 x4, EP8": (V3, MegatronLayout(ep=8), dict(gpus=8), {0: 104.30}, 1.0),
    "DeepSeek-V3 x4, EP4 PP2": (V3, MegatronLayout(ep=4, pp=2), dict(gpus=8), {0: 71.24, 1: 114.00}, 1.5),
    "DeepSeek-V2 x4, EP8": (V2, MegatronLayout(ep=8), dict(gpus=8), {0: 45.63}, 1.0),
    "DeepSeek-V2 x4, EP4 PP2": (V2, MegatronLayout(ep=4, pp=2), dict(gpus=8), {0: 31.58, 1: 44.70}, 1.0),
    "Llama-70B x12, TP2 CP4, 32k": (LLAMA, MegatronLayout(tp=2), dict(gpus=8, cp=4, seq_length=32768), {0: 68.43}, 0.5),
    "DeepSeek-V3 x14, MTP, 64 GPUs": (
        V3_MTP, MegatronLayout(pp=4, ep=16, pipeline_model_parallel_layout=MTP_PIPELINE), dict(gpus=64, seq_length=2048), {2: 68704 / 1024}, 2.0,
    ),
    "DeepSeek-V3 x14, MTP, 64 GPUs, full": (
        V3_MTP, MegatronLayout(pp=4, ep=16, pipeline_model_parallel_layout=MTP_PIPELINE), dict(gpus=64, seq_length=2048, recompute="full"), {3: 60154 / 1024}, 2.5,
    ),
    # in GB as published; gradients and moments in bf16 are assumed
    "Moonlight, TP2 EP8": (
        MOONLIGHT, MegatronLayout(tp=2, ep=8, etp=1), dict(gpus=8, grads="bf16", exp_avg="bf16", exp_avg_sq="bf16"), {0: 36.62e9 / GIB}, 1.0,
    ),
    "Moonlight, TP2 EP8, moe_act": (
        MOONLIGHT, MegatronLayout(tp=2, ep=8, etp=1), dict(gpus=8, grads="bf16", exp_avg="bf16", exp_avg_sq="bf16", recompute="moe_act"),
        {0: 35.94e9 / GIB}, 1.5,
    ),
    "Qwen3-30B-A3B, EP16": (QWEN, MegatronLayout(ep=16), dict(gpus=16, grads="bf16"), {0: 61.35e9 / GIB}, 1.5),
    "Llama-70B x12, TP2 CP4, 131k": (LLAMA, MegatronLayout(tp=2), dict(gpus=8, cp=4, seq_length=131072), {0: 112.67}, 3.0),
}  # fmt: skip

# The same of whole models, a rank at a time (benchmarks/results/2026-11-23-memory-ranks.md), which nothing was corrected by but the copies
# of fp8.
SEVENTY, THIRTY, DEEPSEEK = of("Llama-3.1-70B"), of("Qwen3-30B-A3B"), of("DeepSeek-V3")
LARGE = of(
    "Qwen3-30B-A3B",
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=64,
    moe_intermediate_size=1536,
    num_hidden_layers=94,
)
UNEVEN = dict(pp=8, etp=1, num_layers_in_first_pipeline_stage=11, num_layers_in_last_pipeline_stage=11)
WIDE = MegatronLayout(tp=2, pp=16, ep=64, etp=1, pipeline_model_parallel_layout="Et*4|(tttt|)*14tmL")
FINE = "moe_act,layernorm,mla_up_proj,mlp"
OURS = {
    "Llama-70B, TP8 PP4": (SEVENTY, MegatronLayout(tp=8, pp=4), dict(gpus=32, seq_length=8192), {0: 60.10, 3: 44.99}, 0.5),
    "Llama-70B, TP8 PP4 VPP5": (SEVENTY, MegatronLayout(tp=8, pp=4, vpp=5), dict(gpus=32, seq_length=8192), {0: 63.72}, 1.0),
    "Llama-70B, TP8 PP2 CP4": (SEVENTY, MegatronLayout(tp=8, pp=2), dict(gpus=64, cp=4, seq_length=32768, recompute="full"), {0: 38.90}, 0.5),
    "Llama-70B, TP8 PP4, blockwise": (SEVENTY, MegatronLayout(tp=8, pp=4), dict(gpus=32, seq_length=8192, fp8="blockwise"), {1: 54.05}, 0.5),
    "Llama-70B, TP8 PP4, tensorwise": (SEVENTY, MegatronLayout(tp=8, pp=4), dict(gpus=32, seq_length=8192, fp8="tensorwise"), {1: 54.03}, 0.5),
    "Qwen3-32B, TP4 PP2": (of("Qwen3-32B"), MegatronLayout(tp=4, pp=2), dict(gpus=16, seq_length=8192, recompute="mlp"), {0: 57.55}, 0.5),
    "Qwen3-30B-A3B, TP2 PP2 EP8": (THIRTY, MegatronLayout(tp=2, pp=2, ep=8, etp=1), dict(gpus=16, recompute="moe_act"), {0: 43.76}, 0.5),
    "Qwen3-30B-A3B, TP2 PP4 VPP3 EP4": (THIRTY, MegatronLayout(tp=2, pp=4, vpp=3, ep=4, etp=1), dict(gpus=16), {0: 47.49}, 0.5),
    "Qwen3-235B, TP4 PP8 EP8": (LARGE, MegatronLayout(tp=4, ep=8, **UNEVEN), dict(gpus=64), {0: 79.84}, 1.0),
    "Qwen3-235B, TP2 PP8 EP16": (LARGE, MegatronLayout(tp=2, ep=16, **UNEVEN), dict(gpus=128, recompute="moe_act,layernorm"), {0: 66.58}, 0.5),
    "DeepSeek-V3, TP2 PP16 EP64": (DEEPSEEK, WIDE, dict(gpus=1024, recompute=FINE), {0: 27.43, 1: 46.59, 15: 18.32}, 1.0),
    "DeepSeek-V3, TP2 PP16 EP64, full": (DEEPSEEK, WIDE, dict(gpus=1024, recompute="full"), {1: 19.04}, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", OURS)
def test_what_was_measured_of_ranks_of_whole_models(case):
    found, layout, options, measured, tolerance = OURS[case]
    report = estimate_memory(
        found,
        layout,
        num_microbatches=2 * layout.pp,
        imbalance=1.0,
        gradient_accumulation_fusion=False,
        **options,
    )
    for stage, gib in measured.items():
        some = report.stages[stage]
        assert some.allocated / GIB == pytest.approx(gib, abs=tolerance)
        assert some.allocated_band.low <= some.allocated <= some.allocated_band.high
        assert some.static + some.activations + some.transient == some.allocated


@pytest.mark.parametrize("case", MEASURED)
def test_what_was_measured_of_real_runs(case):
    found, layout, options, measured, tolerance = MEASURED[case]
    # Nothing was published of the fusion; all fit the one of Transformer Engine.
    report = estimate_memory(found, layout, **{"cross_entropy": "te"} | options)
    for stage, gib in measured.items():
        assert report.stages[stage].allocated / GIB == pytest.approx(gib, abs=tolerance)


def test_the_parts_of_a_published_profile():
    """DeepSeek-V3, PP4 VPP4 EP64 on 256 GPUs, rank 2: weights and gradients, optimizer, activations with experts' outputs kept (arXiv
    2603.07685, table 3)."""
    pipeline = "Ettt|(tttt|)*14ttmL"
    report = estimate_memory(
        of("DeepSeek-V3"),
        MegatronLayout(pp=4, ep=64, pipeline_model_parallel_layout=pipeline),
        gpus=256,
        probs_after_experts=True,
        num_microbatches=64,
    )
    stage = report.stages[2]
    assert (stage.weights + stage.grads) / GIB == pytest.approx(36.4, abs=0.5)
    assert (stage.main_params + stage.moments) / GIB == pytest.approx(32.1, abs=0.5)
    assert stage.activations / GIB == pytest.approx(131.0, abs=1.5)


# In bf16 elements for a token, at TP 1.
LAYERS = {
    ("DeepSeek-V3", "moe"): 228_544, ("DeepSeek-V3", "dense"): 170_304, ("Qwen3-30B-A3B", "moe"): 57_280, ("Llama-3.1-70B", "dense"): 137_344,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), LAYERS)
def test_what_a_layer_keeps_for_each_token(name, kind):
    found = of(name)
    z = Sizes.of(TrainingSetup.of(found, MegatronLayout(), Training()), 1.0)
    assert sum(row.bytes for row in layer_tensors(found, kind, z)) / 2 == pytest.approx(
        LAYERS[name, kind], rel=2e-3
    )


@pytest.mark.parametrize(
    ("pp", "chunks", "group", "microbatches"),
    [(4, 1, 4, 16), (4, 1, 4, 2), (4, 2, 4, 8), (4, 4, 4, 32), (8, 2, 8, 24), (2, 3, 4, 10)],
)
def test_the_fullest_moment_is_the_one_of_megatrons_own_order(pp, chunks, group, microbatches):
    """Against Megatron's own schedule table and its own warm-up, replayed."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    for rank in range(pp):
        with memory_on_cpu.as_rank(rank, pp, MegatronLayout(pp=pp, vpp=chunks)):
            total, _, warm, _ = get_pp_rank_microbatches(microbatches, chunks, group)
        table = [chunk for _, chunk in get_schedule_table(microbatches, chunks, group)]
        sizes = [1.0 + 0.37 * chunk for chunk in range(chunks)]
        alive, fullest, live = [0] * chunks, 0.0, 0.0
        for step in range(total + warm):
            if step < total:
                live += sizes[table[step]]
                alive[table[step]] += 1
            fullest = max(fullest, live)
            if step >= warm:
                live -= sizes[chunks - 1 - table[step - warm]]
        ours = moments(pp, rank, chunks, microbatches, group)
        assert max(sum(n * size for n, size in zip(m.alive, sizes)) for m in ours) == pytest.approx(fullest)


def test_recomputing_more_keeps_less():
    found, layout = (
        of("DeepSeek-V3"),
        MegatronLayout(
            tp=1, pp=8, ep=32, pipeline_model_parallel_layout="Et*7|t*8|t*8|t*8|t*8|t*8|t*8|t*6mL"
        ),
    )
    ladder = [
        "none",
        "moe_act",
        "moe_act,layernorm",
        "moe_act,layernorm,mla_up_proj",
        "moe_act,layernorm,mla_up_proj,mlp",
        "full",
    ]
    kept = [estimate_memory(found, layout, gpus=256, recompute=text).stages[0].activations for text in ladder]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    for name in ("Qwen3-30B-A3B", "Llama-3.1-70B", "DeepSeek-V3"):
        (folder / f"{name}.json").write_text(json.dumps(PUBLISHED[name][0]))
    return lambda name: str(folder / f"{name}.json")


def run(config: str, *arguments: str):
    return CliRunner().invoke(cli, ["memory", "--model", config, *arguments])


def test_the_command_answers_yes_no_and_not_surely(configs):
    layout = ["--tp", "2", "--ep", "8", "--etp", "1", "--gpus", "16"]
    yes, no, between = (
        run(configs("Qwen3-30B-A3B"), *layout, "--gpu-memory", size) for size in ("H200", "40GB", "72GiB")
    )
    assert [done.exit_code for done in (yes, no, between)] == [0, 1, 1]
    assert (
        "yes: it fits" in yes.output and "no: it does not fit" in no.output and "not surely" in between.output
    )
    assert "peak: stage 0" in yes.output and "TP2 EP8 ETP1 DP8" in yes.output
    assert run(configs("Qwen3-30B-A3B"), *layout).exit_code == 0


def test_the_command_the_call_and_megatrons_names_say_the_same(configs):
    ours = ["--tp", "4", "--pp", "2", "--dp", "2", "--recompute", "uniform:2", "--json"]
    theirs = ["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2", "--world-size", "16", "--recompute-granularity",
              "full", "--recompute-method", "uniform", "--recompute-num-layers", "2", "--json"]  # fmt: skip
    a, b = (json.loads(run(configs("Llama-3.1-70B"), *line).stdout) for line in (ours, theirs))
    assert a == b
    report = reshard.estimate_memory(
        configs("Llama-3.1-70B"), MegatronLayout(tp=4, pp=2), dp=2, recompute="uniform:2"
    )
    assert [stage["allocated"] for stage in a["stages"]] == [stage.allocated for stage in report.stages]
    for stage in report.stages:
        assert stage.static + stage.activations + stage.transient == stage.allocated
        assert sum(stage.tensors.values()) == pytest.approx(stage.activations, abs=len(stage.tensors))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--tp", "3"], 1, "--tp 3 does not divide"),
        (["--gpus", "12", "--tp", "8"], 1, "--gpus 12 is no multiple of tp 8"),
        (["--gpus", "16", "--dp", "3"], 1, "--gpus 16 makes dp 16, but --dp is 3"),
        (["--ep", "8", "--dp", "4"], 1, "ep 8 x etp 1 do not divide"),
        (["--recompute", "attention"], 1, "'attention' is none of"),
        (["--recompute", "full", "--recompute-granularity", "full"], 2, "say the same"),
        (["--pp", "4", "--vpp", "2", "--num-microbatches", "6"], 1, "leave 2 after groups of 4"),
        (["--optimizer-offload", "2"], 1, "between 0 and 1"),
        (["--imbalance", "nan"], 1, "--imbalance is nan"),
        (["--gpu-memory", "lots"], 1, "no size such as 80GB"),
        (
            ["--gpus", "1", "--engine", "tp=2", "--gpu-memory", "H100", "--colocated"],
            1,
            "do not fit on the trainer's 1 GPUs",
        ),
        (["--engine", "tp=2"], 1, "--engine needs --gpu-memory"),
        (["--fit", "--gpus", "8"], 2, "--fit needs --gpu-memory"),
        (
            ["--fit", "--gpus", "8", "--gpu-memory", "H100", "--recompute", "full"],
            2,
            "--fit chooses --recompute itself",
        ),
        (["--tp", "2", "--no-sequence-parallel"], 1, "only with sequence parallelism"),
        (["--tp", "4", "--seq-length", "4094"], 1, "pass --seq-length 4096"),
        (["--main-params", "int16", "--no-distributed-optimizer"], 1, "needs the distributed optimizer"),
        (["--html", "/nowhere/page.html"], 1, "is no directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_sentence(configs, arguments, code, said):
    done = run(configs("Qwen3-30B-A3B"), *arguments)
    found = status_of_result(done)
    assert found[0] == code and said in found[1]


def test_a_sequence_that_tp_does_not_divide_names_what_does(configs):
    """Without experts sequence parallelism can be left out, too; either way it is planned then."""
    found = status_of_result(run(configs("Llama-3.1-70B"), "--tp", "4", "--cp", "2", "--seq-length", "4092"))
    assert found[0] == 1 and found[1].endswith("pass --seq-length 4096, or --no-sequence-parallel")
    for options in (["--seq-length", "4096"], ["--seq-length", "4092", "--no-sequence-parallel"]):
        assert run(configs("Llama-3.1-70B"), "--tp", "4", "--cp", "2", *options).exit_code == 0


def status_of_result(done) -> tuple[int, str]:
    """The exit code that `main` makes of what a command raised, and its sentence."""
    if isinstance(done.exception, ReshardError):
        return 1, str(done.exception)
    return done.exit_code, done.output


def test_what_fits_is_what_the_estimate_says_fits(configs):
    limits = [
        "--fit",
        "--gpu-memory",
        "40GB",
        "--at-most-tp",
        "4",
        "--seq-length",
        "8192",
        "--json",
        "--show",
        "5",
    ]
    found = json.loads(run(configs("Qwen3-30B-A3B"), *limits, "--gpus", "16").stdout)
    assert 0 < len(found["layouts"]) <= 5 and found["looked_at"] > 20
    for one in found["layouts"]:
        assert one["layout"]["tp"] <= 4
        options = {
            "gpus": 16,
            "seq_length": 8192,
            "recompute": one["recompute"],
            "optimizer_offload": one["offload"],
        }
        again = estimate_memory(
            QWEN,
            MegatronLayout(**one["layout"]),
            gpu_memory="40GB",
            num_microbatches=one["microbatches"],
            **options,
        )
        assert (again.peak.total_band.high, again.fits) == (one["high"], True if one["surely"] else None)
    assert run(configs("DeepSeek-V3"), "--gpus", "8", "--gpu-memory", "H100", "--fit").exit_code == 1


def test_the_phases_of_a_step(configs):
    line = [
        "--tp",
        "2",
        "--ep",
        "8",
        "--etp",
        "1",
        "--gpus",
        "16",
        "--gpu-memory",
        "H200",
        "--engine",
        "tp=2",
        "--json",
    ]
    phases = {
        phase["name"]: phase
        for phase in map(as_dict, json.loads(run(configs("Qwen3-30B-A3B"), *line).stdout)["phases"])
    }
    # 48 layers, keys and values of 2 heads of 128 on a rank, 2 bytes: 49152 bytes a token; the weights are 28.4 GiB
    low, high = phases["generate"]["kv_tokens"]
    assert (0.9 * 139.8 - 28.5 - 8) * GIB / 49152 < low < high < (0.9 * 139.8 - 28.4) * GIB / 49152
    assert phases["train"]["parts"]["trainer's weights"] == phases["sync"]["parts"]["trainer's weights"]
    assert sum(phases["logprob"]["parts"].values()) < sum(phases["train"]["parts"].values())


def test_the_phases_of_a_step_that_was_measured():
    """Qwen3-8B's widths with 12 layers, and a vLLM with half of an H200 (benchmarks/results/2026-11-23-rl-step.md); the controls are an engine
    with less and a trainer that stays."""
    found = of(
        "Qwen3-32B", num_hidden_layers=12, hidden_size=4096, intermediate_size=12288, num_attention_heads=32
    )
    options = dict(
        gpus=1,
        num_microbatches=1,
        imbalance=1.0,
        gradient_accumulation_fusion=False,
        gpu_memory=int(139.8 * GIB),
    )

    def bands(**engine) -> dict:
        phases = estimate_memory(
            found, MegatronLayout(), **options, engine=EngineSetup(VllmLayout(), **engine)
        ).phases
        return {phase.name: [bound / GIB for bound in phase.total_band] for phase in phases}

    measured = {"generate": 78.1, "sync": 21.1, "logprob": 18.4, "train": 75.5}
    for name, (low, high) in bands(utilization=0.5).items():
        assert low - 0.2 < measured[name] < high, name
    assert bands(utilization=0.45)["generate"][1] < measured["generate"]
    assert bands(utilization=0.5, offload=("grads", "optimizer"))["generate"][0] > measured["generate"] - 1


def as_dict(phase: list) -> dict:
    """A NamedTuple, which JSON has as a list."""
    return dict(zip(Phase._fields, phase)) if isinstance(phase, list) else phase


def test_the_page_has_every_stage_and_part(configs, tmp_path):
    page = tmp_path / "memory.html"
    line = [
        "--tp",
        "4",
        "--pp",
        "4",
        "--gpus",
        "32",
        "--gpu-memory",
        "H100",
        "--engine",
        "tp=8",
        "--html",
        str(page),
    ]
    run(configs("Llama-3.1-70B"), *line)
    text = page.read_text(encoding="utf-8")
    for said in (
        "llama (80 layers)",
        "The phases of an RL step",
        "main parameters",
        "tokens of keys and values",
        "gate and up",
    ):
        assert said in text
