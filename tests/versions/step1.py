"""Wrong and right answers to the exercises of step 1; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "rms_norm_backward": Versions(
        wrong=[
            Wrong("the root mean square is taken for a constant", " - normalised * common)", ")", "has to be 0"),
            Wrong("each token keeps its own gradient of the weight", ".flatten(0, -2).sum(0)", "", "has shape [3, 4]"),
            Wrong("eps is forgotten", "keepdim=True) + eps)", "keepdim=True))", "and eps = 0.5"),
        ],
        right='''
def rms_norm_backward(x, weight, grad, eps):
    D = x.shape[-1]
    r = 1 / torch.sqrt((x * x).sum(-1) / D + eps)
    h = grad * weight
    dot = torch.einsum("...d,...d->...", h, x)
    grad_x = torch.empty_like(x)
    for j in range(D):
        grad_x[..., j] = h[..., j] * r - x[..., j] * r**3 * dot / D
    grad_weight = torch.zeros_like(weight)
    for row, factor, one in zip(x.reshape(-1, D), r.reshape(-1), grad.reshape(-1, D)):
        grad_weight += row * factor * one
    return grad_x, grad_weight
'''),
    "rotary": Versions(
        wrong=[
            Wrong("no minus", "torch.cat([-x2, x1]", "torch.cat([x2, x1]", "length of a pair"),
            Wrong("the minus at the wrong half", "torch.cat([-x2, x1]", "torch.cat([x2, -x1]", "the other way"),
            Wrong("neighbours form the pairs", "torch.cat([-x2, x1], dim=-1)",
                  "torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)", "length of a pair"),
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
        ],
        right='''
def forward(self, x, cos, sin):
    batch, seq_len, _ = x.shape
    q = self.q_proj(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
    k = self.k_proj(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
    v = self.v_proj(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
    q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    shared = k.size(1)
    q = q.view(batch, shared, -1, seq_len, self.head_dim)  # (B, K, H/K, T, hd)
    scores = torch.einsum("bkgid,bkjd->bkgij", q, k) / self.head_dim**0.5
    later = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    out = torch.einsum("bkgij,bkjd->bikgd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
    return self.out_proj(out.flatten(2))
'''),
}
