"""``reshard digest`` and ``reshard diff --digest``: one number for the same weights, in files of any kind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import reshard
from reshard import MegatronLayout, ReshardError, hf_to_mcore, lora_to_megatron, mcore_to_hf
from reshard.cli.main import cli
from reshard.digests.result import Digest
from reshard.storage.digest import digest_of_path
from tests.digests.on_disk import expected
from tests.lora.test_lora_files import adapter
from tests.tools.checkpoints import make
from tests.tools.disk import flip

LAYOUTS = {
    "qwen3-tied": MegatronLayout(tp=2, pp=2),
    "qwen3-moe": MegatronLayout(tp=2, pp=2, ep=4),
    "qwen3-next": MegatronLayout(pp=2, ep=2),
}


def run(*arguments: object) -> tuple[int, str]:
    """The exit code of a command, and what it prints."""
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    return done.exit_code, done.stdout


@pytest.mark.parametrize("variant", ["qwen3", "llama"])
def test_a_directory_has_the_digest_that_whole_numbers_give(variant, tmp_path):
    make(tmp_path / "hf", variant, torch.bfloat16)
    text, numbers = expected(tmp_path / "hf")
    given = reshard.digest(tmp_path / "hf")
    assert (given.text, given.tensors, given.dtype) == (text, numbers, None)
    text, numbers = expected(tmp_path / "hf", dtype="fp32")
    given = reshard.digest(tmp_path / "hf", dtype="fp32")
    assert (given.text, given.tensors) == (text, numbers) and text.startswith("fp32:")


@pytest.mark.parametrize("variant", LAYOUTS)
def test_a_megatron_checkpoint_of_any_layout_has_that_of_its_source(variant, converted, tmp_path):
    """With vocabulary padding, tied or not, and norms that Megatron holds less 1."""
    (hf, mcore), (other, _) = converted(variant)
    wanted = reshard.digest(hf)
    assert wanted.text.startswith("bf16:")
    hf_to_mcore(hf, tmp_path / "split", LAYOUTS[variant], make_vocab_size_divisible_by=256)
    mcore_to_hf(mcore, tmp_path / "back", max_shard_size="200KB")
    for path in (mcore, tmp_path / "split", tmp_path / "back"):
        given = reshard.digest(path)
        assert (given.text, given.tensors) == (wanted.text, wanted.tensors), path
    assert reshard.digest(other).text != wanted.text, "the control"


def test_experts_that_files_have_in_one_tensor_count_as_the_single_ones(tmp_path):
    make(tmp_path / "hf", "qwen3.5-moe", torch.bfloat16)
    wanted = reshard.digest(tmp_path / "hf")
    whole = {
        name: number for name, number in wanted.tensors.items() if "[" not in name
    }  # no views of a tensor
    numbers = expected(tmp_path / "hf")[1]
    assert whole.items() <= numbers.items() and any("experts" in name for name in whole)
    [path] = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(path)

    def packed(first: int) -> Path:
        """The directory with the experts of each layer in one tensor, of which the first two may change places."""
        fused, order = dict(tensors), [first, 1 - first, *range(2, 8)]
        for prefix in [
            name.split("0.up_proj")[0] for name in tensors if name.endswith("experts.0.up_proj.weight")
        ]:
            halves = [
                [fused.pop(f"{prefix}{e}.{which}_proj.weight") for e in range(8)] for which in ("gate", "up")
            ]
            down = [fused.pop(f"{prefix}{e}.down_proj.weight") for e in range(8)]
            fused[f"{prefix}gate_up_proj"] = torch.stack(
                [torch.cat([half[e] for half in halves]) for e in order]
            )
            fused[f"{prefix}down_proj"] = torch.stack([down[e] for e in order])
        target = tmp_path / f"packed-{first}"
        shutil.copytree(tmp_path / "hf", target)
        save_file(fused, target / path.name, {"format": "pt"})
        return target

    assert reshard.digest(packed(0)).tensors == wanted.tensors
    swapped = wanted.compare(reshard.digest(packed(1)))
    assert len(swapped.different) == 2 * 3 * 4 and not swapped.equal, "the control: swapped experts"


def test_in_a_stated_dtype_a_checkpoint_in_fp32_counts_as_its_cast(tmp_path):
    """But for the router's bias, which is never cast down."""
    make(tmp_path / "fp32", "glm4-moe", torch.float32)
    hf_to_mcore(tmp_path / "fp32", tmp_path / "mcore", MegatronLayout(ep=2), dtype="bf16")
    given = reshard.digest(tmp_path / "fp32", dtype="bf16")
    assert given.text == reshard.digest(tmp_path / "mcore").text
    assert given.text == reshard.digest(tmp_path / "mcore", dtype="bf16").text
    assert given.text.startswith("bf16+fp32:")
    assert given.tensors == expected(tmp_path / "fp32", "e_score_correction_bias", "bf16")[1]
    assert reshard.digest(tmp_path / "fp32").text not in given.text, "the control: as held"


def test_a_tied_copy_counts_once_and_must_be_one(tmp_path):
    make(tmp_path / "hf", "qwen3-tied", torch.bfloat16)
    wanted = reshard.digest(tmp_path / "hf").text
    [path] = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    assert reshard.digest(tmp_path / "hf").text == wanted
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        ReshardError, match="lm_head.weight differs from model.embed_tokens.weight, but the model has"
    ):
        reshard.digest(tmp_path / "hf")


def test_a_check_says_the_digest_of_what_is_intact_where_it_is_asked_for(converted, tmp_path):
    (hf, mcore), _ = converted("qwen3-moe")
    text, _ = expected(Path(hf))
    code, printed = run("check", mcore, "--digest", "--json")
    assert code == 0 and json.loads(printed)["digest"] == text
    assert run("check", mcore, "--digest")[1].splitlines()[-1] == f"digest: {text}"
    assert json.loads(run("check", mcore, "--json")[1])["digest"] is None
    shutil.copytree(mcore, tmp_path / "mcore")
    file = max((tmp_path / "mcore").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)
    code, printed = run("check", tmp_path / "mcore", "--digest", "--json")
    assert code == 1 and json.loads(printed)["digest"] is None, "the control"


def test_differences_are_named_from_what_was_printed(converted, tmp_path):
    (hf, mcore), _ = converted("qwen3-moe")
    code, printed = run("digest", hf, "--json")
    (tmp_path / "a.json").write_text(printed, encoding="utf-8")
    assert code == 0 and run("diff", "--digest", tmp_path / "a.json", mcore)[0] == 0
    shutil.copytree(hf, tmp_path / "hf")
    [path] = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].roll(16, 0)
    save_file(tensors, path, {"format": "pt"})
    code, text = run("diff", "--digest", tmp_path / "a.json", tmp_path / "hf")
    assert code == 1 and text.startswith(f"differs: {name}\n") and "1 of " in text.splitlines()[-1]
    (tmp_path / "a.json").write_text(printed.replace('"bf16:', '"bf16:0')[:-20], encoding="utf-8")
    code, text = run("digest", hf, "--tensors")
    lines = text.splitlines()
    assert code == 0 and lines[0].split()[0] == json.loads(printed)["digest"] and name in lines[-1] + text


def test_printed_digests_are_compared_in_one_dtype_only(converted, tmp_path):
    (hf, mcore), _ = converted("qwen3-moe")
    files = {dtype: tmp_path / f"{dtype}.json" for dtype in (None, "fp32")}
    for dtype, path in files.items():
        path.write_text(json.dumps(reshard.digest(hf, dtype=dtype).to_dict()), encoding="utf-8")
    assert run("diff", "--digest", files["fp32"], mcore)[0] == 0, "counts in fp32, too"
    assert run("diff", "--digest", files["fp32"], files[None])[0] != 0
    with pytest.raises(ReshardError, match="is not what reshard digest --json prints"):
        Digest.from_dict({"digest": "bf16:12"}, "it")
    fields = reshard.digest(hf).to_dict()
    fields["tensors"].popitem()
    with pytest.raises(ReshardError, match="it was altered: its tensors do not give its digest"):
        Digest.from_dict(fields, "it")
    assert run("diff", hf, mcore, "--dtype", "bf16")[0] != 0


def test_options_of_another_kind_of_weights_are_refused(tmp_path):
    for options in ({"metadata": {}}, {"make_vocab_size_divisible_by": 64}):
        with pytest.raises(ReshardError, match="is of a live model, and this is a path"):
            reshard.digest(tmp_path, **options)
    with pytest.raises(ReshardError, match="workers is of a path, and this is a live model"):
        reshard.digest([], workers=1)
    with pytest.raises(ReshardError, match="is neither a directory nor a hub id"):
        reshard.digest(Path("no/such/place"))


def test_quantized_weights_count_as_what_they_stand_for_and_as_stored_where_asked(converted, tmp_path):
    (_, mcore), _ = converted("qwen3-moe")
    mcore_to_hf(mcore, tmp_path / "coded", quantize="fp8")
    hf_to_mcore(tmp_path / "coded", tmp_path / "plain")
    given = reshard.digest(tmp_path / "coded")
    assert given.text == reshard.digest(tmp_path / "plain").text
    assert "weights are quantized, and count as the bfloat16 numbers" in given.notices[-1]
    assert given.text != reshard.digest(mcore).text, "the control"
    stored = digest_of_path(tmp_path / "coded", stored=True)
    assert stored.tensors == expected(tmp_path / "coded")[1] and any(
        "_scale_inv" in name for name in stored.tensors
    )
    with pytest.raises(ReshardError, match="--stored counts codes as they are, and --dtype numbers in that"):
        digest_of_path(tmp_path / "coded", stored=True, dtype="bf16")


def test_an_adapter_has_one_digest_in_either_format_and_its_scales_count(converted, tmp_path):
    (hf, _), _ = converted("qwen3-moe")
    adapter(Path(hf), tmp_path / "peft", target_modules=["o_proj", "q_proj", "k_proj", "v_proj"])
    wanted = reshard.digest(tmp_path / "peft", hf_config=hf)
    assert wanted.text.startswith("fp32:")
    for format in ("bridge", "mcore-bridge"):
        lora_to_megatron(tmp_path / "peft", tmp_path / format, format=format, hf_config=hf)
        given = reshard.digest(tmp_path / format, hf_config=hf)
        assert (given.text, given.tensors) == (wanted.text, wanted.tensors)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text(encoding="utf-8"))
    config["lora_alpha"] *= 2
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    other = wanted.compare(reshard.digest(tmp_path / "peft", hf_config=hf))
    assert other.different and all(name.startswith("scale of ") for name in other.different), "the control"
