"""What goes into a wheel beside the packages."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the build's hook needs it")
spec = importlib.util.spec_from_file_location("hatch_build", Path(__file__).parents[1] / "hatch_build.py")
hatch_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hatch_build)


def included(root, version="standard"):
    data = {"force_include": {}}
    hatch_build.Built(str(root), {}, None, None, "", "wheel").initialize(version, data)
    return data["force_include"]


@pytest.fixture
def built(tmp_path):
    for name in hatch_build.EXPLORER:
        path = tmp_path / "build" / "explorer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path


def test_a_built_explorer_goes_into_every_wheel(built, monkeypatch):
    monkeypatch.delenv("LINVIT_PREBUILT", raising=False)
    assert included(built) == {str(built / "build" / "explorer"): "linvit/explorer/built"}
    assert included(built, "editable") == {}
    monkeypatch.setenv("LINVIT_RELEASE", "1")
    assert len(included(built)) == 1


@pytest.mark.parametrize("name", hatch_build.EXPLORER)
def test_a_released_wheel_is_not_built_without_the_explorer_and_its_licences(built, monkeypatch, name):
    monkeypatch.delenv("LINVIT_PREBUILT", raising=False)
    (built / "build" / "explorer" / name).unlink()
    assert included(built) == {}
    monkeypatch.setenv("LINVIT_RELEASE", "1")
    with pytest.raises(FileNotFoundError, match=f"lacks {name}: run `make explorer`"):
        included(built)
