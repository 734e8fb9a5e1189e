import math

import pytest
import torch
from torch import nn

from linvit.models.by_name import create
from linvit.tasks.diffusion import DiffusionLoss
from linvit.tasks.sampling import kept_signal, sample, spaced


class KnowsTheImage(nn.Module):
    """Predicts exactly the noise that leads to one image; of no class, that leads to another."""

    def __init__(self, channels=1, learn_sigma=False):
        super().__init__()
        self.channels, self.input_size, self.num_classes, self.learn_sigma = channels, 8, 10, learn_sigma
        self.image = nn.Parameter(torch.linspace(-0.9, 0.9, 64).view(1, 1, 8, 8))

    def forward(self, images, times, labels):
        kept = kept_signal()[times].float()[:, None, None, None]
        target = torch.where((labels == self.num_classes)[:, None, None, None], self.image / 2, self.image)
        noise = (images - kept.sqrt() * target) / (1 - kept).sqrt()
        return torch.cat((noise, -torch.ones_like(noise)), 1) if self.learn_sigma else noise


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
@pytest.mark.parametrize(("steps", "learn_sigma"), [(2, False), (2, True), (50, True), (250, False), (1000, True)])
def test_a_network_that_knows_the_noise_leads_to_the_image(sampler, steps, learn_sigma):
    network = KnowsTheImage(learn_sigma=learn_sigma)
    drawn = sample(network, torch.tensor([1, 2]), steps, sampler=sampler)
    torch.testing.assert_close(drawn, network.image.expand(2, -1, -1, -1).detach(), rtol=0, atol=2e-3)


def test_guidance_goes_beyond_the_class_by_as_much_as_it_says():
    network = KnowsTheImage()
    labels = torch.tensor([4])
    for guidance in (0.5, 1.0, 1.5):
        drawn = sample(network, labels, 50, guidance, clips=False)
        # a constant mixture of two images is what the mixed noise leads to
        expected = network.image / 2 + guidance * network.image / 2
        torch.testing.assert_close(drawn, expected.detach(), rtol=0, atol=2e-3)


class Recalls(KnowsTheImage):
    """The same, and keeps what it was shown."""

    def forward(self, images, times, labels):
        self.shown = [*getattr(self, "shown", []), (images[:1], times[0])]
        return super().forward(images, times, labels)


def test_where_guidance_leaves_the_range_the_images_on_the_way_hold_the_clipped_image():
    network = Recalls().double()
    sample(network, torch.tensor([4]), 50, guidance=3.0)
    foreseen = (2 * network.image).clamp(-1, 1)
    kept = [kept_signal()[time] for _, time in network.shown]
    noises = [
        (images - k.sqrt() * foreseen) / (1 - k).sqrt() for (images, _), k in zip(network.shown, kept, strict=True)
    ]
    # DDIM adds no noise: what is not the image is the noise of the start, at every step
    for noise in noises[1:]:
        torch.testing.assert_close(noise, noises[1], rtol=0, atol=1e-3)


def test_the_seed_decides_and_the_times_reach_both_ends():
    network = create("dit_nano_patch2", 10)
    labels = torch.tensor([0, 1])
    one, two, other = (sample(network, labels, 5, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    times, between = spaced(250)
    assert times[0] == 0
    assert times[-1] == 999
    torch.testing.assert_close((1 - between).cumprod(0), kept_signal()[times])


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_an_image_with_its_own_seed_does_not_depend_on_the_others(sampler):
    network = create("dit_nano_patch2", 10)
    whole = sample(network, torch.tensor([0, 1, 2]), 5, sampler=sampler, seed=[7, 8, 9])
    alone = sample(network, torch.tensor([1]), 5, sampler=sampler, seed=[8])
    torch.testing.assert_close(whole[1:2], alone, rtol=0, atol=1e-5)


def test_noised_images_have_the_variance_that_they_should():
    loss = DiffusionLoss()
    torch.manual_seed(0)
    noise = torch.randn(2, 1, 200, 200)
    noised = loss.noised(torch.ones_like(noise), torch.tensor([0, 999]), noise)
    kept = kept_signal()
    assert noised[0].mean().item() == pytest.approx(kept[0].sqrt().item(), abs=1e-3)
    assert noised[1].std().item() == pytest.approx((1 - kept[999]).sqrt().item(), abs=1e-2)


def test_the_loss_without_learned_variance_is_the_squared_error():
    loss = DiffusionLoss()
    images, noise, predicted = torch.randn(3, 4, 1, 8, 8).unbind(0)
    found = loss(predicted, images, torch.arange(4) * 300, noise)
    torch.testing.assert_close(found, (predicted - noise).square().mean((1, 2, 3)))


def test_a_diverged_prediction_gives_a_loss_that_is_not_finite():
    images = noise = torch.zeros(2, 1, 4, 4)
    predicted = torch.full((2, 2, 4, 4), torch.nan)
    assert not DiffusionLoss()(predicted, images, torch.tensor([0, 500]), noise).isfinite().any()


def test_the_bound_is_the_divergence_of_two_normal_distributions_and_does_not_train_the_mean():
    loss = DiffusionLoss()
    torch.manual_seed(0)
    images, noise = torch.rand(5, 1, 8, 8) * 2 - 1, torch.randn(5, 1, 8, 8)
    times = torch.tensor([1, 10, 300, 700, 999])
    guessed = (noise + 0.1 * torch.randn_like(noise)).requires_grad_()
    share = torch.full_like(noise, 0.2)
    found = loss(torch.cat((guessed, share), 1), images, times, noise)
    expected = []
    kept = kept_signal()
    for one, time in enumerate(times.tolist()):
        now, before = kept[time], kept[time - 1]
        beta = 1 - now / before
        noised = now.sqrt() * images[one] + (1 - now).sqrt() * noise[one]
        start = (noised - (1 - now).sqrt() * guessed[one].detach()) / now.sqrt()

        def mean(origin, now=now, before=before, beta=beta, noised=noised):
            return (before.sqrt() * beta * origin + (now / before).sqrt() * (1 - before) * noised) / (1 - now)

        low = beta * (1 - before) / (1 - now)
        log_variance = 0.6 * beta.log() + 0.4 * low.log()
        true = torch.distributions.Normal(mean(images[one].double()), low.sqrt())
        ours = torch.distributions.Normal(mean(start.double()), (0.5 * log_variance).exp())
        expected.append(torch.distributions.kl_divergence(true, ours).mean() / math.log(2))
    error = (guessed - noise).square().mean((1, 2, 3))
    torch.testing.assert_close((found - error).double(), torch.stack(expected), rtol=2e-3, atol=1e-5)
    (found - error).sum().backward()
    assert guessed.grad.abs().max() < 1e-7


def test_the_first_step_is_the_likelihood_of_8_bit_values():
    loss = DiffusionLoss()
    images = torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1, 1) + torch.zeros(3, 1, 2, 2)
    noise = torch.randn_like(images)
    good, bad = (
        loss(torch.cat((guess, torch.zeros_like(noise)), 1), images, torch.zeros(3).long(), noise)
        for guess in (noise, noise + 20)
    )
    assert (good < 8).all()
    assert (bad > good + 1).all()
