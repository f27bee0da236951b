"""The demo: a small real Qwen3-MoE to Megatron and back, proven by Megatron's own loader and by
logits."""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.core.extras import require

SIZES: dict[str, Any] = dict(
    vocab_size=8000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192,
    norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.05, tie_word_embeddings=False,
)  # fmt: skip


@dataclass
class Step:
    """One step of the demo: its title, its outcome for people, and True if that is right."""

    title: str
    outcome: str
    ok: bool


def run_demo(folder: Path) -> Iterator[Step]:
    """Run the demo in `folder`; yield each step when it is done.

    The checkpoint is made with transformers (random weights), converted at TP2 PP2 EP2, loaded
    whole by ``dist_checkpointing`` of Megatron-Core, compared with tensors put together here by
    hand, converted back, and compared bit for bit and by logits.
    """
    require("parity", "torch", "transformers", "megatron.core")
    from reshard import MegatronLayout, check, diff, hf_to_mcore, mcore_to_hf

    source, mcore, back = folder / "hf", folder / "mcore", folder / "hf-again"
    with _quiet():
        parameters = _make(source)
    yield Step(
        "make a Qwen3-MoE with transformers",
        f"{parameters / 1e6:.1f} million parameters, bf16, {source}",
        True,
    )
    layout = MegatronLayout(tp=2, pp=2, ep=2, etp=1)
    report = hf_to_mcore(source, mcore, layout)
    yield Step(f"hf-to-mcore at {layout}", f"{report.tensors} tensors, {report.files} files, {mcore}", True)
    with _quiet():
        loaded = _load_with_megatron(mcore / "release")
        wrong = _differences(source, loaded)
    yield Step(
        "load it with Megatron-Core's dist_checkpointing",
        f"{len(loaded)} parameters, {len(wrong)} unlike those assembled by hand",
        not wrong,
    )
    mcore_to_hf(mcore, back)
    difference = diff(source, back)
    yield Step(
        "mcore-to-hf, and compare bit for bit",
        f"{difference.tensors} tensors, {len(difference.differences)} differ",
        difference.equal,
    )
    checked = check(mcore)
    yield Step("check the manifest", f"{checked.tensors} checksums, {len(checked.bad)} wrong", checked.ok)
    with _quiet():
        a, b = _logits(source), _logits(back)
    same = bool((a == b).all())
    yield Step(
        "compare logits",
        f"{a.numel():,} logits, std {a.std():.2f}, "
        + ("all equal" if same else f"{(a - b).abs().max():.2e} apart"),
        same,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' progress bars and warnings out of the report; errors are raised as ever."""
    import logging

    os.environ.setdefault("TQDM_DISABLE", "1")
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO() if not sys.flags.verbose else sys.stderr),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _make(directory: Path) -> int:
    """Write a Qwen3-MoE with random weights and return the number of its parameters."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start as ones: an exchange of two would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def _load_with_megatron(directory: Path) -> dict[str, Any]:
    """Load every tensor of a checkpoint, whole, with Megatron-Core."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        entries = {
            k: v
            for k, v in dist_checkpointing.load_tensors_metadata(str(directory)).items()
            if isinstance(v.dtype, torch.dtype)
        }
        state = dist_checkpointing.load(entries, str(directory), validate_access_integrity=False)
        return {key: state[key] for key in entries}
    finally:
        dist.destroy_process_group()


def _differences(source: Path, loaded: dict[str, Any]) -> list[str]:
    """Return the parameters that differ from the Hugging Face tensors in Megatron's layout, which is
    written out here without the tables."""
    import torch
    from safetensors.torch import load_file

    hf = load_file(source / "model.safetensors")
    layers, experts, groups = SIZES["num_hidden_layers"], SIZES["num_experts"], SIZES["num_key_value_heads"]

    def qkv(layer: int) -> torch.Tensor:
        heads = [
            hf[f"model.layers.{layer}.self_attn.{x}_proj.weight"].reshape(groups, -1, SIZES["hidden_size"])
            for x in "qkv"
        ]
        return torch.cat(heads, dim=1).flatten(0, 1)

    def fc(layer: int, *names: str) -> torch.Tensor:
        return torch.stack(
            [
                torch.cat([hf[f"model.layers.{layer}.mlp.experts.{e}.{n}_proj.weight"] for n in names])
                for e in range(experts)
            ]
        )

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([hf[f"model.layers.{i}.{name}.weight"] for i in range(layers)])

    def padded(name: str) -> torch.Tensor:
        rows = len(loaded["embedding.word_embeddings.weight"]) - SIZES["vocab_size"]
        return torch.nn.functional.pad(hf[name], (0, 0, 0, rows))

    block = "decoder.layers."
    expected = {
        "embedding.word_embeddings.weight": padded("model.embed_tokens.weight"),
        "output_layer.weight": padded("lm_head.weight"), "decoder.final_layernorm.weight": hf["model.norm.weight"],
        f"{block}self_attention.linear_qkv.layer_norm_weight": stacked("input_layernorm"),
        f"{block}self_attention.linear_qkv.weight": torch.stack([qkv(i) for i in range(layers)]),
        f"{block}self_attention.q_layernorm.weight": stacked("self_attn.q_norm"),
        f"{block}self_attention.k_layernorm.weight": stacked("self_attn.k_norm"),
        f"{block}self_attention.linear_proj.weight": stacked("self_attn.o_proj"),
        f"{block}pre_mlp_layernorm.weight": stacked("post_attention_layernorm"),
        f"{block}mlp.router.weight": stacked("mlp.gate"),
        f"{block}mlp.experts.experts.linear_fc1.weight": torch.stack([fc(i, "gate", "up") for i in range(layers)]),
        f"{block}mlp.experts.experts.linear_fc2.weight": torch.stack([fc(i, "down") for i in range(layers)]),
    }  # fmt: skip
    return sorted(set(expected) ^ set(loaded)) + [
        n for n, t in expected.items() if n in loaded and not torch.equal(t, loaded[n])
    ]


def _logits(directory: Path) -> Any:
    """Return transformers' logits of two random prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits.float()
