"""The seam of codecs: who makes the blocks of which, and that nobody else names a maker."""

import re
from pathlib import Path

import numpy as np
import pytest

from reshard.core.errors import ReshardError
from reshard.refit.codecs import CODECS, IN_BLOCKS, PLAIN, Fp8BlockCodec, makers
from reshard.refit.codecs.makers import FP8_BLOCKS, maker_of

REFIT = Path(__file__).resolve().parent.parent.parent / "reshard" / "refit"


class OtherBlocks(Fp8BlockCodec):
    """Blocks of another kind."""


def test_each_codec_of_blocks_has_a_maker_beside_whatever_casts():
    casts = np.flatnonzero(~IN_BLOCKS)
    assert maker_of(casts) is FP8_BLOCKS  # which has nothing to make then
    for number in np.flatnonzero(IN_BLOCKS).tolist():
        assert maker_of(np.append(casts, number)) is makers.MAKERS[type(CODECS[number])]


def test_blocks_of_two_kinds_at_once_are_refused(monkeypatch):
    one = int(np.flatnonzero(IN_BLOCKS)[0])
    other, maker = OtherBlocks(CODECS[one].source, CODECS[one].destination, "fp32"), object()
    monkeypatch.setattr(makers, "CODECS", (*CODECS, other))
    monkeypatch.setattr(makers, "IN_BLOCKS", np.append(IN_BLOCKS, True))
    monkeypatch.setattr(makers, "MAKERS", {**makers.MAKERS, OtherBlocks: maker})
    assert maker_of(np.array([PLAIN, len(CODECS)])) is maker
    with pytest.raises(ReshardError, match="two kinds"):
        maker_of(np.array([PLAIN, one, len(CODECS)]))


def naming_makers(texts: dict[str, str]) -> list[str]:
    """Return the files that import from the folder of a maker, but for the registry and the folder itself."""
    home = "fp8_blocks/", "codecs/makers.py"
    imports = re.compile(r"^\s*(from|import) reshard\.refit\.fp8_blocks\b", re.MULTILINE)
    return sorted(path for path, text in texts.items() if imports.search(text) and not path.startswith(home))


def test_transports_sides_and_verification_name_no_maker():
    texts = {str(path.relative_to(REFIT)): path.read_text() for path in REFIT.rglob("*.py")}
    assert len(texts) > 50 and "codecs/makers.py" in texts
    assert naming_makers(texts) == []
    control = "    from reshard.refit.fp8_blocks.items import BlockTable\n"
    assert naming_makers({"transports/nccl.py": control, "codecs/makers.py": control}) == [
        "transports/nccl.py"
    ]
