"""Megatron's own answers about arguments and layouts: its parser, its configs, its pipeline stages."""

import argparse
import contextlib
import dataclasses
import io

import megatron.core.parallel_state as mpu
import torch
from megatron.training import global_vars
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.checkpointing import load_args_from_checkpoint

from tests.on_cpu.megatron_on_cpu import parsed


def configs(rank: int, command_lines: list[tuple[list[str], int]]) -> list[dict]:
    """For each (command line, world size): the fields of the config that Megatron makes of it, and
    what it hands to the model besides."""
    found = []
    for flags, world_size in command_lines:
        args = parsed(
            [*flags, "--micro-batch-size", "1", "--no-rope-fusion"], world_size
        )  # which needs Transformer Engine
        with contextlib.redirect_stdout(io.StringIO()):
            config = core_transformer_config_from_args(args)
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | {
            name: value for name, value in vars(config).items() if name.startswith("yarn_")
        }
        plain = {
            name: value
            for name, value in values.items()
            if isinstance(value, (bool, int, float, str, list, tuple, type(None)))
        }
        of_model = ("position_embedding_type", "rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor",
                    "use_rope_scaling", "rope_scaling_factor", "untie_embeddings_and_output_weights",
                    "max_position_embeddings", "tokenizer_type", "seq_length", "padded_vocab_size",
                    "group_query_attention", "mtp_num_layers", "vocab_size")  # fmt: skip
        found.append(
            plain
            | {"activation_func": config.activation_func.__name__}
            | {name: getattr(args, name) for name in of_model}
        )
    return found


def restored(rank: int, cases: list[tuple[list[str], str, list[str]]]) -> list[dict[str, tuple]]:
    """For each (all the flags, checkpoint, some of the flags): by argument, what all of them say,
    and what ``--use-checkpoint-args`` with some makes of it, where that differs."""

    def take(args):
        global_vars.set_args(args)
        load_args_from_checkpoint(args)

    found = []
    for flags, directory, passed in cases:
        given = parsed([*flags, "--micro-batch-size", "1"])
        taken = parsed(
            [*passed, "--micro-batch-size", "1", "--load", directory, "--use-checkpoint-args"], take=take
        )
        told = {"load", "use_checkpoint_args", "iteration"}
        differing = {
            name
            for name in vars(given)
            if name not in told and getattr(given, name) != getattr(taken, name, None)
        }
        found.append({name: (getattr(given, name), getattr(taken, name, None)) for name in sorted(differing)})
    return found


def arguments(rank: int) -> tuple[dict, dict]:
    """The arguments of Megatron's parser that are about the model, and the fields of its configs,
    with their defaults as text."""
    from megatron.core.transformer import MLATransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser())
    titles = {"transformer configuration", "network size", "moe", "mla", "experimental_attention_variant",
              "heterogeneous architecture", "experimental", "training"}  # fmt: skip
    listed = [
        action for group in parser._action_groups if group.title in titles for action in group._group_actions
    ]
    actions = {
        action.dest: repr(action.default) for action in reversed(listed)
    }  # of two for one argument the first has its default
    return actions, {field.name: repr(field.default) for field in dataclasses.fields(MLATransformerConfig)}


def stages(
    rank: int, layers: int, pp: int, vpp: int, flags: dict, embedding: bool, loss: bool, layout: str | None
) -> list:
    """Megatron's own answer to which layers are where, as [pp rank][virtual stage]."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        account_for_embedding_in_pipeline_split=embedding,
        num_layers_in_first_pipeline_stage=flags["decoder_first_pipeline_num_layers"],
        account_for_loss_in_pipeline_split=loss,
        num_layers_in_last_pipeline_stage=flags["decoder_last_pipeline_num_layers"],
        pipeline_model_parallel_layout=layout,
    )
    if layout:
        parsed = PipelineParallelLayerLayout(layout, pp)
        mpu.set_virtual_pipeline_model_parallel_world_size(vpp)
        from megatron.core.transformer.enums import LayerType

        return [[parsed.get_layer_id_list(LayerType.decoder, v, p) for v in range(vpp)] for p in range(pp)]
    answer = []
    for p in range(pp):
        answer.append([])
        for v in range(vpp):
            stage = v if vpp > 1 else None
            offset = get_transformer_layer_offset(config, stage, p)
            answer[-1].append(list(range(offset, offset + get_num_layers_to_build(config, stage, p))))
    return answer


def pipelines(rank: int, texts: list[str]) -> list[list[str]]:
    """Megatron's own unrolling of layout strings, in its letters."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "loss": "L", "decoder": "t", "mtp": "m"}
    return [
        [
            "".join(letters[kind.name] for kind in row)
            for row in PipelineParallelLayerLayout.parse_str_to_list(text)
        ]
        for text in texts
    ]
