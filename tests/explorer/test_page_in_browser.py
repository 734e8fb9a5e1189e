"""The built page in headless Chromium: networks, scores, keyboard, pointer, files, and what leaves the machine."""

import re
import shutil
from dataclasses import replace

import pytest
import timm
import torch
from browser import CHROMIUM, DRIVER, Browser
from PIL import Image
from torch.testing import assert_close

from evidence.explorer import NETWORKS, on_pixels
from linvit.analysis.probe import probe
from linvit.explorer import serving
from linvit.layers.mechanisms import MECHANISMS

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no Chromium with chromedriver here"),
    pytest.mark.skipif(
        not (serving.BUILT / "runtime").is_dir(), reason="the explorer is not built here: run make explorer"
    ),
]
SHOWN = ("softmax", "linear", "rala", "mala")
READY = "document.querySelector('main')?.getAttribute('aria-busy') === 'false'"
CHOOSE = """
    const select = document.getElementById(given[0]);
    if (select.type === "checkbox") select.checked = given[1]; else select.value = given[1];
    select.dispatchEvent(new Event("input", {bubbles: true}));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page of this checkout with the networks and the runtime of the last build."""
    folder = shutil.copytree(serving.PAGE, tmp_path_factory.mktemp("explorer") / "page")
    for name in ("networks", "runtime"):
        shutil.copytree(serving.BUILT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    with serving.Explorer(folder, 0) as explorer:
        yield explorer.address


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser, served):
    browser.resize(1280, 800)
    browser.requests(), browser.complaints()
    browser.open(served)
    browser.wait(READY)
    return browser


def label(page, mechanism):
    return page.script("return document.querySelector(given[0]).getAttribute('aria-label')", canvas(mechanism))


def canvas(mechanism):
    return f'figure[data-mechanism="{mechanism}"] canvas'


def place(page):
    return page.text("#place").split(".")[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compute_in_the_page_what_pytorch_computes(page, name):
    size = 64
    pixels = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8)
    with torch.no_grad():
        logits, *layers = on_pixels(timm.create_model(name, pretrained=True))(pixels)
    program = """
        const {networks, run} = await import(given[0] + "network.js");
        const network = (await networks()).find(({name}) => name === given[1]);
        const {logits, layers} = await run(network, Uint8Array.from(given[2]), given[3]);
        const heads = layers.map(heads => ["query", "key", "value"].map(kind => heads.map(head => [...head[kind]])));
        return {logits: [...logits], heads};
    """
    address = page.script("return location.href")
    returned = page.script(program, address, name, pixels.flatten().tolist(), size)
    assert_close(torch.tensor([returned["logits"]]), logits, rtol=0, atol=1e-4)
    assert len(returned["heads"]) == len(layers)
    for actual, expected in zip(returned["heads"], layers, strict=True):
        assert_close(torch.tensor(actual).view_as(expected), expected, rtol=0, atol=1e-4)


def scores_in_python(page, layer, head, axes, rotated=False):
    """The matrix for the image that is shown, from its pixels on."""
    program = """
        const {fromAddress, pixelsOf} = await import(given[0] + "image.js");
        return [...pixelsOf(await fromAddress("samples/ship.svg"), 128)];
    """
    pixels = torch.tensor(page.script(program, page.script("return location.href")), dtype=torch.uint8)
    network = timm.create_model("mavit_nano.cifar10", pretrained=True).eval()
    config = network.pretrained_cfg
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    operands = probe(network, (pixels.view(1, 3, 128, 128) / 255 - mean) / std)[layer].operands
    rotary = operands.rotary if rotated else None
    return replace(operands, options=axes, rotary=rotary).scores()[0, head]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("direction", ["row", "column"])
def test_the_scores_that_are_shown_are_those_of_python(page, direction, rotated):
    page.script(CHOOSE, "direction", direction)
    page.script(CHOOSE, "rotation", rotated)
    shown = page.script("return [...document.querySelectorAll('#values tbody tr')].map(row => row.innerText)")
    shown = [line.replace("−", "-").split("\t")[1:] for line in shown]
    row, column = (int(word.rstrip(",")) - 1 for word in place(page).split() if word.rstrip(",").isdigit())
    query = 16 * row + column
    for number, mechanism in enumerate(SHOWN):
        matrix = scores_in_python(page, 1, 0, MECHANISMS[mechanism].axes, rotated)
        vector = matrix[query] if direction == "row" else matrix[:, query]
        for cell, largest in zip((line[number] for line in shown), vector.abs().sort(descending=True)[0], strict=False):
            score, *at = (float(word) for word in cell.replace("(", "").replace(")", "").replace(",", "").split())
            expected = vector[int(16 * (at[0] - 1) + at[1] - 1)].item()
            assert score == pytest.approx(expected, rel=0.06)  # shown with two digits
            assert abs(expected) == pytest.approx(largest.item(), rel=1e-4)  # of two equal ones, either may be first


def test_nothing_leaves_the_machine_and_nothing_is_complained_about(page, served):
    page.script(CHOOSE, "network", "1")
    page.wait(f"{READY} && document.querySelectorAll('#ranks tbody tr').length === 5")
    page.script("document.getElementById('measure').click()")
    page.wait("document.querySelectorAll('#times tbody tr').length > 1")
    requests = page.requests()
    names = [address.removeprefix(served) for address in requests]
    assert not [address for address in requests if not address.startswith(served)]
    for name in (
        "networks/mavit_nano.cifar10.onnx",
        "networks/ravlt_nano.cifar10.onnx",
        "runtime/ort.wasm.bundle.min.mjs",
    ):
        assert name in names
    assert page.complaints() == []


def test_the_keyboard_moves_the_patch_and_the_maps_follow(page):
    page.script("document.activeElement.blur()")
    page.press("Tab")
    assert page.script("return document.activeElement.id") == "chooser"
    assert place(page) == "Patch at row 9, column 7"
    before = [label(page, name) for name in SHOWN]
    page.press("ArrowRight", "ArrowRight", "ArrowDown")
    page.wait("document.querySelector('#place').textContent.startsWith('Patch at row 10, column 9.')")
    after = [label(page, name) for name in SHOWN]
    assert all(old != new for old, new in zip(before, after, strict=True))
    page.press(*["ArrowUp"] * 20, *["ArrowLeft"] * 20)
    page.wait("document.querySelector('#place').textContent.startsWith('Patch at row 1, column 1.')")
    page.wait("document.querySelector('#spoken').textContent.startsWith('row 1, column 1. Softmax: ')")


def test_the_pointer_moves_the_patch_until_a_click_holds_it(page):
    page.point("#image", 0.01, 0.99)
    page.wait("document.querySelector('#place').textContent.startsWith('Patch at row 16, column 1.')")
    page.point(canvas("mala"), 0.99, 0.99, click=True)
    page.wait("document.querySelector('#place').textContent.startsWith('Patch at row 16, column 16 (held).')")
    page.point("#image", 0.5, 0.5)
    assert place(page) == "Patch at row 16, column 16 (held)"
    page.point("#image", 0.5, 0.01, click=True)
    page.point("#image", 0.01, 0.01)
    page.wait("document.querySelector('#place').textContent.startsWith('Patch at row 1, column 1.')")


def negative_share(page, mechanism):
    words = label(page, mechanism).split("\u00a0%")
    return next((float(words[i - 1].split()[-1]) for i in range(1, len(words)) if words[i].startswith(" negative")), 0)


def test_the_magnitude_changes_mala_and_softmax_but_not_linear_attention(page):
    labels = {}
    for exponent in (-6, 0, 4):
        page.script(CHOOSE, "magnitude", str(exponent))
        labels[exponent] = {name: label(page, name) for name in SHOWN}
        labels[exponent]["negative"] = negative_share(page, "mala")
    for name in ("linear", "rala"):
        assert len({labels[exponent][name] for exponent in labels}) == 1
    assert len({labels[exponent]["softmax"] for exponent in labels}) == 3
    assert "over ≈ 1 of 256" in labels[4]["softmax"]
    assert labels[-6]["negative"] < labels[0]["negative"] < labels[4]["negative"]


def test_the_mix_with_the_axes_of_a_mechanism_shows_the_same(page):
    def numbers(name):
        return page.text(f'figure[data-mechanism="{name}"] .numbers')

    assert numbers("mix") not in [numbers(name) for name in SHOWN]  # query mean with magnitude, which nobody published
    page.script(CHOOSE, "mix-strength", "0")
    assert numbers("mix") == numbers("mala")
    page.script(CHOOSE, "mix-normalizer", "divide")
    assert numbers("mix") == numbers("linear")
    page.script(CHOOSE, "mix-strength", "1")
    assert numbers("mix") == numbers("rala")
    page.script(CHOOSE, "mix-map", "relu")
    assert numbers("mix") != numbers("rala")


def test_ranks_follow_the_choices(page):
    def ranks():
        page.wait("document.querySelectorAll('#ranks tbody tr').length === given_rows".replace("given_rows", rows))
        lines = page.script("return [...document.querySelectorAll('#ranks tbody tr')].map(row => row.innerText)")
        return {line.split("\t")[0]: int(line.split("\t")[1]) for line in lines}

    rows = "5"
    before = ranks()
    expected = {name: torch.linalg.svdvals(scores_in_python(page, 1, 0, MECHANISMS[name].axes)) for name in SHOWN}
    for name, title in zip(SHOWN, ("Softmax", "Linear", "RALA", "MALA"), strict=True):
        assert before[title] == (expected[name] > 1e-3 * expected[name][0]).sum().item()
    assert before["Softmax"] > 3 * 16
    assert max(before["Linear"], before["RALA"]) <= 16
    rows = "4"
    page.script(CHOOSE, "matrix", "state")
    state = ranks()
    assert "Softmax" not in state
    assert max(state.values()) <= 16
    page.wait("document.querySelector('#rank-note').textContent.includes('softmax has none')")


def test_an_image_of_the_user_is_shown_and_another_file_is_one_message(page, tmp_path):
    image, text = tmp_path / "photo.png", tmp_path / "<img src=x onerror=alert(1)>.txt"
    Image.new("RGB", (300, 200), (200, 30, 30)).save(image)
    text.write_text("no image")
    page.choose_file("#file", text)
    page.wait("!document.querySelector('#problem').hidden")
    assert page.text("#problem") == (
        f"{text.name} is not an image that this browser can read: choose a PNG, JPEG, WebP or GIF file."
    )
    assert page.script("return document.querySelectorAll('#problem *').length") == 0
    assert place(page) == "Patch at row 9, column 7"
    page.choose_file("#file", image)
    page.wait(
        "document.querySelector('#problem').hidden && !document.querySelector('[data-sample][aria-pressed=true]')"
    )
    page.wait(READY)
    pixel = page.script("return [...document.getElementById('image').getContext('2d').getImageData(9, 9, 1, 1).data]")
    assert pixel == [200, 30, 30, 255]


def test_a_dropped_image_is_shown(page):
    page.script("""
        const canvas = Object.assign(document.createElement("canvas"), {width: 40, height: 40});
        canvas.getContext("2d").fillRect(0, 0, 40, 40);
        const blob = await new Promise(resolve => canvas.toBlob(resolve));
        const transfer = new DataTransfer();
        transfer.items.add(new File([blob], "black.png"));
        const event = new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true});
        document.body.dispatchEvent(event);
    """)
    page.wait("!document.querySelector('[data-sample][aria-pressed=true]')")
    pixel = page.script("return [...document.getElementById('image').getContext('2d').getImageData(9, 9, 1, 1).data]")
    assert pixel == [0, 0, 0, 255]


@pytest.mark.parametrize("size", ["32", "192"])
def test_other_sizes_have_other_grids(page, size):
    page.script(CHOOSE, "size", size)
    page.wait(f"{READY} && document.getElementById('layer').selectedOptions[0].text.includes('{int(size) // 8} ×')")
    assert f"of {(int(size) // 8) ** 2} patches" in label(page, "mala")
    assert page.complaints() == []


def test_the_last_of_several_quick_choices_counts(page):
    for size in ("32", "64", "192", "128", "32", "64"):
        page.script(CHOOSE, "size", size)
    page.wait(f"{READY} && document.querySelector('{canvas('mala')}').ariaLabel.includes('of 64 patches')")
    assert page.script("return document.getElementById('problem').hidden")
    assert page.complaints() == []


def test_charts_say_their_values_to_screen_readers(page):
    page.script(CHOOSE, "magnitude", "6")
    spoken = page.script("return document.querySelector('#spread-chart svg').getAttribute('aria-label')")
    assert spoken.startswith("patches read against the query’s magnitude; now: Softmax 1.0, Linear 2")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_width_in_both_colour_schemes(page, width, scheme):
    page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.resize(width, 800)
    page.wait("document.querySelectorAll('#ranks tbody tr').length === 5")
    assert page.script("return document.documentElement.scrollWidth <= innerWidth")
    background = page.script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(", "))) < 200) == (scheme == "dark")


def test_a_missing_network_is_one_message(browser, folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "networks" / "mavit_nano.cifar10.onnx").unlink()
    with serving.Explorer(broken, 0) as explorer:
        browser.open(explorer.address)
        browser.wait("!document.querySelector('#problem').hidden")
        assert browser.text("#problem") == "networks/mavit_nano.cifar10.onnx could not be loaded (status 404)."


def test_the_share_of_a_network_that_has_come_is_said(page):
    page.script("""
        const place = document.getElementById("place");
        window.said = [];
        new MutationObserver(() => window.said.push(place.textContent)).observe(place, {childList: true});
    """)
    page.script(CHOOSE, "network", "1")
    page.wait(READY)
    *loading, last = page.script("return window.said")
    shares = [re.fullmatch(r"Loading the network: ([\d.]+) of ([\d.]+) MB …", words) for words in loading]
    assert shares
    assert all(shares)
    assert shares[-1][1] == shares[-1][2]
    assert last.startswith("Patch at row")
