"""The client of an SGLang server, for `reshard.integrations.Fleet` and `reshard.integrations.WeightTransfer`."""

import json
from typing import Any

from reshard.comm.http import EngineServer
from reshard.core.errors import OptionError, ReshardError
from reshard.core.limits import check_seconds
from reshard.engines.sglang.calls import (
    act_on_server,
    check_plugin,
    connect_server,
    refit_server,
    server_ranks,
)
from reshard.engines.workers.actions import BEGIN, DROP, HOLDS, REFIT, ROLL_BACK, SWITCH
from reshard.integrations.members import Held
from reshard.integrations.vllm.transfer import check_takes, held_by
from reshard.refit.options import check_member_name

START_IT = "start it with reshard installed where SGLang is"


class SglangClient(EngineServer):
    """An SGLang server with reshard's plugin, called by its routes. `timeout` is in seconds; errors and logs call the
    engine by its `name`, such as that of its pod."""

    hands_on = True  # see `reshard.integrations.members.Member.hands_on`
    takes_adapters = False  # see `reshard.integrations.vllm.transfer.check_takes`

    def __init__(self, url: str, timeout: float = 600.0, name: str | None = None) -> None:
        check_seconds(timeout, "timeout of SglangClient")
        check_member_name(name, "name of SglangClient")
        super().__init__(url, timeout, START_IT)
        self.name = name
        self._begun: tuple[str | None, int | None] | None = (
            None  # ticket and version of what is to be switched to
        )
        self._done = ""  # the action that is not finished
        self._is_paused = False  # it runs no requests, or may not

    def world_size(self) -> int:
        """Return how many schedulers it has."""
        return server_ranks(self.url)

    def serves(self, adapter: str | None = None) -> int | None:
        """Return the version of the weights as SGLang tells it; None for one that is no number, such as of weights that
        it has loaded. Raises OptionError for an `adapter`: SGLang's are not refitted."""
        check_takes(self, adapter)
        answer = self._call("GET", "model_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise ReshardError(f"{self.url} does not say which version it serves: use a newer SGLang")
        version = answer["weight_version"]
        return int(version) if isinstance(version, str) and version.isdecimal() else None

    def holds(self, adapter: str | None = None) -> Held | None:
        """Return what it serves, as SGLang and its first scheduler tell it; None if they tell no version, or different
        ones. Raises OptionError for an `adapter`."""
        version = self.serves(adapter)
        if version is None:
            return None
        check_plugin(self.url)
        answer = act_on_server(self.url, HOLDS, self.timeout)
        try:
            held = held_by([json.loads(answer["message"])])
        except (TypeError, LookupError, ValueError) as error:
            raise ReshardError(f"{self.url} does not say what it serves: {answer!r:.200}") from error
        return held if held is not None and held.version == version else None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer, and connect."""
        connect_server(self.url, **init_info)

    def start_weight_update(self) -> None:
        """Nothing: SGLang takes weights in one call."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the weights, or what else `reshard.engines.workers.actions` names; SGLang tells their version as its
        ``weight_version``."""
        action, version, ticket = (
            update_info.get("action", REFIT),
            update_info["version"],
            update_info.get("ticket"),
        )
        begun = self._begun
        if action in (SWITCH, DROP, ROLL_BACK) and begun is not None and begun[0] != ticket:
            if action != DROP:
                raise ReshardError(
                    f"the {action} of {self.url} comes late: what it means was given up, and another refit has begun "
                    f"since"
                )
            return
        self._done = ""
        self._begun = (ticket, version) if action == BEGIN else None
        keeping = {"keep_caches": not self._is_paused, "ticket": ticket}
        if action == REFIT:
            refit_server(self.url, version, update_info["verify"], self.timeout)
        elif action == BEGIN:
            options = {"version": version, "verify": update_info["verify"], "ticket": ticket}
            act_on_server(self.url, BEGIN, self.timeout, **options)
        elif action == ROLL_BACK:
            act_on_server(self.url, ROLL_BACK, self.timeout, version=version, **keeping)
        elif action == SWITCH:
            if begun is None:
                raise ReshardError(f"{self.url} has nothing to switch to: begin a refit first")
            act_on_server(self.url, SWITCH, self.timeout, version=begun[1], **keeping)
        self._done = action

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have SGLang tell the version. Raises ReshardError where nothing has brought one."""
        if weight_version is None:
            return  # and what another call has done is still to be told
        action, self._done = self._done, ""
        if action not in (REFIT, SWITCH, ROLL_BACK):
            raise ReshardError(f"{self.url} has got nothing of version {weight_version}: begin a refit first")
        if action in (SWITCH, ROLL_BACK):
            told = {"new_version": weight_version, "abort_all_requests": False}
            self._call("POST", "update_weight_version", told)

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Let no request run until `resume`; running requests are dropped, since SGLang takes weights only without, and
        resets its caches with them. Raises OptionError for another `mode`."""
        if mode != "abort":
            raise OptionError(
                "SGLang drops its requests when it is paused: switch with requests='abort', or with requests='go on' "
                "and caches='keep'"
            )
        self._is_paused = True  # also where the answer is lost
        self._call("POST", "pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Let requests run again."""
        self._call("POST", "continue_generation", {})
        self._is_paused = False
