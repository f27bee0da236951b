"""Whether a version of Megatron-LM takes the flags that are written for it: its own parser is asked.

    python tests/tools/parse_flags.py TREE < LINES

TREE holds `megatron/`: a checkout of Megatron-LM, or a wheel from 0.17 on. LINES is JSON: a list of command
lines. Prints a JSON list: for each, "" or the parser's complaint. Needs torch; Transformer Engine and Apex,
which some versions cannot be imported without, are empty shells here.
"""

import contextlib
import importlib.machinery
import io
import json
import shlex
import sys
import types
import warnings

SHELLS = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")


class _Empty(type):
    """Makes classes in which every name is such a class too."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Shell(types.ModuleType):
    """A package in which every name is an empty class."""

    __path__: list[str] = []
    __version__ = "2.3.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Shells:
    """Finds them where the real ones would be."""

    def find_spec(self, name: str, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] in SHELLS
            else None
        )

    def create_module(self, spec):
        return _Shell(spec.name)

    def exec_module(self, module) -> None:
        """Nothing to run."""


def _parser():
    """Megatron-LM's ``parse_args``. Shells are for those versions that need them: others take them
    for the real thing."""
    try:
        from megatron.training.arguments import parse_args
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Shells())
        from megatron.training.arguments import parse_args
    return parse_args


def main() -> None:
    import torch

    warnings.filterwarnings("ignore")
    sys.path.insert(0, sys.argv[1])
    sys.modules["flashinfer"] = None  # looks for a GPU while it is imported
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    lines, answers, printed = json.load(sys.stdin), [], sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        parse_args = _parser()
    for line in lines:
        said = io.StringIO()
        sys.argv = ["pretrain_gpt.py", *shlex.split(line), "--micro-batch-size", "1"]
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                parse_args()
        except SystemExit:
            answers.append(said.getvalue().strip().splitlines()[-1])
        else:
            answers.append("")
    json.dump(answers, printed)


if __name__ == "__main__":
    main()
