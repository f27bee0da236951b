"""The methods by which workers of several vLLM engines of one model (data parallel) say what all of them serve, where
only those of the first are heard.

An engine may wait in a step for another engine. So no worker waits here for another engine's within a call: each begins
to meet the others in a thread, and a second call returns what all have said.
"""

import json
from concurrent.futures import Future
from threading import Thread
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.engines.workers.delta_methods import answering
from reshard.engines.workers.digest_methods import DigestMethods


class DigestOfEnginesMethods(DigestMethods):
    """Methods of a vLLM worker, for `reshard.engines.digest`."""

    # Where the workers of the last digest meet, and what all say there.
    _reshard_met: "tuple[str, float, Future[list[dict[str, Any]]]] | None" = None

    def _reshard_rank(self) -> int:
        """Return this worker's rank among those of all engines of its model."""
        raise NotImplementedError

    def reshard_digest_begin(
        self, address: str, size: int, dtype: str | None, timeout: float, secret: str | None
    ) -> bool:
        """Read this worker's weights, and begin to meet the `size` workers of all engines at `address`, to tell them
        what `reshard_digest` answers."""
        answer = json.dumps(self.reshard_digest(dtype)).encode()
        rank, outcome = self._reshard_rank(), Future[list[dict[str, Any]]]()

        def meet() -> None:
            try:
                group = RefitGroup.join(address, rank, size, timeout, secret)
                with group.transaction("a digest"):
                    payloads = group.gather("digest", answer)
                    group.commit()
                group.close()
                outcome.set_result([json.loads(payload) for payload in payloads])
            except BaseException as error:
                outcome.set_exception(error)

        self._reshard_met = address, timeout, outcome
        Thread(target=meet, name="reshard-digest", daemon=True).start()
        return True

    @answering
    def reshard_expected_checksums(self, path: str) -> dict[str, str]:
        """Return what vLLM's checksums of this worker's parameters have to be if it serves the checkpoint at `path`
        (`reshard.engines.checksums`)."""
        from reshard.engines.checksums import checksums_of

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        expected = checksums_of(self._reshard_engine_side(), model, path)
        # As vLLM tells its workers' parameters apart, from 0.33 on.
        prefix_of = getattr(self, "_weight_checksum_prefix", str)
        return {f"{prefix_of()}{name}": value for name, value in expected.items()}

    @answering
    def reshard_digest_end(self, address: str) -> list[dict[str, Any]]:
        """Return what the workers that have met at `address` say, in the order of their ranks."""
        if self._reshard_met is None or self._reshard_met[0] != address:
            raise ReshardError(
                "another digest of this engine has begun: ask again when that one has returned"
            )
        (_, timeout, outcome), self._reshard_met = self._reshard_met, None
        return outcome.result(timeout)
