"""The Hugging Face hub: a folder as there, with timm's config.json and weights, and its upload."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from timm.models._hub import save_config_for_hf

from linvit.errors import SettingError
from linvit.files import reason_of, replacing, write_csv, write_json, write_text
from linvit.released import write_weights
from linvit.runs.folder import METRICS, RECIPE
from linvit.runs.recipe_values import dump_yaml
from linvit.runs.weight_file import Origin, card, creation, header

CARD, HUB_CONFIG, HUB_WEIGHTS = "README.md", "config.json", "model.safetensors"
STUB = Path(__file__).with_name("modeling_linvit.py")
CLASSES = {
    "AutoModel": "TimmWrapperModel",
    "AutoModelForImageClassification": "TimmWrapperForImageClassification",
}
LOG_IN = "create a token that may write at https://huggingface.co/settings/tokens, and log in with `hf auth login`"
USE = """{timm}

With transformers; `trust_remote_code=True` runs `{stub}`, which only imports linvit, so that has to be installed:

```python
from transformers import AutoImageProcessor, AutoModelForImageClassification

processor = AutoImageProcessor.from_pretrained("{repository}")
model = AutoModelForImageClassification.from_pretrained("{repository}", trust_remote_code=True).eval()
```
{grey}"""
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
    timm = creation(f"hf-hub:{repository}", pretrained=True)
    grey = GREY if origin.run.preprocessing.channels == 1 else ""
    use = USE.format(timm=timm, stub=STUB.name, repository=repository, grey=grey)
    write_text(folder / CARD, card(origin, repository, use))
    return {name: (folder / name).stat().st_size for name in names}


def _config(origin: Origin) -> dict[str, Any]:
    """timm's configuration of the network and its preprocessing, and the classes of the stub."""
    run, about = origin.run, origin.run.preprocessing
    preprocessing = {name: getattr(about, name) for name in ("mean", "std", "interpolation", "crop_pct")}
    entries = {"label_names": run.class_names, "license": origin.license or "", "tag": ""}
    more = {
        "label_names": run.class_names,
        "auto_map": {auto: f"{STUB.stem}.{name}" for auto, name in CLASSES.items()},
        "pretrained_cfg": entries,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / HUB_CONFIG
        preprocessing |= {"input_size": (about.channels, *about.size)}
        save_config_for_hf(run.network, str(path), model_config=more, data_config=preprocessing)
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # transformers 5.23 passes it twice; timm reads it from the level above
    config.get("model_args", {}).pop("num_classes", None)
    return config


@dataclass(frozen=True)
class Pushed:
    """What `push_to_hub` wrote and uploaded.

    files: names in the folder and sizes in bytes; url: the page on the hub, None if nothing was uploaded.
    """

    folder: Path
    files: dict[str, int]
    url: str | None = None


def check_repository(repository: str) -> None:
    """Raises ValueError for a name that is not user/name."""
    try:
        validate_repo_id(repository)
        reason = "" if "/" in repository else "it names no user"
    except HFValidationError as error:
        reason = reason_of(error)
    if reason:
        raise SettingError(f"`repository` is {repository!r} ({reason}), expected user/name: write it so.")


def check_access(repository: str, public: bool) -> None:
    """Raises ValueError unless this account may write to the repository and its visibility is as wanted."""
    owner = repository.partition("/")[0]
    with _explained(repository):
        account = HfApi().whoami()
        names = [account["name"], *(organization["name"] for organization in account.get("orgs", ()))]
        if owner.lower() not in (name.lower() for name in names):
            raise ValueError(
                f"{repository} would belong to {owner}, but you are logged in as {names[0]}: write {names[0]}/…, or log"
                " in with another account."
            )
        try:
            private = bool(HfApi().model_info(repository).private)
        except RepositoryNotFoundError:
            return
    if private == public:
        is_now, advice = ("private", "leave `public` out") if private else ("public", "set `public=True`")
        raise ValueError(f"{repository} exists and is {is_now}: {advice}, or choose another name.")


def upload(folder: Path, files: Iterable[str], repository: str, public: bool = False) -> str:
    """Uploads these files of a folder, and no others, and returns the address of the page."""
    with _explained(repository, f" The files are in {folder}."):
        HfApi().create_repo(repository, private=not public, exist_ok=True)
        HfApi().upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=list(files), commit_message="Upload by linvit"
        )
    return f"{HfApi().endpoint}/{repository}"


@contextlib.contextmanager
def _explained(repository: str, kept: str = "") -> Iterator[None]:
    """Raises the errors of the hub's client as sentences: ValueError if a token helps, otherwise ConnectionError."""
    try:
        yield
    except (HTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, LocalTokenNotFoundError):
            sentence = f"You are not logged in to the Hugging Face hub: {LOG_IN}."
        elif status == 401:
            sentence = f"The Hugging Face hub does not accept your token: {LOG_IN}."
        elif status == 403:
            sentence = f"Your token may not write to {repository}: {LOG_IN}."
        elif isinstance(error, OfflineModeIsEnabled):
            sentence = "HF_HUB_OFFLINE forbids every connection to the hub: unset it."
        elif isinstance(error, HfHubHTTPError):
            sentence = f"The Hugging Face hub refused {repository} ({reason_of(error)}): try again later."
        else:
            sentence = (
                f"The Hugging Face hub cannot be reached ({reason_of(error)}): connect this machine to the internet, or"
                " only write the folder with `dry_run=True`."
            )
        raise (ValueError if LOG_IN in sentence else ConnectionError)(sentence + kept) from error
