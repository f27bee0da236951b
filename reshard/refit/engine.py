"""The destination of a refit: one rank of a running inference engine, as `Engine`.

What a new engine has to give, if it serves weights as they were loaded:

- `hf_config`: the published config of the model that it serves, a ``config.json`` as a dict.
- `tp`: its tensor parallel size, which tells replicas apart; with pipeline stages, `pp` and `pp_rank`.
- `placement`: which boxes of the canonical tensors (published names and shapes) each of its local
  tensors holds. `reshard.engines.tracing.trace` records this from the engine's own loader, and
  `reshard.engines.placing.rules` checks rules against that record, or does without rules.
- `regions`: where each of these local tensors lies in memory.
- `guard`: a `reshard.refit.guard.Guard`, on which the engine's serving path calls
  ``check_ready()`` before each run of the model, also before the first refit.

Many loaders skip names that they do not know. So that no tensor is passed over, an engine calls
`reshard.engines.placing.accounts.account_for` when it is made.

The rest has defaults. An engine overrides them as far as it moves its tensors (`refresh_regions`),
quantizes or transposes plain weights when they have arrived (`scales`, `staged_rounds`, `process_round`,
`mismatches`), derives tensors from the weights (`update_derived`, `stale_derived`), caches what it
computes from them (`drop_caches`), has no moment between two steps at which all of it can switch
(`cannot_switch`), or can do without some of them (`optional`, `take_optional`).
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch

from reshard.core.errors import ReshardError, first_line, listed
from reshard.refit.served import ServedWeights

# How `Engine.tensor_accounts` tells of a tower that no refit has brought.
TOWER_AS_LOADED = "of another part than the language model, as it was loaded"


class Engine(ServedWeights):
    """One rank of a running inference engine; the module's docstring says what a subclass has to
    give.

    A refit writes into `regions`, and into the `scales` of those that are quantized, and nowhere
    else. `process_round` is called when the local tensors of a round of `staged_rounds` have arrived, before
    the first of the next.
    """

    tp: int
    # The engine's pipeline stages, and which of them this rank is in.
    pp: int = 1
    pp_rank: int = 0
    # Published names that a trainer may lack: `take_optional` tells the engine, before anything
    # is planned, which of them it has.
    optional: frozenset[str] = frozenset()
    # Why it cannot switch to a pending version between two steps; empty if it can.
    cannot_switch: str = ""
    # Seconds that ranks wait for each other when they process a round together.
    timeout: float = 60.0

    @property
    def ready(self) -> bool:
        """True once every parameter has been written by one complete refit, or loaded by the engine
        itself."""
        return self.guard.ready

    @property
    def version(self) -> int | None:
        """The version that the last complete refit brought; None before."""
        return self.guard.version

    @property
    def taken(self) -> object:
        """An object that stays the same until `take_facts` or `take_optional` has it bring other tensors, also while
        experts move."""
        return self.placement

    def check_idle(self) -> None:
        """Raise ReshardError if the engine cannot take weights now, as under requests; called at the
        start of each refit."""

    def begin(self) -> None:
        """Refuse to serve until `end`; called before the first byte is written."""
        self.guard.invalidate("a half-written model, since a refit failed or is under way")

    def end(self, version: int) -> None:
        """Serve again, with weights of this version; called when every member has finished."""
        self.guard.refitted(version)

    def take_optional(self, available: Set[str]) -> None:
        """Drop from `placement` what needs those of the `optional` names that are not `available`.

        Raises ReshardError if the engine cannot serve without it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has optional names, and does not say what it is without them"
        )

    def take_facts(self, facts: Mapping[str, bytes]) -> None:
        """Take what trainers' ranks say of their weights beside them (`Holder.facts`), by the name of each that says
        something; called before anything is planned.

        Raises ReshardError if the engine cannot serve these weights.
        """
        if facts:
            raise ReshardError(
                f"{type(self).__name__} takes no weights that come with {len(facts)} ranks' facts"
            )

    def disconnect(self) -> None:
        """Give back what `take_facts` took; called when the link closes, or could not be made."""

    def process_round(self, index: int) -> None:
        """Quantize or transpose the local tensors staged in this round into the tensors that the engine
        serves from.

        Their bytes are in their regions; on a GPU, once the current stream has reached this point.
        """

    def mismatches(self, index: int) -> list[Any]:
        """Return the ids of this round's local tensors, whose bytes are in their regions, that the
        engine serves other weights for."""
        return []

    def update_derived(self) -> None:
        """Update the tensors that the engine derives from its weights; called after the last
        byte."""

    def not_kept(self) -> list[str]:
        """Return the names of tensors that are made of something else than what lies in the regions, since no refit has
        brought what they are made of, or others have written them since."""
        return []

    def check_kept(self) -> None:
        """Raise ReshardError if the regions do not say what is served."""
        if others := self.not_kept():
            raise ReshardError(
                f"this {self.guard.engine}'s {listed(others, 1)} is made of something else than a refit has brought, "
                f"and what is published of it is not kept: its digest is not known before a refit"
            )

    def drop_caches(self) -> None:
        """Forget what was computed from the weights before, as far as the engine's own caller does not; called after
        the last byte, unless the caller keeps it."""

    def stale_derived(self) -> list[str]:
        """Return, for a check, the names of derived tensors that are not what the weights give."""
        return []

    def quantized_layers(self) -> list[dict[str, Any]]:
        """Return, for logs, what is not served in the trainer's dtype: ``how``, by which
        ``kernel``, and how many ``layers``."""
        return []

    def tensor_accounts(self) -> list[dict[str, Any]]:
        """Return, for logs, what a refit does to the engine's tensors.

        Each entry has ``what`` (brought, derived, left alone), ``how`` or why, how many
        ``tensors``, and the name of the ``first``.
        """
        return []


@contextmanager
def making_served(engine: Engine) -> Iterator[None]:
    """Raise ReshardError for any other error of an engine that makes what it serves of what has arrived: all members
    hear why, and none takes it for an exchange that broke off."""
    try:
        yield
    except ReshardError:
        raise
    except Exception as error:
        raise ReshardError(
            f"{engine.guard.engine} cannot make what it serves of what has arrived ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error


def may_be_of_another(error: ReshardError) -> bool:
    """Tell whether an error of `making_served` may come of another rank of the engine, with which this one was in a
    collective: torch says of one that died or stalled no more than that the collective has failed."""
    cause = error.__cause__
    return isinstance(cause, RuntimeError) and not isinstance(cause, torch.OutOfMemoryError)


@contextmanager
def as_before_on_error(engine: Engine) -> Iterator[None]:
    """Give an engine the attributes back that it had where an error is raised: others may be connected by what it had
    taken before."""
    own = vars(engine)
    before = {name: dict(value) if type(value) is dict else value for name, value in own.items()}
    try:
        yield
    except BaseException:
        for name in own.keys() - before.keys():
            del own[name]
        own.update(before)
        raise
