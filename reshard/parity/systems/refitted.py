"""vLLM as a system, refitted from a Megatron-Core model."""

import json
import tempfile
from contextlib import closing
from pathlib import Path

from reshard.comm.http import is_address
from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import plain_weights
from reshard.engines.vllm.live import VllmModel
from reshard.parity.systems.base import SystemOptions
from reshard.parity.systems.megatron import Megatron
from reshard.parity.systems.vllm import StartedVllm, Vllm
from reshard.refit import RefitGroup, connect
from reshard.storage.sources.hf_hub import local_directory
from reshard.trainers.megatron import MegatronModel


class RefittedVllm(StartedVllm):
    """A vLLM that starts with dummy weights and is refitted from the Megatron-Core model of a
    checkpoint."""

    def __init__(self, path: Path, options: SystemOptions) -> None:
        super().__init__(options)
        trainer = Megatron(path, options.dtype, options.layout, options.hf_config)
        self.trainer: Megatron | None = trainer
        self.model = trainer.model
        self.name = f"vLLM, refitted from {trainer.name.partition(', ')[2]} to {self.sizes}"

    def start(self, context: int, routing: bool) -> None:
        assert self.trainer is not None
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.model.config), encoding="utf-8")
            with plain_weights():
                self.llm = self.launch(Path(folder), context, routing, load_format="dummy")
        link = connect(
            RefitGroup.of_process_group(),
            MegatronModel(self.trainer.models),
            VllmModel.from_llm(self.llm, self.options.match_vllm_rounding),
        )
        with closing(link):
            link.refit(verify=True)
        self._end_trainer()

    def _end_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None

    def close(self) -> None:
        self._end_trainer()
        super().close()


def open_served(place: str, megatron: bool, options: SystemOptions) -> StartedVllm:
    """Open a Hugging Face directory, or a Megatron checkpoint, which refits the engine."""
    if is_address(place):
        raise ReshardError(
            f"vllm:{place}: parity asks no vLLM server: give its Hugging Face directory, or score its outputs "
            f"(reshard.parity.scores_of_outputs)"
        )
    path = local_directory(place)
    return RefittedVllm(path, options) if megatron else Vllm(path, options)
