"""Small random Qwen2 models, and their `transformers` twins."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nanoqwen.config import ModelConfig

TOY = ModelConfig(257, 64, 128, 2, 4, 2, max_position_embeddings=512)


def random_weights(
    config: ModelConfig, seed: int = 0, bias: float = 1.0, logits: float = 3.0
) -> dict[str, torch.Tensor]:
    """Normal fp32 weights that keep activations of order 1; logits have a deviation of about `logits`."""
    generator = torch.Generator().manual_seed(seed)

    def deviation(name: str, shape: tuple[int, ...]) -> float:
        if name.endswith("bias"):
            return bias
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return logits * config.hidden_size**-0.5
        return 0.2 if name.endswith("norm.weight") else shape[1] ** -0.5

    weights = {
        name: torch.randn(shape, generator=generator) * deviation(name, shape)
        for name, shape in config.weight_shapes().items()
    }
    return {name: 1 + w if name.endswith("norm.weight") else w for name, w in weights.items()}


def transformers_twin(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Qwen2ForCausalLM:
    """The same model in `transformers`, configured from our `to_dict`."""
    theirs = Qwen2Config.from_dict(config.to_dict())
    theirs._attn_implementation = "eager"
    twin = Qwen2ForCausalLM(theirs).eval().requires_grad_(False)
    if config.tie_word_embeddings:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    twin.load_state_dict(weights)
    return twin
