"""What lies beside weights goes where they go, or is named; what a config announces, and the files lack, is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, inspect, mcore_to_hf
from reshard.cli.main import cli
from tests.storage.test_wrapped import kimi_k25, published, qwen3_vl
from tests.tools.checkpoints import make
from tests.tools.oracle import hf_tensors, same, stored_tensors

GO_ALONG = {
    "chat_template.jinja": "{{ messages }}",
    "tokenizer.json": "{}",
    "additional_chat_templates/rag.jinja": "{{ documents }}",
    "encoding/inner/encoding_dsv32.py": "# in place of a template",
}
STAY = ("original/consolidated.00.pth", "pytorch_model.bin", "checkpoint-3/model.safetensors", "optimizer.pt")


def copied(source: Path, to: Path) -> Path:
    return Path(shutil.copytree(source, to))


def with_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def notices(source: Path, folder: Path) -> tuple[str, str]:
    """What is said on the way to Megatron in a folder, and on the way back."""
    there = hf_to_mcore(source, folder / "mcore")
    back = mcore_to_hf(folder / "mcore", folder / "back")
    return " ".join(there.notices), " ".join(back.notices)


def test_every_file_and_folder_beside_weights_goes_along_or_is_named(checkpoint, tmp_path):
    source = copied(checkpoint("qwen3"), tmp_path / "hf")
    for name in (*GO_ALONG, *STAY, ".cache/hidden"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(GO_ALONG.get(name, "weights"))
    there, back = notices(source, tmp_path)
    for name, text in GO_ALONG.items():
        assert (tmp_path / "back" / name).read_text() == text, name
        assert (tmp_path / "mcore" / "hf" / name).read_text() == text, name
    assert "not carried along: checkpoint-3/, optimizer.pt, original/ and 1 more" in there
    assert "not carried along" not in back
    assert not (tmp_path / "back" / "original").exists() and not (tmp_path / "back" / ".cache").exists()
    (tmp_path / "mcore" / "dataloader").mkdir()
    (tmp_path / "mcore" / "release" / "modelopt_state").mkdir()
    assert "not carried along: modelopt_state/, dataloader/" in str(inspect(tmp_path / "mcore").notices)
    # The control: the manifest covers what is in folders.
    assert check(tmp_path / "back").ok
    (tmp_path / "back" / "additional_chat_templates" / "rag.jinja").write_text("{{ nothing }}")
    assert check(tmp_path / "back").changed == ["additional_chat_templates/rag.jinja"]


@pytest.mark.parametrize("kind", ["qwen3-vl", "qwen3.5", "kimi"])
def test_a_tower_that_is_not_whole_is_named_in_both_directions(kind, tmp_path):
    source = {
        "qwen3-vl": lambda: qwen3_vl(tmp_path / "hf", moe=False),
        "qwen3.5": lambda: published(tmp_path / "hf", moe=False),
        "kimi": lambda: kimi_k25(tmp_path / "hf"),
    }[kind]()
    (tmp_path / "whole").mkdir()
    assert not any("of the tower" in said for said in notices(source, tmp_path / "whole")), "the control"
    tensors = load_file(source / "model.safetensors")
    part = "encoder.final_layernorm" if kind == "kimi" else "visual.merger.linear_fc2"
    lost = sorted(name for name in tensors if part in name)
    assert len(lost) == 2
    with_tensors(source, {name: tensor for name, tensor in tensors.items() if name not in lost})
    (tmp_path / "part").mkdir()
    for said in notices(source, tmp_path / "part"):
        assert "lack 2 tensors of the tower that config.json announces: " in said
        assert all(name in said for name in lost)


def test_code_that_a_config_names_and_quantization_that_is_not_there_are_named(checkpoint, tmp_path):
    source = copied(checkpoint("qwen3"), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    code = {
        "AutoConfig": "configuration_mine.MyConfig",
        "AutoModel": "someone/else--modeling_theirs.TheirModel",
    }
    fields = {
        "auto_map": code,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (source / "config.json").write_text(json.dumps(config | fields))
    said = str(inspect(source).notices)
    assert "config.json names code that does not lie beside it: configuration_mine.py" in said
    assert "theirs" not in said and "quantization_config of 'fp8', but no weight is quantized" in said
    (source / "configuration_mine.py").write_text("")
    assert "names code" not in str(inspect(source).notices)


@pytest.mark.parametrize("variant", ["glm4-moe", "deepseek-v3"])
def test_an_mtp_layer_needs_no_copies_of_embedding_and_output_and_comes_back_as_it_was(variant, tmp_path):
    source = make(tmp_path / "hf", variant, torch.bfloat16, mtp=True)
    tensors = load_file(source / "model.safetensors")
    copies = [
        name
        for name in tensors
        if ".layers." in name and name.endswith(("embed_tokens.weight", "head.weight"))
    ]
    assert len(copies) == 2
    (tmp_path / "with").mkdir()
    notices(source, tmp_path / "with")
    assert same(hf_tensors(tmp_path / "with" / "back"), tensors) == []
    without = with_tensors(
        copied(source, tmp_path / "less"), {n: t for n, t in tensors.items() if n not in copies}
    )
    (tmp_path / "without").mkdir()
    notices(without, tmp_path / "without")
    assert same(hf_tensors(tmp_path / "without" / "back"), hf_tensors(without)) == []
    held = [stored_tensors(tmp_path / name / "mcore" / "release") for name in ("with", "without")]
    assert same(*held) == [] and diff(source, without).equal
    # The control: where copies are, they have to be equal.
    other = with_tensors(copied(source, tmp_path / "other"), tensors | {copies[0]: tensors[copies[0]] + 1})
    with pytest.raises(ReshardError, match="differs from"):
        hf_to_mcore(other, tmp_path / "never")


def test_fp8_without_blocks_has_one_scale_for_a_matrix_as_transformers_reads_it(checkpoint, tmp_path):
    source = copied(checkpoint("qwen3", dtype=torch.bfloat16), tmp_path / "hf")
    tensors, wanted = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].float().abs().max() / 448
        codes = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[name], wanted[name] = codes, (codes.float() * scale).bfloat16()
        tensors[f"{name}_scale_inv"] = scale.reshape(())
        tensors[name.replace(".weight", ".activation_scale")] = torch.tensor(0.1)
    with_tensors(source, tensors)
    config = json.loads((source / "config.json").read_text())
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "modules_to_not_convert": ["lm_head"],
    }

    def says(**fields) -> None:
        (source / "config.json").write_text(
            json.dumps(config | {"quantization_config": quantization | fields})
        )

    says(weight_block_size=None)
    there, _ = notices(source, tmp_path)
    back = hf_tensors(tmp_path / "back")
    assert wanted and all(torch.equal(back[name], tensor) for name, tensor in wanted.items())
    assert "activation_scale" in there
    says(weight_block_size=[128, 128])  # the control: there are none of this size
    with pytest.raises(ReshardError, match="expected .* for blocks of"):
        hf_to_mcore(source, tmp_path / "never")


def test_a_prefix_by_which_all_names_differ_is_named(checkpoint, tmp_path):
    source = copied(checkpoint("qwen3"), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    for prefix in ("base_model.model.", "pretrained_model.", "_forward_module.", "base_model."):
        with_tensors(source, {prefix + name: tensor for name, tensor in tensors.items()})
        with pytest.raises(ReshardError, match=f"with '{prefix}' in front of their names"):
            hf_to_mcore(source, tmp_path / "never")
    first = min(tensors)  # the control: a tensor is missing besides
    with_tensors(source, {f"base_model.{name}": tensor for name, tensor in tensors.items() if name != first})
    with pytest.raises(ReshardError, match=r"lacks \d+ of qwen3's tensors"):
        hf_to_mcore(source, tmp_path / "never")


def test_shards_that_another_program_merges_are_named_with_the_command(checkpoint, tmp_path):
    source, tensors = checkpoint("qwen3"), hf_tensors(checkpoint("qwen3"))
    verl, deepspeed, accelerate = (tmp_path / name for name in ("step/actor", "checkpoint-1", "checkpoint-2"))
    for directory in (verl / "huggingface", deepspeed / "global_step1", accelerate):
        directory.mkdir(parents=True)
        shutil.copy(source / "config.json", directory)
    shutil.copy(source / "config.json", deepspeed)
    torch.save(tensors, verl / "model_world_size_2_rank_0.pt")
    torch.save({}, deepspeed / "global_step1" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    shards = accelerate / "pytorch_model_fsdp_0"
    torch.distributed.checkpoint.save(
        {f"model.{name}": t for name, t in tensors.items()}, checkpoint_id=shards, no_dist=True
    )
    cases = [
        (hf_to_mcore, verl, "lacks the shards of ranks 1 of 2"),
        (mcore_to_hf, verl.parent, "reshard fsdp-to-hf"),
        (hf_to_mcore, deepspeed, "zero_to_fp32.py"),
        (hf_to_mcore, deepspeed / "global_step1", "zero_to_fp32.py"),
        (mcore_to_hf, accelerate, "reshard fsdp-to-hf"),
        (mcore_to_hf, shards, "reshard fsdp-to-hf"),
    ]
    for convert, path, command in cases:
        with pytest.raises(ReshardError) as error:
            convert(path, tmp_path / "never")
        assert command in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "never").exists()
    assert inspect(source).family == "qwen3", "the control"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_bit_that_turns_in_the_padding_of_the_vocabulary_is_damage(tp, checkpoint, tmp_path):
    from reshard.formats import torch_dist

    mcore = tmp_path / "mcore"
    hf_to_mcore(checkpoint("qwen3"), mcore, MegatronLayout(tp=tp))
    assert check(mcore).ok, "the control"
    stored, key = torch_dist.read(mcore / "release"), "embedding.word_embeddings.weight"
    last = stored.keys[key].chunks[max(stored.keys[key].chunks)]
    tensor, path = stored.tensor_at(last), mcore / "release" / last.file
    data = bytearray(path.read_bytes())
    data[tensor.offset + tensor.shape[0] * tensor.shape[1] * tensor.dtype.size - 1] ^= 1
    path.write_bytes(data)
    found = check(mcore)
    assert not found.ok and found.bad == [f"{key} (its padding)"]


def test_a_tokenizer_that_was_copied_as_the_note_asks_is_no_fault(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    there, back = notices(source, tmp_path)
    assert "has no tokenizer" in there and "copy one there" in back
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "back" / name).write_text("{}")
    found = check(tmp_path / "back")
    assert found.ok and "a tokenizer has been added" in str(found.notices)
    assert CliRunner().invoke(cli, ["check", str(tmp_path / "back")]).exit_code == 0
    (tmp_path / "back" / "another.py").write_text("")  # the control
    assert check(tmp_path / "back").added == ["another.py"]
