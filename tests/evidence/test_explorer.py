"""What the built explorer is made of: the networks with their tokens, and files that ask nobody else for anything."""

import json
import re

import pytest
import timm
import torch
from torch.testing import assert_close

from evidence.explorer import LICENCES, NETWORKS, RUNTIME, build, on_pixels
from linvit.analysis.probe import probe
from linvit.explorer.serving import PACKAGE, PAGE
from linvit.models.pyramid import SIZES

SCRIPTS = sorted(PAGE.glob("*.js"))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [(32, 32), (40, 72)])
def test_networks_return_their_logits_and_the_tokens_of_every_layer(name, size):
    pixels = torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8)
    network = timm.create_model(name, pretrained=True).eval()
    config = network.pretrained_cfg
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    images = (pixels / 255 - mean) / std
    with torch.no_grad():
        expected, probes = network(images), probe(network, images)
        logits, *layers = on_pixels(network)(pixels)
    assert_close(logits, expected, rtol=0, atol=1e-5)
    assert len(layers) == len(probes) == sum(SIZES["nano"]["depths"])
    for layer, (query, key, value) in zip(
        layers, ((p.operands.query, p.operands.key, p.operands.value) for p in probes), strict=True
    ):
        assert_close(layer, torch.stack((query, key, value)), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_build_holds_the_page_its_networks_and_the_runtime(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    runtime = tmp_path / "packages" / "onnxruntime-web" / "dist"
    runtime.mkdir(parents=True)
    for name in RUNTIME:
        (runtime / name).write_text(name)
    folder = tmp_path / "explorer"
    folder.mkdir()
    (folder / "old.js").write_text("")
    build(folder, tmp_path / "packages")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    networks = {f"networks/{name}.onnx" for name in NETWORKS} | {"networks/networks.json"}
    page = {path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file()}
    assert names == page | networks | {f"runtime/{name}" for name in (*RUNTIME, *LICENCES)}
    assert "MIT License" in (folder / "runtime" / "LICENSE").read_text()
    assert sum((folder / name).stat().st_size for name in names if not name.startswith("runtime/")) < 5e6
    for facts in json.loads((folder / "networks" / "networks.json").read_text()):
        session = onnxruntime.InferenceSession(folder / "networks" / facts["file"])
        pixels = torch.randint(0, 256, (1, 3, 64, 96), dtype=torch.uint8)
        network = on_pixels(timm.create_model(facts["name"], pretrained=True))
        with torch.no_grad():
            expected = network(pixels)
        for actual, right in zip(session.run(None, {"images": pixels.numpy()}), expected, strict=True):
            assert_close(torch.from_numpy(actual), right, rtol=0, atol=1e-4)
        assert len(facts["classes"]) == expected[0].shape[1]
        for layer, right in zip(facts["layers"], expected[1:], strict=True):
            rows, columns = (side // layer["stride"] for side in (64, 96))
            assert right.shape == (3, 1, layer["heads"], rows * columns, layer["width"])


def test_a_failed_build_keeps_the_earlier_one(tmp_path):
    folder = tmp_path / "explorer"
    folder.mkdir()
    (folder / "index.html").write_text("earlier")
    with pytest.raises(FileNotFoundError, match=r"ort\.wasm\.bundle"):
        build(folder, tmp_path / "packages")
    assert (folder / "index.html").read_text() == "earlier"


def test_the_page_allows_only_its_own_files():
    page = (PAGE / "index.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]+)"', page)[1]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert rules["connect-src"] == rules["style-src"] == rules["worker-src"] == "'self'"
    assert "unsafe-inline" not in policy
    assert not re.search(r"\son\w+=|\sstyle=|<style", page)


def test_no_file_of_the_page_names_another_machine():
    text = "\n".join(path.read_text() for path in (PAGE / "index.html", PAGE / "style.css", *SCRIPTS))
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # a name of SVG, which nobody opens


def test_scripts_set_text_and_never_html():
    html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert [path.name for path in SCRIPTS if re.search(html, path.read_text())] == []


def test_every_element_that_scripts_look_for_is_in_the_page():
    page = (PAGE / "index.html").read_text()
    wanted = {name for path in SCRIPTS for name in re.findall(r'byId\("([\w-]+)"\)', path.read_text())}
    assert len(wanted) > 20
    assert wanted <= set(re.findall(r'\sid="([\w-]+)"', page))


def test_every_control_has_a_label():
    page = (PAGE / "index.html").read_text()
    labelled = "".join(re.findall(r"<label.*?</label\s*>", page, re.DOTALL))
    for control in re.findall(r"<(?:select|input)\s[^>]*>", page):
        assert control in labelled


def test_the_lock_file_pins_hashes_and_names_no_registry():
    lock = json.loads((PACKAGE / "npm" / "package-lock.json").read_text())
    wanted = json.loads((PACKAGE / "npm" / "package.json").read_text())["dependencies"]
    assert list(wanted) == ["onnxruntime-web"]
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert packages["node_modules/onnxruntime-web"]["version"] == wanted["onnxruntime-web"]
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())
