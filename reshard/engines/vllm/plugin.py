"""What vLLM calls at start-up, in each of its processes, by the entry point in ``vllm.general_plugins``: it adds
``--load-format reshard``, and the backend ``reshard`` of the weight transfer.

    vllm serve DST --load-format reshard
    vllm serve MODEL --weight-transfer-config '{"backend": "reshard"}'

vLLM looks for config and tokenizer where the weights are. A Megatron checkpoint has them in a directory beside
its iterations, or, where training wrote it, nowhere; the engine's arguments ``hf_config_path`` and
``tokenizer`` say where. Those that the user did not give are filled in here, and the iteration is
settled, so that all ranks take the same one. An engine whose weights are to be transferred by us gets the extension of
its workers that does it.

Nothing heavy is imported with this module: every vLLM process of an environment with reshard in it does.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOAD_FORMAT = BACKEND = "reshard"
EXTENSION = "reshard.engines.vllm.worker.RefitExtension"
CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]


def register() -> None:
    """Called by vLLM, perhaps several times. A vLLM that cannot take this loader starts as it would without."""
    from reshard.core.errors import ReshardError

    try:
        from reshard.engines.vllm.compat import before_engine_config, register_loader, register_transfer
        from reshard.engines.vllm.loader import ReshardModelLoader

        register_loader(LOAD_FORMAT, ReshardModelLoader)
        register_transfer(BACKEND, "reshard.engines.vllm.transfer", "ReshardTransfer")
        before_engine_config(complete_arguments)
    except (ImportError, ReshardError) as error:
        logging.getLogger("vllm.reshard").warning("no --load-format %s: %s", LOAD_FORMAT, error)


def config_directory(config: str, revision: str | None) -> Path:
    """The directory of a model's config and tokenizer: a path, or a hub id, of which only these are fetched."""
    from reshard.storage.hf_hub import local_directory

    hub = revision is not None and not Path(config).is_dir()
    return local_directory(f"{config}@{revision}" if hub else config, CONFIG_FILES)


def megatron_directory(path: Path) -> Path | None:
    """The directory of the iteration that a path means; None where it is no Megatron checkpoint."""
    from reshard.storage.paths import locate

    found = locate(path)
    return None if found is None else found.directory


def complete_arguments(arguments: Any) -> None:
    """Complete an ``EngineArgs`` that asks for this load format: the iteration's directory as its `model`, where
    config and tokenizer are; and one that asks for our weight transfer: the extension of its workers. Others are
    left as they are.

    Raises ReshardError where the checkpoint cannot be read, or no config is known, before anything is started.
    """
    transfer = getattr(arguments, "weight_transfer_config", None)
    if getattr(transfer, "backend", None) == BACKEND and not arguments.worker_extension_cls:
        arguments.worker_extension_cls = EXTENSION
    if arguments.load_format != LOAD_FORMAT:
        return
    from reshard.core.errors import rewrite_message
    from reshard.models.config_fields import ignore_hint_for

    with (
        ignore_hint_for("engine"),
        rewrite_message(
            ("--hf-config with the config.json", "--hf-config-path with the directory of the config.json"),
            ("--hf-config with", "--hf-config-path with the directory of"),
        ),
    ):
        _complete(arguments)


def _complete(arguments: Any) -> None:
    from reshard.core.errors import ReshardError
    from reshard.storage.hf_hub import check_hub_id
    from reshard.storage.megatron import MegatronSource
    from reshard.storage.paths import HF_FILES, config_beside, locate
    from reshard.storage.sources import check_huggingface

    path = Path(arguments.model)
    if not path.is_dir():
        check_hub_id(arguments.model)
        return
    found = locate(path)
    if found is None:
        check_huggingface(path)
        return
    directory, config, said = found.directory, arguments.hf_config_path, list(found.notices)
    if config is None:
        beside = config_beside(found)
        if beside is None or beside.directory is None:
            raise ReshardError(
                f"{path} has no {HF_FILES}/config.json: name the model's directory or hub id with "
                f"--hf-config-path"
            )
        config = str(beside.directory)
        said += [beside.notice] if beside.notice else []
    for notice in said:
        logging.getLogger("vllm.reshard").info("%s: %s", path, notice)
    source = MegatronSource(directory, config_directory(config, arguments.revision))
    source.close()
    blocks_wanted(source.model.config, directory)
    arguments.served_model_name = arguments.served_model_name or arguments.model
    arguments.model, arguments.hf_config_path = str(directory), config
    arguments.tokenizer = arguments.tokenizer or config


# As NVIDIA publishes weights in nvfp4 that are served with activations as they are.
WITH_PLAIN_INPUTS = "W4A16_NVFP4"


def blocks_wanted(config: Mapping[str, Any], directory: Path) -> bool:
    """Whether a config wants weights as fp8 blocks; False where it wants them as they are, by compressed-tensors in a
    way of `check_wanted`, or by ModelOpt in nvfp4 alone, all of which can be made of Megatron's. Raises ReshardError
    where it wants them quantized in another way."""
    from reshard.core.errors import ReshardError
    from reshard.storage.channels import METHOD, check_wanted
    from reshard.storage.fp8 import BLOCK
    from reshard.storage.modelopt import METHOD as MODELOPT

    wanted = config.get("quantization_config")
    if not wanted:
        return False
    if wanted.get("quant_method") == METHOD:
        check_wanted(wanted, f"the config for {directory}")
        return False
    if wanted.get("quant_method") == MODELOPT:
        said = wanted.get("quantization", wanted)
        algorithm = said.get("quant_algo") if isinstance(said, Mapping) else said
        if str(algorithm).upper() != WITH_PLAIN_INPUTS:
            raise ReshardError(
                f"the config for {directory} wants weights quantized by {MODELOPT} as {algorithm!r:.80}, and of these reshard makes "
                f"{WITH_PLAIN_INPUTS} alone, since a Megatron checkpoint has no scales of activations: serve it with a config that "
                f"says that, or none"
            )
        return False
    if wanted.get("quant_method") != "fp8" or list(wanted.get("weight_block_size") or ()) != [BLOCK, BLOCK]:
        raise ReshardError(
            f"the config for {directory} wants weights quantized as {wanted.get('quant_method')!r:.80}, and a "
            f"Megatron checkpoint has others: serve it with a config that has no quantization_config"
        )
    return True
