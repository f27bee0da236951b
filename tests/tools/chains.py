"""Chains of deltas on their way into engines of the ranks at hand, and ones that are spoiled in one place."""

import json
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import xxhash

from reshard.engines.workers.delta_methods import DeltaMethods
from reshard.formats import safetensors
from reshard.refit.engine import Engine


class Workers(DeltaMethods):
    """A rank's worker, and the engine of all of them as `apply_deltas` calls it."""

    def __init__(self, side: Engine) -> None:
        self.side, self.emptied, self.called = side, 0, []

    def _reshard_engine_side(self) -> Engine:
        return self.side

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.called.append(method)
        answers: list = [None] * dist.get_world_size()
        dist.all_gather_object(answers, getattr(self, method)(*args))
        return answers

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.emptied += running
        return True

    def reshard_delta_workers(self) -> list:
        return [dist.get_world_size(), ""]


def spoil(chain: Path, prefix: str = "drafter.", version: int | None = None) -> None:
    """Flip a bit of the last byte of a record of a tensor whose name begins so, in the newest version with one, or in
    this one."""
    _flip(chain, prefix, version)


def forge(chain: Path, prefix: str = "drafter.", version: int | None = None) -> None:
    """Do the same, and write a manifest that has the checksums of that: only a digest can tell."""
    path = _flip(chain, prefix, version)
    data = path.read_bytes()
    [manifest] = (one for one in chain.glob("delta-*.json") if path.name in one.read_text())
    entry = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}

    def change(fields: dict) -> None:
        for file in fields["files"]:
            if file["name"] == path.name:
                file |= entry

    rewrite(manifest, change)


def rewrite(manifest: Path, change: Callable[[dict], None]) -> None:
    """Change the fields of a manifest, which gets the right checksum of them."""
    fields = json.loads(manifest.read_text())
    fields.pop("xxh3_128")
    change(fields)
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())
    manifest.write_text(json.dumps(fields | {"xxh3_128": checksum}))


def _flip(chain: Path, prefix: str, version: int | None) -> Path:
    begins = "delta-" if version is None else f"delta-{version:06d}"
    for path in sorted(chain.glob(f"{begins}*.safetensors"), reverse=True):
        for name, tensor in sorted(safetensors.read_header(path).items()):
            if name.startswith(prefix):
                data = bytearray(path.read_bytes())
                data[tensor.offset + tensor.size_bytes - 1] ^= 1
                path.write_bytes(data)
                return path
    raise AssertionError(f"{chain} changes no tensor whose name begins with {prefix}")
