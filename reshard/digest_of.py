"""The digest of weights wherever they are: in files, or in the memory of a trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.comm.http import is_address
from reshard.core.errors import OptionError
from reshard.digests.result import Digest
from reshard.engines.kinds import is_sglang


def digest(
    weights: Any,
    *,
    dtype: object = None,
    hf_config: Any = None,
    alpha: float | None = None,
    make_vocab_size_divisible_by: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    workers: int | None = None,
) -> Digest:
    """Return the digest of weights: the same number for the same weights, whatever their format, layout and sharding.

    `weights` are the path of a checkpoint of either format or of an adapter, or a hub id; a running engine, a vLLM
    ``LLM`` with our extension, an ``sglang.Engine``, or the address of a server of either; or a live model, Megatron's
    or a `reshard.trainers.FsdpModel`, with the `hf_config` of `reshard.export`. All ranks of torch's default process
    group call it for a live model, and each gets the digest of all: nothing is gathered but 8 bytes for each box.

    Args:
        dtype: such as ``bf16``: count numbers rounded to that, for a trainer in fp32 what an engine in bf16 has to
            hold. Tensors that a family never casts down, such as a router's bias, then count in fp32. By default
            numbers count in the dtypes in which they are held.
        alpha: of a Megatron adapter that does not say it.

    Raises ReshardError if the weights cannot be read whole, or replicas of a live model differ.
    """
    of_models = {"make_vocab_size_divisible_by": make_vocab_size_divisible_by, "metadata": metadata}
    of_models = {name: value for name, value in of_models.items() if value is not None}
    of_paths = {"alpha": alpha, "workers": workers}
    of_paths = {name: value for name, value in of_paths.items() if value is not None}
    if is_address(weights) or hasattr(weights, "collective_rpc"):
        given = [*of_models, *of_paths, *(["hf_config"] if hf_config is not None else [])]
        if given:
            raise OptionError(f"an engine knows what it serves: leave out {', '.join(given)}")
        return _of_engine(weights, dtype)
    if isinstance(weights, str | Path):
        if of_models:
            raise OptionError(f"{', '.join(of_models)} is of a live model, and this is a path: leave it out")
        from reshard.storage.digest import digest_of_path

        return digest_of_path(weights, dtype=dtype, hf_config=hf_config, alpha=alpha, workers=workers)
    if of_paths:
        raise OptionError(f"{', '.join(of_paths)} is of a path, and this is a live model: leave it out")
    from reshard.live.digest import digest_of_models

    return digest_of_models(weights, hf_config, dtype=dtype, **of_models)  # type: ignore[arg-type]


def _of_engine(engine: Any, dtype: object) -> Digest:
    if is_sglang(engine):
        from reshard.engines.sglang.digest import digest as digest_of_sglang

        return digest_of_sglang(engine, dtype)
    from reshard.engines.digest import digest_of_engine

    return digest_of_engine(engine, dtype)
