"""A worker that deltas are written into, whose engine others write into, lose or move at the worst time: it serves the
version that it tells, or nothing."""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import ReshardError, diff
from reshard.comm.fronts import ANOTHER
from reshard.comm.group import RefitGroup
from reshard.comm.hosts import free_address
from reshard.core.boxes import whole
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.delta import apply, apply_deltas, roll_back, save, worker_calls
from reshard.delta.chain import Chain
from reshard.delta.configs import model_of_base
from reshard.delta.grouped import roll_back_in_group
from reshard.device.memory import Region
from reshard.engines.workers.delta_methods import DeltaMethods
from reshard.refit.engine import Engine
from reshard.refit.guard import Guard
from tests.starting.ranks import caught
from tests.tools.checkpoints import make
from tests.tools.model_classes import make as make_class


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[Path]:
    """Three checkpoints, of which each differs from the one before in one element."""
    folder = tmp_path_factory.mktemp("steps")
    found = [make(folder / "0", "llama", torch.bfloat16)]
    for number in (1, 2):
        weights = load_file(found[-1] / "model.safetensors")
        weights["model.norm.weight"][number] += 1
        found.append(Path(shutil.copytree(found[0], folder / str(number))))
        save_file(weights, found[-1] / "model.safetensors", {"format": "pt"})
    return found


@pytest.fixture(scope="module")
def chain(steps, tmp_path_factory) -> str:
    place = str(tmp_path_factory.mktemp("chain") / "chain")
    for before, after in pairwise(steps):
        save(before, after, place)
    return place


class Held(Engine):
    """An engine that holds a checkpoint's tensors as they are."""

    tp = 1

    def __init__(self, directory: Path, without: str = "") -> None:
        self.hf_config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        self.weights.pop(without, None)
        self.guard = Guard("vLLM", True)
        self.regions = {
            name: Region(tensor, 0, tensor.shape[-1] if tensor.ndim > 1 else 1)
            for name, tensor in self.weights.items()
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        tensors = [
            LocalTensor(name, shape, (Part(name, whole(shape), (0,) * len(shape)),))
            for name, shape in shapes.items()
        ]
        self.placement = Placement.of(shapes, tensors)

    def holds(self, directory: Path) -> bool:
        expected = load_file(directory / "model.safetensors")
        return all(torch.equal(tensor, expected[name]) for name, tensor in self.weights.items())

    def spoil(self) -> None:
        """Write in place, as nobody tells."""
        self.weights["model.norm.weight"][7] += 3


class Worker(DeltaMethods):
    """An engine of one worker, and what happens `after` a call of it."""

    def __init__(self, engine: Held) -> None:
        self.engine, self.after, self.calls = engine, dict[str, Callable[[], None]](), list[str]()

    def _reshard_engine_side(self) -> Held:
        return self.engine

    def _reshard_rank(self) -> int:
        return 0

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.calls.append(method)
        answer = json.loads(json.dumps(getattr(self, method)(*args)))
        self.after.pop(method, lambda: None)()
        return [answer]

    def reset_prefix_cache(self, *_: bool) -> bool:
        self.calls.append("reset")
        return True

    def reshard_delta_workers(self) -> list:
        return [1, "127.0.0.1:1"]


def test_an_engine_is_brought_to_a_version_and_back(steps, chain):
    engine = Held(steps[0])
    assert apply_deltas(Worker(engine), chain, verify=True) == 2 and engine.holds(steps[2])
    worker = Worker(engine)
    assert apply_deltas(worker, chain, version=2) == 2 and engine.version == 2, "nothing is to be written"


def test_an_engine_of_another_config_is_another_model(steps, chain):
    """It would serve the same weights as something else than the chain's versions."""
    engine = Held(steps[0])
    engine.hf_config |= {"rms_norm_eps": 0.25}
    with pytest.raises(
        ReshardError,
        match="vLLM's config has rms_norm_eps 0.25, but the chain's base has 1e-0.*base.json.: start it with that",
    ):
        apply_deltas(Worker(engine), chain)
    assert engine.holds(steps[0])


def test_an_engine_without_a_part_of_the_model_is_told_to_start_with_all_of_it(steps, chain):
    """As a vLLM of the language model alone; that it loads the base again would not help."""
    engine = Held(steps[0], without="model.norm.weight")
    with pytest.raises(
        ReshardError, match="nothing of 1 tensors .* such as model.norm.weight: start it with all"
    ):
        apply_deltas(Worker(engine), chain)
    assert engine.holds(steps[0])


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("verify", [False, True])
def test_what_others_write_in_place_while_files_are_read_is_served_as_no_version(
    version, verify, steps, chain
):
    engine = Held(steps[version])
    worker = Worker(engine)
    spoils = "reshard_delta_prepare" if version == 0 else "reshard_delta_digests"
    worker.after[spoils] = lambda: (engine.spoil(), engine.guard.altered() if version else None)[0]
    with pytest.raises(ReshardError, match="others have written or moved weights of this vLLM since"):
        apply_deltas(worker, chain, verify=verify)
    assert engine.version != 2 or not engine.ready


def test_weights_that_are_lost_after_they_were_compared_are_not_ready(steps, chain):
    engine = Held(steps[2])
    worker = Worker(engine)
    worker.after["reshard_delta_digests"] = lambda: engine.guard.lose("slept at level 2")
    with pytest.raises(ReshardError, match="others have written or moved weights"):
        apply_deltas(worker, chain)
    assert not engine.ready


def test_a_session_writes_once(steps, chain):
    engine = Held(steps[2])
    worker = Worker(engine)
    apply_deltas(worker, chain)
    session = worker._reshard_deltas.session
    answer = worker.reshard_delta_write(session, 77, "x")
    assert "was not prepared" in answer["error"] and engine.version == 2


@pytest.mark.parametrize("how", ["another caller", "replicas that differ"])
def test_an_engine_whose_digest_cannot_be_compared_does_not_serve(how, steps, chain, monkeypatch):
    engine = Held(steps[0])
    worker = Worker(engine)
    if how == "another caller":
        worker.after["reshard_delta_write"] = lambda: worker.reshard_delta_digests(chain, "another")
    else:
        plain = worker_calls.numbers_of

        def differ(*of: object) -> object:
            if "reshard_delta_write" in worker.calls:
                raise ReshardError("replicas differ")
            return plain(*of)

        monkeypatch.setattr(worker_calls, "numbers_of", differ)
    with pytest.raises(
        ReshardError, match=r"the engine does not hold version 2 of .* \(.*\): load the base anew"
    ):
        apply_deltas(worker, chain, verify=True)
    assert not engine.ready and engine.holds(steps[2]), "it is written, with caches of other weights"


def test_a_refusal_among_several_engines_leaves_each_as_it_is(steps, chain):
    engine, address = Held(steps[0]), free_address("127.0.0.1")
    worker = Worker(engine)
    apply_deltas(worker, chain)
    engine.guard.altered()  # since when there is no way back

    def alone() -> str:
        group = RefitGroup.join(address, 0, 1)
        try:
            return caught(lambda: roll_back_in_group(group, worker, 1))
        finally:
            group.close()

    with ThreadPoolExecutor(1) as pool:
        assert "keeps no version to go back to" in pool.submit(alone).result()
    assert engine.ready and engine.holds(steps[2])


def test_engines_go_back_bit_for_bit_unless_others_have_written(steps, chain):
    engine = Held(steps[0])
    worker = Worker(engine)
    apply_deltas(worker, chain)
    assert roll_back(worker) == 0 and engine.holds(steps[0])
    apply_deltas(worker, chain)
    engine.spoil()
    with pytest.raises(ReshardError, match="others have written into weights of this vLLM in place"):
        roll_back(worker)
    assert engine.ready and engine.version == 2 and "reshard_delta_invalidate" not in worker.calls


class OfGroup(Worker):
    """A worker that brings itself to a version together with those of other engines, here with none."""

    def begin(self, session: str, chain: str, version: int, verify: bool = False) -> None:
        address = free_address("127.0.0.1")
        options = chain, version, verify, 1 << 20
        assert self.reshard_delta_follow_begin(address, 1, 20.0, None, session, *options) is None

    def ready(self, session: str):
        deadline = time.monotonic() + 20
        while (said := self.reshard_delta_follow_ready(session)) == [False]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return said


def test_of_two_callers_in_a_group_the_first_is_told_that_another_has_come(steps, chain):
    engine = Held(steps[0])
    worker = OfGroup(engine)
    worker.begin("first", chain, 1, verify=True)
    assert worker.ready("first") == [True]
    worker.begin("second", chain, 2)
    for call in (worker.reshard_delta_follow_ready, worker.reshard_delta_follow):
        assert call("first") == {"error": ANOTHER, "untouched": True}
    assert engine.holds(steps[0]), "nothing was written for the first"
    assert worker.ready("second") == [True] and worker.reshard_delta_follow("second") == [True]
    assert engine.holds(steps[2]) and engine.version == 2


@pytest.mark.parametrize("comes", ["in a group", "alone"])
def test_a_reader_that_comes_too_late_does_nothing_more(comes, steps, chain, monkeypatch):
    engine, may_join, plain = Held(steps[0]), Event(), RefitGroup.join

    def late(*arguments):
        assert may_join.wait(20)
        return plain(*arguments)

    worker = OfGroup(engine)
    monkeypatch.setattr(RefitGroup, "join", late)
    worker.begin("late", chain, 1)
    late_one = worker._reshard_following
    monkeypatch.setattr(RefitGroup, "join", plain)
    if comes == "alone":
        assert apply_deltas(worker, chain, 2) == 2
    else:
        worker.begin("next", chain, 2)
        assert worker.ready("next") == [True]
    session = worker._reshard_deltas.session
    may_join.set()
    with pytest.raises(ReshardError, match="another call of apply_deltas has begun"):
        late_one.is_prepared(waits=True)
    assert worker._reshard_deltas.session == session, "it has not opened a chain"
    if comes == "in a group":
        assert worker.reshard_delta_follow("next") == [True]
    assert engine.holds(steps[2]) and engine.version == 2


def test_what_was_written_into_an_engine_that_is_there_already_is_not_served_as_the_version(steps, chain):
    engine = Held(steps[1])
    worker = OfGroup(engine)
    worker.begin("one", chain, 1)
    assert worker.ready("one") == [True]
    engine.spoil()
    assert "others have written" in worker.reshard_delta_follow("one")["error"]
    assert engine.version is None


def test_what_was_dropped_is_written_no_more_and_what_was_written_before_is_told(steps, chain):
    engine = Held(steps[0])
    worker = OfGroup(engine)
    worker.begin("one", chain, 1)
    assert worker.ready("one") == [True] and worker._reshard_deltas.coming is not None
    assert worker.reshard_delta_drop("one") == [False, None] and worker._reshard_deltas.coming is None
    assert worker.reshard_delta_follow("one") == {"error": ANOTHER, "untouched": True}
    assert engine.holds(steps[0])
    worker.begin("two", chain, 1)
    assert worker.ready("two") == [True] and worker.reshard_delta_follow("two") == [True]
    assert worker.reshard_delta_drop("two") == [True, 0] and worker.reshard_delta_drop("two") == [False, None]
    worker.begin("three", chain, 1)  # it is there already
    assert worker.ready("three") == [True] and worker.reshard_delta_follow("three") == [False]
    assert worker.reshard_delta_drop("three")[0] is False


def with_field(directory: Path, to: Path, field: str, value: object) -> Path:
    """A copy of a checkpoint with another value in its config."""
    shutil.copytree(directory, to)
    config = json.loads((to / "config.json").read_text())
    *parts, name = field.split(".")
    inside = config
    for part in parts:
        inside = inside[part]
    assert inside.get(name) != value
    inside[name] = value
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize(("field", "value"), [
    ("vision_config.num_heads", 8), ("vision_config.hidden_act", "silu"), ("image_token_id", 401),
    ("vision_config.deepstack_visual_indexes", [1, 0]), ("text_config.rope_parameters.mrope_section", [4, 6, 6]),
])  # fmt: skip
def test_a_chain_is_of_one_vision_tower_by_its_config(field, value, tmp_path):
    """A tower of the same weights that computes something else is another model to files and to engines."""
    base = make_class(tmp_path / "base", "Qwen3VLForConditionalGeneration")
    newer = Path(shutil.copytree(base, tmp_path / "newer"))
    weights = load_file(newer / "model.safetensors")
    weights["model.visual.patch_embed.proj.bias"] += 1
    save_file(weights, newer / "model.safetensors", {"format": "pt"})
    place = tmp_path / "chain"
    save(base, newer, place)
    other, later = (with_field(path, tmp_path / f"other {path.name}", field, value) for path in (base, newer))
    name = field.removeprefix("text_config.rope_parameters.")
    with pytest.raises(ReshardError, match=f"is not the base of .*chain: its config has {name} "):
        apply(other, place, tmp_path / "out")
    with pytest.raises(ReshardError, match=f"is not a new version of .*: its config has {name} "):
        save(newer, later, place)
    assert diff(base, other).fields.keys() == {name} and not diff(base, other).equal
    if field.startswith("text"):
        return  # of rotary settings connect compares what a table has
    begun = model_of_base(Chain(place).base, "the chain")
    assert begun is not None
    with pytest.raises(ReshardError, match=f"vLLM's config has {name} .*, but the served"):
        Held(other).check_model(begun)
    Held(base).check_model(begun)
    apply(with_field(base, tmp_path / "same", "vision_config.dtype", "float32"), place, tmp_path / "out")
    assert diff(tmp_path / "out", newer).equal
