"""Digests of checkpoints of either format and of adapters, read once at the speed of the disk."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import OptionError, ReshardError
from reshard.digests.numbers import number_of, rounded, seed_of, sum_rows
from reshard.digests.result import Digest, DigestDiff, counted_dtype
from reshard.formats.small_files import MAX_INDEX_BYTES, read_json
from reshard.models.config_fields import check_ignored
from reshard.storage.io.casts import float_dtype
from reshard.storage.io.files import allow_many_files
from reshard.storage.io.streams import TensorInfo
from reshard.storage.opening import open_model_or_adapter
from reshard.storage.run.workers import Progress, run_jobs
from reshard.storage.sources.base import Source
from reshard.storage.sources.hf_hub import config_path, source_directory
from reshard.storage.sources.opening import check_config_is_read
from reshard.storage.sources.paths import config_beside, locate

SLAB_BYTES = 4 << 20


def digest_of_path(
    path: str | Path,
    *,
    dtype: object = None,
    hf_config: str | Path | None = None,
    alpha: float | None = None,
    stored: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Digest:
    """Return the digest of a Hugging Face directory (or hub id), a Megatron checkpoint or an adapter of either.

    Quantized weights count as the numbers that their codes stand for, an adapter with the factors of its scales. With a
    `dtype` numbers count rounded to that. `alpha` is that of a Megatron adapter which does not say it. With `stored`
    codes and scales count by their own names, as engines that serve them hold them.

    Raises ReshardError if the weights cannot be read, or a tied copy differs from what it repeats.
    """
    target = float_dtype(dtype)
    if stored and target is not None:
        raise OptionError("--stored counts codes as they are, and --dtype numbers in that: leave one out")
    allow_many_files()
    directory = source_directory(str(path))
    check_config_is_read(hf_config, directory)
    config = config_path(hf_config) if hf_config is not None else None
    with closing(open_model_or_adapter(directory, config, alpha=alpha)) as source, source.unchanged():
        check_ignored(source.model)
        how = workers, progress
        return (
            _digest_of_stored(source, str(path), *how)
            if stored
            else digest_of_source(source, str(path), target, *how)
        )


def digest_of_source(
    source: Source,
    where: str,
    target: Dtype | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Digest:
    """Return the digest of what a source reads; see `digest_of_path`."""
    fp32, copies = source.mapping.fp32, source.copies
    if not source.is_model:
        fp32, copies = frozenset(), {}  # layers that share an A in one format have one each in the other
    counted = {
        name: TensorInfo(info.shape, counted_dtype(copies.get(name, name), info.dtype, target, fp32))
        for name, info in source.tensors.items()
    }

    def number(name: str) -> int:
        info = counted[name]
        seed, total = seed_of(copies.get(name, name), info), 0  # a copy as what it repeats
        for start, stop in source.tensors[name].slabs(SLAB_BYTES, source.row_multiple(name)):
            total += sum_rows(seed, rounded(source.read_rows(name, start, stop), info.dtype), start)
        return number_of(seed, [total])

    sizes = {name: info.size_bytes for name, info in source.tensors.items()}
    numbers = run_jobs(sizes, number, workers, progress)
    _check_copies(source, copies, numbers)
    own = {name: info for name, info in counted.items() if name not in copies}
    numbers = {name: numbers[name] for name in own}
    _add_factors(source, own, numbers)
    notices = [*source.model.notices, *source.assumed]
    coded = source.dequantized_names()
    if coded:
        notices.append(
            f"{len(coded):,} weights are quantized, and count as the {source.tensors[coded[0]].dtype.name} numbers "
            "that their codes stand for"
        )
    return Digest.of(where, own, numbers, None if target is None else target.name, notices)


def _digest_of_stored(source: Source, where: str, workers: int | None, progress: Progress | None) -> Digest:
    tensors = {n: info for n, info in source.stored_tensors().items() if n not in source.copies}

    def number(name: str) -> int:
        seed, total = seed_of(name, tensors[name]), 0
        for start, stop in tensors[name].slabs(SLAB_BYTES):
            total += sum_rows(seed, source.read_stored_rows(name, start, stop), start)
        return number_of(seed, [total])

    numbers = run_jobs({name: info.size_bytes for name, info in tensors.items()}, number, workers, progress)
    return Digest.of(where, tensors, numbers, None, [*source.model.notices])


def _check_copies(source: Source, copies: Mapping[str, str], numbers: Mapping[str, int]) -> None:
    """Raise ReshardError if a tensor differs from the one that it repeats: the digest counts the two as one."""
    for copy, primary in copies.items():
        if numbers[copy] != numbers[primary]:
            hint = ': if they are two, say "tie_word_embeddings": false in config.json' * source.model.tied
            raise ReshardError(
                f"{source.path}: {copy} differs from {primary}, but the model has the two as one tensor{hint}"
            )


def _add_factors(source: Source, tensors: dict[str, TensorInfo], numbers: dict[str, int]) -> None:
    """Add each number by which a source multiplies its tensors, as a tensor of one element. Raises ReshardError if one
    is not known."""
    scalar = TensorInfo((), DTYPES["float64"])
    for name, factor in source.factors().items():
        seed = seed_of(name, scalar)
        tensors[name] = scalar
        numbers[name] = number_of(seed, [sum_rows(seed, np.array([[factor]], np.float64))])


def diff_digests(
    a: str | Path,
    b: str | Path,
    *,
    dtype: object = None,
    hf_config: str | Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> DigestDiff:
    """Compare the digests of two places, each a checkpoint or a file with what ``reshard digest --json`` printed, of a
    checkpoint or of live weights. Each side is read once, and needs not be at hand with the other.

    By default both count in the dtype that a printed one is in. Raises ReshardError if two printed ones are in
    different ones, or not in `dtype`.
    """
    printed = {side: _printed(side) for side in (str(a), str(b))}
    asked = float_dtype(dtype)
    wanted = [None if asked is None else asked.name] if dtype is not None else []
    wanted += [digest.dtype for digest in printed.values() if digest is not None]
    if any(name != wanted[0] for name in wanted[1:]):
        words = " and ".join(name or "the dtypes that were held" for name in dict.fromkeys(wanted))
        raise OptionError(
            f"the digests are in {words}, and compare only in one --dtype: print one of them again"
        )
    results = []
    for side, other in ((str(a), str(b)), (str(b), str(a))):
        digest = printed[side]
        if digest is None:
            dtype_of_both = wanted[0] if wanted else None
            config = hf_config or _config_of(side, other)
            digest = digest_of_path(
                side, dtype=dtype_of_both, hf_config=config, workers=workers, progress=progress
            )
        results.append(digest)
    return results[0].compare(results[1])


def _printed(side: str) -> Digest | None:
    """Return the digest in a file; None for a directory or a hub id."""
    path = Path(side)
    if not path.is_file():
        return None
    return Digest.from_dict(read_json(path, "what reshard digest --json prints", MAX_INDEX_BYTES), side)


def _config_of(side: str, other: str) -> Path | None:
    """Return the other side's Hugging Face config, for a Megatron checkpoint that has none of its own."""
    path = Path(side)
    located = locate(path) if path.is_dir() else None
    config = Path(other) / "config.json"
    return config if located is not None and config_beside(located) is None and config.is_file() else None
