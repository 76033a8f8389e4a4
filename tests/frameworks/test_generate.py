"""A pipe generates what its model generates."""

import copy
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .families import EVERY, transformers
from .pipelined import pipelined

pytest.importorskip("accelerate", reason="Trainer needs accelerate; see nox -s frameworks")

WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 20}, "beams": {"num_beams": 3}}


def prompts(name: str, side: str = "left", rows: int = 4) -> dict[str, Tensor]:
    inputs = {key: value for key, value in EVERY[name].inputs(rows).items() if key != "decoder_input_ids"}
    return {key: value.flip(1) if side == "left" else value for key, value in inputs.items()}


def piped(model: nn.Module) -> GPipe:
    return GPipe(model, devices=["cpu"] * 2, chunks=2)


def same(model: Any, other: Any, seed: int = 3, **given: Any) -> Any:
    """Check that both generate the same tokens and scores, and return them."""
    found = []
    for each in (model, other):
        torch.manual_seed(seed)
        output = each.generate(**given, max_new_tokens=6, return_dict_in_generate=True, output_scores=True)
        found.append([output.sequences, *output.scores])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    return found[0]


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Mamba", "T5", "BART"])
def test_tokens_are_those_of_the_trained_model(name: str) -> None:
    """Tokens are compared in evaluation and in training with dropout, with padding on either side."""
    model: Any = EVERY[name].make(dropout=0.3)
    pipe = piped(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    pipe.step(**prompts(name), labels=prompts(name)["input_ids"])
    optimizer.step()
    plain = copy.deepcopy(model)
    for training in (True, False):
        pipe.train(training)
        plain.train(training)
        for way in WAYS.values():
            same(pipe, plain, **prompts(name), **way)
        assert pipe.training == model.training == training
    same(pipe, plain, **prompts(name, "right"))
    assert torch.equal(*(each.generate(**prompts(name), max_length=15) for each in (pipe, plain)))
    plain.load_state_dict(before)
    with pytest.raises(AssertionError):  # which shows that the trained weights are used above
        same(pipe, plain, **prompts(name))


def test_a_trainer_predicts_with_generated_tokens(tmp_path: Path) -> None:
    model = EVERY["T5"].make().float()
    plain = copy.deepcopy(model)
    rows = EVERY["T5"].inputs(8)
    data = [{"input_ids": a, "labels": b} for a, b in zip(rows["input_ids"], rows["decoder_input_ids"], strict=True)]
    arguments = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=3, learning_rate=1e-2,
        predict_with_generate=True, generation_max_length=8, report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    results = []
    pipe = piped(model)
    for each in (pipe, plain):
        trainer = transformers.Seq2SeqTrainer(model=each, args=arguments, train_dataset=data)
        with pipelined(pipe, 2) if each is pipe else nullcontext():
            trainer.train()
            results.append(trainer.predict(data))
    assert (results[0].predictions == results[1].predictions).all()
    assert results[0].metrics["test_loss"] == pytest.approx(results[1].metrics["test_loss"], rel=1e-5)


def test_a_pipeline_of_text_and_streamers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{k}": k for k in range(128)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    model = EVERY["Llama"].make().eval()
    pipe, plain = piped(model), copy.deepcopy(model)
    texts = [
        transformers.pipeline("text-generation", model=each, tokenizer=tokenizer)(
            ["w5 w6 w7", "w8"], batch_size=2, max_new_tokens=5, do_sample=False
        )
        for each in (pipe, plain)
    ]
    assert texts[0] == texts[1]
    pieces = []
    for each in (pipe, plain):
        streamer = transformers.TextIteratorStreamer(tokenizer, timeout=60)
        given = {**tokenizer("w5 w6 w7", return_tensors="pt"), "streamer": streamer, "max_new_tokens": 5}
        writer = threading.Thread(target=each.generate, kwargs=given)
        writer.start()
        pieces.append(list(streamer))
        writer.join(60)
    assert pieces[0] == pieces[1]
    assert len(pieces[0]) > 5  # the prompt, then one piece per word
