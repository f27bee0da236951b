"""Parity between transformers and Megatron-Core on ranks of their own."""

import contextlib
import logging
import math
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

import reshard.testing
from reshard.core.errors import ReshardError
from reshard.megatron.layout import MegatronLayout
from reshard.parity.divergence import find_divergence
from reshard.parity.gate import parity
from reshard.parity.systems.base import System
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


class Planted(HuggingFace):
    """transformers with a fault: its router sends every fifth token to other experts (``routing``), its indexer lets
    every fifth token attend to others (``indexing``), prompts that are batched get other logits (``batching``), its
    rotary angles are slower (``angles``), or an MLP's output is larger (``code``)."""

    def __init__(self, path: str, dtype: str, fault: str) -> None:
        super().__init__(Path(path), dtype)
        self.fault = fault

    def logits(self, tokens, lengths=None, positions=None):
        angles = self.module.model.rotary_emb.inv_freq
        right = angles.clone()
        with contextlib.ExitStack() as stack:
            if "routing" in self.fault:
                stack.enter_context(OtherExperts())
            if "indexing" in self.fault:
                stack.enter_context(OtherTokens())
            if "angles" in self.fault:
                angles /= 1.02
                stack.callback(angles.copy_, right)
            if "code" in self.fault:
                mlp = self.module.model.layers[3].mlp
                stack.callback(mlp.register_forward_hook(lambda *forward: forward[2] * 1.03).remove)
            logits = super().logits(tokens, lengths, positions)
        return logits * 1.02 if "batching" in self.fault and len(tokens) > 1 else logits


class OtherExperts(TorchFunctionMode):
    """Gives every fifth token the experts after the best."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in (torch.topk, torch.Tensor.topk):
            return function(*args, **(kwargs or {}))
        scores, count = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim != 2:  # of groups of experts
            return function(*args, **(kwargs or {}))
        values, indices = torch.Tensor.sort(scores, dim=-1, descending=True)
        first = (torch.arange(len(scores)) % 5 == 4).long()[:, None]
        places = first + torch.arange(count)
        return torch.return_types.topk((values.gather(1, places), indices.gather(1, places)))


class OtherTokens(TorchFunctionMode):
    """Has every fifth token that cannot attend to all before it leave out the best of these."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        scores = args[0] if args else None
        if function not in (torch.topk, torch.Tensor.topk) or scores.ndim != 3:
            return function(*args, **(kwargs or {}))
        count, order = args[1], scores.argsort(dim=-1, descending=True)
        tokens = torch.arange(scores.shape[1])
        first = ((tokens >= count) & (tokens % 5 == 4)).long()[None, :, None]
        indices = order.gather(-1, (first + torch.arange(count)).expand(*scores.shape[:2], count))
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class Unsaid(System):
    """A system that says of its choices what an engine says: its experts, and nothing of its indexers."""

    def __init__(self, system: HuggingFace) -> None:
        self.name, self.model, self.system, self.spread = system.name, system.model, system, system.spread

    def score(self, prompts, options):
        return self.system.score(prompts, options)

    def close(self) -> None:
        self.system.close()


def why(rank: int, a: str, b: str, options: dict, fault: str = "", layout: dict | None = None):
    """Return the shares of the causes, the causes and what was not measured; of B with a `fault` where one is named,
    or of A."""
    logging.disable(logging.WARNING)
    options = options | ({"layout": MegatronLayout(**layout)} if layout else {})
    sides: list = [a, b]
    if fault:
        side = 0 if fault.endswith(" in A") else 1
        planted = Planted(sides[side], options.get("dtype", "fp32"), fault)
        sides[side] = Unsaid(planted) if "unsaid" in fault else planted
    report = parity(*sides, why=True, reach=False, **options)
    assert report.causes is not None
    total = sum(cause.mean_abs for cause in report.causes.causes)
    assert math.isclose(total, report.overall.mean_abs, rel_tol=1e-6, abs_tol=1e-12), report.causes
    if report.causes.kl is not None:
        assert math.isclose(report.causes.kl, report.overall.kl, rel_tol=1e-4, abs_tol=1e-9), report.causes
        assert math.isclose(sum(cause.kl for cause in report.causes.causes), report.causes.kl, abs_tol=1e-9)
    return report.causes.shares, report.causes.to_dict(), str(report)
