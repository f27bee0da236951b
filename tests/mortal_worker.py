"""An extension of vLLM's workers, of which one can be told to die."""

import os
import signal

from reshard.engines.vllm.worker import RefitExtension


class MortalExtension(RefitExtension):
    """For ``worker_extension_cls``."""

    dies = False

    def die_at_the_next_meeting(self) -> None:
        """Before it has joined there."""
        self.dies = True

    def reshard_connect_worker(self, *args, **kwargs) -> None:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        super().reshard_connect_worker(*args, **kwargs)
