"""The calls of an engine's workers that write the deltas of a chain into them, or what was there before, and of the
engine around these."""

from typing import Any

from reshard.comm.fronts import EMPTY_CACHES, IS_PAUSED, PAUSE, RESUME, Calls, Front
from reshard.core.errors import ReshardError, UntouchedError, listed
from reshard.delta.chain import Chain
from reshard.delta.manifests import Base, Delta, without
from reshard.digests.numbers import text_of, total_of
from reshard.digests.parts import numbers_of

WORKERS, WRITE, ROLL_BACK = "reshard_delta_workers", "reshard_delta_write", "reshard_delta_roll_back"
DROP = "reshard_delta_drop"
# A call of nobody: the seconds for which the caller waits.
WAIT, LOOK_SECONDS = "wait", 0.05


def followed(
    meeting: tuple[Any, ...], session: str, options: tuple[Any, ...], workers: int, front: Front
) -> Calls:
    """Yield the calls of workers that meet, and bring themselves to a version, and those of the `front` around what
    they write."""
    checked((yield "reshard_delta_follow_begin", (*meeting, session, *options)), workers)
    while [False] in checked((yield "reshard_delta_follow_ready", (session,)), workers):
        yield WAIT, (LOOK_SECONDS,)
    yield from held(front, _follow(session, workers))


def _follow(session: str, workers: int) -> Calls:
    """Yield the call that writes what workers that meet have ready; return whether they wrote anything."""
    answers = yield "reshard_delta_follow", (session,)
    return any(wrote for [wrote] in checked(answers, workers))


def followed_back(options: tuple[Any, ...], workers: int) -> Calls:
    """Yield the call of workers that meet, and go back; return the version that they serve then."""
    answers = yield "reshard_delta_follow_back", options
    [version] = checked(answers, workers)[0]
    return version


def checked(answers: Any, workers: int | None = None) -> list[Any]:
    """Return what workers answer, by default as many as do. Raises ReshardError if one has not answered, or could
    not."""
    workers = len(answers) if workers is None else workers
    if not isinstance(answers, list) or len(answers) != workers:
        heard = len(answers) if isinstance(answers, list) else 0
        raise ReshardError(
            f"{heard} of the engine's {workers} workers have answered, so what the others hold is not known: load the "
            f"base into it again"
        )
    errors = [answer for answer in answers if isinstance(answer, dict)]
    if errors:
        kind = UntouchedError if all(error.get("untouched") for error in errors) else ReshardError
        raise kind(str(errors[0].get("error")))
    return answers


def applied(
    chain: Chain,
    target: int,
    after: str,
    session: str,
    verify: bool,
    pending_bytes: int,
    workers: int,
    front: Front,
) -> Calls:
    """Yield the calls of workers that bring them to a version whose weights have a digest, and those of the `front`
    around what is written."""
    # An engine that serves meanwhile stands still while a call lasts.
    is_new = yield from prepared(chain, target, after, session, pending_bytes, workers, not front.pauses)
    writing = written(chain, target, after, session, verify, workers)
    yield from held(front, writing) if is_new else writing


def prepared(
    chain: Chain,
    target: int,
    after: str,
    session: str,
    pending_bytes: int,
    workers: int,
    waits: bool = True,
) -> Calls:
    """Yield the calls after which workers have all that leads to a version whose weights have a digest, the last of
    which `waits` for that or comes again; return whether they serve other weights yet."""
    answers = checked((yield "reshard_delta_digests", (chain.where, session)), workers)
    serves, of_drafter = _digests(chain.base, answers)
    if serves == after:
        return False
    _check_forward(chain, chain.deltas(target), serves, of_drafter, target)
    checked((yield "reshard_delta_prepare", (session, serves, target, after, pending_bytes)), workers)
    while [False] in checked((yield "reshard_delta_prepared", (session, waits)), workers):
        yield WAIT, (LOOK_SECONDS,)
    return True


def _check_forward(chain: Chain, deltas: list[Delta], held: str, of_drafter: str, target: int) -> None:
    """Raise ReshardError unless weights with digest `held`, of which the drafter's have their own, are the base or a
    version before the target."""
    if held in {chain.base.digest, *(delta.after for delta in deltas)}:
        return
    newer = [delta.version for delta in chain.deltas() if delta.after == held]
    if newer:
        raise ReshardError(
            f"the engine holds version {newer[-1]} of {chain.where}, and goes forward only: to go back to "
            f"version {target}, call roll_back if it came from there, or load the base or an older version first"
        )
    _check_drafter(chain, held, of_drafter)
    raise ReshardError(
        f"the engine holds weights with digest {held}, which are neither the base of {chain.where} ({chain.base.name}) "
        f"nor a version up to {target}: load the base into it first"
    )


def _check_drafter(chain: Chain, held: str, of_drafter: str) -> None:
    """Raise ReshardError if weights that are in no version of a chain would be with its drafter, or with its model."""
    drafter, versions = chain.base.drafter, chain.deltas()
    if drafter is None:
        return
    models = {chain.base.of_model().digest, *(delta.of_model for delta in versions)}
    drafters = {drafter.digest, *(delta.drafter for delta in versions)}
    if without(held, of_drafter) in models and of_drafter not in drafters:
        raise ReshardError(
            f"the engine drafts by another drafter than that of {chain.where} (digest {of_drafter}): start it with the "
            f"one with which the chain was begun ({drafter.name})"
        )
    if without(held, of_drafter) in models:
        raise ReshardError(
            f"the engine holds the model of one version of {chain.where} and the drafter of another: start it again "
            f"with the base ({chain.base.name}) and its drafter ({drafter.name})"
        )


def written(chain: Chain, target: int, after: str, session: str, verify: bool, workers: int) -> Calls:
    """Yield the calls that write what was prepared, and compare the digest if asked to `verify`; return True."""
    yield from _all_or_none((yield WRITE, (session, target, after)), workers, session)
    if verify:
        answers = yield "reshard_delta_digests", (chain.where, session, True)
        try:
            is_same, why = _digests(chain.base, checked(answers, workers))[0] == after, ""
        except ReshardError as error:  # it is written, so nobody is as before
            is_same, why = False, f" ({error})"
        if not is_same:
            yield "reshard_delta_invalidate", (None,)
            drafter = chain.base.drafter
            again = "load the base anew"
            if drafter is not None:  # which an engine may not load again with its model
                again = f"start it again with the base and its drafter ({drafter.name})"
            raise ReshardError(f"the engine does not hold version {target} of {chain.where}{why}: {again}")
    return True


def _all_or_none(answers: Any, workers: int, session: str | None) -> Calls:
    """Yield the call, if one is needed, after which no worker serves what others could not write, and raise their
    error."""
    try:
        checked(answers, workers)
    except UntouchedError:
        if all(isinstance(answer, dict) for answer in answers):
            raise
        yield "reshard_delta_invalidate", (session,)  # others have written theirs
        raise ReshardError(str(next(each["error"] for each in answers if isinstance(each, dict)))) from None
    except ReshardError:
        yield "reshard_delta_invalidate", (session,)
        raise


def rolled_back(version: int | None, workers: int, front: Front | None = None) -> Calls:
    """Yield the calls of workers that go back to what they served before, and those of the `front`, where there is one,
    around what is written; return its version."""
    answers = checked((yield "reshard_delta_check_roll_back", (version,)), workers)
    versions = [reached for [reached] in answers]
    if len(set(versions)) > 1:
        raise UntouchedError(
            f"the engine's workers would go back to different versions ({listed(sorted(set(versions)))}): apply a "
            "version of the chain to all of them"
        )
    writing = _went_back(versions[0], workers)
    yield from writing if front is None else held(front, writing)
    return versions[0]


def _went_back(version: int, workers: int) -> Calls:
    yield from _all_or_none((yield ROLL_BACK, (version,)), workers, None)
    return version


def held(front: Front, writing: Calls) -> Calls:
    """Yield the calls of `writing` while no request runs, and, unless these return False since they wrote nothing, the
    one after which nothing of other weights is in a cache; return what they do. Where a write fails the engine stays
    paused."""
    is_ours = False
    if front.pauses:
        if not (yield IS_PAUSED, ()):
            yield PAUSE, ()
            is_ours = True
    elif not (yield EMPTY_CACHES, (False, False)):
        raise ReshardError(
            "this LLM has requests under way, whose keys and values are of the weights that it has now: "
            "call again when they have ended"
        )
    try:
        result = yield from writing
    except UntouchedError:
        if is_ours:
            yield RESUME, ()
        raise
    except ReshardError as error:
        if not is_ours:
            raise
        raise ReshardError(
            f"{error} (it stays paused: POST /resume, or resume_generation(), ends that)"
        ) from error
    wrote = result is not False  # and version 0 is the base
    if wrote and front.pauses and not (yield IS_PAUSED, ()):
        yield "reshard_delta_invalidate", (None,)
        raise ReshardError(
            "somebody resumed this engine while it was written, so requests may have mixed two versions, "
            "and it does not serve: load the base into it again"
        )
    # Requests that were running begin again, with the tokens that they have.
    if wrote and (yield EMPTY_CACHES, (True, front.has_connector)) is not True:
        yield "reshard_delta_invalidate", (None,)
        raise ReshardError(
            "the engine did not forget keys and values of the weights that it had before, so it does not "
            "serve: load the base into it again"
        )
    if is_ours:
        yield RESUME, ()
    return result


def _digests(base: Base, answers: list[Any]) -> tuple[str, str]:
    """Return the digest of an engine's weights, and that of a drafter's among them, of what all of its workers say of
    their boxes; the second is that of nothing where the chain has none. Raises ReshardError if they lack a part, or
    replicas of one differ."""
    held = {str(name) for answer in answers for name, _, _ in answer}
    if lacking := [name for name in base.tensors if name not in held]:
        raise ReshardError(
            f"the engine holds nothing of {len(lacking):,} tensors of the chain's base, such as {lacking[0]}: start it "
            f"with all of {base.name}, as with its vision tower (without language_model_only)"
        )
    hint = f"a chain reaches engines that hold all tensors of its base; load {base.name} into it again"
    numbers, drafter = numbers_of(base.tensors, answers, "the engine", hint), base.of_drafter()
    of_drafter = (numbers[name] for name in (drafter.tensors if drafter is not None else ()))
    return text_of(total_of(numbers.values())), text_of(total_of(of_drafter))
