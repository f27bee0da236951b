"""Make `reshard/models/config_defaults.py`: what the config classes of the installed transformers
have where a config says nothing.

python -m tests.tools.config_defaults --write    # without it: print it
"""

import sys
from pathlib import Path

from transformers import CONFIG_MAPPING, PretrainedConfig

from reshard.models.family import families
from tests.standins import bailing  # noqa: F401

HEADER = '''"""Values of fields that a config lacks: the defaults of transformers' config classes,
without the fields that a mapping table has and those that have no effect.

Written by ``python -m tests.tools.config_defaults``; a test compares it with the installed transformers.
"""

from typing import Any

'''


def defaults() -> dict[str, dict]:
    """By family and field."""
    found = {}
    for name, family in sorted(families().items()):
        if name not in CONFIG_MAPPING:
            sys.exit(f"{type(family).__module__}: the installed transformers has no model_type {name!r}")
        config = PretrainedConfig().to_dict() | CONFIG_MAPPING[name]().to_dict()
        found[name] = {
            key: config[key]
            for key in sorted(config)
            if key not in family.fields and not family.has_no_effect(key)
        }
    return found


if __name__ == "__main__":
    lines = [f"    {name!r}: {fields!r},\n".replace("'", '"') for name, fields in defaults().items()]
    text = HEADER + "DEFAULTS: dict[str, dict[str, Any]] = {\n" + "".join(lines) + "}\n"
    if "--write" in sys.argv[1:]:
        target = Path(__file__).resolve().parent.parent.parent / "reshard" / "models" / "config_defaults.py"
        target.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
