"""The client of an SGLang server, for `reshard.integrations.Fleet` and `reshard.integrations.WeightTransfer`."""

from typing import Any

from reshard.comm.http import EngineServer
from reshard.core.errors import ReshardError
from reshard.core.limits import check_seconds
from reshard.engines.sglang.calls import connect_server, refit_server, server_ranks
from reshard.refit.options import check_member_name

START_IT = "start it with reshard installed where SGLang is"


class SglangClient(EngineServer):
    """An SGLang server with reshard's plugin, called by its routes. `timeout` is in seconds; errors and logs call the
    engine by its `name`, such as that of its pod."""

    hands_on = True  # see `reshard.integrations.members.Member.hands_on`

    def __init__(self, url: str, timeout: float = 600.0, name: str | None = None) -> None:
        check_seconds(timeout, "timeout of SglangClient")
        check_member_name(name, "name of SglangClient")
        super().__init__(url, timeout, START_IT)
        self.name = name

    def world_size(self) -> int:
        """Return how many schedulers it has."""
        return server_ranks(self.url)

    def serves(self) -> int | None:
        """Return the version of the weights as SGLang tells it; None for one that is no number, such as of weights that
        it has loaded."""
        answer = self._call("GET", "model_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise ReshardError(f"{self.url} does not say which version it serves: use a newer SGLang")
        version = answer["weight_version"]
        return int(version) if isinstance(version, str) and version.isdecimal() else None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer, and connect."""
        connect_server(self.url, **init_info)

    def start_weight_update(self) -> None:
        """Nothing: SGLang takes weights in one call."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the weights; SGLang tells their version as its ``weight_version``."""
        refit_server(self.url, update_info["version"], update_info["verify"], self.timeout)

    def finish_weight_update(self) -> None:
        """Nothing, as for `start_weight_update`."""

    def pause(self) -> None:
        """Let no request run until `resume`; running requests are dropped, since SGLang takes weights only without."""
        self._call("POST", "pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        """Let requests run again."""
        self._call("POST", "continue_generation", {})
