"""The table of evidence: every study, comparison, benchmark and file behind our pages, in groups that run in turn."""

from pathlib import Path
from typing import Any

from evidence import hub_kernel, long_sequences, minilm, ocr
from evidence.bench.parts import COMPILED, DEPLOYED, ON_GPU, PARTS, measured
from evidence.design import Stage
from evidence.designs import DESIGNS, REFEREE
from evidence.gpu import cifar
from evidence.gpu.data import PACKS, Pack
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


def _cifar10_images(call: Call) -> None:
    """Images of the first seed of each mechanism that has been trained here."""
    for name in CIFAR10.names:
        run = Path("runs/evidence/cifar10") / name / "seed0"
        if run.is_dir():
            run_linvit(f"generate {run} --guidance 2 --count 10 --output docs/evidence/cifar10_{name}.png", call)


# From softmax to linear attention.

SWAPPED = "model.mechanism=linear,rala,mala,inline,polaformer"
REPLACED = "model.mechanism=linear,rala,mala,inline"
KEPT = "model.pattern=LLLLLL,LLLLLS,LLLLSS,LLLSSS,SLLLLL,SSLLLL,SSSLLL"
COPIES = " ".join(
    f"{copied}_{learned}"
    for copied in ("nothing", "attention", "mlp", "all")
    for learned in ("none", "outputs", "maps")
)


def student(name: str, recipes: str, over: str, ledger: str = "", settings: str = "", **options: Any) -> Comparison:
    """A comparison of linear students; the folder of their recipes is in its recipes' names."""
    options = {"page": "linearize", **options}
    return compared(name, "evidence/linearize/{}", recipes, settings, over=over, ledger=ledger, **options)


def step(name: str, recipes: str, over: str, settings: str = "", **options: Any) -> Comparison:
    """Students whose weights later ones start from; a ledger has no weights, so `--again` trains them once more."""
    options = {"weights": True, "also": "top1", "task": "students", "score": "error", **options}
    return student(name, recipes, over, settings=settings, **options)


def copies(name: str, recipes: str) -> Comparison:
    """Not with seed 0, the teacher's: with it new weights are those from which the teacher's were trained."""
    paths = " ".join(f"copies/{recipe}" for recipe in recipes.split())
    return student(name, paths, REPLACED, "" if name == "linearize_copies" else "linearize_copies", first_seed=1)


LINEARIZE: tuple[Row, ...] = (
    step("linearize_align", "vit/align", SWAPPED, seeds=4),
    step("linearize_transfer", "vit/transfer", SWAPPED),
    student("linearize_tune", "vit/new vit/copied vit/tune", SWAPPED),
    student("linearize_tuned", "vit/tune", SWAPPED, "linearize_tune"),
    student("linearize_steps", "vit/copied vit/tune", SWAPPED, "linearize_tune"),
    step("linearize_pyramid_align", "pyramid/align", REPLACED),
    step("linearize_pyramid_transfer", "pyramid/transfer", REPLACED),
    student("linearize_pyramid_tune", "pyramid/new pyramid/copied pyramid/tune", REPLACED),
    student("linearize_pyramid_tuned", "pyramid/tune", REPLACED, "linearize_pyramid_tune"),
    student("linearize_pyramid_steps", "pyramid/copied pyramid/tune", REPLACED, "linearize_pyramid_tune"),
    step(
        "linearize_copies_align",
        "copies/align_outputs_new copies/align_maps_copied copies/align_maps_new",
        REPLACED,
        first_seed=1,
        counted=False,
    ),
    copies("linearize_copies", COPIES),
    copies("linearize_attention", "mlp_none all_none"),
    copies("linearize_attention_outputs", "mlp_outputs all_outputs"),
    copies("linearize_learned", "all_none all_outputs all_maps"),
    copies("linearize_maps", "all_outputs all_maps"),
    step("linearize_hybrid_align", "vit/align", KEPT, "model.mechanism=mala"),
    student("linearize_hybrid", "vit/hybrid", KEPT, settings="model.mechanism=mala"),
)


def plan(network: str, size: int) -> Commands:
    """Which blocks may become linear; its times need a quiet machine."""
    name = f"linearize_plan_{network}"
    line = (
        f"linearize recipes/evidence/linearize/{network}/align.yaml --plan --size {size} --output runs/evidence/{name}"
    )
    settings = f"--set model.mechanism=mala folder=runs/evidence/linearize_planned_{network}"
    return Commands(name, (f"{line} --write docs/evidence/linearize.md {settings}",))


# Short runs before the evidence, never on the data that it is measured on.
# Learning rates were chosen with one seed, numbers of seeds by the pilots. Those of three studies had no ledger yet.

HELD_OUT = "data.held_out=0.1"
ON_CIFAR = f"trainer.max_epochs=2 {HELD_OUT} {LAST_EPOCH}=2"
ON_IMAGENETTE = f"data.root=data/imagenette-80/train trainer.max_epochs=4 {HELD_OUT} {LAST_EPOCH}=4"
LOW, HIGH = "5e-4,1e-3,2e-3,4e-3", "1e-3,2e-3,4e-3,8e-3"
HIGHEST, BOOK_RATES = f"{HIGH},16e-3,32e-3", "4e-3,8e-3,16e-3"
ALIGN_RATES = "1e-3,3e-3,1e-2,3e-2,1e-1"


def short(name: str, recipes: str, settings: str, **options: Any) -> Comparison:
    """A comparison on no page, in a folder such as runs/pilot/vit."""
    network = name.rpartition("-")[2]
    options = {"page": "", "folder": name.replace("-", "/"), "here": False, **options}
    return compared(name, f"evidence/{network}/{{}}", recipes, settings, **options)


def rates(of: Comparison, values: str, settings: str) -> Comparison:
    """The recipes of a comparison at each of these learning rates, with one seed."""
    rate = f"optimizer.lr={values}"
    return Comparison(f"rates-{of.name.partition('_')[0]}", of.recipes, rate, tuple(settings.split()), seeds=1)


def student_rates(mechanism: str) -> tuple[Comparison, ...]:
    """The rates of the copies, and of their alignments."""
    setting, name = f"model.mechanism={mechanism} {HELD_OUT}", "linearize_rates{}_" + mechanism
    starts = "copies/nothing_none copies/attention_none copies/mlp_none copies/all_none"
    epochs = f"{setting} trainer.max_epochs=2 {LAST_EPOCH}=2"
    return (
        student(name.format(""), starts, f"optimizer.lr={LOW}", settings=epochs, seeds=1),
        step(name.format("_align"), "vit/align", f"optimizer.lr={ALIGN_RATES}", setting, seeds=1, weights=False),
        step(
            name.format("_maps"),
            "copies/align_maps_copied",
            f"optimizer.lr={ALIGN_RATES},3e-1",
            setting,
            seeds=1,
            weights=False,
        ),
    )


OF_VIT = (
    "softmax softmax_gated softmax_unit_query linear rala mala rala_mala focused inline hydra efficient linear_angular"
    " enhanced agent mlla"
)
RATES: tuple[Row, ...] = (
    short("rates-vit", OF_VIT, ON_CIFAR, seeds=1, over=f"optimizer.lr={HIGH}"),
    short(
        "rates-pyramid",
        "softmax linear rala mala rala_mala inline efficient",
        ON_IMAGENETTE,
        seeds=1,
        over=f"optimizer.lr=5e-4,{HIGH}",
    ),
    short("rates-care", "care", ON_IMAGENETTE, seeds=1, over=f"optimizer.lr={HIGHEST}"),
    rates(DENSE[0], LOW, f"trainer.max_epochs=5 {LAST_EPOCH}=5"),  # UperNet takes those of Semantic FPN
    rates(DENSE[2], LOW, f"trainer.max_epochs=7 {LAST_EPOCH}=7"),  # Mask R-CNN those of RetinaNet
    rates(AN4, HIGH, f"{HELD_OUT} trainer.max_epochs=15 {LAST_EPOCH}=15"),
    rates(
        BOOKS,
        BOOK_RATES,
        f"data.split=1 data.val_rows=1200 trainer.max_epochs=1 trainer.limit_train_batches=1000 {LAST_EPOCH}=1",
    ),
    rates(CIFAR10, HIGHEST, f"{HELD_OUT} task.generates=false trainer.max_epochs=2 {LAST_EPOCH}=2"),
)
PILOTS: tuple[Row, ...] = (
    short("pilot-vit", IN_ALL, f"optimizer.lr=2e-3 {ON_CIFAR}"),
    short(
        "pilot-clip-vit",
        IN_ALL,
        f"{ON_CIFAR} task.ema_decay=0.99 task.ema_warmup=true",
        seeds=4,
        over="trainer.gradient_clip_val=null,1.0",
    ),
    short("pilot-pyramid", IN_ALL, f"optimizer.lr=2e-3 {ON_IMAGENETTE}"),
    short("pilot-care", "care care_symmetric care_stacked care_no_memory", f"optimizer.lr=4e-3 {ON_IMAGENETTE}"),
)

# Trainings for GPUs are in `evidence.designs`; the referee's pilot says only that every variant trains.
PILOT_OF_REFEREE = short(
    "pilot-referee",
    " ".join(REFEREE.variants),
    f"{HELD_OUT} trainer.max_epochs=2 trainer.precision=32-true"
    " trainer.limit_train_batches=16 trainer.limit_val_batches=4",
    seeds=1,
    title="The referee's pilot",
)

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


GROUPS: dict[str, tuple[Row | Stage | Pack, ...]] = {
    "papers": PAPERS,
    "dense": DENSE,
    "speech": (AN4,),
    "language": (BOOKS, Function("books_benchmarks", _books_benchmarks)),
    "generation": (CIFAR10, Function("cifar10_images", _cifar10_images)),
    "linearize": LINEARIZE,
    "encoder": (Function("minilm", minilm.run), Function("minilm-times", minilm.measure_times)),
    "recognizer": (Function("ocr", ocr.run), Function("ocr-times", ocr.measure_times)),
    "plans": (plan("vit", 256), plan("pyramid", 512)),
    "long": (Function("long_sequences", long_sequences.run),),
    "rates": RATES,
    "rates-linearize": (*student_rates("linear"), *student_rates("mala")),
    "pilots": PILOTS,
    "data": tuple(PACKS.values()),
    "referee": (Function("cifar", cifar.pack), PILOT_OF_REFEREE, *REFEREE.stages),
    **{name: design.stages for name, design in DESIGNS.items() if design is not REFEREE},
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
        Function("hub-kernel", hub_kernel.run),
    ),
}
ALL = ("papers", "dense", "speech", "language", "generation", "linearize")
"""The groups of `python -m evidence run all`."""
ROWS = {row.name: row for rows in GROUPS.values() for row in rows}


def chosen(names: list[str]) -> list[Row | Stage | Pack]:
    """The rows with these names, or in these groups, in the order of the table."""
    groups = GROUPS | {"all": tuple(row for name in ALL for row in GROUPS[name])}
    rows: list[Row | Stage | Pack] = []
    for name in names:
        if name not in groups and name not in ROWS:
            raise ValueError(f"There is no {name!r} in the table: `python -m evidence list` shows what there is.")
        rows += groups.get(name) or [ROWS[name]]
    return rows
