"""Text from files: the source code of Python's standard library, which every machine has, or a folder."""

import platform
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from linvit.data.disk import check_regular, data_folder, files_below, is_hidden
from linvit.data.source import Content, Contents, check_split, share_of_name
from linvit.data.text.source import CACHE, TextPreprocessing, TextSource, usable
from linvit.data.text.tokens import Stream, join
from linvit.environment import replica
from linvit.errors import SettingError
from linvit.files import user_path
from linvit.ranges import Amount, Count, Seed, Share

IN_MEMORY = 2**24  # bytes of a split's text; more is packed
SUFFIXES = (".txt", ".md")
# Tests, which some distributions leave out, and tables, which are not programs.
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}


class FileText(TextSource):
    """Text files, each a document; `files` has the paths of each split, `root` is their folder.

    A split of more than IN_MEMORY bytes is packed; it is packed again if a name, a size or a time of its files changes.
    """

    root: Path
    files: dict[str, list[Path]]
    cache = Path(CACHE)

    def identity(self, split: str) -> list[Any]:
        described: list[Any] = [str(self.root)]
        for path in self.files[split]:
            about = path.stat() if path.is_file() else None
            name = path.relative_to(self.root).as_posix()
            described.append([name, about and about.st_size, about and about.st_mtime_ns])
        return described

    def texts(self, split: str) -> Iterable[bytes | str]:
        return map(_text, self.files[split])

    def contents(self, split: str) -> Contents:
        return Contents(self.files[split], _content, item="file")

    def prepare_data(self) -> None:
        for split in self.files:
            if self._size(split) > IN_MEMORY:
                self.packed(split)

    def stream(self, split: str) -> Stream:
        if self._size(split) > IN_MEMORY:
            return super().stream(split)
        sentences: list[str] = []
        stream = join(usable(self.texts(split), sentences), self.tokenizer, split == "val")
        self.leave_out(sentences, stream.documents)
        return stream

    def describe(self) -> str:
        """The number of files and bytes of each split, in words."""
        train, val = (f"{len(self.files[split])} files of {self._size(split):,} bytes" for split in ("train", "val"))
        return f"{train}, {val} held out"

    def _size(self, split: str) -> int:
        return sum(map(_size, self.files[split]))


class Stdlib(FileText):
    """The .py files of the running Python's standard library, without tests and tables.

    Args:
        held_out: Share of the files that is never trained on, chosen by a hash of their names.
        options: See TextSource.
    """

    def __init__(self, held_out: Share = 0.03, **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in self.root.rglob("*.py") if not NOT_READ & set(path.relative_to(self.root).parts)]
        self.files = split_by_hash(self.root, files, held_out)
        check_splits(self.root, self.files, [".py"], trains=held_out < 1)
        corpus = f"the standard library of Python {platform.python_version()}: {self.describe()}"
        self.preprocessing = TextPreprocessing(*self.names, self.context, corpus)


class TextFolder(FileText):
    """All text files below a folder, such as books; those in its val/ are held out, or a share of all without val/.

    Args:
        root: The folder.
        suffixes: The endings of its text files.
        held_out: Share of the files that is held out, chosen by a hash of their names, if the folder has no val/. 1
            holds out all, for evaluation.
        split: Seed that chooses the held-out files. For choices that must not be made on those of split 0.
        val_rows: Validate on about so many of the held-out rows, evenly spaced over all files; null for all rows.
        cache: Folder of the packed tokens of a split with more than 16 MiB of text.
        max_corrupt: Number of files of a split that may be left out because they cannot be read or are not UTF-8.
        options: See TextSource.
    """

    def __init__(
        self,
        root: str,
        suffixes: Sequence[str] = SUFFIXES,
        held_out: Share = 0.03,
        split: Seed = 0,
        val_rows: Count | None = None,
        cache: str = CACHE,
        max_corrupt: Amount = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.root, self.cache = data_folder(root, "a folder of text files"), user_path(cache)
        self.max_corrupt, self.val_rows = max_corrupt, val_rows
        files = files_below(self.root, suffixes)
        if (self.root / "val").is_dir():
            val = {path for path in files if path.relative_to(self.root).parts[0] == "val"}
            self.files = {"train": sorted(set(files) - val), "val": sorted(val)}
        else:
            self.files = split_by_hash(self.root, files, held_out, split)
        check_splits(self.root, self.files, suffixes, trains=held_out < 1)
        self.preprocessing = TextPreprocessing(*self.names, self.context, f"{self.root}: {self.describe()}")

    def val_set(self) -> Dataset[Any]:
        rows = super().val_set()
        total, processes = len(rows), replica()[1]  # type: ignore[arg-type]
        count = -(-(self.val_rows or total) // processes) * processes
        return rows if count >= total else Subset(rows, [place * total // count for place in range(count)])

    @classmethod
    def found_in(cls, root: str | Path) -> dict[str, Any] | None:
        """The settings that read this folder, or None if most of its files are not text files."""
        folder = Path(root)
        if not (texts := files_below(folder, SUFFIXES)):
            return None
        files = [path for path in folder.rglob("*") if path.is_file() and not is_hidden(path, folder)]
        return {"name": "textfolder", "root": str(root)} if 2 * len(texts) > len(files) else None


def split_by_hash(root: Path, files: Sequence[Path], held_out: float, split: int = 0) -> dict[str, list[Path]]:
    """{"train": …, "val": …}: the files of each split, chosen by a hash of their paths below root and of the seed."""
    seed = f"{split} " if split else ""
    splits: dict[str, list[Path]] = {"train": [], "val": []}
    for path in sorted(files):
        is_held_out = share_of_name(f"{seed}{path.relative_to(root).as_posix()}") < held_out
        splits["val" if is_held_out else "train"].append(path)
    return splits


def _text(path: Path) -> bytes | str:
    """The content of a file, or a sentence if it cannot be read or is not UTF-8."""
    try:
        check_regular(path)
        text = path.read_bytes()
        text.decode("utf-8")
    except UnicodeDecodeError:
        return f"{path} is not text in UTF-8: save it again as UTF-8, or leave it out."
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error}): replace it, or leave it out."
    return text


def _content(path: Path) -> Content | str:
    text = _text(path)
    return text if isinstance(text, str) else Content((len(text),), others={"characters": len(text.decode())})


def _size(path: Path) -> int:
    """In bytes; 0 for anything but a regular file."""
    return path.stat().st_size if path.is_file() else 0


def check_splits(root: Path, files: dict[str, list[Path]], suffixes: Sequence[str], trains: bool) -> None:
    """Raises ValueError if there is nothing to evaluate on or, for a source that trains, nothing to train on."""
    count = sum(map(len, files.values()))
    endings = " or ".join(suffixes)
    if not count:
        raise SettingError(f"{root} has no file that ends in {endings}: choose another folder, or set `suffixes`.")
    for split in ("train", "val") if trains else ("val",):
        check_split(split, files[split], f"{root} has {count} files that end in {endings}", "files")
    if not any(map(_size, files["val"])):
        raise ValueError(f"All held-out files of {root} are empty: add text to them.")
