"""Networks over several processes against themselves in one: outputs, gradients, statistics and a step of training."""

import copy

import pytest
import timm
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import linvit
from linvit.models.registry import create
from linvit.parallel import shard

TALL = {1: (70, 37), 2: (133, 37), 3: (201, 33), 4: (269, 35)}  # LePE reads two rows of each neighbour at stride 32
TALLER = {1: (99, 37), 2: (195, 33), 3: (293, 37), 4: (391, 33)}  # CARE's 7×7 three
GRID = {1: (3, 2), 2: (7, 3), 3: (7, 3), 4: (9, 2)}
VIT = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
SWIN = {"patch_size": 4, "window_size": 3, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}


def pyramid(name, sizes, **options):
    return lambda number: (timm.create_model(name, num_classes=5, **options), sizes[number])


def deit(mechanism, **options):
    def made(number):
        size = tuple(4 * side for side in GRID[number])
        return timm.create_model(f"deit_tiny_{mechanism}", img_size=size, **VIT, **options), size

    return made


def swin(mechanism):
    def made(number):
        size = (64 * number + 32 + 4, 36)
        options = {"img_size": size, "pattern": "LLLL", "num_classes": 5}
        return timm.create_model(f"swin_tiny_{mechanism}", **SWIN, **options), size

    return made


def pvt(number):
    options = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2), "num_classes": 5}
    return linvit.swap_attention(timm.create_model("pvt_v2_b0", **options), "rala"), TALL[number]


def decoder(mechanism, **options):
    def made(number):
        network = create("sequence_nano", 11, width=16, depth=2, heads=2, hidden=24, mechanism=mechanism, **options)
        return network, (4 * number + 71,)

    return made


NETWORKS = {
    "mavit": pyramid("mavit_nano", TALL),
    "ravlt": pyramid("ravlt_nano", TALL, drop_path_rate=0.5),
    "ravlt without LePE": pyramid("ravlt_nano", TALL, attention={"lepe": False, "modulation": "tanh"}),
    "mavit, two rows deep": pyramid("mavit_nano", TALLER, drop_rate=0.5),
    "care": pyramid("care_nano", TALLER, drop_path_rate=0.2),
    "care without strips": pyramid("care_nano", TALLER, pattern="LLLL", split="stacked"),
    **{f"deit {name}": deit(name) for name in ("linear", "rala", "mala", "mlla", "hydra", "polaformer", "enhanced")},
    "deit averaged": deit("rala", global_pool="avg", class_token=False),
    "deit averaged with class token": deit("rala_mala", global_pool="avg"),
    "swin": swin("rala"),
    "pvt": pvt,
    "decoder mala": decoder("mala", lepe=3),
    "decoder rala": decoder("rala", rope=True, modulation="silu"),
    "decoder rala_mala": decoder("rala_mala", rope=True),
    "decoder linear": decoder("linear", conv=0),
}


def prepared(name, number):
    """A network in float64 with weights that all matter, and a batch."""
    torch.manual_seed(0)
    network, size = NETWORKS[name](number)
    network = network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for key, buffer in network.named_buffers():
            if key.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    if len(size) == 1:
        return network, torch.randint(11, (2, *size)), torch.randint(11, (2, *size))
    return network, torch.randn(2, 3, *size, dtype=torch.float64), torch.randint(5, (2,))


def trained(network, call, x, y):
    """Output, loss, gradients, buffers and the output after one step of SGD."""
    torch.manual_seed(1)
    out = call(x)
    loss = cross_entropy(out.flatten(0, -2), y.flatten())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    torch.optim.SGD(network.parameters(), lr=0.01).step()
    stepped = {f"stepped {name}": p.detach() for name, p in network.named_parameters()}
    buffers = {name: b.clone() for name, b in network.named_buffers() if b.is_floating_point()}
    network.eval()
    with torch.no_grad():
        return {"out": out.detach(), "after": call(x), **gradients, **stepped, **buffers}


def differences(mesh, name, train):
    number = mesh.size()
    network, x, y = prepared(name, number)
    network.train(train)
    single = copy.deepcopy(network)
    sharded = shard(network, mesh)
    parallel = DistributedDataParallel(sharded, process_group=mesh.get_group())
    whole, pieces = trained(single, single, x, y), trained(sharded.network, parallel, x, y)
    assert whole.keys() == pieces.keys()
    for key, expected in whole.items():
        scale = max(1, expected.abs().max().item())
        assert_close(pieces[key], expected, rtol=1e-12, atol=1e-12 * scale, msg=lambda text, key=key: f"{key}: {text}")
    return pieces["out"].numpy().tobytes(), dict(sharded.exchange.sent)


EVERY = [(name, train, number) for name in NETWORKS for train in (True, False) for number in (1, 2, 3, 4)]
SOME = {"mavit", "care", "deit rala", "decoder rala"}
QUICK = [case for case in EVERY if case[1:] == (True, 3) or (case[0] in SOME and True in (case[1], case[2] == 2))]


def check(processes, name, train, number):
    results = processes.each(number, differences, name, train)
    assert len({out for out, _ in results}) == 1, "the processes have different outputs"


@pytest.mark.parametrize(("name", "train", "number"), QUICK)
def test_processes_compute_what_a_single_process_does(processes, name, train, number):
    check(processes, name, train, number)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "train", "number"), [case for case in EVERY if case not in QUICK])
def test_any_number_of_processes(processes, name, train, number):
    check(processes, name, train, number)
