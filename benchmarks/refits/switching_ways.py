"""The ways in which new weights come into a vLLM that serves, for `switching_served`: of each, the trainer's side and
the engine's.

- ``begun``: `Link.begin_refit`, then a switch between two steps; requests go on;
- ``refit``: vLLM is paused (``keep``), refitted with what changed, and resumed;
- ``all``: the same with all weights sent, as where nothing is known of changes;
- ``vllm``: vLLM's own weight transfer over NCCL, paused and resumed, packed as its documentation recommends;
- ``vllm sparse``: vLLM's own for changes (``sparse_nccl``), which wants positions in its own tensors. Finding what
  changed is left to its user: here each tensor is compared with a copy of what was last sent.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.refits.switching import TRAINER, synchronize
from reshard.comm.hosts import parsed
from reshard.refit import RefitGroup, connect
from reshard.trainers import FsdpModel

SECRET = "between both of these"
ENDS = ("vllm", "vllm sparse")  # these write behind the back of a link
WAYS = ("begun", "refit", "all", *ENDS)
FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
FUSED |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")


def told(group: RefitGroup, what: str, value: Any = None) -> Any:
    """Wait for both sides; return what the trainer told."""
    group.begin(what)
    answers = group.gather("told", json.dumps(value).encode())
    group.commit()
    return json.loads(answers[TRAINER])


def of_way(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a connection."""
    changes = {"delta": True} if way != "all" else {}
    return {"backend": "nccl", "bucket_bytes": options.bucket_bytes, "keep_mapped": True, **changes}


def published(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model with their published names; transformers holds a layer's experts as one."""
    for name, parameter in model.named_parameters():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("experts"):
            yield name, parameter.data
            continue
        for expert, weight in enumerate(parameter.data):
            parts = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
            for projection, part in parts if last == "gate_up_proj" else (("down_proj", weight),):
                yield f"{stem}.{expert}.{projection}.weight", part


class TrainerSide:
    """The trainer's: `first` sends everything, and each `sync` what a step made."""

    def __init__(
        self, way: str, address: str, model: torch.nn.Module, group: RefitGroup, options: argparse.Namespace
    ) -> None:
        self.way, self.model, self.group = way, model, group
        self.version = 0
        if way in ENDS:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init

            host, port = parsed(address)
            self.nccl = trainer_init({"master_address": host, "master_port": port, "world_size": 2})
            self.sent: dict[str, torch.Tensor] = {}
            return
        members = RefitGroup.join(address, TRAINER, 2, timeout=300, secret=SECRET)
        self.link = connect(members, FsdpModel(model), None, **of_way(way, options))

    def first(self) -> None:
        """Send everything."""
        if self.way not in ENDS:
            self.link.refit(self.version)
        elif self.way == "vllm":
            self.sync()
        else:  # the engine has what the way before it brought
            self.sent = {name: value.clone() for name, value in published(self.model)}

    def sync(self) -> float:
        """Send; return the ms for which the weights may not change."""
        self.version += 1
        synchronize()
        if self.way in ENDS:
            return self._by_vllm()
        told(self.group, "a sync")
        began = time.perf_counter()
        if self.way == "begun":
            begun = self.link.begin_refit(self.version)
            stood = time.perf_counter() - began
            assert begun.wait().is_pending
        else:
            self.link.refit(self.version)
            stood = time.perf_counter() - began
        told(self.group, "its end")
        return 1e3 * stood

    def _by_vllm(self) -> float:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine

        began = time.perf_counter()
        if self.way == "vllm":
            named = [
                (name, str(value.dtype).removeprefix("torch."), [*value.shape])
                for name, value in published(self.model)
            ]
            keys = ("names", "dtype_names", "shapes")
            about = dict(zip(keys, map(list, zip(*named, strict=True)), strict=True)) | {"packed": True}
            sends, rest = NCCLWeightTransferEngine.trainer_send_weights, {"packed": True}
            items: Iterator[Any] = published(self.model)
        else:
            patches = [*self._changed()]
            about = {
                "names": [patch.name for patch in patches],
                "dtype_names": ["bfloat16"] * len(patches),
                "shapes": [[len(patch.indices)] for patch in patches],
                "num_updates_list": [len(patch.indices) for patch in patches],
            }
            sends, rest = SparseNCCLWeightTransferEngine.trainer_send_weights, {}
            items = iter(patches)
        packed = time.perf_counter() - began
        told(self.group, "a sync", about)
        told(self.group, "paused")
        began = time.perf_counter()
        sends(items, {"group": self.nccl, **rest})
        synchronize()
        sent = time.perf_counter() - began
        told(self.group, "its end")
        return 1e3 * (packed + sent)

    def _changed(self) -> Iterator[Any]:
        """Yield what changed of each tensor, as patches of vLLM's own tensors."""
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

        fused: dict[str, int] = {}
        for name, value in published(self.model):
            stem, _, kind = name.removesuffix(".weight").rpartition(".")
            target = f"{stem}.{FUSED[kind]}.weight" if kind in FUSED else name
            start = fused.get(target, 0)
            fused[target] = start + value.numel()
            indices = (value != self.sent[name]).view(-1).nonzero().view(-1)
            values = value.view(-1)[indices]
            self.sent[name].view(-1)[indices] = values
            if len(indices):
                yield SparseWeightPatch(target, (indices + start).to(torch.int32), values)

    def close(self) -> None:
        """End the connection."""
        if self.way in ENDS:
            del self.nccl
            self.sent = {}
        else:
            self.link.close()
            self.link.group.close()


class EngineSide:
    """The engine's, of an ``AsyncLLM``."""

    def __init__(
        self, way: str, address: str, llm: Any, group: RefitGroup, options: argparse.Namespace
    ) -> None:
        self.way, self.address, self.llm, self.group, self.options = way, address, llm, group, options

    async def first(self) -> None:
        """Connect, and take everything."""
        if self.way not in ENDS:
            named = {"secret": SECRET, "timeout": 300.0, **of_way(self.way, self.options)}
            del named["keep_mapped"]
            if self.way != "all":
                del named["delta"]  # the trainer's alone
            await self.llm.collective_rpc("reshard_connect", args=(self.address, 1, 2), kwargs=named)
            await self.llm.collective_rpc("reshard_refit")
            return
        if self.way == "vllm sparse":
            await self.llm.collective_rpc("use_sparse")
        host, port = parsed(self.address)
        info = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": 2}
        await self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})
        if self.way == "vllm":
            await self.sync()

    async def sync(self) -> float:
        """Take what the trainer sends; return when it began, by the monotonic clock."""
        about = await asyncio.to_thread(told, self.group, "a sync")
        began = time.monotonic()
        if self.way == "begun":
            await self.llm.collective_rpc("reshard_begin_refit")
            await asyncio.to_thread(told, self.group, "its end")
            await self.llm.collective_rpc("reshard_switch", kwargs={"keep_caches": True})
            return began
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        if self.way in ENDS:
            await self.llm.collective_rpc("start_weight_update")
            await asyncio.to_thread(told, self.group, "paused")
            await self.llm.collective_rpc("update_weights", kwargs={"update_info": about})
            await self.llm.collective_rpc("finish_weight_update")
        else:
            await self.llm.collective_rpc("reshard_refit")
        await self.llm.resume_generation()
        await asyncio.to_thread(told, self.group, "its end")
        return began


def __getattr__(name: str) -> Any:
    # vLLM is imported only where an engine asks for its extension.
    if name == "Extension":
        from reshard.engines.vllm.worker import RefitExtension

        def use_sparse(worker: Any) -> None:
            """Take vLLM's own weight transfer of changes from now on."""
            from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine

            worker.weight_transfer_engine.shutdown()
            worker.weight_transfer_engine = SparseNCCLWeightTransferEngine(
                worker.vllm_config.weight_transfer_config,
                worker.vllm_config,
                worker.device,
                worker.get_model(),
            )

        return type("Extension", (RefitExtension,), {"use_sparse": use_sparse})
    raise AttributeError(name)
