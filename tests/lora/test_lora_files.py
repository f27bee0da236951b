"""LoRA adapters in PEFT's own files: merged as PEFT merges them, refused where they are more than A and B, and the
commands on them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reshard import (
    MegatronLayout,
    ReshardError,
    check,
    diff,
    hf_to_mcore,
    inspect,
    lora_merge,
    lora_to_megatron,
    lora_to_peft,
    mcore_to_hf,
)
from reshard.lora.patterns import Patterns
from reshard.parity.systems import opening
from tests.engines.test_engine import run
from tests.on_cpu import lora_in_vllm
from tests.tools.oracle import hf_tensors, same

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# An element of the sum of four products that are added in another order, in float32.
ULPS = 4


def model_of(source: Path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)


def adapter(source: Path, folder: Path, dtype=torch.float32, shared: bool = True, **settings) -> Path:
    """An adapter of random numbers, saved by PEFT; with `shared`, fused layers have one A."""
    config = LoraConfig(**dict(r=4, lora_alpha=10, target_modules=LINEAR) | settings)
    model = get_peft_model(model_of(source, dtype), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if shared:
            parameters = dict(model.named_parameters())
            for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
                for name in [name for name in parameters if f"{first}.lora_A" in name]:
                    for other in others:
                        if (copy := parameters.get(name.replace(first, other))) is not None:
                            copy.copy_(parameters[name])
    model.to(dtype).save_pretrained(folder)
    # PEFT names the model by where it was loaded from.
    return folder


def merged_by_peft(source: Path, of: Path, dtype) -> dict[str, torch.Tensor]:
    whole = PeftModel.from_pretrained(model_of(source, dtype), of).merge_and_unload()
    return {name: value for name, value in whole.state_dict().items() if name in hf_tensors(source)}


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference between the elements of two models of the same tensors."""
    assert ours.keys() == theirs.keys()
    return max(float((theirs[name].float() - value.float()).abs().max()) for name, value in ours.items())


def steps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The most numbers of their dtype that lie between two tensors' elements of one sign."""
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[a.dtype]
    ordered = [
        torch.where(x.view(integer) < 0, torch.iinfo(integer).min - x.view(integer), x.view(integer))
        for x in (a, b)
    ]
    return int((ordered[0].long() - ordered[1].long()).abs().max())


@pytest.fixture
def llama(checkpoint):
    return checkpoint("llama")


def test_a_merge_is_the_exact_sum_rounded_once(checkpoint, tmp_path):
    """In bf16 bit for bit: with few products, float32 holds the sum but for what rounding to bf16 drops."""
    source = checkpoint("qwen3", dtype=torch.bfloat16)
    of = adapter(source, tmp_path / "adapter", torch.bfloat16)
    lora_merge(source, of, tmp_path / "merged")
    ours, config = hf_tensors(tmp_path / "merged"), json.loads((of / "adapter_config.json").read_text())
    pairs, wanted = load_file(of / "adapter_model.safetensors"), hf_tensors(source)
    for name, a in pairs.items():
        if "lora_A" in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            product = pairs[name.replace("lora_A", "lora_B")].double() @ a.double()
            wanted[weight] = (
                wanted[weight].double() + config["lora_alpha"] / config["r"] * product
            ).bfloat16()
    unequal = sum(int((ours[name] != wanted[name]).sum()) for name in wanted)
    assert unequal <= 2 and max(steps(ours[name], wanted[name]) for name in wanted) <= 1
    assert (tmp_path / "merged" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert check(tmp_path / "merged").ok


def test_a_merge_into_codes_with_a_manifest_is_that_into_their_numbers(checkpoint, tmp_path):
    """Checksums are of the codes and scales as they are stored; one that was changed is named."""
    source = checkpoint("llama", dtype=torch.bfloat16)
    of = adapter(source, tmp_path / "adapter", torch.bfloat16)
    hf_to_mcore(source, tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "fp8", quantize="fp8")
    hf_to_mcore(tmp_path / "fp8", tmp_path / "numbers")
    lora_merge(tmp_path / "numbers", of, tmp_path / "wanted")
    lora_merge(tmp_path / "fp8", of, tmp_path / "merged")
    assert diff(tmp_path / "merged", tmp_path / "wanted").equal
    lora_merge(tmp_path / "fp8", of, tmp_path / "merged-mcore", format="mcore", layout=MegatronLayout(tp=2))
    assert diff(tmp_path / "merged-mcore", tmp_path / "wanted").equal
    for suffix in ("weight", "weight_scale_inv"):
        damaged = shutil.copytree(tmp_path / "fp8", tmp_path / suffix)
        stored = load_file(damaged / "model.safetensors")
        name = f"model.layers.1.mlp.up_proj.{suffix}"
        stored[name].view(torch.uint8)[0, 0] ^= 1
        save_file(stored, damaged / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            ReshardError, match=f"up_proj.{suffix} does not have the checksum of reshard.json"
        ):
            lora_merge(damaged, of, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merge_is_that_of_peft(dtype, checkpoint, tmp_path):
    """In bf16 PEFT rounds the product before the sum and again after it, and in float32 its BLAS adds in an order
    of its own."""
    source = checkpoint("llama", dtype=dtype)
    of = adapter(source, tmp_path / "adapter", dtype)
    lora_merge(source, of, tmp_path / "merged")
    ours, theirs = hf_tensors(tmp_path / "merged"), merged_by_peft(source, of, dtype)
    assert ours.keys() == theirs.keys()
    scale = max(float(value.abs().max()) for value in theirs.values())
    worst = max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs)
    assert worst <= ULPS * torch.finfo(dtype).eps * scale
    assert any(not torch.equal(ours[name], tensor) for name, tensor in hf_tensors(source).items())


def test_a_merge_into_megatron_and_from_it_is_the_same(llama, tmp_path):
    of = adapter(
        llama,
        tmp_path / "adapter",
        shared=False,
        target_modules=[*LINEAR, "lm_head"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={r"layers\.1\.mlp\.up_proj": 3},
        use_rslora=True,
    )
    said = lora_merge(llama, of, tmp_path / "hf").notices
    assert any(sentence.endswith(" has none: copy one there") for sentence in said), (
        "no word of a training's options"
    )
    lora_merge(llama, of, tmp_path / "mcore", format="mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    hf_to_mcore(llama, tmp_path / "base")
    lora_merge(tmp_path / "base", of, tmp_path / "from-megatron")
    for other in ("back", "from-megatron"):
        assert same(hf_tensors(tmp_path / "hf"), hf_tensors(tmp_path / other)) == []
    theirs = merged_by_peft(llama, of, torch.float32)
    assert all(
        torch.allclose(theirs[name], value, rtol=0, atol=1e-6)
        for name, value in hf_tensors(tmp_path / "hf").items()
    )


def test_adapters_that_cannot_share_an_a_become_canonical_lora(llama, tmp_path):
    of = adapter(llama, tmp_path / "adapter", shared=False)
    report = lora_to_megatron(of, tmp_path / "back", hf_config=llama)
    assert any(
        "written as canonical LoRA: " in notice and "have different A" in notice for notice in report.notices
    )
    lora_to_peft(tmp_path / "back", tmp_path / "again")
    assert diff(of, tmp_path / "again", hf_config=llama).equal
    two = adapter(llama, tmp_path / "two", target_modules=["q_proj", "v_proj"])
    report = lora_to_megatron(two, tmp_path / "two-back", hf_config=llama)
    assert any("k_proj.weight has no adapter" in notice for notice in report.notices)
    lora_to_peft(tmp_path / "two-back", tmp_path / "two-again")
    assert diff(two, tmp_path / "two-again", hf_config=llama).equal
    for options, sentence in (
        (
            {"canonical": False},
            "have different A, where bridge without --canonical has one A .*: --canonical has one",
        ),
        (
            {"format": "mcore-bridge"},
            "have different A, where mcore-bridge has one A .*: --format bridge has one",
        ),
    ):
        with pytest.raises(ReshardError, match=sentence):
            lora_to_megatron(of, tmp_path / "refused", hf_config=llama, **options)
        assert not (tmp_path / "refused").exists()
    with pytest.raises(ReshardError, match="k_proj.weight has no adapter, .* where mcore-bridge has one A"):
        lora_to_megatron(two, tmp_path / "refused", hf_config=llama, format="mcore-bridge")
    assert [path.name for path in tmp_path.iterdir() if "refused" in path.name] == []


def test_an_adapter_goes_from_one_trainer_to_the_other(llama, tmp_path, monkeypatch):
    of = adapter(llama, tmp_path / "adapter")
    read = os.pread  # of a file system that gives less than it was asked for
    monkeypatch.setattr(os, "pread", lambda file, length, at: read(file, length // 2 + 1, at))
    lora_to_megatron(of, tmp_path / "one", hf_config=llama, format="mcore-bridge", tp=4)
    lora_to_megatron(tmp_path / "one", tmp_path / "two")
    lora_to_megatron(tmp_path / "two", tmp_path / "three", canonical=True, tp=2)
    lora_to_megatron(tmp_path / "three", tmp_path / "four", format="mcore-bridge", tp=2)
    for name in ("one", "two", "three", "four"):
        assert diff(of, tmp_path / name, hf_config=llama).equal
        assert check(tmp_path / name).ok
    with pytest.raises(ReshardError, match="the 96 rows of .*gate_proj.weight cannot be cut into 5 parts"):
        lora_to_megatron(of, tmp_path / "five", hf_config=llama, format="mcore-bridge", tp=5)
    unlike = adapter(llama, tmp_path / "unlike", shared=False)
    lora_to_megatron(unlike, tmp_path / "canonical", hf_config=llama)
    with pytest.raises(
        ReshardError, match="have different A, where mcore-bridge has one A for all of them: --format bridge"
    ):
        lora_to_megatron(tmp_path / "canonical", tmp_path / "refused", format="mcore-bridge")


def test_the_commands_import_no_torch(llama, tmp_path):
    code = (
        "import sys, reshard; a, b, c, d, hf = sys.argv[1:]; reshard.lora_to_megatron(a, b, hf_config=hf); "
        "reshard.lora_to_peft(b, c);reshard.lora_merge(hf, c, d); assert not {'torch', 'peft', "
        "'transformers'} & set(sys.modules)"
    )
    names = [adapter(llama, tmp_path / "adapter"), *(tmp_path / name for name in "bcd"), llama]
    subprocess.run([sys.executable, "-c", code, *map(str, names)], check=True)
    assert (tmp_path / "d" / "config.json").is_file()


VALUES = (None, [], {}, "x", -1, 0, 1e999, True, [[]], {"(": 1}, "..", 1 << 70)


def mutated(folder: Path, random: Random) -> str:
    """Change one file of a directory: some bytes, its length, or a value of its JSON; say what."""
    file = random.choice(
        sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "reshard.json")
    )
    data = bytearray(file.read_bytes())
    kind = (
        random.choice(("bytes", "length", "json"))
        if file.suffix == ".json"
        else random.choice(("bytes", "length"))
    )
    if kind == "json":
        value = json.loads(data)
        key = random.choice(sorted(value))
        value[key] = random.choice(VALUES)
        file.write_text(json.dumps(value))
        return f"{file.name}: {key} is {value[key]!r}"
    if kind == "length":
        del data[random.randrange(len(data)) :]
    else:
        for _ in range(random.choice((1, 8))):
            data[random.randrange(min(len(data), random.choice((64, 1 << 30))))] = random.randrange(256)
    file.write_bytes(data)
    return f"{file.name}: {kind}"


def test_mutations_of_every_file_are_answered(checkpoint, tmp_path):
    """With one sentence, or with a whole destination."""
    source = checkpoint("qwen3-moe")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    of = adapter(source, tmp_path / "adapter", target_modules=["q_proj", "o_proj"], target_parameters=experts)
    lora_to_megatron(of, tmp_path / "bridge", hf_config=source)
    lora_to_peft(tmp_path / "bridge", tmp_path / "peft")
    for folder in (tmp_path / "bridge", tmp_path / "peft"):
        (folder / "reshard.json").unlink()  # which would name any change
    random, answers = Random(2026), {"refused": 0, "whole": 0}
    for number in range(90):
        subject = random.choice([of, tmp_path / "bridge", tmp_path / "peft"])
        spoiled, out = tmp_path / f"spoiled-{number}", tmp_path / f"out-{number}"
        shutil.copytree(subject, spoiled)
        what = mutated(spoiled, random)
        convert = random.choice(
            (lora_to_peft, lora_to_megatron, lambda a, b, **options: lora_merge(source, a, b, workers=1))
        )
        try:
            convert(spoiled, out, hf_config=source)
            answers["whole"] += 1
        except ReshardError as error:
            answers["refused"] += 1
            assert "\n" not in str(error) and not out.exists(), what
        except Exception as error:
            raise AssertionError(f"{subject.name}, {what}") from error
        assert not list(tmp_path.glob(".*partial")), what
    assert min(answers.values()) > 10


REFUSED = [
    ({"use_dora": True}, "use_dora is True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
    ({"r": 8}, "says that .*q_proj has rank 8, but its A has rank 4"),
    ({"rank_pattern": {"(": 2}}, "rank_pattern: '\\(' is not a regular expression"),
    (
        {"rank_pattern": {r"(q)\1_proj": 2}},
        "rank_pattern: .* is more complex than the patterns that are followed",
    ),
    ({"rank_pattern": {"(?=q)q_proj": 2}}, "rank_pattern: .* is more complex than the patterns"),
    ({"alpha_pattern": {"(?i:Q_PROJ)": 2}}, "alpha_pattern: .* is more complex than the patterns"),
    ({"alpha_pattern": {"(((x?){99}){99}){99}": 2}}, "alpha_pattern: .* is more complex than the patterns"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is {'nblocks': 2}"),
    ({"fan_in_fan_out": 0}, "fan_in_fan_out is 0"),
    ({"of_tomorrow": 1.5}, "of_tomorrow is 1.5, which is not converted"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes', neither true nor false"),
    (
        {"init_lora_weights": "pissa_niter_4"},
        "init_lora_weights is 'pissa_niter_4', by which PEFT changes the base",
    ),
    ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
    ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
    ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
    ({"init_lora_weights": 1}, "init_lora_weights is 1,"),
    ({"rank_pattern": {".*up_proj": 2}}, "up_proj has rank 2, but its A has rank 4"),
    ({"lora_alpha": "ten"}, "lora_alpha is 'ten', not a positive number"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_more_than_two_matrices_is_refused_by_name(change, sentence, llama, tmp_path):
    of = adapter(llama, tmp_path / "adapter")
    config = json.loads((of / "adapter_config.json").read_text()) | change
    (of / "adapter_config.json").write_text(json.dumps(config))
    for action in (lora_to_megatron, lambda *paths, hf_config: lora_merge(llama, *paths)):
        with pytest.raises(ReshardError, match=sentence):
            action(of, tmp_path / "out", hf_config=llama)
    assert not (tmp_path / "out").exists()


# How an adapter that changes its base begins, and one that does not; PEFT reads either from its config.
BEGINNINGS = {"pissa": False, "olora": False, "gaussian": True, "orthogonal": True, "eva": True, "mica": True}


@pytest.mark.parametrize("init", BEGINNINGS)
def test_an_adapter_that_changed_its_base_is_refused_and_any_other_merged_as_peft_does(init, llama, tmp_path):
    of = adapter(llama, tmp_path / "adapter", shared=False, init_lora_weights=init)
    theirs = merged_by_peft(llama, of, torch.float32)
    if BEGINNINGS[init]:
        lora_merge(llama, of, tmp_path / "merged")
        assert apart(hf_tensors(tmp_path / "merged"), theirs) < 1e-6
        return
    with pytest.raises(ReshardError, match=f"init_lora_weights is '{init}', by which PEFT changes the base"):
        lora_merge(llama, of, tmp_path / "merged")
    config = json.loads((of / "adapter_config.json").read_text()) | {"init_lora_weights": True}
    (of / "adapter_config.json").write_text(json.dumps(config))
    lora_merge(llama, of, tmp_path / "merged")
    assert apart(hf_tensors(tmp_path / "merged"), theirs) > 0.01, "another model, without the refusal"


def test_patterns_that_a_matcher_could_not_end_are_followed_as_peft_means_them(llama, tmp_path):
    """What Python's own matcher takes years for."""
    of = adapter(llama, tmp_path / "adapter", shared=False, alpha_pattern={"layers.1.mlp.up_proj": 3})
    lora_merge(llama, of, tmp_path / "wanted")
    config = json.loads((of / "adapter_config.json").read_text())
    config["alpha_pattern"] = {r"((\w|[a-z_.0-9]*)*)*!": 5, r"(?:layers\.1\.?)+mlp\.(up|(x+x+)+y)_proj": 3}
    (of / "adapter_config.json").write_text(json.dumps(config))
    lora_merge(llama, of, tmp_path / "merged")
    assert same(hf_tensors(tmp_path / "wanted"), hf_tensors(tmp_path / "merged")) == []


def test_a_pattern_is_what_pythons_matcher_makes_of_it():
    """Of random patterns and real names; PEFT's own expression is the judge."""
    pieces = (
        "q_proj", "layers", "mlp", ".", r"\.", r"\d+", ".*", "[0-3]", "(q|up)_proj", "^model", "$", "1", "(1|2)?",
        "[^.]+", "w1{1}", r"\w*", "(?:a|mlp)", "l{1,2}", ".*?", "x|lm_head", r"\Z", r"\A",
    )  # fmt: skip
    ends = ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.3.w1", "mlp.gate_up_proj")
    names = [f"model.layers.{layer}.{end}" for layer in (0, 1, 12) for end in ends] + ["lm_head", ""]
    random, found = Random(0), 0
    for _ in range(1500):
        values = {"".join(random.choices(pieces, k=random.randint(1, 4))): number for number in range(2)}
        expressions = {rf"(.*\.)?({pattern})$": number for pattern, number in values.items()}
        try:
            compiled = {re.compile(expression): number for expression, number in expressions.items()}
        except re.error:
            continue
        patterns = Patterns(values, "rank_pattern")
        for name in names:
            wanted = next((number for one, number in compiled.items() if one.match(name)), None)
            assert patterns.find(name, None) == wanted, (values, name)
            found += wanted is not None
    assert found > 1000


def rewritten(of: Path, rule) -> None:
    tensors = load_file(of / "adapter_model.safetensors")
    renamed = {rule(name): value for name, value in tensors.items()}
    save_file(renamed, of / "adapter_model.safetensors", {"format": "pt"})


SPELLINGS = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "in DDP": lambda name: f"module.{name}",
    "without PEFT's prefix": lambda name: name.removeprefix("base_model.model."),
    "with the adapter's name": lambda name: name.replace(".weight", ".default.weight"),
    "of AutoModel": lambda name: name.replace("base_model.model.model.", "base_model.model."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_adapters_names_are_read_as_a_models_are(spelling, llama, tmp_path):
    of = adapter(llama, tmp_path / "adapter", shared=False)
    lora_merge(llama, of, tmp_path / "wanted")
    rewritten(of, SPELLINGS[spelling])
    notices = lora_merge(llama, of, tmp_path / "merged").notices
    assert same(hf_tensors(tmp_path / "wanted"), hf_tensors(tmp_path / "merged")) == []
    assert any("read under PEFT's names: 56 tensors" in notice for notice in notices)
    rewritten(of, lambda name: name.replace("layers.0.", "layers.9."))
    with pytest.raises(ReshardError, match="holds 14 tensors that are not A or B of a linear layer of llama"):
        lora_merge(llama, of, tmp_path / "refused")


@pytest.mark.parametrize(
    ("family", "targets"),
    [("qwen3-next", ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"])],
)
def test_an_adapter_of_any_matrix_of_a_model_is_merged_as_peft_merges_it(
    family, targets, checkpoint, tmp_path
):
    """Those of which no trainer has an adapter are refused there by name."""
    source = checkpoint(family)
    of = adapter(source, tmp_path / "adapter", shared=False, target_modules=targets)
    lora_merge(source, of, tmp_path / "merged")
    PeftModel.from_pretrained(model_of(source), of).merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs, base = (
        hf_tensors(tmp_path / "merged"),
        hf_tensors(tmp_path / "theirs"),
        hf_tensors(source),
    )
    assert apart(ours, theirs) < 1e-5
    changed = {name.split(".")[-2] for name in same(ours, base)}
    assert changed == set(targets)
    with pytest.raises(ReshardError, match="train without, or add it to the model with reshard lora-merge$"):
        lora_to_megatron(of, tmp_path / "lora", hf_config=source)


def test_embeddings_saved_beside_an_adapter_are_the_models_own_or_refused(llama, tmp_path):
    of = adapter(llama, tmp_path / "adapter", shared=False)
    lora_merge(llama, of, tmp_path / "wanted")
    tensors, base = load_file(of / "adapter_model.safetensors"), hf_tensors(llama)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    copies = {f"base_model.model.{name}": base[name].clone() for name in names}
    save_file(tensors | copies, of / "adapter_model.safetensors")
    assert any("left out, as a copy" in said for said in lora_merge(llama, of, tmp_path / "merged").notices)
    assert same(hf_tensors(tmp_path / "wanted"), hf_tensors(tmp_path / "merged")) == []
    trained = copies | {f"base_model.model.{names[0]}": base[names[0]] + 1}
    save_file(tensors | trained, of / "adapter_model.safetensors")
    with pytest.raises(ReshardError, match="holds another model.embed_tokens.weight than"):
        lora_merge(llama, of, tmp_path / "refused")
    longer = {name: torch.cat([value, value[:4]]) for name, value in copies.items()}
    save_file(tensors | longer, of / "adapter_model.safetensors")
    with pytest.raises(
        ReshardError, match="with 1004 rows, and the model's has 1000: its vocabulary was resized"
    ):
        lora_merge(llama, of, tmp_path / "refused")


def test_an_adapter_beside_merged_weights_is_said_as_transformers_reads_it(llama, tmp_path):
    """transformers adds it once more, where the note said before that it does not read it."""
    of = adapter(llama, tmp_path / "adapter", shared=False)
    both = shutil.copytree(llama, tmp_path / "both")
    config = json.loads((of / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (both / "adapter_config.json").write_text(json.dumps(config))
    shutil.copy(of / "adapter_model.safetensors", both)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        plain, added = (model_of(folder)(tokens).logits for folder in (llama, both))
    assert not torch.allclose(plain, added, atol=0.01), "transformers adds it"
    notices = hf_to_mcore(both, tmp_path / "mcore").notices
    assert any("transformers with PEFT adds it to what it loads here" in notice for notice in notices)
    assert not any("as transformers and vLLM do not" in notice for notice in notices)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(llama), hf_tensors(tmp_path / "back")) == []


def test_tensors_that_are_no_pair_are_refused_by_name(llama, tmp_path):
    of = adapter(llama, tmp_path / "adapter")
    tensors = load_file(of / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    for change, sentence in (
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 1000)},
            "has an adapter of embeddings .*embed_tokens.lora_embedding_A",
        ),
        (
            {name: tensors[name][:-1].contiguous()},
            r"up_proj.lora_A.weight float32 \[4, 64\] and B \[95, 4\] do not fit the weight \[96, 64\]",
        ),
        ({name: None}, "has .*2.mlp.up_proj.lora_A.weight, and lacks .*2.mlp.up_proj.lora_B.weight"),
        ({name: tensors[name].int()}, "2.mlp.up_proj.lora_B.weight is int32, which an adapter is not"),
    ):
        changed = {key: value for key, value in (tensors | change).items() if value is not None}
        save_file(changed, of / "adapter_model.safetensors", {"format": "pt"})
        with pytest.raises(ReshardError, match=sentence):
            lora_to_megatron(of, tmp_path / "out", hf_config=llama)
        assert not (tmp_path / "out").exists()
    save_file(tensors | {name: tensors[name] * torch.nan}, of / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(ReshardError, match="2.mlp.up_proj.weight with its adapter has NaN or infinity in it"):
        lora_merge(llama, of, tmp_path / "out")
    bare = shutil.copytree(of, tmp_path / "bare")
    (bare / "adapter_config.json").unlink()
    with pytest.raises(ReshardError, match="adapter_model.safetensors., and lacks its adapter_config.json"):
        inspect(bare)
    (of / "adapter_model.safetensors").unlink()
    (of / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ReshardError, match="as a pickle .adapter_model.bin., which is not read"):
        lora_to_megatron(of, tmp_path / "out", hf_config=llama)


def test_an_adapter_that_brings_another_output_layer_than_the_base_has_is_refused(checkpoint, tmp_path):
    """In the other dtype it is the same, as in a model that was loaded in fp32 for training."""
    base = checkpoint("llama", dtype=torch.bfloat16)
    of, copy = (
        adapter(base, tmp_path / "adapter", target_modules=["lm_head"]),
        "base_model.model.lm_head.base_layer.weight",
    )
    stored = load_file(of / "adapter_model.safetensors")
    assert stored[copy].dtype == torch.float32
    lora_merge(base, of, tmp_path / "merged")
    stored[copy][-1, -1] += 0.5
    save_file(stored, of / "adapter_model.safetensors")
    with pytest.raises(ReshardError, match="holds another lm_head.weight than .*: give the model on which"):
        lora_merge(base, of, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_adapter_of_the_output_layer_has_no_place_in_a_trainer(llama, checkpoint, tmp_path):
    of = adapter(llama, tmp_path / "adapter", target_modules=["lm_head"])
    for format in ("bridge", "mcore-bridge"):
        with pytest.raises(
            ReshardError, match=f"adapter of lm_head.weight, and {format} has none of the output"
        ):
            lora_to_megatron(of, tmp_path / "out", hf_config=llama, format=format)
    with pytest.raises(
        ReshardError, match="adapter of lm_head.weight, which in this model is model.embed_tokens.weight"
    ):
        lora_to_megatron(of, tmp_path / "out", hf_config=checkpoint("qwen3-tied"))


def test_what_is_given_beside_a_checkpoint_does_not_contradict_it(llama, tmp_path):
    """An alpha that the checkpoint has too leaves rsLoRA as it is."""
    of = adapter(llama, tmp_path / "adapter", use_rslora=True)
    lora_to_megatron(of, tmp_path / "lora", hf_config=llama, format="mcore-bridge", tp=2)
    lora_to_peft(tmp_path / "lora", tmp_path / "back", alpha=10, tp=2)
    assert diff(of, tmp_path / "back", hf_config=llama).equal
    for given, sentence in (
        ({"alpha": 20}, "--alpha 20 contradicts .*adapter_config.json, which says 10: leave it out"),
        ({"tp": 4}, "was saved at tensor-parallel size 2, not 4"),
    ):
        with pytest.raises(ReshardError, match=sentence):
            lora_to_peft(tmp_path / "lora", tmp_path / "other", **given)
        assert not (tmp_path / "other").exists()


def test_inspect_diff_and_check_know_adapters(llama, tmp_path):
    of = adapter(llama, tmp_path / "adapter")
    details = inspect(of, hf_config=llama).details
    assert [details[key] for key in ("adapter", "rank", "alpha", "adapted_weights")] == ["LoRA", 4, 10, 28]
    lora_to_megatron(of, tmp_path / "back", hf_config=llama)
    assert inspect(tmp_path / "back").details["adapter_format"] == "bridge" and check(tmp_path / "back").ok
    assert diff(tmp_path / "back", of, hf_config=llama).equal
    with pytest.raises(ReshardError, match="adapter is a LoRA adapter and .* a model: reshard lora-merge"):
        diff(llama, of, hf_config=llama)
    with pytest.raises(ReshardError, match="adapter is a LoRA adapter.*, not a model: reshard lora-merge"):
        opening.model_of(str(of))
    other = shutil.copytree(of, tmp_path / "other")
    config = json.loads((of / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 20}))
    assert list(diff(of, other, hf_config=llama).fields.values()) == [(2.5, 5.0)]
    (other / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(of / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    tensors[name][3, 1] += 1
    save_file(tensors, other / "adapter_model.safetensors", {"format": "pt"})
    assert [d.name for d in diff(of, other, hf_config=llama).differences] == [name]


@pytest.mark.slow
def test_vllm_reads_every_pair_that_is_written(checkpoint, tmp_path):
    """Of fused experts too, which become single ones, as vLLM takes them for such a model."""
    source = checkpoint("qwen3-moe")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    of = adapter(
        source,
        tmp_path / "adapter",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=experts,
    )
    lora_to_megatron(of, tmp_path / "lora", hf_config=source)
    lora_to_peft(tmp_path / "lora", tmp_path / "peft")
    # as its model manager expands ``experts``
    modules = [*LINEAR[:4], *(f"experts.{expert}.{name}" for expert in range(8) for name in LINEAR[4:])]
    held = run(tmp_path, 1, "lora_in_vllm.loaded", str(tmp_path / "peft"), modules)
    wanted = lora_in_vllm.read(tmp_path / "peft")
    assert len(wanted) == 4 * (4 + 8 * 3) and held == wanted


def test_single_experts_at_expert_tensor_parallelism_are_refused(checkpoint, tmp_path):
    """What Megatron-Bridge computes there is not B @ A."""
    source = checkpoint("qwen3-moe")
    lora_to_megatron(
        adapter(
            source,
            tmp_path / "adapter",
            target_modules=["o_proj"],
            target_parameters=["mlp.experts.down_proj"],
        ),
        tmp_path / "lora",
        hf_config=source,
    )
    path = tmp_path / "lora" / "iter_0000000" / "run_config.yaml"
    (tmp_path / "lora" / "reshard.json").unlink()
    lora_to_peft(tmp_path / "lora", tmp_path / "peft")
    settings = path.read_text().replace("peft:\n", "peft:\n  share_expert_adapters: false\n")
    path.write_text(settings.replace("model:\n", "model:\n  expert_tensor_parallel_size: 2\n"))
    with pytest.raises(
        ReshardError,
        match="trained at expert tensor parallelism 2, where what Megatron-Bridge computes is not B @ A",
    ):
        lora_to_peft(tmp_path / "lora", tmp_path / "refused")


@pytest.mark.parametrize("form", ["bridge", "mcore-bridge"])
def test_a_base_with_an_adapter_in_it_is_converted_without_it_on_request(form, llama, tmp_path):
    """As trainers save them together; mcore-bridge names the base's weights ``base_layer``."""
    import torch.distributed.checkpoint as dcp

    hf_to_mcore(llama, tmp_path / "mcore")
    lora_to_megatron(adapter(llama, tmp_path / "adapter"), tmp_path / "lora", hf_config=llama, format=form)
    state = {}
    for directory in (tmp_path / "mcore" / "release", tmp_path / "lora" / "iter_0000000"):
        reader = dcp.FileSystemReader(str(directory))
        tensors = reader.read_metadata().state_dict_metadata
        read = {
            k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in tensors.items() if hasattr(e, "size")
        }
        dcp.load(read, storage_reader=reader, no_dist=True)
        state |= read
    if form == "mcore-bridge":
        of_base = re.compile(r"(linear_(?:qkv|proj|fc1|fc2)\.)(?=weight|layer_norm)")
        state = {of_base.sub(r"\1base_layer.", key): value for key, value in state.items()}
    # of a training run
    state |= {
        f"optimizer.state.exp_avg.{name}": value for name, value in state.items() if "linear_fc1" in name
    }
    both = tmp_path / "both"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(both)), no_dist=True)
    with pytest.raises(
        ReshardError, match="holds a LoRA adapter .* beside the model's weights: pass --without-adapters"
    ):
        mcore_to_hf(both, tmp_path / "converted", hf_config=llama)
    mcore_to_hf(both, tmp_path / "converted", hf_config=llama, without_adapters=True)
    assert same(hf_tensors(llama), hf_tensors(tmp_path / "converted")) == []
    lora_to_peft(both, tmp_path / "peft", hf_config=llama, alpha=10, tp=1)
    assert diff(tmp_path / "peft", tmp_path / "adapter", hf_config=llama).equal
    lora_merge(both, tmp_path / "adapter", tmp_path / "merged", hf_config=llama)
    lora_merge(llama, tmp_path / "adapter", tmp_path / "wanted")
    assert same(hf_tensors(tmp_path / "wanted"), hf_tensors(tmp_path / "merged")) == []
