"""The table of evidence: every study, comparison, benchmark and file behind our pages, in groups that run in turn."""

from pathlib import Path
from typing import Any

from evidence import referee
from evidence.bench.parts import COMPILED, DEPLOYED, ON_GPU, PARTS, measured
from evidence.gpu import cifar
from evidence.language_tasks import write_benchmarks
from evidence.rows import EVIDENCE, Bench, Call, Claims, Commands, Comparison, Function, Row, run_linvit

IN_ALL = "softmax linear mala rala"
BODIES = "softmax mala resnet"
BY_CLASS = "sky building pole road pavement tree sign fence car pedestrian cyclist"
LAST_EPOCH = "trainer.check_val_every_n_epoch"


def compared(name: str, pattern: str, recipes: str, settings: str = "", also: str = "", **options: Any) -> Comparison:
    """A comparison of recipes, the baseline first: pattern is their path below `recipes`, with {} for each name."""
    paths = tuple(pattern.format(recipe) for recipe in recipes.split())
    return Comparison(name, paths, settings=tuple(settings.split()), also=tuple(also.split()), **options)


# The papers' claims, and other tasks.

PAPERS: tuple[Row, ...] = (
    Claims("evidence/vit", 6, "cifar"),
    Claims("evidence/vit", 12, "cifar", first_seed=6, settings=("trainer.gradient_clip_val=1.0",)),
    Claims("evidence/pyramid", 8, "imagenette-80"),
    compared("pyramid_llss_rala", "evidence/pyramid/{}", "rala rala_relu", "model.pattern=LLSS"),
    compared("pyramid_llss_mala", "evidence/pyramid/{}", "mala mala_relu", "model.pattern=LLSS"),
    Claims("evidence/care", 10, "imagenette-80"),
)
CAMVID: dict[str, Any] = {
    "settings": f"data.val=test {LAST_EPOCH}=15",
    "also": " ".join(["pixel_accuracy class_accuracy", *(f"iou_{name}" for name in BY_CLASS.split())]),
    "task": "segmentation",
    "score": "miou",
}
DENSE = (
    compared("camvid_fpn", "dense/camvid/semantic_fpn_{}", BODIES, title="CamVid, Semantic FPN", **CAMVID),
    compared("camvid_upernet", "dense/camvid/upernet_{}", BODIES, title="CamVid, UperNet", **CAMVID),
    compared(
        "bccd",
        "dense/bccd/retinanet_{}",
        BODIES,
        f"data.val=test {LAST_EPOCH}=20",
        "box_ap50",
        task="detection",
        score="box_ap",
        title="BCCD, RetinaNet",
    ),
    compared(
        "penn_fudan",
        "dense/penn_fudan/mask_rcnn_{}",
        BODIES,
        f"{LAST_EPOCH}=20",
        "mask_ap50 box_ap box_ap50",
        task="detection",
        score="mask_ap",
        title="Penn-Fudan, Mask R-CNN",
    ),
)
AN4 = compared(
    "an4", "speech/an4_{}", "softmax linear mala", f"{LAST_EPOCH}=60", "wer_lm", task="speech", score="wer", title="AN4"
)
BOOKS = compared(
    "books", "language/books_{}", IN_ALL, also="perplexity", task="language", score="bits_per_byte", title="books"
)
CIFAR10 = compared(
    "cifar10",
    "generation/cifar/{}",
    IN_ALL,
    also="generated_accuracy guided_fid guided_accuracy floor_fid noise_fid classifier_accuracy",
    task="diffusion",
    score="fid",
    title="CIFAR-10, generated",
)


def _books_benchmarks(call: Call) -> None:
    """The first seeds on LAMBADA and the like, whose files are in data/benchmarks."""
    options = BOOKS.options(call)
    ledger, page = EVIDENCE / "books_benchmarks.jsonl", EVIDENCE / "real-images.md"
    write_benchmarks(options["recipes"], options["folder"], "data/benchmarks", ledger, page, print)


# Small studies, which need no data of others.

SMALL: dict[str, Any] = {"page": "", "here": False}
SCENES = "mask_rcnn retinanet cascade_mask_rcnn semantic_fpn upernet"
SPOKEN = ("data/speech/.made", "data make-speech data/speech")  # needs espeak-ng
SMALL_LANGUAGE: tuple[Row, ...] = (
    compared("language_bytes", "language/stdlib_bytes_{}", IN_ALL, folder="language/bytes", **SMALL),
    compared(
        "language_recall",
        "language/memory/recall_{}",
        IN_ALL,
        over="data.pairs=4,8,16,32",
        folder="language/recall",
        **SMALL,
    ),
    compared(
        "language_copy", "language/memory/copy_{}", IN_ALL, over="data.symbols=8,16,32", folder="language/copy", **SMALL
    ),
    Bench("bench-decoding", "decoding", folder="language/decoding"),
)
SMALL_SPEECH: tuple[Row, ...] = (
    Commands("spoken_digits", (), SPOKEN),
    compared("speech_spoken", "speech/spoken_{}", "softmax linear mala", ledger="speech", folder="speech", **SMALL),
)
SMALL_GENERATION: tuple[Row, ...] = (
    compared(
        "generation_digits",
        "generation/digits_{}",
        IN_ALL,
        also="generated_accuracy guided_fid guided_accuracy",
        ledger="generation",
        folder="generation",
        **SMALL,
    ),
    Bench("bench-sampling", "sampling", folder="generation/sampling"),
)
SMALL_OTHERS: tuple[Row, ...] = (
    Claims("study", 5, page="small-studies", here=False),
    Commands(
        "speech_demo",
        (
            "train recipes/speech/spoken_mala.yaml --resume",
            "eval runs/spoken_mala --report",
            "predict runs/spoken_mala data/speech/val/200",
        ),
        SPOKEN,
    ),
    Commands(
        "scenes",
        tuple(
            line
            for name in SCENES.split()
            for line in (f"train recipes/dense/scenes/{name}.yaml --resume", f"eval runs/scenes_{name} --report")
        ),
        ("data/scenes", "data make-scenes data/scenes"),
    ),
)

# Networks that others start from, and those that come with linvit: half an hour each on one core.


def networks(name: str, trained: str, recipe: str, run: str, file: str, settings: str = "") -> Commands:
    """Trains each, resuming, and writes its weights and card; {} stands for its name."""
    lines = (
        line.replace("{}", each)
        for each in trained.split()
        for line in (
            f"train recipes/{recipe}.yaml --resume {settings}",
            f"convert runs/{run}/checkpoints/last.ckpt {file}.safetensors --half --license apache-2.0",
        )
    )
    return Commands(name, tuple(lines))


NETWORKS: tuple[Row, ...] = (
    networks("bodies", "mala softmax resnet", "pretrain/{}", "pretrain_{}", "docs/evidence/bodies/{}"),
    networks("teachers", "vit", "linearize/cifar/teacher", "linearize_teacher", "docs/evidence/teachers/{}"),
    networks(
        "weights",
        "mavit_nano ravlt_nano care_nano",
        "weights/{}_cifar10",
        "{}_cifar10",
        "linvit/models/weights/{}.cifar10",
        "data.root={cifar}",
    ),
)


def _int8(call: Call) -> None:
    """What 8 bits cost the networks that come with weights: half an hour on one quiet core."""
    from evidence.eight_bits import write_bundled

    write_bundled(call.cifar, EVIDENCE / "deployment.md", print)


def _counts(call: Call) -> None:
    """What `linvit models` prints; a test compares it with the code."""
    from evidence.counts import store_networks

    store_networks()


GROUPS: dict[str, tuple[Row | referee.Stage, ...]] = {
    "papers": PAPERS,
    "dense": DENSE,
    "speech": (AN4,),
    "language": (BOOKS, Function("books_benchmarks", _books_benchmarks)),
    "generation": (CIFAR10, Function("cifar10_images", _cifar10_images)),
    "linearize": LINEARIZE,
    "plans": (plan("vit", 256), plan("pyramid", 512)),
    "rates": RATES,
    "rates-linearize": (*student_rates("linear"), *student_rates("mala")),
    "pilots": PILOTS,
    "referee": (Function("cifar", cifar.pack), PILOT_OF_REFEREE, *referee.STAGES),
    "small-language": SMALL_LANGUAGE,
    "small-speech": SMALL_SPEECH,
    "small-generation": SMALL_GENERATION,
    "small": SMALL_OTHERS,
    "networks": NETWORKS,
    "bench": measured(PARTS),
    "bench-deploy": measured(DEPLOYED),
    "bench-compile": measured(COMPILED),
    "bench-gpu": measured(ON_GPU),
    "checks": (
        Bench("bench-precision", "precision", folder="precision"),
        Function("int8", _int8),
        Function("counts", _counts),
    ),
}
ALL = ("papers", "dense", "speech", "language", "generation", "linearize")
"""The groups of `python -m evidence run all`."""
ROWS = {row.name: row for rows in GROUPS.values() for row in rows}


def chosen(names: list[str]) -> list[Row | referee.Stage]:
    """The rows with these names, or in these groups, in the order of the table."""
    groups = GROUPS | {"all": tuple(row for name in ALL for row in GROUPS[name])}
    rows: list[Row | referee.Stage] = []
    for name in names:
        if name not in groups and name not in ROWS:
            raise ValueError(f"There is no {name!r} in the table: `python -m evidence list` shows what there is.")
        rows += groups.get(name) or [ROWS[name]]
    return rows
