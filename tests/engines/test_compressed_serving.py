"""Engines that load a Megatron checkpoint by a config of compressed-tensors hold what they have of
the compressed checkpoint."""

import json
from pathlib import Path

from reshard import mcore_to_hf
from tests.starting.ranks import run_on_ranks
from tests.tools.by_compressed_tensors import (
    EXPERTS,
    IGNORED,
    compressed,
    config_of,
)

RESHARD = {"load_format": "reshard"}


def test_an_engine_that_loads_a_megatron_checkpoint_holds_what_it_has_of_the_compressed_one(
    converted, tmp_path
):
    cases = []
    # Two published weights whose shapes have one place beside those that vLLM fuses.
    latent = {"only": "a_proj", "ignore": [*IGNORED, "re:.*(b|o|gate|up|down)_proj$"]}
    for variant, kind, strategy, *options in (
        ("served-int8", "int4", "group 32", {}, EXPERTS),
        ("qwen3", "int", "tensor"),
        ("qwen3-moe", "float", "channel"),
        ("deepseek-v3", "float", "tensor"),
        ("deepseek-v3", "int4", "group 32", latent),
        ("served-int8", "int4", "group 32"),
        ("served-blocks", "float", "block 128 128"),
    ):
        (hf, mcore), (_, other) = converted(variant)
        only, parallel = (*options, {}, {})[:2]
        folder = tmp_path / f"{len(cases)}"
        package = compressed(hf, folder / "package", kind, strategy, **only)
        ignored = {"ignore": only["ignore"]} if only else {}
        served = RESHARD | {"hf_overrides": {"quantization_config": config_of(kind, strategy, **ignored)}}
        directories = {
            "package": (package, {"hf_overrides": {}}),
            "megatron": (mcore, served),
            "other": (other, served),
        }
        way = {("float", "channel"): "fp8_per_channel", ("int4", "group 32"): "int4_per_group_32"}.get(
            (kind, strategy)
        )
        if way and not only:
            mcore_to_hf(mcore, folder / "converted", quantize=way)
            directories |= {
                "converted": (folder / "converted", {"hf_overrides": {}}),
                "by our loader": (package, RESHARD | {"hf_overrides": {}}),
                "by its config": (mcore, RESHARD | {"hf_config_path": package, "hf_overrides": {}}),
            }
        cases.append(({"tp": 2, **parallel}, directories))
    for rank in run_on_ranks(2, "loaded", cases, module="serving_on_cpu"):
        for engines in rank:
            wanted, *_ = engines.pop("package")
            other, *_ = engines.pop("other")
            assert other != wanted and other.keys() == wanted.keys()
            assert {name for name, (held, *_) in engines.items() if held != wanted} == set()
            assert (
                "whole tensors (" in engines["megatron"][2]
                and "is loaded by Compressed" in engines["megatron"][2]
            )


def test_a_running_engine_loads_another_megatron_checkpoint(converted, tmp_path):
    directories = [mcore for _, mcore in converted("qwen3")]
    options = RESHARD | {"tp": 2, "hf_overrides": {"quantization_config": config_of("float", "channel")}}
    for now, other in run_on_ranks(2, "reloaded", directories, options, module="serving_on_cpu"):
        assert now == other


def test_configs_that_no_megatron_checkpoint_can_serve_are_refused_in_one_sentence(converted, tmp_path):
    mcore = converted("qwen3")[0][1]
    static, groups, output = (
        config_of("float", "tensor", static=True),
        config_of("int", "channel"),
        config_of("float", "channel"),
    )
    groups["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "strategy": "group", "group_size": 32}
    asymmetric, ordered = config_of("int4", "group 32"), config_of("int4", "group 32")
    asymmetric["config_groups"]["group_0"]["weights"]["symmetric"] = False
    ordered["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    output["config_groups"]["group_0"]["targets"] += ["re:.*lm_head"]
    output["ignore"] = []
    sentences = {
        "wants activations of group_0 quantized by scales that come with a checkpoint": static,
        (
            "'num_bits': 4, 'type': 'int', 'strategy': 'group', 'symmetric': True, 'group_size': 32}, and of "
            "these reshard makes 8 bits"
        ): groups,
        "'symmetric': False, 'group_size': 32}, and of these reshard makes 8 bits": asymmetric,
        "and packed int4 or int8 for each channel or group, with plain activations, all symmetric": ordered,
        "has no config_groups": config_of("float", "channel", config_groups={}),
        (
            "lm_head is loaded by CompressedTensorsLinearMethod (CompressedTensorsW8A8Fp8), for which reshard "
            "cannot"
        ): output,
    }
    cases = []
    for number, quantization in enumerate(sentences.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = json.loads((Path(mcore) / "hf" / "config.json").read_text()) | {
            "quantization_config": quantization
        }
        (folder / "config.json").write_text(json.dumps(config))
        cases.append((mcore, RESHARD | {"hf_config_path": str(folder), "hf_overrides": {}}))
    for sentence, message in zip(
        sentences, run_on_ranks(1, "refused", cases, module="serving_on_cpu")[0], strict=True
    ):
        assert sentence in message and "\n" not in message, message
