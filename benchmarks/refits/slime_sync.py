"""slime's weight sync into SGLang, as its ``UpdateWeightFromTensor`` does it: for `benchmarks.refits.sglang`."""

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import synchronize
from benchmarks.refits.sglang_server import Server

BUCKET_BYTES = 512 << 20  # as slime's --update-weight-buffer-size


class SlimeSync:
    """Each rank of the trainer gathers the tensors of `source`, and sends its bucket's handle to the engine's
    rank on its GPU. `server` is the first rank's; the others have none."""

    def __init__(self, source: Any, model: Any, server: Server | None) -> None:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        from benchmarks.refits.refit import Today

        if torch.cuda.is_available():
            monkey_patch_torch_reductions()
        else:  # the server is no child of this process
            torch.multiprocessing.set_sharing_strategy("file_system")
        self.server, self.bucket, self.held = server, [], 0
        self.today = Today(source, model, None)
        self.today.give = self._take

    def update(self) -> None:
        """Send all tensors."""
        self.today.run()
        self._send()
        if self.server:
            self.server.flush_cache()
        dist.barrier()

    def _take(self, whole: dict[str, torch.Tensor]) -> None:
        """Put whole tensors into the bucket, and send it once it is full."""
        for name, tensor in whole.items():
            self.bucket.append((name, tensor))
            self.held += tensor.nbytes
            if self.held >= BUCKET_BYTES:
                self._send()

    def _send(self) -> None:
        """Give SGLang the handles of all ranks' buckets, and wait until it has read them."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if not self.bucket:
            return
        flat = FlattenedTensorBucket(named_tensors=self.bucket)
        data = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        handle = MultiprocessingSerializer.serialize(data, output_str=True)
        synchronize()
        handles: list = [None] * dist.get_world_size()
        dist.gather_object(handle, handles if dist.get_rank() == 0 else None)
        if self.server:
            body = {
                "serialized_named_tensors": handles,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            self.server.call("update_weights_from_tensor", body)
        dist.barrier()  # until then the engine reads it
        self.bucket, self.held = [], 0
