"""A real vLLM on the CPU that serves quantized layers, refitted; started as `tests.on_cpu.engine_on_cpu` says."""

import zlib
from functools import cache, partial
from pathlib import Path

from tests.on_cpu.engine_on_cpu import (
    answers,
    engine,
    forget,
    keep_imports_frozen,
    said_after_loads,
    said_after_refits,
)
from tests.starting.ranks import caught


def int8_experts(pairs: list) -> dict:
    """What a vLLM answers that serves from experts in int8, which it has quantized and packed
    itself, after a refit from each of two Megatron checkpoints, and what ones answer that have
    loaded them; how it serves, and the names of parameters that lie elsewhere afterward."""
    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity import Limits, parity
    from reshard.parity.systems.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    keep_imports_frozen()
    how = {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}
    trainer = Megatron(Path(pairs[0][1]), "bf16", MegatronLayout())
    with plain_weights():  # of the dense layers
        llm = engine(pairs[0][0], load_format="dummy", **how)
    destination = VllmModel.from_llm(llm)
    link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), destination)
    addresses = {key: tensor.data_ptr() for key, tensor in destination.tensors.items()}
    results: dict = {"quantized": link.describe()["quantized"]}
    results["refitted"] = said_after_refits(pairs, trainer, link, llm, answers)
    now = VllmModel.from_llm(llm).tensors
    results["moved"] = [key for key, tensor in now.items() if tensor.data_ptr() != addresses[key]]
    results["dtypes"] = sorted({str(tensor.dtype) for tensor in now.values()})
    trainer.close()
    del llm, link, destination, trainer, now
    forget()
    results["loaded"] = said_after_loads(pairs, how, answers)
    hf, mcore = pairs[0]
    report = parity(
        mcore, "vllm:" + mcore, 3, dtype="bf16", lengths=(33, 65), quantization=how["quantization"]
    )
    results["parity"] = report.to_dict()
    others = parity(
        mcore, "vllm:" + pairs[1][1], 3, dtype="bf16", lengths=(33, 65), quantization=how["quantization"]
    )
    results["parity of others"] = others.to_dict()
    known = {"fp32": Limits.of_dtype("fp32"), "bf16": Limits.of_dtype("bf16")}
    one = {"prompts": 3, "dtype": "bf16"}
    results["parity refused"] = [
        caught(lambda: parity(mcore, mcore, **one, quantization="fp8")),
        caught(lambda: parity(hf, "vllm:" + hf, **one, match_vllm_rounding=True)),
        caught(lambda: parity(mcore, "vllm:" + mcore, **one, quantization="nonsense")),
        caught(
            lambda: parity(mcore, "vllm:" + mcore, **one, quantization="torchao", limits=known.__getitem__)
        ),
        caught(lambda: parity(mcore, "vllm:" + mcore, **one, limits=lambda kind: known.get(kind))),
        caught(lambda: parity(mcore, "vllm:" + mcore, **one, limits=lambda kind: known.get(kind, Limits()))),
    ]
    return results


def multiply_int4(values, words, output, scales, zeros, order, bias, codes_in_a_word, how) -> None:
    """Values times int4, by torch: sixteen outputs lie together, for all inputs, in two words for each."""
    import torch

    assert zeros is None and order is None and codes_in_a_word == 8
    codes = (words.view(-1, values.shape[1], 2, 1) >> (torch.arange(8) * 4)) & 15
    weights = (codes.flatten(2) - 8).transpose(0, 1).flatten(1).float()  # [inputs, outputs]
    weights = weights.unflatten(0, (len(scales), -1)) * scales.float()[:, None]
    output.copy_(values.float() @ weights.flatten(0, 1) + (0 if bias is None else bias.float()))


@cache
def with_int4():
    """Let vLLM's build for the CPU multiply with int4 where it does not, for want of AVX-512; what
    does it has to be kept."""
    import torch
    from vllm import _custom_ops  # noqa: F401

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return None
    kernels = torch.library.Library("_C", "FRAGMENT")
    kernels.define(
        "cpu_gemm_wna16(Tensor input, Tensor words, Tensor! output, Tensor scales, Tensor? zeros, Tensor? "
        "order, Tensor? bias, int codes_in_a_word, str how) -> ()"
    )
    kernels.impl("cpu_gemm_wna16", multiply_int4, "CPU")
    return kernels


def compressed_layers(pairs: list) -> dict:
    """For each pair of a Megatron checkpoint and the same weights as compressed-tensors quantizes
    them: what a vLLM on two ranks answers and serves from, which has started with dummy weights,
    after a refit, and what one answers and serves from that has loaded the compressed ones; what is
    said of a layer that serves from another's weights; the names of what lies elsewhere
    afterward; and what is said of handing on what it serves."""
    import torch
    import torch.distributed as dist

    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.engines.vllm.quantized.processing import multiplied
    from reshard.parity.systems.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.refit.twins import handed_on_by
    from reshard.trainers.megatron import MegatronModel

    keep_imports_frozen()

    def kernels(model) -> dict:
        """Those that keep weights in handles, of which torch knows nothing."""
        results = {
            name: module.scheme.kernel for name, module in model.named_modules() if hasattr(module, "scheme")
        }
        return {name: kernel for name, kernel in results.items() if hasattr(kernel, "dnnl_handler")}

    def served(llm, model) -> dict:
        """Every parameter and buffer, bit by bit, and what the layers multiply with that is none of these."""
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        tensors |= {
            name: multiplied(kernel.dnnl_handler, torch.bfloat16) for name, kernel in kernels(model).items()
        }
        mine = {
            name: [str(one.dtype), zlib.crc32(one.detach().contiguous().view(-1).view(torch.uint8).numpy())]
            for name, one in sorted(tensors.items()) if not name.endswith("_scale") or "attn.attn" not in name
        }  # fmt: skip
        both: list = [None] * dist.get_world_size()
        dist.all_gather_object(both, mine)
        return {"served": both, "answers": answers(llm)}

    with_int4()
    how = {"dtype": "bfloat16", "tensor_parallel_size": dist.get_world_size()}
    trainer = Megatron(Path(pairs[0][0]), "bf16", MegatronLayout(tp=dist.get_world_size()))
    with plain_weights():
        llm = engine(pairs[0][1], load_format="dummy", **how)
    destination = VllmModel.from_llm(llm)
    link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), destination)
    addresses = {key: tensor.data_ptr() for key, tensor in destination.tensors.items()}
    results: dict = {"quantized": link.describe()["quantized"], "refitted": [], "loaded": []}
    for step, (mcore, _) in enumerate(pairs):
        if step:
            trainer.load(Path(mcore))
        link.refit(verify=True)
        results["refitted"].append(served(llm, destination.module))
    results["moved"] = [k for k, one in destination.tensors.items() if one.data_ptr() != addresses[k]]
    results["handed on"] = caught(partial(handed_on_by, destination))
    # In rank 0 layer 1 serves from what layer 2 does: all are told.
    update_derived = destination.update_derived

    def mixed_up(model) -> None:
        if dist.get_rank():
            return
        one, other = (model.get_submodule(f"model.layers.{n}.mlp.down_proj") for n in (1, 2))
        if kernels(model):
            one.scheme.kernel.dnnl_handler = other.scheme.kernel.dnnl_handler
        else:
            one.weight_packed.data.copy_(other.weight_packed.data)

    destination.update_derived = partial(mixed_up, destination.module)
    results["mixed up"] = caught(partial(link.refit, verify=True))
    destination.update_derived = update_derived
    link.refit(verify=True)
    results["mended"] = served(llm, destination.module)
    trainer.close()
    del llm, link, destination, trainer, update_derived
    forget()
    for _, hf in pairs:
        with plain_weights():
            llm = engine(hf, **how)
        results["loaded"].append(served(llm, VllmModel.from_llm(llm).module))
        del llm
        forget()
    return results
