"""Long sequences: linear attention aligned to one softmax teacher, over 1,024, 4,096 and 16,384 tokens of an image.

Images of CIFAR-10 are enlarged, so that more tokens show no more. The teacher is the ViT of docs/evidence/teachers,
trained further at 256 and at 1,024 tokens; it reads longer sequences as it is, its positions interpolated.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import timm
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim.lr_scheduler import OneCycleLR

import linvit
import linvit.kernels.cpu
from evidence.rows import EVIDENCE, ROOT, Call
from linvit.analysis.figures import colours_of, panel_grid, svg
from linvit.analysis.markdown import markdown_rows, marks, replace_between_marks
from linvit.analysis.probe import MIXED, Probe, visit
from linvit.analysis.rank import rank_measures
from linvit.analysis.report import short_commit
from linvit.analysis.scores import entropy, evenly, score_rows
from linvit.data.images.small import Cifar, Pixels
from linvit.environment import commit, processor
from linvit.files import write_text
from linvit.layers.operator import Lesson
from linvit.models.linearizing import lessons
from linvit.tasks.students import relative_errors

PATCH, SEED = 4, 0
SIDES = {1024: 128, 4096: 256, 16384: 512}
"""Tokens → side of the enlarged images in pixels."""
BLOCKS = {"blocks": (4, 4)}
PLAIN = {"lepe": False, "modulation": "none", "rope": False}
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "rala": ("rala", PLAIN),
    "mala": ("mala", PLAIN),
    "linear, blocks": ("linear", BLOCKS),
    "mala, blocks": ("mala", PLAIN | BLOCKS),
}
"""Name → mechanism and options. "linear, blocks" is MHLA; all have the teacher's layers around another operator."""
LEDGER = EVIDENCE / "long.jsonl"
RATES = (3e-3, 1e-2, 3e-2)
CONTINUED_RATES = (3e-4, 1e-3, 3e-3)
"""Of students that have been aligned at a shorter length: there 3e-2 nearly doubled the error."""
ROWS_OF_SCORES = 256


@dataclass(frozen=True)
class Sizes:
    """How many images each step reads: training at 256 and 1,024 tokens, alignment and test at each length."""

    taught: tuple[int, int] = (50_000, 12_800)
    aligned: tuple[int, int, int] = (6_400, 512, 512)
    tested: tuple[int, int, int] = (2_000, 512, 512)


@dataclass(frozen=True)
class Images:
    """Pixels uint8 (images, 3, 32, 32) and classes (images,) of both splits of CIFAR-10, on a device."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, root: str, device: str) -> "Images":
        source = Cifar(root)
        splits = [
            (torch.from_numpy(images.pixels).to(device), torch.as_tensor(images.targets).long().to(device))
            for images in (cast(Pixels, source.images(split, lambda image: image)) for split in ("train", "val"))
        ]
        mean, std = (
            torch.tensor(values, device=device).view(3, 1, 1)
            for values in (source.preprocessing.mean, source.preprocessing.std)
        )
        return cls(splits[0], splits[1], mean, std)

    def read(self, pixels: Tensor, side: int) -> Tensor:
        """Normalized images, enlarged to this side."""
        images = interpolate(pixels.float() / 255, (side, side), mode="bicubic", antialias=True)
        return (images - self.mean) / self.std

    def order(self, seed: int) -> Tensor:
        """The training images in an order by seed."""
        return torch.randperm(len(self.train[1]), generator=torch.Generator().manual_seed(seed))

    def batches(self, pixels: Tensor, classes: Tensor, side: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Enlarged images and their classes."""
        for some, targets in zip(pixels.split(batch), classes.split(batch), strict=True):
            yield self.read(some, side), targets

    def augmented(self, count: int, batch: int, side: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of `count` training images in an order by seed, flipped and shifted by up to 4 pixels at random."""
        pixels, targets = self.train
        generator = torch.Generator().manual_seed(seed)
        for chosen in self.order(seed)[:count].split(batch):
            images = nn.functional.pad(pixels[chosen].float(), (4,) * 4, mode="reflect")
            top, left, flip = (torch.randint(most, (len(chosen),), generator=generator) for most in (9, 9, 2))
            rows = torch.stack(
                [
                    image[:, y : y + 32, x : x + 32].flip(-1) if turned else image[:, y : y + 32, x : x + 32]
                    for image, y, x, turned in zip(images, top.tolist(), left.tolist(), flip.tolist(), strict=True)
                ]
            )
            yield self.read(rows, side), targets[chosen]


def network(tokens: int) -> nn.Module:
    """The teacher's network, for this number of tokens."""
    side = PATCH * math.isqrt(tokens)
    return timm.create_model(
        "deit_tiny_patch16_224", img_size=side, patch_size=PATCH, embed_dim=64, depth=6, num_heads=2, num_classes=10
    )


def started(tokens: int, weights: dict[str, Tensor]) -> nn.Module:
    """The network with these weights of any number of tokens; positions are interpolated."""
    model = network(tokens)
    model.load_state_dict(cast(Any, timm.models.vision_transformer).checkpoint_filter_fn(weights, model))
    return model


def create_student(teacher: nn.Module, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A student in evaluation mode, with these tensors in its attention."""
    mechanism, options = STUDENTS[name]
    student = linvit.linearize(teacher, mechanism, attention=options)
    student.load_state_dict(dict(tensors), strict=False)
    return student.eval()


def teach(images: Images, start: dict[str, Tensor], tokens: int, count: int) -> dict[str, Tensor]:
    """The teacher's weights after one pass over `count` images at this number of tokens."""
    torch.manual_seed(SEED)
    rate, batch, device = (2e-3 if tokens < 1024 else 1e-3), min(64, count), images.mean.device
    model = started(tokens, start).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    schedule = OneCycleLR(optimizer, rate, total_steps=-(-count // batch), pct_start=0.1)
    for pixels, targets in images.augmented(count, batch, PATCH * math.isqrt(tokens), SEED):
        loss = cross_entropy(model(pixels), targets, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}


def align(
    teacher: nn.Module,
    students: Mapping[str, nn.Module],
    rates: Mapping[str, float],
    images: Images,
    count: int,
    batch: int,
) -> None:
    """Trains every student's attention, block by block, on what the teacher's returns; one pass serves them all."""
    taught = {name: lessons(student, teacher) for name, student in students.items()}
    trained = {
        name: [p for lesson in taught[name] for p in student.get_submodule(lesson.attention).parameters()]
        for name, student in students.items()
    }
    optimizers = {name: torch.optim.AdamW(trained[name], rates[name], weight_decay=0.0) for name in students}
    steps = -(-count // batch)
    schedules = [OneCycleLR(optimizers[name], rates[name], total_steps=steps, pct_start=0.1) for name in students]
    side = PATCH * math.isqrt(cast(Any, teacher).patch_embed.num_patches)
    for pixels, _ in images.augmented(count, batch, side, SEED):
        with torch.no_grad(), attention_calls(teacher) as seen:
            teacher(pixels)
        for name, student in students.items():
            optimizers[name].zero_grad()
            for lesson, (tokens, expected) in zip(taught[name], seen, strict=True):
                relative_errors(attended(student, lesson, tokens), expected).mean().backward()
            nn.utils.clip_grad_norm_(trained[name], 1.0)
            optimizers[name].step()
        for schedule in schedules:
            schedule.step()


@contextmanager
def attention_calls(teacher: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What each softmax attention of the teacher reads and returns while it runs, in the order of the blocks."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        block.attn.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
        for block in cast(Any, teacher).blocks
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def compare(
    teacher: nn.Module, students: Mapping[str, nn.Module], batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, dict[str, float]]:
    """Of each student, means over images: `top1`, `same` class as the teacher, and relative `error` of its attention.

    Every block's attention gets what the teacher's reads. The teacher itself is "softmax".
    """
    taught = {name: lessons(student, teacher) for name, student in students.items()}
    results: dict[str, dict[str, list[Tensor]]] = {
        name: {"top1": [], "same": [], "error": []} for name in ("softmax", *students)
    }
    for inputs, classes in batches:
        with attention_calls(teacher) as seen:
            expected = teacher(inputs).argmax(-1)
        for name, student in {"softmax": teacher, **students}.items():
            answer = expected if student is teacher else student(inputs).argmax(-1)
            results[name]["top1"].append(answer == classes)
            results[name]["same"].append(answer == expected)
            results[name]["error"] += [
                relative_errors(attended(student, lesson, tokens), output)
                for lesson, (tokens, output) in zip(taught.get(name, ()), seen, strict=False)
            ] or [torch.zeros(1)]
    return {
        name: {measure: torch.cat(values).float().mean().item() for measure, values in lists.items()}
        for name, lists in results.items()
    }


def attended(student: nn.Module, lesson: Lesson, tokens: Tensor) -> Tensor:
    """What the student's attention makes of tokens (batch, 1 + side², channels)."""
    layer, side = student.get_submodule(lesson.layer), math.isqrt(tokens.shape[1] - 1)
    return cast(Tensor, type(layer).forward(layer, tokens, [side, side]))


@torch.no_grad()
def look_inside(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, float]:
    """Means over layers, heads and images: ranks of the operator's output, and `entropy` of rows of scores over its
    largest possible value."""
    looked: dict[str, list[Tensor]] = {"entropy": [], "rank": [], "effective": []}

    def look(probe: Probe) -> None:
        length = probe.operands.key.shape[-2]
        rows = score_rows(probe.operands, evenly(length, ROWS_OF_SCORES))
        looked["entropy"].append(entropy(rows).mean() / math.log(length))
        ranks = rank_measures(probe.features[MIXED][:, :, probe.num_prefix :])
        looked["rank"].append(ranks["rank_1e-2"].mean())
        looked["effective"].append(ranks["effective"].mean())

    for images in batches:
        visit(model, images, look)
    return {name: torch.stack(values).double().mean().item() for name, values in looked.items()}


@dataclass(frozen=True)
class Start:
    """What a student begins with: its attention's tensors, aligned at `aligned` tokens by this rate."""

    aligned: int = 0
    rate: float = 0.0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def run(call: Call) -> None:
    """As a row of the table of evidence, on a CPU: 1,024 and 4,096 tokens."""
    if shutil.which("c++"):
        linvit.kernels.cpu.build()
    study(Images.of(call.cifar, "cpu"), ROOT / "runs" / "evidence" / "long", LEDGER, tuple(SIDES)[:2])
    write_page()


def study(images: Images, folder: Path, ledger: Path, lengths: Sequence[int], sizes: Sizes = Sizes()) -> None:
    """Teaches, then aligns and measures at each length; what is in the folder or the ledger is not repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.float() for key, value in load_file(EVIDENCE / "teachers" / "vit.safetensors").items()}
    for tokens, count in zip((256, 1024), sizes.taught, strict=True):
        weights = kept(folder / f"teacher_{tokens}.safetensors", partial(teach, images, weights, tokens, count))
    starts = {name: Start() for name in STUDENTS}
    for tokens, read, tested in zip(lengths, sizes.aligned, sizes.tested, strict=False):
        teacher = started(tokens, weights).to(images.mean.device).eval()
        note = partial(measured, ledger, teacher, images, tokens, tested)
        if starts["linear"].aligned:
            note({name: create_student(teacher, name, start.tensors) for name, start in starts.items()}, starts)
        starts = aligned(teacher, images, tokens, read, starts, folder)
        note({name: create_student(teacher, name, start.tensors) for name, start in starts.items()}, starts)


def aligned(
    teacher: nn.Module, images: Images, tokens: int, read: int, starts: Mapping[str, Start], folder: Path
) -> dict[str, Start]:
    """Each student after alignment on `read` images at the rate that is best on images that it has not read."""
    side, batch = SIDES[tokens], max(1, 16 * 1024 // tokens)
    rates = CONTINUED_RATES if starts["linear"].aligned else RATES
    trials = {f"{name}|{rate}": (name, rate) for name in starts for rate in rates}

    def train() -> dict[str, Tensor]:
        students = {trial: create_student(teacher, name, starts[name].tensors) for trial, (name, _) in trials.items()}
        align(teacher, students, {trial: rate for trial, (_, rate) in trials.items()}, images, read, batch)
        return {
            f"{trial}|{key}": value.cpu().contiguous()
            for trial, student in students.items()
            for key, value in student.state_dict().items()
            if ".attn." in key
        }

    stored = kept(folder / f"aligned_{tokens}.safetensors", train)
    tensors = {
        trial: {key.removeprefix(f"{trial}|"): value for key, value in stored.items() if key.startswith(f"{trial}|")}
        for trial in trials
    }
    unread = images.order(SEED)[-max(2, 128 * 1024 // tokens) :]
    students = {trial: create_student(teacher, name, tensors[trial]) for trial, (name, _) in trials.items()}
    pixels, classes = (values[unread] for values in images.train)
    batches = images.batches(pixels, classes, side, batch)
    errors = {trial: results["error"] for trial, results in compare(teacher, students, batches).items()}
    best = {name: min((t for t in trials if trials[t][0] == name), key=errors.__getitem__) for name in starts}
    for trial, (name, rate) in trials.items():
        print(f"{tokens:,} tokens, {name}, rate {rate:g}: error {errors[trial]:.4f} on images not read", flush=True)
    return {name: Start(tokens, trials[trial][1], tensors[trial]) for name, trial in best.items()}


def measured(
    ledger: Path,
    teacher: nn.Module,
    images: Images,
    tokens: int,
    tested: int,
    students: Mapping[str, nn.Module],
    starts: Mapping[str, Start],
) -> None:
    """Adds a line for the teacher and each student to the ledger: its means over the first `tested` test images."""
    length = starts["linear"].aligned
    if any(row["tokens"] == tokens and row["aligned"] == length for row in rows_of(ledger)):
        return
    side, begin = SIDES[tokens], time.perf_counter()
    pixels, classes = (values[:tested] for values in images.test)
    results = compare(teacher, students, images.batches(pixels, classes, side, max(1, 16 * 1024 // tokens)))
    shown = [images.read(image[None], side) for image in pixels[: max(2, 16 * 1024 // tokens)]]
    where = torch.cuda.get_device_name() if images.mean.is_cuda else processor()
    with ledger.open("a") as lines:
        for name, model in {"softmax": teacher, **students}.items():
            rate = starts[name].rate if name in starts else 0.0
            about = {"tokens": tokens, "aligned": length, "network": name, "rate": rate, "seed": SEED}
            line = {**about, **results[name], **look_inside(model, shown), "images": tested, "machine": where}
            print(json.dumps(line), flush=True)
            lines.write(json.dumps({**line, "torch": torch.__version__, "commit": commit()}) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


def kept(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a file, made first if it is not there."""
    if not path.exists():
        save_file(make(), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    return load_file(path)


def rows_of(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


COLUMNS = {
    "top1": ("top-1, %", 100, 1),
    "same": ("class of the teacher, %", 100, 1),
    "error": ("relative error of attention", 1, 3),
    "effective": ("effective rank of output", 1, 1),
    "entropy": ("entropy of scores, share", 1, 3),
}
NOT_RUN = "Not run yet."


def write_page(ledger: Path = LEDGER) -> None:
    """Fills the table and the figure of docs/evidence/long.md from the ledger."""
    page, rows = EVIDENCE / "long.md", rows_of(ledger)
    text = NOT_RUN
    if rows:
        write_text(EVIDENCE / "long.svg", svg(over_tokens(rows)))
        shown = "![Accuracy, error, rank and entropy over tokens](long.svg)"
        text = "\n\n".join((shown, markdown_rows(cells(rows), left=3), caption(rows)))
    replace_between_marks(page, text, *marks("long"))


def cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each network at each length, before and after it was aligned there."""
    return [
        {
            "tokens": f"{row['tokens']:,}",
            "aligned at": f"{row['aligned']:,}" if row["network"] in STUDENTS else "–",
            "network": row["network"],
            **{head: f"{row[key] * factor:.{digits}f}" for key, (head, factor, digits) in COLUMNS.items()},
        }
        for row in rows
        if row["network"] in STUDENTS or row["aligned"] == row["tokens"]
    ]


def caption(rows: Sequence[Mapping[str, Any]]) -> str:
    tested = ", ".join(dict.fromkeys(f"{row['images']:,} at {row['tokens']:,} tokens" for row in rows))
    about = (", ".join(sorted({str(row[key]) for row in rows})) for key in ("seed", "machine", "torch"))
    commits = ", ".join(sorted({short_commit(row["commit"]) for row in rows}))
    return "*Test images: {}; seed {}; {}; torch {}; commits {}.*".format(tested, *about, commits)


def over_tokens(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each measure; a network aligned at every length is a line, one aligned at a shorter length a ring."""
    figure, panels = panel_grid(len(COLUMNS), 3, 2.2)
    colours = colours_of(["softmax", *STUDENTS])
    for axes, (key, (head, factor, _)) in zip(panels, COLUMNS.items(), strict=True):
        for name, colour in colours.items():
            mine = [row for row in rows if row["network"] == name]
            here = [row for row in mine if row["aligned"] == row["tokens"]]
            axes.plot(
                [row["tokens"] for row in here],
                [row[key] * factor for row in here],
                "s--" if "blocks" in name else "o-",
                color=colour,
                label=name,
                markersize=4,
            )
            shorter = [row for row in mine if row not in here and name in STUDENTS]
            axes.plot(
                [row["tokens"] for row in shorter],
                [row[key] * factor for row in shorter],
                "o",
                color=colour,
                fillstyle="none",
                markersize=6,
            )
        axes.set_xscale("log", base=2)
        lengths = sorted({row["tokens"] for row in rows})
        axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        axes.set_title(head)
        axes.set_xlabel("tokens")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
