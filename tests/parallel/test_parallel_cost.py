import timm
import torch

from linvit.parallel import shard
from linvit.parallel.cost import Link, Traffic, measured_link, projected_seconds, ring_attention_bytes, traffic


def measured(mesh):
    sharded = shard(timm.create_model("ravlt_nano").eval(), mesh)
    image = torch.randn(1, 3, 64 * mesh.size(), 32)
    counts = []
    for x in (image, image.repeat(1, 1, 1, 2)):
        sharded.exchange.clear()
        with torch.no_grad():
            sharded(x)
        counts.append(traffic(sharded))
    return counts, measured_link(sharded.exchange)


def test_traffic_grows_with_the_width_and_not_with_the_processes(processes):
    (_, ((narrow, wide), link), _) = processes.each(3, measured)
    (_, ((of_four, _), _), _, _) = processes.each(4, measured)
    assert of_four == narrow
    assert wide.halo_bytes == 2 * narrow.halo_bytes
    assert wide[1:] == narrow[1:]
    assert narrow.state_messages == 2 * 5 + 1, "mean query and state of each block, and the pooling"
    assert 0 < link.seconds < 10
    assert link.rate > 0


def test_projection():
    sent, link = Traffic(1000, 2, 100, 3), Link(0.1, 1000.0)
    assert projected_seconds(8.0, sent, link, 1) == 8
    assert projected_seconds(8.0, sent, link, 4) == 2 + (0.2 + 1) + 3 * (0.3 + 0.1)


def test_ring_attention():
    assert ring_attention_bytes(1000, 64, 4) == 2 * 250 * 64 * 4 * 3
