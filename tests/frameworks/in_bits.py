"""Small Llamas, saved in 32 bits and loaded in 4."""

from pathlib import Path
from typing import Any

import torch

from .families import transformers


def saved_llama(folder: Path, **sizes: int) -> Path:
    """Save a Llama of random weights, the same in every call, in ``folder``."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def in_4_bits(folder: Path) -> Any:
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits)
