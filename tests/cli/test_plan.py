"""`reshard plan`: what a refit would move, from the sizes alone. That a live refit moves just that
is checked in `test_refit`."""

import json
import resource
import subprocess

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, tuples
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

from reshard import MegatronLayout, ReshardError, SglangLayout, VllmLayout, plan_refit
from reshard.cli.main import cli
from reshard.models.model import Model
from reshard.refit.copying.tables import table_of, tile_count, tiles_of
from tests.models.test_published import PUBLISHED
from tests.tools.disk import command


def model(name: str) -> Model:
    return Model.from_hf(PUBLISHED[name][0], name)


def run(*arguments: str):
    result = CliRunner().invoke(cli, ["plan", *arguments])
    return result


@pytest.fixture
def qwen(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-32B"][0]))
    return str(tmp_path)


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(
    ("experts", "tp", "dp"), [(128, 4, 1), (128, 2, 3), (256, 8, 32), (60, 8, 1), (7, 2, 1)]
)
def test_experts_are_where_vllm_puts_them(experts, tp, dp, strategy):
    config = PUBLISHED["Qwen3-30B-A3B"][0] | {"num_experts": experts, "num_experts_per_tok": 4}
    layout = VllmLayout(tp=tp, dp=dp, expert_parallel=True, round_robin=strategy == "round_robin")
    for rank in range(tp * dp):
        _, table, _ = determine_expert_map(tp * dp, rank, experts, strategy)
        theirs = sorted((local, expert) for expert, local in enumerate(table.tolist()) if local >= 0)
        assert layout.rank(Model.from_hf(config), rank).experts == tuple(expert for _, expert in theirs)


@pytest.mark.parametrize(
    ("experts", "redundant", "tp", "dp"), [(128, 32, 8, 1), (256, 32, 8, 4), (8, 24, 2, 2)]
)
def test_redundant_experts_are_where_vllm_puts_them(experts, redundant, tp, dp):
    config = PUBLISHED["Qwen3-30B-A3B"][0] | {"num_experts": experts, "num_experts_per_tok": 4}
    layout = VllmLayout(tp=tp, dp=dp, expert_parallel=True, redundant_experts=redundant)
    of_sglang = SglangLayout(tp=tp * dp, ep=tp * dp, redundant_experts=redundant)
    in_places = EplbState.build_initial_global_physical_to_logical_map(experts, redundant)
    for rank in range(tp * dp):
        _, table, _ = determine_expert_map(tp * dp, rank, experts + redundant, "linear")
        own = sorted((local, place) for place, local in enumerate(table.tolist()) if local >= 0)
        expected = tuple(in_places[place] for _, place in own)
        assert layout.rank(Model.from_hf(config), rank).experts == expected
        assert of_sglang.rank(Model.from_hf(config), rank).experts == expected


def test_a_refit_writes_each_copy_of_an_expert(tmp_path):
    """Of Qwen3-30B-A3B's 128 experts each is 48 x 3 x 2048 x 768 elements in bf16."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"][0]))
    trainer = ["--trainer", "tp=2,ep=8,etp=1", "--ranks", "0,7", "--json", "--engine"]
    planned = []
    for engine in (
        "tp=8,ep",
        "tp=8,ep,num_redundant_experts=32",
        "sglang:tp=8,ep,ep_num_redundant_experts=32",
    ):
        ranks = json.loads(run(str(tmp_path), *trainer, engine).stdout)["ranks"]
        planned.append([rank["weight_bytes"] for rank in ranks])
    copies = 4 * 48 * 3 * 2048 * 768 * 2  # of four experts, on each rank
    assert planned[1] == planned[2] == [few + copies for few in planned[0]]
    with pytest.raises(
        ReshardError, match="make 158 of 128 experts, which 8 ranks cannot hold evenly; use 8"
    ):
        VllmLayout(tp=8, expert_parallel=True, redundant_experts=30).check(model("Qwen3-30B-A3B"))


@pytest.mark.parametrize(("layers", "pp"), [(48, 4), (61, 4), (61, 8), (61, 16), (32, 5), (28, 3), (7, 7)])
def test_layers_are_where_vllm_puts_them(layers, pp):
    some = Model.from_hf(PUBLISHED["Llama-3.1-8B"][0] | {"num_hidden_layers": layers})
    for stage in range(pp):
        assert VllmLayout(tp=2, pp=pp).rank(some, 2 * stage + 1).layers == tuple(
            range(*get_pp_indices(layers, stage, pp))
        )


def test_every_byte_comes_from_somewhere_and_none_is_counted_twice():
    found = plan_refit(model("Qwen3-30B-A3B"), MegatronLayout(tp=2, ep=8, etp=1), VllmLayout(tp=8))
    assert found.colocated and found.trainer_ranks == found.engine_ranks == 8
    for rank in found.ranks:
        assert rank.local_bytes + rank.host_bytes == rank.weight_bytes and not rank.network_bytes
    assert sum(found.out_bytes) == sum(rank.host_bytes for rank in found.ranks)
    # All ranks together hold the experts, the MLPs, the heads and the vocabulary once; keys and
    # values twice, the small rest eight times.
    whole = 2 * PUBLISHED["Qwen3-30B-A3B"][1] * 1e9
    assert whole * 0.99 < sum(rank.weight_bytes for rank in found.ranks) < whole * 1.02
    # A trainer of this layout repeats attention and vocabulary over its four data-parallel replicas.
    assert max(found.trainer_bytes) > min(r.weight_bytes for r in found.ranks)
    assert (
        found.wire_seconds == max(max(r.host_bytes for r in found.ranks), *found.out_bytes) / found.link_rate
    )


def test_a_tensor_that_no_rank_of_the_engine_holds_is_named(monkeypatch):
    small, trainer = model("Qwen3-30B-A3B"), MegatronLayout(ep=8, etp=1)
    engine = VllmLayout(tp=4, expert_parallel=True)
    monkeypatch.setattr(
        VllmLayout,
        "_local_experts",
        lambda self, experts, ranks, rank: tuple(range(rank, experts - 1, ranks)),
    )
    with pytest.raises(ReshardError, match=r"no rank of the engine holds 144 .*experts\.127\.gate_proj"):
        plan_refit(small, trainer, engine)
    plan_refit(small, trainer, engine, ranks=[1])  # of one rank that is no fault


def test_replicas_share_the_reading_out():
    found = plan_refit(
        model("Qwen3-30B-A3B"),
        MegatronLayout(ep=8),
        VllmLayout(tp=1, dp=8, expert_parallel=True),
        colocated=False,
        gpus_per_host=16,
    )
    assert max(found.out_bytes) < 1.001 * min(found.out_bytes)
    dense = plan_refit(
        model("Llama-3.1-8B"),
        MegatronLayout(tp=2),
        VllmLayout(tp=2, dp=4),
        dp=4,
        colocated=False,
        gpus_per_host=16,
    )
    assert max(dense.out_bytes) < 1.001 * min(dense.out_bytes)


def test_engines_of_other_hosts_pass_on_what_they_want_alike_so_that_sixteen_take_as_long_as_one():
    trainer, engine = MegatronLayout(tp=4, pp=2), VllmLayout(tp=4)
    one, sixteen = (plan_refit(model("Qwen3-32B"), trainer, engine, engines=count) for count in (1, 16))
    assert sixteen.relayed_network_seconds == one.network_seconds and not one.most_relays
    assert sixteen.most_relays == 15 and sixteen.network_seconds == pytest.approx(
        8 * one.network_seconds, rel=0.01
    )
    assert sixteen.gpus == 8 + 16 * 4 and sixteen.ranks[0].network_bytes == one.ranks[0].network_bytes
    assert 0 < sixteen.relayed_link_seconds < sixteen.relayed_network_seconds, "two engines share a host"
    experts = VllmLayout(tp=1, dp=8, expert_parallel=True)
    found = plan_refit(model("Qwen3-30B-A3B"), MegatronLayout(pp=2), experts, gpus_per_host=2)
    assert found.relayed_network_seconds < 0.85 * found.network_seconds, "all ranks want its attention"


def test_hosts_are_told_apart():
    found = plan_refit(model("Qwen3-32B"), MegatronLayout(tp=4, pp=2), VllmLayout(tp=8), gpus_per_host=4)
    # Rank 1 has eighths of both stages to fetch: one stage from its host, the other from the next.
    assert found.ranks[1].host_bytes == pytest.approx(found.ranks[1].network_bytes, rel=0.01)
    # A trainer's rank feeds two of the other host, which is more than any rank receives from there.
    assert found.wire_seconds == pytest.approx(max(found.out_bytes) / found.network_rate, rel=0.01)
    assert found.wire_seconds == found.network_seconds > found.link_seconds
    assert found.link_seconds >= max(r.host_bytes for r in found.ranks) / found.link_rate > 0


def test_deepseek_v3_is_planned_from_1024_ranks_to_256():
    trainer = MegatronLayout(tp=1, pp=16, ep=64, etp=1, pipeline_model_parallel_layout="Et*3|(t*4|)*14t*2mL")
    found = plan_refit(
        model("DeepSeek-V3"), trainer, VllmLayout(tp=8, dp=32, expert_parallel=True), ranks=[0, 100, 255]
    )
    assert (found.trainer_ranks, found.engine_ranks, found.gpus) == (1024, 256, 1280) and not found.colocated
    # One expert of 256 in each MoE layer (88 MB), all of the shared ones, an eighth of most of the rest.
    assert all(r.network_bytes == r.weight_bytes and 15e9 < r.weight_bytes < 16e9 for r in found.ranks)


@pytest.mark.parametrize(("engine", "options", "sentence"), [
    (VllmLayout(tp=3), {}, "vLLM's tp 3 does not divide 64 attention heads; sizes that do: 1, 2, 4, 8, 16, 32, 64"),
    (VllmLayout(pp=65), {}, "vLLM's pp 65 is more than the model's 64 layers"),
    (VllmLayout(tp=2, expert_parallel=True), {}, "expert parallelism needs experts"),
    (VllmLayout(tp=2, round_robin=True), {}, "round-robin only where the model has expert groups"),
    (VllmLayout(tp=2, redundant_experts=2), {}, "vLLM's redundant_experts 2 need expert parallelism"),
    (VllmLayout(tp=2), {"ranks": [2]}, "the engine's 2 ranks are 0 to 1; asked for [2]"),
    (VllmLayout(tp=16), {"colocated": True}, "the engine's 16 ranks do not fit on the trainer's 8 GPUs"),
])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(engine, options, sentence):
    with pytest.raises(ReshardError) as error:
        plan_refit(model("Qwen3-32B"), MegatronLayout(tp=4, pp=2), engine, **options)
    assert sentence in str(error.value)


def test_gpt_oss_is_not_planned_at_a_tp_above_its_key_heads_where_vllm_does_not_start():
    """Its class in vLLM has no key head then, and divides by their number; those of other families repeat them."""
    gpt_oss = model("gpt-oss-20b")
    VllmLayout(tp=8).check(gpt_oss)
    VllmLayout(tp=16).check(model("MiniMax-M2.7"))
    with pytest.raises(ReshardError, match="vLLM's tp 16 is above the 8 key heads of a GptOssForCausalLM"):
        plan_refit(gpt_oss, MegatronLayout(), VllmLayout(tp=16))


def test_olmoe_is_planned_into_sglang_as_its_class_there_can_be_split():
    olmoe = model("OLMoE-1B-7B-0924")
    for sizes, sentence in ({"tp": 2}, "use tp=1"), ({"pp": 2}, "has no pipeline stages: use pp=1"):
        with pytest.raises(ReshardError, match=f"SGLang's class of OlmoeForCausalLM .*{sentence}"):
            plan_refit(olmoe, MegatronLayout(), SglangLayout(**sizes))
    SglangLayout(pp=2).check(model("MiniMax-M2.7"))


def test_gpt_oss_is_planned_into_sglang_without_expert_parallelism():
    SglangLayout(tp=2).check(model("gpt-oss-20b"))
    with pytest.raises(
        ReshardError, match="GptOssForCausalLM cannot be refitted with expert parallelism: use ep=1"
    ):
        plan_refit(model("gpt-oss-20b"), MegatronLayout(), SglangLayout(tp=2, ep=2))


@pytest.mark.parametrize("change", [{"kv_lora_rank": 10**9}, {"q_lora_rank": 10**9},
                                    {"vocab_size": 2 * 10**9, "hidden_size": 10**6}])  # fmt: skip
def test_sizes_that_no_gpu_holds_are_refused_at_once_and_in_little_memory(change, tmp_path):
    """Planned piece by piece they took gigabytes and half a minute."""

    def small():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V3"][0] | change))
    arguments = [
        "plan",
        "--model",
        tmp_path,
        "--trainer",
        "tp=8,ep=8,etp=1",
        "--engine",
        "tp=8,ep",
        "--ranks",
        "0",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(command(*arguments), capture_output=True, text=True, preexec_fn=small)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert done.returncode == 1 and "and no GPU holds more than" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
    assert seconds < 15


@settings(deadline=None)
@given(
    copies=lists(tuples(integers(1, 300), integers(1, 300_000), integers(0, 9), integers(0, 9)), max_size=12)
)
def test_tiles_are_counted_as_they_are_cut(copies):
    table = table_of(
        [(0, 0, rows, width, width + more, width + further) for rows, width, more, further in copies]
    )
    assert tile_count(table) == len(tiles_of(table)[0])


def test_data_parallel_sizes_must_make_room_for_the_experts():
    with pytest.raises(
        ReshardError,
        match="tp 2 x cp 1 x dp 3 are 6 ranks a pipeline stage, which ep 4 x etp 1 do not divide",
    ):
        plan_refit(model("Qwen3-30B-A3B"), MegatronLayout(tp=2, ep=4, etp=1), VllmLayout(tp=2), dp=3)


def test_the_command_prints_a_row_for_each_rank(qwen):
    result = run("--model", qwen, "--trainer", "tp=4,pp=2", "--engine", "tp=8")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert (
        lines[0] == "qwen3 (64 layers): Megatron TP4 PP2 DP1 (8 ranks) to vLLM TP8 (8 ranks) on the same GPUs"
    )
    assert [line.split()[0] for line in lines[2:10]] == [str(rank) for rank in range(8)]
    assert (
        "wire floor 22.1 ms: within hosts 22.1 ms at 370 GB/s, between hosts 0.0 ms at 50 GB/s"
        in result.output
    )


def test_what_changed_takes_its_share_of_the_network(qwen):
    line = (
        "--model",
        qwen,
        "--trainer",
        "tp=8",
        "--engine",
        "tp=8",
        "--separate",
        "--ranks",
        "0",
        "--changed",
        "1",
    )
    planned = json.loads(run(*line, "--json").output)
    assert planned["changed"] == 0.01 and planned["network_seconds"] > 0
    # 2 bytes of a value and 2 of its place for one element in a hundred, and 32 bytes for a MiB.
    assert planned["delta_network_seconds"] == pytest.approx(planned["network_seconds"] * 0.02, rel=1e-2)
    with_sign = run(*line[:-1], "1%", "--json").output
    assert json.loads(with_sign)["changed"] == 0.01
    for wrong in ("nan", "101", "few", "-1%"):
        refused = run(*line[:-1], wrong)
        assert (
            refused.exit_code == 2
            and "is not a percentage from 0 to 100, such as 1 or 0.3%" in refused.output
        )
    said = run(*line[:5], "tp=4", "--separate", "--engines", "3").output
    assert "to vLLM 3 of TP4 (4 ranks) on other GPUs" in said and "\nwith relays " in said
    shown = f"of 1 % changed, with delta=True: between hosts {planned['delta_network_seconds'] * 1e3:.1f} ms"
    assert shown in run(*line).output
    with pytest.raises(ReshardError, match="is not a share of the elements"):
        plan_refit(None, None, None, changed=1.5)


def test_the_call_takes_what_the_command_takes_and_names_what_is_no_layout(qwen):
    call = {"ranks": [0], "itemsize": 2}
    by_path, by_model = (
        plan_refit(which, MegatronLayout(tp=2), VllmLayout(tp=2), **call)
        for which in (qwen, model("Qwen3-32B"))
    )
    assert by_path.out_bytes == by_model.out_bytes and by_path.model == by_model.model
    for arguments, said in (
        (({"tp": 2}, VllmLayout()), "layout is {'tp': 2}, not a reshard.MegatronLayout"),
        ((MegatronLayout(), "tp=2"), "engine is 'tp=2', not a layout such as reshard.VllmLayout"),
    ):
        with pytest.raises(ReshardError, match=said):
            plan_refit(qwen, *arguments)
    for layout, engine in ((VllmLayout, "vLLM"), (SglangLayout, "SGLang")):
        with pytest.raises(ReshardError, match=f"{engine}'s tp is '2'; it is a whole number"):
            layout(tp="2")


def test_the_command_plans_for_sglang_too(qwen):
    result = run("--model", qwen, "--trainer", "tp=4,pp=2", "--engine", "sglang:tp=8,dp=2")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(
        "qwen3 (64 layers): Megatron TP4 PP2 DP1 (8 ranks) to SGLang TP8 DP-attention2 (8 ranks) on the same GPUs"
    )
    for engine, sentence in (
        ("sglang:tp=8,ep", "ep 8 does not divide the model's 0 experts"),
        ("sglang:tp=8,dp=3", "dp 3 does not divide its tp 8"),
        ("tgi:tp=8", "'tgi' is not one of vllm, sglang"),
    ):
        result = run("--model", qwen, "--trainer", "tp=8", "--engine", engine)
        assert result.exit_code and sentence in f"{result.output}{result.exception}"
    with pytest.raises(ReshardError, match="NemotronHForCausalLM computes A of Mamba layers.* refit a vLLM"):
        plan_refit(model("Nemotron-Nano-9B-v2"), MegatronLayout(tp=2), SglangLayout(tp=2))


def test_the_command_speaks_json(qwen):
    result = run(
        "--model",
        qwen,
        "--trainer",
        "tp=2,pp=2,dp=2",
        "--engine",
        "tp=2,dp=2",
        "--separate",
        "--ranks",
        "1",
        "--json",
    )
    found = json.loads(result.output)
    assert (
        found["engine"] == "TP2 DP2"
        and found["trainer_ranks"] == 8
        and [r["rank"] for r in found["ranks"]] == [1]
    )
    assert (
        found["ranks"][0]["gpu"] == 9
        and found["ranks"][0]["network_bytes"] == found["ranks"][0]["weight_bytes"]
    )


@pytest.mark.parametrize("arguments", [
    ("--trainer", "tp=4,x=2", "--engine", "tp=8"), ("--trainer", "tp=0", "--engine", "tp=8"),
    ("--trainer", "tp=4", "--engine", "tp=8,ep=2"), ("--trainer", "tp=4", "--engine", "tp=4", "--ranks", "a"),
    ("--trainer", "tp=4", "--engine", "tp=4", "--ranks", "0;1"),
    ("--trainer", "tp=4", "--engine", "tp=4", "--link-rate", "0"),
])  # fmt: skip
def test_a_mistake_in_the_command_line_is_status_2(arguments, qwen):
    result = run("--model", qwen, *arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_pipeline_layout_may_have_commas(qwen):
    result = run(
        "--model",
        qwen,
        "--trainer",
        "tp=2,pp=2,pipeline_model_parallel_layout=Et*31|,t*33L",
        "--engine",
        "tp=4",
        "--json",
    )
    assert json.loads(result.output)["trainer"].startswith("TP2 PP2")
