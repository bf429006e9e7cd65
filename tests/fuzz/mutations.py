"""Damage to valid samples: to their bytes, their lines, and their values by type.

``damaged`` takes its choices from a ``random.Random``. Hypothesis hands out one whose choices it can shrink, a
coverage-guided fuzzer one that reads its input.
"""

from __future__ import annotations

import copy
import enum
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import yaml

from g2sim.bus.frames import FRAME
from g2sim.bus.log import MAGIC, xxhash


class Form(enum.Enum):
    """How the values of a sample are found."""

    LINES = "lines of JSON"
    JSON = "one JSON value"
    YAML = "one YAML value"
    MSGPACK = "one msgpack value"
    LOG = "frames of a log, each a msgpack value"
    TEXT = "text"


NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 127, 128, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63)
NUMBERS += (2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**15, 10**18, 10**30, 10**4000, -0.0, 0.5, 1.5, -3.25)
NUMBERS += (1e-308, 5e-324, 1e15, 1e300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
TEXTS: tuple[str, ...] = ("", " ", "a", "0", "0x10", "1e3", "null", "true", "yes", "\0", "\x1b[2J", "ä\u2028", "\u202e")
TEXTS += ("\ud800", "a" * 300, "../../etc", "!!python/object:os.system", "%s%n", "a.b[0].c", "[0]", "\n", "\r", "\x85")
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"type": "x"},
    [0] * 50,
    {"a": {"b": 1}},
)
BYTES: tuple[bytes, ...] = (
    b"",
    b"\0",
    b"\n",
    b"\r",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xc3",
    b"\xed\xa0\x80",
    b"{",
    b"[",
    b'"',
)
BYTES += (
    b"\\",
    b"NaN",
    b"-",
    b"&a [*a]",
    b"*a",
    b"<<: ",
    b"!!python/name:os.system ''",
    b": ",
    b"- ",
    b"#",
    b"%",
    b"@",
)
BYTES += (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\0\0\0\1\1\1",
    b"\x91" * 600,
    b"[" * 600,
)
BYTES += (b"9" * 5000, b"\xd6\xff\0\0\0\0", b"\xc1", b"\xa1", b"1e999", b"\x1c", b"\xe2\x80\xa8")

Path = tuple[Any, ...]


def damaged(rng: random.Random, sample: bytes, form: Form, others: list[bytes]) -> bytes:
    """A sample with one to four changes; ``others`` are samples to take parts from."""
    data = sample
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change = rng.choice((_values, _values, _values, _raw)) if form is not Form.TEXT else _raw
        data = change(rng, data, form, others)
    return data


def _values(rng: random.Random, data: bytes, form: Form, others: list[bytes]) -> bytes:
    """Other values, or a raw change where the sample cannot be taken apart any more."""
    try:
        return _PARTS[form](rng, data)
    except (ValueError, RecursionError, yaml.YAMLError, TypeError, OverflowError, LookupError, struct.error):
        return _raw(rng, data, form, others)


def _raw(rng: random.Random, data: bytes, form: Form, others: list[bytes]) -> bytes:
    at, stop = sorted((_at(rng, data), _at(rng, data)))
    choice = rng.randrange(8)
    if choice == 0:
        return data[:at]
    if choice == 1:
        return data[:at] + rng.choice(BYTES) + data[at:]
    if choice == 2:
        return data[:at] + data[stop:]
    if choice == 3:
        return data[:stop] + data[at:stop] * rng.choice((1, 3)) + data[stop:]
    if choice == 4:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if choice == 5 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if choice == 6:
        return data[:at] + rng.choice(others)[at:]
    lines = data.split(b"\n")
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    if rng.random() < 0.5:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines.insert(first, lines[second])
    return b"\n".join(lines)


def _at(rng: random.Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1)


def _paths(value: Any, path: Path = ()) -> list[Path]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        found += _paths(inner, (*path, key))
    return found


def change_value(rng: random.Random, tree: Any) -> Any:
    """The tree with one value or key of it changed."""
    tree = copy.deepcopy(tree)
    path = rng.choice(_paths(tree))
    if not path:
        return rng.choice((_hostile(rng, tree), [tree], {"x": tree}, [tree, tree]))
    *outer, last = path
    inner = tree
    for key in outer:
        inner = inner[key]
    there = inner[last]
    choice = rng.randrange(8)
    if choice == 0:
        del inner[last]
    elif choice == 1 and isinstance(inner, dict):
        inner[rng.choice(TEXTS)] = there
    elif choice == 2 and isinstance(inner, dict):
        inner[last] = inner[rng.choice(list(inner))]
    elif choice == 3 and isinstance(inner, list):
        inner.extend(copy.deepcopy(there) for _ in range(rng.choice((1, 20))))
    elif choice == 4:
        inner[last] = rng.choice(([there], {"x": there}, str(there) if not isinstance(there, str) else 7))
    else:
        inner[last] = _hostile(rng, there)
    return tree


def _hostile(rng: random.Random, there: Any) -> Any:
    """A value of the same type, mostly."""
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(OTHERS)
    if isinstance(there, bool) or there is None:
        return rng.choice((*OTHERS, *NUMBERS[:6]))
    if isinstance(there, int | float):
        return rng.choice(NUMBERS) if kind < 0.9 else rng.choice(TEXTS)
    if isinstance(there, bytes):
        return rng.choice(BYTES)
    if isinstance(there, str):
        return rng.choice(TEXTS) if kind < 0.9 else rng.choice(NUMBERS)
    return rng.choice((*OTHERS, *NUMBERS[:6], *TEXTS[:6]))


def _json_text(rng: random.Random, value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.8)
    if rng.random() < 0.05 and text.startswith('{"'):
        text = '{"' + text[2:].partition('"')[0] + '": 7, ' + text[1:]  # a key twice
    return text.encode("utf-8", "surrogatepass")


def _json(rng: random.Random, data: bytes) -> bytes:
    return _json_text(rng, change_value(rng, json.loads(data)))


def _lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    number = rng.choice([idx for idx, line in enumerate(lines) if line.strip()])
    lines[number] = _json(rng, lines[number])
    return b"\n".join(lines)


def _yaml(rng: random.Random, data: bytes) -> bytes:
    tree = change_value(rng, yaml.safe_load(data))
    if rng.random() < 0.2:
        return _json_text(rng, tree)
    return yaml.safe_dump(tree, default_flow_style=rng.choice((None, True, False)), sort_keys=False).encode()


def _msgpack(rng: random.Random, data: bytes) -> bytes:
    tree = _as_lists(msgpack.unpackb(data, strict_map_key=False, timestamp=0))
    return _packed(change_value(rng, tree))


def _packed(tree: Any) -> bytes:
    payload: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
    return payload


def _as_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    return {key: _as_lists(item) for key, item in value.items()} if isinstance(value, dict) else value


def frames_of(data: bytes) -> list[bytes]:
    """Payloads of a log's frames, from the header's on."""
    at, found = len(MAGIC), []
    while at < len(data):
        length, _ = FRAME.unpack_from(data, at)
        found.append(data[at + FRAME.size : at + FRAME.size + length])
        at += FRAME.size + length
    return found


def log_of(frames: list[bytes]) -> bytes:
    """A log of payloads with checksums that are right, and an end whose digest and count are."""
    data = MAGIC
    for idx, frame in enumerate(frames):
        if idx == len(frames) - 1 and b"digest" in frame:
            end = msgpack.unpackb(frame)
            end |= {"records": idx - 1, "digest": xxhash.xxh3_128_hexdigest(data)}
            frame = msgpack.packb(end)
        data += FRAME.pack(len(frame), xxhash.xxh32_intdigest(frame)) + frame
    return data


def _log(rng: random.Random, data: bytes) -> bytes:
    """Values of a record, or the order of records, changed; checksums and digest are made right again."""
    frames = frames_of(data)
    idx = rng.choice((0, rng.randrange(len(frames)), rng.randrange(len(frames))))
    if rng.random() < 0.8:
        frames[idx] = _msgpack(rng, frames[idx])
    elif rng.random() < 0.5:
        frames.insert(idx, frames[rng.randrange(len(frames))])
    else:
        del frames[idx]
    return log_of(frames)


_PARTS: dict[Form, Callable[[random.Random, bytes], bytes]] = {
    Form.LINES: _lines,
    Form.JSON: _json,
    Form.YAML: _yaml,
    Form.MSGPACK: _msgpack,
    Form.LOG: _log,
}
