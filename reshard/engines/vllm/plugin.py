"""The call that vLLM makes at start-up, in each of its processes, by the entry point in
``vllm.general_plugins``.

It adds ``--load-format reshard``, and the backend ``reshard`` of the weight transfer:

    vllm serve DST --load-format reshard
    vllm serve MODEL --weight-transfer-config '{"backend": "reshard"}'

vLLM looks for config and tokenizer where the weights are. A Megatron checkpoint has them in a
directory beside its iterations, or, where training wrote it, nowhere; the engine's arguments
``hf_config_path`` and ``tokenizer`` say where. `complete_arguments` fills in those that the user
did not give, and names the iteration, so that all ranks take the same one.

Every vLLM process of an environment with reshard imports this module, so it imports nothing heavy.
"""

import logging
from pathlib import Path
from typing import Any

LOAD_FORMAT = BACKEND = "reshard"
# Imported by vLLM, and only if an engine asks for this backend.
TRANSFER_MODULE = "reshard.integrations.vllm.worker"
EXTENSION = "reshard.engines.vllm.worker.RefitExtension"
logger = logging.getLogger("vllm.reshard")


def register() -> None:
    """Register the load format and the backend; vLLM may call this several times.

    A vLLM that cannot take them starts as it would without, with a warning.
    """
    from reshard.core.errors import ReshardError

    try:
        from reshard.engines.vllm.compat import before_engine_config, register_loader, register_transfer
        from reshard.engines.vllm.load_format.loader import ReshardModelLoader
        from reshard.engines.vllm.requests import core as gate

        register_loader(LOAD_FORMAT, ReshardModelLoader)
        register_transfer(BACKEND, TRANSFER_MODULE, "ReshardTransfer")
        before_engine_config(complete_arguments)
        gate.install_where_cores_are()
    except (ImportError, ReshardError) as error:
        logger.warning("no --load-format %s: %s", LOAD_FORMAT, error)


def complete_arguments(arguments: Any) -> None:
    """Complete an ``EngineArgs`` in place before vLLM makes its config of it.

    One with this load format gets the iteration's directory as its `model`, and where its config
    and tokenizer are. One with our weight transfer gets the extension of its workers. Others are
    left as they are. The engine that comes of it gets a gate for its requests, and its front their refusals.

    Raises ReshardError, before anything is started, if the checkpoint cannot be read or no config
    is known.
    """
    from reshard.engines.vllm.requests import core, front

    core.install()
    front.install()
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
        _complete_model(arguments)


def _complete_model(arguments: Any) -> None:
    from reshard.core.errors import ReshardError
    from reshard.engines.loading.checkpoint import config_directory, wants_fp8_blocks
    from reshard.storage.sources.hf_hub import check_hub_id
    from reshard.storage.sources.megatron import MegatronSource
    from reshard.storage.sources.opening import check_huggingface
    from reshard.storage.sources.paths import HF_FILES, config_beside, locate

    path = Path(arguments.model)
    if not path.is_dir():
        check_hub_id(arguments.model)
        return
    located = locate(path)
    if located is None:
        check_huggingface(path)
        return
    directory, config, notices = located.directory, arguments.hf_config_path, list(located.notices)
    if config is None:
        beside = config_beside(located)
        if beside is None or beside.directory is None:
            raise ReshardError(
                f"{path} has no {HF_FILES}/config.json: name the model's directory or hub id with "
                f"--hf-config-path"
            )
        config = str(beside.directory)
        notices += [beside.notice] if beside.notice else []
    for notice in notices:
        logger.info("%s: %s", path, notice)
    source = MegatronSource(directory, config_directory(config, arguments.revision))
    source.close()
    wants_fp8_blocks(source.model.config, directory)  # raises what cannot be loaded
    arguments.served_model_name = arguments.served_model_name or arguments.model
    arguments.model, arguments.hf_config_path = str(directory), config
    arguments.tokenizer = arguments.tokenizer or config
