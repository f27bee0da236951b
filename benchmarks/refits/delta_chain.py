"""A chain of deltas on real training steps: sizes and seconds of `reshard delta save` and `apply`, compared
with whole files.

    python -m benchmarks.refits.delta_chain [--rates 1e-6 1e-5] [--steps 20] [--folder DIR] [--json FILE]

SmolLM2-135M is trained in fp32 by Adam on the text of this repository's pages, at each learning rate from the
published weights on. After each step its bf16 weights are written as a Hugging Face directory, and what changed
is added to a chain. At the end the chain is applied to the published weights, and the result compared bit for bit.

Reported for each learning rate: the share of elements that changed in a step; bytes of a delta, beside those of
all weights; seconds of a save, of an apply of all deltas, and of a ``cp`` of one version.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.refits.delta import LENGTH, tokens
from reshard import diff
from reshard.delta import apply, save, show
from tests.tools.trained import make
from tests.tools.whole_model import Training


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for rate in options.rates:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.append(measure(Path(folder), rate, options.steps))
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results) + "\n")


def measure(folder: Path, rate: float, steps: int) -> dict:
    """Return the result of a learning rate."""
    from transformers import AutoModelForCausalLM

    base, chain, old, new = (folder / name for name in ("base", "chain", "old", "new"))
    make(base)
    shutil.copytree(base, old)
    names = list(load_file(base / "model.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    training = Training(model, tokens(base), rate, LENGTH)
    saves = []
    for _ in range(steps):
        training.step()
        shutil.copytree(old, new)
        weights = {name: model.state_dict()[name].bfloat16().contiguous() for name in names}
        save_file(weights, new / "model.safetensors", {"format": "pt"})
        saves.append(seconds_of(lambda: save(old, new, chain)))
        shutil.rmtree(old)
        new.rename(old)
    applied = seconds_of(lambda: apply(base, chain, folder / "applied", sync=False))
    assert diff(old, folder / "applied").equal and not diff(base, old).equal
    copied = seconds_of(lambda: shutil.copytree(old, folder / "copied"))
    held = show(chain)
    return {
        "learning_rate": rate,
        "steps": steps,
        "changed": [delta["density"] for delta in held["deltas"]],
        "delta_bytes": [delta["bytes"] for delta in held["deltas"]],
        "weights_bytes": held["weights_bytes"],
        "save_seconds": statistics.median(saves),
        "apply_seconds": applied,
        "copy_seconds": copied,
        "load": os.getloadavg()[0],
    }


def seconds_of(action: Callable[[], object]) -> float:
    """Return how long an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
