"""The Hugging Face hub: names and accounts are checked, and a folder is uploaded."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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

from linvit.errors import SettingError
from linvit.files import reason_of

LOG_IN = "create a token that may write at https://huggingface.co/settings/tokens, and log in with `hf auth login`"


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
    """Raises the errors of the hub's client as sentences."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise ValueError(f"You are not logged in to the Hugging Face hub: {LOG_IN}.{kept}") from error
    except OfflineModeIsEnabled as error:
        raise ConnectionError(f"HF_HUB_OFFLINE forbids every connection to the hub: unset it.{kept}") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status == 401:
            raise ValueError(f"The Hugging Face hub does not accept your token: {LOG_IN}.{kept}") from error
        if status == 403:
            raise ValueError(f"Your token may not write to {repository}: {LOG_IN}.{kept}") from error
        raise ConnectionError(
            f"The Hugging Face hub refused {repository} ({reason_of(error)}): try again later.{kept}"
        ) from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(
            f"The Hugging Face hub cannot be reached ({reason_of(error)}): connect this machine to the internet, or"
            f" only write the folder with `dry_run=True`.{kept}"
        ) from error
