"""Text from files: the source code of Python's standard library, which every machine has, or a folder."""

import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch.utils.data import Dataset

from linvit.data.contents import Content, Contents
from linvit.data.disk import check_regular, files_below, read_text
from linvit.data.order import share
from linvit.data.source import Source, Workers, is_held_out
from linvit.data.text.tokens import BYTES, Rows, Stream, Tokenizer, join, open_tokenizer
from linvit.ranges import Count, Range, Seed, Share

LONGEST_ROW = 2**20
# Tests, which some distributions leave out, and tables, which are not programs.
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class TextPreprocessing:
    """The conversion of text to a network's input, and the text it was trained on.

    tokenizer: "bytes" or the name of a Hugging Face tokenizer. separator: the name of its token between documents.
    context: tokens per row. corpus: a description of the text.
    """

    tokenizer: str
    separator: str | None
    context: int
    corpus: str

    def open(self) -> Tokenizer:
        """The tokenizer itself."""
        return open_tokenizer(self.tokenizer, self.separator)


class TextSource(Source):
    """Rows of tokens, whose targets are the next tokens; see Rows.

    context: tokens per row. batch_size: rows per batch. tokenizer: "bytes", or the file or name of a Hugging Face
    tokenizer. separator: its token between documents, if it is not a common one. keeps_apart: documents in the same row
    do not see each other. seed: of the order of the rows. num_workers: processes that read.
    """

    task = "language"
    item = "row"
    smaller = ("batch_size", "context")
    preprocessing: TextPreprocessing  # type: ignore[assignment]

    def __init__(
        self,
        context: Annotated[int, Range(2, LONGEST_ROW)] = 256,
        batch_size: Count = 16,
        tokenizer: str = BYTES,
        separator: str | None = None,
        keeps_apart: bool = True,
        seed: Seed = 0,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.context = context
        self.keeps_apart = keeps_apart
        self.tokenizer = open_tokenizer(tokenizer, separator)
        self.names = tokenizer, separator
        self.class_names: list[str] = []
        self._streams: dict[str, Stream] = {}

    @property
    def num_classes(self) -> int:
        return self.tokenizer.vocabulary

    def stream(self, split: str) -> Stream:
        """The tokens of "train" or "val"."""
        raise NotImplementedError

    def train_set(self) -> Dataset[Any]:
        return self._rows("train")

    def val_set(self) -> Dataset[Any]:
        return self._rows("val", share()[1])

    def _rows(self, split: str, multiple: int = 1) -> Rows:
        if split not in self._streams:
            self._streams[split] = self.stream(split)
        return Rows(self._streams[split], self.context, self.tokenizer.separator, self.keeps_apart, multiple)


class FileText(TextSource):
    """Text files, each a document; `files` has the paths of each split."""

    files: dict[str, list[Path]]

    def contents(self, split: str) -> Contents:
        return Contents(self.files[split], _text_content, item="file")

    def stream(self, split: str) -> Stream:
        return join(map(_content, self.files[split]), self.tokenizer, split == "val")

    def describe(self) -> str:
        """The number of files and bytes of each split, in words."""
        sizes = {split: sum(path.stat().st_size for path in files) for split, files in self.files.items()}
        return (
            f"{len(self.files['train'])} files of {sizes['train']:,} bytes, {len(self.files['val'])} files of"
            f" {sizes['val']:,} bytes held out"
        )


class Stdlib(FileText):
    """The .py files of the running Python's standard library, without tests and tables.

    Args:
        held_out: Share of the files that is never trained on, chosen by a hash of their names.
        options: See TextSource.

    Raises ValueError for a share that leaves one split without files.
    """

    def __init__(self, held_out: Share = 0.03, **options: Any) -> None:
        super().__init__(**options)
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*.py") if not NOT_READ & set(path.relative_to(root).parts)]
        self.files = split_by_hash(root, files, held_out)
        check_splits(root, self.files, [".py"], trains=held_out < 1)
        corpus = f"the standard library of Python {platform.python_version()}: {self.describe()}"
        self.preprocessing = TextPreprocessing(*self.names, self.context, corpus)


class TextFolder(FileText):
    """All text files below a folder; those in its val/ are held out, or a share of all if there is no val/.

    Args:
        root: The folder.
        suffixes: The endings of its text files.
        held_out: Share of the files that is held out, chosen by a hash of their names, if the folder has no val/. 1
            holds out all, for evaluation.
        options: See TextSource.

    Raises ValueError for a missing folder, a file that cannot be read, and a split without files or without text.
    """

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        return {"name": "textfolder", "root": str(root)} if files_below(root, (".txt",)) else None

    def __init__(self, root: str, suffixes: Sequence[str] = (".txt",), held_out: Share = 0.03, **options: Any) -> None:
        super().__init__(**options)
        folder = Path(root)
        if not folder.is_dir():
            wrong = "is a file" if folder.exists() else "does not exist"
            raise ValueError(f"The data folder {folder} {wrong}: set `root` to a folder of text files.")
        files = files_below(folder, suffixes)
        for path in files:
            check_readable(path)
        if (folder / "val").is_dir():
            val = {path for path in files if path.relative_to(folder).parts[0] == "val"}
            self.files = {"train": sorted(set(files) - val), "val": sorted(val)}
        else:
            self.files = split_by_hash(folder, files, held_out)
        check_splits(folder, self.files, suffixes, trains=held_out < 1)
        self.preprocessing = TextPreprocessing(*self.names, self.context, f"{folder}: {self.describe()}")


def split_by_hash(root: Path, files: Sequence[Path], held_out: float) -> dict[str, list[Path]]:
    """{"train": …, "val": …}: the files of each split, chosen by a hash of their paths below root."""
    splits: dict[str, list[Path]] = {"train": [], "val": []}
    for path in sorted(files):
        splits["val" if is_held_out(path.relative_to(root).as_posix(), held_out) else "train"].append(path)
    return splits


def check_readable(path: Path) -> None:
    """Raises ValueError, naming the path, for anything but a regular file."""
    try:
        check_regular(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it.") from error


def _text_content(path: Path) -> Content | str:
    try:
        text = read_text(path)
    except ValueError as error:
        return str(error)
    return Content((len(text.encode()),), others={"characters": len(text)})


def _content(path: Path) -> bytes:
    check_readable(path)
    return path.read_bytes()


def check_splits(root: Path, files: dict[str, list[Path]], suffixes: Sequence[str], trains: bool) -> None:
    """Raises ValueError if there is nothing to evaluate on or, for a source that trains, nothing to train on."""
    count = sum(map(len, files.values()))
    endings = " or ".join(suffixes)
    if not count:
        raise ValueError(f"{root} has no file that ends in {endings}: choose another folder, or set `suffixes`.")
    missing = "to train on" if trains and not files["train"] else "" if files["val"] else "held out"
    if missing:
        raise ValueError(
            f"{root} has {count} files that end in {endings}, but none of them is {missing}: set `held_out` between 0"
            " and 1, or add files."
        )
    if not any(path.stat().st_size for path in files["val"]):
        raise ValueError(f"All held-out files of {root} are empty: add text to them.")
