"""A folder as on the Hugging Face hub: timm's config.json and weights, with model card, recipe and curves."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from timm.models._hub import save_config_for_hf

from linvit.files import replacing, write_csv, write_json, write_text
from linvit.released import write_weights
from linvit.runs.folder import METRICS, RECIPE
from linvit.runs.model_card import creation
from linvit.runs.weight_file import Origin, card, header
from linvit.runs.yaml_text import dump_yaml

CARD, HUB_CONFIG, HUB_WEIGHTS = "README.md", "config.json", "model.safetensors"
STUB = Path(__file__).with_name("modeling_linvit.py")
CLASSES = {
    "AutoModel": "TimmWrapperModel",
    "AutoModelForImageClassification": "TimmWrapperForImageClassification",
}
GREY = """
The network reads grey images: give the image processor `image.convert("L")`. Pipelines of transformers convert every
image to RGB, which the network refuses."""


def write_hub_folder(origin: Origin, folder: Path, repository: str) -> dict[str, int]:
    """Writes the files of a network to a folder, existing ones are replaced, and returns their sizes in bytes by name.

    repository: the name on the hub, for the model card.
    """
    write_weights(origin.weights, folder / HUB_WEIGHTS, header(origin))
    write_json(folder / HUB_CONFIG, _config(origin), indent=2)
    write_text(folder / RECIPE, dump_yaml(origin.recipe))
    with replacing(folder / STUB.name) as temporary:
        shutil.copyfile(STUB, temporary)
    names = [CARD, HUB_CONFIG, HUB_WEIGHTS, RECIPE, STUB.name]
    if origin.run.history:
        write_csv(folder / METRICS, origin.run.history)
        names.append(METRICS)
    write_text(folder / CARD, card(origin, repository, _use(origin, repository)))
    return {name: (folder / name).stat().st_size for name in names}


def _config(origin: Origin) -> dict[str, Any]:
    """timm's configuration of the network and its preprocessing, and the classes of the stub."""
    run, about = origin.run, origin.run.preprocessing
    preprocessing = {name: getattr(about, name) for name in ("mean", "std", "interpolation", "crop_pct")}
    known = {"label_names": run.class_names, "license": origin.license or "", "tag": ""}
    more = {
        "label_names": run.class_names,
        "auto_map": {auto: f"{STUB.stem}.{name}" for auto, name in CLASSES.items()},
        "pretrained_cfg": known,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / HUB_CONFIG
        preprocessing |= {"input_size": (about.channels, *about.size)}
        save_config_for_hf(run.network, str(path), model_config=more, data_config=preprocessing)
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # transformers 5.23 passes it twice; timm reads it from the level above
    config.get("model_args", {}).pop("num_classes", None)
    return config


def _use(origin: Origin, repository: str) -> str:
    theirs = f"""```python
from transformers import AutoImageProcessor, AutoModelForImageClassification

processor = AutoImageProcessor.from_pretrained("{repository}")
model = AutoModelForImageClassification.from_pretrained("{repository}", trust_remote_code=True).eval()
```"""
    return f"""{creation(f"hf-hub:{repository}", pretrained=True)}

With transformers; `trust_remote_code=True` runs `{STUB.name}`, which only imports linvit, so that has to be installed:

{theirs}
{GREY if origin.run.preprocessing.channels == 1 else ""}"""
