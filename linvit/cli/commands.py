"""The commands by name: arguments, what runs, and what it is for."""

from linvit.cli import bench_commands as benches
from linvit.cli import run_commands as runs
from linvit.cli import study_commands as studies

COMMANDS = {
    "train": (
        runs.train_arguments,
        runs.run_train,
        "Train what a recipe says, into a folder; stop and go on at any time.",
    ),
    "eval": (
        runs.eval_arguments,
        runs.run_eval,
        "Measure accuracy, AP, mIoU or word error rate of a run, every sample once.",
    ),
    "predict": (
        runs.predict_arguments,
        runs.run_predict,
        "Name the classes of image files, draw their objects or regions, or write what is said.",
    ),
    "generate": (
        runs.generate_arguments,
        runs.run_generate,
        "Let a language model write on, or an image generator draw.",
    ),
    "analyze": (
        studies.analyze_arguments,
        studies.run_analyze,
        "Measure ranks, scores and magnitudes inside a network's attention.",
    ),
    "bench": (
        benches.bench_arguments,
        benches.run_bench,
        "Time operator, networks and training steps next to named peers, after a check of every result.",
    ),
    "convert": (runs.convert_arguments, runs.run_convert, "Turn released weights into a file that timm reads."),
    "demo": (
        studies.demo_arguments,
        studies.run_demo,
        "Train four small networks on real digits and write a page to look at.",
    ),
    "study": (
        studies.study_arguments,
        studies.run_study,
        "Train every mechanism over seeds, compare them, and test the papers' claims.",
    ),
    "compare": (
        studies.compare_arguments,
        studies.run_compare,
        "Train recipes over seeds, side by side, with intervals.",
    ),
    "data": (
        studies.data_arguments,
        studies.run_data,
        "Make scenes of digits or spoken digits, or check detection and segmentation data.",
    ),
    "models": (studies.models_arguments, studies.run_models, "List the models with size, cost and published accuracy."),
}
