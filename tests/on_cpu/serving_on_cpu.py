"""What vLLM's real model classes hold after ``--load-format reshard``, on several ranks, without a GPU."""

import copy
import logging
import re
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from reshard.models.family import families
from reshard.quantization.fp8_blocks import encode
from reshard.storage.io import boxes
from tests.on_cpu import vllm_on_cpu
from tests.starting.ranks import caught
from tests.tools.disk import scribble
from tests.tools.refit_sides import fingerprint


class Heard(logging.Handler):
    """What the loader says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def loaded(rank: int, cases: list) -> list:
    """Of each case (options, {name: (directory, more options)}), by name: the parameters' bits, the
    bytes that were read, and how."""
    vllm_on_cpu.set_up_logging()
    heard, logger = Heard(), logging.getLogger("vllm.reshard")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    results: list[dict] = []
    for options, sources in cases:
        results.append({})
        for name, (directory, more) in sources.items():
            heard.said.clear()
            model, config = vllm_on_cpu.build(str(directory), **options, **more)
            last = heard.said[-1] if heard.said else ""
            read = re.search(r"([\d,]+) bytes read", last)
            how = last.partition(" s, ")[2]
            results[-1][name] = (
                fingerprint(model),
                int(read[1].replace(",", "")) if read else 0,
                how,
                config.model_config.model,
            )
            del model
    return results


def reloaded(rank: int, directories: list[str], options: dict) -> tuple[dict, dict]:
    """What an engine holds that has loaded the first of these, and then, as vLLM's
    ``reload_weights`` does it, the second; and what one holds that has loaded the second."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model, config = vllm_on_cpu.build(directories[0], **options)
    other, theirs = vllm_on_cpu.build(directories[1], **options)
    with set_current_vllm_config(config), torch.device("cpu"), torch.no_grad():
        weights = get_model_loader(config.load_config).get_all_weights(theirs.model_config, model)
        initialize_layerwise_reload(model)
        model.load_weights(weights)
        finalize_layerwise_reload(model, config.model_config)
    return fingerprint(model), fingerprint(other)


def refused(rank: int, cases: list) -> list[str]:
    """What each (directory, options) is refused with."""
    return [caught(partial(vllm_on_cpu.build, str(directory), **options)) for directory, options in cases]


def lacking(rank: int, whole: str, directories: list, options: dict) -> tuple[list[str], list[list[str]]]:
    """What is said when a whole directory, and each of these, is loaded, reloaded into an engine
    that has the whole one, and loaded for an architecture without a table."""
    from vllm.model_executor.model_loader import get_model_loader

    model, config = vllm_on_cpu.build(str(whole), **options)

    def said(directory) -> list[str]:
        build = partial(vllm_on_cpu.build, str(directory), **options)

        def reload() -> None:
            other = copy.copy(config.model_config)
            other.model = str(directory)
            get_model_loader(config.load_config).get_all_weights(other, model)

        with_table = [caught(build), caught(reload)]
        known = dict(families())
        families().clear()
        try:
            return [*with_table, caught(build)]
        finally:
            families().update(known)

    return said(whole), [said(directory) for directory in directories]


def load_of_what_changes(rank: int, cases: list) -> list[str]:
    """What each (directory, options, file) is refused with where the file gets other numbers after
    the loader's first read of tensors."""

    def build(directory, options: dict, file) -> None:
        left, plain = [Path(file)], boxes.BoxReader.read_all

        def read_all(self, *args):
            plain(self, *args)
            if left:
                scribble(left.pop())

        boxes.BoxReader.read_all = read_all
        try:
            vllm_on_cpu.build(str(directory), **options)
        finally:
            boxes.BoxReader.read_all = plain

    return [caught(partial(build, *case)) for case in cases]


def routers(rank: int, hf: str, cases: list) -> list[dict[str, bool]]:
    """Of each (directory, options), what its routers hold: by the parameter's name whether it is
    the weight of `hf`, or that in blocks."""
    weights = load_file(Path(hf) / "model.safetensors")
    results: list[dict[str, bool]] = []
    for directory, options in cases:
        model = vllm_on_cpu.build(str(directory), **options)[0]
        held = {name: parameter for name, parameter in model.named_parameters() if ".mlp.gate." in name}
        wanted = {name: weights[name] for name in held if name in weights}
        for name in [name for name in wanted if f"{name}_scale_inv" in held]:
            codes, scales = encode(wanted[name].float().numpy())
            wanted[name] = torch.from_numpy(codes.view("uint8")).view(torch.float8_e4m3fn)
            wanted[f"{name}_scale_inv"] = torch.from_numpy(scales)
        results.append({name: bits(parameter.data) == bits(wanted[name]) for name, parameter in held.items()})
    return results


def streamed(rank: int, cases: list) -> list[dict]:
    """What the loader streams of each (directory, options): by name the dtype, the shape and the bytes."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from reshard.engines.vllm.load_format.opened import open_weights

    results: list[dict] = []
    for directory, options in cases:
        config = EngineArgs(model=str(directory), skip_tokenizer_init=True, **options).create_engine_config()
        with set_current_vllm_config(config):
            results.append(
                {name: bits(tensor) for name, tensor in open_weights(config.model_config).stream()}
            )
    return results


def bits(tensor: torch.Tensor) -> tuple:
    """Dtype, shape and bytes."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()
