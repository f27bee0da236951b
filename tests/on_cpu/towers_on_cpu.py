"""Larger models under Megatron on the CPU, whose towers are those of trainers (`tests.tools.larger_models`): loads,
saves, exports and digests of them."""

import os
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

import reshard
from tests.on_cpu import megatron_on_cpu
from tests.on_cpu.live_megatron_on_cpu import unlike
from tests.starting.ranks import caught
from tests.tools.larger_models import LargerTrainer
from tests.tools.oracle import bits

OPTIONS = {"make_vocab_size_divisible_by": 8}


def lives(
    rank: int,
    flags: list[str],
    wheels: dict[str, str],
    kinds: list[str],
    pairs: list[tuple[str, str]],
    folder: str,
):
    """For each kind: what differs after a load of the second checkpoint, and of what the first saved; the bits of what
    is exported, the digest, what is said of a source without the tower; checkpoints are saved below `folder`."""
    models, args = megatron_on_cpu.build(flags)
    for model in models:
        model.bfloat16()
    (hf, mcore), (other, _) = pairs
    results = {}
    for kind in kinds:
        trainer = LargerTrainer(wheels, kind, models, args, hf)
        trainer.take(*pairs[1])
        expected = trainer.weights()
        trainer.spoil()
        reshard.load(trainer.chunks, other, **OPTIONS)
        differ = [unlike(trainer.weights(), expected)]
        trainer.take(hf, mcore)
        first = trainer.weights()
        exported = {n: bits(t) for n, t in reshard.export(trainer.chunks, hf, **OPTIONS)}
        digest = reshard.digest(trainer.chunks, hf_config=hf, make_vocab_size_divisible_by=8).text
        for form in ("hf", "torch_dist"):
            reshard.save(
                trainer.chunks,
                f"{folder}/{kind}-{form}",
                hf,
                format=form,
                transformer_impl="local",
                **OPTIONS,
            )
        if rank == 0:
            os.makedirs(f"{folder}/{kind}-theirs")
        torch.distributed.barrier()
        megatron_on_cpu.save(trainer.chunks, f"{folder}/{kind}-theirs")
        for form in ("hf", "torch_dist"):
            trainer.spoil()
            reshard.load(trainer.chunks, f"{folder}/{kind}-{form}", **OPTIONS)
            differ.append(unlike(trainer.weights(), first))
        trainer.spoil()
        reshard.load(trainer.chunks, f"{folder}/{kind}-theirs", hf_config=f"{hf}/config.json", **OPTIONS)
        differ.append(unlike(trainer.weights(), first))
        results[kind] = differ, exported, digest, len(unlike(first, expected)), len(first)
    return results


def kimi(rank: int, flags: list[str], wheels: dict[str, str], pair: tuple[str, str], folder: str):
    """The bits of the tower's tensors that are exported of a Kimi-K2.5, how many of its parameters differ after a load
    of what it saved, and what is said of one whose config has another tower."""
    models, args = megatron_on_cpu.build(flags)
    for model in models:
        model.bfloat16()
    hf, mcore = pair
    trainer = LargerTrainer(wheels, "published", models, args, hf)
    trainer.take(hf, mcore)
    [chunk] = trainer.chunks
    tower = ("vision_tower.", "mm_projector.")
    exported = {n: bits(t) for n, t in reshard.export(chunk, hf, **OPTIONS) if n.startswith(tower)}
    reshard.save(chunk, folder, hf, transformer_impl="local", **OPTIONS)
    before = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.fill_(-77.0)
    reshard.load(chunk, folder, **OPTIONS)
    differ = unlike({name: parameter.detach() for name, parameter in chunk.named_parameters()}, before)
    if hasattr(chunk, "vision_tower"):
        chunk.config.vision_config.vt_num_attention_heads = 2
    return exported, differ, caught(lambda: list(reshard.export(chunk, hf, **OPTIONS)))


def same_heads(module, hf: str) -> None:
    """Megatron's attention makes the queries, keys and values of a block that transformers' makes of published
    weights."""
    tensors = load_file(Path(hf) / "model.safetensors")
    weight, bias = (tensors[f"model.visual.blocks.1.attn.qkv.{name}"] for name in ("weight", "bias"))
    hidden = torch.eye(weight.shape[1], dtype=weight.dtype)[:, None]  # so that nothing is rounded otherwise
    attention = module.decoder.layers[1].self_attention
    made = attention.get_query_key_value_tensors(hidden)[:3]
    heads = module.config.num_attention_heads
    expected = torch.nn.functional.linear(hidden, weight, bias).unflatten(-1, (3, heads, -1)).unbind(2)
    assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))
    assert not torch.equal(made[0], expected[1]), "the control"


def refusals(rank: int, flags: list[str], wheels: dict[str, str], kinds: list[str], pair: tuple[str, str]):
    """What is said of each kind whose tower computes something else than that of a config, by what was changed."""
    models, args = megatron_on_cpu.build(flags)
    for model in models:
        model.bfloat16()
    hf, mcore = pair
    export = lambda chunks: list(reshard.export(chunks, hf, **OPTIONS))  # noqa: E731
    said = {}
    for kind in kinds:
        trainer = LargerTrainer(wheels, kind, models, args, hf)
        trainer.take(hf, mcore)
        [chunk] = trainer.chunks
        tower = {"mcore-bridge": ["visual", "visual"], "module": ["visual"], "layers": ["vision_model"]}[kind]
        module = chunk
        for name in tower:
            module = getattr(module, name)
        settings = module.config
        fields = (
            {"num_heads": 1} if kind != "layers" else {"num_attention_heads": 1, "layernorm_epsilon": 1e-5}
        )
        of_kind = {"fits": caught(partial(export, trainer.chunks))}
        if kind == "layers":
            same_heads(module, hf)
        for field, value in fields.items():
            plain = getattr(settings, field)
            setattr(settings, field, value)
            of_kind[field] = caught(partial(export, trainer.chunks))
            setattr(settings, field, plain)
        text = chunk.language_model
        text.position_embedding_type, text.config.mrope_section = "mrope", [2, 3, 3]
        of_kind["fits with sections"] = caught(partial(export, trainer.chunks))
        text.config.mrope_section = [3, 3, 2]
        of_kind["sections"] = caught(partial(export, trainer.chunks))
        text.position_embedding_type, text.config.mrope_section = "rope", None
        one_more = torch.nn.Parameter(torch.zeros(4))
        module.register_parameter("one_more", one_more)
        of_kind["one more"] = caught(partial(export, trainer.chunks))
        del module.one_more
        without = Path(hf).parent / "text"
        of_kind["a text model"] = caught(partial(reshard.load, trainer.chunks, without, **OPTIONS))
        said[kind] = of_kind
    return said
