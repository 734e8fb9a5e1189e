"""Networks over several processes against themselves in one: outputs, gradients, statistics and a step of training."""

import copy
import os

import pytest
import timm
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import linvit
from linvit.environment import forks_of
from linvit.models.by_name import create
from linvit.parallel import rows_of, shard

TALL = {1: (70, 37), 2: (133, 37), 3: (201, 33), 4: (269, 35)}  # LePE reads two rows of each neighbour at stride 32
TALLER = {1: (99, 37), 2: (195, 33), 3: (293, 37), 4: (391, 33)}  # CARE's 7×7 three
GRID = {1: (3, 2), 2: (7, 3), 3: (7, 3), 4: (9, 2)}
VIT = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
SWIN = {"patch_size": 4, "window_size": 3, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
NALAFORMER = {"widths": (16, 16, 32, 32), "depths": (1, 1, 2, 1), "heads": (1, 2, 2, 4), "pattern": "LLLL"}


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
    "nalaformer": pyramid("nalaformer_xtiny", TALL, drop_path_rate=0, **NALAFORMER),
    "care": pyramid("care_nano", TALLER, drop_path_rate=0.2),
    "care stacked": pyramid("care_nano", TALLER, pattern="LLLL", split="stacked"),
    "care without strips": pyramid("care_nano", TALLER, pattern="LLLL"),
    **{f"deit {name}": deit(name) for name in ("linear", "rala", "mala", "mlla", "hydra", "enhanced")},
    **{f"deit {name}": deit(name) for name in ("nala", "polaformer_pp")},
    "deit polaformer": deit("polaformer", attention={"positions": False}),
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


EVERY = [
    (name, train, number)
    for name in NETWORKS
    for train in (True, False)
    for number in (1, 2, 3, 4)
    # with the statistics of the batch its gradients change by 5e-13 if the input changes by 2e-16
    if not (train and name == "care stacked")
]
SOME = {"mavit", "care", "deit rala", "decoder rala"}
QUICK = [
    case
    for case in EVERY
    if case[1:] == (True, 3)
    or case == ("care stacked", False, 2)
    or (case[0] in SOME and True in (case[1], case[2] == 2))
]


CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]


@pytest.mark.parametrize(("name", "train", "number"), CASES)
def test_processes_compute_what_a_single_process_does(processes, name, train, number):
    results = processes.each(number, differences, name, train)
    assert len({out for out, _ in results}) == 1, "the processes have different outputs"


def over_images_and_rows(mesh):
    """Two groups of two processes, each with images of its own."""
    network, x, y = prepared("mavit", 2)
    network.train()
    x, y = torch.cat((x, x.flip(-1) * 0.7)), torch.cat((y, y.flip(0)))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("images", "rows"))
    single = copy.deepcopy(network)
    for images in (slice(0, 2), slice(2, 4)):
        cross_entropy(single(x[images]), y[images]).div(2).backward()
    parallel = DistributedDataParallel(shard(network, both["rows"]))
    images = slice(2 * both["images"].get_local_rank(), 2 * both["images"].get_local_rank() + 2)
    cross_entropy(parallel(x[images]), y[images]).backward()
    for parameter, expected in zip(network.parameters(), single.parameters(), strict=True):
        assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_rows_together_with_images(processes):
    processes.each(4, over_images_and_rows)


def recomputed(mesh):
    network, x, y = prepared("mavit", mesh.size())
    network.train()
    network.set_grad_checkpointing()
    single = copy.deepcopy(network)
    results = [trained(net, call, x, y) for net, call in ((single, single), wrapped(network, mesh))]
    for key, expected in results[0].items():
        if not key.startswith("stages.0.blocks.0.norm"):
            assert_close(results[1][key], expected, rtol=1e-12, atol=1e-11, msg=key)


def wrapped(network, mesh):
    sharded = shard(network, mesh)
    return sharded.network, DistributedDataParallel(sharded, process_group=mesh.get_group())


def test_blocks_that_are_recomputed_in_the_backward_pass(processes):
    processes.each(2, recomputed)


def from_rows(mesh):
    network, x, _ = prepared("care", 3)
    network.eval()
    before = {name: type(module) for name, module in network.named_modules()}
    sharded, height = shard(network, mesh), x.shape[-2]
    rows = sharded.rows(height)
    assert rows == rows_of(height, 3)[mesh.get_local_rank()]
    assert torch.equal(sharded(x[..., rows, :], height=height), sharded(x))
    with pytest.raises(ValueError, match=f"`x` has {height} rows, expected .* pass `rows\\({height}\\)` of the images"):
        sharded(x, height=height)
    assert {name: type(module) for name, module in network.named_modules()} == before
    assert_close(network(x), sharded(x), rtol=1e-12, atol=1e-12)
    assert {id(p) for p in network.parameters()} == {id(p) for p in sharded.parameters()}
    fast = shard(network.float(), mesh)
    x = x.float().contiguous(memory_format=torch.channels_last)
    assert_close(fast(x), network(x), rtol=1e-4, atol=1e-4)


def test_a_process_needs_only_its_rows(processes):
    processes.each(3, from_rows)


def counted(mesh):
    network, x, _ = prepared("mavit", 3)
    sharded = shard(network.eval(), mesh)
    with torch.no_grad():
        sharded(x)
    return dict(sharded.exchange.sent), [tuple(x.shape), x.element_size()]


def test_bytes(processes):
    (first, (shape, size)), (middle, _), (last, _) = processes.each(3, counted)
    batch, channels, _, width = shape
    assert first["stem.0"] == batch * channels * width * size, "the last row goes down"
    assert "stem.0" not in last, "stride 2 reads no row from below"
    heads, head_width = 2, 16
    state = head_width**2 + 4 * head_width + 3  # S; z, u, r, query; n, shift, num_queries
    assert first["stages.0.blocks.0.attn.operator"] == 2 * batch * heads * state * size
    assert first["stages.0.blocks.0.attn.operator"] == middle["stages.0.blocks.0.attn.operator"]
    assert middle["stages.3.blocks.0.attn.lepe"] == 2 * first["stages.3.blocks.0.attn.lepe"]


def refusals(mesh):
    def refuses(message, function, *arguments, kind=ValueError, **options):
        with pytest.raises(kind, match=message):
            function(*arguments, **options)

    tiny = shard(timm.create_model("mavit_nano"), mesh)
    refuses("`height` is 64, which has 2 times the 32 rows .* number of processes is 3", tiny, torch.rand(1, 3, 64, 64))
    thin = r"gives 3 processes 32 rows or more, but the layer stages.3.blocks.0.attn.lepe needs 64 of its neighbours"
    refuses(thin, tiny, torch.rand(1, 3, 127, 64))
    refuses(
        "softmax attention, .* such as `pattern='LLLL'`", shard, timm.create_model("mavit_nano", pattern="LLSS"), mesh
    )
    for name, layer in {
        "deit_tiny_softmax": "Attention",
        "deit_tiny_focused": "FocusedAttention",
        "deit_tiny_agent": "AgentAttention",
        "deit_tiny_inline": "InLineAttention",
        "deit_tiny_linear_angular": "LinearAngular",
        "deit_tiny_recnext": "RecNeXtAttention",
        "deit_tiny_vittt": "InnerStepAttention",
        "resnet18": "ResNet",
    }.items():
        refuses(f"{layer}\\)?, which cannot share its tokens", shard, timm.create_model(name), mesh)
    positions = r"PolarAttention\) with a table of positions.* create it with `positions=False`"
    refuses(positions, shard, timm.create_model("deit_tiny_polaformer"), mesh)
    refuses("stem.0 .GeluConv., which", shard, linvit.fuse(timm.create_model("mavit_nano").eval()), mesh)
    refuses("AdaptiveMaxPool2d., which cannot", shard, timm.create_model("mavit_nano", global_pool="max"), mesh)
    refuses("the pooling of `network` is ''", shard, timm.create_model("care_nano", global_pool=""), mesh)
    refuses("`network` is of the class Sequential: choose RAVLT", shard, torch.nn.Sequential(), mesh)
    refuses("`mesh` is .*, expected a DeviceMesh", shard, tiny, 3, kind=TypeError)
    flat = DeviceMesh("cpu", [[0, 1, 2]], _init_backend=False)
    refuses("`mesh` has 2 dimensions, expected one", shard, timm.create_model("mavit_nano"), flat)
    reflecting = torch.nn.Conv2d(32, 32, 3, padding=1, padding_mode="reflect")
    network = timm.create_model("mavit_nano")
    network.stem[0] = reflecting
    refuses(r"Conv2d. with padding \(1, 1\) \(reflect\), expected zeros", shard, network, mesh)
    vit = timm.create_model("deit_tiny_rala", img_size=(60, 20), proj_drop_rate=0.1, **VIT)
    refuses("the images are 64 × 20 px, expected 60 × 20", shard(vit, mesh), torch.rand(1, 3, 64, 20))
    refuses("attn.proj_drop drops single values", shard(vit, mesh), torch.rand(1, 3, 60, 20))
    dropping = shard(timm.create_model("ravlt_nano", drop_path_rate=0.5), mesh)
    torch.manual_seed(mesh.get_local_rank())
    refuses("draw different random numbers", dropping, torch.rand(1, 3, 200, 32))
    words = shard(create("sequence_nano", 11), mesh)
    refuses("`tokens`", words, torch.full((1, 30), 11))
    refuses("needs 3 of its neighbours", words, torch.zeros(1, 8, dtype=torch.int64))


def test_what_is_refused_in_all_processes_before_anything_is_sent(processes):
    processes.each(3, refusals)


def dying(rank, connection, store, where):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    network = shard(timm.create_model("mavit_nano"), init_device_mesh("cpu", (3,)))
    calls = []

    def die(*_):
        calls.append(0)
        if rank == 1 and len(calls) == 2:
            os._exit(9)

    stage = network.network.stages[1]
    if where == "forward":
        stage.register_forward_hook(die)
    else:
        stage.register_full_backward_hook(die)
    try:
        for _ in range(2):
            network(torch.randn(1, 3, 200, 33)).sum().backward()
    except ConnectionError as error:
        connection.send(str(error))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_killed_process_ends_the_others(tmp_path, where):
    context = forks_of("timm", "linvit.parallel")
    pipes = [context.Pipe() for _ in range(3)]
    arguments = [(rank, theirs, str(tmp_path / "store"), where) for rank, (_, theirs) in enumerate(pipes)]
    workers = [context.Process(target=dying, args=args, daemon=True) for args in arguments]
    for worker in workers:
        worker.start()
    for rank in (0, 2):
        assert pipes[rank][0].poll(60), f"process {rank} does not end"
        message = pipes[rank][0].recv()
        assert message.startswith(
            "Another of the 3 processes that share an image ended or cannot be reached, so process"
        )
        assert f"process {rank} stopped too" in message
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 9, 0]
