"""Parity between transformers and Megatron-Core on ranks of their own."""

import logging
from pathlib import Path

import reshard.testing
from reshard.core.errors import ReshardError
from reshard.megatron.layout import MegatronLayout
from reshard.parity.divergence import find_divergence
from reshard.parity.gate import parity
from reshard.parity.systems.huggingface import HuggingFace


def find(rank: int, a: str, b: str, layout: dict):
    """Return (sentence, place, differing parameters) of the first output that diverges, or None."""
    logging.disable(logging.WARNING)
    divergence = find_divergence(a, b, list(range(5, 40)), layout=MegatronLayout(**layout))
    if divergence is None:
        return None
    return divergence.sentence, divergence.place, [difference.name for difference in divergence.differing]


def run(rank: int, a: str, b: str, layout: dict, options: dict):
    """Return the report as a dict, or the message of the error."""
    logging.disable(logging.WARNING)
    try:
        report = parity(a, b, layout=MegatronLayout(**layout), **options)
    except ReshardError as error:
        return str(error)
    return report.to_dict()


def again(rank: int, a: str, b: str):
    """Return the error on a prompt that is too short, and then the report of a comparison in the
    same process."""
    return run(rank, a, b, {}, {"prompts": [[1]]}), run(rank, a, b, {}, {"prompts": [[1, 2, 3]]})


def slower(rank: int, a: str, b: str):
    """Return the report on a transformers whose slowest rotary angles are a tenth slower: a short
    prompt hardly shows it."""
    system = HuggingFace(Path(a), "fp32")
    system.module.model.rotary_emb.inv_freq[-2:] /= 1.1
    return parity(system, b, 2, dtype="fp32", lengths=(32,)).to_dict()


def assertion(rank: int, a: str, b: str):
    """Return the message of the assertion that fails, also under ``python -O``, which drops statements of `assert`."""
    names = {"__name__": "optimized"}
    path = Path(reshard.testing.__file__)
    exec(compile(path.read_text(), path, "exec", optimize=1), names)
    try:
        names["assert_logprob_parity"](a, b, prompts=2, lengths=(16,))
    except AssertionError as error:
        return str(error)
