import lightning
import pytest
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from linvit.runs import ClassificationRun
from linvit.tasks.optimization import Optimizer, Schedule

NANO = {"name": "ravlt_nano"}


def classification(model, num_classes, channels=3, **settings):
    network = ClassificationRun.create_network(model, num_classes, channels)
    return ClassificationRun.create_task(network, num_classes, channels, **settings)


def test_network_takes_its_head_and_stem_from_the_data():
    task = classification({**NANO, "drop_path_rate": 0.1}, num_classes=7, channels=1)
    assert task(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(("classes", "names"), [(5, ["loss", "top1"]), (6, ["loss", "top1", "top5"])])
def test_top_5_is_measured_where_it_can_miss(classes, names):
    task = classification(NANO, classes).eval()
    with torch.no_grad():
        task.validation_step((torch.randn(4, 3, 32, 32), torch.arange(4)), 0)
    assert list(task.measured("raw")) == names
    assert list(task.measures) == [*names, "images"]


def test_networks_are_raw_and_ema():
    assert list(classification(NANO, 10).networks()) == ["raw"]
    task = classification(NANO, 10, ema_decay=0.9)
    assert list(task.networks()) == ["raw", "ema"]
    assert not task.networks()["ema"].training
    assert not any(parameter.requires_grad for parameter in task.networks()["ema"].parameters())


def test_the_decay_of_the_moving_average_rises():
    assert classification(NANO, 10, ema_decay=0.9).ema.get_decay(2) == pytest.approx(1 - 2 ** (-2 / 3))
    assert classification(NANO, 10, ema_decay=0.9, ema_warmup=False).ema.get_decay(2) == 0.9


def test_the_moving_average_starts_from_the_same_weights(tmp_path):
    task = classification(NANO, 10, ema_decay=0.9)
    torch.save(classification(NANO, 10).network.state_dict(), tmp_path / "weights.pth")
    task.start_from(tmp_path / "weights.pth")
    assert all(map(torch.equal, task.network.state_dict().values(), task.ema.module.state_dict().values()))


@pytest.mark.parametrize(
    ("options", "judge"),
    [
        ({}, nn.CrossEntropyLoss()),
        ({"label_smoothing": 0.1}, LabelSmoothingCrossEntropy(0.1)),
        ({"label_smoothing": 0.1, "mixup": 0.8}, SoftTargetCrossEntropy()),
    ],
)
def test_loss_follows_the_recipe(options, judge):
    task = classification(NANO, 10, **options)
    assert isinstance(task.mix, Mixup) == ("mixup" in options)
    images, targets = torch.randn(4, 3, 32, 32), torch.tensor([0, 3, 9, 3])
    if task.mix:
        images, targets = task.mix(images, targets)
    logits = torch.randn(4, 10)
    torch.testing.assert_close(task.loss(logits, targets), judge(logits, targets))


def test_channels_last_computes_the_same():
    images = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    plain = classification(NANO, 10).eval()
    torch.manual_seed(0)
    last = classification(NANO, 10, channels_last=True).eval()
    assert last.network.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last(images), plain(images), rtol=1e-4, atol=1e-5)


def test_two_headed_models_give_one_tensor_and_train():
    task = classification({"name": "care_nano"}, 10).train()
    logits = task(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in task.network.parameters())


def test_compiling_keeps_the_names_of_the_weights():
    plain, compiled = classification(NANO, 10, ema_decay=0.9), classification(NANO, 10, ema_decay=0.9, compile=True)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    assert compiled.network._compiled_call_impl is not None
    assert compiled.ema.module._compiled_call_impl is None


class Zeros(lightning.LightningDataModule):
    batch_size = 3

    def train_dataloader(self):
        images, labels = torch.zeros(24, 3, 32, 32), torch.zeros(24, dtype=torch.int64)
        return DataLoader(TensorDataset(images, labels), batch_size=3)


class Weights(lightning.Callback):
    def __init__(self):
        self.after = []

    def on_train_batch_end(self, trainer, task, *args):
        self.after.append(parameters_to_vector(task.network.parameters()).detach().clone())


def test_the_moving_average_follows_each_step_and_counts_it():
    weights, task = Weights(), classification(NANO, 10, ema_decay=0.9, optimizer=Optimizer(lr=0.1))
    fit(task, callbacks=[weights])
    first, second = weights.after  # the decay of the first step is 0, and of the second 1 − 2^(−2/3)
    averaged = parameters_to_vector(task.ema.module.parameters())
    torch.testing.assert_close(averaged, first.lerp(second, 2 ** (-2 / 3)), rtol=1e-5, atol=1e-6)
    assert not torch.equal(first, second)


def fit(task, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(accelerator="cpu", max_steps=2, enable_model_summary=False, **quiet, **options).fit(task, Zeros())


@pytest.mark.parametrize(("accumulated", "global_batch"), [(1, 3), (4, 12)])
def test_learning_rate_and_moving_average_follow_the_global_batch(accumulated, global_batch):
    optimizer = Optimizer(lr=1e-3, lr_batch=24)
    task = classification(NANO, 10, ema_decay=0.9, ema_batch=6, optimizer=optimizer, schedule=Schedule(warmup_epochs=1))
    fit(task, accumulate_grad_batches=accumulated)
    assert task.ema.decay == pytest.approx(0.9 ** (global_batch / 6))
    assert task.rate.warmup_t == min(2, 24 // global_batch)
    assert task.rate.base_values[0] == pytest.approx(1e-3 * global_batch / 24)
