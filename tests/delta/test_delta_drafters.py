"""A chain of deltas brings a model and its drafter in one version, bit for bit what vLLM's own loaders make of the
files of both; or it brings neither."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reshard import DeltaWriter, ReshardError, diff, digest, hf_to_mcore
from reshard.delta import Chain, apply, manifests, save, show
from reshard.trainers import FsdpModel, WithDrafter
from tests import install_sglang_cpu
from tests.megatron.test_logits import TP, flags_at
from tests.starting import warm
from tests.starting.ranks import run_on_ranks
from tests.tools.chains import forge, rewrite, spoil
from tests.tools.checkpoints import make
from tests.tools.drafters import Eagle3, load_drafter

MODULE = "delta_drafters_on_cpu"
# The numbers of the model's and the drafter's directory after each version: either stays as it was in one of them.
STEPS = [(1, 0), (1, 1), (1, 2), (2, 2), (2, 1)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[str, str]]:
    """Three models of one shape, in both formats."""
    folder, made = tmp_path_factory.mktemp("models"), []
    for seed in range(3):
        hf = make(folder / f"hf{seed}", "qwen3", torch.bfloat16, seed)
        hf_to_mcore(hf, folder / f"mcore{seed}", transformer_impl="local")
        made.append((str(hf), str(folder / f"mcore{seed}")))
    return made


@pytest.fixture(scope="module")
def drafters(models, tmp_path_factory) -> dict[str, list[str]]:
    """Four drafters of each kind."""
    folder = tmp_path_factory.mktemp("drafters")
    kinds = {"few tokens": (64, False), "own embedding": (None, True)}
    return {
        kind: [Eagle3(models[0][0], *how, seed=seed).publish(folder / kind / str(seed)) for seed in range(4)]
        for kind, how in kinds.items()
    }


@pytest.mark.parametrize(
    "kind, parallel", [("own embedding", None), ("few tokens", f"{TP} 2")], ids=["fsdp", "megatron"]
)
def test_an_engine_follows_a_model_and_its_drafter_or_takes_neither(
    kind, parallel, models, drafters, tmp_path
):
    flags = None if parallel is None else flags_at(Path(models[0][1]), parallel)
    arguments = models, drafters[kind], flags, {"tp": 2}, STEPS, str(tmp_path)
    outcomes = run_on_ranks(2, "follow", *arguments, module=MODULE)
    for of in outcomes:
        last = len(STEPS)
        assert of["versions"] == [(n, n, True) for n in range(2, last + 1)] and of["wrong"] == [[]] * (
            last - 1
        )
        assert of["differ"] > 20, "the control"
        assert of["back"] == (last - 1, [], last, [])
        assert "needs the name of that: give drafter_base=" in of["nameless"] and of["nothing yet"]
        assert "the trainer's drafter holds other weights than" in of["wrong base"]
        assert of["goes on"] == "no error"
        assert "has a drafter (" in of["without"] and "and the trainer has none" in of["without"]
        assert f"ends with version {last}, and the trainer's model holds other weights" in of["behind"]
        for case, sentence, serves in (
            ("spoiled", "was altered after it was written", True),
            ("forged", f"the engine does not hold version {last} of", False),
            ("another", "the engine drafts by another drafter than that of", True),
            ("mixed", "holds the model of one version of", True),
            ("none", "and this vLLM drafts by no other model: start it with", True),
        ):
            said, ready, as_it_was = of["said"][case]
            assert sentence in said and (ready, as_it_was) == (serves, serves), (case, said)
        is_ready, said = of["reloaded"]
        assert not is_ready and "a drafter that is not whole" in said, said
        assert "was begun without a drafter, and the trainer has one" in of["alone has one"]
        assert of["alone"] == (1, [], True) and len(of["left"]) == 1, "its own, as it was loaded"
        assert of["taken up"] == (last, [])
    held = show(tmp_path / "chain")
    assert held["drafter"] == drafters[kind][0] and held["tensors"] == len(
        Chain(tmp_path / "chain").base.tensors
    )
    assert sum(of["kept"] for of in outcomes) == held["weights_bytes"], "each element once"


def test_a_drafter_that_the_engine_would_not_take_whole_is_refused(models, drafters, tmp_path):
    [said] = run_on_ranks(1, "changed", models[0][0], drafters["few tokens"][0], str(tmp_path), module=MODULE)
    assert said[""] == said["same config"] == "no error"
    assert "the chain's drafter has rms_norm_eps 0.001, but the drafter of vLLM 1e-06" in said["config"]
    assert "does not take more_t2d of the chain's drafter" in said["skipped"]
    assert "has draft.model.fc.weight, which the chain's drafter does not have" in said["no fc"]
    assert "vLLM's own loader refuses the model's tensors" in said["narrow"]


def assign(module: torch.nn.Module, other: torch.nn.Module) -> None:
    named = dict([*other.named_parameters(), *other.named_buffers()])
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            tensor.copy_(named[name])


@pytest.fixture(scope="module")
def chain(models, drafters, tmp_path_factory) -> Path:
    """A chain with a version for each of `STEPS`, of drafters of few tokens; the trainer holds the drafter in fp32."""
    place = tmp_path_factory.mktemp("written") / "chain"
    few = drafters["few tokens"]

    def policy(number: int) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(models[number][0], dtype=torch.bfloat16)

    model, drafter = policy(0), load_drafter(few[0], models[0][0]).float()
    writer = DeltaWriter(
        WithDrafter(FsdpModel(model), drafter), models[0][0], place, drafter_base=few[0], dtype="bf16"
    )
    for number, (of_model, of_drafter) in enumerate(STEPS, 1):
        assign(model, policy(of_model))
        assign(drafter, load_drafter(few[of_drafter], models[0][0]))
        writer.save(number)
    writer.close()
    return place


def differing(one: str | Path, other: str | Path) -> list[str]:
    """The names of tensors of two directories that have other bits, dtypes or shapes, or that one of them lacks."""
    first, second = (load_file(Path(path, "model.safetensors")) for path in (one, other))
    return sorted(
        name
        for name in {*first, *second}
        if name not in first
        or name not in second
        or first[name].dtype != second[name].dtype
        or not torch.equal(first[name], second[name])
    )


@pytest.mark.parametrize("version", range(len(STEPS) + 1))
def test_apply_writes_the_model_and_the_drafter_of_a_version(version, chain, models, drafters, tmp_path):
    few = drafters["few tokens"]
    of_model, of_drafter = ((0, 0), *STEPS)[version]
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    report = apply(models[0][0], chain, model, version=version, drafter=(few[0], drafter))
    assert diff(models[of_model][0], model).equal and report.notices[-1].endswith(f"same version: {drafter}")
    assert [differing(few[number], drafter) == [] for number in range(4)] == [
        n == of_drafter for n in range(4)
    ]
    assert {path.name for path in drafter.iterdir()} == {path.name for path in Path(few[0]).iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "model"]
    with Chain(chain) as opened:
        digests = [opened.base.of_model().digest, *(delta.of_model for delta in opened.deltas())]
    assert digest(model).text == f"bf16:{digests[version]}", "the digest of the model alone"


def test_apply_says_that_it_leaves_the_drafter_out(chain, models, tmp_path):
    report = apply(models[0][0], chain, tmp_path / "model")
    assert diff(models[STEPS[-1][0]][0], tmp_path / "model").equal
    assert "the chain has a drafter" in report.notices[-1] and "--drafter BASE DST" in report.notices[-1]


@pytest.fixture
def refused(chain, models, drafters, tmp_path):
    """A function that says why both are not written, and sees that neither is."""

    def said(spoil=lambda path: None, base: str = "", model: str = "", to: str = "drafter") -> str:
        copy = tmp_path / "chain"
        shutil.copytree(chain, copy)
        spoil(copy)
        before = sorted(path.name for path in tmp_path.iterdir())
        drafter = (base or drafters["few tokens"][0], tmp_path / to)
        with pytest.raises(ReshardError) as error:
            apply(model or models[0][0], copy, tmp_path / "model", drafter=drafter)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return str(error.value)

    return said


def test_another_drafter_is_not_taken_for_the_base(refused, drafters):
    assert "its weights have digest" in refused(base=drafters["few tokens"][1])


def test_a_drafter_of_another_shape_is_not_taken_for_the_base(refused, drafters):
    assert "is another drafter than the base of" in refused(base=drafters["own embedding"][0])


def test_another_model_leaves_no_drafter(refused, models):
    assert "is not the base of" in refused(model=models[1][0])


def test_a_file_of_the_chain_that_was_altered_leaves_neither(refused):
    assert "was altered after it was written" in refused(spoil)


def test_a_drafter_that_was_forged_leaves_neither(refused):
    assert "does not give the drafter that it says" in refused(forge)


def test_a_model_that_was_forged_leaves_neither(refused):
    said = refused(lambda path: forge(path, "model."))
    assert "does not give the weights that it says" in said


def test_places_that_overlap_are_refused(refused):
    assert "overlap: give the drafter a directory beside the model's" in refused(to="model/drafter")


@pytest.mark.parametrize("over", ["model", "chain", "drafter"])
def test_what_is_read_is_not_replaced(over, chain, models, drafters, tmp_path):
    """Neither result replaces the base of either, or the chain."""
    places = {"model": models[0][0], "chain": chain, "drafter": drafters["few tokens"][0]}
    for name, place in places.items():
        shutil.copytree(place, tmp_path / name)
    held = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    written = {"drafter": tmp_path / "new"} if over == "drafter" else {"model": tmp_path / "new"}
    to = {"model": tmp_path / over, "drafter": tmp_path / over} | written
    with pytest.raises(ReshardError, match="which this run would (empty or )?replace: move it away"):
        apply(
            tmp_path / "model", tmp_path / "chain", to["model"], overwrite=True,
            drafter=(tmp_path / "drafter", to["drafter"]),
        )  # fmt: skip
    assert held == {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}


def test_places_that_overlap_by_a_link_are_refused(refused, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    assert "overlap: give the drafter a directory beside the model's" in refused(to="link/model/drafter")


def test_a_tensor_that_the_chain_does_not_bring_is_not_written_as_it_was(refused, drafters, tmp_path_factory):
    base = tmp_path_factory.mktemp("base") / "drafter"
    shutil.copytree(drafters["few tokens"][0], base)
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": torch.ones(4, 4)}, base / "model.safetensors")
    assert "has embed_tokens.weight, which the drafter of" in refused(base=str(base))


def test_delta_save_adds_nothing_to_a_chain_with_a_drafter(chain, models):
    before = sorted(path.name for path in chain.iterdir())
    with pytest.raises(ReshardError, match="has a drafter .*, and delta save compares models alone"):
        save(models[2][0], models[0][0], chain)
    assert sorted(path.name for path in chain.iterdir()) == before


def test_a_chain_without_a_drafter_has_none_to_write(models, drafters, tmp_path):
    save(models[0][0], models[1][0], tmp_path / "chain")
    assert show(tmp_path / "chain")["drafter"] is None
    with pytest.raises(ReshardError, match="has no drafter: leave --drafter out"):
        apply(
            models[0][0], tmp_path / "chain", tmp_path / "model",
            drafter=(drafters["few tokens"][0], tmp_path / "drafter"),
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["chain"]


def test_who_does_not_know_of_drafters_refuses_the_chain(chain, models, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(manifests, "WITH_DRAFTER", manifests.FORMAT)  # as it was before
        with pytest.raises(ReshardError, match="has format 5, and this reshard reads .*: update reshard"):
            apply(models[0][0], chain, tmp_path / "model")
    save(models[0][0], models[1][0], tmp_path / "alone")
    for path in (tmp_path / "alone").glob("*.json"):
        assert '"format": 4' in path.read_text(), "others are as before"


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("drafter"),
        lambda fields: fields["drafter"].update(digest="0"),
        lambda fields: fields["drafter"].update(config=[]),
        lambda fields: fields.update(
            tensors={
                name: info for name, info in fields["tensors"].items() if not name.startswith("drafter.")
            }
        ),
    ],
    ids=["none", "no digest", "no config", "no tensors"],
)
def test_a_base_whose_drafter_makes_no_sense_is_refused(change, refused):
    assert "its drafter is malformed" in refused(lambda path: rewrite(path / "base.json", change))


if install_sglang_cpu.installed():

    def test_an_sglang_follows_a_model_and_its_drafter(models, drafters, tmp_path):
        names = [hf for hf, _ in models]
        sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path)}
        [of] = run_on_ranks(
            1,
            "follow",
            sides,
            names,
            drafters["few tokens"],
            STEPS,
            str(tmp_path / "chain"),
            module="refit_drafters_sglang_on_cpu",
            python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )
        last = len(STEPS)
        assert of["versions"] == [(n, n) for n in range(1, last + 1)] and of["wrong"] == [[]] * last
        assert of["differ"] > 20 and of["back"] == (last - 1, [])
        assert "the engine drafts by another drafter than that of" in of["another"]
