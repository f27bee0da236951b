"""Members of a refit that fail, come late, die, or do not fit each other: all are told, and nothing
torn is served."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reshard.refit.protocol.greeting import PROTOCOL
from reshard.refit.routes import Pair, Peer
from reshard.refit.transports import transport_for
from tests.megatron.test_logits import PP, TP, flags_at
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools import container
from tests.tools.refits import ENGINES


def on_ranks_of(into: str, ranks: int, function: str, sides: dict, *arguments, may_die: bool = False):
    """Call a function of `refit_faults_on_cpu` on so many ranks, with this engine's packages."""
    return run_on_ranks(
        ranks, function, sides | {"into": into}, *arguments, module="refit_faults_on_cpu", may_die=may_die,
        python=ENGINES[into].python(), environment=ENGINES[into].environment(),
    )  # fmt: skip


def fault(converted, folder, what: str, into: str, timeout: float = 60, flags: str = ""):
    checkpoint = converted("qwen3")[0]
    sides = {"trainer": 1, "engine": 2, "folder": str(folder), "port": free_port(), "timeout": timeout}
    arguments = sides, flags_at(Path(checkpoint[1]), flags), checkpoint, what
    return on_ranks_of(into, 3, "fault", *arguments, may_die=what in ("stalls", "trainer dies"))


# What the engine has a part in is done by both; the rest by turns.
@pytest.mark.parametrize(("what", "into", "flags", "sentence"), [
    ("config", "vLLM", "", "the trainer's layernorm_epsilon is 1e-06, but the served model's is 0.5"),
    ("config", "SGLang", "", "the trainer's layernorm_epsilon is 1e-06, but the served model's is 0.5"),
    ("another trainer", "SGLang", "--rotary-base 50000",
     "the trainer's rotary_base is 50000, but the served model's is 10000"),
    ("dtype", "vLLM", "", "is bfloat16 in the trainer, but float16 in the engine"),
    ("dtype", "SGLang", "", "is bfloat16 in the trainer, but float16 in the engine"),
    ("protocol", "vLLM", "", f"has protocol {PROTOCOL}, inference rank 2 has 99"),
    ("NIXL", "SGLang", "",
     "inference rank 2 has NIXL 0.1: pip install 'reshard[nixl]' in the same version for both, or use backend='auto'"),
    ("lacks a parameter", "vLLM", "",
     "the trainer's model lacks 1 parameters that the config of inference rank 1 calls for: "
     "model.layers.0.self_attn.o_proj.weight"),
    ("lies elsewhere", "SGLang", "", "is on meta, and a refit reads from cpu: move the whole model there first"),
    ("has an adapter", "vLLM", "",
     "has 1 parameters that no published tensor fills, since its sharded_state_dict leaves them out: "
     "embedding.word_embeddings.adapter"),
    ("has one too many", "SGLang", "", "holds 1 parameters that qwen3 does not have: decoder.layers.adapter.weight"),
])  # fmt: skip
def test_two_sides_that_do_not_fit_are_refused_at_connect_everywhere(
    what, into, flags, sentence, converted, tmp_path
):
    for said in fault(converted, tmp_path, what, into, flags=flags):
        assert sentence in said[0] or (what == "protocol" and "has protocol 99, " in said[0]), said


def test_a_member_that_never_comes_is_named_within_the_time_limit(begun):
    for said in begun["never comes"].result()[:2]:
        assert "rank 2 did not come to connect within 5 s" in said[0]


@pytest.mark.parametrize(
    ("what", "who"),
    [("stalls", "inference rank 2"), ("trainer dies", "trainer rank 0")],
)
def test_a_member_that_stalls_or_takes_the_store_with_it_is_named_within_the_time_limit(what, who, begun):
    for rank, said in enumerate(begun[what].result()):
        if who.endswith(str(rank)):
            continue
        sentences = f"{who} is silent", f"{who} did not come to refit 2 within 5 s", f"{who}, which serves"
        assert said[0] == "no error" and any(sentence in said[1] for sentence in sentences), said
        # Nothing is written before all have come: an engine's rank serves what it has.
        assert said[2] is (True if rank else None), said


@pytest.mark.parametrize(("what", "into", "sentence"), [
    ("fails in the middle", "vLLM", "inference rank 1: the device is gone"),
    ("fails in the middle", "SGLang", "inference rank 1: the device is gone"),
    ("loses a tile", "vLLM", "tensors did not arrive as they are in the trainer: "),
    ("loses a tile, and only the trainer asks", "SGLang", "tensors did not arrive as they are in the trainer: "),
])  # fmt: skip
def test_an_engine_serves_no_half_written_model_until_a_whole_refit_succeeded(
    what, into, sentence, converted, tmp_path
):
    trainer, first, second = fault(converted, tmp_path, what, into)
    for said in (trainer, second):
        assert said[0] == "no error" and sentence in said[1], said
    for said in (first, second):
        assert "holds a half-written model" in said[2] and said[3:] == ["(False, None)", "(True, 3)"], said


def test_offloaded_parameters_are_refused_before_a_byte_moves_and_refitted_when_they_are_back(
    converted, tmp_path
):
    for rank, said in enumerate(fault(converted, tmp_path, "is offloaded", "SGLang")):
        assert said[0] == said[2] == "no error" and "output_layer.weight has no memory" in said[1], said
        assert said[3] is (True if rank else None), said


@pytest.mark.parametrize(("variant", "change", "sentence"), [
    ("qwen3", "gate and up", "disagree on model.layers.0.mlp.gate_up_proj.weight"),
    ("qwen3-moe", "expert", "disagree on model.layers.0.mlp.experts.routed_experts.w13_weight"),
    ("gpt-oss", "turns", "disagree on model.layers.0.mlp.experts.routed_experts.w13_bias"),
    ("qwen3-moe", "backend", "experts in the order of AITER, which a refit cannot write: pass moe_backend='triton'"),
    ("qwen3-moe", "nothing", "no error"),
    ("qwen3", "fp8", "model.layers.0.self_attn.qkv_proj serves from weights that Fp8LinearMethod has changed"),
])  # fmt: skip
def test_a_disagreement_with_vllms_own_loader_is_refused_and_changes_nothing(
    variant, change, sentence, converted, tmp_path
):
    sides = {"trainer": 1, "folder": str(tmp_path), "port": free_port()}
    [(said, unchanged)] = run_on_ranks(
        1, "agreement", sides, converted(variant)[0][0], {}, change, module="refit_faults_on_cpu"
    )
    assert sentence in said and unchanged


@pytest.mark.skipif(not container.allowed(), reason="this machine lets nobody make namespaces")
def test_a_trainer_and_an_engine_in_two_containers_of_one_host_map_nothing_of_each_other(converted, tmp_path):
    sides = {"trainer": 1, "engine": 1, "folder": str(tmp_path), "port": free_port(), "timeout": 60}
    checkpoint = converted("qwen3")[0]
    hows = [{}, {"backend": "staged"}, {"backend": "nccl"}, {"backend": "cuda_ipc"}]
    results = run_on_ranks(
        2,
        "in_containers",
        sides,
        flags_at(Path(checkpoint[1]), ""),
        checkpoint,
        hows,
        module="refit_faults_on_cpu",
    )
    (trainer, of_trainer), (engine, of_engine) = results
    for (said, routes, right), how in zip(engine, hows, strict=True):
        if how.get("backend") in ("staged", "cuda_ipc"):
            continue
        [[route]] = routes
        assert said == ["no error"] * 2 and right, (how, said)
        assert route["route"] == "nccl", route
        assert "they run in pid and ipc namespaces of their own" in route["apart"], route
    for (said, _, _), (heard, _, _) in zip(trainer[1::2], engine[1::2], strict=True):
        for sentence in (*said, *heard):  # at connect, so there is no refit
            assert "cannot read each other's memory, since they run in pid and ipc namespaces" in sentence, (
                sentence
            )
            assert sentence.endswith("use backend='auto', or 'nccl'")
    # On GPUs of that host, by what both have said of themselves; and as they would say it in one container.
    gpus = [Peer(*process, "cuda", str(gpu)) for gpu, process in enumerate((of_trainer, of_engine))]
    together = [peer._replace(namespaces=gpus[0].namespaces) for peer in gpus]
    for exported in (True, False):
        assert transport_for(Pair(*gpus, False, exported), "auto").reach.name == "nccl"
        assert transport_for(Pair(*together, False, exported), "auto").reach.name == (
            "cuda_ipc" if exported else "staged"
        )
        assert transport_for(Pair(*together, False, exported, mappable=False), "auto").reach.name == "nccl"


# Moments of a connect and of a refit, and whose rank dies then; into each engine by turns.
DEATHS = {
    "connect posts held": "trainer",
    "connect posts pieces": "engine",
    "connect meets": "engine",  # those who go through buckets, over a communicator of torch's
    "connect ends": "engine",
    "refit comes": "trainer",
    "refit between": "trainer",
    "refit copies": "engine",
    "refit posts packed": "trainer",  # through slabs, where all wait for each other in turn
    "refit reads": "trainer",  # by NIXL, from who has packed the bytes, and has then ended
    "refit posts digests": "trainer",
    "refit ends": "trainer",
    "refit over": "engine",
}
RANKS = int(os.environ.get("RESHARD_TEST_RANKS", "2"))  # on either side
PATIENCE = 10 * RANKS  # seconds that one waits for another: only where a death is not seen
LIMIT = 4  # of two, one of whom is late


def death(checkpoint, folder, moment: str):
    """Of a member's death at a moment, who it was, and what all say: so many ranks of a trainer
    (PP2), and of an engine (TP)."""
    flags = flags_at(Path(checkpoint[1]), f"{PP} 2 {TP} {RANKS // 2}")
    victim = {"trainer": 1, "engine": 2 * RANKS - 1}[DEATHS[moment]]
    sides = {
        "trainer": RANKS,
        "engine": RANKS,
        "folder": str(folder),
        "port": free_port(),
        "timeout": PATIENCE,
    }
    backend = {"packed": "staged", "meets": "nccl", "reads": "nixl"}.get(moment.split()[-1])
    sides["how"] = {"backend": backend or "auto"}
    arguments = sides, flags, checkpoint, {"tp": RANKS}, victim, moment
    into = list(ENGINES)[list(DEATHS).index(moment) % len(ENGINES)]
    return victim, on_ranks_of(into, 2 * RANKS, "death", *arguments, may_die=True)


def lateness(checkpoints, folder, into: str):
    """What a trainer and an engine say where one of them is late by more than the time limit."""
    # Over IPv6, as an address in brackets.
    sides = {
        "trainer": 1,
        "engine": 1,
        "folder": str(folder),
        "port": free_port(),
        "timeout": LIMIT,
        "host": "[::1]",
    }
    return on_ranks_of(into, 2, "lateness", sides, flags_at(Path(checkpoints[0][1]), ""), checkpoints)


def missed(checkpoints, folder, into: str):
    """What a trainer and an engine of two ranks say, one of which misses a call."""
    sides = {"trainer": 1, "engine": 2, "folder": str(folder), "port": free_port(), "timeout": 60}
    return on_ranks_of(into, 3, "missed", sides, flags_at(Path(checkpoints[0][1]), ""), checkpoints)


@pytest.fixture(scope="module", autouse=True)
def at_once(request):
    """What waits has begun before the first test that does not."""
    if any(item.path == request.path and "begun" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("begun")


@pytest.fixture(scope="module")
def begun(converted, tmp_path_factory):
    """What mostly waits for time limits to run out, by name: five at a time, of which the first two
    take as long as all others, while the tests go on that ask for nothing of it."""
    checkpoints = converted("qwen3")
    with ThreadPoolExecutor(5) as pool:
        made = tmp_path_factory.mktemp
        work = {into: (lateness, checkpoints, made("lateness"), into) for into in ENGINES}
        work |= {
            what: (fault, converted, made("fault"), what, into, 5)
            for what, into in (("never comes", "vLLM"), ("stalls", "SGLang"), ("trainer dies", "vLLM"))
        }
        work |= {("missed", into): (missed, checkpoints, made("missed"), into) for into in ENGINES}
        work |= {moment: (death, checkpoints[0], made("death"), moment) for moment in DEATHS}
        yield {name: pool.submit(*some) for name, some in work.items()}


@pytest.mark.parametrize("moment", DEATHS)
def test_a_member_that_is_killed_in_the_middle_is_named_in_time_and_nothing_torn_is_served(moment, begun):
    victim, results = begun[moment].result()
    assert results[victim] is None, "it has died"
    for said, seconds, state, slabs in (results[rank] for rank in range(2 * RANKS) if rank != victim):
        assert not slabs
        if moment == "refit over":
            assert said == "no error" and state in (None, (True, 2)), (said, state)
            continue
        assert blamed(said) == {victim}, said
        assert seconds < PATIENCE, "the end of its process is seen, not its silence"
        whole = moment == "refit comes"
        assert state in (None, (whole, 1 if whole else None)), state


@pytest.mark.parametrize("into", ENGINES)
def test_an_engine_that_has_missed_a_call_is_in_step_when_all_call_again(into, begun):
    """By each backend, with deltas, whoever calls first; and where members make different calls."""
    trainer, first, second = begun["missed", into].result()
    for by in ("Gloo", "staged", "nixl"):
        name = f"{by} without one"
        for said, _, _ in (trainer[name], first[name]):
            assert "inference rank 2 did not come to refit" in said and name not in second, said
    names = [
        f"{by} {when}"
        for by in ("Gloo", "staged", "nixl")
        for when in ("before", "with changes", "again", "after")
    ]
    for name in (*names, "after both", "after another call"):
        for rank, member in enumerate((trainer, first, second)):
            said, seconds, right = member[name]
            assert said == "no error" and seconds < 20 and right is (True if rank else None), (
                name,
                member[name],
            )
    for member in (trainer, first, second):
        assert "all make the same calls in the same order" in member["another call"]


def blamed(sentence: str) -> set[int]:
    """The ranks that a sentence says are dead, or whose memory is gone; before a colon is who says it."""
    found = re.search(
        r"(?:: |^|; )([^:;]*?) (?:is silent|is gone|did not)|cannot map the memory of (.*?) \(", sentence
    )
    return {int(rank) for rank in re.findall(r"rank (\d)", found[1] or found[2])} if found else set()


@pytest.mark.parametrize(("step", "trainer", "engine", "state"), [
    # A connection that one has given up is nobody's: who comes later is told at once, and both may
    # connect again.
    ("engine late at connect", "rank 1 did not come to connect within 4 s", "rank 0: ", (False, None, None)),
    ("trainer late at connect", "rank 1: ", "rank 0 did not come to connect within 4 s", (False, None, None)),
    ("both connect", "no error", "no error", (False, None, None)),
    ("both refit", "no error", "no error", (True, 5, 0)),
    # Before the first byte: the engine serves what it had.
    ("engine late at a refit", "inference rank 1 did not come to refit 2 within 4 s", "trainer rank 0: ", (True, 5, 0)),
    ("trainer late at a refit", "inference rank 1: ", "trainer rank 0 did not come to refit 3 within 4 s",
     (True, 5, 0)),
    ("they disagree", "version 41", "version 8", (True, 5, 0)),
    ("the trainer wants a check", "no error", "no error", (True, 41, 1)),
    ("the engine wants a check", "no error", "no error", (True, 41, 1)),
    ("only one says", "no error", "no error", (True, 42, 1)),
    ("none says", "no error", "no error", (True, 43, 1)),
    # After it: the engine holds what nobody vouches for, and does not serve it, though every byte
    # may have come.
    ("engine late in the middle", "inference rank 1 ", "trainer rank 0: ", (False, None, None)),
    ("after engine was late in the middle", "no error", "no error", (True, 51, 0)),
    ("trainer late in the middle", "inference rank 1: ", "trainer rank 0 did not", (False, None, None)),
    ("after trainer was late in the middle", "no error", "no error", (True, 51, 0)),
    ("engine late once more", "inference rank 1 ", "trainer rank 0: ", (False, None, None)),
    ("they want other ways", "asks for backend='staged', inference rank 1 for 'nccl'", "give all the same",
     (False, None, None)),
    ("connect anew", "no error", "no error", (False, None, None)),
    ("refit anew", "no error", "no error", (True, 61, 0)),
    ("both sides moved", "no error", "no error", (True, 62, 1)),
    ("the engine has another parameter", "inference rank 1: ENGINE's", "has been replaced by one of another shape",
     (True, 62, None)),
    ("and has it back", "no error", "no error", (True, 63, 1)),
])  # fmt: skip
@pytest.mark.parametrize("into", ENGINES)
def test_a_member_that_is_late_in_any_phase_takes_no_torn_model_for_a_good_one(
    step, trainer, engine, state, into, begun
):
    sides = begun[into].result()
    (says, _, _), (hears, seconds, now) = (side[step] for side in sides)
    assert trainer.replace("ENGINE", into) in says and engine in hears, (says, hears)
    assert now[:2] == state[:2] and (state[2] is None or now[2] == state[2]), now
    if "late at" in step:
        # Within the limit and little more; and who comes late is told at once.
        waited, came_late = (seconds, sides[0][step][1])[:: -1 if step.startswith("engine") else 1]
        assert LIMIT <= waited < 5 * LIMIT and came_late < LIMIT, (waited, came_late)
