"""Alignment by hand: losses, gradients, blocks that do not see each other, and memory."""

from types import SimpleNamespace

import pytest
import timm
import torch
from linearize_teachers import SMALL, body, image
from tiers import quick
from torch.testing import assert_close

import linvit
from linvit.bench.machine import peak_of
from linvit.models.linearizing import lessons, share
from linvit.tasks.alignment import MAPS, OUTPUTS, Alignment
from linvit.tasks.students import relative_errors


def alignment(name="vit_small_patch14_reg4_dinov2", mechanism="mala", match=OUTPUTS, pattern=None, **options):
    original = body(name, **SMALL)
    student = linvit.linearize(original, mechanism, pattern)
    given = lessons(student, original, scores=match == MAPS)
    share(student, original, given)
    return Alignment(student, original, given, match=match, **options)


def stepped(task, images, scale=None):
    """The loss of one training step and the gradients by name."""
    scaler = None if scale is None else SimpleNamespace(get_scale=lambda: scale)
    task.learn = lambda loss, number: loss
    task._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler))
    loss = task.training_step((images, None), 0)
    (loss * (scale or 1)).backward()
    return loss, {name: p.grad for name, p in task.network.named_parameters() if p.requires_grad}


def test_relative_errors_by_hand():
    expected = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]])
    assert_close(relative_errors(torch.tensor([[[3.0, 3.0]], [[0.0, 0.0]]]), expected), torch.tensor([1 / 25, 0.0]))
    assert relative_errors(expected.half(), expected.half()).dtype == torch.float32


@pytest.mark.parametrize("match", [OUTPUTS, MAPS])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_gradients_are_those_of_the_sum_of_the_losses(match, pieces):
    task, images = alignment(match=match, pieces=pieces), torch.cat((image(), -2 * image()))
    inputs = []
    hooks = [
        block.attn.register_forward_hook(lambda _, args, output: inputs.append((args[0], output)))
        for block in task.original.blocks
    ]
    with torch.no_grad():
        task.original(images)
    for hook in hooks:
        hook.remove()
    loss, gradients = stepped(task, images)
    errors = []
    for block, lesson, (x, output) in zip(task.network.blocks, task.lessons, inputs, strict=True):
        if match == OUTPUTS:
            errors.append(relative_errors(block.attn(x), output))
        else:
            given = block.attn.scores(x, (4, 6))
            errors.append(relative_errors(given, lesson.scoring.scores(x, (4, 6))))
    expected = torch.stack(errors).mean()
    assert_close(loss, expected)
    trained = {name: p for name, p in task.network.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(expected, list(trained.values()), allow_unused=True)
    for (name, parameter), grad in zip(trained.items(), grads, strict=True):
        assert_close(gradients[name], torch.zeros_like(parameter) if grad is None else grad, msg=name)


def test_a_scaled_loss_gives_the_same_gradients():
    plain, scaled = (stepped(alignment(), image(), scale)[1] for scale in (None, 1024.0))
    for name, grad in plain.items():
        assert_close(scaled[name], 1024 * grad)


@pytest.mark.parametrize("mechanism", quick(["linear", "rala", "mala", "inline"], ["mala"]))
@pytest.mark.parametrize("match", [OUTPUTS, MAPS])
def test_the_error_of_each_block_falls_with_every_step(mechanism, match):
    task, images = alignment(mechanism=mechanism, match=match), torch.cat((image(), -image().roll(9, -1)))
    trained = [parameter for parameter in task.network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.02)
    before = task.errors(task.network, images).mean(1)
    for _ in range(8):
        optimizer.zero_grad()
        stepped(task, images)
        optimizer.step()
        after = task.errors(task.network, images).mean(1)
        assert (after < before).all()
        before = after


def test_blocks_do_not_see_each_other():
    both, second = alignment(), alignment(pattern="SL")
    _, gradients = stepped(both, image())
    _, alone = stepped(second, image())
    assert sum(name.startswith("blocks.1") for name in gradients) == len(alone) > 0
    for name, grad in alone.items():
        assert_close(2 * gradients[name], grad)  # the mean over two blocks, and over one
    with torch.no_grad():
        both.network.blocks[0].attn.proj.weight.zero_()
    assert_close(both.errors(both.network, image())[1], second.errors(second.network, image())[0])


def test_the_step_leaves_the_network_as_it_was():
    task = alignment()
    before = task.network(image())
    task.errors(task.network, image())
    assert torch.equal(task.network(image()), before)
    assert not torch.allclose(before, task.original(image()))
    task.train()
    assert not any(module.training for module in (*task.network.modules(), *task.original.modules()))


VIT = {"img_size": 128, "patch_size": 8, "embed_dim": 192, "depth": 4, "num_heads": 3, "num_classes": 10}
BATCH = 32


def teachers_inference():
    """Builds the network, and what it computes, in one call, so that its weights count."""
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, 128, 128)

    def call():
        network = timm.create_model("deit_tiny_patch16_224", **VIT).eval()
        with torch.inference_mode():
            return network(images).sum()

    return call


def alignments_step():
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, 128, 128)

    def call():
        original = timm.create_model("deit_tiny_patch16_224", **VIT).eval()
        student = linvit.linearize(original, "mala")
        given = lessons(student, original)
        share(student, original, given)
        task = Alignment(student, original, given)
        optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad])
        for _ in range(2):
            optimizer.zero_grad()
            stepped(task, images)
            optimizer.step()

    return call


@pytest.mark.slow
def test_memory_stays_below_1_3_times_that_of_the_teachers_inference():
    teachers, ours = peak_of(teachers_inference), peak_of(alignments_step)
    assert ours < 1.3 * teachers
