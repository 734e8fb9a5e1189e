"""A folder of recipes that train in a second, as a study or comparison has them."""

import yaml

BASE = {
    "model": {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "optimizer": {"lr": 1e-3},
    "data": {"name": "digits", "size": 32, "batch_size": 16, "held_out": 0.95},
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "limit_val_batches": 2},
}


def write_recipes(folder, epochs=1, lr=1e-3, names=("softmax", "linear")):
    folder.mkdir(exist_ok=True)
    values = {**BASE, "trainer": {**BASE["trainer"], "max_epochs": epochs}, "optimizer": {"lr": lr}}
    (folder / "base.yaml").write_text(yaml.safe_dump(values))
    for name in names:
        (folder / f"{name}.yaml").write_text(f"base: base.yaml\nmodel: {{name: deit_tiny_{name}}}\n")
    return folder
