"""Load converted checkpoints into Megatron models with Transformer Engine layers on a GPU, by Megatron-LM's
own code.

    python -m benchmarks.storage.transformer_engine make DIR
    python -m benchmarks.storage.transformer_engine run DIR [VARIANT ...]

`make` runs anywhere, and makes small checkpoints of every variant, converted. `run` needs a GPU with
megatron-core and Transformer Engine, and compares, for each variant: the keys that the model asks for with
those of the checkpoint, and the logits with those of transformers, both in bf16, next to transformers' own
bf16 error.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

QUIET = """--micro-batch-size 1 --no-load-optim --no-load-rng --attention-dropout 0 --hidden-dropout 0
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --attention-backend unfused --no-rope-fusion""".split()


def make(folder: Path) -> None:
    import torch

    from reshard import MegatronLayout, hf_to_mcore, inspect
    from tests.tools.checkpoints import VARIANTS
    from tests.tools.checkpoints import make as make_checkpoint

    for variant in VARIANTS:
        source = folder / variant / "hf"
        source.mkdir(parents=True)
        make_checkpoint(source, variant, dtype=torch.bfloat16, mtp=variant == "deepseek-v3")
        experts = inspect(source).experts
        layout = MegatronLayout(tp=2, pp=2, ep=2, etp=1) if experts else MegatronLayout(tp=2, pp=2)
        hf_to_mcore(source, folder / variant / "mcore", layout)


def run(folder: Path, *only: str) -> None:
    import torch

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29555",
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    import megatron.core
    import transformer_engine

    print(
        torch.cuda.get_device_name(),
        "torch",
        torch.__version__,
        "megatron-core",
        megatron.core.__version__,
        "TE",
        transformer_engine.__version__,
    )
    results = {}
    for variant in only or sorted(p.name for p in folder.iterdir() if (p / "mcore").is_dir()):
        try:
            results[variant] = check(folder / variant / "hf", folder / variant / "mcore")
        except (Exception, torch.distributed.checkpoint.api.CheckpointException) as error:
            import traceback

            traceback.print_exc()
            results[variant] = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(variant, json.dumps(results[variant], indent=1), flush=True)
    print(json.dumps(results))


def check(source: Path, directory: Path) -> dict:
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
    from megatron.training.checkpointing import load_checkpoint
    from transformers import AutoModelForCausalLM

    from reshard.storage.sources.opening import read_model

    parallel = ("--tensor-model", "--pipeline-model", "--expert-")
    lines = [
        line
        for line in (directory / "megatron_flags.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith(parallel)
    ]
    from megatron.training import get_args

    family = read_model(str(source)).family
    [model], args = megatron_from_flags(" ".join(lines).split(), family), get_args()
    asked, objects = set(), set()
    for value in nested_values(model.module.sharded_state_dict()):
        for item in value.build() if isinstance(value, ShardedTensorFactory) else [value]:
            (objects if isinstance(item, ShardedObject) else asked).add(
                item.unique_key if isinstance(item, ShardedObject) else item.key
            )
    metadata = torch.distributed.checkpoint.FileSystemReader(str(directory / "release")).read_metadata()
    stored = set(metadata.state_dict_metadata)
    stored_objects = {key for key in stored if "_extra_state" in key}
    result: dict = {
        "tensors_missing": sorted(asked - stored),
        "tensors_unasked": sorted(stored - stored_objects - asked),
        "states_missing": sorted({k.partition("/")[0] for k in objects - stored_objects}),
        "states_unasked": sorted({k.partition("/")[0] for k in stored_objects - objects}),
        "states": len(objects & stored_objects),
    }
    args.load = str(directory)
    with contextlib.redirect_stdout(io.StringIO()):
        load_checkpoint([model], None, None, strict=True)
    torch.manual_seed(1)
    tokens = torch.randint(0, 1000, (2, 64), device="cuda")
    positions = torch.arange(64, device="cuda")[None].expand_as(tokens)
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda").triu(1)[None, None]
    with torch.no_grad():
        ours = model(tokens, positions, mask)[..., :1000].float()
        hf = (
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="eager")
            .cuda()
            .eval()
        )
        half = hf(tokens).logits.float()
        exact = hf.float()(tokens).logits
    result |= {
        "logits_std": exact.std().item(),
        "megatron_bf16_vs_fp32": (ours - exact).abs().mean().item(),
        "transformers_bf16_vs_fp32": (half - exact).abs().mean().item(),
        "megatron_vs_transformers_bf16": (ours - half).abs().mean().item(),
    }
    return result


def megatron_from_flags(flags: list[str], family: Any = None) -> list:
    """The chunks of this rank, in bf16 on the GPU built and wrapped as Megatron-LM does from its command
    line, with the layers of its own that a `family` names."""
    import megatron.core.parallel_state as mpu
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.num_microbatches_calculator import (
        init_num_microbatches_calculator,
        unset_num_microbatches_calculator,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.training import global_vars
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    from reshard.megatron.layers.specs import layer_specs
    from reshard.models.family import families

    sys.argv = ["pretrain_gpt.py", *flags, *QUIET]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args)
        config = core_transformer_config_from_args(args)
    global_vars.set_args(args)
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(0, None, args.global_batch_size, 1, args.data_parallel_size)
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(1 + torch.distributed.get_rank())
    chunks = args.virtual_pipeline_model_parallel_size or 1
    models = []
    for stage in range(chunks):
        vp_stage = stage if chunks > 1 else None
        spec, mtp = layer_specs(family or families()["llama"], config, "transformer_engine", vp_stage)
        which = {"ignore_virtual": False, "vp_stage": vp_stage} if chunks > 1 else {}
        model = GPTModel(
            config,
            spec,
            args.padded_vocab_size,
            args.max_position_embeddings,
            parallel_output=True,
            pre_process=mpu.is_pipeline_first_stage(**which),
            post_process=mpu.is_pipeline_last_stage(**which),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            mtp_block_spec=mtp,
            vp_stage=vp_stage,
        ).cuda()
        models.append(Float16Module(config, model).eval())
    return models


if __name__ == "__main__":
    {"make": make, "run": run}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
