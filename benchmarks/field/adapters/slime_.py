"""slime's `tools/convert_torch_dist_to_hf.py`, from a checkout that the variable SLIME names.

slime's tool for the other direction asks for a GPU.

python slime_.py start | to-hf MEGATRON HF SOURCE
"""

import os
import sys


def to_hf(source: str, target: str, original: str) -> None:
    """Convert to Hugging Face, with the config of the original; it asks for an argument that only MLA has."""
    import runpy
    import tempfile
    from pathlib import Path

    import torch

    [metadata] = Path(source).rglob(".metadata")
    with tempfile.TemporaryDirectory() as folder:
        for path in metadata.parent.iterdir():
            (Path(folder) / path.name).symlink_to(path.resolve())
        common = torch.load(metadata.parent / "common.pt", weights_only=False)
        common["args"].q_lora_rank = None
        (Path(folder) / "common.pt").unlink()
        torch.save(common, Path(folder) / "common.pt")
        tool = f"{os.environ['SLIME']}/tools/convert_torch_dist_to_hf.py"
        sys.argv = [tool, "--input-dir", folder, "--output-dir", target, "--origin-hf-dir", original]
        runpy.run_path(tool, run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(0, os.environ["SLIME"])
    command, *paths = sys.argv[1:]
    if command == "start":
        import slime.backends.megatron_utils.megatron_to_hf  # noqa: F401
    else:
        {"to-hf": to_hf}[command](*paths)
