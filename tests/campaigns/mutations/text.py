"""Ways to spoil JSON, the headers of safetensors and tracker files."""

import copy
import json
import random
import struct
from pathlib import Path
from typing import Any

from tests.campaigns.mutations.values import VALUES, extreme


def _places(value: Any, at: tuple = ()) -> list[tuple]:
    """The paths of everything in a JSON value but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((*at, key), *_places(item, (*at, key)))]


def _parent(value: Any, place: tuple) -> Any:
    for key in place[:-1]:
        value = value[key]
    return value


def change_json(rng: random.Random, value: Any) -> tuple[str, str]:
    """A changed JSON text, and what was changed."""
    places = _places(value)
    shallow = [place for place in places if len(place) <= 2] or [()]
    place = rng.choice(rng.choice([places, shallow]) or [()])
    how = rng.choice(
        [
            "value",
            "value",
            "value",
            "value",
            "removed",
            "twice",
            "swapped",
            "moved",
            "deep",
            "deep in place",
            "other root",
            "added",
        ]
    )
    note = f"{how} {'.'.join(map(str, place))[:80]}"
    if how == "other root" or not place:
        return json.dumps(rng.choice(VALUES)), "other root"
    if how == "deep":
        return json.dumps(value)[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested 100,000 deep"
    parent = _parent(value, place)
    if how == "value":
        parent[place[-1]] = new = extreme(rng, parent[place[-1]])
        note += f" = {str(new)[:60]}"
    elif how == "removed":
        del parent[place[-1]]
    elif how == "added":
        parent[place[-1] if isinstance(parent, list) else f"{place[-1]}x"] = extreme(rng, parent[place[-1]])
    elif how in ("swapped", "moved"):
        other = rng.choice([p for p in places if len(p) == len(place)])
        theirs = _parent(value, other)
        if how == "swapped":
            theirs[other[-1]], parent[place[-1]] = parent[place[-1]], theirs[other[-1]]
        else:
            theirs[other[-1]] = copy.deepcopy(parent[place[-1]])
        note += f" with {'.'.join(map(str, other))[:80]}"
    elif how == "deep in place":
        parent[place[-1]] = "DEEP"
        return json.dumps(value).replace('"DEEP"', "[" * 100_000 + "]" * 100_000), note
    text = json.dumps(value)
    if how == "twice":
        entry = json.dumps({str(place[-1]): extreme(rng, parent[place[-1]])})[1:-1]
        at = text.find(json.dumps(str(place[-1])) + ":")
        text = text[:at] + entry + ", " + text[at:] if at >= 0 else text
    return text, note


def json_file(rng: random.Random, path: Path) -> str:
    text, note = change_json(rng, json.loads(path.read_bytes()))
    path.write_text(text)
    return note


def safetensors_header(rng: random.Random, path: Path) -> str:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    how = rng.choice(["json", "json", "json", "length", "swapped places", "many names", "name"])
    names = [name for name in header if name != "__metadata__"]
    if how == "length":
        new = rng.choice([0, 1, length - 1, length + 1, length + 8, 2**62, 2**63, 2**64 - 1, len(data)])
        path.write_bytes(struct.pack("<Q", new) + data[8:])
        return f"header length {new}"
    if how == "swapped places":
        a = rng.choice(names)
        alike = [n for n in names if header[n]["shape"] == header[a]["shape"]]
        b = rng.choice(alike)
        header[a]["data_offsets"], header[b]["data_offsets"] = (
            header[b]["data_offsets"],
            header[a]["data_offsets"],
        )
        text, note = json.dumps(header), f"places of {a} and {b} swapped"
    elif how == "many names":
        extra = ", ".join(f'"n{i % 59_999}": {{}}' for i in range(60_000))
        text, note = json.dumps(header)[:-1] + f", {extra}}}", "60,000 names, one twice"
    elif how == "name":
        a = rng.choice(names)
        new = rng.choice(
            [rng.choice(names), "x" * 100_000, "", a + "\n", a.upper(), "\ud800", "__metadata__"]
        )
        header[new] = header.pop(a)
        text, note = json.dumps(header), f"{a} renamed {new[:60]!r}"
    else:
        text, note = change_json(rng, header)
    encoded = text.encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])
    return note


def tracker(rng: random.Random, path: Path) -> str:
    text = rng.choice(["", "²", "\u0661", "-1", "+1", "1e3", "0x10", "release\0", " release \n\n", "RELEASE",
                       "iter_0000001", "9" * 5000, "../release", "1_0", "0", "release\nrelease",
                       "\ufeffrelease"])  # fmt: skip
    path.write_text(text)
    return repr(text[:40])
