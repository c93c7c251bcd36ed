"""A Qwen2 model's shape: read from a `config.json`, checked, and turned into the names and shapes of its weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a Qwen2 decoder. Field names are those of Hugging Face's `config.json`.

    Raises:
        ValueError: a number that no Qwen2 decoder can have; the message names the field and its value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config: {name} is {value!r}; it must be a whole number of at least 1")
        if not isinstance(self.tie_word_embeddings, bool):
            raise ValueError(f"config: tie_word_embeddings is {self.tie_word_embeddings!r}; it must be true or false")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"config: hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}, and no head_dim is given"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if not isinstance(self.head_dim, int) or self.head_dim < 1 or self.head_dim % 2:
            raise ValueError(
                f"config: head_dim is {self.head_dim!r}; it must be even and positive: rotary embedding turns pairs"
            )
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"config: {name} is {value!r}; it must be a positive number")
        for token in self.eos_token_id:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"config: eos_token_id {token} is outside the vocabulary of {self.vocab_size}")

    @property
    def q_size(self) -> int:
        """Rows of `q_proj`: query heads × head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of `k_proj`, and of `v_proj`: KV heads × head_dim."""
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_dict(cls, values: Mapping, where: str = "config") -> "ModelConfig":
        """Read a Hugging Face configuration.

        Raises:
            ValueError: it describes another architecture, a rotary scaling or a sliding window that is not
                implemented here, or lacks a field; the message names the key and `where` it stands.
        """
        kind = values.get("model_type")
        if kind != "qwen2":
            raise ValueError(f"{where}: model_type is {kind!r}; nanoqwen reads 'qwen2' (Qwen2 and Qwen2.5)")
        if (act := values.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"{where}: hidden_act is {act!r}; Qwen2's is 'silu'")
        if values.get("use_sliding_window"):
            raise ValueError(f"{where}: use_sliding_window is true; nanoqwen attends to the whole context")
        for key in ("quantization_config", "rope_scaling", "rope_parameters"):
            if not isinstance(values.get(key), Mapping | None):
                raise ValueError(f"{where}: {key} is {values[key]!r}; it must be an object or null")
        if values.get("quantization_config"):
            method = values["quantization_config"].get("quant_method", "unknown")
            way = "nanoqwen.models.load runs them" if method == "awq" else "use the checkpoint's bf16 or fp16 release"
            raise ValueError(f"{where}: the weights are quantised (quant_method {method!r}); {way}")
        rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"{where}: rope type {rope_type!r} is not implemented; only 'default' is")
        known = {name: values[name] for name in cls.__dataclass_fields__ if values.get(name) is not None}
        if "rope_theta" in rope:
            known["rope_theta"] = rope["rope_theta"]
        # Qwen2's own default in the field's home; files leave out what is default.
        known.setdefault("rope_theta", 10000.0)
        known.setdefault("num_key_value_heads", values.get("num_attention_heads"))
        known["eos_token_id"] = _stop_tokens(values, where)
        needed = [name for name in list(cls.__dataclass_fields__)[:6] if known.get(name) is None]
        if needed:
            raise ValueError(f"{where}: {', '.join(needed)} missing")
        try:
            return cls(**known)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> "ModelConfig":
        """Read a `config.json`, with the stop tokens of a `generation_config.json` beside it where there is one."""
        path = Path(path)
        return cls.from_dict(read_object(path), where=str(path)).with_stops_of(path.with_name("generation_config.json"))

    def with_stops_of(self, generation: Path) -> "ModelConfig":
        """The configuration with the stop tokens of a `generation_config.json` put first, where there is that file.

        Raises:
            ValueError: the file holds no object, or no token ids of this vocabulary.
        """
        if not generation.is_file():
            return self
        more = _stop_tokens(read_object(generation), str(generation))
        try:
            return replace(self, eos_token_id=tuple(dict.fromkeys((*more, *self.eos_token_id))))
        except ValueError as error:
            raise ValueError(f"{generation}: {error}") from None

    def to_dict(self) -> dict:
        """The Hugging Face configuration that `from_dict` and `transformers` read back."""
        values = asdict(self)
        values["eos_token_id"] = list(self.eos_token_id) or None
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", **values}

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, in the order in which a decode step reads them.

        A tied model has no `lm_head.weight`: its head is the embedding.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_hidden_layers):
            layer = f"model.layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (hidden,)
            for name, rows in (("q", self.q_size), ("k", self.kv_size), ("v", self.kv_size)):
                shapes[layer + f"self_attn.{name}_proj.weight"] = (rows, hidden)
                shapes[layer + f"self_attn.{name}_proj.bias"] = (rows,)
            shapes[layer + "self_attn.o_proj.weight"] = (hidden, self.q_size)
            shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
            shapes[layer + "mlp.gate_proj.weight"] = (inner, hidden)
            shapes[layer + "mlp.up_proj.weight"] = (inner, hidden)
            shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def read_object(path: Path) -> dict:
    """The object that a JSON file holds.

    Raises:
        ValueError: it cannot be read, is no JSON, or holds something else; the message names the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds a {type(values).__name__}, not an object")
    return values


def _stop_tokens(values: Mapping, where: str) -> tuple[int, ...]:
    """`eos_token_id`, which files give as a number, as a list, as null or not at all."""
    eos = values.get("eos_token_id")
    tokens = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
        raise ValueError(f"{where}: eos_token_id is {eos!r}; it must be a token id, a list of them, or null")
    return tuple(tokens)


def _coder(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab, hidden, inner, layers, heads, kv_heads, tie_word_embeddings=tied, eos_token_id=(151645, 151643)
    )


SHAPES: dict[str, ModelConfig] = {
    "qwen2.5-coder-0.5b": _coder(151936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-coder-1.5b": _coder(151936, 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-coder-7b": _coder(152064, 3584, 18944, 28, 28, 4, tied=False),
}
"""The shapes of the Qwen2.5-Coder models of this course (from their `config.json`)."""
