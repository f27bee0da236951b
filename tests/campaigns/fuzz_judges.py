"""The judges of the fuzzer: they say what a command should have made of a spoiled checkpoint, and
share no code with it."""

import json
import os
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.campaigns import fuzz_adapters, fuzz_chains
from tests.campaigns.fuzz_subjects import Subject
from tests.tools import readings
from tests.tools.oracle import dequantized, hf_tensors, megatron_tensors, same, stored_tensors

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # their padding is no model's

# Kinds of subjects with commands, a forger and a judge of their own.
OWN = {"chain": fuzz_chains, "adapter": fuzz_adapters}


def judged(command: str, subject: Subject, folder: Path, status: int, printed: str) -> tuple[str, str]:
    """Whether what a command did is right, by readers that share no code with it."""
    spoiled, out = folder / "spoiled", folder / "out"
    try:
        if subject.kind in OWN:
            return OWN[subject.kind].judged(command, subject, folder, printed)
        if command == "inspect":
            listing = json.loads(printed)["tensors"]
            if subject.kind == "mcore":
                return _listed(subject, spoiled, listing)
            if listing == subject.listing:
                return "right", ""
            now = {name: list(tensor.shape) for name, tensor in dequantized(spoiled).items()}
            wrong = [name for name, entry in listing.items() if now.get(name) != entry["shape"]]
            return ("wrong", f"inspect: {wrong[:3]}") if wrong else ("right for what the files say now", "")
        if command in ("diff", "check"):
            if status:
                return "differs", ""
            wrong = _unlike_the_truth(subject, spoiled)
            return ("wrong", f"{command} says equal: {wrong[:3]}") if wrong else ("right", "")
        meaning = _another_model(subject, spoiled, out)
        if meaning:
            return "wrong", f"another model: {meaning[:3]}"
        if command == "hf-to-mcore":
            got = stored_tensors(out / "release")
            if not same(got, subject.megatron):
                return "right", ""
        else:
            got = hf_tensors(out)
            if not same(got, subject.truth):
                return "right", ""
        if _vouched_for(subject, spoiled):
            return "wrong", "other bytes than the manifest has"
        if command == "hf-to-mcore":
            rows = len(got["embedding.word_embeddings.weight"])
            expected = megatron_tensors(spoiled, rows, dequantized(spoiled))
        else:
            now = stored_tensors(spoiled / "release")
            expected = megatron_tensors(out, len(now["embedding.word_embeddings.weight"]))
            got = {key: now[key] for key in subject.megatron}
        vocab = len(subject.truth["model.embed_tokens.weight"])
        wrong = same(
            *(
                {k: t[:vocab] if k in VOCABULARY else t for k, t in tensors.items()}
                for tensors in (got, expected)
            )
        )
        return ("wrong", f"{wrong[:3]}") if wrong else ("right for what the files say now", "")
    except BaseException:
        return "no judgment", traceback.format_exc(limit=-3)


def _unlike_the_truth(subject: Subject, spoiled: Path) -> list[str]:
    """The tensors that other readers find changed in the spoiled files; none where they cannot read them."""
    try:
        if subject.kind == "hf":
            return same(dequantized(spoiled), subject.truth)
        now = stored_tensors(spoiled / "release")
        return same({k: now[k] for k in subject.megatron if k in now}, subject.megatron)
    except BaseException:  # torch's CheckpointException is no Exception
        return []


def _vouched_for(subject: Subject, spoiled: Path) -> bool:
    """Whether the manifest is there as it was written: then nothing but what it lists may be made
    of the rest."""
    manifest = spoiled / "reshard.json"
    return (
        subject.written
        and manifest.is_file()
        and manifest.read_bytes() == (subject.path / "reshard.json").read_bytes()
    )


def _another_model(subject: Subject, spoiled: Path, out: Path) -> list[str]:
    """Where what was written describes another model than the spoiled files do, both read by hand
    (`readings`)."""
    original = subject.path if subject.kind == "hf" else subject.path / "hf"
    before = json.loads(
        (original if original.is_dir() else subject.partner).joinpath("config.json").read_text()
    )
    kind = before["model_type"]
    if subject.kind == "hf":
        text = (spoiled / "config.json").read_bytes()
        said = readings.of_flags(out / "megatron_flags.txt", kind)
        args = vars(torch.load(out / "release" / "common.pt", weights_only=False)["args"])
        meant = readings.of_config(json.loads(text), before)
        if kind == "deepseek_v3" and not any("enorm" in name for name in hf_tensors(spoiled)):
            meant["mtp_num_layers"] = 0  # it is announced, and not there
        copied = [] if (out / "hf" / "config.json").read_bytes() == text else ["hf/config.json is no copy"]
        return copied + readings.unlike(said, meant) + readings.unlike(readings.of_args(args, kind), meant)
    written = readings.of_config(json.loads((out / "config.json").read_text()), before)
    written["strange"] = [] if original.is_dir() else [name for name in written["strange"] if "=" in name]
    beside = spoiled / "hf" / "config.json"
    if beside.is_file():
        return readings.unlike(written, readings.of_config(json.loads(beside.read_text()), before))
    args = vars(torch.load(spoiled / "release" / "common.pt", weights_only=False)["args"])
    return readings.unlike(written, readings.of_args(args, kind))


def _listed(subject: Subject, spoiled: Path, listing: dict[str, Any]) -> tuple[str, str]:
    """Whether `inspect` lists what torch finds in a Megatron checkpoint's ``.metadata``, arranged
    by hand, without bytes."""
    import torch.distributed.checkpoint as dcp

    try:
        entries = dcp.FileSystemReader(str(spoiled / "release")).read_metadata().state_dict_metadata
        found = {
            key: torch.empty(e.size, dtype=e.properties.dtype, device="meta")
            for key, e in entries.items()
            if hasattr(e, "size")
        }
    except BaseException:
        same_as_before = listing == subject.listing
        return (
            ("right", "")
            if same_as_before
            else ("wrong", "inspect lists other tensors of what torch cannot read")
        )
    config = next(
        path.parent
        for path in (spoiled / "hf" / "config.json", subject.partner / "config.json")
        if path.is_file()
    )
    tensors = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device="meta")
        for name, entry in listing.items()
    }
    expected = megatron_tensors(config, len(found["embedding.word_embeddings.weight"]), tensors)
    wrong = [
        key
        for key, t in expected.items()
        if key not in found or (found[key].shape, found[key].dtype) != (t.shape, t.dtype)
    ]
    if wrong:
        return "wrong", f"inspect: {wrong[:3]}"
    return ("right" if listing == subject.listing else "right for what the files say now"), ""
