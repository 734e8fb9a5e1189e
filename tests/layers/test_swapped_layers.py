import torch
from timm.layers import Mlp, PatchEmbed
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn
from torch.testing import assert_close

from linvit.layers.swapped import GlobalSwinBlock, GridPatchEmbed, LocalMlp
from linvit.layers.token_attention import CurrentGrid, TokenAttention


def test_patch_embed_notes_the_grid_and_is_the_same_layer():
    embed, source = PatchEmbed(32, 8, 3, 16, strict_img_size=False), CurrentGrid()
    watching = GridPatchEmbed.watching(embed, source)
    x = torch.randn(1, 3, 24, 40)
    assert torch.equal(watching(x), embed(x))
    assert source.size == (3, 5)
    assert watching.proj is embed.proj
    watching.set_input_size(img_size=(16, 24))
    assert (watching.grid_size, embed.grid_size) == ((2, 3), (4, 4))


def test_patch_embed_counts_padded_patches():
    source = CurrentGrid()
    GridPatchEmbed.watching(PatchEmbed(32, 8, strict_img_size=False, dynamic_img_pad=True), source)(
        torch.zeros(1, 3, 17, 30)
    )
    assert source.size == (3, 4)


def test_patch_embed_may_be_watched_again():
    first, second = CurrentGrid(), CurrentGrid()
    embed = GridPatchEmbed.watching(PatchEmbed(32, 8), first)
    GridPatchEmbed.watching(embed, second)(torch.zeros(1, 3, 32, 32))
    assert (first.size, second.size) == (None, (4, 4))


def test_global_block_is_swins_with_one_window():
    """The window as large as the map and no relative positions: softmax attention gives what Swin's block gives."""
    block = SwinTransformerBlock(16, (3, 5), num_heads=2, window_size=(3, 5)).eval()
    nn.init.zeros_(block.attn.relative_position_bias_table)
    attention = TokenAttention(16, 2, "softmax", (3, 5))
    attention.qkv, attention.proj = block.attn.qkv, block.attn.proj
    x = torch.randn(2, 3, 5, 16)
    assert_close(GlobalSwinBlock(block, attention)(x), block(x))


def test_local_mlp_is_timms_where_its_convolution_is_the_identity():
    mlp, attention = Mlp(8, 12, drop=0.0).eval(), TokenAttention(8, 2, "linear", (3, 4), num_prefix=1)
    local = LocalMlp(mlp, attention)
    x = torch.randn(2, 13, 8)
    attention(x)
    with torch.no_grad():
        local.conv.weight.zero_()[:, :, 1, 1] = 1
        local.conv.bias.zero_()
    assert_close(local(x), mlp(x))
    with torch.no_grad():
        local.conv.weight.zero_()[:, :, 0, 1] = 1  # takes the token above
    y = local(x)
    assert_close(y[:, 0], mlp(x)[:, 0])
    assert_close(y[:, 1 + 4 :], local.fc2(local.act(local.fc1(x[:, 1:-4]))))
    assert_close(y[:, 1:5], local.fc2.bias.expand(2, 4, 8))
