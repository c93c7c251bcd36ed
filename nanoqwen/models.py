"""From a model's name to a decoder and its tokenizer, ready to run."""

import torch

from nanoqwen import packfile, reference
from nanoqwen.awq import is_awq, open_awq
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.config import ModelConfig
from nanoqwen.fetch import find_model
from nanoqwen.tokenizer import Tokenizer

# Cosines of many numbers come from MKL on a CPU, which picks its functions at the first call. Where two threads make it
# together, one of them may get functions of low accuracy, 1.5e-4 off instead of 1e-7: so one thread makes it, here.
torch.zeros(1).cos()


def load(
    name: str | None = None, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> tuple[reference.Qwen2, Tokenizer]:
    """The reference decoder and tokenizer of a model.

    Args:
        name: a name such as `qwen2.5-coder-0.5b` or `nanoqwen-tiny`, a Hugging Face folder, a GGUF file or a
            `.nanoqwen` file; None takes the 0.5B where it has been fetched, else the tiny model. AWQ weights stay
            packed on a GPU, whose kernels read them so; on a CPU they are dequantised, once.
        dtype: of the weights and of the arithmetic.

    Raises:
        FileNotFoundError: the model is not on this machine; the message says how to fetch it.
        ValueError: its files are not a whole, readable Qwen2 checkpoint; the message names what is wrong.
    """
    path = find_model(name)
    if path.suffix == packfile.SUFFIX and path.is_file():
        return packfile.load(path, dtype, device)
    checkpoint = open_awq(path) if is_awq(path) else open_checkpoint(path)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_path)
    if is_awq(path) and torch.device(device).type == "cuda":
        model = checkpoint.model(dtype, device)
    else:
        model = reference.build(checkpoint.config, checkpoint.weights(dtype, device))
    model.num_tokens = min(tokenizer.num_tokens, checkpoint.config.vocab_size)
    return model, tokenizer


def random(config: ModelConfig, dtype: torch.dtype, device: str | torch.device, seed: int = 0) -> reference.Qwen2:
    """A decoder of this shape with random weights made on the device: for speed runs that need no meaning.

    Matrices are normal with deviation 0.02 and norms are ones, so that activations stay finite in fp16.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        if len(shape) == 1 and name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
    return reference.build(config, weights)
