"""Parity between transformers and Megatron-Core on ranks of their own."""

import logging
from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.megatron.layout import MegatronLayout
from reshard.parity.divergence import find_divergence
from reshard.parity.gate import parity
from reshard.parity.huggingface import HuggingFace
from reshard.testing import assert_logprob_parity


def find(rank: int, a: str, b: str, layout: dict):
    """Where the two part, as a sentence, and the place."""
    logging.disable(logging.WARNING)
    found = find_divergence(a, b, list(range(5, 40)), layout=MegatronLayout(**layout))
    return (found.sentence, found.place, [d.name for d in found.differing]) if found else None


def run(rank: int, a: str, b: str, layout: dict, options: dict):
    """The report, or what was refused."""
    logging.disable(logging.WARNING)
    try:
        report = parity(a, b, layout=MegatronLayout(**layout), **options)
    except ReshardError as error:
        return str(error)
    return report.to_dict()


def again(rank: int, a: str, b: str):
    """What is said of a prompt that is too short, and what of a comparison in the same process after that."""
    return run(rank, a, b, {}, {"prompts": [[1]]}), run(rank, a, b, {}, {"prompts": [[1, 2, 3]]})


def slower(rank: int, a: str, b: str):
    """The report on a transformers whose slowest rotary angles, which turn little within a short prompt, are a tenth slower."""
    system = HuggingFace(Path(a), "fp32")
    system.module.model.rotary_emb.inv_freq[-2:] /= 1.1
    return parity(system, b, 2, dtype="fp32", lengths=(32,)).to_dict()


def assertion(rank: int, a: str, b: str):
    """What the assertion says that fails."""
    try:
        assert_logprob_parity(a, b, prompts=2, lengths=(16,))
    except AssertionError as error:
        return str(error)
