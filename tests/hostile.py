"""A catalogue of files that users have or that somebody made to do harm, written from a seed.

`write_hostile_images`, `write_hostile_audio`, `write_hostile_json` and `write_hostile_text` put one file of each kind
into a folder and return their paths. `ODD_NAMES` are names that files can have. Nothing here is large: what is large
when it is decoded only claims to be so, and no reader may believe it.
"""

import contextlib
import io
import json
import os
import resource
import signal
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

ODD: list[Any] = [None, True, -1, 0, 1, 2**70, 0.5, float("nan"), 1e308, "", "x", "evil.X", "../x", "/dev/zero", "a\0b"]
ODD += ["[/b]", "\x1b[31m", "x" * 3000, [], [1], [[1]], [None] * 3, ["x"] * 4, {}, {"x": {}}, [10**6] * 4, "hf-hub:a/b"]
"""Values that a JSON file can have anywhere."""
ODD_NAMES = (
    "a b.{0}", "[bold]x.{0}", "$\\frac{{1}}{{$.{0}", "line\nbreak.{0}", "日本語.{0}", "\u202eright-to-left.{0}",
    "-rf.{0}", "%s%n.{0}", "'quoted\".{0}", "UPPER.{0}", "upper.{0}", "n" * 200 + ".{0}", "\udcff\udcfe.{0}",
)  # fmt: skip
HIDDEN_NAMES = (".DS_Store", "Thumbs.db", "._x.{0}", ".ipynb_checkpoints/x-checkpoint.{0}")
EXIF_ORIENTATION = 0x0112


class HangError(BaseException):
    """Not an Exception, so that nothing on the way catches it."""


@contextlib.contextmanager
def limits(seconds: int, memory: int) -> Iterator[None]:
    """Raises HangError after some time, and lets an allocation fail before it hurts the machine.

    memory: in bytes, above what the process has.
    """

    def hang(*_: Any) -> None:
        raise HangError(f"not done after {seconds} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    handler = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def write_hostile_images(folder: Path, random: Random) -> list[Path]:
    """Writes images that are damaged, odd or not images at all, and things that only have the name of one."""
    files: dict[str, bytes] = {
        "zero_bytes.jpg": b"",
        "text.jpg": b"I am a text.\n",
        "noise.png": random.randbytes(300),
        "truncated.png": _encoded(_pixels(random), "PNG")[:-30],
        "truncated.jpg": _encoded(_pixels(random), "JPEG")[:-200],
        "claims_a_billion_pixels.png": png_header(40_000, 40_000),
        "claims_a_long_row.png": png_header(65_000, 1),
        "claims_no_pixels.png": png_header(0, 0),
        "broken_exif.jpg": _encoded(_pixels(random), "JPEG", exif=b"Exif\0\0II*\0" + random.randbytes(40)),
        "rotated.jpg": rotated(Image.new("RGB", (48, 32))),
        "long.png": _encoded(Image.new("RGB", (6500, 1)), "PNG"),
        "one_pixel.png": _encoded(Image.new("RGB", (1, 1)), "PNG"),
        "animated.webp": _animated(random),
    }
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "LAB", "I", "F", "I;16"):
        ending = "png" if mode in ("1", "L", "LA", "P", "RGBA", "I;16") else "tiff"
        files[f"mode_{mode.replace(';', '')}.{ending}"] = _encoded(_in_mode(random, mode), ending.upper())
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM"):
        for number in range(3):
            content = _encoded(_pixels(random), kind)
            files[f"damaged_{number}.{kind.lower()}"] = bytes_changed(content, random, random.randint(1, 12))
    return _written(folder, files) + write_irregular(folder, "png")


def write_hostile_audio(folder: Path, random: Random) -> list[Path]:
    """Writes WAV files whose header lies, other damaged sound, and things that only have the name of a sound file."""
    sound = random.randbytes(4000)
    files = {
        "zero_bytes.wav": b"",
        "text.flac": b"I am a text.\n",
        "one_hertz.wav": wav(sound * 30, rate=1),
        "a_gigahertz.wav": wav(sound, rate=2**31 - 1),
        "claims_hours.wav": wav(sound[:100], claimed=2**31),
        "claims_hours.flac": b"fLaC" + bytes.fromhex("80000022 10001000 000000000000 0ac442ff ffffffff") + bytes(16),
        "no_channels.wav": wav(sound, channels=0),
        "many_channels.wav": wav(sound, channels=65_535),
        "no_rate.wav": wav(sound, rate=0),
        "short.wav": wav(sound[:10]),
        "only_header.wav": wav(b""),
        "headerless.raw": sound,
    }
    for number in range(6):
        files[f"damaged_{number}.wav"] = bytes_changed(wav(sound), random, random.randint(1, 12), within=60)
    return _written(folder, files) + write_irregular(folder, "wav")


def write_hostile_json(folder: Path, random: Random) -> list[Path]:
    """Writes files that are not the JSON they seem to be, or whose values no program expects."""
    coco = json.dumps(coco_content())
    files: dict[str, bytes] = {
        "empty.json": b"",
        "null.json": b"null",
        "list.json": b"[1, 2, 3]",
        "deep.json": b"[" * 100_000 + b"]" * 100_000,
        "deep_box.json": coco.replace("[2, 3, 6, 6]", "[" * 5000 + "]" * 5000).encode(),
        "truncated.json": coco[: random.randrange(10, len(coco) - 10)].encode(),
        "digits.json": coco.replace("[2, 3, 6, 6]", "9" * 5000).encode(),
        "utf_16.json": coco.encode("utf-16"),
        "utf_16_without_mark.json": coco.encode("utf-16-le"),
        "with_mark.json": b"\xef\xbb\xbf" + coco.encode(),
        "with_nul.json": coco.encode() + b"\0",
        "latin.json": coco.replace("cat", "caf\u00e9").encode("latin-1"),
        "infinite.json": coco.replace("[2, 3, 6, 6]", "[NaN, Infinity, -Infinity, 1e400]").encode(),
    }
    return _written(folder, files) + write_irregular(folder, "json")


def write_hostile_text(folder: Path, random: Random, ending: str = "txt", text: str = "one two\nthree\n") -> list[Path]:
    """Writes `text` in odd encodings, damaged, and things that only have the name of a text file."""
    files = {
        f"empty.{ending}": b"",
        f"one_line.{ending}": text.strip().replace("\n", " ").encode(),
        f"with_mark.{ending}": b"\xef\xbb\xbf" + text.encode(),
        f"utf_16.{ending}": text.encode("utf-16"),
        f"utf_16_without_mark.{ending}": text.encode("utf-16-be"),
        f"crlf.{ending}": text.replace("\n", "\r\n").encode(),
        f"nul.{ending}": text.encode() + b"\0\n",
        f"latin.{ending}": text.encode() + b"caf\xe9\n",
        f"huge_line.{ending}": text.encode() + b"x" * 300_000,
        f"quotes.{ending}": text.encode() + b'"never closed\n' * 3,
        f"separators.{ending}": text.replace(" ", "\u2028\x0b\x1c").encode(),
        f"noise.{ending}": random.randbytes(500),
    }
    return _written(folder, files) + write_irregular(folder, ending)


def write_irregular(folder: Path, ending: str) -> list[Path]:
    """Makes a named pipe, a socket, a folder, and links to nothing, to themselves and to an endless device."""
    paths = {name: folder / f"{name}.{ending}" for name in ("pipe", "socket", "folder", "dangling", "loop", "device")}
    os.mkfifo(paths["pipe"])
    _bind(paths["socket"])
    paths["folder"].mkdir()
    paths["dangling"].symlink_to("nowhere")
    paths["loop"].symlink_to(paths["loop"].name)
    paths["device"].symlink_to("/dev/zero")
    return list(paths.values())


def coco_content() -> dict[str, list[dict[str, object]]]:
    """A valid file of annotations in COCO's format: an image of 20×30 px (height × width) with one object."""
    square = [[2, 3, 8, 3, 8, 9, 2, 9]]
    entry = {"id": 1, "image_id": 9, "category_id": 3, "bbox": [2, 3, 6, 6], "segmentation": square, "area": 36.0}
    return {
        "images": [{"id": 9, "file_name": "a.jpg", "height": 20, "width": 30}],
        "annotations": [{**entry, "iscrowd": 0}],
        "categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}],
    }


def hostile_values(random: Random) -> list[object]:
    """Values that a JSON file can have where numbers, names or lists are expected."""
    numbers = [0, -1, 0.5, -0.0, 2**31, 2**63, 10**400, -(10**400), 1e308, float("nan"), float("inf"), random.random()]
    texts = ["", "3", "cat", "../../etc/passwd", "/etc/passwd", "a\0b", "C:\\x.jpg", "x" * 5000]
    lists = [[], [1], [1, 2, 3], [[1, 2, 3]], [[0, 0, 1e9, 0, 1e9, 1e9]], [[0.0, float("nan")] * 3]]
    lists += [[None] * 4, [[[[]]]]]
    runs = [{}, {"size": [20, 30]}, {"size": [20, 30], "counts": [600]}, {"size": [20, 30], "counts": [-1, 601]}]
    runs += [{"size": [20, 30], "counts": text} for text in ("", "\u00e9", "o" * 50, "\ud800")]
    runs += [
        {"size": [10**6, 10**6], "counts": [10**12]},
        {"size": "20×30", "counts": 5},
        {"counts": None, "size": [20, 30]},
    ]
    return [*numbers, *texts, *lists, *runs, None, True, False]


def other(value: Any, random: Random, depth: int = 0) -> Any:
    """A JSON value in which one thing is another."""
    if not isinstance(value, dict | list) or not value or (depth > 2 and random.random() < 0.15):
        return random.choice(ODD)
    key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    changed[key] = other(value[key], random, depth + 1)
    if random.random() < 0.1:
        del changed[key]
    return changed


def bytes_changed(content: bytes, random: Random, number: int, within: int | None = None) -> bytes:
    """The content with so many bytes replaced, among the first `within`."""
    changed = bytearray(content)
    for _ in range(number if content else 0):
        changed[random.randrange(len(content[:within]))] = random.randrange(256)
    return bytes(changed)


def wav(samples: bytes, rate: int = 16_000, channels: int = 1, claimed: int | None = None) -> bytes:
    """A WAV file of 16-bit samples whose header has these values, true or not. claimed: bytes of the samples."""
    length = len(samples) if claimed is None else claimed
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 % 2**32, 2 * channels % 2**16, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", length) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def rotated(image: Image.Image) -> bytes:
    """A JPEG file that holds the image lying on its side, and says so in its EXIF data."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    return _encoded(image.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=100, subsampling=0)


def _pixels(random: Random, size: tuple[int, int] = (48, 40)) -> Image.Image:
    values = np.random.default_rng(random.getrandbits(32)).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values)


def _in_mode(random: Random, mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.asarray(_pixels(random).convert("L")).astype(np.uint16) * 257)
    if mode == "LAB":
        return Image.new("LAB", (48, 40), (50, 100, 100))
    image = _pixels(random)
    return image.convert("L").convert(mode) if mode in ("LA", "I", "F") else image.convert(mode)


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _animated(random: Random) -> bytes:
    frames = [_pixels(random) for _ in range(3)]
    return _encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])


def png_header(width: int, height: int) -> bytes:
    """A PNG file that claims this size and ends after a few bytes of pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def _written(folder: Path, files: dict[str, bytes]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def _bind(path: Path) -> None:
    """Leaves a socket at a path, which may be longer than the system lets one bind to."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(before)
        os.close(before)
