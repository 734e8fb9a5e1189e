"""A file of finished runs, kept under version control: another machine goes on where the last one stopped."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from linvit import environment
from linvit.errors import SettingError
from linvit.files import user_path, write_text

OF_THE_MACHINE = {  # settings that may differ
    "data": {"root", "cache", "num_workers"},
    "task": {"compile", "cpp"},
    "trainer": {"accelerator"},
}


class Ledger:
    """The finished runs of a comparison or study, one JSON line each: run, settings, commit, machine, result.

    path: the file, which need not exist yet. settings: a digest of all values of the run's recipe but its folder and
    OF_THE_MACHINE. What decides a result beside the recipe's name can be read too: lr, clip (the largest norm of the
    gradients, or null), kernel ("cpp" or the operator's own choice, "auto"), processor, machine.

    Raises ValueError, naming the line, for a file that is not a ledger.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = user_path(path)
        self._rows: dict[str, dict[str, Any]] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                row["settings"], row["result"]["measures"]
                self._rows[row["run"]] = row
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{self.path}, line {number} is not a finished run: correct or remove the line."
                ) from error

    def result(self, run: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a finished run, None if it is not there.

        Raises ValueError if it was trained with other settings.
        """
        row = self._rows.get(run)
        if row is None:
            return None
        if row["settings"] != digest(values):
            raise SettingError(
                f"{self.path} has the run {run!r} with other settings: remove its line to train again, or choose"
                " another `ledger`."
            )
        result: dict[str, Any] = row["result"]
        return result

    def origins(self, runs: Iterable[str]) -> dict[str, list[str]]:
        """Where these finished runs were trained: `commits`, `machines` and versions of `torch`, each once, sorted."""
        rows = [self._rows[run] for run in runs]
        return {
            "commits": sorted({row.get("commit") or "unknown" for row in rows}),
            "machines": sorted({", ".join(row["machine"]) for row in rows}),
            "torch": sorted({row["torch"] for row in rows}),
        }

    def add(self, run: str, values: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Adds a finished run and writes the file, runs in alphabetical order."""
        machine = environment.describe(1, 1)
        optimizer, task, trainer = (values.get(group, {}) for group in ("optimizer", "task", "trainer"))
        self._rows[run] = {
            "run": run,
            "settings": digest(values),
            "lr": optimizer.get("lr"),
            "clip": trainer.get("gradient_clip_val"),
            "kernel": "cpp" if task.get("cpp") else "auto",
            "processor": environment.processor(),
            "commit": machine["commit"],
            "machine": machine["devices"],
            "torch": machine["packages"]["torch"],
            "result": dict(result),
        }
        lines = [json.dumps(self._rows[name]) for name in sorted(self._rows)]
        write_text(self.path, "\n".join([*lines, ""]))


def digest(values: Mapping[str, Any]) -> str:
    """A hash of a recipe's values that is the same on every machine."""
    content = {**values, "folder": ""}
    for name, free in OF_THE_MACHINE.items():
        given = content.pop(name, {})
        kept = {key: value for key, value in given.items() if key not in free} if isinstance(given, Mapping) else given
        if kept:  # a group with nothing else is as good as none
            content[name] = kept
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
