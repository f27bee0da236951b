"""Which weights made each token of an answer that was running as an engine switched, by its logprobs."""

import torch
from transformers import AutoModelForCausalLM

TOLERANCE = 2e-4  # of a logprob in fp32; those of two versions differ by tenths


def models_of(directories) -> list[torch.nn.Module]:
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in directories]


def switch_within(before, after, prompt: list[int], answer: list[tuple[int, float]], anew: bool) -> int:
    """How many tokens of an answer came before the switch. The only place of one that explains all logprobs: those of
    `before` until then, and those of `after` from there on, which went on from what `before` had computed, or computed
    it `anew`; where both differ, the other of the two must not explain them."""
    tokens, logprobs = map(list, zip(*answer, strict=True))
    said, size = torch.tensor(logprobs), len(tokens)

    def right(switch: int, anew: bool) -> torch.Tensor:
        ours = logprobs_of(before, after, prompt, tokens, switch, anew)
        return torch.isclose(ours, said, rtol=0, atol=TOLERANCE)

    first = [*right(size, anew).tolist(), False].index(False)  # of which `before` has other logprobs
    near = range(max(0, first - 1), first + 1)  # one token may be as likely for both
    places = [at for at in near if right(at, anew).all()]
    assert len(places) == 1, (prompt, first, places, "no switch between two tokens explains this answer")
    if 1 < first < size:
        assert not any(right(at, not anew).all() for at in near), "the other kind of switch explains it, too"
    return first


@torch.no_grad()
def logprobs_of(before, after, prompt: list[int], tokens: list[int], switch: int, anew: bool) -> torch.Tensor:
    """The logprobs of an answer whose first `switch` tokens `before` gave, and the others `after`."""
    whole, cache, logits = torch.tensor([prompt + tokens[:-1]]), None, []
    seen = len(prompt) + switch - 1 if switch else 0  # by the step that gave the last of the first ones
    if switch:
        out = before(whole[:, :seen], use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0, len(prompt) - 1 :])
    if anew:
        logits.append(after(whole).logits[0, max(seen, len(prompt) - 1) :])
    elif seen < whole.shape[1]:
        rest = after(whole[:, seen:], past_key_values=cache).logits[0]
        logits.append(rest if switch else rest[len(prompt) - 1 :])
    return torch.cat(logits).log_softmax(-1)[range(len(tokens)), tokens]
