"""The engine's side of a refit where vLLM runs in processes of its own: mixed into its workers, called through ``collective_rpc``.

    llm = LLM(..., worker_extension_cls="reshard.vllm_worker.RefitExtension")
    llm.collective_rpc("reshard_connect", args=("127.0.0.1:29600", trainer_ranks, trainer_ranks + engine_ranks))
    llm.collective_rpc("reshard_refit", args=(version,))

The trainer's ranks call `reshard.refit.connect` and `Link.refit` at the same time; each call returns when both sides are done.
"""

from typing import Any

from reshard.errors import ReshardError
from reshard.live.cpu_engine import keep_weights_plain
from reshard.live.vllm import VllmModel
from reshard.refit.link import BUCKET_BYTES, Link, connect
from reshard.refit.members import Members

# vLLM imports this module in each worker before it loads the model.
keep_weights_plain()


class RefitExtension:
    """For ``worker_extension_cls``."""

    def reshard_connect(self, address: str, first_rank: int, size: int, executor: str = "auto", bucket_bytes: int = BUCKET_BYTES,
                        timeout: float = 60.0) -> None:  # fmt: skip
        """Join the members at ``host:port`` as rank `first_rank` plus this worker's rank, of `size` in all, and connect."""
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        mine = self.rank + parallel.data_parallel_rank * parallel.world_size  # type: ignore[attr-defined]
        members = Members.join(address, first_rank + mine, size, timeout)
        self._reshard_link = connect(members, destination=VllmModel.from_worker(self), executor=executor, bucket_bytes=bucket_bytes)

    def reshard_refit(self, version: int | None = None, verify: bool = False) -> dict[str, Any]:
        """Take the trainer's weights; the report as a dict."""
        return self._link().refit(version, verify).to_dict()

    def reshard_version(self) -> int | None:
        """The version of the weights that this worker serves; None before the first refit."""
        return self._link().version

    def _link(self) -> Link:
        link: Link | None = getattr(self, "_reshard_link", None)
        if link is None:
            raise ReshardError("this engine is not connected: call reshard_connect first")
        return link
