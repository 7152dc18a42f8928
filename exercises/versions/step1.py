"""Wrong and right answers to the exercises of step 1."""

from versions import Versions, Wrong

VERSIONS = {
    "rms_norm_backward": Versions(
        wrong=[
            Wrong("the root mean square is taken for a constant", " - normalised * common)", ")", "has to be 0"),
            Wrong("each token keeps its own gradient of the weight", ".flatten(0, -2).sum(0)", "", "has shape [3, 4]"),
            Wrong("eps is forgotten", "keepdim=True) + eps)", "keepdim=True))", "and eps = 0.5"),
            Wrong("x is changed", "normalised = x * rms_inverse", "normalised = x.mul_(rms_inverse)", "it changes `x`"),
        ]),
    "rotary": Versions(
        wrong=[
            Wrong("no minus", "torch.cat([-x2, x1]", "torch.cat([x2, x1]", "length of a pair"),
            Wrong("the minus at the wrong half", "torch.cat([-x2, x1]", "torch.cat([x2, -x1]", "the other way"),
            Wrong("neighbours form the pairs", "torch.cat([-x2, x1], dim=-1)",
                  "torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)", "length of a pair"),
            Wrong("half of x is detached", "torch.cat([-x2, x1]", "torch.cat([-x2.detach(), x1]", "the gradient of x"),
            Wrong("the angles are changed", "torch.cat([-x2, x1], dim=-1) * sin",
                  "torch.cat([-x2, x1], dim=-1) * sin.mul_(1).clone() + 0 * sin.add_(1)[..., :1]", "or the angles"),
        ],
        right='''
def apply_rotary(x, cos, sin):
    half = x.shape[-1] // 2
    angle = torch.complex(cos[:, :half], sin[:, :half])
    turned = torch.complex(x[..., :half], x[..., half:]) * angle
    return torch.cat([turned.real, turned.imag], dim=-1)
'''),
    "grouped_query_attention": Versions(
        wrong=[
            Wrong("the block of heads is repeated as a whole", "is_grouped = q.size(1) != k.size(1)",
                  "k, v = (heads.repeat(1, q.size(1) // k.size(1), 1, 1) for heads in (k, v))\n    is_grouped = False",
                  "query head 1"),
            Wrong("tokens read from later ones", "is_causal=True", "is_causal=False", "must not read from later"),
            Wrong("heads and tokens are not exchanged",
                  "out.transpose(1, 2).reshape", "out.reshape", "in each other's place"),
            Wrong("the keys are detached", "out = F.scaled_dot_product_attention(q, k, v,",
                  "out = F.scaled_dot_product_attention(q, k.detach(), v,", "the gradient of k_proj.weight is None"),
            Wrong("the scale of heads of 4", "is_causal=True,", "is_causal=True, scale=0.5,",
                  "heads of 6, 3 tokens, query head 0"),
            Wrong("nothing goes through out_proj", "self.out_proj(out.transpose(1, 2).reshape(batch, seq_len, -1))",
                  "out.transpose(1, 2).reshape(batch, seq_len, -1)", "the gradient of out_proj.weight is None"),
        ]),
}
