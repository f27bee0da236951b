"""Refit every class that transformers and an engine share, and say of each what happened.

    python -m tests.campaigns.every_class --out classes.jsonl [--engine sglang] [--only NAME ...] [--again]

Of each class a small model of random weights is made from its default config and saved twice, with other weights.
Two ranks hold the second as `FsdpModel` and the engine's class of the same name, with tensor parallelism, of the first;
after a refit each tensor is compared with what the engine's own loader makes of the second directory, bit for bit.
Writes a line of JSON for each class at once, and goes on where it was interrupted. `--again` tries those again that
were not exact. Prints how many had each outcome; exit status 1 if any served wrong bits or raised anything but a
sentence.
"""

import argparse
import itertools
import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import transformers

from tests import install_sglang_cpu
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools import sglang_models
from tests.tools.model_classes import save
from tests.tools.small_configs import small_config

SECONDS = 240.0  # for one class
FAULTS = ("WRONG", "CRASH")
GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
NOT_LOADED = "not loaded"
# vLLM switches a scale of attention off by itself where its context is short, and connect compares configs.
SCALED = {"override_generation_config": {"attn_temperature_tuning": True}}
OPTIONS_OF_VLLM: dict[str, Any] = {"Llama4ForCausalLM": SCALED, "Llama4ForConditionalGeneration": SCALED}
GROUPS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


def shared_classes(engine: str) -> list[str]:
    """Return the classes of models that generate, which an engine and transformers both have."""
    names: Iterable[str]
    if engine == "sglang":
        files = sglang_models.files_by_class(install_sglang_cpu.TARGET / "sglang" / "srt" / "models")
        names = [name for name in sorted(files) if name.endswith(GENERATES)]
    else:
        from vllm.model_executor.models import registry

        names = [name for group in GROUPS for name in getattr(registry, group)]
    return [name for name in names if hasattr(transformers, name)]


def late(_: int, __: FrameType | None) -> None:
    """End what takes too long."""
    raise TimeoutError(f"not made within {SECONDS:.0f} s")


def outcome(name: str, folder: Path, engine: str) -> tuple[str, str]:
    """Return what happens with a class in an engine, and what is said."""
    signal.signal(signal.SIGALRM, late)
    signal.alarm(int(SECONDS))
    try:
        for seed in (0, 1):
            config = small_config(getattr(transformers, name).config_class, itertools.count(300), name)
            config.architectures = [name]
            save(folder / str(seed), config, seed)
    except Exception as error:
        return "transformers does not make it", f"{type(error).__name__}: {str(error).strip():.400}"
    finally:
        signal.alarm(0)
    sides = {"trainer": 2, "engine": 2, "together": True, "folder": str(folder), "port": free_port()}
    checkpoints = [str(folder / str(seed)) for seed in (0, 1)]
    options: dict[str, Any] = {"tp": 2}
    process: dict[str, Any] = {}
    if engine == "sglang":
        environment = install_sglang_cpu.environment_of_engine()
        process = {"python": warm.python_of_sglang(), "environment": environment}
    else:
        options |= OPTIONS_OF_VLLM.get(name, {})
    try:
        said = run_on_ranks(
            2,
            "judge",
            sides,
            checkpoints,
            options,
            module="refit_every_class_on_cpu",
            timeout=SECONDS,
            **process,
        )
    except Exception as error:
        return "CRASH", f"{type(error).__name__}: {str(error).strip()[-1500:]}"
    # What an engine's own loader refuses may be said by one rank alone, and the other sees that this one is gone.
    own = [one for one in said if one[0] == NOT_LOADED]
    if own or len({kind for kind, _ in said}) == 1:
        return (own or said)[0]
    return "CRASH", f"ranks differ: {said}"


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {name: (kind, said) for name, kind, said in map(json.loads, lines)}
    for name in options.only or shared_classes(options.engine):
        if name in done and not options.only and not (options.again and done[name][0] != "exact"):
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            done[name] = outcome(name, folder, options.engine)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with options.out.open("a") as out:
            out.write(json.dumps([name, *done[name]]) + "\n")
        print(f"{name}: {done[name][0]}: {done[name][1]:.300}", flush=True)
    counts = Counter(kind for kind, _ in done.values())
    print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    sys.exit(any(kind in FAULTS for kind in counts))


if __name__ == "__main__":
    main()
