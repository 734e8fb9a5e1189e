"""Files of the four benchmarks with a few items each, in the formats in which they are published."""

import bz2
import json
from pathlib import Path

LAMBADA = [{"text": "He put the cat in the hat"}, {"text": 'One two\n\nthree "four.'}, {"text": "a b"}]
PIQA = [{"goal": f"goal {n}", "sol1": f"do {n}", "sol2": f"do not do {n}"} for n in range(3)]
PIQA_LABELS = [0, 1, 1]
HELLASWAG = [
    {
        "activity_label": "Jumping",
        "ctx_a": "A man stands. He looks.",
        "ctx_b": "the man",
        "endings": ["jumps.", "is a bird.", "eats a roof.", "sits on the sea."],
        "label": 0,
    },
    {
        "activity_label": "Health",
        "ctx_a": "How to sleep. Go to bed.",
        "ctx_b": "",
        "endings": ["Rest.", "Run.", "Shout.", "Jump."],
        "label": 2,
    },
]
WINOGRANDE = [
    {"sentence": "Ann thanked Eve because _ had helped.", "option1": "Ann", "option2": "Eve", "answer": "2"},
    {"sentence": "The cup is not in the box as the _ is big.", "option1": "cup", "option2": "box", "answer": "1"},
]


def write_json_lines(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_hellaswag_text(path: Path) -> Path:
    """Six lines per item, packed if the name ends in .bz2."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for item in HELLASWAG:
        context = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b']}".strip()
        lines += [context, str(item["label"]), *item["endings"]]
    text = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(bz2.compress(text) if path.suffix == ".bz2" else text)
    return path


def write_arrow(folder: Path, rows: list) -> Path:
    """folder/validation/data-00000-of-00001.arrow, as datasets saves it."""
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(folder / "validation")
    return next((folder / "validation").glob("*.arrow"))


def write_benchmarks(folder: Path) -> Path:
    """All four."""
    write_json_lines(folder / "lambada_test.jsonl", LAMBADA)
    write_json_lines(folder / "piqa" / "valid.jsonl", PIQA)
    (folder / "piqa" / "valid-labels.lst").write_text("".join(f"{label}\n" for label in PIQA_LABELS))
    write_json_lines(folder / "piqa" / "tests.jsonl", PIQA)
    write_hellaswag_text(folder / "hellaswag_val_full.txt.bz2")
    write_arrow(folder / "winogrande" / "winogrande_xl", WINOGRANDE)
    return folder
