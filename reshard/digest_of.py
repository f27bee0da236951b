"""The digest of weights wherever they are: in files, or in the memory of a trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.core.errors import OptionError
from reshard.digests.result import Digest


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

    `weights` are the path of a checkpoint of either format or of an adapter, or a hub id; or a live model, Megatron's
    or a `reshard.trainers.FsdpModel`, with the `hf_config` of `reshard.export`. All ranks of torch's default process
    group call it for a live model, and each gets the digest of all: nothing is gathered but 8 bytes for each box.

    Args:
        dtype: such as ``bf16``: count numbers rounded to that, for a trainer in fp32 what an engine in bf16 has to
            hold. Tensors that a family never casts down, such as a router's bias, then count in fp32. By default
            numbers count in the dtypes in which they are held.
        alpha: of a Megatron adapter that does not say it.

    Raises ReshardError if the weights cannot be read whole, or replicas of a live model differ.
    """
    options = {"make_vocab_size_divisible_by": make_vocab_size_divisible_by, "metadata": metadata}
    if hasattr(weights, "collective_rpc") or str(weights).startswith(("http://", "https://")):
        given = {**options, "hf_config": hf_config, "alpha": alpha, "workers": workers}
        if any(value is not None for value in given.values()):
            raise OptionError(
                f"an engine knows what it serves: leave out {', '.join(k for k, v in given.items() if v is not None)}"
            )
        from reshard.engines.digest import digest_of_engine

        return digest_of_engine(weights, dtype)
    if isinstance(weights, str | Path):
        if make_vocab_size_divisible_by is not None or metadata is not None:
            raise OptionError(
                "make_vocab_size_divisible_by and metadata are of a live model, and this is a path"
            )
        from reshard.storage.digest import digest_of_path

        return digest_of_path(weights, dtype=dtype, hf_config=hf_config, alpha=alpha, workers=workers)
    if alpha is not None or workers is not None:
        raise OptionError("alpha and workers are of a path, and this is a live model")
    from reshard.live.digest import digest_of_models

    multiple = (
        {}
        if make_vocab_size_divisible_by is None
        else {"make_vocab_size_divisible_by": make_vocab_size_divisible_by}
    )
    return digest_of_models(weights, hf_config, dtype=dtype, metadata=metadata, **multiple)
