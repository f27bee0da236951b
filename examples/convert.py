"""Convert a checkpoint to Megatron and back from Python, and look at what came of it.

python examples/convert.py Qwen/Qwen3-0.6B out --tp 2 --pp 2
"""

import argparse
import sys

import reshard


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a Hugging Face directory or hub id")
    parser.add_argument("out", help="a new directory's name: writes OUT-mcore and OUT-hf")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    options = parser.parse_args()
    layout = reshard.MegatronLayout(tp=options.tp, pp=options.pp, ep=options.ep, etp=1)
    try:
        plan = reshard.hf_to_mcore(options.source, f"{options.out}-mcore", layout, dry_run=True)
        print(
            f"{plan.tensors} tensors, {plan.written_bytes:,} bytes for ranks {', '.join(plan.bytes_per_rank)}"
        )
        reshard.hf_to_mcore(options.source, f"{options.out}-mcore", layout, progress=show)
        reshard.mcore_to_hf(f"{options.out}-mcore", f"{options.out}-hf", progress=show)
        difference = reshard.diff(f"{options.out}-mcore", f"{options.out}-hf")
    except reshard.ReshardError as error:
        sys.exit(f"cannot convert: {error}")
    found = reshard.inspect(f"{options.out}-mcore")
    print(f"\n{found.family}: {found.parameters:,} parameters; there and back equal: {difference.equal}")


def show(done: int, total: int) -> None:
    """A progress callback gets bytes."""
    print(f"\r{done / max(total, 1):4.0%}", end="", file=sys.stderr)


if __name__ == "__main__":
    main()
