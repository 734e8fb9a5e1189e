"""Every mistake of tests/mutants can still be made; `make mutants` makes them."""

import importlib.util
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "mutants"


def test_every_mistake_has_its_place_and_its_tests():
    spec = importlib.util.spec_from_file_location("mutants_run", FOLDER / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    faults = []
    for name, mutant in yaml.safe_load((FOLDER / "mutants.yaml").read_text(encoding="utf-8")).items():
        try:
            path, _ = run.mutated(ROOT, mutant)
            if path != ROOT / mutant["file"]:
                faults.append(f"{name}: its text is in {path}")
        except ValueError as error:
            faults.append(f"{name}: {error}")
        for test in mutant["tests"]:
            file, _, function = test.partition("::")
            if not (ROOT / file).exists() or (function and f"def {function}(" not in (ROOT / file).read_text()):
                faults.append(f"{name}: there is no {test}")
    assert faults == []
