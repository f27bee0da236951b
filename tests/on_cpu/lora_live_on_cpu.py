"""Real Megatron models with the real LoRA modules of Megatron-Bridge, and vLLM's real model classes with its own
wrappers for adapters, in the same processes on a CPU: started by torchrun in an environment with both.

The adapter is made of PEFT's tensors, which are cut by hand into what each rank's modules hold.
"""

import json
import re
import zlib
from pathlib import Path

import tests.starting.lora_imports  # noqa: F401
from tests.on_cpu.vllm_adapters_on_cpu import (  # before vLLM, whose platform it says
    engine_with_adapters,
    loaded_by_vllm,
    slot_bits,
)

# isort: split
import megatron.core.parallel_state as mpu
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from reshard.engines.vllm.live import VllmModel
from reshard.refit import RefitGroup, connect
from reshard.trainers.fsdp import FsdpModel
from reshard.trainers.megatron import MegatronModel
from reshard.trainers.shards import unwrapped
from tests.on_cpu import lora_on_cpu
from tests.starting.ranks import caught
from tests.tools import refit_sides
from tests.tools.lora_faults import FAULTS

PREFIX = "base_model.model."
FUSED = {
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_q_down_proj": ("self_attn.q_a_proj",),
    "linear_q_up_proj": ("self_attn.q_b_proj",),
    "linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("self_attn.kv_b_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
OF_MLP = ("linear_fc1", "linear_fc2")


def size_of(config: dict, name: str) -> tuple[int, int]:
    """Rows and columns of a published layer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    inner = config["intermediate_size"]
    if "experts" in name:
        inner = config.get("moe_intermediate_size") or inner
        inner *= config["n_shared_experts"] if "shared_experts" in name else 1
    part = name.rpartition(".")[2]
    if part in ("gate_proj", "up_proj", "down_proj"):
        return (hidden, inner) if part == "down_proj" else (inner, hidden)
    if "kv_lora_rank" in config:
        latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        return {"q_a_proj": (config["q_lora_rank"], hidden), "q_b_proj": (heads * (nope + rope), config["q_lora_rank"]),
                "kv_a_proj_with_mqa": (latent + rope, hidden), "kv_b_proj": (heads * (nope + value), latent),
                "o_proj": (hidden, heads * value)}[part]  # fmt: skip
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, config["num_key_value_heads"] * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }[part]


def experts_in(config: dict) -> int:
    return next(
        (config[n] for n in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(n)), 0
    )


def places_of(config: dict, layer: int) -> list[str]:
    """The prefixes of the MLPs in a layer."""
    experts = experts_in(config) if layer >= config.get("first_k_dense_replace", 0) else 0
    shared = ["mlp.shared_experts."] if experts and config.get("n_shared_experts") else []
    return [f"mlp.experts.{e}." for e in range(experts)] + shared or ["mlp."]


def modules_of(config: dict, targets: list[str]) -> dict[str, list[str]]:
    """The published layers that each of Megatron's has, by its name."""
    modules = {}
    for layer in range(config["num_hidden_layers"]):
        for target in targets:
            for place in places_of(config, layer) if target in OF_MLP else [""]:
                names = [f"model.layers.{layer}.{place}{name}" for name in FUSED[target]]
                modules[f"{layer}.{place}{target}"] = names
    return modules


def numbers(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    seed = zlib.crc32(f"{name} {version}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def peft_tensors(config: dict, targets: list[str], rank: int, version: int, kind: str = "") -> dict:
    """An adapter under PEFT's names, with one A for all that Megatron has in one layer; all experts of a layer
    with the same where they are ``shared``; of the output layer too where it is PEFT's own."""
    tensors, shared = {}, kind == "shared"
    if kind == "peft":
        sizes = {"A": (rank, config["hidden_size"]), "B": (config["vocab_size"], rank)}
        tensors = {
            f"{PREFIX}lm_head.lora_{m}.weight": numbers(f"lm_head {m}", size, version)
            for m, size in sizes.items()
        }
    for names in modules_of(config, targets).values():
        for name in names:
            rows, columns = size_of(config, name)
            of_a, of_b = (re.sub(r"experts\.\d+", "experts", n) if shared else n for n in (names[0], name))
            tensors[f"{PREFIX}{name}.lora_A.weight"] = numbers(of_a, (rank, columns), version)
            tensors[f"{PREFIX}{name}.lora_B.weight"] = numbers(of_b, (rows, rank), version)
    return tensors


def save_peft(tensors: dict[str, torch.Tensor], folder: Path, rank: int, alpha: float) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def in_one_tensor(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same adapter with that of all experts of a layer in one tensor, as PEFT has it of experts in one tensor:
    A expert by expert, B's columns rank by rank."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = dict.fromkeys(name.partition(".experts.")[0] for name in tensors if ".experts." in name)
    for layer in layers:
        count = 1 + max(int(n.split(".")[-4]) for n in tensors if n.startswith(f"{layer}.experts."))
        for within, parts in (("base_layer.", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            pairs = [
                [torch.cat([tensors[f"{layer}.experts.{e}.{part}.lora_{m}.weight"] for part in parts[: 1 + (m == "B")]])
                 for m in "AB"]
                for e in range(count)
            ]  # fmt: skip
            fused[f"{layer}.experts.{within}lora_A.weight"] = torch.cat([a for a, _ in pairs])
            b = torch.stack([b for _, b in pairs], 2).flatten(1)
            fused[f"{layer}.experts.{within}lora_B.weight"] = b
    return fused


def put_in(models: list, config: dict, tensors: dict[str, torch.Tensor]) -> int:
    """Copy PEFT's tensors into the modules of this rank; how many modules there are."""
    count = 0
    if hasattr(models[0], "peft_config"):  # whose own names these are
        tensors = in_one_tensor(tensors)
        for name, parameter in models[0].named_parameters():
            if ".lora_" in name:
                count += 1
                whole = tensors[name.replace(".default.", ".")]
                if isinstance(parameter, DTensor):
                    whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                parameter.data.copy_(whole)
        return count
    for model in models:
        for path, module in model.named_modules():
            if not hasattr(module, "lora_A") and not hasattr(module, "linear_in"):
                continue
            count += 1
            a, b = matrices_of(model, path, module, config, tensors)
            pair = (
                (module.linear_in, module.linear_out)
                if hasattr(module, "linear_in")
                else (module.lora_A["default"], module.lora_B["default"])
            )
            with torch.no_grad():
                pair[0].weight.copy_(a)
                pair[1].weight.copy_(b)
    return count


def matrices_of(
    model, path: str, module, config: dict, tensors: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """What a module of this rank holds of A and B; of grouped experts, one behind the other."""
    layer = model.get_submodule(".".join(path.split(".")[:3])).layer_number - 1
    target, prefix = path.removesuffix(".adapter").rpartition(".")[2], f"{PREFIX}model.layers.{layer}."
    split = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if ".adapter.adapter_" in path:  # CanonicalLoRA's, of one published layer
        prefix += "self_attn." if target[8:] in "qkv" else "mlp."
        name = f"{prefix}{target[8:]}_proj.lora_"
        return [tensors[f"{name}{matrix}.weight"].chunk(split[0])[split[1]] for matrix in "AB"]
    whole = hasattr(module, "lora_A")  # mcore-bridge's, which splits what the layer itself splits
    if ".experts." not in path:
        if target in OF_MLP:
            prefix += "mlp.shared_experts." if ".shared_experts." in path else "mlp."
        return cut([tensors, prefix, target, config], *split, whole)
    count = experts_in(config) // mpu.get_expert_model_parallel_world_size()
    first = mpu.get_expert_model_parallel_rank() * count
    every = [
        cut([tensors, f"{prefix}mlp.experts.{first + e}.", target, config], 1, 0, whole) for e in range(count)
    ]
    if "local_experts" in path:
        return every[int(path.split("local_experts.")[1].split(".")[0])]
    if module.linear_in.weight.ndim == 2:  # which all experts share
        return every[0]
    return [torch.stack(pair) for pair in zip(*every, strict=True)]


def cut(of_layer: list, tp: int, tp_rank: int, whole: bool) -> list[torch.Tensor]:
    """The A and B of one of Megatron's layers on a tensor parallel rank."""
    tensors, prefix, target, config = of_layer
    names = [prefix + name for name in FUSED[target]]
    a, parts = tensors[f"{names[0]}.lora_A.weight"], [tensors[f"{name}.lora_B.weight"] for name in names]
    by_rows = target in ("linear_proj", "linear_fc2")
    if by_rows or not whole:
        a = a.chunk(tp, 1 if by_rows else 0)[tp_rank]
    if target == "linear_qkv":
        groups = config["num_key_value_heads"]
        by_group = torch.cat([part.reshape(groups, -1, part.shape[1]) for part in parts], 1)
        return [a, by_group.reshape(-1, by_group.shape[-1]).chunk(tp)[tp_rank]]
    if by_rows and whole:
        return [a, parts[0]]
    return [a, torch.cat([part.chunk(tp)[tp_rank] for part in parts])]


def sharded_peft(hf: str, settings: dict):
    """transformers' model with PEFT's adapters, those of all experts in one tensor, under FSDP2."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    mpu.initialize_model_parallel()
    plain = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    rank, alpha = settings["dim"], settings["alpha"]
    model = get_peft_model(
        plain, LoraConfig(r=rank, lora_alpha=alpha, target_modules=linear, target_parameters=experts)
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def trainer(kind: str, flags: list[str], base: str, settings: dict) -> list:
    """A trainer's chunks with adapters: Megatron-Bridge's in DDP, or with grouped experts, or mcore-bridge's."""
    if kind in ("bridge", "canonical"):
        parts = [
            "linear_q",
            "linear_k",
            "linear_v",
            "linear_proj",
            "linear_fc1_gate",
            "linear_fc1_up",
            "linear_fc2",
        ]
        settings = settings if kind == "bridge" else settings | {"target_modules": parts}
        models = lora_on_cpu.with_adapters(flags, base, {"bridge": "lora"}.get(kind, kind), settings)
        return [refit_sides.distributed(model, use_distributed_optimizer=False) for model in models]
    model = lora_on_cpu.transformer_engine_model(flags, f"{base}/release")
    model.requires_grad_(False)
    if kind in ("grouped", "shared"):
        lora_on_cpu.LoRA(**settings, share_expert_adapters=kind == "shared")(model, training=False)
        return [model]
    rank, alpha = settings["dim"], settings["alpha"]
    lora_on_cpu.wrap(model, settings["target_modules"], r=rank, lora_alpha=alpha)
    return [model]


def refitted(kind, flags, base, hf, settings, options, files, faults=(), backend="auto"):
    """What differs between a slot after each of two refits and what vLLM loads of PEFT's files of the same
    adapter; what is said of faults, by name."""
    config = json.loads((Path(hf) / "config.json").read_text())
    targets, rank, alpha = settings["target_modules"], settings["dim"], settings["alpha"]
    if kind == "peft":
        models = [sharded_peft(hf, settings)]
        source = FsdpModel(models[0])
    else:
        chunks = trainer(kind, flags, base, settings)
        models = [unwrapped(chunk) for chunk in chunks]
        source = MegatronModel(chunks)
    module, vllm_config, loader = engine_with_adapters(hf, **options)
    engine = VllmModel(module, vllm_config)
    versions = [peft_tensors(config, targets, rank, version, kind) for version in range(2)]
    as_loaded = in_one_tensor if options.get("packed") else dict
    directories = [
        save_peft(as_loaded(tensors), Path(files) / f"peft{i}-{torch.distributed.get_rank()}", rank, alpha)
        for i, tensors in enumerate(versions)
    ]
    link = connect(RefitGroup.of_process_group(), source, engine, adapter="policy", backend=backend)
    policy = engine.adapter("policy")
    result = {"before": caught(policy.request), "different": [], "names": []}
    # Another link under the same name, after which the first one goes on.
    connect(RefitGroup.of_process_group(), source, engine, adapter="policy", backend=backend)
    for version, (tensors, directory) in enumerate(zip(versions, directories, strict=True)):
        assert put_in(models, config, tensors)
        report = link.refit(verify=True)
        held = slot_bits(module, module.lora_manager.lora_index_to_id.index(policy.request().lora_int_id))
        theirs = loaded_by_vllm(module, loader, f"theirs{version}", 1 + version, directory)
        result["different"].append([name for name in theirs if held.get(name) != theirs[name]])
        result["names"].append(policy.request().lora_name)
        result["filled"] = sum(bits != refit_sides.bits_of(torch.zeros(bits[0], dtype=torch.bfloat16))
                               for bits in held.values() if isinstance(bits, tuple))  # fmt: skip
    result |= {
        "count": len(theirs),
        "version": link.version,
        "report": report.to_dict(),
        "base": engine.version,
    }
    result["again"] = link.below.link.refits
    exchanged = dict(versions[1])
    first, second = ("gate_proj", "up_proj") if "kv_lora_rank" in config else ("k_proj", "v_proj")
    for name in [name for name in exchanged if f"{first}.lora_B" in name]:
        other = name.replace(first, second)
        exchanged[name], exchanged[other] = exchanged[other].clone(), exchanged[name].clone()
    wrong = save_peft(
        as_loaded(exchanged), Path(files) / f"wrong-{torch.distributed.get_rank()}", rank, alpha
    )
    theirs = loaded_by_vllm(module, loader, "exchanged", 5, wrong)
    result["control"] = [name for name in theirs if held[name] != theirs[name]]
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, result["different"])
    result["different"] = [
        [name for of_rank in of_version for name in of_rank] for of_version in zip(*every, strict=True)
    ]
    result["moved"] = base_moved(link, module, models)
    result["overwritten"] = base_overwritten(link, module)
    result["faults"] = {name: FAULTS[name](link, engine, models) for name in faults}
    result["served"] = policy.request().lora_name
    return result


def base_moved(link, module, models) -> list:
    """How often the weights below the adapter have gone after a refit behind a step that moves them, as Megatron's
    moves every router's bias, and behind one that does not; and which biases the engine then has, and the trainer."""
    before, biases = link.below.link.refits, {}
    for model in models:
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias") and ".mtp" not in name:
                buffer += torch.arange(len(buffer)) / 8
                biases[model.get_submodule(".".join(name.split(".")[:3])).layer_number - 1] = buffer
    if not biases:  # in a way that torch does not count
        next(p for n, p in models[0].named_parameters() if n.endswith("norm.weight")).data.mul_(2)
    counts = []
    for _ in range(2):
        link.refit()
        counts.append(link.below.link.refits - before)
    theirs = {
        int(name.split(".")[2]): refit_sides.bits_of(one.float())
        for name, one in module.named_parameters()
        if name.endswith("e_score_correction_bias")
    }
    own = {layer: refit_sides.bits_of(bias.float()) for layer, bias in biases.items()}
    return [counts, own == {layer: theirs[layer] for layer in own}, len(own)]


def base_overwritten(link, module) -> list:
    """Whether the bits of the weights below the adapter are as they were, after somebody has written into them in a way
    that nothing counts: behind a refit, and behind one that is verified; and how often they were sent."""
    weight = next(one for name, one in module.named_parameters() if name.endswith("norm.weight"))
    link.refit(verify=True)
    before, bits, outcomes = link.below.link.refits, refit_sides.bits_of(weight), []
    weight.data.mul_(2)
    for verify in (False, True, True):
        link.refit(verify=verify)
        outcomes.append((refit_sides.bits_of(weight) == bits, link.below.link.refits - before))
    return outcomes


def main() -> None:
    lora_on_cpu.main(*__import__("sys").argv[1:], actions=globals())


if __name__ == "__main__":
    main()
