"""Every class of transformers with a loss over words, in small: the table of docs/models-tried.md.

python -m tests.frameworks.every_class                            # rewrites it: a quarter of an hour
python -m tests.frameworks.every_class LlamaForCausalLM BertForMaskedLM   # these classes only
"""

import copy
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe import GPipe

from .families import transformers
from .table import distance, gradients, reason, set_dropout

NOT_TRIED = "not tried"
PAGE = Path(__file__).parents[2] / "docs" / "models-tried.md"
ROWS, LENGTH, LABELS, WORDS = 6, 12, 3, 96
SETTINGS = {
    32: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim proj_size moe_intermediate_size "
    "pooler_hidden_size",
    64: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner max_position_embeddings n_positions",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads num_experts "
    "encoder_attention_heads decoder_attention_heads num_local_experts n_routed_experts conv_kernel",
    2: "encoder_layers decoder_layers num_decoder_layers num_key_value_heads num_experts_per_tok eos_token_id",
    8: "d_kv head_dim rotary_dim sliding_window state_size ssm_state_size qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "mamba_d_state",
    16: "q_lora_rank kv_lora_rank chunk_size mamba_chunk_size",
    1: "bos_token_id n_group topk_group first_k_dense_replace",
    WORDS: "vocab_size",
}
TASKS = {
    "next word": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked words": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "text to text": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "class": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "span": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}


@cache
def classes() -> dict[str, tuple[str, str]]:
    """The family and the task of each class, by its name."""
    found: dict[str, tuple[str, str]] = {}
    for task, mapping in TASKS.items():
        for names in getattr(transformers.models.auto.modeling_auto, mapping).values():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, (re.split("For|(?:With)?LMHead", name)[0], task))
    there = set(dir(transformers))  # hasattr would import all models
    return {name: place for name, place in found.items() if name in there}


class NotMadeError(Exception):
    """The settings do not make the class small, or the plain model fails on the batch or is not finite."""


def outcome(name: str) -> str:
    """Return "equal", or the error that rejects the class.

    Raises:
        NotMadeError: there is nothing to compare.
        AssertionError: the pipe's results differ from the model's.
    """
    task = classes()[name][1]
    inputs = batch(task)
    try:
        model = small(getattr(transformers, name), task)
        plain, twin = copy.deepcopy(model), copy.deepcopy(model)
        expected = plain(**inputs).loss
        again = twin(**inputs).loss
        expect_close(again, expected)
        expected.backward()
        again.backward()
        assert distance(gradients(twin), gradients(plain)) < 1e-4
    except Exception as error:
        raise NotMadeError(f"{error!r:.200}") from error
    if not expected.isfinite():
        raise NotMadeError("its loss is not finite")
    try:
        pipe = GPipe(model, devices=["cpu", "cpu"], chunks=3)
    except Exception as refusal:
        return reason(refusal)
    refused = ""
    for way in (step, call):
        model.zero_grad()
        try:
            loss = way(pipe, inputs)
        except Exception as refusal:
            refused = refused or f"{way.__name__} refused: {reason(refusal)}"
            continue
        expect_close(loss, expected)
        assert distance(gradients(model), gradients(plain)) < 1e-3
    if not refused:
        expect_trained_alike(pipe, plain, inputs)
    pipe.eval()
    if not refused:
        try:
            expected = plain.eval()(**inputs).loss
        except Exception as error:
            raise NotMadeError(f"{error!r:.200}") from error
        expect_close(pipe.evaluate(**inputs), expected, 1e-3)
    pipe.close()
    return refused or "equal"


def expect_trained_alike(pipe: GPipe, plain: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Check that three consecutive steps of AdamW have equal losses."""
    own, other = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (pipe, plain))
    for _ in range(3):
        own.zero_grad()
        other.zero_grad()
        expected = plain(**inputs).loss
        expected.backward()
        expect_close(pipe.step(**inputs), expected, 1e-3)
        own.step()
        other.step()


def expect_close(found: Any, expected: Tensor, bound: float = 1e-4) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected.detach(), rtol=bound, atol=bound)


def small(kind: Any, task: str) -> nn.Module:
    config = kind.config_class()
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    config.num_labels = 2 if task == "span" else LABELS
    for value, names in SETTINGS.items():
        for name in names.split():
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
        if name.endswith("layer_types") and isinstance(value, list):
            setattr(config, name, value[:4])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > 30_000_000:
        raise NotMadeError("the settings do not make it small")
    torch.manual_seed(0)
    model = kind(config).train()
    set_dropout(model, 0.0)
    return model


def batch(task: str) -> dict[str, Tensor]:
    """Return rows of different lengths, the later ones with few labels."""
    torch.manual_seed(3)
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH))
    ends = LENGTH - torch.arange(ROWS)[:, None]
    mask = torch.arange(LENGTH) < ends
    tokens.scatter_(1, ends - 1, 2)  # the end of a text
    inputs = {"input_ids": tokens * mask, "attention_mask": mask.long()}
    few = mask & ((torch.arange(ROWS)[:, None] < 3) | (torch.arange(LENGTH) < 3))
    if task == "class":
        return {**inputs, "labels": torch.randint(LABELS, (ROWS,))}
    if task == "span":
        return {**inputs, "start_positions": torch.arange(ROWS), "end_positions": torch.arange(1, ROWS + 1)}
    words = torch.randint(LABELS, tokens.shape) if task == "tokens" else tokens
    return {**inputs, "labels": words.masked_fill(~few, -100)}


def step(pipe: GPipe, inputs: dict[str, Tensor]) -> Tensor:
    return pipe.step(**inputs)


def call(pipe: GPipe, inputs: dict[str, Tensor]) -> Tensor:
    loss = pipe(**inputs).loss
    loss.backward()
    return loss


def measured(name: str) -> str:
    """The outcome, or "not tried"."""
    try:
        return outcome(name)
    except NotMadeError:
        return NOT_TRIED
    except AssertionError as error:
        return f"computes something else: {' '.join(str(error).split()):.100}"


def told() -> dict[str, str]:
    """Return the outcomes listed in the page, by class."""
    equal, refused, others = PAGE.read_text().split("\n## ")[1:]
    return {
        **dict.fromkeys(re.findall(r"`(\w+)`", equal), "equal"),
        **dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", refused, re.MULTILINE)),
        **dict.fromkeys(re.findall(r"`(\w+)`", others), NOT_TRIED),
    }


def write(found: dict[str, str]) -> None:
    """Update the figures and tables of the page with the outcome of each class."""
    equal: dict[str, list[str]] = {}
    for name in sorted(found):
        if found[name] == "equal":
            equal.setdefault(classes()[name][0], []).append(f"`{name}`")
    refused = [f"| `{name}` | {why} |" for name, why in sorted(found.items()) if why not in ("equal", NOT_TRIED)]
    others = [f"`{name}`" for name in sorted(found) if found[name] == NOT_TRIED]
    head = PAGE.read_text().partition("\n## ")[0]
    for pattern, figures in {
        r"transformers [\d.]+ that": f"transformers {transformers.__version__} that",
        r"\d+ classes of \d+ families": f"{sum(map(len, equal.values()))} classes of {len(equal)} families",
        r"\d+ classes are refused": f"{len(refused)} classes are refused",
        r"\d+ were not tried": f"{len(others)} were not tried",
    }.items():
        head = re.sub(pattern, figures, head)
    families = [f"| {family} | {', '.join(names)} |" for family, names in equal.items()]
    lines = ["## Equal\n\n| family | classes |\n|---|---|", *families]
    lines += ["\n## Refused\n", *(["| class | why |\n|---|---|", *refused] if refused else ["None."])]
    PAGE.write_text("\n".join([head, *lines, f"\n## Not tried\n\n{', '.join(others)}.\n"]))


if __name__ == "__main__":
    known = told() if sys.argv[1:] else {}
    write({**known, **{name: measured(name) for name in sys.argv[1:] or classes()}})
