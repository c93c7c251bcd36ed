"""Small random Qwen2 models, their `transformers` twins, and their files: safetensors, GGUF, a trained tokenizer."""

import json
from pathlib import Path

import gguf
import tokenizers
import torch
from gguf import GGMLQuantizationType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

from nanoqwen.config import ModelConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]  # added, not `special`
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

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


def save_toy(folder: Path, config: ModelConfig = TOY, weights: dict | None = None, **how) -> Path:
    """A Hugging Face folder as `transformers` writes it; `how` goes to `save_pretrained`."""
    transformers_twin(config, weights or random_weights(config)).save_pretrained(folder, **how)
    return folder


def toy_tokenizer(size: int = 400) -> tokenizers.Tokenizer:
    """A byte-level BPE of `size` entries with Qwen's rules, trained on this folder's source, then 8 added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(Path(__file__).read_text(encoding="utf-8").splitlines(True), trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    return tokenizer


def save_tokenizer(
    folder: Path, tokenizer: tokenizers.Tokenizer, chat_template: str | None = CHATML, **settings
) -> Path:
    """`tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **settings}
    if chat_template is not None:
        values["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    tokenizer: tokenizers.Tokenizer | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    architecture: str = "qwen2",
) -> dict[str, torch.Tensor]:
    """Write a GGUF as llama.cpp's converter does: matrices as `kind`, vectors as fp32, padding tokens at the end.

    Returns what the file then holds: the weights, dequantised to fp32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    tokenizer = tokenizer or toy_tokenizer()
    inner = json.loads(tokenizer.to_str())
    vocab = {**inner["model"]["vocab"], **{token["content"]: token["id"] for token in inner["added_tokens"]}}
    texts = sorted(vocab, key=vocab.get)
    pads = [f"[PAD{i}]" for i in range(len(texts), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts + pads)
    control, user, unused = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED
    types = [
        control if text in SPECIAL or "fim" in text else user if text in TAGS else gguf.TokenType.NORMAL
        for text in texts
    ]
    writer.add_token_types(types + [unused] * len(pads))
    writer.add_token_merges([" ".join(merge) for merge in inner["model"]["merges"]])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_pad_token_id(vocab["<|endoftext|>"])
    writer.add_chat_template(CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    held = {}
    for name, weight in weights.items():
        this = kind if weight.dim() == 2 else GGMLQuantizationType.F32
        data = gguf.quants.quantize(weight.numpy(), this)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=this)
        held[name] = torch.from_numpy(gguf.quants.dequantize(data, this).copy()).reshape(weight.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
