"""Random small models with random inputs, one for each seed, and the shipped kernels that fit them."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import transformers

KERNELS = {
    "RMSNorm": "builtin:RMSNorm",
    "LayerNorm": "builtin:LayerNorm",
    "SwiGLUMLP": "builtin:SwiGLUMLP",
    "GeGLUMLP": "builtin:GeGLUMLP",
    "rotary_pos_emb": "builtin:rotary_pos_emb",
    "ForCausalLM": "builtin:FusedLinearCrossEntropy",
    "ForCausalLMLoss": "builtin:ForCausalLMLoss",
}
FITTING = {
    "Qwen3": ("RMSNorm", "SwiGLUMLP", "rotary_pos_emb", "ForCausalLM", "ForCausalLMLoss"),
    "Llama": ("RMSNorm", "SwiGLUMLP", "rotary_pos_emb", "ForCausalLM", "ForCausalLMLoss"),
    "Mistral": ("RMSNorm", "SwiGLUMLP", "rotary_pos_emb", "ForCausalLM"),
    "Gemma": ("GeGLUMLP", "rotary_pos_emb"),
    "GPTNeoX": ("LayerNorm",),
}
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)


def seeded(seed: int) -> tuple[Any, dict[str, torch.Tensor], tuple[str, ...]]:
    """A model, what to call it with, and the layers that it has shipped kernels for."""
    random = Random(seed)
    family = random.choice(list(FITTING))
    heads, dim = random.choice([2, 4, 6]), random.choice([8, 16, 24])
    sizes: dict[str, Any] = {
        "vocab_size": random.choice([50, 128, 1000]),
        "hidden_size": heads * dim,
        "intermediate_size": random.choice([24, 40, 96]),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "tie_word_embeddings": random.random() < 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family != "GPTNeoX":
        sizes |= {"num_key_value_heads": random.choice([heads // 2, heads]), "head_dim": dim}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # weights as after training: norms differ from 1, biases from 0
            parameter.add_(torch.randn_like(parameter) * random.choice([0.02, 0.1]))
    ids = torch.randint(sizes["vocab_size"], (random.choice([1, 2, 3]), random.choice([1, 5, 16, 33])))
    labels = ids.where(torch.rand(ids.shape) > 0.2, -100)
    labels[0, -1] = ids[0, -1]  # one label counts, or the loss is nan
    return model.to(random.choice(DTYPES)), {"input_ids": ids, "labels": labels}, FITTING[family]
