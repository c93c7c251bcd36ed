"""Qwen2 in plain PyTorch: the oracle that every kernel of this project is checked against.

Read it top to bottom. Shapes stand on the lines that make them; B sequences of T new tokens each, S tokens in all so
far, D = head_dim. Architecture: the Qwen2 technical report (arXiv 2407.10671); lesson: notebook 01.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoqwen.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, the mean square taken in fp32 (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rope_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation angles of `positions` (T): two tensors (T, D)."""
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device).float()
    # 1 / θ^x and not θ^-x: their last bits differ, and thousands of positions on that shows in the logits.
    angles = positions.float()[:, None] * (1.0 / config.rope_theta ** (pairs / config.head_dim))  # (T, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # (T, D)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its angle: RoPE with the halves split (Su et al., 2021)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class KVCache:
    """Keys and values of all layers: two tensors (layers, B, KV heads, capacity, D).

    Attention reads the first `extent` places. Eager decoding keeps `extent` at the number of tokens seen; a captured
    graph, whose shapes are frozen, sets it once to `capacity` and leaves the rest to the mask.
    """

    def __init__(self, config: ModelConfig, capacity: int, batch: int = 1, dtype=torch.float32, device="cpu"):
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, config.head_dim)
        # Zeros, not empty: the mask multiplies unseen places by 0, and 0 · NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.extent = 0

    def append(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, KV heads, T, D) at `positions` (T); return the layer's K and V up to `extent`."""
        self.keys[layer].index_copy_(2, positions, k)
        self.values[layer].index_copy_(2, positions, v)
        return self.keys[layer, :, :, : self.extent], self.values[layer, :, :, : self.extent]


class Attention(nn.Module):
    """Grouped-query attention: each KV head serves heads / kv_heads query heads (Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.q_size, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_size, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_size, bias=True)
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, rope, mask: Tensor, cache: KVCache | None) -> Tensor:
        batch, tokens, _ = x.shape
        qk = torch.cat((self.q_proj(x), self.k_proj(x)), dim=-1)  # (B, T, (heads + kv_heads)·D): turned together
        qk = rotate(qk.unflatten(-1, (-1, self.head_dim)).transpose(1, 2), *rope)  # (B, heads + kv_heads, T, D)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)  # (B, heads, T, D), (B, kv_heads, T, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, kv_heads, T, D)
        if cache is not None:
            k, v = cache.append(self.layer, k, v, positions)  # (B, kv_heads, S, D)
        q = q.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)  # (B, kv_heads, group·T, D): no copy of K or V
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5  # (B, kv_heads, group·T, S)
        scores = scores.masked_fill(mask, float("-inf"))
        out = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v  # (B, kv_heads, group·T, D)
        out = out.unflatten(2, (-1, tokens)).flatten(1, 2)  # (B, heads, T, D)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer: attention, then MLP, each on a normed copy and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, final norm. Parameter names are the checkpoint's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen2(nn.Module):
    """The decoder with its head. `num_tokens`: how many of the `vocab_size` rows are real tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.num_tokens = config, config.vocab_size
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None, last=False):
        """tokens (B, T) at `positions` (T; default 0…T−1) → logits (B, T, vocab_size), or (B, 1, …) if `last`."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.model.embed_tokens(tokens)  # (B, T, hidden)
        rope = rope_tables(self.config, positions, x.dtype)
        seen = cache.extent if cache is not None else tokens.shape[1]
        # True where token j lies ahead of token i; once for each query head of a group: (group·T, S)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        mask = (torch.arange(seen, device=tokens.device) > positions[:, None]).repeat(group, 1)
        for layer in self.model.layers:
            x = layer(x, positions, rope, mask, cache)
        x = self.model.norm(x[:, -1:] if last else x)
        return self.lm_head(x)


def build(config: ModelConfig, weights: dict[str, Tensor]) -> Qwen2:
    """A decoder that holds `weights` (names and shapes of `config.weight_shapes()`), without copying them."""
    with torch.device("meta"):
        model = Qwen2(config)
    if config.tie_word_embeddings:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    model.load_state_dict(weights, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.requires_grad_(False).eval()
