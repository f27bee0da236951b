"""Run the tests that matter with other versions of the dependencies, and write the outcomes as a
list.

    python -m tests.campaigns.matrix [--only TEXT ...] [--again] [--megatron-lm CLONE] [--seconds N] [--list]

Run in the environment of `./install "[test]"`. Every cell is run on its own, one at a time, with
what it needs from the package index: an environment of its own, or packages that go before
this one's. The page, docs/evidence/versions.md, is written after each; what has a result there is not
run again (``--again`` does), so that the run goes on where it was interrupted. Wheels of
megatron-core have `megatron.training` from 0.17 on: the parsers of older versions, and those not on
the index, are read from ``--megatron-lm``, a clone of Megatron-LM with its tags.
"""

import argparse
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from reshard import ReshardError
from tests.campaigns.matrix_checks import (
    BESIDE,
    WORK,
    Check,
    NotRunError,
    checkpoints_of,
    disk_commands,
    flags_of,
    on_cpu,
    overlaid,
    own_environment,
    sglang_processes,
)
from tests.campaigns.versions_table import Result, read_table, write_table
from tests.tools.environments import REPOSITORY

# megatron-core, and the torch of its time: older ones save through private names of torch's that
# have changed since.
CORES = (("0.12.3", "2.6.0"), ("0.13.1", "2.7.1"), ("0.14.0", "2.8.0"), ("0.15.3", "2.8.0"), ("0.16.1", "2.9.1"),
         ("0.17.1", "2.10.0"), ("0.18.2", "2.11.0"), ("0.19.2", "2.11.0"))  # fmt: skip
PARSERS = ("core_v0.12.3", "core_v0.13.1", "core_v0.14.0", "core_v0.15.3", "core_v0.16.1", "core_v0.17.1",
           "core_v0.18.2", "core_v0.19.0", "main")  # fmt: skip
LIVE = (
    "tests/*/test_build*.py",
    "tests/megatron/test_hybrid.py",
    "tests/*/test_logits*.py",
    "tests/*/test_megatron_saves*.py",
)
# Of Megatron-LM's main, which has everything that the newest release has.
LIVE_OF_MAIN = (
    *LIVE,
    "tests/*/test_live_load*.py",
    "tests/*/test_live_save*.py",
    "tests/megatron/test_optimizer.py",
)
# Before 0.19 Megatron-LM's parser has no flags for YaRN outside latent attention: the flags cells
# show that reshard refuses it.
LIVE_BEFORE_0_19 = (*LIVE, "-k", "not qwen3-yarn")
REFIT = (
    "tests/*/test_refit*.py",
    "tests/*/test_sleeping*.py",
    "-k",
    (
        "leaves_what_vllms_own_loader or mtp_layers or traced_layout or do_not_fit or forgotten or drafter or "
        "wrapped or nothing_brings"
    ),
)
# What needs no build of vLLM for the CPU.
QUANTIZED = (
    "tests/*/test_fp8*.py",
    "tests/*/test_reloads*.py",
    "tests/quantization/test_quantization.py",
    "tests/*/test_compressed*.py",
    "tests/*/test_nvfp4_engine*.py",
    "tests/*/test_serving*.py",
    "-k",
    "not real_vllm and not over_http",
)
# Changes alone, trainers in host memory, and files of adapters.
DELTAS = (
    "tests/delta/test_*.py",
    "tests/live/test_delta_live.py",
    "tests/refit/test_deltas.py",
    "tests/live/test_offload.py",
    "tests/lora/test_lora_*.py",
)
# These, and a trainer's adapter in vLLM's slots; Megatron-Bridge 0.6.2 needs megatron-core 0.18.
ADAPTERS = ("tests/lora/test_lora.py", *DELTAS)
# What needs no engine. A trainer's adapters are not among it: what megatron-core 0.19 reads of a checkpoint to load
# one is too much for `torch.empty` of torch 2.15 (`strides`).
TRAINERS = (
    "tests/delta/test_delta_chain.py",
    "tests/delta/test_delta_encoding.py",
    "tests/live/test_live_load.py",
    "tests/live/test_live_save.py",
    "tests/*/test_megatron_saves*.py",
    "tests/megatron/test_optimizer.py",
)
# An engine's build for the CPU.
SERVED = (
    "tests/engines/test_engine.py",
    "tests/engines/test_delta_engines.py",
    "-k",
    "adapter or under_load or workers_fail",
)
# That of 0.24 fails by itself where an adapter's layers are split over two ranks (`einsum`, of vLLM's own LoRA).
SERVED_BY_0_24 = (*SERVED[:-1], f"({SERVED[-1]}) and not tensor")
# Not by 0.31 and 0.32, whose builds for the CPU look through every module of their process at start, and end with an
# AttributeError at one of llvmlite's, which are there where a trainer is.
SERVED_BY = ("0.24.0", "0.25.1", "0.29.0", "0.30.0")
# What needs vLLM's classes alone, a section of the page each.
PLACED = {
    "Models without a table": ("tests/refit/test_without_table.py", "tests/refit/test_turned.py"),
    "Towers, drafters, what is left alone, and arranged kernels": (
        "tests/refit/test_towers.py",
        "tests/refit/test_drafters.py",
        "tests/refit/test_left_alone.py",
        "tests/refit/test_rearranged.py",
        "tests/refit/test_blocks_engine.py",
        "tests/refit/test_kernels.py",
    ),
    "Experts that are moved": ("tests/refit/test_moved_experts.py",),
}
# What 0.29 has of it, whose class of Muse Glimmer takes no config of transformers 5.24; what transformers 5.20 saves of
# MiniMax-M3 has names that vLLM does not know.
NEWEST = {
    "0.33.0": ("tests/campaigns/newest_models.py", "-k", "not MiniMax"),
    "0.29.0": ("tests/campaigns/newest_models.py", "-k", "not Muse"),
}
# Engines that are refitted while they serve: on images, with drafters, by chains, switched together.
SERVING = (
    "tests/engines/test_images.py",
    "tests/engines/test_drafters.py",
    "tests/engines/test_delta_engines.py",
    "tests/integrations/test_switching.py",
)
TRANSFERRED = ("tests/integrations/test_weight_transfer.py",)
# vLLM, and the torch that it is built for; ours is 2.11.
TRANSFERS = (
    ("0.24.0", None),
    ("0.25.1", None),
    ("0.27.1", "2.13.0"),
    ("0.28.0", "2.13.0"),
    ("0.29.0", "2.13.0"),
    ("0.30.0", "2.13.0"),
    ("0.31.0", "2.13.0"),
    ("0.32.0", "2.13.0"),
)
SGLANG = (
    "tests/engines/test_sglang.py",
    "tests/storage/test_wrapped.py",
    "tests/refit/test_refit_faults.py",
    "-k",
    "sglang",
)
# The same, started and refitted by verl and by slime's classes.
SGLANG_OF_TRAINERS = ("tests/integrations/test_verl.py", "-k", "sglang or slimes")
# What needs SGLang's classes alone.
SGLANG_PLACED = (
    "tests/refit/test_towers.py",
    "tests/refit/test_without_table.py",
    "tests/refit/test_drafters.py",
    "tests/refit/test_left_alone.py",
    "tests/refit/test_moved_experts.py",
    "tests/engines/test_twins.py",
    "-k",
    "sglang",
)
# SGLang, the torch that it is built for, and what else has other versions than tests/sglang-cpu.txt.
SGLANGS = (("0.5.23", "2.14.1", ("transformers==5.19.0", "tokenizers==0.23.2")),)


@dataclass
class Cell:
    """One combination of versions: an entry `name` in section `group` of the page. `check` runs it and
    returns the outcome."""

    group: str
    name: str
    check: Check = field(repr=False)


def cells() -> list[Cell]:
    """Return all cells, the quick ones first."""
    every_cell = [
        Cell("Disk commands", f"Python {python}, newest of all", disk_commands(python))
        for python in ("3.10", "3.11", "3.12", "3.13", "3.14")
    ]
    every_cell += [
        Cell(
            "Disk commands",
            f"Python {python}, lowest of all",
            disk_commands(python, "--resolution", "lowest-direct"),
        )
        for python in ("3.10", "3.11", "3.12")
    ]
    every_cell += [Cell("Disk commands", "Python 3.12, numpy 1.26.4", disk_commands("3.12", "numpy==1.26.4"))]
    workers = own_environment(
        ["torch==2.15.0"], ("tests/storage/test_workers.py",), python="3.14", without=("nixl", "vllm")
    )
    every_cell += [Cell("Disk commands", "Python 3.14, torch 2.15.0, tests of workers", workers)]
    every_cell += [
        Cell("Command lines, asked of Megatron-LM's parser", tag.removeprefix("core_v"), flags_of(tag))
        for tag in PARSERS
    ]
    every_cell += [
        Cell(
            "Checkpoints, by Megatron-Core's own load and save",
            f"megatron-core {core}, torch {torch}",
            checkpoints_of(core, torch),
        )
        for core, torch in reversed(CORES)
    ]
    every_cell += [
        Cell(
            "Live models",
            f"megatron-core {core}, torch 2.11",
            overlaid([f"megatron-core=={core}"], LIVE_BEFORE_0_19),
        )
        for core in ("0.18.2", "0.17.1")
    ]
    every_cell += [
        Cell("Live models", "megatron-core main, torch 2.11", overlaid([], LIVE_OF_MAIN, tree="main")),
        Cell(
            "Live models",
            "megatron-core 0.16.1, torch 2.11",
            overlaid([], LIVE_BEFORE_0_19, tree="core_v0.16.1"),
        ),
    ]
    every_cell += [
        Cell(
            "Live models", f"transformers {version}", overlaid([f"transformers=={version}"], LIVE, deps=True)
        )
        for version in ("4.57.6", "5.24.0")
    ]
    every_cell += [
        Cell("Refits", f"vLLM {vllm}, torch 2.11", overlaid([f"vllm=={vllm}"], REFIT))
        for vllm in ("0.25.0", "0.24.0")
    ]
    every_cell += [
        Cell("Refits", f"megatron-core {core}, torch 2.11", overlaid([f"megatron-core=={core}"], REFIT))
        for core in ("0.18.2", "0.17.1")
    ]
    every_cell += [
        Cell(
            "Refits",
            f"vLLM {vllm}, torch {torch.removesuffix('.0')}",
            own_environment([f"vllm=={vllm}", f"torch=={torch}", *BESIDE], REFIT),
        )
        for vllm, torch in (("0.33.0", "2.14.0"), ("0.29.0", "2.13.0"))
    ]
    every_cell += [
        Cell("Live models", "Python 3.13", own_environment([], LIVE, python="3.13")),
        Cell("Refits", "Python 3.13", own_environment([], REFIT, python="3.13")),
    ]
    every_cell += [
        Cell(
            "Engines that are quantized, or load a Megatron checkpoint",
            "vLLM 0.33.0, torch 2.14",
            own_environment(["vllm==0.33.0", "torch==2.14.0", *BESIDE], QUANTIZED),
        )
    ]
    every_cell += [
        Cell(
            "Weight transfer",
            f"vLLM {vllm}, torch {(torch or '2.11').removesuffix('.0')}",
            on_cpu(vllm, torch, TRANSFERRED),
        )
        for vllm, torch in TRANSFERS
    ]
    every_cell += [
        Cell(
            "SGLang", f"SGLang {sglang}, torch {torch}{what}", sglang_processes(sglang, torch, beside, tests)
        )
        for sglang, torch, beside in SGLANGS
        for what, tests in (
            ("", SGLANG),
            (", of verl and slime", SGLANG_OF_TRAINERS),
            (", towers, models without a table, drafters", SGLANG_PLACED),
        )
    ]
    return every_cell + cells_of_adapters() + cells_of_newer_vllms()


def cells_of_newer_vllms() -> list[Cell]:
    """Return the cells of what was built with CI's vLLM: models without a table, towers, drafters, engines that go on
    serving."""
    made_for = {"0.33.0": "2.14.0", "0.32.0": "2.13.0", "0.29.0": "2.13.0"}
    tests = {group: dict.fromkeys(made_for, files) for group, files in PLACED.items()}
    every_cell = [
        Cell(
            group,
            f"vLLM {vllm}, torch {made_for[vllm].removesuffix('.0')}",
            own_environment([f"vllm=={vllm}", f"torch=={made_for[vllm]}", *BESIDE], files),
        )
        for group, of_versions in (tests | {"Models of newer vLLMs, without a table": NEWEST}).items()
        for vllm, files in of_versions.items()
    ]
    return every_cell + [
        Cell(
            "Engines that go on serving",
            f"vLLM {vllm}, torch {made_for[vllm].removesuffix('.0')}",
            on_cpu(vllm, made_for[vllm], SERVING),
        )
        for vllm in ("0.32.0", "0.29.0")
    ]


def cells_of_adapters() -> list[Cell]:
    """Return the cells of adapters in memory, deltas, and trainers in host memory."""
    group = "Adapters in memory, deltas, and offloaded trainers"
    made_for = [("0.33.0", "2.14.0"), ("0.29.0", "2.13.0")]
    every_cell = [
        Cell(
            group,
            f"vLLM {vllm}, torch {torch.removesuffix('.0')}",
            own_environment([f"vllm=={vllm}", f"torch=={torch}", *BESIDE], ADAPTERS),
        )
        for vllm, torch in made_for
    ]
    other_versions = [("vLLM", "vllm", "0.25.1", ADAPTERS), ("vLLM", "vllm", "0.24.0", ADAPTERS),
                      ("megatron-core", "megatron-core", "0.18.2", ADAPTERS),
                      ("megatron-core", "megatron-core", "0.17.1", DELTAS)]  # fmt: skip
    every_cell += [
        Cell(group, f"{name} {version}, torch 2.11", overlaid([f"{package}=={version}"], tests))
        for name, package, version, tests in other_versions
    ]
    every_cell += [
        Cell(group, "megatron-core 0.16.1, torch 2.11", overlaid([], DELTAS, tree="core_v0.16.1")),
        Cell(group, "transformers 5.24.0", overlaid(["transformers==5.24.0"], ADAPTERS, deps=True)),
        Cell(
            group,
            "PEFT 0.18.1",
            overlaid(["peft==0.18.1"], ("tests/lora/test_lora_families.py", "-k", "every_layer")),
        ),
        Cell(
            group,
            "torch 2.15.0, without vLLM",
            own_environment(["torch==2.15.0", BESIDE[0]], TRAINERS, without=("vllm",)),
        ),
    ]
    every_cell += [
        Cell(
            "Adapters served by vLLM's build for the CPU",
            f"vLLM {vllm}, torch {(torch or '2.11').removesuffix('.0')}",
            on_cpu(vllm, torch, SERVED_BY_0_24 if vllm == "0.24.0" else SERVED),
        )
        for vllm, torch in TRANSFERS
        if vllm in SERVED_BY
    ]
    return every_cell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="cells whose section and name contain one of these"
    )
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--megatron-lm", type=Path, help="a clone of Megatron-LM, with its tags")
    parser.add_argument("--seconds", type=int, default=1800, help="limit of a cell's tests (default 1800)")
    parser.add_argument("--list", action="store_true", help="only name them")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    WORK.mkdir(exist_ok=True)
    kept = read_table()
    for cell in cells():
        key = f"{cell.group}: {cell.name}"
        if options.only and not any(text in key for text in options.only):
            continue
        if options.list or (key in kept and kept[key].ok is not None and not options.again):
            print(f"{key}: {kept[key].outcome if key in kept else 'no result yet'}", flush=True)
            continue
        folder = WORK / "cell"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        ok = None
        try:
            outcome, ok = cell.check(options, folder), True
        except NotRunError as reason:
            outcome = str(reason)
        except (AssertionError, ReshardError, subprocess.SubprocessError, OSError, LookupError) as error:
            text = " ".join(str(error).replace(str(REPOSITORY), ".").split()).replace("|", "/")
            outcome, ok = text if len(text) <= 300 else f"{text[:80]} ... {text[-220:]}", False
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        today = datetime.now(timezone.utc).date().isoformat()
        kept[key] = Result(cell.group, cell.name, outcome, ok, today)
        write_table(kept, [(cell.group, cell.name) for cell in cells()])
        print(f"{key}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
