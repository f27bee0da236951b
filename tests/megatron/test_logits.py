"""A converted checkpoint, loaded by Megatron-LM's own code at another layout, gives the logits of
transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import VARIANTS, hf_logits

LOSS_TOLERANCE = 5e-3  # of gradients at TP4, where any model's loss over a split vocabulary is that far off
TOLERANCE = 2e-5  # fp32, four layers: sums in another order give about 1e-6
PARALLEL = (
    "--tensor-model",
    "--pipeline-model",
    "--expert-",
    "--num-virtual",
    "--decoder-",
    "--account-for",
    "--make-vocab",
    "--padded-vocab",
    "--sequence-parallel",
)


def flags_at(directory: Path, *parallel: str) -> list[str]:
    """The command line that the conversion wrote, at another layout."""
    lines = [
        line
        for line in (directory / "megatron_flags.txt").read_text().splitlines()
        if not line.startswith(PARALLEL)
    ]
    # Another padding than the one written: 1000 rows at TP1, 1008 at TP2, 1024 above.
    return " ".join([*lines, "--make-vocab-size-divisible-by 8", *parallel]).split()


def logits_in_megatron(
    directory: Path, tokens: torch.Tensor, *parallel: str, world_size: int = 1
) -> torch.Tensor:
    """Logits of the last pipeline stage's ranks, which all have to agree."""
    results = run_on_ranks(world_size, "load_and_run", flags_at(directory, *parallel), str(directory), tokens)
    outputs = [output for _, output in results if output is not None]
    assert all(torch.allclose(output, outputs[0], rtol=0, atol=TOLERANCE) for output in outputs[1:])
    return outputs[0]


def compare(source: Path, directory: Path, *parallel: str, world_size: int = 1) -> float:
    """The largest difference from transformers' logits."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 1000, (2, 24))
    output = logits_in_megatron(directory, tokens, *parallel, world_size=world_size)
    expected = hf_logits(source, tokens)
    assert expected.std() > 0.05, "flat logits would hide errors"
    return float((output[..., : expected.shape[-1]] - expected).abs().max())


TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
VPP = "--num-virtual-stages-per-pipeline-rank"

# variant, written at, loaded with, on how many ranks: each family whose tensors are split in a way of its own,
# and each axis of a layout, on either side, once. Of one rank all variants are below; files of any layout hold
# the same tensors (test_bitwise.py).
RELOADS = [
    ("llama", MegatronLayout(tp=2, pp=2), f"{TP} 4", 4),
    ("llama-rope-tied", MegatronLayout(tp=4), f"{PP} 2 {VPP} 2", 2),
    ("llama-bias", MegatronLayout(tp=8), f"{TP} 2", 2),
    ("mistral", MegatronLayout(pp=2, vpp=2), f"{TP} 2", 2),
    ("qwen2-tied", MegatronLayout(pp=4), f"{TP} 2 {PP} 2", 4),
    (
        "qwen3",
        MegatronLayout(pp=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2),
        f"{TP} 8",
        8,
    ),
    ("qwen3-tied", MegatronLayout(tp=2), f"{PP} 2 --decoder-first-pipeline-num-layers 3", 2),
    ("qwen3-moe", MegatronLayout(ep=8, etp=1), f"{TP} 2 {EP} 2 {ETP} 2", 4),
    ("qwen3-moe", MegatronLayout(tp=4, ep=4, etp=1), f"{PP} 2 {VPP} 2 {EP} 2 {ETP} 1", 4),
    ("qwen3-moe-mixed", MegatronLayout(pp=4, ep=2, etp=1), f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("deepseek-v3", MegatronLayout(tp=2, pp=2, ep=4, etp=1), f"{TP} 4 {EP} 2 {ETP} 2", 4),
    (
        "deepseek-v3",
        MegatronLayout(pp=2, ep=2, etp=1, pipeline_model_parallel_layout="Ettt|tL"),
        f"{PP} 4",
        4,
    ),
    ("deepseek-v3-no-q-lora", MegatronLayout(tp=4, ep=2, etp=2), f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("glm4-moe", MegatronLayout(tp=2, pp=2, ep=4, etp=1), f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("mixtral", MegatronLayout(tp=2, pp=2, ep=4, etp=1), f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("seed-oss", MegatronLayout(tp=2, pp=2), f"{TP} 4", 4),  # twice the key heads
    ("phi3", MegatronLayout(tp=2, pp=2), f"{TP} 4", 4),
    ("qwen2-moe", MegatronLayout(tp=2, pp=2, ep=4, etp=1), f"{TP} 4 {EP} 2 {ETP} 2", 4),
    # twice the key heads
    ("minimax-m2", MegatronLayout(tp=2, pp=2, ep=2, etp=1), f"{TP} 4 {EP} 4 {ETP} 1", 4),
    ("olmoe", MegatronLayout(tp=2, pp=2, ep=4, etp=1), f"{TP} 4 {EP} 2 {ETP} 2", 4),
    ("ernie", MegatronLayout(tp=2, ep=4, etp=1), f"{PP} 2 {VPP} 2", 2),
    ("dots1", MegatronLayout(tp=2, pp=2, ep=4, etp=1), f"{TP} 4 {EP} 2 {ETP} 2", 4),
    ("ling", MegatronLayout(tp=2, pp=2, ep=4, etp=1), f"{TP} 4 {EP} 2 {ETP} 2", 4),
    ("ling-bias", MegatronLayout(pp=2, ep=2, etp=1), f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("gpt-oss", MegatronLayout(tp=4, pp=2, ep=4, etp=1), f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("glm4-moe-lite", MegatronLayout(pp=2, ep=4, etp=1), f"{TP} 2 {EP} 2 {ETP} 1", 2),
    # An indexer wants sequence parallelism at TP > 1, which Megatron's local experts cannot do.
    ("deepseek-v32", MegatronLayout(tp=4, ep=4, etp=1), f"{EP} 2 {ETP} 1", 2),
    ("glm-moe-dsa-shared", MegatronLayout(tp=2, pp=4, ep=2), f"{PP} 2", 2),
]


# Latent experts are Transformer Engine's in Megatron, and not on a CPU.
@pytest.mark.parametrize(
    "variant", [name for name, config in VARIANTS.items() if not getattr(config, "moe_latent_size", None)]
)
def test_megatron_gives_the_logits_of_transformers(variant, checkpoint, tmp_path):
    hf_to_mcore(checkpoint(variant), tmp_path / "mcore", MegatronLayout(), transformer_impl="local")
    assert compare(checkpoint(variant), tmp_path / "mcore") < TOLERANCE


@pytest.mark.parametrize(
    ("variant", "written", "loaded", "ranks"),
    RELOADS,
    ids=lambda value: str(value).replace("-model-parallel-size", ""),
)
def test_a_checkpoint_of_one_layout_loads_at_another(variant, written, loaded, ranks, checkpoint, tmp_path):
    hf_to_mcore(checkpoint(variant), tmp_path / "mcore", written, transformer_impl="local")
    assert compare(checkpoint(variant), tmp_path / "mcore", loaded, world_size=ranks) < TOLERANCE


@pytest.mark.parametrize(("variant", "flag"), [
    ("glm-moe-dsa-shared", "--dsa-indexer-topk 9"), ("deepseek-v32", "--dsa-indexer-rope-interleaved"),
    ("gpt-oss", "--window-size 6,0"), ("gpt-oss", "--window-attn-skip-freq [0,1,0,1]"),
    ("gpt-oss", "--activation-func-clamp-value 0.5"), ("gpt-oss", "--glu-linear-offset 0.0"),
])  # fmt: skip
def test_another_choice_of_tokens_or_numbers_shows_in_the_logits(variant, flag, checkpoint, tmp_path):
    """Negative control of the above: the tokens that an indexer or a window leaves out, and what a
    clamp does, matter here."""
    hf_to_mcore(checkpoint(variant), tmp_path / "mcore", transformer_impl="local")
    assert compare(checkpoint(variant), tmp_path / "mcore", flag) > 20 * TOLERANCE


def test_a_numbered_iteration_loads_as_that_iteration(checkpoint, tmp_path):
    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore", transformer_impl="local", iteration=12)
    tokens = torch.randint(0, 1000, (1, 8))
    [(iteration, _)] = run_on_ranks(
        1, "load_and_run", flags_at(tmp_path / "mcore"), str(tmp_path / "mcore"), tokens
    )
    assert iteration == 12


@pytest.mark.parametrize("mistake", ["experts", "gate and up", "head", "row", "norm"])
def test_a_swapped_tensor_shows_in_the_logits_and_in_diff(mistake, checkpoint, tmp_path):
    from reshard import diff

    hf_to_mcore(
        checkpoint("qwen3-moe"),
        tmp_path / "mcore",
        MegatronLayout(tp=2, ep=2, etp=1),
        transformer_impl="local",
    )
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    swap(tmp_path / "back" / "model.safetensors", mistake)
    (tmp_path / "back" / "reshard.json").unlink()  # by which the conversion would name it
    assert not diff(checkpoint("qwen3-moe"), tmp_path / "back").equal
    hf_to_mcore(tmp_path / "back", tmp_path / "wrong", MegatronLayout(tp=2), transformer_impl="local")
    assert not diff(checkpoint("qwen3-moe"), tmp_path / "wrong").equal
    assert compare(checkpoint("qwen3-moe"), tmp_path / "wrong") > 20 * TOLERANCE


def swap(path: Path, what: str) -> None:
    """Exchange two things of the same shape in a safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    layer = "model.layers.1."
    if what == "experts":
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            a, b = (f"{layer}mlp.experts.{e}.{matrix}.weight" for e in (2, 5))
            tensors[a], tensors[b] = tensors[b], tensors[a]
    elif what == "gate and up":
        for expert in range(8):
            a, b = (f"{layer}mlp.experts.{expert}.{matrix}_proj.weight" for matrix in ("gate", "up"))
            tensors[a], tensors[b] = tensors[b], tensors[a]
    elif what == "norm":
        a, b = (f"{layer}self_attn.{x}_norm.weight" for x in "qk")
        tensors[a], tensors[b] = tensors[b], tensors[a]
    else:
        rows = tensors[
            f"{layer}self_attn.v_proj.weight" if what == "row" else f"{layer}self_attn.q_proj.weight"
        ]
        n = 1 if what == "row" else 16
        first = rows[:n].clone()
        rows[:n] = rows[-n:]
        rows[-n:] = first
    save_file(tensors, path, metadata={"format": "pt"})


def test_norms_over_all_heads_have_the_gradients_of_transformers(checkpoint, tmp_path):
    """TP4 repeats each of the two key heads, and Megatron sums the norms' gradients over its ranks.
    The control has no gradient through the sum of squares of other ranks' heads."""
    source = checkpoint("minimax-m2")
    hf_to_mcore(source, tmp_path / "mcore", transformer_impl="local")
    torch.manual_seed(1)
    tokens = torch.randint(0, 1000, (2, 24))
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    theirs(tokens, labels=tokens).loss.backward()
    wanted = {
        f"decoder.layers.{layer}.self_attention.{x}_layernorm.weight": theirs.get_parameter(
            f"model.layers.{layer}.self_attn.{x}_norm.weight"
        ).grad
        for layer in range(4)
        for x in "qk"
    }

    def distance(held: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
        return max(float((held[name] - expected[name]).norm() / expected[name].norm()) for name in expected)

    def on_ranks(tp: int, **options) -> list[dict[str, torch.Tensor]]:
        flags = flags_at(tmp_path / "mcore", f"{TP} {tp} {ETP} 1")
        arguments = flags, str(tmp_path / "mcore"), tokens
        return run_on_ranks(tp, "gradients", *arguments, module="live_megatron_on_cpu", options=options)

    [alone] = on_ranks(1)
    assert distance(alone, wanted) < 1e-5
    alone = {name: gradient for name, gradient in alone.items() if "linear_qkv.weight" in name}
    ranks, wrong = on_ranks(4), on_ranks(4, detached=True)
    assert all(distance(held, wanted) < LOSS_TOLERANCE for held in ranks)
    joined, apart = (
        {name: torch.cat([held[name] for held in of]) for name in alone} for of in (ranks, wrong)
    )
    assert distance(joined, alone) < LOSS_TOLERANCE < 3 * LOSS_TOLERANCE < distance(apart, alone)
