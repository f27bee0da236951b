"""The ``run_config.yaml`` that Megatron-Bridge leaves beside a checkpoint. It may name Python objects, and is read as
text, line by line."""

import re
from collections import defaultdict
from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.formats.small_files import MAX_COPIED_BYTES, read_file
from reshard.megatron.towers import has_layers
from reshard.models.model import Model
from reshard.models.towers import TAKES_TOWER, TOWERS, vision_of
from reshard.storage.sources.paths import RUN_CONFIG, Located

_SETTING = re.compile(r"""^(?P<indent> *)(?P<name>\w+): *["']?(?P<value>[^\s"'#]*)""")
_ENTRY = re.compile(r"""^ *- ["']?(?P<value>[^\s"'#:]+)["']? *$""")
# Where the settings of the tower are: of Megatron-Bridge 0.6, and of Megatron's own way to write a transformers config.
_OF_TOWER = (("model", "vision_config"), ("model", "vision_config", "config_dict"))


def section(path: Path, *names: str) -> dict[str, str]:
    """Return the plain settings in a section, which may be in others, as text: entries of a list with spaces between
    them."""
    settings: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    inside: list[tuple[int, str]] = []
    for line in read_file(path, MAX_COPIED_BYTES).decode(errors="replace").splitlines():
        match, entry = _SETTING.match(line), _ENTRY.match(line)
        if match is not None:
            while inside and inside[-1][0] >= len(match["indent"]):
                inside.pop()
            settings[tuple(name for _, name in inside)][match["name"]] = match["value"]
            inside.append((len(match["indent"]), match["name"]))
        elif entry is not None and inside:
            of, last = settings[tuple(name for _, name in inside[:-1])], inside[-1][1]
            of[last] = f"{of[last]} {entry['value']}".strip()
    return settings[names]


def run_configs(located: Located) -> list[Path]:
    """Return the files beside a checkpoint."""
    places = dict.fromkeys((located.directory, located.root))
    return [path for place in places if (path := place / RUN_CONFIG).is_file()]


def tower_notices(model: Model, keys: list[str], located: Located) -> list[str]:
    """Return a notice if nothing beside a checkpoint with these keys says how many heads the tower has that `model`
    takes: of Megatron's layers, whose rows lie by head, it does not show. Raises ReshardError if the trainer's own
    config says of the tower what that of the model does not."""
    config = model.config.get(TAKES_TOWER)
    if config is None or not has_layers(model, keys):
        return []
    tower = TOWERS[model.family.tower]
    vision, heads = vision_of(tower.filled(config)), tower.sizes[tower.heads][0]
    names = {*tower.megatron.values(), *tower.absent}
    for path in run_configs(located):
        recorded = {name: text for of in _OF_TOWER for name, text in section(path, *of).items()}
        for name in sorted(names & recorded.keys() & vision.keys()):
            own = vision[name]
            if not _says(recorded[name], own):
                raise ReshardError(
                    f"{path} says that the tower has {name} {recorded[name]:.80}, but {model.where} has {own!r:.80}: "
                    f"pass --hf-config with the config.json that it was trained with"
                )
        if heads in recorded:
            return []
    return [
        f"the rows of the tower's queries, keys and values were put in order for the {vision[heads]} heads that "
        f"{model.where} says ({heads}), with which nothing beside the checkpoint compares"
    ]


def _says(text: str, value: object) -> bool:
    """Return True if the text of a setting is that of a value, or refers to one elsewhere."""
    if text.startswith("*") or (text.startswith("[") and text != "[]"):
        return True
    expected = (" ".join(map(str, value)) or "[]") if isinstance(value, list) else str(value)
    return re.sub(r"^&\S+ ?", "", text) == expected
