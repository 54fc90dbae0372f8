"""Nasty values, and the ways in which bytes are damaged; everything follows from a `Random`."""

import json
import shutil

NUMBERS = (
    *("0", "-1", "1", "2", "7", "0.5", "-0.0", "1e-300", "1e9", "1e18", "1e308", "-1e308"),
    *("nan", "inf", "-inf", "NaN", "2147483648", "9223372036854775808", "1" + "0" * 400),
    *("1_0", " 3 ", "0x10", "٣", "1e400", "True", "None"),
)
TEXTS = (
    *("", " ", "\t", "\n", "\0", "a\0b", "\udcff", "None", "none", "true", "[]", "{}", "--", "-"),
    *("../x", "/", "~", ".", "..", "tiny", "tiny:", "tiny:layers=0", "gsm8k", "a:b:c", "a=b", "="),
    *("[easy]", "[/bold]", "%s%n", "${HOME}", "é", "\u202e", "🙂", "x" * 3000, "sorted", "SORTED"),
    *("http://x", "cpu", "cuda", "cuda:99", "meta", "knights_knaves:count=2", "right=nan"),
)
JSON_VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, 1e308, -1e308),
    *("", "\0", "\ud800", "x" * 2000, "nan", "NaN", [], [[]], {}, {"a": None}, [None] * 50),
)
_BYTES = (b"\0", b"\xff", b"\n", b"{", b"[" * 3000, b'"', b",", b"\xef\xbb\xbf", b"\r", b"9" * 5000)


def value(random):
    """A word for a flag or a file."""
    return random.choice(NUMBERS if random.random() < 0.6 else TEXTS)


def damaged(content, random):
    """Bytes with one to four things done to them."""
    for _ in range(random.randint(1, 4)):
        content = random.choice(_DAMAGES)(content, random)
    return content


def _flip(content, random):
    changed = bytearray(content)
    for _ in range(random.randint(1, 8) if changed else 0):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def _cut(content, random):
    return content[: random.randrange(len(content) + 1)]


def _insert(content, random):
    place = random.randrange(len(content) + 1)
    return content[:place] + random.choice(_BYTES) + content[place:]


def _lines(content, random):
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    place, other = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(4):
        case 0:
            del lines[place]
        case 1:
            lines.insert(other, lines[place])
        case 2:
            lines[place], lines[other] = lines[other], lines[place]
        case 3:
            lines = lines[place:]
    return b"".join(lines)


def _json_value(content, random):
    """Another value in place of one that stands in a line of JSON."""
    lines = content.splitlines(keepends=True)
    if not lines:
        return content
    place = random.randrange(len(lines))
    try:
        found = json.loads(lines[place])
    except (ValueError, RecursionError):
        return content
    lines[place] = json.dumps(_replaced(found, random)).encode() + b"\n"
    return b"".join(lines)


def _replaced(found, random):
    if isinstance(found, dict) and found and random.random() < 0.9:
        key = random.choice(list(found))
        if random.random() < 0.15:
            return {name: value for name, value in found.items() if name != key}
        return {**found, key: _replaced(found[key], random)}
    if isinstance(found, list) and found and random.random() < 0.7:
        place = random.randrange(len(found))
        return [*found[:place], _replaced(found[place], random), *found[place + 1 :]]
    return random.choice(JSON_VALUES)


_DAMAGES = (_flip, _cut, _insert, _lines, _json_value, _json_value, _json_value)


def damage_folder(folder, random):
    """Do something to one to three of the files of a folder, the small ones more often."""
    for _ in range(random.randint(1, 3)):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        small = [path for path in files if path.stat().st_size < 100_000]
        path = random.choice(small if random.random() < 0.8 else files)
        match random.choices(("content", "delete", "empty", "folder", "loop"), (12, 3, 2, 1, 1))[0]:
            case "content":
                path.write_bytes(damaged(path.read_bytes(), random))
            case "delete":
                path.unlink()
            case "empty":
                path.write_bytes(b"")
            case "folder":
                path.unlink()
                path.mkdir()
            case "loop":
                path.unlink()
                path.symlink_to(path.name)


def copied(folder, place):
    """A copy of a folder; links stay links."""
    return shutil.copytree(folder, place, symlinks=True)
